"""Packs: what is written is what is read, and nothing else is read at all."""

from __future__ import annotations

import hashlib
import random
import struct

import pytest
import zstandard

from tk.aot import pack as fmt
from tk.aot.compress import FRAME_BYTES
from tk.aot.errors import PackFormatError
from tk.aot.expr import Problem, TensorValue, const
from tk.aot.pack import HEADER, Pack, PackWriter, Range, read_pack
from unit_kernels import OP

HASH_AT = 40
N_SECTIONS = len(fmt.SECTIONS)


def small_pack() -> bytes:
    """One record of each kind."""
    w = PackWriter(90, 0, "a compiler")
    image = b"an image " * 50
    number = w.image(fmt.IMAGE_CUBIN, "image", image)
    three, five, eight = ([w.code(const(i)) for i in range(n)] for n in (3, 5, 8))
    args = w.add("args", [dict(kind=fmt.ARG_INT, width=8, value=w.code(OP.local("n") + 1))])
    launch = dict(image=number, entry=w.string("entry"), threads=128, shared=1024, cluster=1, when=w.code(1),
                  dependent=w.code(0), grid=[w.code(i) for i in (1, 2, 3)], args=args)  # fmt: skip
    w.add("tensor_maps", [dict(rank=5, box=[8] * 5, sizes=five, strides=five, lower=three, upper=three, steps=three)])
    variant = dict(
        kernel=w.string("kernel"),
        constraints=w.add("constraints", [dict(holds=w.code(OP.int("way") == 1), message=w.string("a way"))]),
        cost=w.code(5),
        buffers=w.add("buffers", [dict(kind=fmt.BUFFER_COUNTERS, alignment=16, bytes=w.code(4))]),
        launches=w.add("launches", [launch]),
    )
    op = dict(
        name=w.string("op"), n_tensors=3, n_ints=1, n_floats=1, n_dims=2, dims=[1, 2, 0, 0], key=w.code(OP.int("way")),
        locals=w.add("locals", [dict(value=w.code(OP.locals["n"]))]),
        configs=w.add("configs", [dict(number=0, name=w.string("config"), params=w.string("{}"))]),
        buckets=w.add("buckets", [dict(key=k, candidates=w.add("candidates", [dict(variant=0)])) for k in (-3, 7)]),
        variants=w.add("variants", [variant]),
        outputs=w.add("outputs", [dict(dtype=w.code(6), ndim=2, sizes=eight, strides=eight)]),
        pins=w.add("pins", [dict(key=7, dims=[1, 2, 0, 0], config=0)]),
        params=w.add("params", [dict(name=w.string("x"), default_value=w.string(""))]), meta=w.string("{}"),
    )  # fmt: skip
    w.add("ops", [op])
    return w.finish()


PACK = small_pack()
INDEX_SIZE = struct.unpack_from("<Q", PACK, 32)[0]


def rehashed(data: bytes | bytearray) -> bytes:
    """With the hashes of the index made right again, so that the other checks are reached."""
    data = bytearray(data)
    index_size, begin = struct.unpack_from("<Q", data, 32)[0], pages_offset(data)
    for page, at in enumerate(range(begin, min(index_size, len(data)), fmt.PAGE_SIZE)):
        digest = hashlib.sha256(data[at : min(at + fmt.PAGE_SIZE, index_size)]).digest()
        if HEADER.size + 32 * page + 32 <= begin:
            data[HEADER.size + 32 * page : HEADER.size + 32 * page + 32] = digest
    data[HASH_AT : HASH_AT + 32] = bytes(32)
    data[HASH_AT : HASH_AT + 32] = hashlib.sha256(data[:begin]).digest()
    return bytes(data)


def pages_offset(data: bytes | bytearray) -> int:
    return HEADER.size + 32 * int(struct.unpack_from("<I", data, HASH_AT + 36)[0])


def patched(offset: int, code: str, value: int) -> bytes:
    data = bytearray(PACK)
    struct.pack_into(f"<{code}", data, offset, value)
    return rehashed(data)


def entry_of(section: str) -> int:
    """Where the header says where a section is."""
    return HEADER.size - 16 * N_SECTIONS + 16 * list(fmt.SECTIONS).index(section)


def record_field(section: str, offset: int) -> int:
    return struct.unpack_from("<Q", PACK, entry_of(section))[0] + offset


def test_round_trip():
    pack = read_pack(PACK)
    assert (pack.arch, pack.flags, pack.compiler, pack.size) == (90, 0, "a compiler", len(PACK))
    op = pack.op("op")
    assert (op.n_tensors, op.n_dims, op.dims) == (3, 2, [1, 2, 0, 0])
    assert [b.key for b in pack.slice("buckets", op.buckets)] == [-3, 7]
    problem = Problem((TensorValue((6, 7), (7, 1), 6), None, None), ints=(1,))
    assert pack.expr(pack.slice("locals", op.locals)[0].value).evaluate(problem) == 42
    (variant,) = pack.slice("variants", op.variants)
    assert pack.string(variant.kernel) == "kernel"
    (launch,) = pack.slice("launches", variant.launches)
    assert (launch.threads, launch.shared, pack.string(launch.entry)) == (128, 1024, "entry")
    assert [pack.expr(g).value for g in launch.grid] == [1, 2, 3]
    (constraint,) = pack.slice("constraints", variant.constraints)
    assert pack.expr(constraint.holds).evaluate(problem) == 1
    assert [pack.expr(s).value for s in pack.tensor_maps[0].sizes] == [0, 1, 2, 3, 4]
    assert pack.image(launch.image) == b"an image " * 50
    assert pack.index_hash == PACK[HASH_AT : HASH_AT + 32].hex()


def test_the_same_input_gives_the_same_bytes():
    assert small_pack() == PACK


def test_equal_things_are_kept_once():
    w = PackWriter(90, 0, "c")
    assert w.string("twice") == w.string("twice")
    assert w.code(OP.local("n") + 1) == w.code(OP.local("n") + 1)
    assert w.add("locals", [dict(value=Range(0, 1))]) == w.add("locals", [dict(value=Range(0, 1))])
    assert w.image(0, "a", b"x") == w.image(0, "b", b"x")
    assert w.image(0, "a", b"y") == 1
    assert w.add("candidates", [dict(variant=0)], share=False) != w.add("candidates", [dict(variant=0)], share=False)
    with pytest.raises(ValueError, match="NUL"):
        w.string("a\0b")


def flipped(at: int, bit: int) -> bytes:
    data = bytearray(PACK)
    data[at] ^= bit
    return bytes(data)


@pytest.mark.parametrize("bit", [1, 0x80])
def test_every_flipped_byte_of_the_index_is_refused(bit):
    for at in range(INDEX_SIZE):
        with pytest.raises(PackFormatError):
            read_pack(flipped(at, bit))


def test_every_flipped_bit_of_an_image_is_refused_or_changes_nothing():
    """A compressed stream has a few bits that mean nothing."""
    harmless = 0
    for at in range(INDEX_SIZE, len(PACK)):
        for bit in range(8):
            try:
                assert read_pack(flipped(at, 1 << bit)).image(0) == read_pack(PACK).image(0)
                harmless += 1
            except PackFormatError:
                pass
    assert harmless < 8


def test_every_flipped_byte_of_an_index_that_hashes_well_is_refused_or_harmless():
    """Whoever makes a pack can hash it; the reader's other checks must not lean on the hash."""
    refused = 0
    for at in range(INDEX_SIZE):
        for bit in (1, 0x10, 0x80):
            try:
                use_everything(read_pack(rehashed(flipped(at, bit))))
            except PackFormatError:
                refused += 1
    assert refused > INDEX_SIZE // 2


def test_pages_have_hashes():
    """Also where the last is cut, and where an index fills its pages."""
    for length in (fmt.PAGE_SIZE * 3 + 8, fmt.PAGE_SIZE * 4):
        w = PackWriter(90, 0, "c", ["op"])
        w.string("x" * (length - len("\0c\0op\0") - 1))
        data = w.finish()
        assert len(data) == HEADER.size + 32 * 4 + length and pages_offset(data) == HEADER.size + 32 * 4
        assert rehashed(data) == data and read_pack(data).arch == 90
        for page in range(4):
            flipped = bytearray(data)
            flipped[pages_offset(data) + page * fmt.PAGE_SIZE + 2] ^= 1
            with pytest.raises(PackFormatError, match="its hash"):
                read_pack(bytes(flipped))
        assert data.index(b"op\0") < pages_offset(data) + 8  # names come first


def use_everything(pack: Pack) -> None:
    for op in pack.ops:
        pack.string(op.name)
        for bucket in pack.slice("buckets", op.buckets):
            for candidate in pack.slice("candidates", bucket.candidates):
                for launch in pack.slice("launches", pack.variants[candidate.variant].launches):
                    pack.image(launch.image)


def test_random_bytes_are_refused():
    rng = random.Random(0)
    for _ in range(300):
        with pytest.raises(PackFormatError):
            read_pack(rng.randbytes(rng.randrange(2000)))
        with pytest.raises(PackFormatError):
            read_pack(PACK[:HASH_AT] + rng.randbytes(rng.randrange(2000)))


def test_every_truncation_is_refused():
    for size in range(len(PACK)):
        with pytest.raises(PackFormatError):
            read_pack(PACK[:size])


def test_more_bytes_than_promised_are_refused():
    with pytest.raises(PackFormatError, match=f"promises {len(PACK)} bytes, there are {len(PACK) + 1}"):
        read_pack(PACK + b"\0")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes are no pack"),
        (b"ELF" + PACK[3:], "does not begin with its magic"),
        (patched(8, "I", 1), "pack version 1, this is for version 5"),
        (patched(20, "I", 17), "17 sections instead of 18"),
        (patched(16, "I", 3), "unknown flags"),
        (patched(HASH_AT + 36, "I", 2), "2 pages in an index of"),
        (patched(HASH_AT + 36, "I", 2**32 - 1), "an index of"),
        (patched(entry_of("code"), "Q", 2**60), "section code does not lie in the index"),
        (patched(entry_of("code") + 8, "Q", 2**60), "section code does not lie in the index"),
        (patched(entry_of("code"), "Q", struct.unpack_from("<Q", PACK, entry_of("code"))[0] + 4), "section code"),
        (patched(entry_of("ops") + 8, "Q", 95), "section ops is cut in a record"),
        (patched(entry_of("strings") + 8, "Q", 3), "the strings do not end"),
        (patched(record_field("ops", 0), "I", 2**31), "string 2147483648 of"),
        (patched(record_field("ops", 24), "I", 2**32 - 1), "ops.locals leaves section locals"),
        (patched(record_field("launches", 0), "I", 1), "launches.image 1 does not exist"),
        (patched(record_field("candidates", 0), "I", 9), "candidates.variant 9 does not exist"),
        (patched(record_field("buckets", 0), "q", 8), "the buckets of op are not in order"),
        (patched(record_field("code", 0), "q", 200), "there is no opcode 200"),
        (patched(record_field("frames", 0), "Q", 2**60), "frame 0 leaves the file"),
        (patched(record_field("frames", 0), "Q", 0), "frame 0 lies in the index"),
        (patched(record_field("frames", 8), "Q", 2**60), "frame 0 leaves the file"),
        (patched(record_field("frames", 8), "Q", 0), "frame 0: "),
        (patched(record_field("frames", 16), "Q", 2**60), "frame 0 promises 1152921504606846976 bytes"),
        (patched(record_field("frames", 16), "Q", 451), "frame 0: no zstd frame of 451 bytes"),
        (patched(record_field("images", 8), "I", 1), "images.frame 1 does not exist"),
        (patched(record_field("images", 16), "Q", 1), "image 0 leaves its frame"),
        (patched(record_field("images", 24), "Q", 2**60), "image 0 leaves its frame"),
        (patched(record_field("images", 24), "Q", 449), "image 0 does not have its hash"),
        (patched(record_field("images", 32), "B", 0), "image 0 does not have its hash"),
    ],
)
def test_hostile_packs_are_refused_for_what_is_wrong(data, message):
    with pytest.raises(PackFormatError, match=message):
        read_pack(data)


@pytest.mark.parametrize("offset", [24, 32], ids=["file_size", "index_size"])
def test_a_promise_of_two_to_the_sixty_bytes_is_refused_at_once(offset):
    data = bytearray(PACK)
    struct.pack_into("<Q", data, offset, 2**60)
    with pytest.raises(PackFormatError, match=str(2**60)):
        read_pack(bytes(data))


def test_a_frame_that_unpacks_to_more_than_it_says_is_refused():
    """Without unpacking it all."""
    w = PackWriter(90, 0, "c")
    w.image(fmt.IMAGE_CUBIN, "bomb", bytes(200 << 20))
    data = bytearray(w.finish())
    with pytest.raises(PackFormatError, match="frame 0 promises 209715200 bytes"):
        read_pack(bytes(data))
    struct.pack_into("<Q", data, struct.unpack_from("<Q", data, entry_of("frames"))[0] + 16, 100)
    with pytest.raises(PackFormatError, match="frame 0: no zstd frame of 100 bytes"):
        read_pack(rehashed(data))


# --- Many images ---


def many_images() -> list[bytes]:
    """Alike, as kernels are, and each with something of its own."""
    rng = random.Random(1)
    common = [rng.randbytes(512) for _ in range(40)]
    return [b"".join(rng.choices(common, k=rng.randrange(10, 30))) + rng.randbytes(64) for _ in range(200)]


@pytest.fixture(scope="module")
def large() -> bytes:
    w = PackWriter(90, 0, "c")
    for i, image in enumerate(many_images()):
        w.image(fmt.IMAGE_CUBIN, f"image {i}", image, f"op {i % 3}")
    return w.finish()


def test_images_of_an_op_share_frames(large):
    pack = read_pack(large)
    assert 1 < len(pack.frames) <= sum(map(len, many_images())) // (FRAME_BYTES // 2) + 1
    assert [pack.image(n) for n in range(200)] == many_images()


def field_of(data: bytes, section: str, offset: int) -> int:
    return struct.unpack_from("<Q", data, entry_of(section))[0] + offset


def test_another_frame_is_refused(large):
    """Of the same size, whole, and right but for a byte."""
    record = read_pack(large).frames[0]
    content = bytearray(zstandard.ZstdDecompressor().decompress(large[record.offset :][: record.compressed_size]))
    content[4] ^= 1
    changed = zstandard.ZstdCompressor(level=19).compress(bytes(content))
    data = bytearray(large) + changed
    struct.pack_into("<QQ", data, field_of(large, "frames", 0), len(large), len(changed))
    struct.pack_into("<Q", data, 24, len(data))
    with pytest.raises(PackFormatError, match="does not have its hash"):
        read_pack(rehashed(data))


def test_flipped_bytes_of_a_frame_are_refused_or_change_nothing(large):
    record = read_pack(large).frames[0]
    rng = random.Random(2)
    refused = 0
    for at in rng.sample(range(record.offset, record.offset + record.compressed_size), 60):
        data = bytearray(large)
        data[at] ^= 1 << rng.randrange(8)
        try:
            read_pack(bytes(data))  # every image has its hash
        except PackFormatError:
            refused += 1
    assert refused > 40


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_pack(tmp_path / "none.tkpack")
