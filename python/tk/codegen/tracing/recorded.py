"""The recorded graph, of the ATen ops as the function called them, as JSON: what the CPU path interprets."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from tk.codegen.errors import TraceError
from tk.codegen.tracing import constants
from tk.codegen.tracing.arguments import DTYPE_NAMES
from tk.codegen.tracing.core import is_tensor

aten = torch.ops.aten


def record(
    graph: fx.GraphModule,
    names: Sequence[str],
    constant: Collection[str],
    combined: Callable[[int, Sequence[str]], str],
    is_backward: bool = False,
) -> list[dict[str, Any]]:
    """Nodes in order: {"name", "op", "args", "kwargs"}; "input" nodes name their parameter.
    combined: the combine function of a scan, by its number and the dtypes of its elements, in JSON.

    The graph may be differentiated, so a detach stands behind what is constant to a gradient, and nowhere else: those
    with which autograd keeps what its own backward reads are left out."""
    if is_backward:
        _drop_detaches(graph, constant)
    live = _live(graph)
    found: list[dict[str, Any]] = []
    renamed: dict[str, str] = {}
    inputs = iter(names)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            found.append(dict(name=node.name, op="input", args=[next(inputs)], kwargs={}))
        elif node in live:
            if node.op == "get_attr":
                raise TraceError("a tensor that was made where no trace sees it, such as in a thread of its own")
            args = node.args if node.op != "output" else (node.args[0],)
            if node.target == torch.ops.tk_trace.associative_scan.default:
                xs, number, dim = node.args
                args = (xs, combined(number, [DTYPE_NAMES[x.meta["val"].dtype] for x in xs]), dim)
            if node.target == torch.ops.tk_trace.constant.default:
                args = (*constants.record(node.args[0]), torch.device("meta"))
            found.append(
                dict(
                    name=node.name,
                    op=_target_name(node),
                    args=_json(list(args), renamed),
                    kwargs=_json(dict(node.kwargs), renamed),
                )
            )
            if node.name in constant and _carries_gradients(node):
                renamed[node.name] = f"{node.name}_constant"
                found.append(dict(name=renamed[node.name], op=_DETACH, args=[{"ref": node.name}], kwargs={}))
    return found


_DETACH = str(aten.detach.default)


def _drop_detaches(graph: fx.GraphModule, constant: Collection[str]) -> None:
    for node in graph.graph.nodes:
        if node.target is aten.detach.default and node.name not in constant:
            node.replace_all_uses_with(node.args[0])


def _carries_gradients(node: fx.Node) -> bool:
    return node.target is not aten.detach.default and is_tensor(node) and node.meta["val"].is_floating_point()


def _live(graph: fx.GraphModule) -> set[fx.Node]:
    live: set[fx.Node] = set()
    for node in reversed(graph.graph.nodes):
        changes = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
        if node.op == "output" or changes or node in live:
            live.add(node)
            live.update(node.all_input_nodes)
    return live


# Decompositions take for granted that their indices are in bounds; what runs the recorded graph checks them.
_CHECKED = {
    "aten._unsafe_index.Tensor": "aten.index.Tensor",
    "aten._unsafe_index_put.default": "aten.index_put.default",
}


def _target_name(node: fx.Node) -> str:
    if node.op == "output":
        return "output"
    if isinstance(node.target, OpOverload) and node.target.namespace == "tk_trace":
        return f"tk.{node.target._opname}"
    if isinstance(node.target, OpOverload):
        return _CHECKED.get(str(node.target), str(node.target))
    target: Any = node.target
    if isinstance(target, HigherOrderOperator):
        return f"higher_order.{target.name()}"
    module = "operator" if getattr(operator, target.__name__, None) is target else "torch"
    return f"{module}.{target.__name__}"


def _json(x: Any, renamed: Mapping[str, str]) -> Any:
    if isinstance(x, fx.Node):
        return {"ref": renamed.get(x.name, x.name)}
    if isinstance(x, tuple | list):
        return [_json(v, renamed) for v in x]
    if isinstance(x, dict):
        return {k: _json(v, renamed) for k, v in x.items() if k not in ("layout", "pin_memory")}
    if isinstance(x, torch.dtype):
        return {"dtype": DTYPE_NAMES[x]}
    if isinstance(x, torch.device):
        return {"device": "arguments"}
    if isinstance(x, torch.memory_format):
        return {"memory_format": str(x).removeprefix("torch.")}
    if isinstance(x, float) and not math.isfinite(x):
        return {"float": repr(x)}
    if x is None or isinstance(x, bool | int | float | str):
        return x
    raise TraceError(f"an argument of type {type(x).__name__} cannot be recorded: {x!r}")
