"""Addresses: what each access of a launch is as arguments, and what it takes for granted of strides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import sympy

from tk.aot.expr import Expr, as_expr, maximum, select
from tk.aot.spec import ITEMSIZE, Arg, Constraint, Int, require
from tk.codegen import index as ix
from tk.codegen import ir
from tk.codegen.scheduling.context import Context
from tk.codegen.tile import Access, Layout, Tile, coefficients, interleaved


@dataclass
class Addresses:
    """The arguments and constraints of a launch, as they are found to be needed. unit: buffers that are read along q
    without gaps; rows_of: of these (base, step of a row). realigned: elements of the vectors in which realigned rows
    are read, 0 where they are not; row: of such rows where they begin, and how far apart. turns_results: new tensors
    are written along q without gaps, whatever else lies apart along it: Triton then turns the block that is stored."""

    kernel: ir.Kernel
    tile: Tile
    layout: Layout
    context: Context
    args: dict[str, Arg] = field(default_factory=dict)
    constraints: list[Constraint] = field(default_factory=list)
    known: dict[tuple[object, ...], str] = field(default_factory=dict)
    unit: set[str] = field(default_factory=set)
    rows_of: dict[str, list[tuple[Expr, Expr]]] = field(default_factory=dict)
    realigned: int = 0
    turns_results: bool = False
    row: tuple[str, Expr] | None = None

    # --- Arguments ---

    def int_arg(self, name: str, value: Expr | int, dtype: str = "i64") -> str:
        """The name of an argument with this value; one value is passed once."""
        key = (as_expr(value).encode(), dtype)
        if key not in self.known:
            while name in self.args:
                name += "_"
            self.known[key] = name
            self.args[name] = Int(value, dtype)
        return self.known[key]

    def magic_arg(self, size: sympy.Expr, is_wide: bool) -> str:
        """What device.divided takes beside a divisor."""
        n, bits = maximum(self.context.expr(size), 1), 55 if is_wide else 31
        name = f"magic_{size.name}" if size.is_Symbol else "magic"
        return self.int_arg(name, as_expr((1 << bits) - 1) // n, "i64" if is_wide else "i32")

    def require(self, holds: Expr | bool, message: str) -> None:
        if not any(c.holds.same(as_expr(holds)) for c in self.constraints):
            self.constraints.append(require(holds, message))

    def extent(self, axes: Sequence[ir.Axis]) -> Expr:
        return self.context.extent(axes)

    # --- Addresses ---

    def access(self, v: ir.Value) -> Access:
        """The place of a load's, store's or search's elements, with what that takes for granted."""
        buffer = self.kernel.buffer(v.buffer)
        is_opened = not (self.layout.pitched and buffer.leading)
        if self.layout.merged and is_opened and v.op != "search":
            if buffer.leading:
                t = self.context.tensors[buffer.name]
                is_one = (t.size(0) == 1) & (t.size(1) == 1)
                self.require(is_one, f"leading dimensions of {buffer.name} that run together")
            linear = self._linear(v, buffer)
            if linear is not None:
                return linear
        return Access(True, strides=tuple(self._strider(buffer, d) for d in range(len(v.index))))

    def _strider(self, buffer: ir.Buffer, d: int) -> Callable[[str], str]:
        dims = self.context.dims(buffer, d)
        if len(dims) == 1 or (self.layout.merged and not self.layout.pitched):
            stride = self.int_arg(f"stride_{buffer.name}_{dims[-1]}", self.context.stride(buffer, d))
            return lambda text: f"{text} * {stride}"
        t = self.context.tensors[buffer.name]
        strides = [self.int_arg(f"stride_{buffer.name}_{n}", t.stride(n)) for n in dims]
        inner = ir.LEADING_SIZES[1:]
        sizes = [self.int_arg(n.name, self.context.expr(n)) for n in inner]
        magics = [self.magic_arg(n, is_wide=True) for n in inner]
        return lambda x: f"device.leading({', '.join([x, *sizes, *magics, *strides])})"

    def _linear(self, v: ir.Value, buffer: ir.Buffer) -> Access | None:
        """base + p * step + q, where the index is linear and what is merged runs together; None where it is not."""
        factors = coefficients(v, self.kernel.axes)
        if factors is None:
            return None
        of = dict(zip((a.name for a in self.kernel.axes), factors, strict=True))
        for axes in (() if self.layout.pitched else self.tile.p, self.tile.q):
            # With one of several axes counted backwards they never run together.
            ways = {(bool(of[a.name]), any(f.is_negative for f in of[a.name].values())) for a in axes}
            if len(ways) > 1:
                return None
        steps = {a.name: self.context.step(buffer, of[a.name]) for a in self.kernel.axes}
        of_p = [a for a in self.tile.p if of[a.name]]
        p = self._merge(buffer, self.tile.p, steps) if of_p and not self.layout.pitched else None
        q = self._merge(buffer, self.tile.q, steps) if any(of[a.name] for a in self.tile.q) else None
        unit = self._unit(v, of) if q is not None else None
        is_unit = unit is not None
        if unit is not None:
            assert q is not None
            is_dense = (q == 1) | (self.extent(self.tile.q) == 1)
            if not ix.same(buffer.sizes[unit], self.tile.q[-1].size):  # of the rows only the first element may be there
                is_dense = is_dense | (self.context.expr(buffer.sizes[unit]) == 1)
            self.require(is_dense, f"{buffer.name} without gaps along its rows")
            self.unit.add(buffer.name)
            if p is not None or not self.tile.p:
                step = as_expr(0) if p is None else p
                self.rows_of.setdefault(buffer.name, []).append((self._constant(buffer, v, is_unit), step))
            if self.realigned and p is not None:
                return self._realigned_access(buffer, v, p)
        vector = per_16_bytes(buffer) if self.layout.aligned and is_unit else 1
        base = [self._product(buffer, "base", None, self._constant(buffer, v, is_unit), vector)]
        base += [self._product(buffer, f"step_{a.name}", a.name, steps[a.name], vector)
                 for a in self.tile.batch if of[a.name]]  # fmt: skip
        is_turned = self.turns_results and self._is_new_along(v, self.tile.q, of)
        if is_turned:
            assert q is not None
            self.require((q == 1) | (self.extent(self.tile.q) == 1), f"{buffer.name} without gaps along its rows")
        q_step = "" if is_unit or is_turned else self._product(buffer, "step_q", None, q, 1) or None
        parts = tuple(b for b in base if b)
        if not self.layout.pitched:
            return Access(False, parts, self._product(buffer, "step_p", "p", p, vector), q_step=q_step)
        is_along_p = self.layout.across and self._is_new_along(v, self.tile.p, of)
        return Access(False, parts, self._by_axes(buffer, of_p, steps, vector, is_along_p),
                      frozenset(a.name for a in of_p), q_step)  # fmt: skip

    def _unit(self, v: ir.Value, of: Mapping[str, Mapping[int, sympy.Expr]]) -> int | None:
        """The dimension along which a dense layout takes memory to run: the last, if q does. Of interleaved parts it is
        whichever q ends with, for rows lie as columns do."""
        last, along = len(v.index) - 1, of[self.tile.q[-1].name]
        ends = next(iter(along), last) if interleaved(self.kernel, self.layout) else last
        return ends if self.layout.dense and along == {ends: sympy.Integer(1)} else None

    def _by_axes(self, buffer: ir.Buffer, axes: Sequence[ir.Axis], steps: Mapping[str, Expr], vector: int,
                 is_unit: bool) -> str:  # fmt: skip
        """The sum of every axis's place times its step. is_unit: that of the last is 1."""
        found = []
        for a in axes:
            if is_unit and a is axes[-1]:
                size = self.extent([a])
                self.require((steps[a.name] == 1) | (size == 1), f"{buffer.name} without gaps along its results")
                found.append(a.name)
            else:
                found.append(self._product(buffer, f"step_{a.name}", a.name, steps[a.name], vector))
        return " + ".join(text for text in found if text)

    def _is_new_along(self, v: ir.Value, axes: Sequence[ir.Axis], of: Mapping[str, Mapping[int, sympy.Expr]]) -> bool:
        """Whether a new tensor is written whose elements lie one behind the other along the last of these axes: Triton
        turns a block that was read along another dimension."""
        is_new = v.op == "store" and self.kernel.buffer(v.buffer).kind == "output"
        return is_new and bool(axes) and of[axes[-1].name] == {len(v.index) - 1: sympy.Integer(1)}

    def _realigned_access(self, buffer: ir.Buffer, v: ir.Value, p: Expr) -> Access:
        """An access from the 16 bytes in which a row begins: in every buffer as far before the row."""
        self.require(self._constant(buffer, v, True) % self.realigned == 0, f"{buffer.name} from its first row on")
        text = self._product(buffer, "step_p", "p", p, 1)
        if self.row is None:
            self.row = text, p
        is_same = ((p - self.row[1]) % self.realigned == 0) | (self.extent(self.tile.p) == 1)
        self.require(is_same, f"rows of {buffer.name} as far from 16 bytes as those of the others")
        base = self._product(buffer, "base", None, self._constant(buffer, v, True), 1)
        in_vectors = f"({text} - shift) // {self.realigned} * {self.realigned}"
        return Access(False, (base,) if base else (), in_vectors, q_step="", realigned=True)

    def _constant(self, buffer: ir.Buffer, v: ir.Value, is_unit: bool) -> Expr:
        """The place where every axis is 0. is_unit: of the last dimension the step is taken to be 1. Of one of size 1
        it is then 1 here as well, whatever the tensor's is: ``q - 1`` is to be its only element where q is 1."""
        zero = {a.symbol: sympy.Integer(0) for a in self.kernel.axes}
        total: Expr = as_expr(0)
        for d, e in enumerate(v.index):
            stride = self.context.stride(buffer, d)
            if is_unit and d == len(v.index) - 1:
                stride = select(self.context.expr(buffer.sizes[d]) == 1, 1, stride)
            total = total + self.context.expr(sympy.expand(e).xreplace(zero)) * stride
        return total

    def _merge(self, buffer: ir.Buffer, axes: Sequence[ir.Axis], steps: Mapping[str, Expr]) -> Expr:
        """The one step of axes that run together. That of an axis of size 1 says nothing."""
        step, inner = steps[axes[-1].name], self.context.expr(axes[-1].size)
        for a in reversed(axes[:-1]):
            size, own = self.context.expr(a.size), steps[a.name]
            self.require(
                (size == 1) | (inner == 1) | (own == step * inner), f"dimensions of {buffer.name} that run together"
            )
            step = select(inner == 1, own, step)
            inner = inner * size
        return step

    def _product(self, buffer: ir.Buffer, what: str, index: str | None, step: Expr | None, vector: int) -> str:
        """`index * step`, in 64 bits. vector: the step is passed as a multiple of this many elements, so that the
        compiler knows that every row begins at 16 bytes."""
        if step is None or step.value == 0:
            return ""
        if vector > 1:
            is_unused = as_expr(False) if index is None else self._extent_of(index) == 1
            self.require((step % vector == 0) | is_unused, f"rows of {buffer.name} that begin at 16 bytes")
            name = self.int_arg(f"{what}_{buffer.name}", step // vector)
            text = f"({name} * {vector})"
        else:
            text = self.int_arg(f"{what}_{buffer.name}", step)
        return text if index is None else f"{index}.to(tl.int64) * {text}"

    def _extent_of(self, index: str) -> Expr:
        axes = {"p": self.tile.p, "q": self.tile.q}.get(index) or [a for a in self.kernel.axes if a.name == index]
        return self.extent(axes)


def per_16_bytes(buffer: ir.Buffer) -> int:
    return 16 // ITEMSIZE[buffer.dtype]
