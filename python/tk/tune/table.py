"""The table that ships, ``kernels/tuned/sm<arch>/<stem>.json``: measured choices for the packs.

All timings go beside it, into ``<stem>_timings.json``, for whoever fits the cost model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tk import capi, errors
from tk.tune import files
from tk.tune.measure import Result, Task

if TYPE_CHECKING:
    from tk.aot import expr, spec

HALVES = (torch.bfloat16, torch.float16)


def write(path: Path, results: Sequence[Result], choices: Mapping[Task, str], record: Mapping[str, Any]) -> list[Path]:
    """Pins into the table, where new ones replace old ones and the coefficients stay; timings into a file beside it,
    likewise."""
    old = _read(path)
    new = [
        {"key": selector_values(problem), "dims": dims(problem), "config": choices[r.task]}
        for r in results
        for problem in twins(r.problem, choices[r.task])
    ]
    pins = files.merge(old.get("pins", ()), new)
    files.write(path, {**record, "coefficients": old.get("coefficients", {}), "pins": pins})
    timings = path.with_name(f"{path.stem}_timings.json")
    merged = files.merge(_read(timings).get("timings", ()), map(_timings, results))
    files.write(timings, {**record, "timings": merged})
    return [path, timings]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _timings(result: Result) -> dict[str, Any]:
    """A task, its bucket, and for every config [kernel, µs measured, µs predicted]."""
    configs = {m.config: [m.kernel, round(m.us, 3), round(m.predicted_us, 3)] for m in result.measured}
    return {**asdict(result.task), "key": selector_values(result.problem), "configs": configs}


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


def dims(problem: capi.Problem) -> list[int]:
    """The sizes that make up the key of a pin."""
    op, described = _declared(problem)
    names = list(op.locals)
    return [described.locals[names.index(name)] for name in op.dims]


def _declared(problem: capi.Problem) -> tuple[spec.Op, expr.Problem]:
    """The op's declaration, and the problem as its expressions see it."""
    from tk.aot.expr import Problem, TensorValue, evaluate_locals

    op: spec.Op = import_module(f"tk.kernels.{problem.op}_op").OP
    tensors = [None if t is None else TensorValue(t.sizes, t.strides, capi.DTYPES[t.dtype]) for t in problem.tensors]
    bare = Problem(tensors, problem.ints, problem.mode)
    return op, replace(bare, locals=evaluate_locals(op.locals.values(), bare))
