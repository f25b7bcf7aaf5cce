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
def is_above(b, a):
    """Whether b takes the place of a, which came before it. NaN is above all else."""
    return (b > a) | ((b != b) & (a == a))


@triton.jit
def is_below(b, a):
    return (b < a) | ((b != b) & (a == a))


@triton.jit
def welford(mean, m2, weight, other_mean, other_m2, other_weight):
    """Mean and sum of squared deviations of two parts (Chan et al., 1979)."""
    total = weight + other_weight
    share = tl.where(total == 0, 0.0, other_weight / total)
    delta = other_mean - mean
    return mean + delta * share, m2 + other_m2 + delta * delta * weight * share, total


@triton.jit
def erfc(x):
    """Within 9e-7 of its value (tools/fit_gelu.py), 7e-6 in the far tail. libdevice's erf leaves fewer digits to
    1 + erf(-x), and takes five times the instructions."""
    z = tl.abs(x)
    t = tl.rsqrt(1.0 + 0.5091168824543142 * z)
    t = t * t  # a division takes three times the instructions
    p = 0.09411243349313736 * t - 0.35952889919281006
    p = p * t + 0.36190739274024963
    p = p * t + 0.05309907719492912
    p = p * t + 0.2794383764266968
    p = p * t + 0.2835449278354645
    p = p * t + 0.28742608428001404
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
    """Philox 4x32-10: four words for each counter of 64 bits, as tk.generated.random."""
    a = counter.to(tl.uint32)
    b = (counter >> 32).to(tl.uint32)
    c = tl.full((), stream, tl.uint32)
    d = tl.full((), 0, tl.uint32)
    return tl.philox(seed, a, b, c, d)


@triton.jit
def random_bits(seed, element, stream):
    a, b, c, d = random_words(seed, element >> 2, stream)
    word = (element & 3).to(tl.int32)
    found = tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))
    return found.to(tl.int32, bitcast=True)


@triton.jit
def random_block(seed, first, stream, n: tl.constexpr):
    """The same for n elements in a row, of which `first`, a number or [P, 1], is a multiple of 4."""
    if len(first.shape) == 2:
        rows: tl.constexpr = first.shape[0]
        a, b, c, d = random_words(seed, (first >> 2) + tl.arange(0, n // 4)[None, :], stream)
        found = tl.join(tl.join(a, c), tl.join(b, d)).reshape(rows, n)
    else:
        a, b, c, d = random_words(seed, (first >> 2) + tl.arange(0, n // 4), stream)
        found = tl.join(tl.join(a, c), tl.join(b, d)).reshape(n)
    return found.to(tl.int32, bitcast=True)


@triton.jit
def search(row, step, count, value, right: tl.constexpr):
    """How many elements of a sorted row come before the value; with `right` the equal ones too. NaN comes last."""
    low = row.to(tl.int64) * 0 + (value == value).to(tl.int64) * 0
    high = low + count
    left = tl.zeros((), tl.int64) + count
    while left > 0:
        middle = (low + high) >> 1
        inside = low < high
        element = tl.load(row + middle * step, mask=inside, other=0).to(value.dtype)
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
