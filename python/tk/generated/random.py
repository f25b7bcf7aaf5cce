"""Random numbers on the CPU: Philox 4x32-10 in torch's int64 arithmetic, the bits that the generated kernels draw.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The key is the seed. The element with the linear
index i of a result takes word e mod 4 of the block whose counter is (e div 4, stream, 0), e = offset + i: so every bit
follows from seed, offset and the place in the result alone. Each call in a function has a stream of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    element = torch.arange(count, device=seed.device) + offset
    words = philox(seed.reshape(()), element >> 2, stream)
    found = torch.stack(words).gather(0, (element & 3).unsqueeze(0)).squeeze(0)
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
