"""Rows in segments as source: a program has a whole row at once, as blocks beside each other.

What varies along the row is printed once for each segment, reductions go over all of them. Rows in vectors have one
segment more, of what lies before the first whole vector of a row and behind its last.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tk.codegen.ir import FLOATS, Value
from tk.codegen.printing.scalars import COMBINE, TL_DTYPES, identity

if TYPE_CHECKING:
    from tk.codegen.printing.printer import Lines, Printer

VECTOR = 8  # elements that vectors at any address hold
EDGES = "edges"  # the segment of what lies before a row's first whole vector and behind its last
EDGE = 2 * VECTOR  # more than these


@dataclass
class SegmentPrinter:
    """Prints what a program does with whole rows; where they are one block, as such."""

    printer: Printer

    @property
    def out(self) -> Lines:
        return self.printer.out

    @property
    def is_needed(self) -> bool:
        return self.printer.segments > 1 or self.printer.vectors

    @property
    def names(self) -> list[int | str]:
        return [*range(self.printer.segments), *([EDGES] if self.printer.vectors else [])]

    @cached_property
    def along_q(self) -> set[int]:
        p = self.printer
        return {v.number for v in p.kernel.values if "q" in p.dims_of(v)}

    def repeat(self, print_lines: Callable[[], None]) -> None:
        """What varies along the row, once for every segment."""
        if not self.is_needed:
            print_lines()
            return
        before = len(self.out.text)
        print_lines()
        lines = self.out.text[before:]
        del self.out.text[before:]
        axes = {a.name for a in self.printer.tile.q}
        for k in self.names:
            self.out.text += [_in_segment(line, k, self.along_q, axes) for line in lines]

    # --- Places ---

    def whole_row(self) -> None:
        """Its places and their masks."""
        p = self.printer
        if p.vectors:
            self._whole_vectors()
        elif p.segments == 1:
            p._range("q", "0")
        else:
            self.repeat(lambda: p._range("q", "SEGMENT * BLOCK_Q"))
        for k in range(p.segments - 1):  # the row is longer than these
            self.out(f"q_mask_{k} = tl.full({p.shape_of('q')}, True, tl.int1)")

    def _whole_vectors(self) -> None:
        """A row's places as they lie in memory: vectors between two 16-byte addresses, and the up to seven elements
        before and behind them. place: counted from the first vector."""
        p = self.printer
        row = next(p.row_text(v) for v in p.kernel.accesses if p.is_in_vectors(v))
        self.out(f"lead = ((0 - ({row})) & {VECTOR - 1}).to(tl.int32)")
        self.out(f"inner = (q_size - lead) // {VECTOR} * {VECTOR}")
        for k in range(p.segments):
            self.out(f"place_{k} = {f'{k} * BLOCK_Q + ' if k else ''}{p.offsets('q')}")
            self.out(f"q_{k} = lead + place_{k}")
            self.out(f"q_mask_{k} = place_{k} < inner")
        # As many as threads have a row, so that the same threads have a row's edges. By turns from both ends: were they
        # neighbours, the compiler would give a thread several.
        self.out(f"EDGES: tl.constexpr = {EDGE} if BLOCK_P == 1 or BLOCK_Q <= {16 * VECTOR} else 32")
        self.out(f"edge = {self._edge_offsets()}")
        self.out(f"q_{EDGES} = tl.where(edge % 2 == 0, edge // 2, q_size - 1 - edge // 2)")
        is_edge = f"(q_{EDGES} < lead) | (q_{EDGES} >= lead + inner)"
        self.out(f"q_mask_{EDGES} = (edge < {EDGE}) & ({is_edge})")
        self.out(f"place_{EDGES} = q_{EDGES} - lead")
        self._single_axes()

    def flat_vectors(self) -> None:
        """Of elements that run together: whole vectors. The up to seven behind them are the first program's."""
        self.out(f"inner = q_size // {VECTOR} * {VECTOR}")
        self.out(f"q_0 = start_q + {self.printer.offsets('q')}")
        self.out("q_mask_0 = q_0 < inner")
        self.out(f"EDGES: tl.constexpr = {EDGE}")
        self.out(f"q_{EDGES} = inner + {self._edge_offsets()}")
        self.out(f"q_mask_{EDGES} = q_{EDGES} < tl.where(start_q == 0, q_size, 0)")
        self._single_axes()

    def _edge_offsets(self) -> str:
        return self.printer.offsets("q").replace("BLOCK_Q", "EDGES")

    def _single_axes(self) -> None:
        p = self.printer
        if p._needs_axes("q"):
            self.repeat(lambda: p._decompose("q", p.tile.q))

    # --- Values and reductions ---

    def print(self) -> None:
        """As at once, with what varies along the row once for every segment, and reductions over all of them."""
        if self.printer.reduced_dim:
            self.whole_row()
        for v in self.printer.kernel.values:
            self.value(v)

    def value(self, v: Value) -> None:
        """A value of a program that has whole rows, or a reduction of them."""
        p = self.printer
        if v.op == "reduce":
            self._reduce(v) if self.is_needed else p._reduce_at_once(v)
        elif v.number in self.along_q:
            self.repeat(lambda: p._value(v))
        else:
            p._value(v)

    def _reduce(self, v: Value) -> None:
        """Element by element over the segments first: what is left is the reduction of one."""
        n, operand = v.number, self.printer.kernel.value(v.args[0])
        if v.data in ("mean", "m2"):
            self._variance(v)
            return
        masked = f"tl.where(q_mask, v{v.args[0]}, {identity(v.data, operand.dtype)})"
        self.repeat(lambda: self.out(f"x{n}_SEGMENT = {masked}"))
        if v.data in ("argmax", "argmin"):
            self._position(v)
        else:
            self.out(f"v{n} = {self._over_row(f'x{n}', v.data)}")

    def _over_row(self, name: str, how: str) -> str:
        """The reduction of a variable. The edges have another shape, and so a reduction of their own."""
        p = self.printer
        found = p._combined(how, _together([f"{name}_{k}" for k in range(p.segments)], how))
        return _together([found, p._combined(how, f"{name}_{EDGES}")], how) if p.vectors else found

    def _variance(self, v: Value) -> None:
        p, n, x = self.printer, v.number, f"v{v.args[0]}"
        operand = p.kernel.value(v.args[0])
        zero, mean = identity("sum", operand.dtype), f"mean_{v.args[0]}"
        if mean not in p.done:
            p.done.add(mean)
            self.repeat(lambda: self.out(f"t{n}_SEGMENT = tl.where(q_mask, {x}, {zero})"))
            self.out(f"{mean} = ({self._over_row(f't{n}', 'sum')}) / tl.cast(q_size, {TL_DTYPES[operand.dtype]})")
        if v.data == "mean":
            self.out(f"v{n} = {mean}")
            return
        self.repeat(lambda: self.out(f"d{n}_SEGMENT = tl.where(q_mask, {x} - {mean}, {zero})"))
        self.repeat(lambda: self.out(f"s{n}_SEGMENT = d{n}_SEGMENT * d{n}_SEGMENT"))
        self.out(f"v{n} = {self._over_row(f's{n}', 'sum')}")

    def _position(self, v: Value) -> None:
        """The least position of the extreme of x: see Printer._first_position."""
        p, n, own = self.printer, v.number, f"x{v.number}_SEGMENT"
        operand = p.kernel.value(v.args[0])
        self.out(f"m{n} = {self._over_row(f'x{n}', v.data.removeprefix('arg'))}")
        found = f"({own} == m{n})" + (f" | ({own} != {own})" if operand.dtype in FLOATS else "")
        shape = p.shape_of({*p.dims_of(operand), "q"})
        self.repeat(lambda: self.out(f"at{n}_SEGMENT = tl.where({found}, tl.broadcast_to(q, {shape}), {p._last()})"))
        least = f"at{n}_0"
        for k in range(1, p.segments):
            least = f"tl.minimum({least}, at{n}_{k})"
        least = f"tl.min({least}, {p.axis}{p._keep()})"
        if p.vectors:
            least = f"tl.minimum({least}, tl.min(at{n}_{EDGES}, {p.axis}{p._keep()}))"
        self.out(f"v{n} = {least}.to(tl.int64)")


def _together(names: list[str], how: str) -> str:
    """These reduced with each other."""
    if how == "sum":
        return " + ".join(names)
    text = names[0]
    for other in names[1:]:
        text = f"device.{COMBINE[how]}({text}, {other})"
    return text


def _in_segment(line: str, k: int | str, along: set[int], axes: set[str]) -> str:
    """A line with the names of what varies along the row those of its segment `k`."""

    def own(match: re.Match[str]) -> str:
        name = match[0]
        is_along = name in ("q", "q_mask", "place") or name in axes
        if number := re.fullmatch(r"(?:v|acc)(\d+)", name):
            is_along = int(number[1]) in along
        return f"{name}_{k}" if is_along else name

    line = re.sub(r"\b(q_mask|q|place|v\d+|acc\d+|[ar]\d+)\b", own, line).replace("SEGMENT", str(k))
    return line.replace("BLOCK_Q", "EDGES") if k == EDGES else line
