"""The backwards of a function: of every choice of dtypes and flags, under one signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tk.codegen.errors import TraceError
from tk.codegen.tracing.arguments import LEADING
from tk.codegen.tracing.trace import Trace, flag_values, trace_backward
from tk.generated.interpret import references
from tk.generated.signature import Signature, Size, TensorSpec


def backward_traces(
    fn: Callable[..., Any], signature: Signature, name: str, ruled: frozenset[str]
) -> tuple[Signature, list[Trace]]:
    """The traces of a function's backward, for every choice of dtypes and flags, and the signature that they have in
    common: without the arguments of which nothing is read. Raises TraceError."""
    choices = [(d, f) for d in signature.assignments() for f in flag_values(signature)]
    traces = _declared_alike([trace_backward(fn, signature, dtypes, flags, ruled) for dtypes, flags in choices],
                             signature, name)  # fmt: skip
    full = traces[0].signature
    read = {n for t in traces for n in (*t.arguments_read(), *_read_by_recorded(t.recorded))}
    kept = {n: s for n, s in full.params.items() if n in read or n.startswith("grad_") or n in full.numbers}
    for n, spec in signature.tensors.items():  # what is not read may still be where a size or a dtype is known from
        of_others = {x for s in kept.values() if isinstance(s, TensorSpec) for x in (s.dtype, *_sizes(s))}
        if not _sizes(spec) | ({spec.dtype} & signature.variables.keys()) <= of_others:
            kept[n] = spec
    ordered = {n: s for n, s in full.params.items() if n in kept}
    reduced = Signature(ordered, full.variables)
    traces = [replace(t, signature=reduced, recorded=_without(t.recorded, ordered, full.params)) for t in traces]
    return reduced, traces


def _declared_alike(traces: Sequence[Trace], forward: Signature, name: str) -> list[Trace]:
    """The traces with one signature for all. The dtype of a result and of its gradient, which each trace has by name,
    is that of a variable, the same for all, or one of its own: a result of ``x.float()`` is fp32 whatever x is."""
    specs, variables = dict(traces[0].signature.params), dict(traces[0].signature.variables)
    own: list[dict[str, str]] = [{} for _ in traces]
    for grad in [n for n in specs if n not in forward.params]:
        found = [t.signature.tensors[grad] for t in traces]
        if len({(spec.sizes, spec.leading) for spec in found}) > 1:
            raise TraceError(
                f"{name}: a result's shape is not the same expression for all dtypes and flags, so that its gradient "
                "cannot be declared; reshape the results alike"
            )
        dtypes = [spec.dtype for spec in found]
        same = [v for v in traces[0].dtypes if all(t.dtypes[v] == d for t, d in zip(traces, dtypes, strict=True))]
        variable = same[0] if same else dtypes[0]
        if not same and len(set(dtypes)) > 1:
            variable = f"{grad}_dtype"
            variables[variable] = tuple(dict.fromkeys(dtypes))
            for one, dtype in zip(own, dtypes, strict=True):
                one[variable] = dtype
        specs[grad] = replace(found[0], dtype=variable)
    signature = Signature(specs, variables)
    return [replace(t, signature=signature, dtypes={**t.dtypes, **more}) for t, more in zip(traces, own, strict=True)]


def _sizes(spec: TensorSpec) -> set[Any]:
    return {s for s in spec.sizes if isinstance(s, str | Size)} | ({LEADING} if spec.leading else set())


_SIZE = "aten.sym_size.int"


def _read_by_recorded(nodes: Sequence[Mapping[str, Any]]) -> set[str]:
    """The arguments of which the recorded graph reads more than sizes."""
    param_of = {n["name"]: n["args"][0] for n in nodes if n["op"] == "input"}
    readers = (n for n in nodes if n["op"] not in ("input", _SIZE))
    return {param_of[name] for n in readers for name in references((n["args"], n["kwargs"])) if name in param_of}


def _without(
    nodes: Sequence[Mapping[str, Any]], kept: Mapping[str, Any], specs: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The recorded graph less the inputs that are not kept. Their sizes are read of those that are. specs: of all."""
    name_of = {n["args"][0]: n["name"] for n in nodes if n["op"] == "input"}
    dropped = {name_of[param]: _dims(spec) for param, spec in specs.items() if param in name_of and param not in kept}
    known = {
        size: (name_of[param], d)
        for param, spec in kept.items() if isinstance(spec, TensorSpec)
        for d, size in enumerate(_dims(spec))
    }  # fmt: skip
    found = []
    for n in nodes:
        if n["op"] == _SIZE and n["args"][0]["ref"] in dropped:
            source, d = known[dropped[n["args"][0]["ref"]][n["args"][1]]]
            found.append({**n, "args": [{"ref": source}, d]})
        elif n["name"] not in dropped:
            found.append(dict(n))
    return found


def _dims(spec: Any) -> tuple[Any, ...]:
    """The sizes as the graph sees them; none of a number."""
    return ((LEADING,) * spec.leading + tuple(spec.sizes)) if isinstance(spec, TensorSpec) else ()
