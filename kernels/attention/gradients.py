"""Gradients of captured tensors: many places of the scores read one element, and its gradient is their sum.

Sums of floating-point atomics depend on the GPU's order. These are of integers, which commute, so that the same call
gives the same bits. They count 2^-48 of the largest finite |grad_out| and |grad_lse|, rounded up to a power of two, in
96 bits: a sum may be 2^47 of it. An element's record is of 16 bytes: the low word, the high one, and a float that what
is no finite number is added to. A contribution that is finite and past 2^40 of the largest makes the gradient NaN
rather than wrong.
"""

import triton
import triton.language as tl

DIGITS = tl.constexpr(48)
LARGEST = tl.constexpr(2.0**88)
WORD = tl.constexpr(2.0**64)
WORDS = 2  # of 64 bits, of an element


@triton.jit
def exponent_of(largest):
    """e with the largest magnitude below 2^e, from its bits; within what leaves 2^(DIGITS - e) a number of fp32."""
    return tl.maximum((largest >> 23) - 126, -72)


@triton.jit
def power_of_two(e):
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def largest_of(x):
    """The bits of the largest finite magnitude."""
    x = tl.abs(x)
    return tl.where(x < float("inf"), x, 0.0).to(tl.int32, bitcast=True)


@triton.jit
def negative(low, high):
    """Of a number of two words."""
    return -low, -high - (low != 0).to(tl.int64)


@triton.jit
def words(x, unit):
    """x * unit, below LARGEST in magnitude, as two words: the low one without a sign, the high one with it."""
    x = x * unit
    size = tl.abs(x)
    high = (size * (1 / WORD)).to(tl.int64)
    rest = size - high.to(tl.float32) * WORD  # exact: no bit of `size` is in both
    low = (rest + 0.5).to(tl.uint64).to(tl.int64, bitcast=True)
    negative_low, negative_high = negative(low, high)
    return tl.where(x < 0, negative_low, low), tl.where(x < 0, negative_high, high)


@triton.jit
def add_gradient(buffer, largest, offset, x, inside):
    """The record at `offset` += x where `inside`. Zeros, of masked lanes above all, are left out."""
    unit = power_of_two(-exponent_of(tl.load(largest)) + DIGITS)
    inside = inside & (x != 0.0)
    is_good = tl.abs(x) * unit < LARGEST
    low, high = words(tl.where(is_good, x, 0.0), unit)
    before = tl.atomic_add(buffer + offset * 2, low, mask=inside & is_good, sem="relaxed")
    after = before + low
    high += (after.to(tl.uint64, bitcast=True) < before.to(tl.uint64, bitcast=True)).to(tl.int64)
    high_word = buffer.to(tl.pointer_type(tl.int32), bitcast=True) + offset * 4 + 2
    tl.atomic_add(high_word, high.to(tl.int32), mask=inside & is_good & (high != 0), sem="relaxed")
    x = tl.where(tl.abs(x) < float("inf"), float("nan"), x)
    others = buffer.to(tl.pointer_type(tl.float32), bitcast=True) + offset * 4 + 3
    tl.atomic_add(others, x, mask=inside & (is_good == 0), sem="relaxed")


@triton.jit
def zero_gradient(buffer, size, BLOCK: tl.constexpr):
    """Before anything is added."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(buffer + i, tl.zeros([BLOCK], buffer.dtype.element_ty), mask=i < size)


@triton.jit
def finish_gradient(buffer, largest, out, size, BLOCK: tl.constexpr):
    """From the sums to the gradient in the captured tensor's dtype."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    low = tl.load(buffer + i * 2, mask=inside, other=0)
    high = tl.load(buffer.to(tl.pointer_type(tl.int32), bitcast=True) + i * 4 + 2, mask=inside, other=0).to(tl.int64)
    others = tl.load(buffer.to(tl.pointer_type(tl.float32), bitcast=True) + i * 4 + 3, mask=inside, other=0.0)
    is_negative = high < 0
    negative_low, negative_high = negative(low, high)
    low = tl.where(is_negative, negative_low, low).to(tl.uint64, bitcast=True)
    high = tl.where(is_negative, negative_high, high)
    unit = (exponent_of(tl.load(largest)).to(tl.int64) - DIGITS + 1023 << 52).to(tl.float64, bitcast=True)
    value = (high.to(tl.float64) * WORD + low.to(tl.float64)) * unit
    value = tl.where(is_negative, -value, value).to(tl.float32) + others
    tl.store(out + i, value.to(out.dtype.element_ty), mask=inside)
