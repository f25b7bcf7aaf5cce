"""Split reductions: columns, and whole tensors, have too few programs for a GPU when each reduces all rows by itself.

The first reduced dimension is cut into parts. An earlier launch leaves each part's result in scratch memory,
[parts, …], and the last one reduces over the parts. How many there are is worked out for the problem and the GPU, so a
call gives the same bits on one GPU every time. Rows are never cut here: what a row gives does not depend on how many
came with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy
from torch.utils._sympy.functions import FloorDiv

from tk.codegen import index as ix
from tk.codegen.ir import FLOATS
from tk.codegen.lowering.lazy import Emitter, Index, Lazy, Reduction, reduction

IDENTITY = {"sum": 0, "prod": 1, "any": False, "all": True, "xor": 0}


@dataclass(frozen=True)
class Parts:
    """A number of parts: a local of the op. rows: what is cut; reduced and kept: elements."""

    name: str
    rows: sympy.Expr
    reduced: sympy.Expr
    kept: sympy.Expr

    @property
    def symbol(self) -> sympy.Symbol:
        return sympy.Symbol(self.name, integer=True, positive=True)


@dataclass
class Splitter:
    """Replaces a graph's reductions by split ones, and its sorts by sorted runs that are merged. parts: those that were
    needed, in order. has_runs: whether there is anything to sort. sorts: how, where not in runs (rules/sorts.py)."""

    prefix: str = "parts"
    sorts: str = "runs"
    parts: list[Parts] = field(default_factory=list)
    has_runs: bool = False
    known: dict[int, Lazy | None] = field(default_factory=dict)
    own: list[Reduction] = field(default_factory=list)  # made here: not to be split again, and kept alive

    def of(self, node: Reduction) -> Lazy | None:
        """What is read in place of `node`; None where it stays as it is."""
        if id(node) not in self.known:
            self.own.append(node)
            self.known[id(node)] = self._split(node) if _is_splittable(node) else None
        return self.known[id(node)]

    def _split(self, node: Reduction) -> Lazy:
        if node.kind in ("mean", "m2"):
            return self._moment(node)
        assert node.operand is not None
        cut = next(d for d in node.dims if node.operand.shape[d] != 1)
        parts = self._parts(node, node.operand.shape[cut])
        chunk = FloorDiv(node.operand.shape[cut] + parts.symbol - 1, parts.symbol)
        pieces = self._pieces(node, cut, parts, chunk)
        partial = self._keep(reduction(node.kind, pieces, [d + 1 for d in node.dims], node.dtype))
        return self._keep(reduction(node.kind, partial, [0], node.dtype))

    def _keep(self, node: Reduction) -> Reduction:
        self.own.append(node)
        self.known[id(node)] = None
        return node

    def _parts(self, node: Reduction, rows: sympy.Expr) -> Parts:
        reduced, kept = ix.product(node.sizes), ix.product(node.shape)
        for p in self.parts:
            if (p.rows, p.reduced, p.kept) == (rows, reduced, kept):
                return p
        self.parts.append(Parts(f"{self.prefix}{len(self.parts)}", rows, reduced, kept))
        return self.parts[-1]

    def _pieces(self, node: Reduction, cut: int, parts: Parts, chunk: sympy.Expr) -> Lazy:
        """The operand as [parts, …, chunk, …]; past the end the value that changes nothing."""
        operand = node.operand
        assert operand is not None
        shape = (parts.symbol, *operand.shape[:cut], chunk, *operand.shape[cut + 1 :])

        def read(e: Emitter, index: Index) -> int:
            row = index[0] * chunk + index[cut + 1]
            own = (*index[1 : cut + 1], row, *index[cut + 2 :])
            inside = e.op("lt", "i1", e.index(row), e.index(operand.shape[cut]))
            with e.where(inside):
                value = e.read(operand, own)
            nothing = e.constant(_neutral(node.kind, operand.dtype), operand.dtype)
            return e.op("where", operand.dtype, inside, value, nothing)

        return Lazy(shape, operand.dtype, read)

    def _moment(self, node: Reduction) -> Lazy:
        """The mean, or the squared deviations from it, each of sums: parts of both would not simply add up."""
        operand, dtype = node.operand, node.dtype
        assert operand is not None
        total = reduction("sum", operand, node.dims, dtype)
        count = ix.product(node.sizes)

        def mean(e: Emitter, index: Index) -> int:
            return e.op("div", dtype, e.read(total, index), e.cast(e.index(count), dtype))

        def away(e: Emitter, index: Index) -> int:
            kept = tuple(i for d, i in enumerate(index) if d not in node.dims)
            return e.op("sub", dtype, e.read(operand, index), mean(e, kept))

        if node.kind == "mean":
            return Lazy(node.shape, dtype, mean)
        deviations = Lazy(operand.shape, dtype, away)
        away_sum, squares = (reduction("sum", x, node.dims, dtype) for x in (deviations, squared(deviations)))
        return centred(away_sum, squares, count)


def squared(x: Lazy) -> Lazy:
    def read(e: Emitter, index: Index) -> int:
        value = e.read(x, index)
        return e.op("mul", x.dtype, value, value)

    return Lazy(x.shape, x.dtype, read)


def centred(deviations: Lazy, squares: Lazy, count: sympy.Expr) -> Lazy:
    """The squared deviations from a mean, of the sums of those from what it was rounded to and of their squares: as
    device.centred."""
    dtype = squares.dtype

    def read(e: Emitter, index: Index) -> int:
        away, total = e.read(deviations, index), e.read(squares, index)
        share = e.op("div", dtype, away, e.cast(e.index(count), dtype))
        found = e.op("sub", dtype, total, e.op("mul", dtype, away, share))
        return e.op("maximum", dtype, found, e.constant(0.0, dtype))

    return Lazy(squares.shape, dtype, read)


def _is_splittable(node: Reduction) -> bool:
    """Columns or everything, of kinds whose parts combine by the kind itself."""
    assert node.operand is not None
    if node.kind in ("argmax", "argmin"):
        return False
    dims = [d for d, s in enumerate(node.operand.shape) if s != 1]
    return bool(node.sizes) and (dims[-1] not in node.dims or all(d in node.dims for d in dims))


def _neutral(kind: str, dtype: str) -> float | int | bool:
    if kind in IDENTITY:
        return IDENTITY[kind]
    is_low = kind == "max"
    if dtype in FLOATS:
        return float("-inf") if is_low else float("inf")
    if dtype == "u8":
        return 0 if is_low else 255
    bits = {"i8": 7, "i16": 15, "i32": 31, "i64": 63}[dtype]
    return -(2**bits) if is_low else 2**bits - 1
