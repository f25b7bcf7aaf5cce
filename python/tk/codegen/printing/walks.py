"""Walks as source: a program runs through many blocks of rows, and adds up over them (which kernels do: walk.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tk.codegen.ir import Value
from tk.codegen.printing.scalars import TL_DTYPES, identity

if TYPE_CHECKING:
    from tk.codegen.printing.printer import Lines, Printer
    from tk.codegen.printing.segments import SegmentPrinter


@dataclass
class WalkPrinter:
    """Prints a kernel that walks."""

    printer: Printer
    row: SegmentPrinter

    @property
    def out(self) -> Lines:
        return self.printer.out

    @cached_property
    def folds(self) -> list[Value]:
        return [v for v in self.printer.kernel.values if v.op == "fold"]

    @cached_property
    def after(self) -> set[int]:
        """What is made of the sums."""
        p = self.printer
        return {v.number for v in p.kernel.values if v.axes & {a.name for a in p.tile.batch}}

    @cached_property
    def in_loop(self) -> set[int]:
        p = self.printer
        found = {v.number for v in p.kernel.values if "p" in p.dims_of(v) and v.number not in self.after}
        if p.segments > 1:  # such rows leave no registers for a weight: it is read again for each
            found |= self.row.along_q - self.after
        return found

    def print(self) -> None:
        """What no row has a part in, the loop over blocks of rows, and what was added up there."""
        p, values = self.printer, self.printer.kernel.values
        self.out("pid = tl.program_id(0)")
        p._decompose("pid", p.tile.batch)
        if p.vectors:  # all rows of a program begin as far from a vector's address as its first
            p._range("p", "pid * BLOCK_P")
        self.row.whole_row()
        for v in values:
            if v.number not in self.in_loop and v.number not in self.after:
                self.row.value(v)
        for v in self.folds:
            self._repeat_fold(v, f"acc{v.number} = tl.zeros({self._fold_shape(v)}, {TL_DTYPES[v.dtype]})")
        self._loop_over_rows()
        for v in values:
            if v.op == "fold":
                self._repeat_fold(v, f"v{v.number} = {self._folded(v)}")
            elif v.number in self.after:
                self.row.value(v)

    def _loop_over_rows(self) -> None:
        p, step = self.printer, "tl.num_programs(0) * BLOCK_P"
        if p.stages > 1:
            self.out(f"for start_p in tl.range(pid * BLOCK_P, p_size, {step}, num_stages={p.stages}):")
        else:
            self.out(f"for start_p in range(pid * BLOCK_P, p_size, {step}):")
        self.out.depth += 1
        if p.ahead:
            self._fetch_ahead()
        p._range("p", "start_p", is_full=p.rows == 1)
        if p.rereads:
            self._reading_again()
        else:
            for v in p.kernel.values:
                if v.number in self.in_loop:
                    self.row.value(v)
        for v in self.folds:
            self._repeat_fold(v, f"acc{v.number} += {self._rows_to_add(v)}")
        self.out.depth -= 1

    def _reading_again(self) -> None:
        """For every generation of reductions, and for what is stored and added up, what it needs is loaded anew."""
        p, in_loop = self.printer, self.in_loop
        depth, along = p._depths(), self.row.along_q & in_loop
        last = max(depth[n] for n in in_loop)
        for level in range(last + 1):
            reduces = [v for v in p.kernel.values if v.op == "reduce" and depth[v.number] == level + 1]
            stores = [v for v in p.kernel.values if v.op == "store" and v.number in along]
            needed = p._needed_in_loop([*reduces, *(([*stores, *self.folds]) if level == last else [])], along)
            # Loads that differ in nothing the compiler would make one. A weight stays in the caches anyway.
            last_use = "evict_first" if level == last else ""
            p.level_hints = ("evict_last" if level == 0 else last_use, "" if level % 2 else "evict_last")
            once = {n for n in in_loop - along if depth[n] == level and p.kernel.value(n).op != "reduce"}
            for v in p.kernel.values:
                if v.number in needed | once:
                    self.row.value(v)
            for v in reduces:
                self.row.value(v)
        p.level_hints = ("", "")

    def _fetch_ahead(self) -> None:
        """Brings the rows of this program's next turn into the L2 cache, a line at a time."""
        p = self.printer
        p._range("p", "start_p + tl.num_programs(0) * BLOCK_P")
        for v in p.kernel.values:
            if v.op == "load" and p._index_dims(v) == {"p", "q"}:
                self.out(f"device.fetch(ptr_{v.buffer} + {p.row_text(v)}, p_mask, q_size, BLOCK_Q * {p.segments})")

    # --- Sums over rows ---

    @property
    def _rows_are_added_at_once(self) -> bool:
        """A block's rows meet in a thread: they are added up before they join the rows before them, so that what is
        kept is a single row."""
        return self.printer.rows == 1 or self.printer.rows_meet

    def _fold_shape(self, v: Value) -> str:
        p = self.printer
        dims = p.dims_of(p.kernel.value(v.args[0])) - {"p"}
        return p.shape_of(dims if self._rows_are_added_at_once else {*dims, "p"})

    def _repeat_fold(self, v: Value, line: str) -> None:
        """A fold has what it adds up along the row in every segment."""
        self.row.repeat(lambda: self.out(line)) if v.number in self.row.along_q else self.out(line)

    def _rows_to_add(self, v: Value) -> str:
        x = self.printer.name(v.args[0])
        if self.printer.rows == 1:
            return x
        x = f"tl.where(p_mask, {x}, {identity(v.data, v.dtype)})"
        return f"tl.sum({x}, 0, keep_dims=True)" if self._rows_are_added_at_once else x

    def _folded(self, v: Value) -> str:
        return f"acc{v.number}" if self._rows_are_added_at_once else f"tl.sum(acc{v.number}, 0, keep_dims=True)"
