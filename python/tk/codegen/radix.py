"""Rows of numbers sorted digit by digit, the least significant first.

A row that fits is sorted by one program, in shared memory (sort_rows), by two bits a pass. A thread has some
neighbouring elements of the row. In each pass it counts how many of them have each of the four values of two bits; a
scan over the threads says where its elements of each value go. So equal numbers keep their order, and what each pass
takes does not grow with the row's length, as in a bitonic sort.

Many programs share a longer row, by eight bits a pass. Each counts the digits of a block (count_digits). From the sums
of these counts (scan_counts) follows where its numbers of each digit go; it puts them in order in shared memory, so
that those of a digit lie beside each other, and writes them there (scatter_digits).
"""

# mypy: ignore-errors

import triton
import triton.language as tl
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


# --- Rows that programs share ---

BITS = 8  # of a digit
DIGITS = gl.constexpr(2**BITS)


@triton.jit
def digit_of(x, shift, sign):
    """The BITS bits of a 64-bit number's upper half from `shift` on. sign: 2^(BITS - 1) where their last one is the
    sign. Gluon calls it too."""
    return (((x >> 32).to(tl.int32) >> shift) ^ sign) & (DIGITS - 1)


@triton.jit
def count_digits(source, counts, n, blocks, shift, sign, BLOCK: tl.constexpr):
    """How many numbers of a block have each digit, to counts[row, digit, block]. A row of counts has one place more."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + row * n + at, mask=at < n, other=0)
    digit = digit_of(x, shift, sign)
    found = tl.histogram(digit, DIGITS, mask=at < n)
    line = row * DIGITS + tl.arange(0, DIGITS)
    tl.store(counts + line * (blocks + 1) + block, found)


@triton.jit
def scan_counts(counts, blocks, LINES: tl.constexpr, BLOCK: tl.constexpr):
    """Of some digits of a row: each block's count becomes the sum of those before it, and the last place gets that of
    all."""
    line = counts + (tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)) * (blocks + 1)
    before = tl.zeros([LINES], tl.int32)
    for start in range(0, blocks, BLOCK):
        at = start + tl.arange(0, BLOCK)[None, :]
        count = tl.load(line[:, None] + at, mask=at < blocks, other=0)
        tl.store(line[:, None] + at, before[:, None] + tl.cumsum(count, 1) - count, mask=at < blocks)
        before += tl.sum(count, 1)
    tl.store(line + blocks, before)


@gluon.constexpr_function
def powers(first, last):
    """Bases of a linear layout: the powers of two from `first` to before `last`."""
    return [[1 << i] for i in range(first.bit_length() - 1, last.bit_length() - 1)]


@gluon.constexpr_function
def ranks(outputs, inputs):
    """Of each digit, how many equal ones come before it in its warp, whose lanes have neighbours. The warp's counts,
    all 0, are left with how many there are of each. A ballot for every bit says which lanes have the same digit; the
    first of them adds to the count."""
    (found,), (digits, (memory,)) = outputs, inputs
    lines = [
        "{ .reg .pred p; .reg .b32 own, below, same, other, at, count;",
        f"mov.u32 own, %tid.x; shr.u32 own, own, 5; shl.b32 own, own, {BITS + 2}; add.u32 own, own, {memory};",
        "mov.u32 below, %lanemask_lt;",
    ]
    for rank, digit in zip(found, digits, strict=True):
        lines.append("mov.b32 same, 0xffffffff;")
        for bit in range(BITS):
            lines.append(f"and.b32 other, {digit}, {1 << bit}; setp.ne.u32 p, other, 0;")
            lines.append("vote.sync.ballot.b32 other, p, 0xffffffff; @!p not.b32 other, other;")
            lines.append("and.b32 same, same, other;")
        lines += [
            f"shl.b32 at, {digit}, 2; add.u32 at, at, own; ld.shared.u32 count, [at];",
            f"and.b32 other, same, below; popc.b32 other, other; add.u32 {rank}, count, other;",
            "setp.eq.u32 p, other, 0; popc.b32 same, same; add.u32 count, count, same;",
            "bar.warp.sync 0xffffffff; @p st.shared.u32 [at], count; bar.warp.sync 0xffffffff;",
        ]
    return "\n".join([*lines, "}"])


@gluon.jit
def scatter_digits(source, target, counts, n, blocks, shift, sign, BLOCK: gl.constexpr):
    """The numbers of a block to where those of their digits go. Arguments as of count_digits; counts: as scan_counts
    has left them."""
    WARPS: gl.constexpr = gl.num_warps()
    OWN: gl.constexpr = BLOCK // WARPS
    warp_bases: gl.constexpr = powers(OWN, BLOCK)
    in_warps: gl.constexpr = gl.DistributedLinearLayout(powers(32, OWN), powers(1, 32), warp_bases, [], [BLOCK])
    threads: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    table: gl.constexpr = gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [1, 0])
    along: gl.constexpr = gl.SliceLayout(0, table)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    memory = gl.allocate_shared_memory(gl.int64, [BLOCK], plain)
    seen_memory = gl.allocate_shared_memory(gl.int32, [WARPS * DIGITS], plain)
    move_memory = gl.allocate_shared_memory(gl.int32, [DIGITS], plain)
    row = (gl.program_id(0) // blocks).to(gl.int64)
    block = gl.program_id(0) % blocks
    left = n - block * BLOCK
    start = row * n + block * BLOCK

    # What stands past the row's end has the last digit, and stays behind all that has it too.
    last = ((sign ^ (DIGITS - 1)) << shift).to(gl.int64) << 32
    at = gl.arange(0, BLOCK, layout=in_warps)
    x = gl.load(source + start + at, mask=at < left, other=last)
    line = counts + (row * DIGITS + gl.arange(0, DIGITS, layout=threads)) * (blocks + 1)
    before = gl.load(line + block)
    total = gl.load(line + blocks)

    seen_memory.store(gl.zeros([WARPS * DIGITS], gl.int32, layout=threads))
    gl.barrier()
    digit = digit_of(x, shift, sign)
    rank = gl.inline_asm(ranks, ("=&r", "r", "r"), [digit, seen_memory], digit.type, is_pure=False)
    gl.barrier()
    count = seen_memory.reshape([WARPS, DIGITS]).load(table)
    in_block = gl.convert_layout(gl.sum(count, 0), threads)
    block_seen, row_seen = gl.associative_scan((in_block, total), 0, add_pairs)
    first = block_seen - in_block
    move_memory.store(row_seen - total + before - first)
    seen = gl.associative_scan(count, 0, _add) - count + gl.expand_dims(gl.convert_layout(first, along), 0)
    gl.barrier()
    seen_memory.reshape([WARPS, DIGITS]).store(seen)
    gl.barrier()
    place = seen_memory.gather(at // OWN * DIGITS + digit, 0) + rank
    memory.scatter(x, place, 0)
    gl.barrier()
    x = memory.load(threads)
    at = gl.arange(0, BLOCK, layout=threads)
    place = move_memory.gather(digit_of(x, shift, sign), 0) + at
    gl.store(target + row * n + place, x, mask=at < left)
