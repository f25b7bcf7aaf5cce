"""Rows of numbers sorted by one program each, digit by digit (least significant first), in shared memory.

A thread has some neighbouring elements of the row. In each pass it counts how many of them have each of the four values
of two bits; a scan over the threads says where its elements of each value go. So equal numbers keep their order, and
what each pass takes does not grow with the row's length, as in a bitonic sort.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

DIGIT = gl.constexpr(2)  # bits of a pass: four counts of a byte are one number


@gluon.jit
def add_pairs(a, b, a2, b2):
    return a + a2, b + b2


@gluon.jit
def bytes_of(low, high, which):
    """Four bytes of the eight of (low, high), each by a hexadecimal digit of `which`, the last one first; with 8 added,
    eight times its sign."""
    return gl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, which], gl.int32, True, 1)


@gluon.jit
def places(digit, low_memory, high_memory, TABLE: gl.constexpr):
    """Where each of [threads, elements] goes: behind all of lower digits, and all of its own that come before it.

    digit: 0 to 3. low_memory, high_memory: a number for each thread. TABLE: the layout of the threads."""
    one = gl.full(digit.shape, 1, gl.int32, layout=digit.type.layout) << (digit << 3)
    seen = gl.associative_scan(one, 1, _add)
    counts = gl.convert_layout(gl.sum(one, 1), TABLE)
    low = (counts & 0xFF) | ((counts & 0xFF00) << 8)
    high = ((counts >> 16) & 0xFF) | ((counts >> 8) & 0xFF0000)
    low_seen, high_seen = gl.associative_scan((low, high), 0, add_pairs)
    low_memory.store(low_seen)
    high_memory.store(high_seen)
    gl.barrier()
    last = gl.full(low_seen.shape, low_seen.shape[0] - 1, gl.int32, layout=TABLE)
    low_all = low_memory.gather(last, 0)
    high_all = high_memory.gather(last, 0)
    before_1 = low_all & 0xFFFF
    before_2 = before_1 + (low_all >> 16)
    before_3 = before_2 + (high_all & 0xFFFF)
    low_seen = low_seen - low + (before_1 << 16)
    high_seen = high_seen - high + (before_2 | (before_3 << 16))
    along: gl.constexpr = gl.SliceLayout(1, digit.type.layout)
    low_seen = gl.expand_dims(gl.convert_layout(low_seen, along), 1)
    high_seen = gl.expand_dims(gl.convert_layout(high_seen, along), 1)
    before = bytes_of(low_seen, high_seen, digit * 0x2222 + 0x9910)  # the two of a digit, and twice its sign: 0
    return before + bytes_of(seen, 0, digit + 0x4440) - 1


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def sort_rows(source, target, n, LOW: gl.constexpr, HIGH: gl.constexpr, BLOCK: gl.constexpr, TWICE: gl.constexpr):
    """Each row of n signed numbers by its bits [LOW, HIGH), of which the last is the sign. A row may be sorted where it
    stands. TWICE: each pass goes from one place in shared memory to another, and reads what it moves twice, for fewer
    registers."""
    WARPS: gl.constexpr = gl.num_warps()
    EACH: gl.constexpr = BLOCK // (32 * WARPS)
    BITS: gl.constexpr = source.dtype.element_ty.primitive_bitwidth
    threads: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    along: gl.constexpr = gl.BlockedLayout([EACH], [32], [WARPS], [0])
    table: gl.constexpr = gl.BlockedLayout([1, EACH], [32, 1], [WARPS, 1], [1, 0])
    padded: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[32, 128 // BITS]], [BLOCK], [0])  # 16 bytes
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    row = gl.program_id(0).to(gl.int64) * n
    at = gl.arange(0, BLOCK, layout=threads)
    x = gl.load(source + row + at, mask=at < n, other=2 ** (BITS - 1) - 1)
    memory = gl.allocate_shared_memory(x.dtype, [BLOCK], padded)
    other = memory
    if TWICE:
        other = gl.allocate_shared_memory(x.dtype, [BLOCK], padded)
    low_memory = gl.allocate_shared_memory(gl.int32, [32 * WARPS], plain)
    high_memory = gl.allocate_shared_memory(gl.int32, [32 * WARPS], plain)
    memory.store(x)
    gl.barrier()
    for bit in gl.static_range(LOW, HIGH, DIGIT):
        x = memory.load(along)
        digit = (x >> bit).to(gl.int32) & 3
        if bit + DIGIT == BITS:
            digit = digit ^ 2
        digit = gl.convert_layout(gl.reshape(digit, [32 * WARPS, EACH]), table)
        place = places(digit, low_memory, high_memory, threads)
        place = gl.convert_layout(gl.reshape(place, [BLOCK]), along)
        if TWICE:
            x = memory.load(along)
        else:
            gl.barrier()
        other.scatter(x, place, 0)
        gl.barrier()
        if TWICE:
            memory, other = other, memory
    x = memory.load(threads)
    gl.store(target + row + at, x, mask=at < n)
