"""What a function computes, as something that can be compared: what is written otherwise may be the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tk import _log

__all__ = ["Graph", "graph_of"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Graph:
    """identity: equal where the same is computed of the same inputs. added: the numbers that are added to something."""

    identity: str
    added: frozenset[float] = field(compare=False)


def graph_of(function: Callable[..., Any], examples: Sequence[Tensor]) -> Graph | None:
    """What a function computes; None for what cannot be traced."""

    def call(*args: Tensor) -> Any:
        return function(*args)

    try:
        with torch.no_grad(), _log.without_errors_of_fakes():
            nodes = make_fx(call, tracing_mode="fake")(*examples).graph.nodes
    except Exception:  # whatever a model's own code raises on tensors without values
        return None
    identities: dict[fx.Node, str] = {}
    added: set[float] = set()
    for node in nodes:
        if node.op == "get_attr":
            return None  # it reads a tensor that is no argument
        if node.op == "placeholder":
            identities[node] = f"input {len(identities)}"
            continue
        text = _text(node, identities)
        identities[node] = hashlib.sha256(text.encode()).hexdigest()
        if node.target in (aten.add.Tensor, aten.add.Scalar):
            added.update(x for x in node.args if isinstance(x, float))
    return Graph(identities[node], frozenset(added))


def _text(node: fx.Node, identities: dict[fx.Node, str]) -> str:
    args = fx.map_arg(node.args, identities.__getitem__)
    kwargs = fx.map_arg(dict(node.kwargs), identities.__getitem__)
    target = node.target
    if target is aten.pow.Tensor_Scalar and args[1] == 2:
        target, args = aten.mul.Tensor, (args[0], args[0])
    if target in _OF_NUMBERS:  # where 1 is 1.0
        args = tuple(float(x) if isinstance(x, int) else x for x in args)
    if target in (aten.mul.Tensor, aten.add.Tensor):
        args = tuple(sorted(args, key=str))
    given = sorted((k, v) for k, v in kwargs.items() if v not in _EXAMPLES_OWN)
    return f"{target} {args!r} {given!r}"


_OF_NUMBERS = (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar)
_EXAMPLES_OWN = (torch.strided, torch.device("cpu"))  # a cast that names them does nothing to them
