"""``torch.associative_scan`` in a function that is traced: a node of its own, with the combine function beside it.

torch compiles the combine function when the scan is called, on a GPU. Here it is traced twice: as the function wrote
it, for what interprets the recorded graph, and as a kernel of scalars, which the scan's kernel calls.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._higher_order_ops import associative_scan as _package
from torch.utils._pytree import tree_flatten, tree_unflatten

from tk.codegen.errors import TraceError
from tk.generated.signature import Signature, TensorSpec

if TYPE_CHECKING:
    from tk.codegen.ir import Kernel

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
    """While it is traced, `fn` finds :func:`associative_scan` where it would find torch's."""
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


# --- The combine function alone ---


def scalars(number: int, dtypes: Sequence[str]) -> Any:
    """The trace of combine function `number` on single elements, a0, a1, … and b0, b1, …, of these dtypes (the
    signature's names)."""
    from tk.codegen.tracing.trace import trace

    combine = FUNCTIONS[number]

    def on_scalars(**values: Tensor) -> tuple[Tensor, ...]:
        return tuple(combine.fn(*([values[f"{side}{i}"] for i in range(len(dtypes))] for side in "ab")))

    params = {f"{side}{i}": TensorSpec(dtype, ()) for side in "ab" for i, dtype in enumerate(dtypes)}
    found = trace(on_scalars, Signature(params, {}), {}, {})
    if found.structure != len(dtypes) or any(n.meta["val"].dim() for n in found.new):
        raise TraceError(f"the combine function of {len(dtypes)} elements must return as many")
    return found


def record(number: int, dtypes: Sequence[str]) -> str:
    """The graph as the function wrote it, in JSON."""
    return json.dumps(scalars(number, dtypes).recorded)


def kernel(number: int, dtypes: Sequence[str]) -> Kernel:
    """The kernel of scalars. Raises TraceError where it is more than arithmetic on what it is given."""
    from tk.codegen import passes
    from tk.codegen.lowering.lower import lower
    from tk.codegen.tracing.trace import DTYPE_NAMES

    found = scalars(number, dtypes)
    lowered = lower(found, "combine")
    results = [DTYPE_NAMES[n.meta["val"].dtype] for n in found.new]
    if len(lowered) != 1 or lowered[0].axes:
        raise TraceError("the combine function of a scan may hold pointwise operations only")
    if results != list(dtypes):
        raise TraceError(
            f"the combine function of {', '.join(dtypes)} returns {', '.join(results)}; it must be the same"
        )
    made = passes.run(lowered[0])
    digest = hashlib.sha256(str(made).encode()).hexdigest()[:6]
    word = re.sub(r"\W", "", FUNCTIONS[number].name)
    return replace(made, name=f"combine_{word}_{digest}")
