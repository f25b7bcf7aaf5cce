"""Images as they go into a pack: zstd frames, most of them compressed with a dictionary of what they have in common.

Kernels of a family are much alike, and each is small: with a dictionary they take about half of what they take alone.
Images that follow each other share one, trained on them all. It is kept small (1 MiB unpacked), since a process
unpacks it before its first kernel: a millisecond. Everything is a function of the images: no clock, no chance.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import zstandard

from tk.aot.cache import Cache
from tk.aot.errors import PackFormatError

LEVEL = 19  # with a dictionary, 22 gives the same sizes
# A group of images with a dictionary of their own. From GROUP_BYTES on it ends at an image whose hash says so, one in
# GROUP_END, so that a kernel that changes changes the groups near it alone; at the latest at twice as many.
GROUP_BYTES, GROUP_END = 8 << 20, 32
# Of a smaller group a dictionary takes more than it saves, or little less.
MIN_IMAGES, MIN_BYTES = 64, 512 << 10
# A share of the group, with a bound.
DICTIONARY_SHARE, MAX_DICTIONARY = 11, 1 << 20
# zstd's "fastCover": segments of k bytes that have most in common by their strings of d bytes, counted in 2**f places.
TRAINING = dict(k=2048, d=8, f=22, accel=1, split_point=1.0, steps=1, threads=0, level=3)
# Dictionary numbers below are zstd's to give, and those from 2**31 on are kept for it.
FIRST_ID, LAST_ID = 32768, 2**31 - 1
# Of what zlib makes of images, about what is left here: for predictions.
SHARE_OF_ZLIB, SHARE_OF_ZLIB_ALONE = 0.53, 0.87


@dataclass(frozen=True)
class Dictionary:
    """size: unpacked, bytes."""

    size: int
    frame: bytes


@dataclass(frozen=True)
class Group:
    """Compressed images, in order, and the dictionary that all of them need, if there is one."""

    dictionary: Dictionary | None
    frames: tuple[bytes, ...]


def compress(images: Sequence[bytes], cache: Cache | None = None, jobs: int = 1) -> list[Group]:
    """The images in order, in groups of some MB. cache: holds what was compressed before. jobs: groups at once."""
    with ThreadPoolExecutor(max(1, jobs)) as pool:  # zstd lets go of Python's lock
        return list(pool.map(lambda group: _cached(group, cache), _split(images)))


def share_of_zlib(count: int) -> float:
    """About what part of their size in the cache this many images take in a pack."""
    return SHARE_OF_ZLIB if count >= MIN_IMAGES else SHARE_OF_ZLIB_ALONE


def _split(images: Sequence[bytes]) -> list[list[bytes]]:
    groups: list[list[bytes]] = [[]]
    size = 0
    for image in images:
        groups[-1].append(image)
        size += len(image)
        ends = hashlib.sha256(image).digest()[0] % GROUP_END == 0
        if size >= 2 * GROUP_BYTES or (size >= GROUP_BYTES and ends):
            groups.append([])
            size = 0
    if len(groups) > 1 and size < GROUP_BYTES // 2:  # the rest is too little for one more
        rest = groups.pop()
        groups[-1] += rest
    return groups


def _cached(images: Sequence[bytes], cache: Cache | None) -> Group:
    if cache is None:
        return _compress_group(images)
    settings = (zstandard.__version__, zstandard.ZSTD_VERSION, LEVEL, MIN_IMAGES, MIN_BYTES, DICTIONARY_SHARE,
                MAX_DICTIONARY, sorted(TRAINING.items()))  # fmt: skip
    key = hashlib.sha256(repr(settings).encode() + _hashes(images)).hexdigest()
    if (data := cache.load_bytes(key)) is not None:
        return _decode(data)
    group = _compress_group(images)
    cache.store_bytes(key, _encode(group))
    return group


def _hashes(images: Sequence[bytes]) -> bytes:
    return b"".join(hashlib.sha256(image).digest() for image in images)


def _compress_group(images: Sequence[bytes]) -> Group:
    total = sum(map(len, images))
    if len(images) < MIN_IMAGES or total < MIN_BYTES:
        alone = zstandard.ZstdCompressor(level=LEVEL)
        return Group(None, tuple(map(alone.compress, images)))
    number = int.from_bytes(hashlib.sha256(_hashes(images)).digest()[:4], "little")
    size = min(total // DICTIONARY_SHARE, MAX_DICTIONARY)
    dict_id = FIRST_ID + number % (LAST_ID - FIRST_ID)
    dictionary = zstandard.train_dictionary(size, list(images), dict_id=dict_id, **TRAINING)  # type: ignore[arg-type]
    content = dictionary.as_bytes()
    together = zstandard.ZstdCompressor(level=LEVEL, dict_data=dictionary)
    frame = zstandard.ZstdCompressor(level=LEVEL).compress(content)
    return Group(Dictionary(len(content), frame), tuple(map(together.compress, images)))


# --- In the cache: the size of the dictionary (0: none), then each frame's size, its own first, then the frames ---


def _encode(group: Group) -> bytes:
    dictionary = group.dictionary or Dictionary(0, b"")
    frames = [dictionary.frame, *group.frames]
    sizes = struct.pack(f"<QQ{len(frames)}Q", dictionary.size, len(frames), *map(len, frames))
    return sizes + b"".join(frames)


def _decode(data: bytes) -> Group:
    dictionary_size, count = struct.unpack_from("<QQ", data)
    at = struct.calcsize(f"<QQ{count}Q")
    frames = []
    for size in struct.unpack_from(f"<{count}Q", data, struct.calcsize("<QQ")):
        frames.append(data[at : at + size])
        at += size
    return Group(Dictionary(dictionary_size, frames[0]) if dictionary_size else None, tuple(frames[1:]))


# --- Unpacking ---


def unpack(frame: bytes, size: int, dictionary: bytes | None = None) -> bytes:
    """One whole frame of `size` bytes. dictionary: a trained one. Raises PackFormatError before more than `size` bytes
    are made of it."""
    try:
        if zstandard.frame_content_size(frame) != size:
            raise PackFormatError(f"no zstd frame of {size} bytes")
        with_dictionary = (
            zstandard.ZstdCompressionDict(dictionary, zstandard.DICT_TYPE_FULLDICT) if dictionary else None
        )
        unpacker = zstandard.ZstdDecompressor(dict_data=with_dictionary)
        return unpacker.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise PackFormatError(str(e)) from e
