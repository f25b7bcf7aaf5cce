"""Reads at indices that are themselves read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from tk.codegen.errors import TraceError
from tk.codegen.ir import value_symbol
from tk.codegen.lowering.graph import Call, operand
from tk.codegen.lowering.lazy import Emitter, Index, Lazy
from tk.codegen.lowering.rules.table import normal_dim, rule


def wrapped(e: Emitter, value: int, size: sympy.Expr, may_be_negative: bool) -> sympy.Expr:
    """The index that a value read from memory stands for."""
    value = e.cast(value, "i64")
    if may_be_negative:
        from_end = e.op("add", "i64", value, e.index(size))
        value = e.op("where", "i64", e.op("lt", "i1", value, e.constant(0, "i64")), from_end, value)
    return value_symbol(value)


@rule("aten.embedding")
def _embedding(call: Call, weight: Any, indices: Any, *_: Any, **__: Any) -> Lazy:
    def read(e: Emitter, index: Index) -> int:
        row = wrapped(e, e.read(indices, index[:-1]), weight.shape[0], False)
        return e.read(weight, (row, index[-1]))

    return Lazy(call.shape, weight.dtype, read)


@rule("aten.gather")
def _gather(call: Call, x: Any, dim: int, at: Any, **_: Any) -> Lazy:
    if not x.shape:
        return _of_one_element(call, x)
    d = normal_dim(dim, len(x.shape))

    def read(e: Emitter, index: Index) -> int:
        row = wrapped(e, e.read(at, index), x.shape[d], False)
        return e.read(x, (*index[:d], row, *index[d + 1 :]))

    return Lazy(call.shape, x.dtype, read)


@rule("aten.index_select")
def _index_select(call: Call, x: Any, dim: int, at: Any) -> Lazy:
    if not x.shape:
        return _of_one_element(call, x)
    d = normal_dim(dim, len(x.shape))

    def read(e: Emitter, index: Index) -> int:
        row = wrapped(e, e.read(at, (index[d],) if at.shape else ()), x.shape[d], False)
        return e.read(x, (*index[:d], row, *index[d + 1 :]))

    return Lazy(call.shape, x.dtype, read)


def _of_one_element(call: Call, x: Any) -> Lazy:
    """Picks from a tensor of no dimensions, of which every index takes the same."""
    return Lazy(call.shape, x.dtype, lambda e, _: e.read(x, ()))


@rule("aten.index", "aten._unsafe_index")
def _index(call: Call, x: Any, indices: Sequence[Any]) -> Lazy:
    given = [d for d, t in enumerate(indices) if t is not None]
    if any(indices[d].dtype in ("i1", "u8") for d in given):
        raise TraceError("indexing with a mask has a size that depends on its contents; use torch.where")
    rank = max(len(indices[d].shape) for d in given)
    shape = torch_broadcast([indices[d].shape for d in given])
    together = given == list(range(given[0], given[-1] + 1))
    at = given[0] if together else 0
    readers = {d: operand(indices[d], shape, "i64") for d in given}

    def read(e: Emitter, index: Index) -> int:
        chosen = index[at : at + rank]
        rest = iter((*index[:at], *index[at + rank :]))
        own = [
            wrapped(e, readers[d](e, chosen), x.shape[d], True) if d in readers else next(rest)
            for d in range(len(x.shape))
        ]
        return e.read(x, tuple(own))

    return Lazy(call.shape, x.dtype, read)


def torch_broadcast(shapes: Sequence[Index]) -> Index:
    rank = max(map(len, shapes))
    padded = [(sympy.Integer(1),) * (rank - len(s)) + tuple(s) for s in shapes]
    return tuple(next((s for s in column if s != 1), sympy.Integer(1)) for column in zip(*padded, strict=True))
