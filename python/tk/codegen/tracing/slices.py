"""Slices of a size that the call gives: ``x[:, 2:5]`` of 4 columns has 2, as torch clamps its bounds.

How many elements such a slice has is an expression of Min and Max, with which torch's rules of sizes cannot reckon: it
is a letter of its own while the function is traced, and worked out of the call's sizes by the op. A function may need
more of it: a slice of one column that is broadcast, of three that are unpacked. Then it is traced again, with what the
slice has where the dimension is large enough, which becomes a check of the op."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import FloorDiv

from tk.codegen.errors import TraceError

aten = torch.ops.aten

OPEN = 2**62  # what stands for the end of a dimension is more
WAYS = ("letters", "numbers where large", "as torch has them")

T = TypeVar("T")


class Decided(TraceError):
    """The function depends on how many elements a slice has."""


def letter(name: str) -> sympy.Symbol:
    """A size, as the rules of indices take it: with an element, if it is asked for one."""
    return sympy.Symbol(name, integer=True, positive=True)


def of_any_size(expr: sympy.Expr) -> sympy.Expr:
    """The same, of letters that may be 0, so that Max(0, N - 1) stays what it is."""
    return expr.subs({s: sympy.Symbol(s.name, integer=True) for s in expr.free_symbols}, simultaneous=True)


Bound: TypeAlias = int | sympy.Expr | None  # of a slice; None: where the dimension begins or ends


def length(size: sympy.Expr, start: Bound, end: Bound, step: int) -> sympy.Expr:
    """How many elements a slice has. size, and bounds that are no numbers: of letters that may be 0."""
    if not _is_number(start) or not _is_number(end):
        last = size if end is None or (isinstance(end, int) and end >= OPEN) else place(size, end)
        found = _larger(sympy.Integer(0), last - place(size, start or 0))
    else:
        found = _length_by_numbers(size, start, end)
    return found if step == 1 or found == 0 else FloorDiv(found + step - 1, step)


def _length_by_numbers(size: sympy.Expr, start: Any, end: Any) -> sympy.Expr:
    start = start or 0
    end = None if end is None or end >= OPEN else end
    if start == 0 and end is None:
        found = size
    elif start >= 0 and (end is None or end < 0):
        found = sympy.Max(0, size + (end or 0) - start)
    elif end is None:
        found = sympy.Min(size, -start)
    elif start == 0 and end > 0:
        found = sympy.Min(size, end)  # as of the last so many: both are one letter
    elif start >= 0 and end >= 0:
        found = sympy.Max(0, sympy.Min(size, end) - start) if end > start else sympy.Integer(0)
    elif end < 0:
        found = sympy.Max(0, size + end) - sympy.Max(0, size + start) if end > start else sympy.Integer(0)
    else:
        found = sympy.Max(0, sympy.Min(size, end) - sympy.Max(0, size + start))
    return found


def place(size: sympy.Expr, bound: Any) -> sympy.Expr:
    """The place of a slice's bound in a dimension of this size: one below 0 counts from the end, and none lies outside
    of the dimension. Both of letters that may be 0."""
    bound = sympy.sympify(bound)
    if bound - size in (-1, -2):  # below 0 it would count from the end, and lie before the begin even so
        return _larger(sympy.Integer(0), bound)
    if not never_negative(bound):
        is_below = sympy.Min(1, sympy.Max(0, -bound))
        bound = _larger(sympy.Integer(0), bound + size * is_below)
    return size if never_negative(bound - size) else bound if never_negative(size - bound) else sympy.Min(size, bound)


def _larger(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    return b if never_negative(b - a) else a if never_negative(a - b) else sympy.Max(a, b)


def never_negative(expr: sympy.Expr) -> bool:
    """Whether it is at least 0 for letters that are, as far as its terms show: a quotient n // 2 lies between
    (n - 1) / 2 and n / 2."""
    total = sympy.Integer(0)
    for term in sympy.Add.make_args(sympy.expand(expr)):
        factor, rest = term.as_coeff_Mul()
        if isinstance(rest, FloorDiv) and rest.args[1].is_Integer and rest.args[1] > 0:
            dividend, divisor = rest.args
            rest = dividend / divisor - (0 if factor < 0 else (divisor - 1) / divisor)
        total += factor * rest
    constant, terms = sympy.expand(total).as_coeff_add()
    # It is an integer, so that what lies above -1 is at least 0.
    return bool(constant > -1 and all(_is_product(t) for t in terms))


def _is_product(term: sympy.Expr) -> bool:
    factor, rest = term.as_coeff_Mul()
    return factor > 0 and all(
        f.is_Symbol or (isinstance(f, FloorDiv) and _counts(f)) for f in sympy.Mul.make_args(rest)
    )


def _counts(quotient: sympy.Expr) -> bool:
    return all(never_negative(a) for a in quotient.args)


class Slices:
    """Those of one trace. way: of `WAYS`. pieces: letter -> what it is worked out of, in an order that serves."""

    def __init__(self, way: str):
        self.way = way
        self.pieces: dict[sympy.Symbol, sympy.Expr] = {}
        self.symints: dict[sympy.Symbol, Any] = {}

    def made(self, arguments: Any, x: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None,
             step: Any = 1) -> torch.Tensor | None:  # fmt: skip
        """aten.slice; None where torch's own says what it has."""
        n = x.shape[dim] if -x.dim() <= dim < x.dim() else 0
        if self.way == WAYS[2] or not isinstance(n, torch.SymInt) or not _is_number(step):
            return None
        is_by_numbers = _is_number(start) and _is_number(end)
        size, first, last = (bound_of(b, arguments.symbols) for b in (n, start, end))
        if any(isinstance(b, sympy.Expr) and not arguments.hints.keys() >= b.free_symbols for b in (size, first, last)):
            return None  # a number of the call, or of a tensor's contents
        size, first, last = (of_any_size(b) if isinstance(b, sympy.Expr) else b for b in (size, first, last))
        definition = length(size, first, last, step)
        if step < 1 or not definition.has(sympy.Min, sympy.Max):
            return None
        if self.way == WAYS[1] and (not is_by_numbers or self._is_number_where_large(definition, arguments)):
            return None
        sizes, strides, dim = list(x.shape), list(x.stride()), dim % x.dim()
        first = self._first(arguments, n, start, size, first)
        offset = x.storage_offset() + first * strides[dim]
        sizes[dim] = self._symint(arguments, definition)
        strides[dim] = strides[dim] * step
        return x.as_strided(sizes, strides, offset)

    def _first(self, arguments: Any, n: Any, start: Any, size: sympy.Expr, bound: Bound) -> Any:
        """The place where a slice begins."""
        if _is_number(bound):
            return (start or 0) if (start or 0) >= 0 else torch.sym_max(n + start, 0)
        begin = place(size, bound)
        known = {bound: start, size: n, sympy.Integer(0): 0}
        return known[begin] if begin in known else self._symint(arguments, begin)

    def _is_number_where_large(self, definition: sympy.Expr, arguments: Any) -> bool:
        hints = {s.name: n for s, n in arguments.hints.items()}
        small, large = ({s: k * hints[s.name] for s in definition.free_symbols} for k in (1, 2))
        return bool(definition.subs(small) == definition.subs(large))

    def _symint(self, arguments: Any, definition: sympy.Expr) -> Any:
        known = next((s for s, d in self.pieces.items() if d == definition), None)
        if known is None:
            known = letter(_name(definition, {str(s) for s in arguments.hints}))
            value = definition.subs({s: arguments.hints[letter(s.name)] for s in definition.free_symbols})
            # One element is no size of its own to torch, which would take it for what is broadcast.
            arguments.hints[known] = max(int(value), 2)
            self.pieces[known] = definition
            self.symints[known], symbol = size_symbol(arguments.env, known.name, arguments.hints[known])
            arguments.symbols[symbol] = known
        return self.symints[known]

    def said(self, text: str) -> str:
        """A message that names the sizes of slices, in words of what the call gives."""
        for piece, definition in reversed(self.pieces.items()):
            text = re.sub(rf"\b{piece}\b", str(definition), text)
        return text

    def of(self, expr: sympy.Expr) -> bool:
        """Whether it has the size of a slice in it."""
        return not self.pieces.keys().isdisjoint(expr.free_symbols)


def _is_number(bound: Any) -> bool:
    return bound is None or isinstance(bound, int)


def bound_of(bound: Any, symbols: Any) -> Bound:
    """A size or a bound of a slice: an expression of letters where it is none of numbers."""
    return sympy.sympify(bound.node.expr).xreplace(symbols) if isinstance(bound, torch.SymInt) else bound


def _name(definition: sympy.Expr, taken: set[str]) -> str:
    text = str(definition)
    for sign, word in (("//", " over "), ("-", " less "), ("+", " plus "), ("*", " times ")):
        text = text.replace(sign, word)
    name = re.sub(r"\W+", "_", text).strip("_")
    while name in taken:
        name += "_"
    return name


def size_symbol(env: ShapeEnv, name: str, hint: int) -> tuple[Any, sympy.Symbol]:
    """(a size of torch's, its symbol)."""
    source = ConstantSource(name)
    symbol = env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symintnode(symbol, hint=hint, source=source), symbol


def traced(trace: Callable[[Slices], T]) -> T:
    """What is traced with the sizes of slices as letters, or else, where that does not serve, as numbers."""
    for way in WAYS:
        slices = Slices(way)
        try:
            return trace(slices)
        except TraceError:
            if not slices.pieces:
                raise
    raise AssertionError("the last way makes no pieces")
