"""Predicted time of a launch with a setting: by the kind of what it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tk.aot.expr import Expr, as_expr, ceil_div, device, maximum, minimum, mode, select
from tk.aot.spec import ITEMSIZE
from tk.codegen import along, ir
from tk.codegen.pieces import piece_of
from tk.codegen.printing.body import EDGE
from tk.codegen.printing.loops import loops
from tk.codegen.scheduling import sorts
from tk.codegen.scheduling.context import Context
from tk.codegen.scheduling.settings import Setting
from tk.codegen.tile import Layout, Tile, coefficients

# Predicted time, fitted to what tools/time_settings.py measured on an H200: picoseconds.
START, BLOCK = 335_000, 374_000  # of a program, for each pass; of a block that waits for its loads
INSTRUCTION = 29  # 1/1024 ps, of one for one element when all multiprocessors issue
REDUCTION = 64  # a warp's part in a reduction over the block
SHUFFLE = 4  # instructions of a lane for each two steps of a reduction over lanes, of which one waits for the other
WIDE_START = 1_000_000  # ps, of a program that works out places in 64 bits from all strides
AFTER, AFTER_REDUCED = 700_000, 500_000  # ps, of a launch beside all else
PER_THREAD = 40  # instructions of a thread that do not depend on how many elements it has
FETCH = 650  # ps, of an instruction that a multiprocessor runs for the first time: its code comes from memory
MOST_WARPS = 64  # resident on a multiprocessor
WALK_REDUCTION = 250_000  # ps, of a walk that waits for a sum over the row
WALK_REGISTERS = 40, 6  # of a thread, and for each element that it has of a block
STRIDED = 105  # instructions of an access whose place is put together from all strides
SECTOR = 32  # bytes that memory moves at once
LINE = 128  # bytes that a warp's access has of the L1 cache in a cycle: of what lies apart it takes one for each lane
REUSED = 4  # of which a block's lines take so much less that it uses whole
LINE_TIME = 140  # 1/1024 ps, of a line when all multiprocessors take theirs, shared out to the 32 elements of a warp
L2_KEPT, L2_LOST = 16 << 20, 40 << 20  # of the rows under way a loop finds all again, and nothing of so many more
INSTRUCTIONS: Mapping[str, int] = {
    "exp": 6, "exp2": 5, "log": 6, "log2": 5, "div": 8, "sqrt": 8, "rsqrt": 4, "reciprocal": 8, "sigmoid": 14,
    "erf": 40, "erfc": 20, "tanh": 30, "sin": 40, "cos": 40, "tan": 60, "pow": 60, "lgamma": 100, "expm1": 25,
    "log1p": 25, "random": 40, "constant": 0, "number": 0, "index": 2,
}  # fmt: skip

TURNED = 8  # instructions for an element of a block that is turned by way of shared memory
LOOK_BACK = 9_000  # picoseconds of a program that looks back, beside all else
REALIGNED = 5  # instructions for an element of a load or store of a realigned row
# Of what has one value a column: neighbours in one load; by itself, beside vectors or one row with a step.
COLUMN = 5, 16
# Of a scan, by what it puts together: instructions for an element in a stage, and picoseconds that a block waits for
# every element that a thread has of it. In a vector neighbours are one thread's.
COMBINED: Mapping[str, int] = {"sum": 12, "prod": 12, "max": 45, "min": 45, "logaddexp": 120}
COMBINED_OWN = 25  # by a function of the user's
SCAN_WAIT = 240_000
COLUMN_WAIT = 15_000, 80_000  # the same where a thread has the whole column; of logarithms
SEARCHED, SEARCH_WAIT = 1_000, 4_500_000  # instructions for an element, and picoseconds, of a search in thousands
IN_ORDER = 8  # elements that a thread has in a row where it loads vectors
EXCHANGE: Mapping[str, int] = {"i32": 8, "i64": 18}  # instructions for an element in a stage of a sort
MERGED = 10  # picoseconds for an element in a merge of runs
RADIX_PASS = 9  # picoseconds for an element in the launches that sort by a digit of eight bits
# Picoseconds of a pass over as many rows as a multiprocessor sorts at once by digits, and for each warp of a row more.
DIGIT_PASS: Mapping[str, tuple[int, int]] = {"i32": (2_000_000, 45_000), "i64": (3_300_000, 80_000)}


@dataclass(frozen=True)
class Work:
    """What one launch does. read, written: accesses of the buffers that have a value for every element, those that are
    read would be again by a loop. computed: instructions for an element. accesses, columns: loads and stores along
    rows; those of them that have one value a column are the latter. passes: how often a loop goes over what is
    reduced."""

    read: tuple[ir.Value, ...]
    written: tuple[ir.Value, ...]
    computed: int
    accesses: int
    columns: int
    reductions: int
    passes: int


@dataclass
class Cost:
    """The cost of a launch. Only the order of two settings counts: `tools/time_settings.py judge` says how far off it
    is."""

    kernel: ir.Kernel
    tile: Tile
    layout: Layout
    context: Context

    @cached_property
    def sizes(self) -> dict[str, Expr]:
        return {"p": self.context.extent(self.tile.p), "q": self.context.extent(self.tile.q)}

    def predicted(self, setting: Setting, programs: Expr) -> Expr:
        """Picoseconds: what takes longest of moving bytes, issuing instructions, and waiting where programs are few."""
        work, reduced = self.work, self.tile.reduced
        looped = setting.looped and reduced is not None
        passes = work.passes if looped else 1
        block = {"p": setting.p if self.tile.p else 1, "q": setting.row}
        across = "p" if reduced == "q" else "q"  # the dimension that is not reduced, where one is
        kept = self.context.extent(self.batch)
        for n in ("p", "q"):
            kept = kept * self.sizes[n] if n != reduced else kept
        if reduced is not None:
            # The order of a sum follows from the setting: it may not depend on how many rows came with it.
            programs = select(mode("batch_invariant"), 1024, programs)
            kept = select(mode("batch_invariant"), 1024 * block[across], kept)
        elements = kept * self.sizes[reduced] if reduced else kept
        blocks = self.blocks(setting, kept, programs)
        resident = self.resident(setting)
        # Of what a loop reads again, the share that the L2 cache no longer has, in sixteenths.
        lost = as_expr(0)
        read = self._bytes(work.read, setting)
        written = self._bytes(work.written, setting)
        if passes > 1:
            live = self.sizes[reduced or "q"] * (read * block[across])
            live = maximum(live * minimum(device.sm_count * resident, programs) - L2_KEPT, 0)
            lost = minimum(live // (L2_LOST // 16), 16)
        moved = elements * maximum(read + written, 1) + elements * ((passes - 1) * read) * lost // 16
        if not looped or passes > 1:  # while a block or pass ends nothing is loaded but by its neighbours
            moved = moved * (2 * resident + 1) // (2 * resident)
        moved = moved // 4  # 0.25 ps a byte: 4 TB/s
        full = ceil_div(programs, device.sm_count) * device.sm_count * blocks
        instructions = block["p"] * block["q"] * self.instructions(setting)
        instructions += 32 * setting.warps * PER_THREAD + setting.vectors * self._edge_instructions(setting)
        # A scan's carry is one, too. The edges of several rows are reduced for themselves.
        reductions = work.reductions * (1 + (setting.vectors and setting.p > 1))
        reductions += len(along.scans(self.kernel)) * (4 if looped else 1)
        issued = full * (instructions * INSTRUCTION // 1024 + reductions * setting.warps * passes * REDUCTION)
        shuffled = passes * work.reductions * self._shuffles(setting)
        issued += ceil_div(programs, device.sm_count) * device.sm_count * (shuffled * INSTRUCTION // 1024)
        issued += elements * self._lines(setting) * LINE_TIME // 1024
        waves = ceil_div(programs, device.sm_count * resident)
        start = START * (1 + passes) + WIDE_START * self.layout.wide
        waited = waves * (start + blocks * (passes * self.waits(setting)))
        waited += self.code(setting) * FETCH
        more = self.more(setting, elements, programs)
        # All but the longest is hidden, to a tenth.
        return (maximum(maximum(moved, issued), waited) * 13 + moved + issued + waited) // 16 + more

    # --- What kinds differ in ---

    @property
    def batch(self) -> tuple[ir.Axis, ...]:
        """Axes of which there are more blocks."""
        return self.tile.batch

    def blocks(self, setting: Setting, kept: Expr, programs: Expr) -> Expr:
        """How many blocks a program runs through."""
        reduced = self.tile.reduced
        if not setting.looped or reduced is None:
            return as_expr(1)
        return ceil_div(self.sizes[reduced], setting.p if reduced == "p" else setting.row)

    def resident(self, setting: Setting) -> int:
        """Programs on a multiprocessor."""
        return max(1, MOST_WARPS // setting.warps)

    def waits(self, setting: Setting) -> int:
        """What a block waits for its loads."""
        return BLOCK if self._in_vectors(setting) else BLOCK * 3 // 2

    def _is_by_thread(self, setting: Setting) -> bool:
        return setting.is_by_thread(self.tile, self.layout)

    def _in_vectors(self, setting: Setting) -> bool:
        return self.layout.aligned or setting.vectors or setting.realigned or self._is_piece(setting)

    def _is_piece(self, setting: Setting) -> bool:
        """Whether a program runs through whole blocks of a part of everything."""
        is_row = setting.looped and setting.p == 1
        return is_row and piece_of(self.kernel, self.tile, self.layout) is not None

    def instructions(self, setting: Setting) -> int:
        """Instructions for each element of a block: what is computed, and what loads and stores take."""
        access = of_column = 2 if self.layout.aligned else STRIDED
        if self.layout.merged and not self.layout.aligned:
            is_single = setting.vectors or (setting.p == 1 and not self.layout.dense)
            of_row = 16 // setting.row if self._is_by_thread(setting) else min(512 // setting.row, 16)
            access, of_column = 12 + of_row, COLUMN[is_single]
        if setting.vectors or setting.realigned or self._is_piece(setting):
            access = REALIGNED if setting.realigned else 2
        turned = TURNED * sum(self._is_turned(v, setting) for v in self.work.written)
        return self.work.computed + self.work.accesses * access + self.work.columns * of_column + turned

    def _shuffles(self, setting: Setting) -> int:
        """Instructions of all lanes for one reduction over rows that they share."""
        if self.tile.reduced != "q" or self._is_by_thread(setting):
            return 0
        vector = self._vector(setting)
        lanes = min(32, max(1, setting.q // vector))
        warps = min(setting.warps, max(1, setting.q // (vector * lanes)))  # that share a row
        steps = lanes.bit_length() - 1
        return max(1, setting.p * warps * lanes // 32) * 32 * steps * (steps - 1) * SHUFFLE

    def _vector(self, setting: Setting) -> int:
        """Neighbours in a row that a thread has."""
        sizes = [ITEMSIZE[self.kernel.buffer(v.buffer).dtype] for v in (*self.work.read, *self.work.written)]
        return 16 // max(sizes, default=4) if self._in_vectors(setting) else 1

    def code(self, setting: Setting) -> int:
        """Instructions, which are printed once for each of a thread's elements. What reductions have was not told from
        what they wait for."""
        if self.tile.reduced is not None:
            return 0
        return setting.p * setting.row // (32 * setting.warps) * self.instructions(setting)

    # --- Bytes ---

    def _lines(self, setting: Setting) -> Expr:
        """Lines of the L1 cache that the accesses of 32 elements take beside one each."""
        total = as_expr(0)
        for v in (*self.work.read, *self.work.written):
            total = total + self._lines_of(v, setting)
        return total

    def _lines_of(self, v: ir.Value, setting: Setting) -> Expr:
        """A warp has elements that are neighbours along q, and of short rows those of several."""
        if self._has_neighbours(v, setting) or (steps := self._steps(v)) is None:
            return as_expr(0)
        along_q, size = min(32, setting.row), ITEMSIZE[self.kernel.buffer(v.buffer).dtype]
        next_row = self._apart(self.tile.p, steps) * size
        if self._is_by_thread(setting):  # a warp has an element of each of 32 rows
            return maximum(minimum(next_row, LINE) * 32 // LINE, 1) - 1
        lines = maximum(minimum(self._apart(self.tile.q, steps) * size, LINE) * along_q // LINE, 1)
        if along_q < 32 and self.tile.p:
            lines = lines * maximum(minimum(next_row, LINE) * (32 // along_q) // LINE, 1)
        lines = lines - 1
        if setting.p * size >= LINE:  # a program's other rows have the rest of each line, while it is there
            lines = select(next_row == size, lines // REUSED, lines)
        return lines

    def _has_neighbours(self, v: ir.Value, setting: Setting) -> bool:
        """Whether what lies beside each other in the block does in memory, whatever the strides."""
        return self.layout.dense or self._is_turned(v, setting)

    def _is_turned(self, v: ir.Value, setting: Setting) -> bool:
        """Whether a block is turned before it is written."""
        return v.op == "store" and (self.layout.across or setting.turns_results(self.tile, self.layout))

    def _steps(self, v: ir.Value) -> dict[str, Expr] | None:
        """How far apart neighbours along each axis lie, in elements; None where that depends on what is read."""
        factors = coefficients(v, self.kernel.axes)
        if factors is None:
            return None
        buffer = self.kernel.buffer(v.buffer)
        return {a.name: self.context.step(buffer, of) for a, of in zip(self.kernel.axes, factors, strict=True)}

    def _bytes(self, accesses: Sequence[ir.Value], setting: Setting) -> Expr:
        """The bytes of memory that are moved for an element."""
        total = as_expr(0)
        for v in accesses:
            total = total + self._bytes_of(v, setting)
        return total

    def _bytes_of(self, v: ir.Value, setting: Setting) -> Expr:
        """Its own where neighbours lie beside each other, else a sector at most. The rest of a load's sector is in the
        L1 cache for the next rows of the block, where they have all of it."""
        buffer = self.kernel.buffer(v.buffer)
        size = ITEMSIZE[buffer.dtype]
        if self._has_neighbours(v, setting) or (steps := self._steps(v)) is None:
            return as_expr(size)
        found = self._apart(self.tile.q, steps) * size
        next_row = self._apart(self.tile.p, steps) * size
        if self.tile.p:  # a block's part of a row takes whole sectors, but for what the next row has of them
            piece = maximum(minimum(self.sizes["q"], setting.row), 1)
            found = maximum(found, minimum(next_row, SECTOR) // piece)
        if self._is_by_thread(setting):
            # A line that was read holds a thread's other elements too; what is written goes to L2 each time.
            found = minimum(found, next_row) if v.op == "load" else next_row
        elif v.op == "load" and setting.p * size >= SECTOR:
            found = minimum(found, next_row)
        return minimum(found, SECTOR)

    def _apart(self, axes: Sequence[ir.Axis], steps: Mapping[str, Expr]) -> Expr:
        """How many elements lie from one place to the next along the last of these axes that has several."""
        step = as_expr(1)
        for a in axes:
            step = select(self.context.extent([a]) == 1, step, steps[a.name])
        return maximum(maximum(step, 0 - step), 1)

    def more(self, setting: Setting, elements: Expr, programs: Expr) -> Expr:
        """What other launches take, and waiting for other programs."""
        return as_expr(AFTER if self.tile.reduced is None else AFTER_REDUCED)

    def _edge_instructions(self, setting: Setting) -> int:
        """Instructions of all threads, each of which has an element of a row's edges, whether there is one or not, and
        more if the block's rows have more. Of elements that run together one program has edges; the others ask whether
        they are it."""
        if self.tile.reduced is None:
            return 32 * setting.warps
        work = self.work
        of_one = work.computed + 6 * (work.accesses + work.columns + work.reductions)
        return max(32 * setting.warps, setting.p * EDGE) * of_one

    @cached_property
    def work(self) -> Work:
        """The work with the values and buffers at every element of the tile: a bias or a row's sum hardly counts."""
        dims = [{a.name for a in axes} for axes in (self.tile.p, self.tile.q) if axes]
        read: dict[str, ir.Value] = {}
        written: dict[str, ir.Value] = {}
        for v in self.kernel.accesses:
            names = {s.name for e in v.index for s in e.free_symbols}
            if all(names & d for d in dims):
                (read if v.op == "load" else written)[v.buffer] = v
        inside = [v for v in self.kernel.values if all(v.axes & d for d in dims)]
        along_q = {a.name for a in self.tile.q}
        accesses = [v for v in self.kernel.values if v.op in ("load", "store") and v.axes & along_q]
        columns = [v for v in accesses if not all(v.axes & d for d in dims)]
        reductions = [v for v in self.kernel.values if v.op == "reduce"]
        computed = sum(INSTRUCTIONS.get(v.op, 1) for v in inside if v.op not in ("load", "store"))
        computed += sum(5 if v.data in ir.PLACES else 2 for v in reductions)
        passes = loops(self.kernel, self.tile)
        return Work(tuple(read.values()), tuple(written.values()), computed,
                    len(accesses) - len(columns), len(columns), len(reductions), passes)  # fmt: skip


class SearchCost(Cost):
    """The cost of a dozen steps, each of which reads from somewhere else. It is not known how many there are."""

    def instructions(self, setting: Setting) -> int:
        return super().instructions(setting) + SEARCHED

    def code(self, setting: Setting) -> int:
        """The steps are a loop."""
        return 0

    def waits(self, setting: Setting) -> int:
        return super().waits(setting) + SEARCH_WAIT


class WalkCost(Cost):
    """A program runs through many blocks of rows."""

    @property
    def batch(self) -> tuple[ir.Axis, ...]:
        return ()

    def blocks(self, setting: Setting, kept: Expr, programs: Expr) -> Expr:
        return ceil_div(kept, programs * setting.p)

    def resident(self, setting: Setting) -> int:
        """What it keeps of its rows and adds up over them takes registers."""
        elements = setting.p * setting.row // (32 * setting.warps)
        wanted = WALK_REGISTERS[0] + WALK_REGISTERS[1] * elements
        most = min(255, 65_536 // (32 * setting.warps), *([setting.registers] if setting.registers else []))
        return max(1, min(super().resident(setting), 65_536 // (32 * setting.warps * min(wanted, most))))

    def waits(self, setting: Setting) -> int:
        """A program's next rows are not loaded before these are done, unless the setting says so."""
        of_loads = super().waits(setting) * (1 if setting.ahead else 2) // setting.stages
        return of_loads + self.work.reductions * WALK_REDUCTION


class ScanCost(Cost):
    @cached_property
    def scans(self) -> tuple[ir.Scanned, ...]:
        """Each once: of a running extreme its value and its place are one."""
        found = {along.scan_key(v): v.data for v in along.scans(self.kernel)}
        return tuple(found.values())

    def instructions(self, setting: Setting) -> int:
        stages, by = self.stages(setting)
        own = sum(COMBINED_OWN if s.combine else COMBINED[s.kind] for s in self.scans)
        return super().instructions(setting) + own * stages // by

    def stages(self, setting: Setting) -> tuple[int, int]:
        """How often an element is put together with others, as a fraction: a thread does so with what it has in a row,
        a warp by a shuffle for each power of two of its lanes."""
        if self.is_of_threads(setting):
            return 1, 1
        by = IN_ORDER if self._in_vectors(setting) else 1
        return by + min(32, setting.row).bit_length() - 1, by

    def is_of_threads(self, setting: Setting) -> bool:
        """Whether a thread has all of what is scanned."""
        return self._is_by_thread(setting)

    def waits(self, setting: Setting) -> int:
        if self.is_of_threads(setting):
            length = setting.p if self.tile.reduced == "p" else setting.row
            return super().waits(setting) + sum(COLUMN_WAIT[s.kind == "logaddexp"] * length for s in self.scans)
        each = setting.p * setting.row // (32 * setting.warps)
        hidden = [2 if self._in_vectors(setting) and s.kind != "logaddexp" else 1 for s in self.scans]
        return super().waits(setting) + sum(SCAN_WAIT * each // by for by in hidden)

    def more(self, setting: Setting, elements: Expr, programs: Expr) -> Expr:
        return programs * LOOK_BACK + 4_000_000 if setting.spread else super().more(setting, elements, programs)


class OuterScanCost(ScanCost):
    """The cost of a scan along columns, each of which is one thread's."""

    def is_of_threads(self, setting: Setting) -> bool:
        return True


class SortCost(Cost):
    """The cost of a sort in a block, by exchanges."""

    @property
    def dtype(self) -> str:
        """The dtype of the numbers that are sorted."""
        return along.sorts(self.kernel)[0].dtype

    def instructions(self, setting: Setting) -> int:
        return super().instructions(setting) + EXCHANGE[self.dtype] * sorts.stages(setting.q, looped=setting.looped)


class RunsCost(SortCost):
    def more(self, setting: Setting, elements: Expr, programs: Expr) -> Expr:
        """Every merge reads and writes all."""
        merged = sorts.passes(self.sizes["q"]) * (elements * MERGED + 10_000_000)
        return super().more(setting, elements, programs) + merged


class RadixCost(SortCost):
    """The cost of a sort by launches of their own: three for each digit."""

    def instructions(self, setting: Setting) -> int:
        return super(SortCost, self).instructions(setting)

    def more(self, setting: Setting, elements: Expr, programs: Expr) -> Expr:
        """Every digit's launches read all twice and write it once, in whole blocks."""
        bits = along.sorts(self.kernel)[0].data.radix
        passes = sorts.digit_passes(bits) * (programs * (setting.q * RADIX_PASS) + 9_000_000)
        return super().more(setting, elements, programs) + passes


class DigitsCost(SortCost):
    """The cost of a sort by a launch of its own, beside one that writes the numbers."""

    def instructions(self, setting: Setting) -> int:
        return super(SortCost, self).instructions(setting)

    def more(self, setting: Setting, elements: Expr, programs: Expr) -> Expr:
        """The cost of the launch that sorts by digits: its passes, and what it reads and writes."""
        size, (of_pass, of_warp) = ITEMSIZE[self.dtype], DIGIT_PASS[self.dtype]
        resident = 32 // setting.warps
        rows = maximum(elements // maximum(self.sizes["q"], 1), device.sm_count * resident // 3)
        passes = size * 2 * (of_pass + of_warp * setting.warps)
        own = rows * passes // (device.sm_count * resident) + elements * size // 2 + 1_000_000
        return super().more(setting, elements, programs) + own
