"""Gradients of captured tensors: many places of the scores read one element, and its gradient is their sum.

Sums of floating-point atomics depend on the GPU's order. These are of 64-bit integers, which commute, so that the same
call gives the same bits: they count 2^-34 of the largest |grad_out|, rounded up to a power of two. A contribution of
2^50 of these units, or one that is no number, makes the gradient NaN rather than wrong.
"""

import triton
import triton.language as tl

DIGITS = tl.constexpr(34)
LARGEST = tl.constexpr(2.0**50)
POISON = tl.constexpr(2**62)


@triton.jit
def exponent_of(largest):
    """e with the largest magnitude below 2^e, from its bits; within what leaves 2^(DIGITS - e) a number of fp32."""
    e = (largest >> 23) - 126
    return tl.minimum(tl.maximum(e, -80), 80)


@triton.jit
def power_of_two(e):
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def add_gradient(buffer, largest, offset, x, inside):
    """buffer[offset] += x where `inside`. Zeros, of masked lanes above all, are left out."""
    units = x * power_of_two(-exponent_of(tl.load(largest)) + DIGITS)
    inside = inside & (x != 0.0)
    is_good = tl.abs(units) < LARGEST
    units = tl.where(is_good, units, 0.0)
    units = tl.where(units < 0, units - 0.5, units + 0.5).to(tl.int64)
    tl.atomic_add(buffer + offset, units, mask=inside & is_good, sem="relaxed")
    tl.atomic_max(buffer + offset, tl.zeros_like(units) + POISON, mask=inside & (is_good == 0), sem="relaxed")


@triton.jit
def zero_gradient(buffer, size, BLOCK: tl.constexpr):
    """Before anything is added."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(buffer + i, tl.zeros([BLOCK], buffer.dtype.element_ty), mask=i < size)


@triton.jit
def finish_gradient(buffer, largest, out, size, BLOCK: tl.constexpr):
    """From the sums to the gradient in the captured tensor's dtype."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    units = tl.load(buffer + i, mask=i < size, other=0)
    # Sums of what is good stay far below; what is added to the poison does not bring it there.
    is_poisoned = (units >= POISON // 2) | (units <= -POISON // 2)
    value = units.to(tl.float32) * power_of_two(exponent_of(tl.load(largest)) - DIGITS)
    value = tl.where(is_poisoned, float("nan"), value)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=i < size)
