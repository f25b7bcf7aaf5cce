"""The dimensions along which a generated op may be sharded, as its lowered graph tells.

A dimension may be sharded where a GPU that has a part of it computes its part of the results, or a partial one that is
summed up over the GPUs (or of which the largest or the least is taken), by the same kernels. So every kernel must go
along the whole dimension, read and write only at the place where it is, and use neither the place nor the dimension's
size as a number. What is reduced over it must be a result as it is; between them may stand what commutes with the
reduction: a conversion, a factor.

What is found stands in the pack (``sharded`` in docs/packs.md), and tk.parallel makes DTensor's rules of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy

from tk.codegen import ir
from tk.codegen.tracing.arguments import letter
from tk.codegen.tracing.trace import Trace
from tk.generated.signature import Place, Signature, Size, TensorSpec

_PARTIAL = ("sum", "max", "min")


class _NotSharded(Exception):
    """The dimension is used in a way that no part of it can be."""


def sharded(signature: Signature, trace: Trace, kernels: Sequence[ir.Kernel]) -> list[list[list[Place]]] | None:
    """``[places of the tensor arguments, places of the results]`` for each dimension that may be sharded. None: it
    draws random numbers, and the GPUs may have other seeds."""
    if any(v.op == "random" for k in kernels for v in k.values):
        return None
    symbols = [*([ir.LEADING] if any(s.leading for s in signature.tensors.values()) else []),
               *(letter(x) for x in signature.letters)]  # fmt: skip
    found = []
    for symbol in symbols:
        try:
            found.append(_along(symbol, signature, trace, kernels))
        except _NotSharded:
            continue
    return found


def _along(symbol: sympy.Symbol, signature: Signature, trace: Trace,
           kernels: Sequence[ir.Kernel]) -> list[list[Place]]:  # fmt: skip
    others = {piece for piece, size in trace.pieces.items() if symbol in size.free_symbols}
    flow = _Flow(symbol, others | (set(ir.LEADING_SIZES) if symbol == ir.LEADING else set()))
    inputs = [_declared(spec, symbol) for spec in signature.tensors.values()]
    if all(place is None for place in inputs) or not all(_holds_of_parts(c.zero, symbol) for c in trace.checks):
        raise _NotSharded
    for kernel in kernels:
        flow.follow(kernel)
    results = [tuple(map(sympy.sympify, (trace.size(s) for s in node.meta["val"].shape))) for node in trace.new]
    return [inputs, [flow.result(f"out{i}", sizes) for i, sizes in enumerate(results)]]


def _holds_of_parts(zero: sympy.Expr, symbol: sympy.Symbol) -> bool:
    """Whether what is 0 for the whole dimension is 0 for a part of it, which has elements."""
    asks_for_some = set(zero.args) == {sympy.Integer(0), 1 - symbol}  # Max(0, 1 - N)
    return asks_for_some or any(symbol not in sympy.expand(x).free_symbols for x in (zero, zero / symbol))


def _declared(spec: TensorSpec, symbol: sympy.Symbol) -> Place:
    if symbol == ir.LEADING:
        return "..." if spec.leading else None
    places = [d - len(spec.sizes) for d, size in enumerate(spec.sizes) if size == symbol.name]
    if len(places) > 1 or any(symbol.name in _letters_inside(size) for size in spec.sizes):
        raise _NotSharded
    return places[0] if places else None


def _letters_inside(size: Any) -> set[str]:
    """The letters of an expression: of letters, or as sympy has it, which a backward's argument may have."""
    if isinstance(size, sympy.Expr):
        return {s.name for s in size.free_symbols}
    return set(size.letters) if isinstance(size, Size) else set()


@dataclass
class _Flow:
    """What a part of the dimension gives, from kernel to kernel. others: sizes that follow from the dimension's.
    partial: the buffers that hold partial results, with how those are put together."""

    symbol: sympy.Symbol
    others: set[sympy.Symbol]
    partial: dict[str, str] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)  # the buffers in which a value was stored that is no partial one

    def follow(self, kernel: ir.Kernel) -> None:
        self._require_alone([a.size for a in kernel.axes])
        for b in kernel.buffers:
            self._require_alone(b.sizes)
            if b.sizes.count(self.symbol) > 1:
                raise _NotSharded
        _Values(self, kernel).follow()

    def _require_alone(self, sizes: Sequence[sympy.Expr]) -> None:
        """The dimension's size stands in none of the others."""
        for size in sizes:
            if size != self.symbol:
                self._require_free(size)

    def _require_free(self, expr: Any) -> None:
        if sympy.sympify(expr).free_symbols & {self.symbol, *self.others}:
            raise _NotSharded

    def result(self, name: str, sizes: Sequence[sympy.Expr]) -> Place:
        if name in self.partial:
            return self.partial[name]
        self._require_alone(sizes)
        if self.symbol not in sizes:
            return None
        return "..." if self.symbol == ir.LEADING else list(sizes).index(self.symbol) - len(sizes)

    def store(self, name: str, partial: str | None, is_zero: bool) -> None:
        """Zeros may be put together with anything that is summed up."""
        if partial is None and not is_zero:
            self.whole.add(name)
        elif partial is not None and self.partial.setdefault(name, partial) != partial:
            raise _NotSharded
        if name in self.partial and name in self.whole:
            raise _NotSharded


@dataclass
class _Values:
    """One kernel's. along: its axes over the dimension. partial: the values that are partial results."""

    flow: _Flow
    kernel: ir.Kernel
    partial: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.along = {a.name: a for a in self.kernel.axes if a.size == self.flow.symbol}
        self.is_reduced = any(a.reduced for a in self.along.values())

    def follow(self) -> None:
        for v in self.kernel.values:
            found = self._of(v)
            if found is not None:
                self.partial[v.number] = found

    def _of(self, v: ir.Value) -> str | None:
        operands = [self.kernel.values[n] for n in v.args]
        if any(n in self.partial for e in v.index for n in ir.values_in(e)):
            raise _NotSharded
        if v.op == "index":
            self._require_free(v.data)
            return None
        if v.op in ir.ACCESSES:
            return self._access(v, operands)
        if v.op == "reduce":
            return self._reduce(v, operands[0])
        if v.op in ("scan", "sort", "fold") and (self.is_reduced or self._is_partial(operands)):
            raise _NotSharded
        return self._of_operands(v, operands) if self._is_partial(operands) else None

    def _of_operands(self, v: ir.Value, operands: Sequence[ir.Value]) -> str:
        kinds = [self.partial.get(o.number) for o in operands]
        kind = next(k for k in kinds if k)
        both = all(k == kind for k in kinds)
        is_linear = (
            v.op == "cast"
            or (kind == "sum" and v.op == "neg")
            or (kind == "sum" and v.op in ("add", "sub") and both)
            or (kind == "sum" and v.op == "mul" and kinds.count(None) == 1 and not self._varies(operands))
            or (kind == "sum" and v.op == "div" and kinds[1] is None and not self._varies(operands))
        )
        if not is_linear or (v.op == "cast" and v.dtype not in ir.FLOATS and operands[0].dtype in ir.FLOATS):
            raise _NotSharded
        return kind

    def _reduce(self, v: ir.Value, operand: ir.Value) -> str | None:
        if not self.is_reduced:
            if self._is_partial([operand]):
                raise _NotSharded
            return None
        is_over = operand.axes & self.along.keys() and not self._is_partial([operand])
        if not is_over or v.data not in _PARTIAL or len(self.along) > 1:
            raise _NotSharded
        return str(v.data)

    def _access(self, v: ir.Value, operands: Sequence[ir.Value]) -> str | None:
        buffer = self.kernel.buffer(v.buffer)
        is_there = False
        for size, index in zip(buffer.sizes, v.index, strict=True):
            is_place = any(index == a.symbol for a in self.along.values())
            if (size == self.flow.symbol) != is_place:
                raise _NotSharded
            if not is_place:
                self._require_free(index)
            is_there |= is_place
        if v.op != "store":
            if self._is_partial(operands):
                raise _NotSharded
            return self.flow.partial.get(v.buffer)
        if self._is_partial(operands[1:]):
            raise _NotSharded
        value = operands[0]
        kind = self.partial.get(value.number)
        if v.data is not None:  # a put
            is_everywhere = bool(self.along) and not is_there
            if kind is not None or (is_everywhere and v.data != "add"):
                raise _NotSharded
            kind = "sum" if is_everywhere else None
        if kind is not None and buffer.kind == "mutated":  # it is no result, and keeps its placement
            raise _NotSharded
        self.flow.store(v.buffer, kind, value.op == "constant" and value.data == 0)
        return None

    def _require_free(self, expr: Any) -> None:
        expr = sympy.sympify(expr)
        self.flow._require_free(expr)
        if expr.free_symbols & {a.symbol for a in self.along.values()}:
            raise _NotSharded

    def _is_partial(self, values: Sequence[ir.Value]) -> bool:
        return any(v.number in self.partial for v in values)

    def _varies(self, values: Sequence[ir.Value]) -> bool:
        return any(v.axes & self.along.keys() for v in values)
