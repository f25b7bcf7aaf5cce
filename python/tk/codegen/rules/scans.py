"""Scans along a dimension."""

from __future__ import annotations

from typing import Any

from tk.codegen.lower import Call, Lazy, scan
from tk.codegen.rules.table import base_name, normal_dim, rule, wide_of


@rule("aten.cumsum", "aten.cumprod")
def _cumulative(call: Call, x: Any, dim: int, *, dtype: Any = None) -> Lazy:
    wide = wide_of(call.dtype)
    operand_ = Lazy(x.shape, wide, lambda e, i: e.cast(e.read(x, i), wide))
    if not x.shape or x.shape[normal_dim(dim, len(x.shape))] == 1:
        result: Lazy = operand_
    else:
        result = scan(base_name(call).removeprefix("cum"), operand_, normal_dim(dim, len(x.shape)))
    return Lazy(call.shape, call.dtype, lambda e, i: e.cast(e.read(result, i), call.dtype))
