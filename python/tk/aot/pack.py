"""The bytes of a pack: written, and read back with every check. ``csrc/core/pack_format.h`` is the definition.

Nothing here knows what a kernel is, or needs Triton. The same input gives the same bytes: there is no time in a pack,
and nothing depends on the order of a set.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from tk.aot.cache import Cache
from tk.aot.compress import Frame, compress, unpack
from tk.aot.errors import PackFormatError
from tk.expr import Expr, as_expr

MAGIC = b"TKPACK\r\n"
VERSION = 5
FLAG_PTX = 1
FLAG_FAMILY = 2
PAGE_SIZE = 16384
MAX_FRAME_SIZE = 64 << 20

# Section -> fields of its record, as in pack_format.h: I is 32 bits unsigned, Q 64 unsigned, q 64 signed, H a SHA-256,
# R a range of another section; a number before it counts.
SECTIONS: Mapping[str, str] = {
    "strings": "",
    "code": "word:q",
    "ops": "name:I schema:I n_tensors:I n_ints:I n_floats:I n_dims:I locals:R key:R dims:4I configs:R buckets:R "
    "variants:R outputs:R pins:R params:R checks:R meta:I backward:I n_saved:I",
    "locals": "value:R",
    "configs": "number:I name:I params:I",
    "buckets": "key:q candidates:R",
    "candidates": "variant:I",
    "variants": "kernel:I config:I flags:I reserved:I constraints:R locals:R cost:R buffers:R launches:R",
    "constraints": "holds:R message:I",
    "buffers": "kind:I alignment:I bytes:R",
    "launches": "image:I entry:I threads:I shared:I cluster:I flags:I global_scratch:I global_scratch_alignment:I "
    "profile_scratch:I profile_scratch_alignment:I when:R dependent:R grid:3R args:R",
    "args": "kind:I width:I index:I reserved:I value:R",
    "tensor_maps": "tensor:I rank:I element_type:I element_size:I swizzle:I l2_promotion:I oob_fill:I is_im2col:I "
    "reserved:I box:5I offset:R sizes:5R strides:5R lower:3R upper:3R steps:3R",
    "images": "kind:I name:I frame:I reserved:I begin:Q size:Q hash:H",
    "outputs": "dtype:R ndim:I leading:I sizes:8R strides:8R",
    "pins": "key:q dims:4q config:I reserved:I",
    "params": "name:I kind:I flags:I rank:I default_value:I",
    "frames": "offset:Q compressed_size:Q size:Q",
}

VARIANT_GENERAL, VARIANT_NONDETERMINISTIC = 1, 2
BUFFER_SCRATCH, BUFFER_COUNTERS = 0, 1
LAUNCH_COOPERATIVE = 1
PARAM_LEADING, PARAM_MUTATED, PARAM_IN_ORDER = 1, 2, 4
PARAM_KINDS = ("tensor", "tensors", "float", "int", "bool", "optional_tensor")  # by number
LEADING_DIMS = 3
ARG_POINTER, ARG_INT, ARG_FLOAT, ARG_TENSOR_MAP, ARG_BUFFER = range(5)
ARG_GLOBAL_SCRATCH, ARG_PROFILE_SCRATCH, ARG_NULL = range(5, 8)
IMAGE_CUBIN, IMAGE_PTX = 0, 1


class Range(NamedTuple):
    first: int
    count: int  # type: ignore[assignment]  # of tuple's own method


EMPTY = Range(0, 0)


_CODES = {"I": "I", "Q": "Q", "q": "q", "H": "32s", "R": "II"}


class Record:
    """The layout of one section's records."""

    def __init__(self, text: str):
        self.fields: list[tuple[str, int, str]] = []
        for item in text.split():
            name, code = item.split(":")
            self.fields.append((name, int(code[:-1] or 1), code[-1]))
        self.struct = struct.Struct("<" + "".join(_CODES[code] * n for _, n, code in self.fields))

    def pack(self, values: Mapping[str, Any]) -> bytes:
        flat: list[Any] = []
        for name, n, code in self.fields:
            items = [values.get(name, EMPTY if code == "R" else 0)] if n == 1 else list(values[name])
            for item in items:
                flat.extend(item if code == "R" else (item,))
        return self.struct.pack(*flat)

    def unpack(self, data: bytes, offset: int) -> SimpleNamespace:
        flat = list(self.struct.unpack_from(data, offset))
        values = {}
        for name, n, code in self.fields:
            step = 2 if code == "R" else 1
            taken, flat = flat[: n * step], flat[n * step :]
            items = [Range(*taken[i : i + 2]) for i in range(0, 2 * n, 2)] if code == "R" else taken
            values[name] = items[0] if n == 1 else items
        return SimpleNamespace(**values)


RECORDS = {name: Record(text) for name, text in SECTIONS.items()}
HEADER = struct.Struct("<8sIIIIQQ32sII" + "QQ" * len(SECTIONS))
_HASH_AT = struct.calcsize("<8sIIIIQQ")


def _pages_offset(n_pages: int) -> int:
    """The offset of the first page, behind the header and the pages' hashes."""
    return HEADER.size + 32 * n_pages


def _page_hashes(pages: bytes) -> bytes:
    starts = range(0, len(pages), PAGE_SIZE)
    return b"".join(hashlib.sha256(pages[start : start + PAGE_SIZE]).digest() for start in starts)


def _index_hash(front: bytes) -> bytes:
    """The hash of the header and of the pages' hashes."""
    return hashlib.sha256(front[:_HASH_AT] + bytes(32) + front[_HASH_AT + 32 :]).digest()


class PackWriter:
    """Sections that grow as records are added. Equal strings, expressions and lists of records are kept once."""

    def __init__(self, arch: int, flags: int, compiler: str, names: Sequence[str] = ()):
        """flags: FLAG_PTX, FLAG_FAMILY or 0. names: of the ops to come, so that they lie together: whoever opens a pack
        reads them all."""
        self.arch, self.flags = arch, flags
        self._sections = {name: bytearray() for name in SECTIONS}
        self._known: dict[tuple[str, bytes], Range] = {}
        self._strings: dict[str, int] = {}
        self._images: dict[tuple[int, bytes], int] = {}
        self._image_records: list[dict[str, Any]] = []
        self._image_data: list[bytes] = []  # as it is
        self._image_groups: list[str] = []
        self.string("")
        self._compiler = self.string(compiler)
        for name in names:
            self.string(name)

    def string(self, text: str) -> int:
        if text not in self._strings:
            data = text.encode()
            if b"\0" in data:
                raise ValueError(f"{text!r} has a NUL")
            self._strings[text] = len(self._sections["strings"])
            self._sections["strings"] += data + b"\0"
        return self._strings[text]

    def code(self, expr: Expr | int) -> Range:
        words = as_expr(expr).encode()
        return self._keep("code", struct.pack(f"<{len(words)}q", *words), len(words))

    def add(self, section: str, records: Sequence[Mapping[str, Any]], share: bool = True) -> Range:
        """A list of records. share: an equal list that is there already will do."""
        data = b"".join(RECORDS[section].pack(r) for r in records)
        return self._keep(section, data, len(records)) if share else self._append(section, data, len(records))

    def count(self, section: str) -> int:
        return len(self._sections[section]) // RECORDS[section].struct.size

    def image(self, kind: int, name: str, content: bytes, group: str = "") -> int:
        """Equal images are kept once, under the first name. group: of those that are much alike."""
        hash = hashlib.sha256(content).digest()
        if (kind, hash) not in self._images:
            self._images[kind, hash] = len(self._image_records)
            self._image_records.append(dict(kind=kind, name=self.string(name), size=len(content), hash=hash))
            self._image_data.append(content)
            self._image_groups.append(group)
        return self._images[kind, hash]

    def finish(self, cache: Cache | None = None, jobs: int = 1) -> bytes:
        """The pack. cache: holds what was compressed before. jobs: threads that compress."""
        frames = compress(self._image_data, self._image_groups, cache, jobs)
        self._add_images(frames)
        self._sections["frames"] = bytearray(len(frames) * RECORDS["frames"].struct.size)
        entries, size = [], 0  # within the pages
        for data in self._sections.values():
            size = _aligned(size)
            entries.append((size, len(data)))
            size += len(data)
        n_pages = -(-size // PAGE_SIZE)
        begin = _pages_offset(n_pages)
        index_size = at = begin + size
        records = []
        for frame in frames:
            records.append(dict(offset=at, compressed_size=len(frame.data), size=frame.size))
            at += len(frame.data)
        self._sections["frames"] = bytearray(b"".join(map(RECORDS["frames"].pack, records)))
        flat = [n for offset, length in entries for n in (begin + offset, length)]
        header = HEADER.pack(MAGIC, VERSION, self.arch, self.flags, len(SECTIONS), at, index_size,
                             bytes(32), self._compiler, n_pages, *flat)  # fmt: skip
        pages = b"".join(data.ljust(_aligned(len(data)), b"\0") for data in self._sections.values())[:size]
        front = bytearray(header + _page_hashes(pages))
        front[_HASH_AT : _HASH_AT + 32] = _index_hash(bytes(front))
        return bytes(front) + pages + b"".join(frame.data for frame in frames)

    def _add_images(self, frames: Sequence[Frame]) -> None:
        for number, frame in enumerate(frames):
            begin = 0
            for image in frame.images:
                record = self._image_records[image]
                record.update(frame=number, begin=begin)
                begin += record["size"]
        self._sections["images"] = bytearray(b"".join(map(RECORDS["images"].pack, self._image_records)))

    def _keep(self, section: str, data: bytes, count: int) -> Range:
        if not count:
            return EMPTY
        if (section, data) not in self._known:
            self._known[section, data] = self._append(section, data, count)
        return self._known[section, data]

    def _append(self, section: str, data: bytes, count: int) -> Range:
        first = self.count(section)
        self._sections[section] += data
        return Range(first, count)


def _aligned(offset: int) -> int:
    return -(-offset // 8) * 8


# --- Reading ---

# Field -> the section that it is a range of.
_RANGES: Mapping[str, Mapping[str, str]] = {
    "ops": dict(locals="locals", key="code", configs="configs", buckets="buckets", variants="variants",
                outputs="outputs", pins="pins", params="params", checks="constraints"),
    "locals": dict(value="code"),
    "buckets": dict(candidates="candidates"),
    "variants": dict(constraints="constraints", locals="locals", cost="code", buffers="buffers", launches="launches"),
    "constraints": dict(holds="code"),
    "buffers": dict(bytes="code"),
    "launches": dict(when="code", dependent="code", grid="code", args="args"),
    "args": dict(value="code"),
    "tensor_maps": dict(
        offset="code", sizes="code", strides="code", lower="code", upper="code", steps="code"
    ),
    "outputs": dict(dtype="code", sizes="code", strides="code"),
}  # fmt: skip
# Field -> the section that it is a number of an entry of, or "strings".
_REFERENCES: Mapping[str, Mapping[str, str]] = {
    "ops": dict(name="strings", schema="strings", meta="strings", backward="strings"),
    "params": dict(name="strings", default_value="strings"),
    "configs": dict(name="strings", params="strings"),
    "candidates": dict(variant="variants"),
    "variants": dict(kernel="strings"),
    "constraints": dict(message="strings"),
    "launches": dict(image="images", entry="strings"),
    "images": dict(name="strings", frame="frames"),
}


@dataclass(frozen=True)
class Pack:
    """A pack that passed every check. Sections hold one namespace per record, fields as in pack_format.h."""

    arch: int
    flags: int
    compiler: str
    index_hash: str
    size: int
    sections: Mapping[str, list[SimpleNamespace]] = field(repr=False)
    data: bytes = field(repr=False)

    def __getattr__(self, section: str) -> list[SimpleNamespace]:
        try:
            return vars(self)["sections"][section]
        except KeyError:
            raise AttributeError(section) from None

    def string(self, offset: int) -> str:
        return _string(vars(self)["data"], self.sections["strings"][0], offset)

    def words(self, code: Range) -> list[int]:
        return [w.word for w in self.slice("code", code)]

    def expr(self, code: Range) -> Expr:
        return Expr.decode(self.words(code))

    def slice(self, section: str, entries: Range) -> list[SimpleNamespace]:
        return self.sections[section][entries.first : entries.first + entries.count]

    def op(self, name: str) -> SimpleNamespace:
        return next(op for op in self.sections["ops"] if self.string(op.name) == name)

    def image(self, number: int) -> bytes:
        """Unpacked and held against its hash. Raises PackFormatError."""
        return self._image(number, self._frame(self.sections["images"][number].frame))

    def _frame(self, number: int) -> bytes:
        """Unpacked."""
        record, what = self.sections["frames"][number], f"frame {number}"
        _check(record.size <= MAX_FRAME_SIZE, f"{what} promises {record.size} bytes")
        end = record.offset + record.compressed_size
        _check(end <= len(self.data), f"{what} leaves the file")
        try:
            return unpack(self.data[record.offset : end], record.size)
        except PackFormatError as e:
            raise PackFormatError(f"{what}: {e}") from e

    def _image(self, number: int, frame: bytes) -> bytes:
        record = self.sections["images"][number]
        _check(record.begin + record.size <= len(frame), f"image {number} leaves its frame")
        image = frame[record.begin : record.begin + record.size]
        _check(hashlib.sha256(image).digest() == record.hash,
               f"image {number} does not have its hash: the pack is damaged")  # fmt: skip
        return image


def read_pack(source: Path | str | bytes) -> Pack:
    """Read and check a whole pack, images included. Raises PackFormatError (OSError for an unreadable file)."""
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    header = _read_header(data)
    entries = header.sections
    sections: dict[str, list[SimpleNamespace]] = {}
    for (name, record), (offset, size) in zip(RECORDS.items(), entries, strict=True):
        if name == "strings":
            sections[name] = [SimpleNamespace(offset=offset, size=size)]
            _check(size > 0 and data[offset] == 0 and data[offset + size - 1] == 0, "the strings do not end")
            continue
        _check(size % record.struct.size == 0, f"section {name} is cut in a record")
        sections[name] = [record.unpack(data, at) for at in range(offset, offset + size, record.struct.size)]
    pack = Pack(header.arch, header.flags, _string(data, sections["strings"][0], header.compiler),
                header.index_hash.hex(), len(data), sections, data)  # fmt: skip
    _check_references(pack)
    _check_order(pack)
    _check_images(pack, header.index_size)
    return pack


def _check_images(pack: Pack, index_size: int) -> None:
    by_frame: dict[int, list[int]] = {number: [] for number in range(len(pack.sections["frames"]))}
    for number, record in enumerate(pack.sections["images"]):
        by_frame[record.frame].append(number)
    for number, images in by_frame.items():
        _check(pack.sections["frames"][number].offset >= index_size, f"frame {number} lies in the index")
        frame = pack._frame(number)
        for image in images:
            pack._image(image, frame)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise PackFormatError(message)


def _read_header(data: bytes) -> SimpleNamespace:
    _check(len(data) >= HEADER.size, f"{len(data)} bytes are no pack")
    magic, version, arch, flags, n, file_size, index_size, index_hash, compiler, n_pages, *flat = (
        HEADER.unpack_from(data)
    )  # fmt: skip
    _check(magic == MAGIC, "this is no pack: it does not begin with its magic")
    _check(version == VERSION, f"pack version {version}, this is for version {VERSION}")
    _check(n == len(SECTIONS), f"{n} sections instead of {len(SECTIONS)}")
    _check(file_size == len(data), f"the header promises {file_size} bytes, there are {len(data)}")
    begin = _pages_offset(n_pages)
    _check(begin <= index_size <= len(data), f"an index of {index_size} bytes in a file of {len(data)}")
    _check(n_pages == -(-(index_size - begin) // PAGE_SIZE), f"{n_pages} pages in an index of {index_size} bytes")
    _check(flags in (0, FLAG_PTX, FLAG_FAMILY), "unknown flags")
    are_right = _page_hashes(data[begin:index_size]) == data[HEADER.size : begin]
    _check(are_right and _index_hash(data[:begin]) == index_hash,
           "the index does not have its hash: the pack is damaged")  # fmt: skip
    entries = list(zip(flat[::2], flat[1::2], strict=True))
    for name, (offset, size) in zip(SECTIONS, entries, strict=True):
        _check(offset % 8 == 0 and begin <= offset <= index_size and size <= index_size - offset,
               f"section {name} does not lie in the index")  # fmt: skip
    return SimpleNamespace(arch=arch, flags=flags, index_size=index_size, index_hash=index_hash, compiler=compiler,
                           sections=entries)  # fmt: skip


def _string(data: bytes, strings: SimpleNamespace, offset: int) -> str:
    _check(offset < strings.size, f"string {offset} of {strings.size} bytes")
    begin = strings.offset + offset
    try:
        return data[begin : data.index(b"\0", begin)].decode()
    except UnicodeDecodeError as e:
        raise PackFormatError(f"string {offset} is no UTF-8") from e


def _check_references(pack: Pack) -> None:
    code: set[Range] = set()
    for section, ranges in _RANGES.items():
        for record in pack.sections[section]:
            for name, target in ranges.items():
                value = getattr(record, name)
                for r in [value] if isinstance(value, Range) else value:
                    _check(r.first + r.count <= len(pack.sections[target]), f"{section}.{name} leaves section {target}")
                    if target == "code":
                        code.add(r)
    for section, numbers in _REFERENCES.items():
        for record in pack.sections[section]:
            for name, target in numbers.items():
                number = getattr(record, name)
                if target == "strings":
                    pack.string(number)
                else:
                    _check(number < len(pack.sections[target]), f"{section}.{name} {number} does not exist")
    for r in sorted(code):
        try:
            pack.expr(r)
        except ValueError as e:
            raise PackFormatError(f"words {r.first} to {r.first + r.count} of the code: {e}") from e


def _check_order(pack: Pack) -> None:
    for op in pack.sections["ops"]:
        keys = [b.key for b in pack.slice("buckets", op.buckets)]
        pins = [(p.key, *p.dims) for p in pack.slice("pins", op.pins)]
        name = pack.string(op.name)
        _check(keys == sorted(set(keys)), f"the buckets of {name} are not in order")
        _check(pins == sorted(set(pins)), f"the pins of {name} are not in order")


def roots_line(path: Path, pack: Pack) -> str:
    """The line of roots.inc that ties a pack to the library."""
    return f'{{"{os.path.basename(path)}", "{pack.index_hash}"}},\n'
