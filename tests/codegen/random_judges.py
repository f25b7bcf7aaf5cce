"""What a random function must be as an op: as torch has it, in every way that it is computed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import backwards
from random_functions import Call, Function
from torch import Tensor

from tk.codegen.errors import IRError, TraceError
from tk.codegen.family import Generated, generate
from tk.codegen.scheduling.settings import Setting
from tk.codegen.tile import LAYOUTS, STRIDED, Layout
from tk.codegen.ways import WAYS, Graph
from tk.generated.interpret import evaluate
from tk.generated.signature import TensorSpec, parse

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


# --- The recorded graph, which the CPU runs ---


def recorded(op: Generated, named: Mapping[str, Any], like: Sequence[Tensor]) -> list[Tensor]:
    """By the graph of these flags, which has "..." as one dimension, in the shapes of `like`."""
    flags = {n: bool(named[n]) for n in op.signature.flags}
    trace = next(g.trace for g in op.graphs if dict(g.trace.flags) == flags)
    seen = {name: _merged(named[name], spec) if isinstance(spec, TensorSpec) else named[name]
            for name, spec in op.signature.params.items()}  # fmt: skip
    nodes = json.loads(json.dumps(trace.recorded))
    found = evaluate(nodes, seen, op.name)
    return [x.reshape(y.shape) if x.numel() == y.numel() else x for x, y in zip(found, like, strict=True)]


def _merged(x: Tensor, spec: TensorSpec) -> Tensor:
    if not spec.leading:
        return x.clone()
    rank = len(spec.sizes)
    return x.reshape([x.shape[: x.dim() - rank].numel(), *x.shape[x.dim() - rank :]])


# --- The kernels ---

Variant = tuple[Layout, Setting, str]


def some_variants(op: Generated, graph: Graph, random: Random) -> list[Variant]:
    """In the order in which they are to be tried: now and then a few of those that ask for something come first, always
    there are some that serve every call."""
    found = [(layout, s, way) for layout, way in product(LAYOUTS, WAYS) for s in op.choices(graph, layout, way)]
    general = [v for v in found if v[0] == STRIDED]
    rest = random.sample([v for v in found if v[0] != STRIDED], k=min(6, len(found) - len(general)))
    random.shuffle(general)
    return [*rest, *general] if random.random() < 0.6 else general


def arguments_of_backward(op: Generated, named: Mapping[str, Any], grads: Sequence[Tensor],
                          results: Sequence[Tensor]) -> dict[str, Any]:  # fmt: skip
    assert op.backward is not None
    known = {**named, **backwards.arguments(grads, results)}
    return {n: known[n] for n in op.backward.signature.params}


def described(function: Function, call: Call | None, problem: str) -> str:
    return f"{problem}\n\n{function.source}\n{call}"


def compile_plain(function: Function, folder: Path) -> Callable[..., Any]:
    folder.mkdir(parents=True, exist_ok=True)
    return function.compiled(folder)
