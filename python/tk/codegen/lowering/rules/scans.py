"""Scans along a dimension."""

from __future__ import annotations

from typing import Any

from tk.codegen.ir import FLOATS, IR_DTYPES, NARROW, Scanned
from tk.codegen.lowering.graph import Call
from tk.codegen.lowering.kernels import combine_kernel
from tk.codegen.lowering.lazy import Lazy, scan
from tk.codegen.lowering.rules.table import base_name, normal_dim, rule, wide_of
from tk.codegen.tracing.arguments import DTYPE_NAMES


def _is_single(x: Lazy, dim: int) -> bool:
    return not x.shape or x.shape[normal_dim(dim, len(x.shape))] == 1


def _cast(x: Lazy, dtype: str) -> Lazy:
    return x if x.dtype == dtype else Lazy(x.shape, dtype, lambda e, i: e.cast(e.read(x, i), dtype))


def _accumulated(kind: str, x: Lazy, dim: int, wide: str, dtype: str) -> Lazy:
    """One result, accumulated in `wide`. A single element is the result."""
    operand = _cast(x, wide)
    if _is_single(x, dim):
        return _cast(operand, dtype)
    return _cast(scan(Scanned(kind), [operand], normal_dim(dim, len(x.shape)), wide), dtype)


@rule("aten.cumsum", "aten.cumprod")
def _cumulative(call: Call, x: Any, dim: int, *, dtype: Any = None) -> Lazy:
    """Products of a tree are all rounded to one side where the numbers differ from 1 by the square root of what a dtype
    keeps; ATen's follow each other, and are not. Products of fp32 are kept in fp64."""
    kind, wide = base_name(call).removeprefix("cum"), wide_of(call.dtype)
    return _accumulated(kind, x, dim, "fp64" if (kind, call.dtype) == ("prod", "fp32") else wide, call.dtype)


@rule("aten.logcumsumexp")
def _logcumsumexp(call: Call, x: Any, dim: int) -> Lazy:
    return _accumulated("logaddexp", x, dim, wide_of(call.dtype), call.dtype)


@rule("aten.cummax", "aten.cummin")
def _extreme(call: Call, x: Any, dim: int) -> list[Lazy]:
    """Values and where they are: of equal ones the last, and NaN from the first one on."""
    kind = base_name(call).removeprefix("cum")
    wide = "fp32" if x.dtype in FLOATS and x.dtype != "fp64" else "i32" if x.dtype == "i1" else x.dtype
    if _is_single(x, dim):
        return [x, Lazy(x.shape, "i64", lambda e, i: e.constant(0, "i64"))]
    operand, along = _cast(x, wide), normal_dim(dim, len(x.shape))
    values = scan(Scanned(kind), [operand], along, wide)
    return [_cast(values, x.dtype), scan(Scanned(kind, 1), [operand], along, "i64")]


_TORCH = {name: dtype for dtype, name in IR_DTYPES.items()}


@rule("tk_trace.associative_scan")
def _combined(call: Call, xs: list[Lazy], number: int, dim: int) -> list[Lazy]:
    """A scan by the function's own combine function, which sees 16-bit floats as fp32."""
    if _is_single(xs[0], dim):
        return list(xs)
    wide = ["fp32" if x.dtype in NARROW else x.dtype for x in xs]
    kernel = combine_kernel(number, [DTYPE_NAMES[_TORCH[dtype]] for dtype in wide], call.graph.rules)
    operands = [_cast(x, dtype) for x, dtype in zip(xs, wide, strict=True)]
    found = [scan(Scanned("combine", i, kernel), operands, dim, dtype) for i, dtype in enumerate(wide)]
    return [_cast(result, x.dtype) for result, x in zip(found, xs, strict=True)]
