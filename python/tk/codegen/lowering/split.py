"""Split reductions: columns, whole tensors and a few long rows have too few programs for a GPU when each reduces all of
its own by itself.

A reduced dimension is cut into parts. An earlier launch leaves each part's result in scratch memory, [parts, …], and
the last one reduces over the parts. How many there are is worked out for the problem and the GPU, so a call gives the
same bits on one GPU every time. Rows are cut in a way of their own, which batch-invariant mode does not take: their
parts depend on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import sympy

from tk.codegen import index as ix
from tk.codegen.ir import FLOATS, PLACES, Axis, value_symbol
from tk.codegen.lowering.lazy import Emitter, Index, Lazy, Reduction, reduction
from tk.codegen.lowering.named import Names
from tk.codegen.lowering.runs import by_sums

IDENTITY = {"sum": 0, "prod": 1, "any": False, "all": True, "xor": 0}


@dataclass(frozen=True)
class Parts:
    """A number of parts, and how much of what is cut one of them has: locals of the op. cut: the size that is; reduced
    and kept: elements. are_rows: what is reduced lies beside each other. interleaved: of n parts each has every n-th
    place of what is cut; else its places are neighbours."""

    name: str
    cut: sympy.Expr
    reduced: sympy.Expr
    kept: sympy.Expr
    are_rows: bool = False
    interleaved: bool = False

    @property
    def symbol(self) -> sympy.Symbol:
        return sympy.Symbol(self.name, integer=True, positive=True)

    @property
    def chunk(self) -> sympy.Symbol:
        return sympy.Symbol(f"of_{self.name}", integer=True, positive=True)

    def place(self, part: sympy.Expr, within: sympy.Expr) -> sympy.Expr:
        """The place along what is cut."""
        return within * self.symbol + part if self.interleaved else part * self.chunk + within


@dataclass
class Splitter:
    """Replaces a graph's reductions by split ones, and its sorts by sorted runs that are merged. names: of the op's
    parts. parts: those that were needed, in order. rows: rows are split, instead of all else. interleaved: so are the
    parts. has_runs: whether there is anything to sort. sorts: how, where not in runs (rules/sorts.py)."""

    names: Names
    rows: bool = False
    interleaved: bool = False
    sorts: str = "runs"
    parts: list[Parts] = field(default_factory=list)
    has_runs: bool = False
    known: dict[int, Lazy | None] = field(default_factory=dict)
    own: list[Reduction] = field(default_factory=list)  # made here: not to be split again, and kept alive

    def of(self, node: Reduction) -> Lazy | None:
        """What is read in place of `node`; None where it stays as it is."""
        if id(node) not in self.known:
            self.own.append(node)
            self.known[id(node)] = self._split(node) if self._is_splittable(node) else None
        return self.known[id(node)]

    def is_in_parts(self, place: sympy.Expr, axes: Sequence[Axis], size: sympy.Expr) -> bool:
        """Whether a place along a dimension of this size is put together from these axes: a part, and where in it."""
        if len(axes) != 2:
            return False
        part, within = axes
        return any((p.symbol, p.chunk) == (part.size, within.size) and ix.same(p.cut, size)
                   and ix.same(p.place(part.symbol, within.symbol), place) for p in self.parts)  # fmt: skip

    def _split(self, node: Reduction) -> Lazy:
        if node.kind in ("mean", "m2"):
            return by_sums(node)
        assert node.operand is not None
        wide = [d for d in node.dims if node.operand.shape[d] != 1]
        cut = wide[-1] if self.rows else wide[0]
        parts = self._parts(node, node.operand.shape[cut])
        pieces, dims = self._pieces(node, cut, parts), [d + 1 for d in node.dims]
        if node.kind in PLACES:
            return self._place(node, pieces, dims, parts)
        partial = self._keep(reduction(node.kind, pieces, dims, node.dtype))
        return self._keep(reduction(node.kind, partial, [0], node.dtype))

    def _place(self, node: Reduction, pieces: Lazy, dims: Sequence[int], parts: Parts) -> Lazy:
        """The place of the extreme: of each part the extreme and its place, then the first part that has it. What lies
        past the end comes after all that is as small."""
        extremes = self._keep(reduction(node.kind.removeprefix("arg"), pieces, dims, pieces.dtype))
        places = self._keep(reduction(node.kind, pieces, dims, node.dtype))
        first = self._keep(reduction(node.kind, extremes, [0], node.dtype))

        def read(e: Emitter, index: Index) -> int:
            part = e.read(first, index)
            place = e.read(places, (value_symbol(part), *index))
            return e.op("add", node.dtype, e.op("mul", node.dtype, part, e.index(parts.chunk)), place)

        return Lazy(node.shape, node.dtype, read)

    def _keep(self, node: Reduction) -> Reduction:
        self.own.append(node)
        self.known[id(node)] = None
        return node

    def _parts(self, node: Reduction, cut: sympy.Expr) -> Parts:
        reduced, kept = ix.product(node.sizes), ix.product(node.shape)
        kind = ("long_" if self.rows else "") + ("interleaved" if self.interleaved else "parts")
        parts = Parts(self.names.of(kind, cut, reduced, kept), cut, reduced, kept, self.rows, self.interleaved)
        if parts not in self.parts:
            self.parts.append(parts)
        return parts

    def _is_splittable(self, node: Reduction) -> bool:
        """Rows, or else columns and everything. What another reduction has left is little already, and a place in
        several dimensions is none along the one that is cut. Interleaved parts lie beside each other where a single
        dimension is reduced and others are kept; the first part that has an extreme need not have it first."""
        assert node.operand is not None
        if isinstance(node.operand, Reduction) or not node.sizes or (node.kind in PLACES and len(node.sizes) > 1):
            return False
        wide = [d for d, s in enumerate(node.operand.shape) if s != 1]
        are_rows = wide[-1] in node.dims and not all(d in node.dims for d in wide)
        if self.interleaved:
            reduced = [d for d in wide if d in node.dims]
            if node.kind in PLACES or len(wide) < 2 or reduced != (wide[-1:] if self.rows else wide[:1]):
                return False
        return are_rows == self.rows

    def _pieces(self, node: Reduction, cut: int, parts: Parts) -> Lazy:
        """The operand as [parts, …, chunk, …]; past the end the value that changes nothing."""
        operand = node.operand
        assert operand is not None
        shape = (parts.symbol, *operand.shape[:cut], parts.chunk, *operand.shape[cut + 1 :])

        def read(e: Emitter, index: Index) -> int:
            row = parts.place(index[0], index[cut + 1])
            own = (*index[1 : cut + 1], row, *index[cut + 2 :])
            inside = e.op("lt", "i1", e.index(row), e.index(operand.shape[cut]))
            with e.where(inside):
                value = e.read(operand, own)
            nothing = e.constant(_neutral(node.kind, operand.dtype), operand.dtype)
            return e.op("where", operand.dtype, inside, value, nothing)

        return Lazy(shape, operand.dtype, read)


def _neutral(kind: str, dtype: str) -> float | int | bool:
    if kind in IDENTITY:
        return IDENTITY[kind]
    is_low = kind in ("max", "argmax")
    if dtype in FLOATS:
        return float("-inf") if is_low else float("inf")
    if dtype == "u8":
        return 0 if is_low else 255
    bits = {"i8": 7, "i16": 15, "i32": 31, "i64": 63}[dtype]
    return -(2**bits) if is_low else 2**bits - 1
