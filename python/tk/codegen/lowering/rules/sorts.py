"""Sorting along a dimension: keys as integers whose order is the values', with the row in their low bits.

So one number holds all of an element, no two are equal, and any sort of them is a stable one. Of 64-bit values the row
is a second number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy

from tk.aot.spec import ITEMSIZE
from tk.codegen.ir import FLOATS, Sorted
from tk.codegen.lowering.graph import Call
from tk.codegen.lowering.lazy import Emitter, Index, Lazy, Scan, scan
from tk.codegen.lowering.rules.table import normal_dim, rule
from tk.codegen.lowering.split import Splitter

BITS = {1: "i8", 2: "i16", 4: "i32", 8: "i64"}


@dataclass(frozen=True)
class Packing:
    """The bits of the number that is sorted: what stands where. A row takes all but the lowest bit of what the key
    leaves: the lowest says that a zero was a negative one."""

    x: Lazy
    descending: bool
    runs: bool
    long: bool  # rows of any length, else those that fit into a block
    digits: bool = False  # sorted by digits, each row by one program
    radix: bool = False  # sorted by digits, rows by many programs
    narrow: bool = False  # the first few of rows of up to along.LONGEST_NARROW elements

    @property
    def size(self) -> int:
        return ITEMSIZE[self.x.dtype]

    @property
    def dtype(self) -> str:
        return "i64" if self.size > 2 or self.long else "i32"

    @property
    def is_pair(self) -> bool:
        return self.size == 8

    @property
    def shift(self) -> int:
        """How far the key stands from the right."""
        return 0 if self.is_pair else 32 if self.dtype == "i64" else 16

    def _number(self, e: Emitter, value: int, dtype: str | None = None) -> int:
        return e.constant(value, dtype or self.dtype)

    def key(self, e: Emitter, index: Index) -> int:
        """An integer of the number's dtype, in the order of the values; NaN is the largest, and -0.0 is 0.0."""
        value, dtype = e.read(self.x, index), self.dtype
        if self.x.dtype in FLOATS:
            value = self._float_key(e, value)
        value = e.cast(value, "i32") if self.x.dtype == "i1" else value
        value = e.cast(value, dtype)
        if self.descending:
            value = e.op("bitwise_not", dtype, value)
        if self.shift:
            value = e.op("shl", dtype, value, self._number(e, self.shift))
        return value

    def _float_key(self, e: Emitter, value: int) -> int:
        kind = self.x.dtype
        bits = BITS[self.size]
        largest = 2 ** (8 * self.size - 1) - 1
        raw = e.builder.add("bitcast", bits, value, data=kind)
        is_negative = e.op("lt", "i1", raw, e.constant(0, bits))
        mirrored = e.op("where", bits, is_negative, e.op("xor", bits, raw, e.constant(largest, bits)), raw)
        is_zero = e.op("eq", "i1", value, e.constant(0.0, kind))
        mirrored = e.op("where", bits, is_zero, e.constant(0, bits), mirrored)
        return e.op("where", bits, e.op("isnan", "i1", value), e.constant(largest, bits), mirrored)

    def row(self, e: Emitter, index: Index, dim: int) -> int:
        """The low bits: the row, and whether it is a negative zero."""
        dtype = self.dtype
        row = e.op("shl", dtype, e.cast(e.index(index[dim]), dtype), self._number(e, 1))
        if self.x.dtype not in FLOATS:
            return row
        value = e.read(self.x, index)
        raw = e.builder.add("bitcast", BITS[self.size], value, data=self.x.dtype)
        is_negative_zero = e.op("eq", "i1", raw, e.constant(-(2 ** (8 * self.size - 1)), BITS[self.size]))
        return e.op("or", dtype, row, e.cast(is_negative_zero, dtype))

    def value_of(self, e: Emitter, key: int, row: int) -> int:
        """The element again."""
        dtype = self.dtype
        if self.shift:
            key = e.op("shr", dtype, key, self._number(e, self.shift))
        if self.descending:
            key = e.op("bitwise_not", dtype, key)
        if self.x.dtype not in FLOATS:
            return e.cast(key, self.x.dtype)
        bits = BITS[self.size]
        key = e.cast(key, bits)
        largest = e.constant(2 ** (8 * self.size - 1) - 1, bits)
        is_negative = e.op("lt", "i1", key, e.constant(0, bits))
        raw = e.op("where", bits, is_negative, e.op("xor", bits, key, largest), key)
        odd = e.op("and", dtype, row, self._number(e, 1))
        is_negative_zero = e.op("and", "i1", e.op("eq", "i1", key, e.constant(0, bits)), e.cast(odd, "i1"))
        raw = e.op("where", bits, is_negative_zero, e.constant(-(2 ** (8 * self.size - 1)), bits), raw)
        return e.builder.add("bitcast", self.x.dtype, raw, data=bits)

    def row_of(self, e: Emitter, row: int) -> int:
        dtype = self.dtype
        if self.shift:
            row = e.op("and", dtype, row, self._number(e, 2**self.shift - 1))
        return e.cast(e.op("shr", dtype, row, self._number(e, 1)), "i64")


def sorted_along(x: Lazy, dim: int, descending: bool, is_top: bool = False) -> tuple[Lazy, Lazy]:
    """(values, rows), in order. is_top: the first few will be read, for which a long row is run through."""
    if not x.shape or x.shape[dim] == 1:
        return x, Lazy(x.shape, "i64", lambda e, i: e.constant(0, "i64"))
    kinds = {
        "block": Packing(x, descending, False, is_top),
        "runs": Packing(x, descending, True, True),
        "digits": Packing(x, descending, True, False, digits=True),
        "radix": Packing(x, descending, True, True, radix=True),
        "narrow": Packing(x, descending, False, False, narrow=ITEMSIZE[x.dtype] <= 2),
    }
    of = {kind: _nodes(packing, dim) for kind, packing in kinds.items()}

    def numbers(e: Emitter, index: Index) -> tuple[Packing, int, int]:
        """The sorted key and row at an index: both are asked for, since both must be merged."""
        kind = "block"
        if isinstance(e.splitter, Splitter):
            e.splitter.has_runs = True
            kind = "runs" if kinds["runs"].is_pair else e.splitter.sorts
        packing, nodes = of[kind]
        own = _moved(index, dim) if packing.runs else index
        found = [e.read(n, own) for n in nodes]
        return packing, found[0], found[-1]

    def value(e: Emitter, index: Index) -> int:
        packing, key, row = numbers(e, index)
        return packing.value_of(e, key, row)

    def row(e: Emitter, index: Index) -> int:
        packing, _, row = numbers(e, index)
        return packing.row_of(e, row)

    return Lazy(x.shape, x.dtype, value), Lazy(x.shape, "i64", row)


def _moved(index: Index, dim: int) -> Index:
    """The index with the sorted dimension last: so runs lie in memory."""
    return (*index[:dim], *index[dim + 1 :], index[dim])


def _nodes(packing: Packing, dim: int) -> tuple[Packing, list[Scan]]:
    """What is sorted: one operand, or two. Runs are sorted with the dimension last."""
    x, last = packing.x, len(packing.x.shape) - 1
    shape = _moved(x.shape, dim) if packing.runs else x.shape

    def back(index: Index) -> Index:
        return (*index[:dim], index[last], *index[dim:last]) if packing.runs else index

    def lazy(read: Callable[[Emitter, Index], int]) -> Lazy:
        return Lazy(shape, packing.dtype, lambda e, i: read(e, back(i)))

    def both(e: Emitter, index: Index) -> int:
        return e.op("or", packing.dtype, packing.key(e, index), packing.row(e, index, dim))

    operands = [lazy(packing.key), lazy(lambda e, i: packing.row(e, i, dim))] if packing.is_pair else [lazy(both)]
    along = last if packing.runs else dim
    radix = 8 * packing.size if packing.radix else 0

    def how(part: int) -> Sorted:
        return Sorted(part, packing.runs, packing.digits, radix, packing.narrow)

    return packing, [scan(how(i), operands, along, packing.dtype) for i in range(len(operands))]


@rule("aten.sort")
def _sort(call: Call, x: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = None,
          **named: Any) -> list[Lazy]:  # fmt: skip
    """Always stable."""
    at = normal_dim(named.get("dim", dim), len(x.shape))
    return list(sorted_along(x, at, bool(named.get("descending", descending))))


@rule("aten.topk")
def _topk(call: Call, x: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> list[Lazy]:
    """The first k of the sorted, always in order."""
    at = normal_dim(dim, len(x.shape))
    values, rows = sorted_along(x, at, bool(largest), is_top=True)
    shape = call.graph.shape(call.val[0])
    return [_first(t, shape) for t in (values, rows)]


@rule("aten.kthvalue")
def _kthvalue(call: Call, x: Any, k: Any, dim: int = -1, keepdim: bool = False) -> list[Lazy]:
    at, place = normal_dim(dim, len(x.shape)), call.size(k) - 1
    shape = call.graph.shape(call.val[0])

    def read(t: Lazy) -> Callable[[Emitter, Index], int]:
        if not x.shape:
            return t.read
        return lambda e, i: e.read(t, (*i[:at], place, *i[at + 1 if keepdim else at :]))

    return [Lazy(shape, t.dtype, read(t)) for t in sorted_along(x, at, False)]


def _first(t: Lazy, shape: tuple[sympy.Expr, ...]) -> Lazy:
    return Lazy(shape, t.dtype, lambda e, i: e.read(t, i))
