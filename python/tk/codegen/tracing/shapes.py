"""What cuts a tensor at places that sizes say, in words that can be traced: ATen's own ask how one size stands to
another while they are called, and have the answer at the sizes of the trace alone; what they refuse is asked here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor


def tensor_split(input: Tensor, indices_or_sections: Any, dim: int = 0) -> Sequence[Tensor]:
    """Of n elements the pieces before n % sections have one more than the others."""
    sections = indices_or_sections
    if not isinstance(sections, int) or not _is_symbolic(input, dim):
        return torch.tensor_split(input, sections, dim)
    if sections < 1:
        raise RuntimeError(f"number of sections must be larger than 0, got {sections}")
    n = input.shape[dim]
    return input.split_with_sizes([(n + sections - 1 - i) // sections for i in range(sections)], dim)


def unflatten(input: Tensor, dim: int, sizes: Sequence[Any]) -> Tensor:
    if _is_symbolic(input, dim):
        n, others = input.shape[dim], math.prod(s for s in sizes if not _is(s, -1))
        if not _is(others, 0):  # torch's own says what is wrong with these
            is_open = any(_is(s, -1) for s in sizes)
            torch._check(n % others == 0 if is_open else n == others, lambda: f"unflatten: {n} into {tuple(sizes)}")
    return torch.unflatten(input, dim, sizes)


def _is(size: Any, number: int) -> bool:
    return isinstance(size, int) and size == number


def _is_symbolic(x: Tensor, dim: Any) -> bool:
    return isinstance(dim, int) and -x.dim() <= dim < x.dim() and isinstance(x.shape[dim], SymInt)


ALWAYS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.tensor_split: tensor_split, Tensor.tensor_split: tensor_split,
    torch.unflatten: unflatten, Tensor.unflatten: unflatten,
}  # fmt: skip
