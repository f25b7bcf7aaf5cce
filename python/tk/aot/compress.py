"""Images as they go into a pack: many in one zstd frame, beside those that they are most like.

What one function was compiled to is much alike, and each image is small. Whoever needs one unpacks the frame that has
it: two megabytes, which takes about 1.5 ms. Everything is a function of the images: no clock, no chance.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import zstandard

from tk.aot.cache import Cache
from tk.aot.errors import PackFormatError

LEVEL = 19  # 22 gives the same sizes
FRAME_BYTES = 2 << 20  # of images in a frame, the last one's end apart
SKETCH_BINS = 256
SHARE_OF_ZLIB = 0.41  # of what zlib makes of each image, about what is left here: for predictions


@dataclass(frozen=True)
class Frame:
    """size: unpacked, bytes. images: the numbers of those that it has, one after the other."""

    images: tuple[int, ...]
    size: int
    data: bytes


def compress(images: Sequence[bytes], groups: Sequence[str], cache: Cache | None = None, jobs: int = 1) -> list[Frame]:
    """groups: what each image belongs to: those of a group share frames. cache: holds what was compressed before.
    jobs: frames at once."""

    def made(numbers: tuple[int, ...]) -> Frame:
        content = b"".join(images[n] for n in numbers)
        return Frame(numbers, len(content), _cached(content, cache))

    with ThreadPoolExecutor(max(1, jobs)) as pool:  # zstd lets go of Python's lock
        return list(pool.map(made, _split(images, groups)))


def _split(images: Sequence[bytes], groups: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Group by group, in each along `_chain`. A frame that is half full ends with its group, so that a kernel that
    changes changes frames of its own group, and hardly others."""
    members: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    frame: list[int] = []
    size = 0
    for numbers in members.values():
        for number in _chain(images, numbers):
            if size >= FRAME_BYTES:
                yield tuple(frame)
                frame, size = [], 0
            frame.append(number)
            size += len(images[number])
        if size >= FRAME_BYTES // 2:
            yield tuple(frame)
            frame, size = [], 0
    if frame:
        yield tuple(frame)


def _chain(images: Sequence[bytes], numbers: Sequence[int]) -> Iterator[int]:
    """The smallest image, then each time the one that is most like the last; of several the smallest. So a frame has
    those that repeat each other. In the order of sizes attention's backward takes a tenth more."""
    left = {n: _sketch(images[n]) for n in sorted(numbers, key=lambda n: len(images[n]))}
    last: frozenset[int] = frozenset()
    while left:
        number = max(left, key=lambda n: len(left[n] & last))
        last = left.pop(number)
        yield number


def _sketch(image: bytes) -> frozenset[int]:
    """One-permutation MinHash: what two sketches have in common estimates what the images' pieces have. A piece is an
    instruction of a cubin (16 bytes) or a line of PTX."""
    pieces = image.split(b"\n") if image.isascii() else (image[at : at + 16] for at in range(0, len(image), 16))
    least: dict[int, int] = {}
    for piece in set(pieces):
        hash = zlib.crc32(piece)
        slot = hash % SKETCH_BINS
        if hash < least.get(slot, 1 << 32):
            least[slot] = hash
    return frozenset(least.values())


def _cached(content: bytes, cache: Cache | None) -> bytes:
    if cache is None:
        return _compressed(content)
    settings = repr((zstandard.__version__, zstandard.ZSTD_VERSION, LEVEL))
    key = hashlib.sha256(settings.encode() + hashlib.sha256(content).digest()).hexdigest()
    if (data := cache.load_bytes(key)) is None:
        data = _compressed(content)
        cache.store_bytes(key, data)
    return data


def _compressed(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(content)


def unpack(frame: bytes, size: int) -> bytes:
    """One whole frame of `size` bytes. Raises PackFormatError before more than `size` bytes are made of it."""
    try:
        if zstandard.frame_content_size(frame) != size:
            raise PackFormatError(f"no zstd frame of {size} bytes")
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise PackFormatError(str(e)) from e
