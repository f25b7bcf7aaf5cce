"""Images as they go into a pack: many in one zstd frame, beside those that they are most like.

Kernels of an op are much alike, and each is small. Whoever needs one unpacks the frame that has it: a megabyte, which
takes a millisecond. Everything is a function of the images: no clock, no chance.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import zstandard

from tk.aot.cache import Cache
from tk.aot.errors import PackFormatError

LEVEL = 19  # 22 gives the same sizes
FRAME_BYTES = 1 << 20  # of images in a frame, the last one's end apart
SHARE_OF_ZLIB = 0.49  # of what zlib makes of each image, about what is left here: for predictions


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
    """Group by group, in each by size: images of nearly one size are those that differ least. A frame that is half full
    ends with its group, so that a kernel that changes changes frames of its own op, and hardly others."""
    place = {group: n for n, group in enumerate(dict.fromkeys(groups))}
    order = sorted(range(len(images)), key=lambda n: (place[groups[n]], len(images[n])))
    frame: list[int] = []
    size = 0
    for number, following in itertools.zip_longest(order, order[1:]):
        frame.append(number)
        size += len(images[number])
        is_last = following is None or groups[following] != groups[number]
        if size >= (FRAME_BYTES // 2 if is_last else FRAME_BYTES) or following is None:
            yield tuple(frame)
            frame, size = [], 0


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
