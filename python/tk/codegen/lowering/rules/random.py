"""Random bits, by the place of an element in the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from tk.codegen import index as ix
from tk.codegen.lowering.graph import Call
from tk.codegen.lowering.lazy import Emitter, Index, Lazy
from tk.codegen.lowering.rules.table import rule


@rule("tk_random.bits")
def _bits(call: Call, seed: Lazy, offset: Any, stream: int, size: Sequence[Any]) -> Lazy:
    """The linear index counts all dimensions as traced: "..." is one, so more of them make no difference."""
    shape = call.shape

    def read(e: Emitter, index: Index) -> int:
        linear = sum((i * ix.product(shape[d + 1 :]) for d, i in enumerate(index)), sympy.Integer(0))
        key, first = e.read(seed, ()), e.cast(e.number(call.size(offset), "i64"), "i64")
        return e.builder.add("random", "i32", key, first, index=(sympy.expand(linear),), data=stream)

    return Lazy(shape, "i32", read)
