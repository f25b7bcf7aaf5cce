"""The table of rules, and what most of them are made with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tk.codegen.ir import FLOATS
from tk.codegen.lowering.graph import Call, Rule, operand
from tk.codegen.lowering.lazy import Lazy

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(fn: Rule) -> Rule:
        for name in names:
            RULES[name] = fn
        return fn

    return register


def elementwise(call: Call, dtype: str, args: Sequence[Any], make: Callable[..., int],
                read_as: str | None = None) -> Lazy:  # fmt: skip
    """`make(emitter, *values)` of the arguments, each read as `read_as` (by default `dtype`)."""
    readers = [operand(a, call.shape, read_as or dtype) for a in args]
    return Lazy(call.shape, dtype, lambda e, i: make(e, *(r(e, i) for r in readers)))


def plain(name: str) -> Rule:
    return lambda call, *args, **_: elementwise(call, call.dtype, args, lambda e, *v: e.op(name, call.dtype, *v))


def base_name(call: Call) -> str:
    return str(call.node.target._schema.name.split("::")[1])  # type: ignore[union-attr]


def normal_dim(d: int, rank: int) -> int:
    return d + rank if d < 0 else d


def wide_of(dtype: str) -> str:
    """What sums are accumulated in."""
    return dtype if dtype == "fp64" else "fp32" if dtype in FLOATS else "i64"
