"""What a random function must be as an op: as torch has it, in every way that it is computed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import torch
from random_functions import Call, Function
from torch import Tensor
from torch.utils._pytree import tree_flatten

from tk.codegen.errors import IRError, TraceError
from tk.codegen.family import Generated, generate
from tk.codegen.tile import LAYOUTS
from tk.generated.interpret import evaluate
from tk.generated.signature import Signature, TensorSpec, parse

# What may be refused, though eager torch takes it. Anything else that is not built is a failure.
REFUSED = (
    "has no gradient",
    "cannot be generated",
)


class Wrong(AssertionError):
    """A function that is not as torch has it, with all that it takes to see it again."""


def built(function: Function, fn: Callable[..., Any]) -> Generated | None:
    """The op; None where it is refused as documented: with the line and a reason."""
    try:
        return generate(fn, parse(function.texts, [p.name for p in function.params]), function.name, function.has_grad)
    except IRError:
        raise
    except TraceError as error:
        text = str(error)
        if function.name in text and re.search(r"\.py:\d+|line \d+", text) and any(r in text for r in REFUSED):
            return None
        raise


# --- What torch says ---


def results_of(fn: Callable[..., Any], args: Sequence[Any]) -> list[Tensor]:
    found, _ = tree_flatten(fn(*(a.clone() if isinstance(a, Tensor) else a for a in args)))
    return [x for x in found if x is not None]


def widened(args: Sequence[Any]) -> list[Any]:
    return [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]


def gradients_of(fn: Callable[..., Any], args: Sequence[Any], grads: Sequence[Tensor]) -> list[Tensor]:
    """Those of the floating-point arguments, as autograd has them."""
    own = [a.detach().clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    results = [r for r in tree_flatten(fn(*own))[0] if r is not None and r.is_floating_point()]
    sources = [a for a in own if isinstance(a, Tensor) and a.is_floating_point()]
    pairs = [(r, g.to(r.dtype)) for r, g in zip(results, grads, strict=True) if r.requires_grad]
    if not pairs:
        return [torch.zeros_like(s) for s in sources]
    found = torch.autograd.grad([r for r, _ in pairs], sources, [g for _, g in pairs], allow_unused=True)
    return [torch.zeros_like(s) if g is None else g for s, g in zip(sources, found, strict=True)]


# --- Numbers ---

RELATIVE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def difference(actual: Tensor, like: Tensor, exact: Tensor, is_coarse: bool) -> str:
    """"" where `actual` is as near to the exact result as torch's own (`like`), or nearly; else what is wrong."""
    if actual.shape != like.shape or actual.dtype != like.dtype:
        return f"{actual.dtype} {list(actual.shape)} instead of {like.dtype} {list(like.shape)}"
    actual, like, exact = (x.detach().cpu() for x in (actual, like, exact))
    if not like.dtype.is_floating_point:
        wrong = (actual != like) & (actual != exact)
        return f"{int(wrong.sum())} of {actual.numel()} differ" if bool(wrong.any()) else ""
    relative = RELATIVE[torch.bfloat16 if is_coarse else like.dtype if exact.dtype == torch.float64 else torch.float32]
    actual, own, exact = actual.double(), like.double(), exact.double()
    away = torch.where(own.isfinite() & exact.isfinite(), (own - exact).abs(), 0.0)
    slack = 8 * (away.max() if away.numel() else 0.0)
    scale = exact[exact.isfinite()].abs().max() if bool(exact.isfinite().any()) else 1.0
    allowed = relative * (exact.abs() + 0.1 * scale + 0.1) + slack
    near = ((actual - exact).abs() <= allowed) | ((actual - own).abs() <= allowed)
    near |= (actual == exact) | (actual == own) | (actual.isnan() & (exact.isnan() | own.isnan()))
    if bool(near.all()):
        return ""
    worst = (~near).nonzero()[0].tolist()
    at = tuple(worst)
    return (f"{int((~near).sum())} of {actual.numel()} differ, first at {worst}: {actual[at]:.7g}, exact {exact[at]:.7g}, "
            f"torch {own[at]:.7g}")  # fmt: skip


def compare(what: str, function: Function, actual: Sequence[Tensor], like: Sequence[Tensor],
            exact: Sequence[Tensor]) -> Iterator[str]:  # fmt: skip
    """A line for each result that is wrong."""
    if len(actual) != len(like):
        yield f"{what}: {len(actual)} results instead of {len(like)}"
        return
    for n, (a, b, c) in enumerate(zip(actual, like, exact, strict=True)):
        if problem := difference(a, b, c, function.is_coarse):
            yield f"{what}: result {n}: {problem}"


# --- The recorded graph, which the CPU runs ---


def recorded(op: Generated, named: Mapping[str, Any]) -> list[Tensor]:
    """By the graph of these dtypes and flags, "..." as one dimension."""
    flags = {n: bool(named[n]) for n in op.signature.flags}
    trace = next(g.trace for g in op.graphs if dict(g.trace.flags) == flags)
    seen = {name: _merged(named[name], spec) if isinstance(spec, TensorSpec) else named[name]
            for name, spec in op.signature.params.items()}  # fmt: skip
    nodes = json.loads(json.dumps(trace.recorded))
    return evaluate(nodes, seen, op.name)


def _merged(x: Tensor, spec: TensorSpec) -> Tensor:
    if not spec.leading:
        return x.clone()
    rank = len(spec.sizes)
    return x.reshape([x.shape[: x.dim() - rank].numel(), *x.shape[x.dim() - rank :]])


# --- The kernels, in Triton's interpreter ---


def some_variants(op: Generated, graph: Any, random: Random, count: int) -> list[Any]:
    """The first setting of every layout and way — those that serve every size — and a few others."""
    first, rest = [], []
    for layout, way in product(LAYOUTS, ("whole", "split", "walk", "deterministic", "digits", "narrow")):
        settings = op.choices(graph, layout, way)
        first += [(layout, s, way) for s in settings[:1]]
        rest += [(layout, s, way) for s in settings[1:]]
    return [*first, *random.sample(rest, min(count, len(rest)))]


def arguments_of_backward(op: Generated, named: Mapping[str, Any], grads: Sequence[Tensor]) -> dict[str, Any]:
    assert op.backward is not None
    of_grads = {f"grad_{i}": g for i, g in enumerate(grads)}
    return {n: of_grads[n] if n in of_grads else named[n] for n in op.backward.signature.params}


def signature_of(function: Function) -> Signature:
    return parse(function.texts, [p.name for p in function.params])


def described(function: Function, call: Call | None, problem: str) -> str:
    return f"{problem}\n\n{function.source}\n{call}"


def compile_plain(function: Function, folder: Path) -> Callable[..., Any]:
    folder.mkdir(parents=True, exist_ok=True)
    return function.compiled(folder)
