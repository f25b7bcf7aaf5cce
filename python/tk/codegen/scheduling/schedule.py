"""Schedule: a kernel -> a launch, with what it takes for granted and what it costs.

A layout says what is known of strides (``tile.LAYOUTS``), a setting how large a block is. From both follow the tile,
the addresses, the launch's arguments and the constraints under which they are right. What the kinds of launches differ
in stands in kinds.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import sympy

from tk.aot.expr import Expr, as_expr, ceil_div, select
from tk.aot.spec import Arg, Buffer, Const, Int, Launch, Pointer, Scratch
from tk.codegen import index as ix
from tk.codegen import ir
from tk.codegen.pieces import Piece, piece_of
from tk.codegen.printing import debug
from tk.codegen.printing.body import EDGE, VECTOR, Body, Form
from tk.codegen.printing.printer import FunctionPrinter
from tk.codegen.scheduling import combo, sorts
from tk.codegen.scheduling.addresses import Addresses, per_16_bytes
from tk.codegen.scheduling.context import half
from tk.codegen.scheduling.cost import Cost
from tk.codegen.scheduling.settings import Setting
from tk.codegen.tile import Access, interleaved

MOST_ADDITIONS = 2  # a place, in 16 bits: of more the sums are in fp32
WIDE = 64  # elements of rows that blocks of columns fill by themselves
MAX_INT32 = 2**31 - 2**17  # a block's last index may lie past the last element


@dataclass
class Scheduled(Addresses):
    """A launch being put together. buffers: beside those of the context's scratch memory. Where a kernel has
    several launches, only: whether a call takes this one; suffix: of its name."""

    buffers: list[Buffer] = field(default_factory=list)
    only: Expr = field(default_factory=lambda: as_expr(1))
    suffix: str = ""

    printer: ClassVar[type[FunctionPrinter]] = FunctionPrinter
    cost_model: ClassVar[type[Cost]] = Cost

    @property
    def name(self) -> str:
        return f"{self.kernel.name}{self.suffix}"

    @cached_property
    def sizes(self) -> Mapping[str, Expr]:
        return {"p": self.extent(self.tile.p), "q": self.extent(self.tile.q)}

    def is_looped(self, setting: Setting) -> bool:
        return setting.looped and self.tile.reduced is not None

    def piece(self, setting: Setting) -> Piece | None:
        """The piece of a setting in which a program has a part of everything."""
        is_row = self.is_looped(setting) and setting.p == 1
        return piece_of(self.kernel, self.tile, self.layout) if is_row else None

    def cost(self, setting: Setting) -> Expr:
        """Predicted time, in picoseconds."""
        model = self.cost_model(self.kernel, self.tile, self.layout, self.context)
        return select(self.only, model.predicted(setting, self.programs(setting)), 0)

    def launch(self, setting: Setting) -> Launch:
        return combo.launch([self.printed(setting)])

    def printed(self, setting: Setting, is_behind: bool = False) -> combo.Printed:
        """is_behind: in a launch whose first programs do something else."""
        kernel = self.kernel
        if setting.realigned:
            self.realigned = max(per_16_bytes(kernel.buffer(v.buffer)) for v in kernel.accesses)
        self.turns_results = setting.turns_results(self.tile, self.layout)
        accesses = {v.number: self.access(v) for v in kernel.accesses}
        self._require_layout(setting)
        if setting.vectors:
            self.require_vectors(setting)
        self.require_fits(setting)
        self._require_few_additions()
        text, ints = self._print(accesses, setting, is_behind)
        pointers = {f"ptr_{b.name}": self._pointer(b, setting) for b in kernel.buffers} | self.scratch_args(setting)
        numbers = {f"arg_{v.data}": self.context.op.float(v.data, "fp64") for v in kernel.values if v.op == "number"}
        blocks: dict[str, Arg] = {"BLOCK_P": Const(setting.p)} if self.tile.p else {}
        blocks["BLOCK_Q"] = Const(setting.q)
        programs = select(self.only, self.programs(setting), 0)
        # Nothing to put is no reason not to write the base.
        is_put = any(v.op == "store" and v.data for v in kernel.values)
        when = programs > 0 if is_put or self.only.value != 1 else 1
        return combo.Printed(
            self.name, text, {**pointers, **numbers, **ints, **blocks}, programs, setting.warps,
            2 if self.is_looped(setting) else 1, setting.registers, when, debug.OPTIONS if self.context.debug else {},
        )  # fmt: skip

    # --- What kinds differ in ---

    def launches(self, setting: Setting) -> list[Launch]:
        """The kernel's launch, and what must come before and after it."""
        return [self.launch(setting)]

    def programs(self, setting: Setting) -> Expr:
        if setting.spread:
            return self.programs_spread(setting)
        blocks = {"p": setting.p, "q": setting.q}
        total = self.extent(self.tile.batch)
        for n, axes in (("p", self.tile.p), ("q", self.tile.q)):
            if axes and n != self.tile.reduced:
                total = total * ceil_div(self.extent(axes), blocks[n])
        return total

    def programs_spread(self, setting: Setting) -> Expr:
        """The number of programs where each block of a row has one of its own."""
        return self.extent(self.tile.p) * ceil_div(self.extent(self.tile.q) + max(self.realigned - 1, 0), setting.q)

    def scratch_args(self, setting: Setting) -> dict[str, Arg]:
        """Scratch memory beside that of the kernel's buffers."""
        return {}

    def require_fits(self, setting: Setting) -> None:
        """How long what is reduced may be."""
        if setting.spread:
            q_size, programs = self.sizes["q"], self.programs_spread(setting)
            self.require((q_size < MAX_INT32) & (programs < MAX_INT32 // 4), f"rows of fewer than {MAX_INT32} elements")
        elif self.tile.reduced and not self.is_looped(setting):
            self._require_block(setting, self.sizes[self.tile.reduced])
        elif not self.tile.reduced and setting.is_by_thread(self.tile, self.layout):
            fits = self.sizes["q"] <= setting.q
            self.require(fits | (self.only == 0), f"rows of at most {setting.q} elements")

    def require_vectors(self, setting: Setting) -> None:
        """All rows of the same number begin as far behind a vector's address."""
        self.require(self.sizes["q"] >= EDGE, f"rows of at least {EDGE} elements")
        all_rows = [row for of in self.rows_of.values() for row in of]
        if not self.tile.p:
            all_rows = [(as_expr(0), as_expr(0)), *all_rows]  # all begin at an address of 16 bytes
        self.require(bool(all_rows), "rows without gaps")
        for base, step in all_rows:
            for mine, first in zip((base, step), all_rows[0], strict=True):
                if not mine.same(first):
                    self.require((mine - first) % VECTOR == 0, "rows that begin alike beside the addresses of vectors")

    # --- What is taken for granted ---

    def _require_layout(self, setting: Setting) -> None:
        """Requires of strides and sizes what this layout takes for granted."""
        p_size, q_size = self.sizes["p"], self.sizes["q"]
        if setting.realigned:
            self.require(q_size > 0 if self.row else False, "something to read in rows")
        if interleaved(self.kernel, self.layout):
            width, vector = self.extent(self.tile.q[1:]), max(map(per_16_bytes, self.kernel.buffers))
            is_better = (width % vector != 0) | (width < WIDE)
            self.require(is_better, f"rows that are no whole vectors, or of fewer than {WIDE} elements")
        if self.layout.aligned and not self.unit:
            self.require(False, "something to read in rows")
        if self.layout.merged:
            self.require((p_size < MAX_INT32) & (q_size < MAX_INT32), f"fewer than {MAX_INT32} rows and columns")
        if (multiple := self._row_multiple(setting)) > 1:
            self.require(q_size % multiple == 0, f"rows of a multiple of {multiple} elements")

    def _require_few_additions(self) -> None:
        """Requires few additions of 16 bits, of which each is rounded. Elements are added to in pairs (device.add_16):
        of all of them the last has its other half as well."""
        for v in self.kernel.values:
            if v.op == "store" and v.data == "add" and v.dtype in ir.ROUNDED_SUMS:
                places = self.context.expr(ix.product(self.kernel.buffer(v.buffer).sizes))
                few = self.extent(self.kernel.axes) <= MOST_ADDITIONS * places
                self.require(few, f"at most {MOST_ADDITIONS} additions a place, on average")
                has_pairs = places % 2 == 0
                if v.buffer in self.context.tensors:  # scratch memory begins on more than 4 bytes
                    has_pairs &= self.context.tensors[v.buffer].alignment >= 4
                self.require(has_pairs, f"an even number of places in {v.buffer}")

    def _row_multiple(self, setting: Setting) -> int:
        """The number of elements of which a row has a multiple, so that a mask cuts no vector of 16 bytes in two."""
        if self.piece(setting) is not None:
            return 16
        return max((per_16_bytes(self.kernel.buffer(n)) for n in self.unit), default=1) if self.layout.aligned else 1

    def _require_block(self, setting: Setting, size: Expr) -> None:
        """What is reduced at once fits a block, or its segments."""
        block = setting.p if self.tile.reduced == "p" else setting.row
        # Of rows in vectors what does not fill one is an edge, of fewer than two vectors' elements.
        block += (VECTOR - 1) * setting.vectors - max(self.realigned - 1, 0)
        self.require(size <= block, f"at most {block} elements to reduce")
        if setting.segments > 1:
            least = setting.row - setting.q + (EDGE - 3) * setting.vectors
            self.require(size > least, f"more than {least} elements to reduce")

    # --- Source and arguments ---

    def _print(self, accesses: Mapping[int, Access], setting: Setting, is_behind: bool) -> tuple[str, dict[str, Arg]]:
        """The function, and its integers."""
        width = "i64" if self.layout.wide else "i32"
        multiple = self._row_multiple(setting)
        sizes: dict[str, Arg] = {"q_size" if multiple == 1 else "q_vectors": Int(self.sizes["q"] // multiple, width)}
        if self.tile.p:
            sizes["p_size"] = Int(self.sizes["p"], width)
        piece = self.piece(setting)
        form = Form(
            looped=self.is_looped(setting),
            spread=setting.spread,
            segments=setting.segments,
            stages=setting.stages,
            rows=setting.p,
            columns=setting.q,
            rows_meet=self._rows_meet(setting),
            rereads=setting.rereads,
            ahead=setting.ahead,
            vectors=setting.vectors,
            multiple=multiple,
            realigned=self.realigned,
            row_start=self.row[0] if self.row else "",
            piece=piece,
            steps=interleaved(self.kernel, self.layout) if self.is_looped(setting) else None,
            read_later=self.context.read_after[self.kernel.name] if piece else frozenset(),
            by_thread=setting.is_by_thread(self.tile, self.layout),
            first=combo.FIRST if is_behind else "",
        )
        debug_op = self.context.op.name if self.context.debug else ""
        body = Body(self.kernel, self.tile, self.layout, accesses, self._size_arg, self.magic_arg, form, debug_op)
        text = self.printer(body).print(self.name, [combo.PARAMS])
        return text, {**sizes, **self.args}

    def _rows_meet(self, setting: Setting) -> bool:
        """Whether a thread has the same columns of all rows of a block, as Triton lays a block out over threads."""
        vector = VECTOR if self.layout.aligned or setting.vectors else 1
        return setting.q >= 32 * setting.warps * vector

    def _size_arg(self, name: str, expr: sympy.Expr, is_narrow: bool) -> str:
        """A size expression as an argument of the launch."""
        dtype = "i32" if is_narrow and self.layout.merged else "i64"
        return self.int_arg(name, self.context.expr(expr), dtype)

    def _pointer(self, b: ir.Buffer, setting: Setting) -> Arg:
        if b.name in self.context.scratch:
            is_stored = any(v.op == "store" and v.buffer == b.name for v in self.kernel.values)
            offset = as_expr(0)
            if b.merged:
                offset = self.sorted_from(b) if is_stored else self.sorted_into(b)
            return Scratch(self.context.scratch[b.name], b.dtype, offset)
        t = self.context.tensors[b.name]
        in_vectors = setting.vectors or setting.realigned
        aligned = b.name in (self.unit if self.layout.aligned else self.rows_of if in_vectors else ())
        if aligned:
            self.require(t.alignment >= 16, f"{b.name} on 16 bytes")
        return Pointer(t, b.dtype, aligned)

    def sorted_from(self, b: ir.Buffer) -> Expr:
        """The begin of the half of a sort's buffer that what sorts it reads first."""
        return as_expr(0)

    def sorted_into(self, b: ir.Buffer) -> Expr:
        """The begin of the half that the last merge has written, or that another sort has left its result in."""
        size = half(self.context.expr(ix.product(b.sizes)), b.dtype)
        return sorts.passes(self.context.expr(b.sizes[-1])) % 2 * size
