"""The cache: what is published is whole, what is damaged is absent."""

from __future__ import annotations

import os
import pwd
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from tk import _cache as cache_module
from tk._cache import directory, write_atomically
from tk.aot.cache import Artifact, Cache, compress, open_cache
from tk.codegen import source

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


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, "home/.cache/tk"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/tk"),
        ({"XDG_CACHE_HOME": ""}, "home/.cache/tk"),
        ({"XDG_CACHE_HOME": "x"}, "home/.cache/tk"),  # the XDG specification: a relative path is ignored
        ({"XDG_CACHE_HOME": "./x"}, "home/.cache/tk"),
        ({"XDG_CACHE_HOME": "~/x"}, "home/.cache/tk"),
        ({"TK_CACHE_DIR": "/y", "XDG_CACHE_HOME": "/x"}, "/y"),
        ({"TK_CACHE_DIR": "", "XDG_CACHE_HOME": "/x"}, "/x/tk"),
        ({"TK_CACHE_DIR": "~/y"}, "home/y"),
        ({"TK_CACHE_DIR": "~"}, "home"),
        ({"TK_CACHE_DIR": "a/~/y"}, "a/~/y"),
    ],
    ids=str,
)
def test_where_the_cache_is(
    environment: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _environment(monkeypatch, environment, tmp_path / "home")
    wanted = Path(folder)
    if folder.startswith("home"):
        wanted = tmp_path / folder
    assert directory() == wanted


def _environment(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], home: Path) -> None:
    for name in ("TK_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(home), **environment}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("environment", [{}, {"XDG_CACHE_HOME": "x"}, {"TK_CACHE_DIR": "~/y"}], ids=str)
def test_a_user_without_a_home(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container that runs as a number. It is an OSError, as that of a folder that cannot be written is."""
    _environment(monkeypatch, environment, tmp_path)
    monkeypatch.delenv("HOME")

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(FileNotFoundError, match="no home directory; set TK_CACHE_DIR to a folder"):
        directory()
    messages: list[str] = []
    with open_cache(messages.append) as cache:
        cache.store(KEY, ARTIFACT)
    assert len(messages) == 1
    assert source.module("without_a_home", '"""Of a test."""\nONE = 1\n').ONE == 1


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
