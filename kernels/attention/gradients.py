"""Gradients of captured tensors: many places of the scores read one element, and its gradient is their sum.

Sums are made by atomic additions into buffers: of fp32, whose order — and so the last bits — is the GPU's; or, where the
same bits are asked for, of 64-bit integers that count 2^-40, since their additions commute. A contribution of 2^22 or
more, or none that is a number, makes the whole gradient NaN there rather than a wrong number.
"""

import triton
import triton.language as tl

FLOAT = tl.constexpr(1)  # WITH_CAPTURES; 0 is none
FIXED = tl.constexpr(2)
UNIT = tl.constexpr(2.0**40)
LARGEST = tl.constexpr(2.0**22)
POISON = tl.constexpr(2**62)


@triton.jit
def add_gradient(buffer, offset, x, inside, WITH_CAPTURES: tl.constexpr):
    """buffer[offset] += x where `inside`. Zeros, of masked lanes above all, are left out."""
    inside = inside & (x != 0.0)
    if WITH_CAPTURES == FIXED:
        is_good = tl.abs(x) < LARGEST
        units = tl.where(is_good, x, 0.0).to(tl.float64) * UNIT
        units = tl.where(units < 0, units - 0.5, units + 0.5).to(tl.int64)
        tl.atomic_add(buffer + offset, units, mask=inside & is_good, sem="relaxed")
        tl.atomic_max(buffer + offset, tl.zeros_like(units) + POISON, mask=inside & (is_good == 0), sem="relaxed")
    else:
        tl.atomic_add(buffer + offset, x, mask=inside, sem="relaxed")


@triton.jit
def zero_gradient(buffer, size, BLOCK: tl.constexpr):
    """Before anything is added."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(buffer + i, tl.zeros([BLOCK], buffer.dtype.element_ty), mask=i < size)


@triton.jit
def finish_gradient(buffer, out, size, BLOCK: tl.constexpr):
    """From the buffer to the gradient in the captured tensor's dtype."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(buffer + i, mask=i < size, other=0)
    if buffer.dtype.element_ty == tl.int64:
        value = (x.to(tl.float64) / UNIT).to(tl.float32)
        # Sums of what is good stay below 2^62 in at least 2^22 additions of the largest; poison only grows them.
        value = tl.where(tl.abs(x) >= POISON // 2, float("nan"), value)
    else:
        value = x
    tl.store(out + i, value.to(out.dtype.element_ty), mask=i < size)
