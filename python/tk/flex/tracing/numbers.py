"""A mod's captured numbers, and the sizes of what it captures, while it is traced.

They are torch.SymInt and torch.SymFloat, which torch takes for numbers, over a node that records. (torch's own nodes
reckon with an algebra system.)
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from tk.flex.tracing.record import Recorder

__all__ = ["SYMBOLS", "Decides", "Number", "symbol"]


class Decides(Exception):
    """The mod decides by numbers, or takes them out of torch. variables: those that hold them (reads.Reads)."""

    def __init__(self, variables: frozenset[str]):
        self.variables = variables


class Number:
    """A captured number, a size, or what was made of them, as torch.SymInt, SymFloat and SymBool ask their node.

    value: its node in the graph, or a number that is known. kind: int, float or bool. variables: what hold the captured
    numbers in it."""

    __slots__ = ("kind", "recorder", "value", "variables")

    def __init__(self, recorder: Recorder, value: Any, kind: type, variables: frozenset[str] = frozenset()):
        self.recorder, self.value, self.kind, self.variables = recorder, value, kind, variables

    def is_int(self) -> bool:
        return self.kind is int

    def is_float(self) -> bool:
        return self.kind is float

    def is_bool(self) -> bool:
        return self.kind is bool

    def is_constant(self) -> bool:
        return not isinstance(self.value, fx.Node)

    def is_symbolic(self) -> bool:
        return not self.is_constant()

    def is_nested_int(self) -> bool:
        """Asked by SymInt.__hash__, which has no answer for another: so it is what a key in a dict is found by."""
        return sys._getframe(1).f_code is torch.SymInt.__hash__.__code__

    def has_hint(self) -> bool:
        return False

    def clone(self) -> Number:
        return self

    pos = clone

    def maybe_as_int(self) -> int | None:
        return self.value if self.is_constant() and self.kind is int else None

    def wrap_int(self, value: int) -> Number:
        return Number(self.recorder, value, int)

    def wrap_float(self, value: float) -> Number:
        return Number(self.recorder, value, float)

    def wrap_bool(self, value: bool) -> Number:
        return Number(self.recorder, value, bool)

    def made(self, function: Callable[..., Any], kind: type, *operands: Any) -> Number:
        """operands: Numbers, but for the digits that round() keeps."""
        if len(operands) == 2 and (same := _neutral(function, *operands)) is not None:
            return same
        numbers = [x for x in operands if isinstance(x, Number)]
        node = self.recorder.graph.call_function(function, tuple([x.value for x in numbers]))
        found = Number(self.recorder, node, kind, frozenset().union(*(x.variables for x in numbers)))
        node.meta["val"] = _SYMBOL_OF[kind](found)
        return found

    def expect_true(self, *_: Any) -> bool:
        """Answers torch._check, which torch does itself before a power of floats."""
        return True

    def known(self, *_: Any) -> Any:
        """Its value, which torch or the mod asks for."""
        if self.is_constant():
            return self.value
        self.recorder.fail(Decides(self.variables))

    def __repr__(self) -> str:
        return f"{self.kind.__name__} {self.value}"

    nested_int = known
    str = _graph_repr = known  # a number that is spelled out leaves torch


def _neutral(function: Any, a: Any, b: Any) -> Number | None:
    """x + 0, 0 + x, x - 0, x * 1, 1 * x and 0 * x of ints, as the first pass of a loop has them."""
    if not isinstance(b, Number) or a.kind is not int or b.kind is not int:
        return None
    if function in (operator.add, operator.mul) and a.is_constant():
        a, b = b, a
    neutral = {operator.add: 0, operator.sub: 0, operator.mul: 1}.get(function)
    if b.is_constant() and b.value == neutral:
        return a
    return b if function is operator.mul and b.is_constant() and b.value == 0 else None


SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_SYMBOL_OF: dict[type, Any] = {int: torch.SymInt, float: torch.SymFloat, bool: torch.SymBool}


def symbol(recorder: Recorder, node: fx.Node, kind: type, variable: str) -> Any:
    """What a mod sees of the number that `variable` holds."""
    node.meta["val"] = made = _SYMBOL_OF[kind](Number(recorder, node, kind, frozenset([variable])))
    return made


_ASKED = (
    "int_", "bool_", "guard_int", "guard_float", "guard_bool", "guard_size_oblivious", "guard_or_false",
    "guard_or_true", "statically_known_true", "expect_size", "is_integer",
)  # fmt: skip
# torch's names -> the function in the graph, and the kind of its result (None: its operands').
_OPERATIONS: dict[str, tuple[Callable[..., Any], type | None]] = {
    "add": (operator.add, None), "sub": (operator.sub, None), "mul": (operator.mul, None),
    "mod": (operator.mod, None), "neg": (operator.neg, None), "abs": (operator.abs, None),
    "truediv": (operator.truediv, float), "int_truediv": (operator.truediv, float),
    "float_truediv": (operator.truediv, float), "floordiv": (operator.floordiv, int),
    "int_floordiv": (operator.floordiv, int), "pow": (operator.pow, float), "float_pow": (operator.pow, float),
    "pow_by_natural": (operator.pow, int), "sym_float": (torch.sym_float, float),
    "sym_min": (torch.sym_min, None), "sym_max": (torch.sym_max, None),
    "bitwise_and": (operator.and_, None), "bitwise_or": (operator.or_, None), "bitwise_xor": (operator.xor, None),
    "lshift": (operator.lshift, None), "rshift": (operator.rshift, None),
    "eq": (operator.eq, bool), "ne": (operator.ne, bool), "lt": (operator.lt, bool), "le": (operator.le, bool),
    "gt": (operator.gt, bool), "ge": (operator.ge, bool), "and_": (operator.and_, bool), "or_": (operator.or_, bool),
    "sym_not": (operator.not_, bool), "sym_and": (operator.and_, bool), "sym_or": (operator.or_, bool),
    "floor": (math.floor, int), "ceil": (math.ceil, int), "trunc": (math.trunc, int), "round": (round, float),
    **{f"sym_{n}": (getattr(torch, f"_sym_{n}"), float) for n in (
        "sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "log2",
    )},
}  # fmt: skip


def _operation(function: Callable[..., Any], kind: type | None) -> Callable[..., Number]:
    def call(*operands: Any) -> Number:
        return operands[0].made(function, kind or operands[0].kind, *operands)

    return call


for _name in _ASKED:
    setattr(Number, _name, Number.known)
for _name, (_function, _kind) in _OPERATIONS.items():
    setattr(Number, _name, _operation(_function, _kind))
