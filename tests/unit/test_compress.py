"""Images in a pack: groups with a dictionary each, the same bytes every time, from the cache what was done before."""

from __future__ import annotations

import random

import pytest

from tk.aot import compress as module
from tk.aot.cache import Cache
from tk.aot.compress import MIN_BYTES, MIN_IMAGES, Group, compress, unpack
from tk.aot.errors import PackFormatError


def images(count: int, size: int = 9000, seed: int = 0) -> list[bytes]:
    """Alike, as kernels are, and each with something of its own."""
    rng = random.Random(seed)
    common = [rng.randbytes(512) for _ in range(40)]
    return [b"".join(rng.choices(common, k=size // 512)) + rng.randbytes(64) for _ in range(count)]


def unpacked(groups: list[Group], contents: list[bytes]) -> list[bytes]:
    out: list[bytes] = []
    for group in groups:
        d = group.dictionary
        content = unpack(d.frame, d.size) if d else None
        out += [unpack(f, len(contents[len(out) + i]), content) for i, f in enumerate(group.frames)]
    return out


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(module, "GROUP_BYTES", 1 << 20)


def test_a_few_images_stand_alone():
    contents = images(MIN_IMAGES - 1, 20_000)
    (group,) = compress(contents)
    assert group.dictionary is None
    assert unpacked([group], contents) == contents
    assert compress([]) == [Group(None, ())]


def test_small_images_stand_alone():
    contents = images(MIN_IMAGES, MIN_BYTES // MIN_IMAGES - 1000)
    assert compress(contents)[0].dictionary is None


def test_a_dictionary_pays():
    contents = images(MIN_IMAGES)
    (group,) = compress(contents)
    alone = sum(len(frame) for part in (contents[:32], contents[32:]) for frame in compress(part)[0].frames)
    assert group.dictionary is not None
    assert len(group.dictionary.frame) + sum(map(len, group.frames)) < alone / 2
    assert unpacked([group], contents) == contents


def test_the_same_images_give_the_same_bytes_whatever_the_jobs(small_groups):
    contents = images(400)
    groups = compress(contents)
    assert len(groups) > 1
    assert compress(contents, jobs=3) == groups
    assert unpacked(groups, contents) == contents


def test_a_changed_image_changes_the_groups_near_it_alone(small_groups):
    contents = images(1000)
    changed = [*contents]
    changed[100] = images(1, seed=5)[0]
    del changed[101]
    before, after = compress(contents), compress(changed)
    assert len(before) >= 5
    assert before[0] != after[0]
    assert before[-1] == after[-1]


def test_what_was_compressed_comes_from_the_cache(tmp_path, monkeypatch):
    contents, cache = images(MIN_IMAGES), Cache(tmp_path)
    groups = compress(contents, cache)
    monkeypatch.setattr(module, "_compress_group", None)  # cannot be called
    assert compress(contents, cache) == groups
    monkeypatch.setattr(module, "LEVEL", 3)
    with pytest.raises(TypeError):
        compress(contents, cache)


def test_a_damaged_entry_of_the_cache_is_made_again(tmp_path):
    contents, cache = images(2), Cache(tmp_path)
    groups = compress(contents, cache)
    (entry,) = (p for p in tmp_path.rglob("*") if p.is_file())
    data = bytearray(entry.read_bytes())
    data[-1] ^= 1
    entry.write_bytes(data)
    assert compress(contents, cache) == groups


def test_a_frame_must_be_whole_and_of_its_size():
    (frame,) = compress([b"image " * 100])[0].frames
    assert unpack(frame, 600) == b"image " * 100
    for data, size in (
        (frame, 599),
        (frame, 601),
        (frame[:-1], 600),
        (frame + b"x", 600),
        (b"", 600),
        (b"x" * 50, 600),
    ):
        with pytest.raises(PackFormatError):
            unpack(data, size)
    with pytest.raises(PackFormatError):
        unpack(frame, 600, b"no dictionary " * 100)
