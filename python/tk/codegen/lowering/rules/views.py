"""Views are index arithmetic."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy

from tk.aot.spec import ITEMSIZE
from tk.codegen import index as ix
from tk.codegen.errors import TraceError
from tk.codegen.ir import value_symbol
from tk.codegen.lowering.graph import Call, operand
from tk.codegen.lowering.lazy import Emitter, Index, Lazy
from tk.codegen.lowering.rules.table import RULES, base_name, normal_dim, rule


@rule("aten.view", "aten._unsafe_view", "aten.reshape", "prims.reshape", "prims.collapse_view", "aten._reshape_alias")
def _view(call: Call, x: Any, *_: Any) -> Lazy:
    if call.val.dtype != call.node.args[0].meta["val"].dtype:  # type: ignore[union-attr]
        return _bitcast(call, x)
    return Lazy(call.shape, x.dtype, lambda e, i: e.read(x, ix.reshape(i, call.shape, x.shape, e.ranges)))


def _bitcast(call: Call, x: Lazy) -> Lazy:
    if ITEMSIZE[x.dtype] != ITEMSIZE[call.dtype] or "i1" in (x.dtype, call.dtype):
        raise TraceError(f"a view of {x.dtype} as {call.dtype}: only dtypes of one size can be viewed as each other")
    return Lazy(call.shape, call.dtype, lambda e, i: e.builder.add("bitcast", call.dtype, e.read(x, i), data=x.dtype))


@rule("aten.expand", "prims.broadcast_in_dim")
def _expand(call: Call, x: Any, shape: Any, dims: Sequence[int] | None = None, **_: Any) -> Lazy:
    if isinstance(dims, bool) or dims is None:
        return Lazy(call.shape, x.dtype, operand(x, call.shape, x.dtype))
    at = list(dims)
    return Lazy(
        call.shape,
        x.dtype,
        lambda e, i: e.read(x, tuple(sympy.Integer(0) if s == 1 else i[d] for d, s in zip(at, x.shape, strict=True))),
    )


@rule("aten.permute", "prims.transpose")
def _permute(call: Call, x: Any, dims: Sequence[int]) -> Lazy:
    inverse = [0] * len(dims)
    for position, d in enumerate(dims):
        inverse[normal_dim(d, len(dims))] = position
    return Lazy(call.shape, x.dtype, lambda e, i: e.read(x, tuple(i[p] for p in inverse)))


@rule("aten.transpose")
def _transpose(call: Call, x: Any, a: int, b: int) -> Lazy:
    order = list(range(len(x.shape)))
    if order:
        a, b = normal_dim(a, len(order)), normal_dim(b, len(order))
        order[a], order[b] = order[b], order[a]
    return _permute(call, x, order)


@rule("aten.t")
def _t(call: Call, x: Any) -> Lazy:
    return _permute(call, x, list(reversed(range(len(x.shape)))))


@rule("aten.squeeze", "prims.squeeze", "aten.unsqueeze")
def _squeeze(call: Call, x: Any, *_: Any) -> Lazy:
    if base_name(call) == "unsqueeze":
        at = normal_dim(int(call.node.args[1]), len(call.shape))  # type: ignore[arg-type]
        return Lazy(call.shape, x.dtype, lambda e, i: e.read(x, (*i[:at], *i[at + 1 :])))
    return Lazy(call.shape, x.dtype, lambda e, i: e.read(x, ix.reshape(i, call.shape, x.shape, e.ranges)))


@rule("aten.select")
def _select(call: Call, x: Any, dim: int, at: Any) -> Lazy:
    d = normal_dim(dim, len(x.shape))
    at = _from_the_front(call, at, x.shape[d])
    return Lazy(call.shape, x.dtype, lambda e, i: e.read(x, (*i[:d], at, *i[d:])))


def _from_the_front(call: Call, at: Any, size: sympy.Expr) -> sympy.Expr:
    at = call.size(at)
    return at + size if call.is_negative(at) else at


def _start(call: Call, start: Any, size: sympy.Expr) -> sympy.Expr:
    """The start of a slice, which may lie before a dimension's begin or behind its end."""
    if isinstance(start, int) and start < 0 and not size.is_Integer:
        return sympy.Max(0, size + start)
    known = call.graph.trace.begin(size, start)
    if known is not None:
        return known
    start = _from_the_front(call, 0 if start is None else start, size)
    if call.is_negative(start):
        return sympy.Integer(0)
    return size if call.is_negative(size - start) else start


@rule("aten.slice")
def _slice(call: Call, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Lazy:
    d = normal_dim(dim, len(x.shape))
    first = _start(call, start, x.shape[d])
    return Lazy(call.shape, x.dtype, lambda e, i: e.read(x, (*i[:d], i[d] * step + first, *i[d + 1 :])))


@rule("aten.split", "aten.split_with_sizes", "aten.unbind")
def _split(call: Call, x: Any, sizes: Any = None, dim: int = 0) -> list[Lazy]:
    if base_name(call) == "unbind":
        d = normal_dim(0 if sizes is None else sizes, len(x.shape))
        return [_part(x, tuple(s for j, s in enumerate(x.shape) if j != d), d, sympy.Integer(n), True)
                for n in range(len(call.val))]  # fmt: skip
    d, offset, parts = normal_dim(dim, len(x.shape)), sympy.Integer(0), []
    for val in call.val:
        shape = call.graph.shape(val)
        parts.append(_part(x, shape, d, offset, False))
        offset = offset + shape[d]
    return parts


def _part(x: Lazy, shape: Index, d: int, offset: sympy.Expr, is_single: bool) -> Lazy:
    if is_single:
        return Lazy(shape, x.dtype, lambda e, i: e.read(x, (*i[:d], offset, *i[d:])))
    return Lazy(shape, x.dtype, lambda e, i: e.read(x, (*i[:d], i[d] + offset, *i[d + 1 :])))


@rule("operator.getitem")
def _getitem(call: Call, x: Any, at: int) -> Any:
    return x[at]


@rule("aten.flip", "prims.rev")
def _flip(call: Call, x: Any, dims: Sequence[int]) -> Lazy:
    at = {normal_dim(d, len(x.shape)) for d in dims}
    return Lazy(
        call.shape,
        x.dtype,
        lambda e, i: e.read(
            x, tuple(x.shape[d] - 1 - v if d in at and x.shape[d] != 1 else v for d, v in enumerate(i))
        ),
    )


@rule("aten.diagonal")
def _diagonal(call: Call, x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Lazy:
    a, b = normal_dim(dim1, len(x.shape)), normal_dim(dim2, len(x.shape))

    def read(e: Emitter, index: Index) -> int:
        rest, last = iter(index[:-1]), index[-1]
        at = {a: last + max(-offset, 0), b: last + max(offset, 0)}
        return e.read(x, tuple(at[d] if d in at else next(rest) for d in range(len(x.shape))))

    return Lazy(call.shape, x.dtype, read)


@rule("aten.unfold")
def _unfold(call: Call, x: Any, dim: int, size: Any, step: Any) -> Lazy:
    """Windows along a dimension, their elements along a new last one."""
    if not x.shape:
        return Lazy(call.shape, x.dtype, lambda e, i: e.read(x, ()))
    d = normal_dim(dim, len(x.shape))
    return Lazy(call.shape, x.dtype, lambda e, i: e.read(x, (*i[:d], i[d] * step + i[-1], *i[d + 1 : -1])))


@rule("aten.diagonal_scatter")
def _diagonal_scatter(call: Call, x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Lazy:
    a, b = normal_dim(dim1, len(x.shape)), normal_dim(dim2, len(x.shape))

    def read(e: Emitter, index: Index) -> int:
        on_it = e.op("eq", "i1", e.index(index[a] + offset), e.index(index[b]))
        rest = tuple(i for d, i in enumerate(index) if d not in (a, b))
        with e.where(on_it):
            new = e.cast(e.read(source, (*rest, index[a] + min(offset, 0))), call.dtype)
        return e.op("where", call.dtype, on_it, new, e.read(x, index))

    return Lazy(call.shape, call.dtype, read)


@rule("aten.cat", "prims.cat")
def _cat(call: Call, tensors: Sequence[Lazy], dim: int = 0) -> Lazy:
    d = normal_dim(dim, len(call.shape))
    parts = [t for t in tensors if len(t.shape) == len(call.shape)]  # ATen passes over empty 1-D ones

    def read(e: Emitter, index: Index) -> int:
        return _piece(e, index, list(parts), sympy.Integer(0))

    def _piece(e: Emitter, index: Index, left: list[Lazy], offset: sympy.Expr) -> int:
        first, end = left[0], offset + left[0].shape[d]
        own = (*index[:d], sympy.expand(index[d] - offset), *index[d + 1 :])
        if len(left) == 1:
            return e.cast(e.read(first, own), call.dtype)
        inside = e.op("lt", "i1", e.index(index[d]), e.index(end))
        with e.where(inside):
            value = e.cast(e.read(first, own), call.dtype)
        with e.where(e.op("not", "i1", inside)):
            other = _piece(e, index, left[1:], end)
        return e.op("where", call.dtype, inside, value, other)

    return Lazy(call.shape, call.dtype, read)


@rule("aten.slice_scatter", "aten.select_scatter")
def _scatter_slice(call: Call, x: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None,
                   step: int = 1) -> Lazy:  # fmt: skip
    d = normal_dim(dim, len(x.shape))
    first = _start(call, start, x.shape[d])
    is_select = base_name(call) == "select_scatter"
    length = sympy.Integer(1) if is_select else source.shape[d]

    def read(e: Emitter, index: Index) -> int:
        away = sympy.expand(index[d] - first)
        place = e.index(away)
        inside = e.op("ge", "i1", place, e.constant(0, "i64"))
        inside = e.op("and", "i1", inside, e.op("lt", "i1", place, e.index(length * step)))
        if step != 1:
            rest = e.op("fmod", "i64", place, e.constant(step, "i64"))
            inside = e.op("and", "i1", inside, e.op("eq", "i1", rest, e.constant(0, "i64")))
        # A multiple of the step, so dividing is exact; but it is no expression of axes that a class of shapes knows.
        at = away if step == 1 else value_symbol(e.op("trunc_div", "i64", place, e.constant(step, "i64")))
        own = (*index[:d], *([] if is_select else [at]), *index[d + 1 :])
        with e.where(inside):
            new = e.cast(e.read(source, own), call.dtype)
        return e.op("where", call.dtype, inside, new, e.cast(e.read(x, index), call.dtype))

    return Lazy(call.shape, call.dtype, read)


RULES[f"{operator.getitem.__module__.lstrip('_')}.getitem"] = _getitem
