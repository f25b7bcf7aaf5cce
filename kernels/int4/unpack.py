"""Makes weights of packed bytes.

A word holds four columns of two k: the nibble of column c and of k's parity h is bits 8 c + 4 h and up. Over an
exponent, a nibble is a float32: bits 16 to 19 over that of 128 are 128 + value, bits 12 to 15 over that of 2048 are
2048 + value. So four shifts of a word give all eight of its values, each by one instruction more, and one multiply-add
makes a weight of them; a conversion from int to float would take four times as long.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl


class Elements(NamedTuple):
    """A weight with its scales and zeros, by any strides: of b, scales and zeros along k (or groups) and along n."""

    b: Any
    scales: Any
    zeros: Any
    group: Any
    stride_bk: Any
    stride_bn: Any
    stride_sg: Any
    stride_sn: Any
    stride_zg: Any
    stride_zn: Any
    has_scales: Any
    has_zeros: Any


class Words(NamedTuple):
    """The same in words of four columns, those of scales and zeros of 64 bits. Pitches are in units of 16 columns, so
    that the compiler knows that 16 bytes are there."""

    b: Any
    scales: Any
    zeros: Any
    group: Any
    b_pitch: Any
    scales_pitch: Any
    zeros_pitch: Any
    has_scales: Any
    has_zeros: Any
    even_mask: Any
    odd_mask: Any


@dataclass(frozen=True)
class Format:
    """ONES, EIGHTS: four of each, as a word of scales and of zeros that are not there."""

    DTYPE: tl.dtype
    ONES: int
    EIGHTS: int


TYPES = {"bf16": tl.bfloat16, "fp16": tl.float16}


# Both masks are arguments of the kernel: a constant would be loaded anew into a register before every use of it.
EVEN_MASK, ODD_MASK = 0xF0000, 0xF000


@triton.jit
def even_values(w, mask):
    """128 + value, fp32, of the four columns of words [...]: k even. mask: EVEN_MASK."""
    return _over_128(w << 16, mask), _over_128(w << 8, mask), _over_128(w, mask), _over_128(w >> 8, mask)


@triton.jit
def odd_values(w, mask):
    """The same of k odd."""
    return _over_128(w << 12, mask), _over_128(w << 4, mask), _over_128(w >> 4, mask), _over_128(w >> 12, mask)


@triton.jit
def odd_values_over_2048(w, mask):
    """2048 + value, from the words that even_values shifts anyway. mask: ODD_MASK."""
    return _over_2048(w << 8, mask), _over_2048(w, mask), _over_2048(w >> 8, mask), _over_2048(w >> 16, mask)


@triton.jit
def _over_128(x, mask):
    return ((x & mask) | 0x43000000).to(tl.float32, bitcast=True)


@triton.jit
def _over_2048(x, mask):
    return ((x & mask) | 0x45000000).to(tl.float32, bitcast=True)


@triton.jit
def four(x, i: tl.constexpr, DTYPE: tl.constexpr):
    """Column i of words [...] of 64 bits, each four 16-bit floats: as fp32."""
    return (x >> (16 * i)).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def load_four(at, words, end, row, stride, mask, DEFAULT: tl.constexpr):
    """A row of scales or zeros, four to a word [...]; DEFAULT, four bit patterns, from word `end` on: 0 where there are
    no scales, or no zeros."""
    return tl.load(at + row * stride + words, mask=mask & (words < end), other=DEFAULT)


@triton.jit
def load_scales(weight, words, N, group, mask, FORMAT: tl.constexpr):
    """Scales and zeros of a group, four to a word [...]. weight: ``Words``; N in units of 16 columns."""
    scale = load_four(
        weight.scales, words, N * 4 * weight.has_scales, group, weight.scales_pitch * 4, mask, FORMAT.ONES
    )
    zero = load_four(weight.zeros, words, N * 4 * weight.has_zeros, group, weight.zeros_pitch * 4, mask, FORMAT.EIGHTS)
    return scale, zero


@triton.jit
def columns(x0, x1, x2, x3, ROWS: tl.constexpr, COLS: tl.constexpr):
    """[ROWS, COLS / 4] of each of the four columns of words, as [ROWS, COLS]."""
    return tl.join(tl.join(x0, x2), tl.join(x1, x3)).reshape(ROWS, COLS)


@triton.jit
def weights(w, scale, zero, even_mask, odd_mask, ROWS: tl.constexpr, WORDS: tl.constexpr, DTYPE: tl.constexpr):
    """Words [ROWS, WORDS] -> the weights of even k and of odd k, [ROWS, 4 WORDS] each, rounded once to DTYPE. scale and
    zero: four to a word [WORDS]."""
    e0, e1, e2, e3 = even_values(w, even_mask)
    o0, o1, o2, o3 = odd_values_over_2048(w, odd_mask)
    e0, o0 = _scaled(e0, o0, four(scale, 0, DTYPE), four(zero, 0, DTYPE), DTYPE)
    e1, o1 = _scaled(e1, o1, four(scale, 1, DTYPE), four(zero, 1, DTYPE), DTYPE)
    e2, o2 = _scaled(e2, o2, four(scale, 2, DTYPE), four(zero, 2, DTYPE), DTYPE)
    e3, o3 = _scaled(e3, o3, four(scale, 3, DTYPE), four(zero, 3, DTYPE), DTYPE)
    return columns(e0, e1, e2, e3, ROWS, 4 * WORDS), columns(o0, o1, o2, o3, ROWS, 4 * WORDS)


@triton.jit
def _scaled(even, odd, scale, zero, DTYPE: tl.constexpr):
    """128 + value and 2048 + value, [ROWS, WORDS] each, to weights."""
    offset = -(128.0 + zero) * scale
    even = even * scale[None, :] + offset[None, :]
    odd = odd * scale[None, :] + (offset - 1920.0 * scale)[None, :]
    return even.to(DTYPE), odd.to(DTYPE)


@triton.jit
def load_weights(weight, ks, cols, K, N, DTYPE: tl.constexpr):
    """The weights at (ks, cols), element by element, rounded once to DTYPE; 0 where there are none. weight:
    ``Elements``."""
    inside = (ks < K)[:, None] & (cols < N)[None, :]
    k = ks.to(tl.int64)[:, None]
    n = cols.to(tl.int64)[None, :]
    g = k // weight.group
    q = tl.load(weight.b + (k // 2) * weight.stride_bk + n * weight.stride_bn, mask=inside, other=0).to(tl.int32)
    value = ((q >> (4 * (k % 2)).to(tl.int32)) & 15).to(tl.float32)
    has_scale = inside & (n < N * weight.has_scales)
    has_zero = inside & (n < N * weight.has_zeros)
    scale = tl.load(weight.scales + g * weight.stride_sg + n * weight.stride_sn, mask=has_scale, other=1.0)
    zero = tl.load(weight.zeros + g * weight.stride_zg + n * weight.stride_zn, mask=has_zero, other=8.0)
    w = (value - zero.to(tl.float32)) * scale.to(tl.float32)
    return tl.where(inside, w, 0.0).to(DTYPE)
