"""Tensors that are computed where they are read, and what reads them into the values of a kernel.

Views are index arithmetic and pointwise ops read their operands where they are read themselves, so nothing exists in
memory but inputs and outputs — and what is read where its own kernel does not stand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import sympy

from tk.codegen import index as ix
from tk.codegen.errors import TraceError
from tk.codegen.ir import (
    FLOATS,
    INTS,
    Axis,
    Buffer,
    Builder,
    Scanned,
    Sorted,
    value_symbol,
    values_in,
)

Index = tuple[sympy.Expr, ...]


@dataclass(eq=False)
class Lazy:
    """A tensor that is computed where it is read."""

    shape: Index
    dtype: str
    read: Callable[[Emitter, Index], int]


@dataclass(eq=False)
class Reduction(Lazy):
    """`kind` of `operand` over `dims`; the shape is without them."""

    kind: str = ""
    operand: Lazy | None = None
    dims: tuple[int, ...] = ()

    @property
    def sizes(self) -> Index:
        """The sizes of the dimensions that are reduced, without those of size 1."""
        assert self.operand is not None
        return tuple(self.operand.shape[d] for d in self.dims if self.operand.shape[d] != 1)

    def operand_index(self, kept: Index, reduced: Sequence[sympy.Expr]) -> Index:
        assert self.operand is not None
        outer, inner, found = iter(kept), iter(reduced), []
        for d, size in enumerate(self.operand.shape):
            if d not in self.dims:
                found.append(next(outer))
            else:
                found.append(sympy.Integer(0) if size == 1 else next(inner))
        return tuple(found)


def reduction(kind: str, operand: Lazy, dims: Sequence[int], dtype: str) -> Reduction:
    shape = tuple(s for d, s in enumerate(operand.shape) if d not in dims)
    made = Reduction(shape, dtype, lambda e, i: e.reduction(made, i), kind, operand, tuple(dims))
    return made


@dataclass(eq=False)
class Scan(Lazy):
    """The operands accumulated, or sorted, along `dim`: one result of it."""

    operands: tuple[Lazy, ...] = ()
    dim: int = 0
    data: Scanned | Sorted = field(default_factory=lambda: Sorted())

    @property
    def is_unfinished(self) -> bool:
        """Sorted runs: another launch merges them before anything reads them."""
        return isinstance(self.data, Sorted) and self.data.runs

    @property
    def op(self) -> str:
        return "scan" if isinstance(self.data, Scanned) else "sort"

    @property
    def sizes(self) -> Index:
        return (self.shape[self.dim],)


def scan(data: Scanned | Sorted, operands: Sequence[Lazy], dim: int, dtype: str) -> Scan:
    """All operands have one shape."""
    made = Scan(operands[0].shape, dtype, lambda e, i: e.scan(made, i), tuple(operands), dim, data)
    return made


@dataclass(eq=False)
class Scatter(Lazy):
    """`base`, into which every element of `source` is put at `place`: in memory, so it is always stored first.

    kind: of ir.PUT. place: the index in the base for one in the source. keep: elements that are put; None: all.
    is_read_there: no place is read but those of the source, so that the base, a constant, is written there alone."""

    kind: str = ""
    base: Lazy | None = None
    source: Lazy | None = None
    place: Callable[[Emitter, Index], Index] = lambda e, i: i
    keep: Callable[[Emitter, Index], int] | None = None
    is_read_there: bool = False


@dataclass(eq=False)
class Stored(Lazy):
    """`operand`, in memory, since it is read by address."""

    operand: Lazy | None = None


def stored(operand: Lazy) -> Stored:
    made = Stored(operand.shape, operand.dtype, lambda e, i: e.stored_value(made, i), operand)
    return made


def scatter(kind: str, base: Lazy, source: Lazy, place: Callable[[Emitter, Index], Index],
            keep: Callable[[Emitter, Index], int] | None = None, is_read_there: bool = False) -> Scatter:  # fmt: skip
    """The source has the dtype of the base."""
    made = Scatter(base.shape, base.dtype, lambda e, i: e.stored_value(made, i), kind, base, source, place, keep,
                   is_read_there)  # fmt: skip
    return made


@dataclass(eq=False)
class Fold(Lazy):
    """What each program that walks through rows adds up of them: [programs, …]. of: the sum over all rows."""

    of: Reduction | None = None

    @property
    def operand(self) -> Lazy:
        assert self.of is not None and self.of.operand is not None
        return self.of.operand

    @property
    def domain(self) -> Domain:
        """The domain of the launch that has the rows."""
        assert self.of is not None
        return Domain(self.of.sizes, tuple(s for s in self.of.shape if s != 1))


# What an earlier launch may leave in memory.
Node = Reduction | Scan | Scatter | Stored | Fold


@dataclass(frozen=True)
class Domain:
    """What a kernel runs over."""

    kept: Index
    reduced: Index

    def axes(self, tensors: Sequence[Lazy] = ()) -> dict[str, Axis]:
        """The axes, with one more for the programs where one of the tensors is added up by them."""
        kept = [Axis(f"a{i}", s) for i, s in enumerate(self.kept)]
        reduced = [Axis(f"r{i}", s, True) for i, s in enumerate(self.reduced)]
        walk = [Axis("w0", t.shape[0], walk=True) for t in tensors if isinstance(t, Fold)][:1]
        return {a.name: a for a in (*kept, *walk, *reduced)}


# --- Emitting values ---


class Substitution(Protocol):
    """Puts something else in the place of a graph's reductions: split ones, or sums of what walking programs leave."""

    def of(self, node: Reduction) -> Lazy | None:
        """What is read in place of `node`; None where it stays as it is."""


@dataclass(frozen=True)
class Missing:
    """What an earlier launch must store. masked: it is read where a condition holds alone, so that elsewhere the index
    may be outside of it."""

    node: Node
    index: Index
    masked: bool


@dataclass
class Emitter:
    """Reads lazy tensors into the values of a kernel. stored: reductions that an earlier launch has left in scratch.
    splitter: puts split reductions in the place of whole ones. once: what no launch but the one that stores it works
    out. storing: the tensor that is being stored. made: what was worked out here, by value."""

    builder: Builder
    stored: Mapping[int, Buffer] = field(default_factory=dict)
    splitter: Substitution | None = None
    once: Collection[Node] = ()
    masks: list[int] = field(default_factory=list)
    memo: dict[Any, int] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)
    made: dict[int, Node] = field(default_factory=dict)
    storing: Lazy | None = None

    @property
    def ranges(self) -> dict[sympy.Symbol, sympy.Expr]:
        return {a.symbol: a.size for a in self.builder.axes.values()}

    def read(self, x: Lazy, index: Index) -> int:
        key = (id(x), index, tuple(self.masks))
        if key not in self.memo:
            self.memo[key] = x.read(self, index)
        return self.memo[key]

    def dtype(self, value: int) -> str:
        return self.builder.values[value].dtype

    def op(self, name: str, dtype: str, *args: int) -> int:
        return self.builder.add(name, dtype, *args)

    def constant(self, value: Any, dtype: str) -> int:
        """A number as ATen makes it of a dtype: integers wrap around."""
        kind = bool if dtype == "i1" else float if dtype in FLOATS else int
        data = kind(value)
        if dtype in INTS:
            bits, low = (8, 0) if dtype == "u8" else (int(dtype[1:]), -(2 ** (int(dtype[1:]) - 1)))
            data = (data - low) % 2**bits + low
        return self.builder.add("constant", dtype, data=data)

    def cast(self, value: int, dtype: str, rounding: bool = False) -> int:
        """rounding: to 16 bits and back changes the value, as the function asked for."""
        source = self.dtype(value)
        if source == dtype:
            return value
        if dtype == "i1":
            return self.op("ne", "i1", value, self.constant(0, source))
        return self.builder.add("cast", dtype, value, data="round" if rounding else None)

    def index(self, expr: sympy.Expr) -> int:
        """An index expression as a value of i64. One with values in it is put together from them."""
        expr = sympy.sympify(expr)
        if expr.is_Integer:
            return self.constant(int(expr), "i64")
        if not values_in(expr):
            return self.builder.add("index", "i64", data=expr)
        return self.number(expr, "i64")

    def number(self, expr: sympy.Expr, dtype: str) -> int:
        """A number that the call gives, or that was worked out from such: in double precision, as Python does."""
        wide = self._number(sympy.sympify(expr))
        return self.cast(wide, dtype)

    def _number(self, expr: sympy.Expr) -> int:
        if expr.is_Integer:
            return self.constant(int(expr), "i64")
        if expr.is_number:
            return self.constant(float(expr), "fp64")
        if (values := values_in(expr)) and expr == value_symbol(values[0]):
            return values[0]
        if expr.is_Symbol and not expr.is_integer:
            return self.builder.add("number", "fp64", data=expr.name)
        if not values and _is_integer(expr):
            return self.builder.add("index", "i64", data=expr)
        name = type(expr).__name__
        rule = {"Add": "add", "Mul": "mul", "FloatTrueDiv": "div", "IntTrueDiv": "div", "PowByNatural": "pow",
                "FloatPow": "pow", "Pow": "pow", "ToFloat": "cast", "FloorDiv": "floor_div", "Mod": "remainder",
                "Max": "maximum", "Min": "minimum"}.get(name)  # fmt: skip
        if rule is None:
            raise TraceError(
                f"{expr}: arithmetic of {name} on a number given at run time is not supported; pass the result"
            )
        parts = [self._number(a) for a in expr.args]
        if rule == "cast":
            return self.cast(parts[0], "fp64")
        wide = "i64" if _is_integer(expr) and all(self.dtype(p) == "i64" for p in parts) else "fp64"
        result = self.cast(parts[0], wide)
        for p in parts[1:]:
            result = self.op(rule, wide, result, self.cast(p, wide))
        return result

    def load(self, buffer: Buffer, index: Index) -> int:
        """Loads where the masks hold. What lies whole along other axes than a mask is there everywhere, and is then not
        one for each place of the mask."""
        self.builder.buffers.setdefault(buffer.name, buffer)
        ranges, along = self.ranges, {s.name for i in index for s in i.free_symbols}
        is_whole = all(i in ranges and ix.same(ranges[i], s) for i, s in zip(index, buffer.sizes, strict=True))
        mask = self._mask([m for m in self.masks if not is_whole or self.builder.values[m].axes & along])
        args = () if mask is None else (mask,)
        return self.builder.add("load", buffer.dtype, *args, buffer=buffer.name, index=index)

    def store(self, buffer: Buffer, index: Index, value: int) -> None:
        """Stores where the masks hold."""
        self.builder.buffers.setdefault(buffer.name, buffer)
        mask = self._mask(self.masks)
        args = (self.cast(value, buffer.dtype), *(() if mask is None else (mask,)))
        self.builder.add("store", buffer.dtype, *args, buffer=buffer.name, index=index)

    def put(self, node: Scatter, buffer: Buffer, index: Index) -> None:
        """One element of the source into its place."""
        assert node.source is not None
        self.builder.buffers.setdefault(buffer.name, buffer)
        at = node.place(self, index)
        mask = () if node.keep is None else (node.keep(self, index),)
        value = self.cast(self.read(node.source, index), buffer.dtype)
        self.builder.add("store", buffer.dtype, value, *mask, buffer=buffer.name, index=at, data=node.kind)

    def _mask(self, masks: Sequence[int]) -> int | None:
        if not masks:
            return None
        result = masks[0]
        for m in masks[1:]:
            result = self.op("and", "i1", result, m)
        return result

    @contextmanager
    def where(self, condition: int) -> Iterator[None]:
        """Nothing is read where the condition does not hold."""
        self.masks.append(condition)
        try:
            yield
        finally:
            self.masks.pop()

    def reduction(self, node: Reduction, index: Index) -> int:
        """Works a reduction out in this kernel where it stands at the kernel's own place, else reads what was
        stored."""
        if self.splitter is not None and (other := self.splitter.of(node)) is not None:
            return self.read(other, index)
        if self._is_elsewhere(node):
            return self.stored_value(node, index)
        reduced = [a for a in self.builder.axes.values() if a.reduced]
        is_own = self._is_own([(i, size) for i, size in zip(index, node.shape, strict=True) if size != 1])
        sizes_agree = len(reduced) == len(node.sizes) and all(
            ix.same(a.size, s) for a, s in zip(reduced, node.sizes, strict=True)
        )
        if reduced and sizes_agree and is_own and not self._stores_runs:
            masks, self.masks = self.masks, []  # every program of the kernel runs through all of its own rows
            assert node.operand is not None
            value = self.read(node.operand, node.operand_index(index, [a.symbol for a in reduced]))
            self.masks = masks
            return self._made(node, self.builder.add("reduce", node.dtype, value, data=node.kind))
        return self.stored_value(node, index)

    def scan(self, node: Scan, index: Index) -> int:
        """Works a scan out in this kernel where it is read at the kernel's own place, else reads what was stored."""
        if self._is_elsewhere(node) or (self.storing is not node and (node.is_unfinished or self._stores_runs)):
            return self.stored_value(node, index)
        reduced = [a for a in self.builder.axes.values() if a.reduced]
        places = [p for d, p in enumerate(zip(index, node.shape, strict=True)) if p[1] != 1 and d != node.dim]
        is_along = len(reduced) == 1 and index[node.dim] == reduced[0].symbol
        if is_along and ix.same(reduced[0].size, node.sizes[0]) and self._is_own(places):
            masks, self.masks = self.masks, []
            values = [self.read(x, index) for x in node.operands]
            self.masks = masks
            return self._made(node, self.builder.add(node.op, node.dtype, *values, data=node.data))
        return self.stored_value(node, index)

    def _is_elsewhere(self, node: Reduction | Scan) -> bool:
        return node in self.once and self.storing is not node

    def _made(self, node: Reduction | Scan, value: int) -> int:
        self.made[value] = node
        return value

    @property
    def _stores_runs(self) -> bool:
        """Whether the programs of this launch have parts of rows, so that nothing else can be done along them."""
        return isinstance(self.storing, Scan) and self.storing.is_unfinished

    def _is_own(self, places: Sequence[tuple[sympy.Expr, sympy.Expr]]) -> bool:
        """Whether these (index, size of the dimension) are the kernel's own place, each kept axis once. Where a
        condition holds alone an axis may be longer than the dimension, of which nothing may be read behind its end."""
        kept = {a.symbol: a.size for a in self.builder.axes.values() if not a.reduced and not a.walk}
        if len(places) != len(kept) or {i for i, _ in places} != set(kept):
            return False
        return not self.masks or all(ix.same(kept[i], size) for i, size in places)

    def search(self, node: Stored, index: Index, value: int, right: bool) -> int:
        """How many elements of a row in memory come before the value. index: of the row, its last entry 0."""
        buffer = self.stored.get(id(node)) or buffer_of(node.operand)
        if buffer is None:
            self.missing.append(Missing(node, index, bool(self.masks)))
            return self.constant(0, "i64")
        self.builder.buffers.setdefault(buffer.name, buffer)
        return self.builder.add("search", "i64", value, buffer=buffer.name, index=index, data=right)

    def fold(self, node: Fold, index: Index) -> int:
        """Adds up in a kernel whose programs walk, else reads what was stored."""
        axes = self.builder.axes.values()
        walk, reduced = next((a for a in axes if a.walk), None), [a.symbol for a in axes if a.reduced]
        if walk is None or index[0] != walk.symbol or [i for i in index[1:] if i != 0] != reduced:
            return self.stored_value(node, index)
        assert node.of is not None
        rows = [a.symbol for a in axes if not a.reduced and not a.walk]
        value = self.read(node.operand, node.of.operand_index(index[1:], rows))
        return self.builder.add("fold", node.dtype, value, data="sum")

    def stored_value(self, node: Node, index: Index) -> int:
        """What an earlier launch has left in memory."""
        if id(node) in self.stored:
            return self.load(self.stored[id(node)], index)
        self.missing.append(Missing(node, index, bool(self.masks)))
        return self.constant(0, node.dtype)


def buffer_of(x: Lazy | None) -> Buffer | None:
    """The buffer that holds a tensor as it is."""
    assert x is not None
    axes = {f"x{d}": Axis(f"x{d}", s) for d, s in enumerate(x.shape)}
    index, probe = tuple(a.symbol for a in axes.values()), Emitter(Builder(axes))
    read = probe.builder.values[probe.read(x, index)]
    if read.op != "load" or read.index != index or read.args:
        return None
    return probe.builder.buffers[read.buffer]


def is_axis(expr: sympy.Expr) -> bool:
    return bool(expr.is_Symbol) and expr.name.startswith("x")


_FRACTIONS = ("IntTrueDiv", "FloatTrueDiv", "ToFloat", "FloatPow", "Float", "Rational", "Half")


def _is_integer(expr: sympy.Expr) -> bool:
    """Made of integers alone, at every depth: ``N - 1.0`` is none."""
    return all(s.is_integer for s in expr.free_symbols) and not any(
        type(part).__name__ in _FRACTIONS for part in sympy.preorder_traversal(expr)
    )
