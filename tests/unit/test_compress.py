"""Images in a pack: frames of what is alike, the same bytes every time, from the cache what was done before."""

from __future__ import annotations

import itertools
import random

import pytest

from tk.aot import compress as module
from tk.aot.cache import Cache
from tk.aot.compress import FRAME_BYTES, Frame, compress, unpack
from tk.aot.errors import PackFormatError


def images(count: int, size: int = 9000, seed: int = 0) -> list[bytes]:
    """Alike, as kernels are, and each with something of its own."""
    rng = random.Random(seed)
    common = [rng.randbytes(512) for _ in range(40)]
    return [b"".join(rng.choices(common, k=size // 512)) + rng.randbytes(rng.randrange(64)) for _ in range(count)]


def unpacked(frames: list[Frame], contents: list[bytes]) -> list[bytes]:
    found: dict[int, bytes] = {}
    for frame in frames:
        content, at = unpack(frame.data, frame.size), 0
        for number in frame.images:
            found[number] = content[at : at + len(contents[number])]
            at += len(contents[number])
        assert at == len(content)
    return [found[n] for n in range(len(contents))]


@pytest.mark.parametrize("count", [0, 1, 5, 130, 400])
def test_every_image_lies_in_one_frame(count):
    contents = images(count)
    groups = [f"op {n * 7 % 3}" for n in range(count)]
    frames = compress(contents, groups)
    assert unpacked(frames, contents) == contents
    assert sum(len(f.images) for f in frames) == count
    assert all(f.size < FRAME_BYTES + 20_000 for f in frames)
    assert len(frames) <= sum(map(len, contents)) // (FRAME_BYTES // 2) + 1


def test_images_of_a_group_lie_together():
    contents = images(400)
    groups = [f"op {n % 2}" for n in range(400)]
    for frame in compress(contents, groups):
        assert len({groups[n] for n in frame.images}) == 1


@pytest.mark.parametrize("text", [False, True], ids=["cubin", "ptx"])
def test_images_lie_beside_those_that_they_are_most_like(text):
    """Of four kinds of nearly one size, mixed: a kind's are together, and a frame has no more kinds than it must."""

    def of_kind(kind: int, n: int) -> bytes:
        pieces = random.Random(kind).choices(range(1 << 30), k=3000)
        pieces[n] = n
        if text:
            return b"\n".join(b"  add.s32 %d;" % piece for piece in pieces)
        return b"".join(piece.to_bytes(16, "little") for piece in pieces) + b"\xff"

    contents = [of_kind(n % 4, n) for n in range(80)]
    order = [n % 4 for frame in compress(contents, ["f"] * 80) for n in frame.images]
    assert sum(a != b for a, b in itertools.pairwise(order)) == 3


def test_a_frame_takes_less_than_its_images():
    contents = images(64)
    (frame,) = compress(contents, ["op"] * 64)
    assert len(frame.data) < sum(len(compress([x], ["op"])[0].data) for x in contents) / 2


def test_the_same_images_give_the_same_bytes_whatever_the_jobs():
    contents = images(400)
    frames = compress(contents, ["op"] * 400)
    assert len(frames) > 1
    assert compress(contents, ["op"] * 400, jobs=3) == frames


def test_a_changed_image_changes_the_frames_of_its_group_alone():
    contents = images(600)
    groups = [f"op {n // 200}" for n in range(600)]
    changed = [*contents]
    changed[300] = images(1, seed=5)[0]
    before, after = ({f.data: groups[f.images[0]] for f in compress(x, groups)} for x in (contents, changed))
    assert {before[data] for data in before.keys() - after.keys()} == {"op 1"}


def test_what_was_compressed_comes_from_the_cache(tmp_path, monkeypatch):
    contents, cache = images(64), Cache(tmp_path)
    frames = compress(contents, ["op"] * 64, cache)
    monkeypatch.setattr(module, "_compressed", None)  # cannot be called
    assert compress(contents, ["op"] * 64, cache) == frames
    monkeypatch.setattr(module, "LEVEL", 3)
    with pytest.raises(TypeError):
        compress(contents, ["op"] * 64, cache)


def test_a_damaged_entry_of_the_cache_is_made_again(tmp_path):
    contents, cache = images(2), Cache(tmp_path)
    frames = compress(contents, ["op"] * 2, cache)
    (entry,) = (p for p in tmp_path.rglob("*") if p.is_file())
    data = bytearray(entry.read_bytes())
    data[-1] ^= 1
    entry.write_bytes(data)
    assert compress(contents, ["op"] * 2, cache) == frames


def test_a_frame_must_be_whole_and_of_its_size():
    frame = compress([b"image " * 100], ["op"])[0].data
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
