"""Reductions: sums, extremes and their positions, variance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from tk.aot.spec import REDUCED_FLOATS
from tk.codegen import index as ix
from tk.codegen.lowering.graph import Call
from tk.codegen.lowering.lazy import Emitter, Index, Lazy, reduction
from tk.codegen.lowering.rules.table import RULES, base_name, normal_dim, rule, wide_of
from tk.codegen.lowering.runs import reduced


def _dims(x: Lazy, dims: Any) -> tuple[int, ...]:
    """The dimensions that are reduced. A tensor without any has none: torch lets its one element be reduced along
    dimension 0 or -1."""
    rank = len(x.shape)
    if not rank or dims is None or (isinstance(dims, list | tuple) and not dims):
        return tuple(range(rank))
    return tuple(sorted({normal_dim(d, rank) for d in ([dims] if isinstance(dims, int) else dims)}))


def _reduce(kind: str, x: Lazy, dims: Any, keepdim: bool, dtype: str, accumulate: str) -> Lazy:
    """Reduce what is read as `accumulate`, and give it as `dtype`. With nothing to reduce the element is the result."""
    at = _dims(x, dims)
    wide = Lazy(x.shape, accumulate, lambda e, i: e.cast(e.read(x, i), accumulate))
    if all(x.shape[d] == 1 for d in at):
        result: Lazy = Lazy(
            tuple(s for d, s in enumerate(x.shape) if d not in at),
            accumulate,
            lambda e, i: e.read(wide, _with_ones(i, at, len(x.shape))),
        )
    else:
        result = reduced(kind, wide, at, accumulate)
    kept = tuple(sympy.Integer(1) if d in at else s for d, s in enumerate(x.shape)) if keepdim else result.shape

    def read(e: Emitter, index: Index) -> int:
        own = tuple(v for d, v in enumerate(index) if d not in at) if keepdim else index
        return e.cast(e.read(result, own), dtype)

    return Lazy(kept, dtype, read)


def _with_ones(index: Index, at: Sequence[int], rank: int) -> Index:
    rest = iter(index)
    return tuple(sympy.Integer(0) if d in at else next(rest) for d in range(rank))


@rule("aten.sum", "prims.sum")
def _sum(call: Call, x: Any, dims: Any = None, keepdim: bool = False, *, dtype: Any = None, **_: Any) -> Lazy:
    return _reduce("sum", x, dims, bool(keepdim), call.dtype, wide_of(call.dtype))


@rule("aten.prod", "prims.prod")
def _prod(call: Call, x: Any, dims: Any = None, keepdim: bool = False, *, dtype: Any = None, **_: Any) -> Lazy:
    return _reduce("prod", x, dims, bool(keepdim), call.dtype, wide_of(call.dtype))


@rule("aten.mean")
def _mean(call: Call, x: Any, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Lazy:
    wide = wide_of(call.dtype)
    total = _reduce("sum", x, dims, bool(keepdim), wide, wide)
    count = ix.product([x.shape[d] for d in _dims(x, dims)])

    def read(e: Emitter, index: Index) -> int:
        return e.cast(e.op("div", wide, e.read(total, index), e.cast(e.index(count), wide)), call.dtype)

    return Lazy(total.shape, call.dtype, read)


@rule("aten.amax", "aten.amin", "prims.amax", "prims.amin")
def _extreme(call: Call, x: Any, dims: Any = None, keepdim: bool = False) -> Lazy:
    kind = "max" if base_name(call) == "amax" else "min"
    if x.dtype == "i1":
        return _reduce("any" if kind == "max" else "all", x, dims, bool(keepdim), "i1", "i1")
    return _reduce(kind, x, dims, bool(keepdim), x.dtype, _compared_in(x.dtype))


def _compared_in(dtype: str) -> str:
    return {"i1": "i32", **dict.fromkeys(REDUCED_FLOATS, "fp32")}.get(dtype, dtype)


@rule("aten.max", "aten.min")
def _max(call: Call, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    if isinstance(dim, Lazy):
        return RULES[f"aten.{base_name(call)}imum"](call, x, dim)
    kind = base_name(call)
    value = _reduce(kind, x, dim, keepdim, x.dtype, _compared_in(x.dtype))
    if dim is None:
        return value
    return [value, _position(f"arg{kind}", x, dim, keepdim)]


def _position(kind: str, x: Lazy, dim: Any, keepdim: bool) -> Lazy:
    at = _dims(x, dim)
    if all(x.shape[d] == 1 for d in at):
        shape = tuple(sympy.Integer(1) if d in at else s for d, s in enumerate(x.shape) if keepdim or d not in at)
        return Lazy(shape, "i64", lambda e, i: e.constant(0, "i64"))
    wide = _compared_in(x.dtype)
    read_wide = Lazy(x.shape, wide, lambda e, i: e.cast(e.read(x, i), wide))
    result = reduction(kind, read_wide, at, "i64")
    if not keepdim:
        return result
    kept = tuple(sympy.Integer(1) if d in at else s for d, s in enumerate(x.shape))
    return Lazy(kept, "i64", lambda e, i: e.read(result, tuple(v for d, v in enumerate(i) if d not in at)))


@rule("aten.argmax", "aten.argmin")
def _arg(call: Call, x: Any, dim: Any = None, keepdim: bool = False) -> Lazy:
    return _position(base_name(call), x, dim, keepdim)


@rule("aten.any", "aten.all", "prims.xor_sum")
def _any(call: Call, x: Any, dim: Any = None, keepdim: bool = False) -> Lazy:
    kind = {"xor_sum": "xor"}.get(name := base_name(call), name)
    inner = x.dtype if kind == "xor" else "i1"
    return _reduce(kind, x, dim, keepdim, call.dtype, inner)


def _variance(call: Call, x: Any, dims: Any, correction: Any, keepdim: bool) -> tuple[Lazy, Lazy]:
    wide = wide_of(x.dtype)
    mean = _reduce("mean", x, dims, keepdim, wide, wide)
    squares = _reduce("m2", x, dims, keepdim, wide, wide)
    count = ix.product([x.shape[d] for d in _dims(x, dims)])
    if all(x.shape[d] == 1 for d in _dims(x, dims)):  # a single element deviates by nothing
        squares = Lazy(mean.shape, wide, lambda e, i: e.op("sub", wide, e.read(mean, i), e.read(mean, i)))
    by = 1.0 if correction is None else float(correction)

    def read(e: Emitter, index: Index) -> int:
        n = e.op("sub", wide, e.cast(e.index(count), wide), e.constant(by, wide))
        n = e.op("maximum", wide, n, e.constant(0, wide))
        return e.cast(e.op("div", wide, e.read(squares, index), n), x.dtype)

    return Lazy(mean.shape, x.dtype, read), Lazy(mean.shape, x.dtype, lambda e, i: e.cast(e.read(mean, i), x.dtype))


def _returned_mean(x: Lazy, dims: Any, mean: Lazy) -> Lazy:
    """The mean as a result: NaN where it is of no elements. Where it is only taken off them there is nothing to be."""
    count = ix.product([x.shape[d] for d in _dims(x, dims)])

    def read(e: Emitter, index: Index) -> int:
        is_empty = e.op("eq", "i1", e.index(count), e.index(0))
        return e.op("where", x.dtype, is_empty, e.constant(math.nan, x.dtype), e.read(mean, index))

    return Lazy(mean.shape, x.dtype, read)


@rule("aten.var")
def _var(call: Call, x: Any, dims: Any = None, correction: Any = None, keepdim: bool = False) -> Lazy:
    return _variance(call, x, dims, correction, keepdim)[0]


@rule("aten.var_mean")
def _var_mean(call: Call, x: Any, dims: Any = None, correction: Any = None, keepdim: bool = False) -> tuple[Lazy, Lazy]:
    variance, mean = _variance(call, x, dims, correction, keepdim)
    picks = [n for n in call.node.users if n.args[1] == 1]
    if any(map(_is_returned, picks)):
        return variance, _returned_mean(x, dims, mean)
    return variance, mean


def _is_returned(node: fx.Node) -> bool:
    """Whether a node is a result, as it is or converted."""
    return any(
        user.op == "output" or (user.target is torch.ops.aten._to_copy.default and _is_returned(user))
        for user in node.users
    )
