"""The cache: what is published is whole, what is damaged is absent."""

from __future__ import annotations

import os
import zlib
from dataclasses import replace

import pytest

from tk import _cache as cache_module
from tk._cache import directory, write_atomically
from tk.aot.cache import Artifact, Cache, compress, open_cache

IMAGE = bytes(range(256)) * 40
ARTIFACT = Artifact(
    entry="k", threads=128, shared=0, cluster=1, global_scratch=0, global_scratch_alignment=1, profile_scratch=0,
    profile_scratch_alignment=1, tensor_maps=({"swizzle": 3, "block_size": [64, 64]},), registers=32, spill_bytes=0,
    seconds=0.5, size=len(IMAGE), hash="00" * 32, compressed=compress(IMAGE),
)  # fmt: skip
KEY = "ab" * 32


def test_round_trip(tmp_path):
    cache = Cache(tmp_path)
    assert cache.load(KEY) is None
    cache.store(KEY, ARTIFACT)
    assert cache.load(KEY) == ARTIFACT
    assert cache.load(KEY).image == IMAGE


def test_every_flipped_byte_of_an_image_is_noticed(tmp_path):
    cache = Cache(tmp_path)
    cache.store(KEY, ARTIFACT)
    data = cache.path(KEY).read_bytes()
    begin = data.index(b"\n") + 1
    for at in range(begin, len(data)):
        cache.path(KEY).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert cache.load(KEY) is None


@pytest.mark.parametrize("keep", [0, 10, 300, -1])
def test_a_truncated_entry_is_absent(tmp_path, keep):
    cache = Cache(tmp_path)
    cache.store(KEY, ARTIFACT)
    cache.path(KEY).write_bytes(cache.path(KEY).read_bytes()[:keep])
    assert cache.load(KEY) is None


def test_a_later_success_removes_the_failure(tmp_path):
    cache = Cache(tmp_path)
    log = cache.record_failure(KEY, "ptxas said no")
    assert log.read_text() == "ptxas said no"
    assert cache.load(KEY) is None
    cache.store(KEY, ARTIFACT)
    assert not log.exists()


def test_publishing_is_all_or_nothing(tmp_path, monkeypatch):
    """Interrupted before the rename, nothing is left, and what was there stays."""
    target = tmp_path / "folder" / "entry"
    write_atomically(target, b"old")
    synced = []
    monkeypatch.setattr(cache_module.os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))

    def no_rename(source, destination):
        assert synced == [3], "renamed before it was on the disk"
        raise OSError("no space left on device")

    monkeypatch.setattr(cache_module.os, "replace", no_rename)
    with pytest.raises(OSError, match="no space"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert os.listdir(target.parent) == ["entry"]


def test_an_entry_replaces_another_for_all_readers(tmp_path):
    cache = Cache(tmp_path)
    cache.store(KEY, ARTIFACT)
    with open(cache.path(KEY), "rb") as reader:
        cache.store(KEY, replace(ARTIFACT, entry="other"))
        assert b'"entry": "k"' in reader.read(), "a reader that was there before sees the old entry, whole"
    assert cache.load(KEY).entry == "other"


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("TK_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert directory() == tmp_path / ".cache" / "tk"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(directory()) == "/x/tk"
    monkeypatch.setenv("TK_CACHE_DIR", "/y")
    assert str(directory()) == "/y"


def test_a_folder_that_cannot_be_written_is_said_and_survived(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "file"))
    messages = []
    with open_cache(messages.append) as cache:
        cache.store(KEY, ARTIFACT)
        assert cache.load(KEY) == ARTIFACT
        folder = cache.folder
    assert not folder.exists()
    assert len(messages) == 1
    assert "TK_CACHE_DIR" in messages[0]


def test_compression_is_the_strongest_and_always_the_same():
    assert compress(IMAGE) == compress(bytes(IMAGE)) == zlib.compress(IMAGE, 9)
