"""``torch.associative_scan`` in a function that is traced: a node of its own, with the combine function beside it.

torch compiles the combine function when the scan is called, on a GPU. Here it is traced twice: as the function wrote
it, for what interprets the recorded graph, and as a kernel of scalars, which the scan's kernel calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._higher_order_ops import associative_scan as _package
from torch.utils._pytree import tree_flatten, tree_unflatten

from tk.codegen.errors import TraceError

_library = torch.library.Library("tk_trace", "DEF")
_library.define("associative_scan(Tensor[] xs, int combine, int dim) -> Tensor[]")


def _like(xs: Sequence[Tensor], combine: int, dim: int) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs]


torch.library.impl(_library, "associative_scan", "CompositeExplicitAutograd")(_like)
torch.library.register_fake("tk_trace::associative_scan", _like, lib=_library)


def _on_cpu(xs: Sequence[Tensor], combine: int, dim: int) -> list[Tensor]:
    """Small numbers, on which a function is held against its graph."""
    found, step = [x.clone() for x in xs], 1
    while found[0].dim() and step < (n := found[0].shape[dim]):
        before = [x.narrow(dim, 0, n - step) for x in found]
        both = FUNCTIONS[combine].fn(before, [x.narrow(dim, step, n - step) for x in found])
        found = [torch.cat([x.narrow(dim, 0, step), y], dim) for x, y in zip(found, both, strict=True)]
        step *= 2
    return found


torch.library.impl(_library, "associative_scan", "CPU")(_on_cpu)


@dataclass(frozen=True)
class Combine:
    """A combine function of flat lists: (what came before, one more) -> both together."""

    fn: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
    name: str


FUNCTIONS: list[Combine] = []  # a node names its own by the place in here


def associative_scan(
    combine_fn: Callable[..., Any], xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
) -> Any:
    """What a traced function calls instead of torch's; arguments as there."""
    leaves, structure = tree_flatten(xs)
    if not leaves or not all(isinstance(x, Tensor) and x.shape == leaves[0].shape for x in leaves):
        raise TraceError("associative_scan takes tensors of one shape")
    if torch.is_grad_enabled() and any(x.requires_grad for x in leaves):
        raise TraceError("associative_scan has no gradient; leave out grad=True")

    def flat(before: Sequence[Tensor], more: Sequence[Tensor]) -> list[Tensor]:
        sides = (tree_unflatten(list(side), structure) for side in (before, more))
        return tree_flatten(combine_fn(*sides))[0]

    FUNCTIONS.append(Combine(flat, getattr(combine_fn, "__name__", "combine")))
    dim = dim % max(leaves[0].dim(), 1)
    leaves = [x.flip(dim) if reverse else x for x in leaves]
    found = torch.ops.tk_trace.associative_scan(leaves, len(FUNCTIONS) - 1, dim)
    return tree_unflatten([x.flip(dim) if reverse else x for x in found], structure)


@contextmanager
def replaced(fn: Callable[..., Any]) -> Iterator[None]:
    """Lets `fn`, while it is traced, find :func:`associative_scan` where it would find torch's."""
    theirs = _package
    with ExitStack() as stack:
        for owner in (torch, torch._higher_order_ops):
            if getattr(owner, "associative_scan", None) is theirs:
                stack.enter_context(patch.object(owner, "associative_scan", associative_scan))
        for name in [name for name, value in fn.__globals__.items() if value is theirs]:
            # Not patch.dict, which would put back whatever else the function changes there.
            stack.callback(fn.__globals__.__setitem__, name, theirs)
            fn.__globals__[name] = associative_scan
        yield
