"""Writes at indices, in words that serve every size, and of which ATen has the gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tk.codegen.errors import TraceError


def one_hot(tensor: Tensor, num_classes: Any = -1) -> Tensor:
    """one_hot by a write at each class, which is held against the number of classes: ATen's own compares, where it is
    traced, and a class that is none would be a row of zeros."""
    if tensor.dtype != torch.int64:
        raise TypeError(f"one_hot: the classes must be int64, are {tensor.dtype}; call .long()")
    if isinstance(num_classes, int) and num_classes == -1:
        raise TraceError(
            "one_hot without num_classes: how many classes there are depends on the tensor's contents, and the size of "
            "a result may not; give num_classes"
        )
    if isinstance(num_classes, int) and num_classes < 1:
        raise ValueError(f"one_hot: num_classes must be at least 1, is {num_classes}")
    zeros = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device=tensor.device)
    classes = tensor.unsqueeze(-1)
    return zeros.scatter_add(-1, classes, torch.ones_like(classes))  # of integers, sums have no order


def _narrowed(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a source cut to the index. ATen's gradient of a larger one has the index's shape, and is
    refused. What lies outside of the index takes no part: its gradient is 0."""

    def word(input: Tensor, dim: int, index: Tensor, src: Any = None, *args: Any, **named: Any) -> Any:
        if src is None:
            return func(input, dim, index, *args, **named)
        return func(input, dim, index, _within(src, index), *args, **named)

    return word


def _within(src: Any, index: Tensor) -> Any:
    if not isinstance(src, Tensor) or src.dim() != index.dim():
        return src
    for d, (own, wanted) in enumerate(zip(src.shape, index.shape, strict=True)):
        if _expr(own) != _expr(wanted):
            src = src.narrow(d, 0, wanted)
    return src


def _expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


_NAMES = ("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")

ALWAYS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.one_hot: one_hot,
    **{f: _narrowed(f) for name in _NAMES for owner in (torch, Tensor) if (f := getattr(owner, name, None))},
}  # fmt: skip
