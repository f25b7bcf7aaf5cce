"""Binary searches of sorted rows, in memory: bucketize and searchsorted."""

from __future__ import annotations

from typing import Any

import sympy

from tk.codegen.errors import TraceError
from tk.codegen.lowering.graph import Call, operand
from tk.codegen.lowering.lazy import Emitter, Index, Lazy, stored
from tk.codegen.lowering.rules.table import rule


@rule("aten.bucketize")
def _bucketize(call: Call, x: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Lazy:
    return _search(call, boundaries, x, right)


@rule("aten.searchsorted")
def _searchsorted(call: Call, row: Any, x: Any, *, out_int32: bool = False, right: bool = False,
                  side: str | None = None, sorter: Any = None) -> Lazy:  # fmt: skip
    if sorter is not None:
        raise TraceError("searchsorted with a sorter: gather the sequence by it first")
    return _search(call, row, x, right or side == "right")


def _search(call: Call, rows: Lazy, x: Any, right: bool) -> Lazy:
    """A row for each of x's, or one for all. Compared in the dtype of the rows, as ATen has both of one."""
    if rows.dtype == "i1":
        raise TraceError("a search among bools: convert them to an integer first (.to(torch.uint8))")
    node = stored(rows)
    value = operand(x, call.shape, rows.dtype)

    def read(e: Emitter, index: Index) -> int:
        row = index[:-1] if len(rows.shape) > 1 else ()
        return e.cast(e.search(node, (*row, sympy.Integer(0)), value(e, index), right), call.dtype)

    return Lazy(call.shape, call.dtype, read)
