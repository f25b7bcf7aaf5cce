"""Tensors whose dimensions lie in memory in any order, with gaps, steps and offsets. TK_LAYOUTS_SEED repeats a run."""

from __future__ import annotations

from random import Random

import seeds
import torch

SEED = seeds.seed("TK_LAYOUTS_SEED")


def placed(random: Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Dimensions one outside the other in a drawn order, most often of whole vectors so that rows may begin at 16
    bytes."""
    order = random.sample(range(len(shape)), len(shape)) if random.random() < 0.7 else list(range(len(shape)))
    is_even = random.random() < 0.5
    strides, step = [0] * len(shape), 1 if random.random() < 0.7 else random.choice([2, 3])
    for d in reversed(order):
        strides[d] = step
        step = step * shape[d] + random.choice([0, 0, 8 if is_even else random.randrange(1, 9)])
        step = -(-step // 8) * 8 if is_even else step
    offset = 0 if is_even else random.randrange(3)
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    memory = torch.randn(step + offset, generator=generator).to(dtype)
    return memory.as_strided(shape, strides, offset)
