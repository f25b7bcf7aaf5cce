"""Sorts along any dimension, which is made the last by its strides. NaN is larger than every number, as in torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tk.functional._call import Config, flag, from_end, needs, run, taken, to_end, whole, wrap

__all__ = ["argsort", "sort", "topk"]


@needs("sort")
def sort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = False, *, config: Config = None) -> Any:
    """(values, indices) in order along ``dim``, as ``torch.sort``. Its gradient is ATen's scatter.

    Args:
        input: any shape.
        stable: equal ones stay in their order. They always do.

    Raises:
        IndexError: a dimension that is none.
    """
    flag("sort", "stable", stable)
    if not taken("sort", input=input):
        return torch.sort(input, dim=dim, descending=descending, stable=True)
    dim, descending = wrap("sort", input, dim), flag("sort", "descending", descending)
    values, indices = run("sort", to_end(input, dim), descending, config=config)
    return torch.return_types.sort((from_end(values, input, dim), from_end(indices, input, dim)))


@needs("sort")
def argsort(
    input: Tensor, dim: int = -1, descending: bool = False, stable: bool = False, *, config: Config = None
) -> Tensor:
    """The indices (int64) that :func:`sort` gives, as ``torch.argsort``. Arguments and errors as of :func:`sort`."""
    flag("argsort", "stable", stable)
    if not taken("argsort", input=input):
        return torch.argsort(input, dim=dim, descending=descending, stable=True)
    return sort(input, dim, descending, stable, config=config).indices


@needs("topk")
def topk(
    input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, config: Config = None
) -> Any:
    """(values, indices) of the ``k`` largest along ``dim``, as ``torch.topk``: in order, and of equal ones the first.
    Its gradient is ATen's scatter.

    Args:
        input: any shape.
        k: 0 to the size of ``dim``.
        largest: False: the smallest.
        sorted: they always are.

    Raises:
        IndexError: a dimension that is none. ValueError: a ``k`` that is out of range.
    """
    is_taken = taken("topk", input=input)
    dim, k = wrap("topk", input, dim), whole("topk", "k", k)
    largest, sorted = flag("topk", "largest", largest), flag("topk", "sorted", sorted)
    x = to_end(input, dim)
    if not 0 <= k <= x.shape[-1]:
        raise ValueError(f"tk.topk: k is {k}, must be 0 to {x.shape[-1]}, the size of dimension {dim}")
    if is_taken:
        values, indices = run("topk", x, k, largest, config=config)
    else:  # ATen's topk leaves open which of equal ones comes first
        values, indices = (t[..., :k] for t in torch.sort(x, dim=-1, descending=largest, stable=True))
    return torch.return_types.topk((from_end(values, input, dim), from_end(indices, input, dim)))
