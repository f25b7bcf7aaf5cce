"""All timings of an op's products: ``kernels/tuned/sm<arch>/<stem>_timings.json``.

Of them tools/fit_cost.py makes the table that ships: measured choices, and weights of predicted times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tk import _cache, capi, errors
from tk.tune import files, pins
from tk.tune.measure import Result, Task

if TYPE_CHECKING:
    from tk.aot import expr, spec

HALVES = (torch.bfloat16, torch.float16)


def write(path: Path, results: Sequence[Result], record: Mapping[str, Any]) -> None:
    """Adds the timings; those of a task that was there replace the old ones."""
    old = json.loads(path.read_text())["timings"] if path.is_file() else []
    _cache.write_json(path, {**record, "timings": files.merge(old, map(_timings, results))})


def _timings(result: Result) -> dict[str, Any]:
    """A product's task, or of another op the tensors and numbers of the problem; its bucket; and for every config
    [kernel, µs measured, µs predicted]."""
    configs = {m.config: [m.kernel, round(m.us, 3), round(m.predicted_us, 3)] for m in result.measured}
    problem = asdict(result.task) if isinstance(result.task, Task) else pins.problem_entry(result.problem)
    return {**problem, "key": selector_values(result.problem), "configs": configs}


def twins(problem: capi.Problem, config: str) -> Iterator[capi.Problem]:
    """A plain product, and those that cost the same: with a row of bias, with the other 16-bit dtype. Only what the
    config serves."""
    a, b, _, out = problem.tensors
    assert a is not None and b is not None and out is not None
    for dtype in HALVES if a.dtype in HALVES else (a.dtype,):
        x, y, z = (replace(t, dtype=dtype) for t in (a, b, out))
        for bias in (None, replace(z, strides=(0, 1))):
            twin = replace(problem, tensors=(x, y, bias, z))
            if _serves(config, twin):
                yield twin


def _serves(config: str, problem: capi.Problem) -> bool:
    try:
        return any(c.fits and c.config_name == config for c in capi.candidates(problem))
    except errors.VariantNotFoundError:
        return False


def selector_values(problem: capi.Problem) -> dict[str, int]:
    """The value of every selector axis of the op: how the table names a bucket."""
    op, described = _declared(problem)
    return {name: selector.value.evaluate(described) for name, selector in op.selectors.items()}


def _declared(problem: capi.Problem) -> tuple[spec.Op, expr.Problem]:
    """The op's declaration, and the problem as its expressions see it."""
    from tk.aot.expr import Problem, evaluate_locals

    op: spec.Op = import_module(f"tk.kernels.{room(problem.op)}.op").OP
    bare = Problem(values(problem), problem.ints, problem.mode)
    return op, replace(bare, locals=evaluate_locals(op.locals.values(), bare))


def room(op: str) -> str:
    """The folder of an op's kernels, below ``tk.kernels``."""
    return {"int4_mm": "int4"}.get(op, op)


def values(problem: capi.Problem) -> list[expr.TensorValue | None]:
    """The tensors of a problem as an op's expressions see them."""
    from tk.aot.expr import TensorValue

    return [None if t is None else TensorValue(t.sizes, t.strides, capi.DTYPES[t.dtype]) for t in problem.tensors]
