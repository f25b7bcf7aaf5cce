"""Tells DTensor of tk's ops: what their packs, or the files that define them, say of how they may be sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import register_sharding

from tk import errors
from tk._packs import OF_FUNCTIONS
from tk.generated import register
from tk.generated.interpret import graph_for
from tk.generated.problem import NAMES
from tk.generated.records import GeneratedOp
from tk.ops import _register
from tk.parallel.rules import Rule, of_dims, placements

# What torch gives and takes: an op's arguments with a spec (shape, ndim, tensor_meta) for each tensor, and for each
# way to shard it the placements of the results and of the arguments, None for what is no tensor.
Ways: TypeAlias = "list[tuple[list[Any], list[Any]]]"


def register_all() -> None:
    for name, record in _register.RECORDS.items():
        overload = _register.overloads(name)[0]
        register_sharding(overload)(partial(_of_dims, overload, record.dims))
    register.each_registered(register_generated)


def register_generated(name: str) -> None:
    """An op that takes lists, or that attention calls, has no rules: torch refuses it."""
    op = register.find(name)
    assert op is not None
    if op.takes_lists or name.startswith(OF_FUNCTIONS):
        return
    names = [name, f"_{name}"] if op.n_saved else [name]
    for overload in (getattr(torch.ops.tk, n).default for n in names):
        register_sharding(overload)(partial(_of_generated, op, overload))


def _of_generated(op: GeneratedOp, overload: Any, *args: Any, **kwargs: Any) -> Ways:
    """The ways that the kernels of these dtypes and flags allow."""
    given = _given(overload, args, kwargs)
    specs = {p.name: given[p.name] for p in op.tensors}
    dtypes = {name: NAMES[s.tensor_meta.dtype] for name, s in specs.items() if s is not None}
    flags = {p.name: bool(given[p.name]) for p in op.params if p.kind == "bool"}
    graph = graph_for(op, dtypes, flags | {name: s is not None for name, s in specs.items()})
    rules = graph.get("sharded", ())
    if rules is None:
        raise errors.UnsupportedError(
            f"tk.{op.name}: it draws random numbers, and the ranks may have other seeds; call it on each rank's part "
            "(DTensor.to_local)"
        )
    n_leading = next((s.ndim - p.rank for p in op.tensors if p.leading and (s := specs[p.name]) is not None), 0)
    results = op.results[: len(overload._schema.returns)]
    ndims = [len(r.sizes) + (0 if r.leading is None else n_leading) for r in results]
    ways = [_replicated(specs, len(results))]
    for inputs, outputs in rules:
        for leading in range(n_leading) if "..." in inputs else [None]:
            ways.append(_way((inputs, outputs[: len(results)]), specs, ndims, leading))
    return _that_keep_what_is_written(op, specs, ways)


def _that_keep_what_is_written(op: GeneratedOp, specs: Mapping[str, Any], ways: Ways) -> Ways:
    """A tensor that the op writes must not be redistributed: the op would write a copy."""
    present = [p for p in op.tensors if specs[p.name] is not None]
    for i, param in enumerate(present):
        if not param.mutated:
            continue
        placements = specs[param.name].placements
        ways = [way for way in ways if way[1][i] == placements[0]]
        if not ways or len(set(placements)) > 1:
            raise errors.UnsupportedError(
                f"tk.{op.name}: {param.name}, which it writes, is {list(placements)}: no kernel writes its parts so. "
                "Redistribute it before, or call the op on each rank's part (DTensor.to_local)"
            )
    return ways


def _of_dims(overload: Any, dims: str | Callable[..., str], *args: Any, **kwargs: Any) -> Ways:
    """The ways that the op's text names."""
    given = _given(overload, args, kwargs)
    specs = {a.name: given[a.name] for a in overload._schema.arguments if "Tensor" in str(a.type)}
    shapes = {name: None if s is None else s.shape for name, s in specs.items()}
    text = dims if isinstance(dims, str) else dims(**given)
    rules = of_dims(text, shapes, is_linear=not given.get("activation", 0))
    return [_replicated(specs, 1), *(_way(rule, specs, [0]) for rule in rules)]


def _given(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [a.name for a in overload._schema.arguments]
    return dict(zip(names, _register.with_defaults(overload, tuple(args), kwargs), strict=True))


def _replicated(specs: Mapping[str, Any], n_results: int) -> tuple[list[Any], list[Any]]:
    return [Replicate()] * n_results, [Replicate() for s in specs.values() if s is not None]


def _way(rule: Rule, specs: Mapping[str, Any], ndims: Sequence[int], leading: int | None = None) -> Any:
    inputs, results = rule
    present = [(place, s.ndim) for place, s in zip(inputs, specs.values(), strict=True) if s is not None]
    return placements(zip(results, ndims, strict=True), leading), placements(present, leading)
