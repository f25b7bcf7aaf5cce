"""Works out a graph for many scores at once: every value has four dimensions, [B, H, Q, KV], each full or 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tk.flex.tracing.canonical import Graph

aten = torch.ops.aten

_BOUNDED = frozenset({aten.le.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.gt.Scalar})

Gather = Callable[[fx.Node, Tensor, list[Any]], Tensor]
"""``gather(node, captured, indices)``: what the node, a read of a captured tensor, gives."""


def evaluate(
    graph: Graph,
    arguments: Sequence[Tensor],
    captures: Sequence[Any],
    allowed: Tensor | None = None,
    gather: Gather | None = None,
) -> Tensor:
    """The graph's result.

    Args:
        arguments: score (of a score graph), b, h, q_idx, kv_idx, each broadcast along the dimensions that are not its.
        captures: the pair's.
        allowed: where captured tensors may be read; elsewhere index 0 is read instead.
        gather: instead of reading captured tensors.

    Raises:
        IndexError: a read out of bounds where it is allowed.
    """
    values: dict[fx.Node, Any] = dict(zip(graph.arguments, arguments, strict=True))
    for node in graph.captures:
        value = captures[node.meta["capture"]]
        is_number = node.meta["kind"] != "tensor"
        values[node] = value if is_number or node.meta.get("rank") else (value.to(arguments[0].device), [])

    def value_of(x: fx.Node) -> Any:
        value = values[x]
        if isinstance(value, tuple):  # a captured 0-d tensor
            value = values[x] = _read(x, value[0], [], None, gather)
        return value

    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is aten.sym_size.int:
            values[node] = values[node.args[0]].shape[node.args[1]]
            continue
        args = fx.node.map_arg(node.args, value_of)
        if node.target is aten.index.Tensor:
            values[node] = _read(node, args[0], list(args[1]), allowed, gather)
        elif node.target is aten.full.default:
            values[node] = torch.full((1, 1, 1, 1), args[1], dtype=node.kwargs["dtype"], device=arguments[0].device)
        elif node.target in _BOUNDED and isinstance(args[1], int) and args[0].dtype == torch.int32:
            values[node] = node.target(args[0], max(-(2**31), min(args[1], 2**31 - 1)))  # torch would wrap it around
        else:
            values[node] = node.target(*args, **fx.node.map_arg(node.kwargs, value_of))
    return value_of(graph.result)


def indices(
    b: Tensor | Sequence[int], h: Tensor | Sequence[int], q: tuple[int, int], kv: tuple[int, int], device: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b, h, q_idx and kv_idx of a rectangle; q and kv: first and past the last."""
    rows = torch.arange(*q, dtype=torch.int32, device=device).view(1, 1, -1, 1)
    columns = torch.arange(*kv, dtype=torch.int32, device=device).view(1, 1, 1, -1)
    batch = torch.as_tensor(b, dtype=torch.int32, device=device).view(-1, 1, 1, 1)
    heads = torch.as_tensor(h, dtype=torch.int32, device=device).view(1, -1, 1, 1)
    return batch, heads, rows, columns


def _read(node: fx.Node, source: Tensor, at: list[Any], allowed: Tensor | None, gather: Gather | None) -> Tensor:
    at = [_in_bounds(node, i, size, allowed) for i, size in zip(at, source.shape, strict=True)]
    if 0 in source.shape:  # nothing may be read: _in_bounds has seen to it
        return source.new_zeros((1, 1, 1, 1))
    if gather is not None:
        return gather(node, source, at)
    return read(source, at)


def read(source: Tensor, at: Sequence[Any]) -> Tensor:
    """``source[at]`` with four dimensions."""
    found = source[tuple(i.long() if isinstance(i, Tensor) else i for i in at)] if at else source
    return found if found.dim() == 4 else found.view(1, 1, 1, 1)


def _in_bounds(node: fx.Node, index: Any, size: int, allowed: Tensor | None) -> Any:
    if not isinstance(index, Tensor):
        if not -size <= index < size and (allowed is None or bool(allowed.any())):
            raise IndexError(_out_of_bounds(node, int(index), size))
        return index if size and -size <= index < size else 0
    outside = (index < -size) | (index >= size)
    if torch.compiler.is_compiling():  # exporting: what the tensors hold is not known
        return torch.where(outside, 0, index)
    if not bool(outside.any()):
        return index
    at_fault = outside if allowed is None else outside & allowed
    if bool(at_fault.any()):
        worst = index.expand(at_fault.shape)[at_fault][0]
        raise IndexError(_out_of_bounds(node, int(worst), size))
    return torch.where(outside, 0, index)


def _out_of_bounds(node: fx.Node, index: int, size: int) -> str:
    return f"tk.flex_attention: a mod reads index {index} of a captured tensor of {size} (in {node.format_node()})"
