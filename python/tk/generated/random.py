"""Random numbers on the CPU: Philox 4x32-10 in torch's int64 arithmetic, the bits that the generated kernels draw.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The key is the seed. The element with the linear
index i of a result takes word e mod 4 of the block whose counter is (e div 4, stream, 0), e = offset + i: so every bit
follows from seed, offset and the place in the result alone. Each call in a function has a stream of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


def bits(seed: Tensor, offset: int, stream: int, size: Sequence[int]) -> Tensor:
    """32 random bits for each element.

    Args:
        seed: int64, one element.
        offset: added to the linear index of every element, in 64 bits.
        stream: which of a function's calls this is.
        size: of the result.

    Returns:
        int32, on the device of the seed.
    """
    count = 1
    for n in size:
        count *= n
    first, skipped = offset >> 2, offset & 3
    blocks = torch.arange(first, first + (skipped + count + 3 >> 2), device=seed.device)
    found = torch.stack(philox(seed.reshape(()), blocks, stream), -1).flatten()[skipped : skipped + count]
    return torch.where(found > 0x7FFFFFFF, found - (1 << 32), found).to(torch.int32).reshape(list(size))


def philox(seed: Tensor, counter: Tensor, stream: int) -> tuple[Tensor, ...]:
    """The four words of each block, as int64 from 0 to 2³² - 1."""
    key_a, key_b = seed & WORD, (seed >> 32) & WORD
    a, b = counter & WORD, (counter >> 32) & WORD
    c, d = torch.full_like(a, stream), torch.zeros_like(a)
    for _ in range(ROUNDS):
        (high_a, low_a), (high_c, low_c) = _product(a, ROUND_A), _product(c, ROUND_B)
        a, b, c, d = high_c ^ b ^ key_a, low_c, high_a ^ d ^ key_b, low_a
        key_a, key_b = (key_a + KEY_A) & WORD, (key_b + KEY_B) & WORD
    return a, b, c, d


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of a product of two words; 16 bits at a time, which int64 holds."""
    low, high = x * (factor & 0xFFFF), x * (factor >> 16)
    total = low + ((high & 0xFFFF) << 16)
    return ((high >> 16) + (total >> 32)) & WORD, total & WORD


# --- Distributions ---


@dataclass
class Draws:
    """The calls of one function, in order. next: the stream of the next one. Sizes, bounds and probabilities may be
    symbolic."""

    seed: Tensor
    offset: Any
    next: int = 0

    def bits(self, size: Sequence[Any]) -> Tensor:
        self.next += 1
        return self._bits(self.next - 1, size)

    def _bits(self, stream: int, size: Sequence[Any]) -> Tensor:
        return bits(self.seed, self.offset, stream, size)

    def uniform(self, size: Sequence[Any], dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers in [0, 1), with as many bits as the dtype has, so that nothing rounds up to 1."""
        if dtype == torch.float64:
            high, low = _top(self.bits(size), 27).double(), _top(self.bits(size), 26).double()
            return (high * 2.0**26 + low) * 2.0**-53
        n = {torch.bfloat16: 8, torch.float16: 11}.get(dtype, 24)
        return (_top(self.bits(size), n).float() * 2.0**-n).to(dtype)

    def normal(self, size: Sequence[Any], dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal numbers by Box and Muller, 1958."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        radius = torch.sqrt(-2 * torch.log(1 - self.uniform(size, wide)))
        return (radius * _cosine(self.uniform(size, wide))).to(dtype)

    def integers(self, low: Any, high: Any, size: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        """low <= x < high: the share of the range that 32 random bits are, or 64 where it may be longer than 2³²."""
        span = high - low
        if isinstance(span, int) and span <= 2**32:
            if span < 1:
                raise ValueError(f"randint: low is {low} and high {high}; high must be larger")
            return (((self.bits(size).to(torch.int64) & WORD) * span >> 32) + low).to(dtype)
        low_word, high_word = (self.bits(size).to(torch.int64) & WORD for _ in range(2))
        return (_upper_half(high_word, low_word, span) + low).to(dtype)

    def dropout(self, x: Tensor, p: Any) -> Tensor:
        """x / (1 - p), and 0 with probability p. A NaN that is dropped is 0."""
        keep = self.uniform(x.shape) >= p
        scale = torch.full((), 1.0 - p, device=x.device).clamp_min(2.0**-126).reciprocal()
        return torch.where(keep, x, 0.0).mul(scale).to(x.dtype)


# sin(2πw) / w in powers of w², for |w| <= 1/4: off by 6e-9 of the value at most.
SINE = (6.283185273790767, -41.34167747838322, 81.60223124210151, -76.57499216662038, 39.71091802439515)


def _cosine(turn: Tensor) -> Tensor:
    """cos(2πu), 0 <= u < 1, in float32 to 2e-7 of the value: sin(2πw), where w = |u - 1/2| - 1/4 is exact. A cosine of
    any argument has to be reduced first, which takes a GPU several times as many instructions."""
    if turn.dtype == torch.float64:
        return torch.cos(2 * math.pi * turn)
    w = (turn - 0.5).abs() - 0.25
    square = w * w
    found = square * SINE[-1] + SINE[-2]
    for factor in SINE[-3::-1]:
        found = found * square + factor
    return found * w


def _upper_half(high: Tensor, low: Tensor, factor: Any) -> Tensor:
    """The upper half of the product of a word of 64 bits, given as two of 32, with a factor of 63. There is no
    division: that of 64 bits takes a GPU longer than all else."""
    low_factor, high_factor = factor % (1 << 32), factor // (1 << 32)
    first, second, third = low * low_factor, high * low_factor, low * high_factor
    carry = ((first >> 32) & WORD) + (second & WORD) + (third & WORD)
    return high * high_factor + ((second >> 32) & WORD) + (third >> 32) + (carry >> 32)


def _top(words: Tensor, n: int) -> Tensor:
    return (words >> (32 - n)) & ((1 << n) - 1)
