"""What cuts a tensor at places that sizes say, in words that can be traced: ATen's own ask how one size stands to
another while they are called, and have the answer at the sizes of the trace alone; what they refuse is asked here.

So does a reshape of what does not lie in order: whether torch has a view of it or a copy goes by the sizes, and each
question on the way would become a check of the op. Unless something is written afterwards the two are the same, and it
is a copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch._ops import OpOverload
from torch._prims_common import is_contiguous_or_false

aten = torch.ops.aten


def tensor_split(input: Tensor, indices_or_sections: Any, dim: int = 0) -> Sequence[Tensor]:
    """tensor_split. Of n elements the pieces before n % sections have one more than the others."""
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


class Written(Exception):
    """What was taken for a copy is written, or what it is a copy of: here a view is something else."""


@dataclass
class Copies:
    """What reshapes copied in one trace. at_all_sizes: whether it is a copy whatever torch makes of it, unless it is
    written. of: the tensors and their copies."""

    at_all_sizes: bool
    of: list[Tensor] = field(default_factory=list)


_copies: ContextVar[Copies | None] = ContextVar("copies", default=None)


@contextmanager
def copying(at_all_sizes: bool) -> Iterator[None]:
    token = _copies.set(Copies(at_all_sizes))
    try:
        yield
    finally:
        _copies.reset(token)


def copied_where_torch_does() -> list[Any]:
    """The sizes of what torch copies, if it lies as it does while it traces: a tensor with one row could be a view."""
    copies = _copies.get()
    if copies is None or copies.at_all_sizes:
        return []
    return [n for x in copies.of for n in x.shape if isinstance(n, SymInt)]


def check_written(recorded: fx.GraphModule) -> None:
    """Raises Written."""
    copies = _copies.get()
    if copies is None or not copies.at_all_sizes:
        return
    copied = {x.untyped_storage()._cdata for x in copies.of}
    for node in recorded.graph.nodes if copied else ():
        if isinstance(node.target, OpOverload) and any(
            x.meta["val"].untyped_storage()._cdata in copied for x in _written(node)
        ):
            raise Written


def _written(node: fx.Node) -> Iterator[fx.Node]:
    assert isinstance(node.target, OpOverload)
    arguments = node.target._schema.arguments
    named = {**dict(zip([a.name for a in arguments], node.args, strict=False)), **node.kwargs}
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            given: Any = named.get(argument.name)
            yield from (x for x in (given if isinstance(given, list | tuple) else [given]) if isinstance(x, fx.Node))


def reshape(input: Tensor, *shape: Any, **named: Any) -> Tensor:
    sizes = named.get("shape", shape[0] if len(shape) == 1 and not isinstance(shape[0], int | SymInt) else shape)
    copies = _copies.get()
    if copies is None or not sizes or not _can_lie_otherwise(input):
        return input.reshape(*shape, **named)
    if copies.at_all_sizes:
        copy = input.clone(memory_format=torch.contiguous_format)
        copies.of += (input, copy)
        return aten._unsafe_view(copy, list(sizes))
    made = input.reshape(*shape, **named)
    if made.untyped_storage()._cdata != input.untyped_storage()._cdata:
        copies.of.append(input)
    return made


def _can_lie_otherwise(x: Tensor) -> bool:
    return x.dim() > 0 and any(isinstance(n, SymInt) for n in x.shape) and not is_contiguous_or_false(x)


def reshape_as(input: Tensor, other: Tensor) -> Tensor:
    return reshape(input, other.shape)


def flatten(input: Tensor, *dims: Any, **named: Any) -> Tensor:
    first, last = (*dims, *(named.get(n, d) for n, d in (("start_dim", 0), ("end_dim", -1))[len(dims) :]))
    n = input.dim()
    if not all(isinstance(d, int) and -n <= d < n for d in (first, last)) or first % n > last % n:
        return input.flatten(*dims, **named)  # names of dimensions, or torch says what is wrong with them
    first, last = first % n, last % n
    merged = math.prod(input.shape[first : last + 1])
    return reshape(input, (*input.shape[:first], merged, *input.shape[last + 1 :]))


def ravel(input: Tensor) -> Tensor:
    return flatten(input)


def _is(size: Any, number: int) -> bool:
    return isinstance(size, int) and size == number


def _is_symbolic(x: Tensor, dim: Any) -> bool:
    return isinstance(dim, int) and -x.dim() <= dim < x.dim() and isinstance(x.shape[dim], SymInt)


ALWAYS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.tensor_split: tensor_split, Tensor.tensor_split: tensor_split,
    torch.unflatten: unflatten, Tensor.unflatten: unflatten,
    torch.reshape: reshape, Tensor.reshape: reshape, Tensor.reshape_as: reshape_as,
    torch.flatten: flatten, Tensor.flatten: flatten, torch.ravel: ravel, Tensor.ravel: ravel,
}  # fmt: skip
