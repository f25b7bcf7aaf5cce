"""Sorts along any dimension, which is made the last by its strides. NaN is larger than every number, as in torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tk._arguments import flag, whole
from tk.functional._call import NUMBERS, Config, even_rows, from_end, needs, run, taken, to_end, wrap
from tk.functional._integers import FLOAT_OF, key_of

__all__ = ["argsort", "sort", "topk"]


@needs("sort")
def sort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = False, *, config: Config = None) -> Any:
    """(values, indices) in order along ``dim``, as ``torch.sort``. Its gradient is ATen's scatter.

    Args:
        input: any shape; a float, an integer or bool.
        stable: equal ones stay in their order. They always do.

    Raises:
        IndexError: a dimension that is none.
    """
    flag("sort", "descending", descending)
    flag("sort", "stable", stable)
    if not taken("sort", NUMBERS, input=input):
        return torch.sort(input, dim=dim, descending=descending, stable=True)
    dim = wrap("sort", input, dim)
    if input.dtype in FLOAT_OF:
        values, indices = sort(input.to(FLOAT_OF[input.dtype]), dim, descending, stable, config=config)
        return torch.return_types.sort((values.to(input.dtype), indices))
    x = even_rows(input, dim)
    if input.dtype in _PARTS:
        indices = _order_by_parts(x, x.dim() - 1, descending, config)
        values = x.gather(-1, indices)
    else:
        values, indices = run("sort", x, descending, config=config)
    return torch.return_types.sort((from_end(values, input, dim), from_end(indices, input, dim)))


@needs("sort")
def argsort(
    input: Tensor, dim: int = -1, descending: bool = False, stable: bool = False, *, config: Config = None
) -> Tensor:
    """The indices (int64) that :func:`sort` gives, as ``torch.argsort``. Arguments and errors as of :func:`sort`."""
    flag("argsort", "descending", descending)
    flag("argsort", "stable", stable)
    if not taken("argsort", NUMBERS, input=input):
        return torch.argsort(input, dim=dim, descending=descending, stable=True)
    return sort(input, dim, descending, stable, config=config).indices


@needs("topk", "sort")
def topk(
    input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, config: Config = None
) -> Any:
    """(values, indices) of the ``k`` largest along ``dim``, as ``torch.topk``: in order, and of equal ones the first.
    Its gradient is ATen's scatter.

    Args:
        input: any shape; a float, an integer or bool.
        k: 0 to the size of ``dim``.
        largest: False: the smallest.
        sorted: they always are.

    Raises:
        IndexError: a dimension that is none. ValueError: a ``k`` that is out of range.
    """
    is_taken = taken("topk", NUMBERS, input=input)
    dim, k = wrap("topk", input, dim), whole("topk", "k", k)
    largest, sorted = flag("topk", "largest", largest), flag("topk", "sorted", sorted)
    if is_taken and input.dtype in FLOAT_OF:
        values, indices = topk(input.to(FLOAT_OF[input.dtype]), k, dim, largest, sorted, config=config)
        return torch.return_types.topk((values.to(input.dtype), indices))
    x = even_rows(input, dim) if is_taken else to_end(input, dim)
    if not 0 <= k <= x.shape[-1]:
        raise ValueError(f"tk.topk: k is {k}, must be 0 to {x.shape[-1]}, the size of dimension {dim}")
    if is_taken and input.dtype in _PARTS:
        indices = _order_by_parts(x, x.dim() - 1, bool(largest), config).narrow(-1, 0, k)
        values = x.gather(-1, indices)
    elif is_taken:
        values, indices = run("topk", x, k, largest, config=config)
    else:  # ATen's topk leaves open which of equal ones comes first
        values, indices = (t[..., :k] for t in torch.sort(x, dim=-1, descending=largest, stable=True))
    return torch.return_types.topk((from_end(values, input, dim), from_end(indices, input, dim)))


# Integers that no float of the kernels holds: sorted by parts of them that one does, the lowest first. A part is (how
# far from the right it begins, its bits; None: with the sign).
_PARTS = {
    torch.int32: ((0, 16), (16, None)),
    torch.int64: ((0, 22), (22, 22), (44, None)),
    torch.float64: ((0, 22), (22, 22), (44, None)),
}  # fmt: skip


def _order_by_parts(x: Tensor, dim: int, descending: bool, config: Config) -> Tensor:
    """The indices, by as many sorts of float32: each keeps the order of the one before where its own parts are equal.
    float64 goes as integers of the same order."""
    keys = key_of(x) if x.dtype == torch.float64 else x.detach()
    places: Tensor | None = None
    for shift, bits in _PARTS[x.dtype]:
        part = keys if places is None else keys.gather(dim, places)
        part = part >> shift if bits is None else (part >> shift) & ((1 << bits) - 1)
        order = sort(part.float(), dim, descending, config=config).indices
        places = order if places is None else places.gather(dim, order)
    assert places is not None
    return places
