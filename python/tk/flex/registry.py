"""Mods that ``tk build`` is to compile, and what is said of one that no pack has."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tk import errors
from tk.flex import trace
from tk.flex.canonical import Graph, _target_name
from tk.flex.mods import MaskMod, ScoreMod
from tk.flex.trace import Capture, Traced
from tk.generated import files, refusals

__all__ = ["Registered", "register", "registered"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_HEAD = 512


@dataclass(frozen=True)
class Registered:
    """What :func:`register` announced. file: the one that it belongs to."""

    name: str
    traced: Traced
    head_dims: tuple[int | tuple[int, int], ...]
    dtypes: tuple[torch.dtype, ...]
    backward: bool
    decode: bool
    file: str


_registered: list[Registered] = []


def register(
    name: str,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    *,
    head_dims: Sequence[int | tuple[int, int]] = (64, 128),
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    backward: bool = True,
    decode: bool = True,
) -> None:
    """Announces a pair of mods, which ``tk build`` on this file then compiles. It compiles nothing itself.

    Args:
        name: in tables and messages.
        score_mod, mask_mod: as for tk.flex_attention; the mask_mod of its block_mask. What they capture here says only
            of which kind it is: numbers, and tensors of a dtype and rank.
        head_dims: sizes of a head, or pairs of those of query and value; at most 512.
        dtypes: of query, key and value.
        backward: gradients too. decode: kernels for few queries too.

    Raises:
        ValueError, TypeError: an argument that is none of these, or another pair under this name.
        tk.UnsupportedError: a mod that no kernel can have, or of which none has the gradient; with its line.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"tk.flex.register: name must be a string, is {name!r}")
    for head in head_dims:
        for size in head if isinstance(head, tuple) else (head,):
            if not isinstance(size, int) or not 0 < size <= _MAX_HEAD:
                raise ValueError(f"tk.flex.register: a head of {size!r} in head_dims; they are 1 to {_MAX_HEAD}")
    for dtype in dtypes:
        if dtype not in _DTYPES:
            raise ValueError(f"tk.flex.register: {dtype} in dtypes; they are {', '.join(map(str, _DTYPES))}")
    try:
        traced = trace.pair(score_mod, mask_mod).traced
        for fn, kind, graph in ((score_mod, "score_mod", traced.score), (mask_mod, "mask_mod", traced.mask)):
            if graph is not None:
                _check_ops(graph, backward, f"{trace.described(fn, kind)}: ")
    except (errors.UnsupportedError, TypeError, ValueError) as error:
        return refusals.refuse(error)
    for known in _registered:
        if known.name == name and known.traced.fingerprint != traced.fingerprint:
            raise ValueError(f"tk.flex.register: {name!r} is the name of another pair of mods, in {known.file}")
    made = Registered(name, traced, tuple(head_dims), tuple(dtypes), backward, decode,
                      files.declaring())  # fmt: skip
    if made not in _registered:
        _registered.append(made)


def registered(file: str | None = None) -> list[Registered]:
    """What was announced, by one file or all."""
    return [r for r in _registered if file is None or files.is_same(r.file, file)]


def _check_ops(graph: Graph, backward: bool, where: str = "") -> None:
    """Raises tk.UnsupportedError for an op that no kernel can have. It takes the build extra to know."""
    try:
        from tk.flex import lowering
    except ModuleNotFoundError:
        return
    try:
        lowering.check(graph, backward)
    except errors.UnsupportedError as error:
        raise errors.UnsupportedError(f"{where}{error}") from error


# --- Mods that no pack has ---


def missing(traced: Traced, op: str) -> str:
    """The message, with a file to start from. Raises tk.UnsupportedError for mods that no kernel can have."""
    for graph in (traced.score, traced.mask):
        if graph is not None:
            _check_ops(graph, op.endswith("_backward"), "tk.flex_attention: ")
    return (
        f"tk.flex_attention: no loaded pack has kernels for these mods ({op}). Build them, once, on any machine with "
        "the build extra:\n    tk build mods.py -o mods.tkpack\nand load them with tk.load_pack('mods.tkpack'), or by "
        "TK_PACK_PATH; or let tk do so, with tk.config.build_missing(). As they were traced, for mods.py:\n\n"
        f"{source_of(traced)}"
    )


def source_of(traced: Traced, *more: str) -> str:
    """A file that registers the pair: mods of the same graphs, with stand-ins for what they capture. more: further
    arguments of :func:`register`."""
    parts = [SOURCE_HEAD]
    arguments = []
    for kind, graph in (("score", traced.score), ("mask", traced.mask)):
        if graph is not None:
            parts.append(factory_source(kind, graph))
            arguments.append(f"{kind}_mod={factory_call(kind, graph, traced)}")
    name = hashlib.sha256(traced.text.encode()).hexdigest()[:8]
    parts.append(f"tk.flex.register({', '.join([repr(f'mods_{name}'), *arguments, *more])})\n")
    return "\n\n".join(parts)


SOURCE_HEAD = "import operator\n\nimport torch\n\nimport tk\n\naten = torch.ops.aten"


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
    return f"{_target_name(node.target)}({', '.join(inside)})"


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
    return f"torch.empty({[1] * capture.rank}, dtype={capture.dtype})"
