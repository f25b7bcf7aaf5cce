"""Print: a kernel's body -> a Triton function.

Which program has what stands here; what it does with it is printed at once, in loops, by segments or as a walk.
"""

from __future__ import annotations

from dataclasses import dataclass

from tk.codegen.printing.body import Body
from tk.codegen.printing.loops import LoopPrinter
from tk.codegen.printing.reductions import BlockReductions
from tk.codegen.printing.scans import ScanPrinter
from tk.codegen.printing.segments import SegmentPrinter
from tk.codegen.printing.sorts import print_loop, print_sort
from tk.codegen.printing.walks import WalkPrinter


@dataclass
class FunctionPrinter:
    """Prints what maps and reduces."""

    body: Body

    def __post_init__(self) -> None:
        self.segments, self.scans = SegmentPrinter(self.body), ScanPrinter(self.body)

    def print(self, name: str, params: list[str]) -> str:
        """The function's source, behind that of the functions which it alone calls."""
        if (multiple := self.body.form.multiple) > 1:
            self.body.out(f"q_size = q_vectors * {multiple}")  # tells the compiler so
        self.lines()
        head = f"@triton.jit\ndef {name}({', '.join(params)}):"
        return "\n\n".join([*self.scans.functions(), "\n".join([head, *self.body.out.text]) + "\n"])

    # --- What kinds differ in ---

    def lines(self) -> None:
        form = self.body.form
        self._part_of_a_row() if form.spread else self._program()
        if form.looped:
            self.looped()
        elif self.segments.is_needed:
            self.segments.print()
        else:
            self._once()

    def looped(self) -> None:
        """Over the blocks of what is reduced."""
        LoopPrinter(self.body, self.scans).print()

    def ticket(self) -> str:
        """The number of a program that has a block of a row."""
        return "tl.program_id(0)"

    # --- Which program has what ---

    def _part_of_a_row(self) -> None:
        """Which block of which row."""
        body, out, wide = self.body, self.body.out, ".to(tl.int64)" if self.body.layout.wide else ""
        out(f"ticket = {self.ticket()}")
        out(f"n_parts = tl.cdiv({body.extent('q')}, BLOCK_Q).to(tl.int32)")
        out(f"part = (ticket % n_parts){wide}")
        out(f"n_programs = {'p_size * ' if body.tile.p else ''}n_parts")
        if body.tile.p:
            out(f"start_p = (ticket // n_parts){wide}")
            body.places("p", "start_p")

    def _program(self) -> None:
        """Which tile this program has."""
        body, out, tile, first = self.body, self.body.out, self.body.tile, self.body.form.first
        blocks = [n for n in reversed(body.names) if n != body.reduced_dim]
        wide = ".to(tl.int64)" if body.layout.wide else ""
        left = "pid"
        out(f"pid = {f'(tl.program_id(0) - {first})' if first else 'tl.program_id(0)'}{wide}")
        for i, n in enumerate(blocks):
            is_last = i == len(blocks) - 1 and not tile.batch
            count = f"tl.cdiv({n}_size, {body.block(n)})"
            out(f"start_{n} = {left}{'' if is_last else f' % {count}'} * {body.block(n)}")
            if not is_last:
                out(f"{left} = {left} // {count}")
        if tile.batch:
            body.decompose("pid", tile.batch)
        for n in blocks:
            if body.form.vectors and n == "q":
                self.segments.flat_vectors()
            else:
                body.places(n, f"start_{n}", is_full=body.form.piece is not None)

    # --- At once ---

    def _once(self) -> None:
        """What a program does whose block has all of what is reduced."""
        body, reductions = self.body, BlockReductions(self.body)
        if body.reduced_dim:
            part = "(n_parts - 1 - part)" if body.is_backwards else "part"
            body.places(body.reduced_dim, f"{part} * BLOCK_Q" if body.form.spread else "0")
        for v in body.kernel.values:
            if v.op == "reduce":
                reductions.print(v)
            elif v.op == "scan":
                self.scans.over_programs(v) if body.form.spread else self.scans.in_block(v)
            elif v.op == "sort":
                print_sort(body, v)
            else:
                body.value(v)


class ScanFunctionPrinter(FunctionPrinter):
    """Prints scans along rows."""

    def ticket(self) -> str:
        """A program that waits for those before it must not have started before them."""
        return "tl.atomic_add(ptr_state, 1)"


class SortFunctionPrinter(FunctionPrinter):
    def looped(self) -> None:
        print_loop(self.body)


class WalkFunctionPrinter(FunctionPrinter):
    def lines(self) -> None:
        WalkPrinter(self.body, self.segments).print()
