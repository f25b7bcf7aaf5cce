"""Device functions that printed kernels call: how reductions put two parts together."""

# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def multiply(a, b):
    return a * b


@triton.jit
def bit_or(a, b):
    return a | b


@triton.jit
def bit_and(a, b):
    return a & b


@triton.jit
def bit_xor(a, b):
    return a ^ b


@triton.jit
def fetch(rows, mask, n, MOST: tl.constexpr):
    """Asks for `n` elements of each of these rows, of at most `MOST`, to be brought into the L2 cache."""
    LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(MOST, LINE))
    at = tl.arange(0, LINES)[None, :] * LINE
    wanted = (mask & (at < n)).to(tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r", [(rows + at).to(tl.int64), wanted], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def add_16(at, value, mask):
    """Adds to elements of 16 bits, in any order. Atomics on one of them are loops; on two beside each other they are
    not. So the other one of the same 4 bytes gets -0.0, which changes nothing. It must belong to the same tensor. A
    block must not have fewer elements than threads, of which several would then add the same one."""
    KIND: tl.constexpr = "bf16x2" if at.dtype.element_ty == tl.bfloat16 else "f16x2"
    behind = at.to(tl.int64) & 2
    bits = value.to(at.dtype.element_ty).to(tl.uint16, bitcast=True).to(tl.uint32)
    pair = tl.where(behind != 0, bits << 16 | 0x8000, bits | 0x80000000)
    wanted = ((behind < 4) & mask).to(tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p red.relaxed.gpu.global.add.noftz." + KIND
        + " [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r,r", [at.to(tl.int64) - behind, pair, wanted], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def divided(x, n, magic):
    """x // n, from 0 on, by a multiplication. magic: (2**31 - 1) // n for x of 32 bits, (2**55 - 1) // n for one of 64
    that is below 2**54. The product is at most 1 too small."""
    if x.dtype.primitive_bitwidth == 32:
        found = tl.umulhi(x.to(tl.uint32) * 2, tl.cast(magic, tl.uint32)).to(tl.int32)
    else:
        found = tl.umulhi(x.to(tl.uint64) * 512, tl.cast(magic, tl.uint64)).to(tl.int64)
    return found + (x - found * n >= n).to(found.dtype)


@triton.jit
def leading(x, size_1, size_2, magic_1, magic_2, stride_0, stride_1, stride_2):
    """Where element x of three dimensions is."""
    rows = divided(x, size_2, magic_2)
    blocks = divided(rows, size_1, magic_1)
    return blocks * stride_0 + (rows - blocks * size_1) * stride_1 + (x - rows * size_2) * stride_2


@triton.jit
def is_within(index, size):
    """0 <= index < size, of 64 bits: as unsigned numbers what is below 0 is above all sizes."""
    return index.to(tl.uint64) < tl.cast(size, tl.uint64)


@triton.jit
def trap_where(bad):
    """Ends the kernel, and with it the process's CUDA context, where any lane holds."""
    lanes = bad.to(tl.int32) + tl.zeros([1], tl.int32)  # never a scalar, which no assembly takes
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p trap; mov.u32 $0, 0; }",
        "=r,r", [lanes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def is_above(b, a):
    """Whether b takes the place of a, which came before it. NaN is above all else."""
    return (b > a) | ((b != b) & (a == a))


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def add_both(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def logaddexp(a, b):
    """log(exp(a) + exp(b)). Of infinities of one sign that infinity."""
    high = maximum(a, b)
    low = minimum(a, b)
    same = (low == high) & (tl.abs(high) == float("inf"))
    return tl.where(same, high, high + libdevice.log1p(libdevice.exp(low - high)))


@triton.jit
def running_max(a, i, b, j):
    """b comes later. Of equal ones the later, and every NaN from the first one on."""
    take = (b != b) | ((a == a) & (b >= a))
    return tl.where(take, b, a), tl.where(take, j, i)


@triton.jit
def running_min(a, i, b, j):
    take = (b != b) | ((a == a) & (b <= a))
    return tl.where(take, b, a), tl.where(take, j, i)


@triton.jit
def last(x, axis: tl.constexpr):
    """The last element along an axis, bit by bit; of two dimensions one of size 1 is left."""
    return element(x, axis, x.shape[axis] - 1)


@triton.jit
def first(x, axis: tl.constexpr):
    return element(x, axis, 0)


@triton.jit
def element(x, axis: tl.constexpr, place: tl.constexpr):
    n: tl.constexpr = x.shape[axis]
    bits = x
    if x.dtype.is_floating():
        bits = x.to(tl.int64 if x.dtype.primitive_bitwidth == 64 else tl.int32, bitcast=True)
    at = tl.arange(0, n) == place
    if len(x.shape) == 2:
        at = at[None, :] if axis == 1 else at[:, None]
    found = tl.reduce(tl.where(at, bits, tl.zeros_like(bits)), axis, bit_or, keep_dims=len(x.shape) == 2)
    return found.to(x.dtype, bitcast=True)


@triton.jit
def at_place(x, place):
    """One element of a dimension, bit by bit."""
    bits = x
    if x.dtype.is_floating():
        bits = x.to(tl.int64 if x.dtype.primitive_bitwidth == 64 else tl.int32, bitcast=True)
    chosen = tl.where(tl.arange(0, x.shape[0]) == place, bits, tl.zeros_like(bits))
    return tl.reduce(chosen, 0, bit_or).to(x.dtype, bitcast=True)


# --- Scans over programs (printing/scans.py). state: a ticket, a flag for every block, a flag for every window. ---


@triton.jit
def clear(ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(ptr + at, 0, mask=at < n)


@triton.jit
def raise_flag(flag):
    """After all that the program has stored."""
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem="release")


@triton.jit
def wait_for(flags, lanes, count):
    """Until `count` flags are up. Plain reads look for them; one atomic read then orders what is read after."""
    inside = lanes < count
    left = 1
    while left != 0:
        seen = tl.load(flags + lanes, mask=inside, other=1, volatile=True)
        left = tl.max((seen == 0).to(tl.int32), 0)
        if left == 0:
            sure = tl.atomic_add(flags + lanes, 0, mask=inside, sem="acquire")
            left = tl.max(((sure == 0) & inside).to(tl.int32), 0)
    tl.debug_barrier()


@triton.jit
def blocks_before(part, WINDOW: tl.constexpr):
    """How many blocks a program reads one by one: those before it in its window, or the whole window before."""
    inside = (part % WINDOW).to(tl.int32)
    return tl.where((inside == 0) & (part > 0), WINDOW, inside)


# --- Sorts (printing/sorts.py) ---


@triton.constexpr_function
def log2(n):
    return n.bit_length() - 1


@triton.jit
def partner(x, i: tl.constexpr):
    """What stands at the other place along the `i`-th dimension from the end, all of size 2."""
    return x ^ tl.xor_sum(x, len(x.shape) - 1 - i, keep_dims=True)


@triton.jit
def place_along(n: tl.constexpr, i: tl.constexpr):
    """0 and 1 along the `i`-th of n dimensions from the end."""
    return tl.reshape(tl.arange(0, 2), [1] * (n - 1 - i) + [2] + [1] * i)


@triton.jit
def exchange(a, b, descending, i: tl.constexpr):
    """The pairs (a, b) of two places in order, or in the opposite one where `descending` is 1."""
    other_a = partner(a, i)
    other_b = partner(b, i)
    is_larger = (a > other_a) | ((a == other_a) & (b > other_b))
    swap = is_larger != ((descending ^ place_along(len(a.shape), i)) != 0)
    return tl.where(swap, other_a, a), tl.where(swap, other_b, b)


@triton.jit
def sort_pairs(a, b):
    """Pairs along the last dimension, by a and then by b: Batcher's bitonic sort. No two pairs may be equal."""
    total: tl.constexpr = log2(a.numel)
    along: tl.constexpr = log2(a.shape[len(a.shape) - 1])
    x = tl.reshape(a, [2] * total)
    y = tl.reshape(b, [2] * total)
    for stage in tl.static_range(1, along + 1):
        descending = 0
        if stage < along:
            descending = place_along(total, stage)
        for step in tl.static_range(stage):
            x, y = exchange(x, y, descending, stage - 1 - step)
    return tl.reshape(x, a.shape), tl.reshape(y, b.shape)


@triton.jit
def merge_bitonic_pairs(a, b):
    """Of pairs that rise and then fall."""
    total: tl.constexpr = log2(a.numel)
    x = tl.reshape(a, [2] * total)
    y = tl.reshape(b, [2] * total)
    for step in tl.static_range(total):
        x, y = exchange(x, y, 0, total - 1 - step)
    return tl.reshape(x, a.shape), tl.reshape(y, b.shape)


PROBES = tl.constexpr(64)


@triton.jit
def is_before(a, b, a2, b2, IS_PAIR: tl.constexpr):
    if IS_PAIR:
        return (a < b) | ((a == b) & (a2 < b2))
    return a < b


@triton.jit
def taken_from_first(keys, seconds, row, low, middle, high, count, IS_PAIR: tl.constexpr):
    """How many of the first `count` merged elements come from the first run, [low, middle); the other one is
    [middle, high).

    Each step asks at 64 places at once, and leaves one piece of 64."""
    first = tl.maximum(count - (high - middle), 0)
    left = tl.minimum(count, middle - low) - first  # the answer is first + 0 … left
    while left > 0:
        step = (left + PROBES - 1) // PROBES
        at = first + tl.arange(0, PROBES) * step  # element `at` is among them if it stands before its counterpart
        inside = at < first + left
        a = tl.load(keys + row + low + at, mask=inside, other=0)
        b = tl.load(keys + row + middle + (count - 1 - at), mask=inside, other=0)
        a2 = a
        b2 = b
        if IS_PAIR:
            a2 = tl.load(seconds + row + low + at, mask=inside, other=0)
            b2 = tl.load(seconds + row + middle + (count - 1 - at), mask=inside, other=0)
        hits = tl.sum((is_before(a, b, a2, b2, IS_PAIR) & inside).to(tl.int32), 0)
        end = first + left
        first = tl.where(hits > 0, first + (hits - 1) * step + 1, first)
        left = tl.where(hits > 0, tl.minimum(step - 1, end - first), 0)
    return first


@triton.jit
def sides(keys, seconds, n, run, TILE: tl.constexpr, IS_PAIR: tl.constexpr):
    """(row, where the tile is stored, its part of the first run and of the second: start and count of each)."""
    tiles = tl.cdiv(n, TILE)
    row = (tl.program_id(0) // tiles).to(tl.int64) * n
    start = (tl.program_id(0) % tiles).to(tl.int64) * TILE
    low = start // (2 * run) * (2 * run)
    middle = tl.minimum(low + run, n)
    high = tl.minimum(low + 2 * run, n)
    before = start - low
    after = tl.minimum(before + TILE, high - low)
    first_a = taken_from_first(keys, seconds, row, low, middle, high, before, IS_PAIR)
    last_a = taken_from_first(keys, seconds, row, low, middle, high, after, IS_PAIR)
    count_a = last_a - first_a
    return row, start, low + first_a, count_a, middle + before - first_a, after - before - count_a


@triton.jit
def merge(source_0, target_0, n, run, TILE: tl.constexpr):
    """Pairs of sorted runs of each row become one: a tile of it, found by the merge path (Odeh et al., 2012). What
    comes of the second run is read backwards, so that the tile rises and then falls."""
    row, start, a, count_a, b, count_b = sides(source_0, source_0, n, run, TILE, False)
    at = tl.arange(0, TILE).to(tl.int64)
    from_end = TILE - 1 - at
    place = tl.where(at < count_a, a + at, b + from_end)
    x = tl.load(source_0 + row + place, mask=(at < count_a) | (from_end < count_b), other=0x7FFFFFFFFFFFFFFF)
    x = tl.bitonic_merge(x)
    tl.store(target_0 + row + start + at, x, mask=at < count_a + count_b)


@triton.jit
def merge_pairs(source_0, target_0, source_1, target_1, n, run, TILE: tl.constexpr):
    row, start, a, count_a, b, count_b = sides(source_0, source_1, n, run, TILE, True)
    at = tl.arange(0, TILE).to(tl.int64)
    from_end = TILE - 1 - at
    place = tl.where(at < count_a, a + at, b + from_end)
    inside = (at < count_a) | (from_end < count_b)
    x = tl.load(source_0 + row + place, mask=inside, other=0x7FFFFFFFFFFFFFFF)
    y = tl.load(source_1 + row + place, mask=inside, other=0x7FFFFFFFFFFFFFFF)
    x, y = merge_bitonic_pairs(x, y)
    tl.store(target_0 + row + start + at, x, mask=at < count_a + count_b)
    tl.store(target_1 + row + start + at, y, mask=at < count_a + count_b)


@triton.jit
def is_later_max(a, i, b, j):
    """Whether (b, j) takes the place of (a, i): larger, NaN before all, the first of equals."""
    larger = (b > a) | ((b != b) & (a == a))
    equal = (b == a) | ((b != b) & (a != a))
    return larger | (equal & (j < i))


@triton.jit
def is_below(b, a):
    return (b < a) | ((b != b) & (a == a))


@triton.jit
def corrected(mean, squares, deviations, count):
    """A mean of rounded sums, by the deviations from it, where numbers deviate by little: it may miss what equal ones
    are. Where they deviate by more the deviations are rounded themselves, and all alike. NaN where one is infinite."""
    is_near = (squares * 16.0 >= mean * mean * count) == 0
    return tl.where(is_near, mean + deviations / count, mean)


@triton.jit
def coarse(x, size):
    """A number rounded to multiples of a 64th to a 128th of a size: what numbers of that size are above it loses no
    digit. Above a number of more digits they are rounded alike, all those of a binade, and their mean shows it."""
    digits: tl.constexpr = 65536.0 if x.dtype == tl.float32 else 35184372088832.0
    size = tl.minimum(size * digits, 1e30)  # no overflow; of larger numbers it is as it was
    return (x + size) - size


@triton.jit
def centred(squares, deviations, count):
    """The sum of squared deviations from the mean, of those from a rounded mean: the square of what the rounding made
    of each is taken off. Of equal numbers nothing is left, and never less."""
    return maximum(squares - deviations * (deviations / count), squares * 0)


@triton.jit
def erfc(x):
    """Within 9e-7 of its value (tools/fit_gelu.py), 7e-6 in the far tail. libdevice's erf leaves fewer digits to
    1 + erf(-x), and takes five times the instructions."""
    z = tl.abs(x)
    t = tl.rsqrt(tl.fma(z, 0.5091168824543142, 1.0))
    t = t * t  # a division takes three times the instructions
    p = tl.fma(t, 0.09411243349313736, -0.35952889919281006)  # nothing is contracted but what says so
    p = tl.fma(p, t, 0.36190739274024963)
    p = tl.fma(p, t, 0.05309907719492912)
    p = tl.fma(p, t, 0.2794383764266968)
    p = tl.fma(p, t, 0.2835449278354645)
    p = tl.fma(p, t, 0.28742608428001404)
    tail = p * t * tl.exp2(-1.4426950408889634 * (z * z))
    return tl.where(x < 0, 2.0 - tail, tail)


@triton.jit
def floor_div(a, b):
    """Of signed integers: rounded down, where the hardware rounds to zero."""
    quotient = a // b
    return tl.where((a % b != 0) & ((a < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def remainder(a, b):
    """Of signed integers: with the sign of the divisor."""
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def float_remainder(a, b):
    """With the sign of the divisor."""
    rest = libdevice.fmod(a, b)
    return tl.where((rest != 0) & ((b < 0) != (rest < 0)), rest + b, rest)


@triton.jit
def float_floor_div(a, b):
    """As ATen: from the exact remainder, so that it is right where a / b rounds up to an integer."""
    rest = libdevice.fmod(a, b)
    quotient = (a - rest) / b
    quotient = tl.where((rest != 0) & ((b < 0) != (rest < 0)), quotient - 1, quotient)
    down = libdevice.floor(quotient)
    down = tl.where(quotient - down > 0.5, down + 1, down)
    down = tl.where(quotient != 0, down, libdevice.copysign(quotient * 0, a / b))
    return tl.where(b == 0, a / b, down)


@triton.jit
def shift_left(a, count):
    """0 for a count past the width, or below 0."""
    width: tl.constexpr = a.dtype.primitive_bitwidth
    is_within = (count >= 0) & (count < width)
    return tl.where(is_within, a << tl.where(is_within, count, 0), 0)


@triton.jit
def shift_right(a, count):
    """The sign for a count past the width, or below 0."""
    width: tl.constexpr = a.dtype.primitive_bitwidth
    is_within = (count >= 0) & (count < width)
    return a >> tl.where(is_within, count, width - 1)


@triton.jit
def int_pow(base, exponent):
    """By squaring. Below 0 as torch: 1 for a base of 1, its parity for -1, else 0."""
    base, exponent = tl.broadcast(base, exponent)  # what a loop changes must keep its shape
    result = base * 0 + 1
    square = base
    left = exponent
    for _ in range(exponent.dtype.primitive_bitwidth - 1):
        result = tl.where((left & 1) != 0, result * square, result)
        square = square * square
        left = left >> 1
    odd = (exponent & 1) != 0
    is_minus_one = base + 1 == 0  # unsigned exponents are never below 0
    inverse = tl.where(base == 1, 1, tl.where(is_minus_one & odd, base, tl.where(is_minus_one, 1, 0)))
    return tl.where(exponent < 0, inverse.to(base.dtype), result)


@triton.jit
def random_words(seed, counter, stream):
    """Philox 4x32-10: four words for each counter of 64 bits, as tk.generated.random. Both halves of a product are one
    wide multiplication; `tl.philox` has one for each half, and the compiler does not join them."""
    a = counter.to(tl.uint32)
    b = (counter >> 32).to(tl.uint32)
    c = a * 0 + tl.full((), stream, tl.uint32)
    d = a * 0
    key_a = seed.to(tl.uint32)
    key_b = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        of_a = a.to(tl.uint64) * 0xD2511F53
        of_c = c.to(tl.uint64) * 0xCD9E8D57
        a = (of_c >> 32).to(tl.uint32) ^ b ^ key_a
        b = of_c.to(tl.uint32)
        c = (of_a >> 32).to(tl.uint32) ^ d ^ key_b
        d = of_a.to(tl.uint32)
        key_a = tl.add(key_a, 0x9E3779B9, sanitize_overflow=False)
        key_b = tl.add(key_b, 0xBB67AE85, sanitize_overflow=False)
    return a, b, c, d


@triton.jit
def random_bits(seed, element, stream):
    a, b, c, d = random_words(seed, element >> 2, stream)
    word = (element & 3).to(tl.int32)
    found = tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))
    return found.to(tl.int32, bitcast=True)


@triton.jit
def random_run(seed, first, together, stream, n: tl.constexpr):
    """The same for n elements in a row from `first` on, a number or [P, 1]. together: a number; where it is a multiple
    of 4, all of `first` are, and four elements have the four words of a block. Elsewhere they have those of two blocks
    that follow each other, which is half the work of a block for each element, and needs fewer registers."""
    numbers = tl.arange(0, n // 4)
    block = (first >> 2) + (numbers[None, :] if len(first.shape) == 2 else numbers)
    a, b, c, d = random_words(seed, block, stream)
    if together % 4 != 0:
        e, f, g, _ = random_words(seed, block + 1, stream)
        by_one = (first & 1) != 0
        a, b, c = tl.where(by_one, b, a), tl.where(by_one, c, b), tl.where(by_one, d, c)
        d, e, f = tl.where(by_one, e, d), tl.where(by_one, f, e), tl.where(by_one, g, f)
        by_two = (first & 2) != 0
        a, b, c, d = tl.where(by_two, c, a), tl.where(by_two, d, b), tl.where(by_two, e, c), tl.where(by_two, f, d)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    found = words.reshape(first.shape[0], n) if len(first.shape) == 2 else words.reshape(n)
    return found.to(tl.int32, bitcast=True)


@triton.jit
def search(row, mask, step, count, value, right: tl.constexpr):
    """How many elements of a sorted row come before the value; with `right` the equal ones too. NaN comes last. mask:
    where there is a row."""
    if count <= 2147483647:
        found = _search(row, mask, step, count, value, right, tl.int32).to(tl.int64)
    else:
        found = _search(row, mask, step, count, value, right, tl.int64)
    return found


@triton.jit
def _search(row, mask, step, count, value, right: tl.constexpr, dtype: tl.constexpr):
    """In the dtype that counts them. Its places are those where ATen looks, whatever there is."""
    low = (row.to(tl.int64) * 0 + (value == value).to(tl.int64) * 0).to(dtype)
    high = low + tl.cast(count, dtype)
    left = tl.zeros((), dtype) + tl.cast(count, dtype)
    while left > 0:
        middle = low + ((high - low) >> 1)
        inside = (low < high) & mask
        element = tl.load(row + middle.to(tl.int64) * step, mask=inside, other=0).to(value.dtype)
        # As ATen asks it, which puts a NaN past everything.
        before = (element > value) == 0 if right else (element >= value) == 0
        low = tl.where(inside & before, middle + 1, low)
        high = tl.where(inside & (before == 0), middle, high)
        left = left >> 1
    return low


@triton.jit
def to_fp8e5(x):
    """As ATen: what rounds past the largest number is infinite, where the hardware's conversion stops at it. (For
    e4m3fn both stop there.)"""
    bits = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    sign = (x.to(tl.uint32, bitcast=True) >> 24).to(tl.uint8) & 128
    return tl.where(tl.abs(x) >= 61440.0, sign | 124, bits).to(tl.float8e5, bitcast=True)
