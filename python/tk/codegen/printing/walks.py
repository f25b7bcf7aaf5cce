"""Walks as source: a program runs through many blocks of rows, and adds up over them (which kernels do:
lowering/walk.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from tk.codegen.ir import Value
from tk.codegen.printing.body import Body, Lines
from tk.codegen.printing.loops import depths, needed, roots_of
from tk.codegen.printing.scalars import TL_DTYPES, identity
from tk.codegen.printing.segments import SegmentPrinter


@dataclass
class WalkPrinter:
    """Prints a kernel that walks."""

    body: Body
    row: SegmentPrinter

    @property
    def out(self) -> Lines:
        return self.body.out

    @cached_property
    def folds(self) -> list[Value]:
        return [v for v in self.body.kernel.values if v.op == "fold"]

    @cached_property
    def after(self) -> set[int]:
        """What is made of the sums."""
        body = self.body
        return {v.number for v in body.kernel.values if v.axes & {a.name for a in body.tile.batch}}

    @cached_property
    def in_loop(self) -> set[int]:
        body = self.body
        found = {v.number for v in body.kernel.values if "p" in body.dims_of(v) and v.number not in self.after}
        if body.form.segments > 1:  # such rows leave no registers for a weight: it is read again for each
            found |= body.along_q - self.after
        return found

    def print(self) -> None:
        """What no row has a part in, the loop over blocks of rows, and what was added up there."""
        body, values = self.body, self.body.kernel.values
        self.out("pid = tl.program_id(0)")
        body.decompose("pid", body.tile.batch)
        if body.form.vectors:  # all rows of a program begin as far from a vector's address as its first
            body.places("p", "pid * BLOCK_P")
        self.row.whole_row()
        for v in values:
            if v.number not in self.in_loop and v.number not in self.after:
                self.row.value(v)
        for v in self.folds:
            self._for_fold(v, self._started)
        self._loop_over_rows()
        for v in values:
            if v.op == "fold":
                self._for_fold(v, self._finished)
            elif v.number in self.after:
                self.row.value(v)

    def _loop_over_rows(self) -> None:
        body, form, step = self.body, self.body.form, "tl.num_programs(0) * BLOCK_P"
        head = f"for start_p in range(pid * BLOCK_P, p_size, {step}):"
        if form.stages > 1:
            head = f"for start_p in tl.range(pid * BLOCK_P, p_size, {step}, num_stages={form.stages}):"
        with self.out.block(head):
            if form.ahead:
                self._fetch_ahead()
            body.places("p", "start_p", is_full=form.rows == 1)
            if form.rereads:
                self._reading_again()
            else:
                for v in body.kernel.values:
                    if v.number in self.in_loop:
                        self.row.value(v)
            for v in self.folds:
                self._for_fold(v, self._added)

    def _reading_again(self) -> None:
        """Prints a walk that loads anew what each generation of reductions, and what is stored and added up, needs."""
        body, kernel, in_loop = self.body, self.body.kernel, self.in_loop
        depth, varying = depths(kernel, {}), body.along_q & in_loop
        last = max(depth[n] for n in in_loop)
        for level in range(last + 1):
            reduces = [v for v in kernel.values if v.op == "reduce" and depth[v.number] == level + 1]
            stores = [v for v in kernel.values if v.op == "store" and v.number in varying]
            roots = roots_of(kernel, [*reduces, *([*stores, *self.folds] if level == last else [])], {})
            inside = needed(kernel, roots, varying)
            # Loads that differ in nothing the compiler would make one. A weight stays in the caches anyway.
            last_use = "evict_first" if level == last else ""
            body.level_hints = ("evict_last" if level == 0 else last_use, "" if level % 2 else "evict_last")
            once = {n for n in in_loop - varying if depth[n] == level and kernel.value(n).op != "reduce"}
            for v in kernel.values:
                if v.number in inside | once:
                    self.row.value(v)
            for v in reduces:
                self.row.value(v)
        body.level_hints = ("", "")

    def _fetch_ahead(self) -> None:
        """Brings the rows of this program's next turn into the L2 cache, a line at a time."""
        body = self.body
        body.places("p", "start_p + tl.num_programs(0) * BLOCK_P")
        for v in body.kernel.values:
            if v.op == "load" and body.index_dims(v) == {"p", "q"}:
                row = f"ptr_{v.buffer} + {body.row_text(v)}"
                self.out(f"device.fetch({row}, p_mask, q_size, BLOCK_Q * {body.form.segments})")

    # --- Sums over rows ---

    @property
    def _rows_are_added_at_once(self) -> bool:
        """A block's rows meet in a thread: they are added up before they join the rows before them, so that what is
        kept is a single row."""
        return self.body.form.rows == 1 or self.body.form.rows_meet

    def _for_fold(self, v: Value, line: Callable[[Value, str], str]) -> None:
        """A line of what is added up, by its name. A fold has what it adds up along the row in every segment."""

        def own() -> str:
            return line(v, self.body.variable(v.number, "acc"))

        self.row.repeat_line(own) if v.number in self.body.along_q else self.out(own())

    def _started(self, v: Value, acc: str) -> str:
        body = self.body
        dims = body.dims_of(body.kernel.value(v.args[0])) - {"p"}
        shape = body.shape_of(dims if self._rows_are_added_at_once else {*dims, "p"})
        return f"{acc} = tl.zeros({shape}, {TL_DTYPES[v.dtype]})"

    def _added(self, v: Value, acc: str) -> str:
        x = self.body.name(v.args[0])
        if self.body.form.rows != 1:
            x = f"tl.where(p_mask, {x}, {identity(v.data, v.dtype)})"
            x = f"tl.sum({x}, 0, keep_dims=True)" if self._rows_are_added_at_once else x
        return f"{acc} += {x}"

    def _finished(self, v: Value, acc: str) -> str:
        total = acc if self._rows_are_added_at_once else f"tl.sum({acc}, 0, keep_dims=True)"
        return f"{self.body.variable(v.number)} = {total}"
