"""Tensors out of nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

from tk.codegen import index as ix
from tk.codegen.ir import FLOATS, NARROW
from tk.codegen.lowering.graph import Call, Rule, operand
from tk.codegen.lowering.lazy import Emitter, Index, Lazy
from tk.codegen.lowering.rules.table import RULES, base_name, rule
from tk.codegen.tracing import constants


@rule("aten.full", "aten.full_like", "aten.scalar_tensor", "prims.full", "prims.full_like", "aten.new_full")
def _full(call: Call, *args: Any, **kwargs: Any) -> Lazy:
    value = kwargs.get("fill_value", args[0] if base_name(call) == "scalar_tensor" else args[-1])
    if base_name(call) in ("full", "full_like", "new_full") and "fill_value" not in kwargs:
        value = args[2] if base_name(call) == "new_full" else args[1]
    return Lazy(call.shape, call.dtype, _held(value, (), call.dtype))


def _held(value: Any, shape: Index, dtype: str) -> Callable[[Emitter, Index], int]:
    """A value as a tensor holds it: one of 16 bits has no more digits than these have, whatever is then worked out of
    it."""
    if dtype not in NARROW:
        return operand(value, shape, dtype)
    wide = operand(value, shape, "fp32")
    return lambda e, i: e.cast(wide(e, i), dtype, rounding=True)


@rule("aten.fill")
def _fill(call: Call, x: Any, value: Any) -> Lazy:
    return Lazy(call.shape, call.dtype, _held(value, call.shape, call.dtype))


def _filled(value: int) -> Rule:
    return lambda call, *_, **__: Lazy(call.shape, call.dtype, lambda e, i: e.constant(value, call.dtype))


for _name in (
    "zeros",
    "zeros_like",
    "new_zeros",
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "empty_permuted",
):
    RULES[f"aten.{_name}"] = _filled(0)
for _name in ("ones", "ones_like", "new_ones"):
    RULES[f"aten.{_name}"] = _filled(1)
RULES["prims.empty_strided"] = _filled(0)


@rule("prims.iota")
def _iota(call: Call, length: Any, *, start: Any, step: Any, **_: Any) -> Lazy:
    first, by = call.size(start), call.size(step)
    return Lazy(call.shape, call.dtype, lambda e, i: e.cast(e.index(first + by * i[0]), call.dtype))


@rule("aten.arange")
def _arange(call: Call, *args: Any, **_: Any) -> Lazy:
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else 1)

    def read(e: Emitter, index: Index) -> int:
        if call.dtype in FLOATS:
            at = e.cast(e.index(index[0]), "fp64")
            by = e.op("mul", "fp64", at, operand(step, (), "fp64")(e, ()))
            return e.cast(e.op("add", "fp64", by, operand(start, (), "fp64")(e, ())), call.dtype)
        return e.cast(e.index(call.size(start) + call.size(step) * index[0]), call.dtype)

    return Lazy(call.shape, call.dtype, read)


@rule("tk_trace.constant")
def _constant(call: Call, number: int) -> Lazy:
    """Chosen by halves: an instruction for each element, and none where the index is a number."""
    values = constants.of(number).flatten().tolist()

    def read(e: Emitter, index: Index) -> int:
        at = sum((i * step for i, step in zip(index, _steps(call.shape), strict=True)), start=sympy.Integer(0))
        return chosen(e, sympy.expand(at), values)

    def chosen(e: Emitter, at: sympy.Expr, left: list[Any], offset: int = 0) -> int:
        if len(left) == 1:
            return e.constant(left[0], call.dtype)
        if at.is_Integer:
            return e.constant(left[int(at) - offset], call.dtype)
        half = len(left) // 2
        is_before = e.op("lt", "i1", e.index(at), e.index(sympy.Integer(offset + half)))
        halves = chosen(e, at, left[:half], offset), chosen(e, at, left[half:], offset + half)
        return e.op("where", call.dtype, is_before, *halves)

    return Lazy(call.shape, call.dtype, read)


def _steps(shape: Index) -> list[sympy.Expr]:
    return [ix.product(shape[d + 1 :]) for d in range(len(shape))]
