"""Calls of ops over lists of tensors in Python: the same checks as csrc/ops/lists.cpp's, then place by place."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tk import errors
from tk.generated import interpret
from tk.generated.problem import BY_NUMBER, Call, extent, overlaps_itself
from tk.generated.records import GeneratedOp, Param

Lists = Sequence[tuple[Param, Sequence[Tensor]]]


class _Places(list[Any]):
    """A value for each place of the lists."""


def evaluate(nodes: Sequence[Mapping[str, Any]], inputs: Mapping[str, Any], name: str) -> list[Any]:
    """Runs recorded nodes: those of lists for one place after the other. inputs: lists, and what all places share.
    Returns a list for each result that has a value for each place."""
    values: dict[str, Any] = {}
    for node in nodes:
        if node["op"] == "output":
            (outputs,) = node["args"]
            refs = [x["ref"] for x in (outputs if isinstance(outputs, list) else [outputs]) if x is not None]
            return [list(values[r]) if isinstance(values[r], _Places) else values[r] for r in refs]
        if node["op"] == "input":
            given = inputs[node["args"][0]]
            values[node["name"]] = _Places(given) if isinstance(given, list | tuple) else given
            continue
        if node["op"] == "tk.over_places":
            values[node["name"]] = torch.stack(list(values[node["args"][0]["ref"]]))
            continue
        read = list(interpret.references((node.get("args", ()), node.get("kwargs", {}))))
        count = next((len(values[r]) for r in read if isinstance(values.get(r), _Places)), None)
        found = [
            interpret.evaluate_node(node, {r: values[r][i] if isinstance(values[r], _Places) else values[r] for r in
            read}, name, _device_of(inputs))
            for i in range(1 if count is None else count)
        ]  # fmt: skip
        values[node["name"]] = found[0] if count is None else _Places(found)
    raise errors.PackError(f"tk.{name}: its graph has no output")


def _device_of(inputs: Mapping[str, Any]) -> torch.device:
    return next((x.device for x in tensors_of(inputs.values())), torch.device("cpu"))


def calls(op: GeneratedOp, args: Sequence[Any]) -> list[Call]:
    """A call for every place of the lists. args: in the order of the schema.

    Raises ValueError for lists that do not go together."""
    lists = [(p, xs) for p, xs in zip(op.params, args, strict=False) if p.kind == "tensors"]
    (first, places), *others = lists
    for p, x in zip(op.params, args, strict=False):
        if p.kind == "tensor":
            _check_shared(op, (first, places), p, x)
    for p, xs in others:
        if len(xs) != len(places):
            raise ValueError(
                f"tk.{op.name}: lists must have one length; {first.name} has {len(places)} tensors, {p.name} {len(xs)}"
            )
    for p, xs in lists:
        _check_alike(op, (first, places), p, xs)
    found = []
    for i in range(len(places)):
        _check_sizes(op, lists, i)
        here = [x[i] if p.kind == "tensors" else x for p, x in zip(op.params, args, strict=False)]
        found.append(Call(op.of_one_place, [*here, *args[len(op.params) :]]))
    return found


def _check_shared(op: GeneratedOp, first: tuple[Param, Sequence[Tensor]], p: Param, x: Tensor) -> None:
    """What all places share."""
    if first[1] and x.device != first[1][0].device:
        raise ValueError(
            f"tk.{op.name}: {first[0].name}[0] is on {first[1][0].device}, {p.name} on {x.device}; all tensors must be "
            "on one device"
        )
    if x.dim():
        raise ValueError(f"tk.{op.name}: {p.name} must have 0 dimensions, is {list(x.shape)}")


def results(op: GeneratedOp, args: Sequence[Any], found: Sequence[Call]) -> list[Any]:
    """An empty tensor for each result, or a list of them. found: of the call's places."""
    first, places = next((p, xs) for p, xs in zip(op.params, args, strict=False) if p.kind == "tensors")
    if not found and any(result.leading is None for result in op.results):
        raise ValueError(f"tk.{op.name}: {first.name} is an empty list, of which nothing can be reduced")
    sized = next((xs for p, xs in zip(op.params, args, strict=False) if p.kind == "tensors" and p.leading), places)
    made: list[Any] = []
    for result in op.results:
        if not found:
            made.append([])
            continue
        like = {"dtype": BY_NUMBER[int(found[0].evaluate(result.dtype))], "device": places[0].device}
        shapes = [() if result.sizes else x.shape for x in sized]
        made.append(torch.empty((), **like) if result.leading is None else [torch.empty(s, **like) for s in shapes])
    return made


def run(op: GeneratedOp, args: Sequence[Any]) -> list[Any]:
    """The results on the CPU; what is written in place is written."""
    found = calls(op, args)
    made = results(op, args, found)
    if not found:
        return made
    check_memory(op, args)
    inputs = [
        [interpret.Input(p.leading, 0, p.mutated, x) for x in (xs if p.kind == "tensors" else [xs])]
        for p, xs in zip(op.params, args, strict=False)
    ]
    seen = {
        p.name: [x.seen for x in xs] if p.kind == "tensors" else xs[0].seen
        for p, xs in zip(op.params, inputs, strict=True)
    }
    returned = evaluate(interpret.graph_of(found[0])["nodes"], seen, op.name)
    for x in itertools.chain(*inputs):
        x.write_back()
    for values, outputs in zip(returned, made, strict=True):
        pairs = zip(values, outputs, strict=True) if isinstance(outputs, list) else [(values, outputs)]
        for value, output in pairs:
            output.copy_(value.reshape(output.shape))
    return made


def _check_alike(op: GeneratedOp, first: tuple[Param, Sequence[Tensor]], p: Param, xs: Sequence[Tensor]) -> None:
    for i, x in enumerate(xs):
        if x.device != first[1][0].device:
            raise ValueError(
                f"tk.{op.name}: {first[0].name}[0] is on {first[1][0].device}, {p.name}[{i}] on {x.device}; all "
                "tensors must be on one device"
            )
        if x.dtype != xs[0].dtype:
            raise ValueError(
                f"tk.{op.name}: the tensors of a list must have one dtype; {p.name}[0] is {_name(xs[0])}, "
                f"{p.name}[{i}] {_name(x)}"
            )


def _check_sizes(op: GeneratedOp, lists: Lists, i: int) -> None:
    sized = [(p, xs[i]) for p, xs in lists if p.leading]
    for (p, x), (q, y) in pairwise(sized):

        def message(p: Param = p, q: Param = q, x: Tensor = x, y: Tensor = y) -> str:
            return (
                f"tk.{op.name}: the dimensions of {p.name}[{i}] and {q.name}[{i}] must be the same, are "
                f"{list(x.shape)} and {list(y.shape)}"
            )

        if x.dim() != y.dim():
            raise ValueError(message())
        for a, b in zip(x.shape, y.shape, strict=True):
            torch._check_value(a == b, message)
    for p, xs in lists:
        if not p.leading and xs[i].dim():
            raise ValueError(f"tk.{op.name}: {p.name}[{i}] must have 0 dimensions, is {list(xs[i].shape)}")


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def check_memory(op: GeneratedOp, args: Sequence[Any]) -> None:
    """What is written shares memory with nothing else. Raises ValueError."""
    given = [
        (p, f"{p.name}[{i}]", x)
        for p, xs in zip(op.params, args, strict=False) if p.kind == "tensors"
        for i, x in enumerate(xs) if x.numel()
    ] + [(p, p.name, x) for p, x in zip(op.params, args, strict=False) if p.kind == "tensor"]  # fmt: skip
    for p, name, x in given:
        if p.mutated and overlaps_itself(x):
            raise ValueError(
                f"tk.{op.name}: elements of {name}, which is written, share memory: give each a place of its own "
                "(.clone())"
            )
    last: dict[bool, tuple[int, str]] = {}  # whether it is written -> the end that lies furthest, and whose it is
    for p, name, (begin, end) in sorted(((p, name, extent(x)) for p, name, x in given), key=lambda row: row[2]):
        for is_written, (reached, other) in last.items():
            if reached > begin and (is_written or p.mutated):
                written, shared = (other, name) if is_written else (name, other)
                raise ValueError(
                    f"tk.{op.name}: {written}, which is written, overlaps {shared} in memory; clone one of them"
                )
        if end > last.get(p.mutated, (0, ""))[0]:
            last[p.mutated] = (end, name)


def tensors_of(args: Iterable[Any]) -> Iterator[Tensor]:
    """Those of a call's arguments, in lists or not."""
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from (y for y in x if isinstance(y, Tensor))
