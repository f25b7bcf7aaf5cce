"""The graphs of mods as a Python file that registers them, to build them from where no pack has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tk.flex.tracing.canonical import Graph, target_name
from tk.flex.tracing.trace import Capture, Traced

SOURCE_HEAD = "import operator\n\nimport torch\n\nimport tk\n\naten = torch.ops.aten"


def source_of(traced: Traced, *more: str) -> str:
    """A file that registers the pair: mods of the same graphs, with stand-ins for what they capture. more: further
    arguments of tk.flex.register."""
    parts = [SOURCE_HEAD]
    arguments = []
    for kind, graph in (("score", traced.score), ("mask", traced.mask)):
        if graph is not None:
            parts.append(factory_source(kind, graph))
            arguments.append(f"{kind}_mod={factory_call(kind, graph, traced)}")
    name = f"mods_{traced.fingerprint[:8]}"
    parts.append(f"tk.flex.register({', '.join([repr(name), *arguments, *more])})\n")
    return "\n\n".join(parts)


def factory_source(name: str, graph: Graph, arguments: int | None = None) -> str:
    """A function of what the graph captures, which returns one that computes it. arguments: how many that one has, all
    by default; the others are not read."""
    captures = ", ".join(n.name for n in graph.captures)
    parameters = ", ".join(n.name for n in graph.arguments[:arguments])
    lines = [f"        {n.name} = {_call(n)}" for n in graph.graph.nodes if n.op == "call_function"]
    body = "\n".join([*lines, f"        return {graph.result.name}"])
    return f"def {name}({captures}):\n    def mod({parameters}):\n{body}\n\n    return mod"


def factory_call(name: str, graph: Graph, traced: Traced) -> str:
    """A call of it, with stand-ins for what is captured."""
    captures = [traced.captures[n.meta["capture"]] for n in graph.captures]
    return f"{name}({', '.join(map(_example, captures))})"


def _call(node: fx.Node) -> str:
    inside = [_spelled(a) for a in node.args] + [f"{k}={_spelled(v)}" for k, v in node.kwargs.items()]
    if node.target is torch.ops.aten.index.Tensor:
        source, at = node.args
        return f"{_spelled(source)}[{', '.join(map(_spelled, at))}]"  # type: ignore[arg-type]
    if node.target is torch.ops.aten.sym_size.int:
        return f"{_spelled(node.args[0])}.shape[{node.args[1]}]"
    return f"{target_name(node.target)}({', '.join(inside)})"


def _spelled(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_spelled, value))}]"
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return f"float('{value}')"
    return repr(value)


def _example(capture: Capture) -> str:
    if capture.kind != "tensor":
        return "1" if capture.kind == "int" else "1.0"
    where = "" if capture.rank else ", device='meta'"  # on the CPU it would be a number
    return f"torch.empty({[1] * capture.rank}, dtype={capture.dtype}{where})"
