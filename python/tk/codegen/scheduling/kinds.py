"""Kinds of launches: what a kernel does decides which settings it has, what is launched, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import sympy

from tk.aot.expr import Expr, ceil_div
from tk.aot.spec import ITEMSIZE, Arg, Buffer, Const, Int, Launch, Scratch
from tk.codegen import along, device, ir
from tk.codegen import index as ix
from tk.codegen.interleaved import steps_of
from tk.codegen.pieces import has_parts
from tk.codegen.printing.body import VECTOR
from tk.codegen.printing.printer import ScanFunctionPrinter, SortFunctionPrinter, WalkFunctionPrinter
from tk.codegen.scheduling import sorts
from tk.codegen.scheduling.context import Context, half
from tk.codegen.scheduling.cost import (
    DigitsCost,
    OuterScanCost,
    RadixCost,
    RunsCost,
    ScanCost,
    SearchCost,
    SortCost,
    WalkCost,
)
from tk.codegen.scheduling.schedule import Scheduled
from tk.codegen.scheduling.settings import FEW, Setting, settings_of
from tk.codegen.tile import ROWS, Layout, Tile, choose_tile, coefficients, is_for, laid_out

SHORT = 2048  # elements of a row of which one program reduces several
SEVERAL = 4  # blocks beside each other, which a row fills better than a wide one
SEVERAL_ROWS = 16  # of a block that reduces columns
MANY_ROWS = 512  # that one program adds up: of more it loads several times as many at once
LONGEST_AS_COLUMNS = 32  # elements of rows that begin anywhere, several to a block: so few are read as columns
MOST_DIGITS = 64 << 10  # bytes of a row that is sorted by digits: shared memory holds it twice


# --- Launches ---


class Walk(Scheduled):
    """A program runs through many blocks of rows."""

    printer = WalkFunctionPrinter
    cost_model = WalkCost

    def programs(self, setting: Setting) -> Expr:
        return self.extent(self.tile.batch)

    def require_fits(self, setting: Setting) -> None:
        super().require_fits(setting)
        if setting.p > 1 and not self.layout.aligned:
            self.require(self.sizes["q"] > LONGEST_AS_COLUMNS, f"rows of more than {LONGEST_AS_COLUMNS} elements")

    def require_vectors(self, setting: Setting) -> None:
        """Requires vectors, and that the rows which one program walks begin alike."""
        super().require_vectors(setting)
        programs = self.programs(setting)
        is_alike = (programs * setting.p % VECTOR == 0) | (programs * setting.p >= self.sizes["p"])
        self.require(is_alike, f"programs that are a multiple of {VECTOR}")


class Scan(Scheduled):
    """A scan along rows, which programs may share."""

    printer = ScanFunctionPrinter
    cost_model = ScanCost

    def launches(self, setting: Setting) -> list[Launch]:
        main = self.launch(setting)
        if not setting.spread:
            return [main]
        flags = Int(self.programs_spread(setting) * 2 + 1)
        args = {"ptr": main.args["ptr_state"], "n": flags, "BLOCK": Const(1024)}
        return [Launch(device.clear, args, (ceil_div(flags.value, 1024), 1, 1)), main]

    def scratch_args(self, setting: Setting) -> dict[str, Arg]:
        """The scratch of a scan over programs: flags, and values for blocks and windows."""
        found: dict[str, Arg] = {}
        if not setting.spread:
            return found
        programs, v = self.programs_spread(setting), along.scans(self.kernel)[0]
        carried = along.carried(self.kernel, v, self.layout.wide)
        wanted = [("ptr_state", "i32", programs * 2 + 1)]
        wanted += [(f"ptr_{what}_{i}", t, programs) for what in ("blocks", "windows") for i, t in enumerate(carried)]
        for name, dtype, count in wanted:
            found[name] = Scratch(len(self.context.scratch) + len(self.buffers), dtype)
            self.buffers.append(Buffer(count * ITEMSIZE[dtype]))
        return found


class OuterScan(Scheduled):
    """A scan of columns: a thread has neighbours along one, and no other thread any of it."""

    cost_model = OuterScanCost


class Search(Scheduled):
    """A search for a place for each element."""

    cost_model = SearchCost


class Sort(Scheduled):
    """A row in a block."""

    printer = SortFunctionPrinter
    cost_model = SortCost


class Top(Sort):
    """The first few of what is sorted: as many as a block holds are kept while a row is run through."""

    def require_fits(self, setting: Setting) -> None:
        if not self.is_looped(setting):
            super().require_fits(setting)
            return
        for limit in along.limits(self.kernel):
            self.require(self.context.expr(limit) <= setting.q, f"at most {setting.q} elements to keep")


class Narrow(Top):
    """The same in numbers of 32 bits."""

    def require_fits(self, setting: Setting) -> None:
        super().require_fits(setting)
        if self.is_looped(setting):
            self.require(self.sizes["q"] <= along.LONGEST_NARROW, f"rows of at most {along.LONGEST_NARROW} elements")


class Runs(Sort):
    """Blocks of a row one by one, which are merged in pairs, pass by pass."""

    cost_model = RunsCost

    def launches(self, setting: Setting) -> list[Launch]:
        return [self.launch(setting), *self._merges()]

    def _merges(self) -> Iterator[Launch]:
        rows, n = self.sizes["p"], self.sizes["q"]
        groups: dict[tuple[int, ...], dict[int, tuple[int, str]]] = {}
        for v in self.kernel.values:
            if v.op == "store":
                of, number = self.kernel.value(v.args[0]), self.context.scratch[v.buffer]
                groups.setdefault(of.args, {})[of.data.part] = (number, v.dtype)
        for group in groups.values():
            yield from sorts.merges(group, rows, n, lambda dtype: half(rows * n, dtype))


class Digits(Sort):
    """The kernel writes the numbers, in blocks of their own programs; a launch of its own sorts them by their digits.
    The setting is that one's."""

    cost_model = DigitsCost

    def launches(self, setting: Setting) -> list[Launch]:
        main = self.launch(replace(setting, q=sorts.TILE, warps=4, spread=True))
        rows, n = self.sizes["p"], self.sizes["q"]
        self.require(n <= setting.q, f"at most {setting.q} elements to sort")
        (store,) = (v for v in self.kernel.values if v.op == "store")
        number, size = self.context.scratch[store.buffer], half(rows * n, store.dtype)
        return [main, sorts.digits(number, store.dtype, rows, n, size, setting.q, setting.warps)]


class Radix(Sort):
    """The kernel writes the numbers; launches of their own sort them digit by digit, whose blocks are the setting's."""

    cost_model = RadixCost

    @property
    def bits(self) -> int:
        """The bits of a key."""
        (v,) = along.sorts(self.kernel)
        assert isinstance(v.data, ir.Sorted)
        return v.data.radix

    def sorted_from(self, b: ir.Buffer) -> Expr:
        """The half that is sorted from, so that the last digit's pass ends where the last merge of as long rows
        does."""
        n = self.context.expr(b.sizes[-1])
        size = half(self.context.expr(ix.product(b.sizes)), b.dtype)
        return (sorts.passes(n) + sorts.digit_passes(self.bits)) % 2 * size

    def launches(self, setting: Setting) -> list[Launch]:
        main = self.launch(replace(setting, q=sorts.TILE, warps=4))
        rows, n = self.sizes["p"], self.sizes["q"]
        self.require(n > sorts.TILE, f"more than {sorts.TILE} elements to sort")
        (store,) = (v for v in self.kernel.values if v.op == "store")
        counts = len(self.context.scratch) + len(self.buffers)
        self.buffers.append(Buffer(rows * sorts.counts_of_row(n, setting.q) * ITEMSIZE["i32"]))
        numbers, size = self.context.scratch[store.buffer], half(rows * n, store.dtype)
        passes = sorts.by_radix(numbers, counts, store.dtype, rows, n, size, self.bits, setting.q, setting.warps)
        return [main, *passes]


# --- Settings ---

Settings = tuple[Setting, ...]


def _all(kernel: ir.Kernel, tile: Tile, among: Settings) -> Settings:
    return among


def _of_rows(kernel: ir.Kernel, tile: Tile, among: Settings) -> Settings:
    """Several rows a block only where there are several."""
    return tuple(s for s in among if tile.p or s.p == 1)


def _of_elements(kernel: ir.Kernel, tile: Tile, among: Settings) -> Settings:
    """Rows of a single element only where there may be any: the last of the leading dimensions has more, for those of
    one are dropped, and so has what counts pairs."""
    size = tile.q[-1].size
    is_one = len(tile.q) == 1 and size.is_Symbol and size not in (ir.LEADING, *ir.LEADING_SIZES)
    return tuple(s for s in among if is_one or s.q > 1)


def _of_reduced_rows(kernel: ir.Kernel, tile: Tile, among: Settings) -> Settings:
    """A group of channels has more than one element."""
    return tuple(s for s in among if s.q > 1 or len(tile.q) == 1)


def _of_columns(kernel: ir.Kernel, tile: Tile, among: Settings) -> Settings:
    """Few elements at once only where there may be few."""
    return tuple(s for s in among if s.looped or s.p >= SEVERAL_ROWS or not has_parts(kernel))


def _of_scan(kernel: ir.Kernel, tile: Tile, among: Settings) -> Settings:
    can_be_spread = along.can_be_spread(kernel)
    can_be_realigned = bool(tile.p) and has_rows(kernel, tile) and along.can_be_realigned(kernel)
    fitting = tuple(s for s in _of_rows(kernel, tile, among)
                    if (can_be_spread or not s.spread) and (can_be_realigned or not s.realigned))  # fmt: skip
    # What serves a call that nothing else takes serves a single row as well.
    found = fitting or tuple(replace(s, p=1, q=s.p * s.q) for s in among[:1] if s.looped)
    # What is not realigned has a single element a load: where both are there, the first is enough. But beside 16 bytes
    # one program alone would run through a long row.
    return tuple(s for s in found
                 if s == found[0] or s.realigned or s.spread or replace(s, realigned=True) not in found)  # fmt: skip


def _of_digits(kernel: ir.Kernel, tile: Tile, among: Settings) -> Settings:
    size = ITEMSIZE[along.sorts(kernel)[0].dtype]
    return tuple(s for s in _of_rows(kernel, tile, among) if s.row * size <= MOST_DIGITS)


def has_rows(kernel: ir.Kernel, tile: Tile) -> bool:
    """Whether any access is to rows that may be without gaps."""
    for v in kernel.accesses:
        factors = coefficients(v, kernel.axes)
        if factors is None or v.op == "search":
            continue
        of = dict(zip((a.name for a in kernel.axes), factors, strict=True))
        is_whole = all(of[a.name] for a in (*tile.p, *tile.q))
        if is_whole and tile.q and of[tile.q[-1].name] == {len(v.index) - 1: sympy.Integer(1)}:
            return True
    return False


def _writes_rows(kernel: ir.Kernel, tile: Tile) -> bool:
    """Whether anything is stored along q."""
    q = {a.name for a in tile.q}
    return any(v.op == "store" and v.axes & q for v in kernel.values)


def _searches(kernel: ir.Kernel) -> bool:
    return any(v.op == "search" for v in kernel.values)


# --- The table ---


@dataclass(frozen=True)
class Kind:
    """name: its row in the table of settings. fits: whether a kernel with a tile is of it, where it is of none before
    it. fitting: those of the row's settings that it may have. beside: the row whose longest setting a launch has beside
    the one that a config is about, whatever the layout; else it has the first of its own."""

    name: str
    fits: Callable[[ir.Kernel, Tile], bool]
    launch: type[Scheduled] = Scheduled
    fitting: Callable[[ir.Kernel, Tile, Settings], Settings] = _all
    beside: str = ""

    def settings(self, kernel: ir.Kernel, tile: Tile, layout: Layout) -> Settings:
        found = self.fitting(kernel, tile, settings_of(self.name, layout.name))
        if any(s.vectors for s in found) and not has_rows(kernel, tile):
            found = tuple(s for s in found if not s.vectors)
        if layout.dense and not layout.aligned and not _writes_rows(kernel, tile):
            # What a thread has for itself in the layout "gathered" takes them in fewer instructions.
            found = tuple(s for s in found if s.q > FEW)
        return found


KINDS = (
    Kind("radix", lambda kernel, tile: along.by_radix(kernel), Radix, _of_rows, "sort"),
    Kind("digits", lambda kernel, tile: along.by_digits(kernel), Digits, _of_digits, "sort"),
    Kind("narrow", lambda kernel, tile: along.is_narrow(kernel), Narrow, _of_rows, "sort"),
    Kind("runs", lambda kernel, tile: along.sorts_runs(kernel), Runs, _of_rows, "runs"),
    Kind("top", lambda kernel, tile: bool(along.sorts(kernel) and along.limits(kernel)), Top, _of_rows, "sort"),
    Kind("sort", lambda kernel, tile: bool(along.sorts(kernel)), Sort, _of_rows, "sort"),
    Kind("scan", lambda kernel, tile: tile.reduced == "q" and bool(along.scans(kernel)), Scan, _of_scan),
    Kind("outer_log_scan", lambda kernel, tile: tile.reduced == "p" and along.adds_logs(kernel), OuterScan),
    Kind("outer_scan", lambda kernel, tile: tile.reduced == "p" and bool(along.scans(kernel)), OuterScan),
    Kind("walk", lambda kernel, tile: tile.walk, Walk),
    Kind("search", lambda kernel, tile: tile.reduced is None and _searches(kernel), Search, _of_rows),
    Kind("rows", lambda kernel, tile: tile.reduced is None and bool(tile.p), fitting=_of_elements),
    Kind("flat", lambda kernel, tile: tile.reduced is None),
    Kind("outer", lambda kernel, tile: tile.reduced == "p", fitting=_of_columns),
    Kind("inner", lambda kernel, tile: bool(tile.p), fitting=_of_reduced_rows),
    Kind("full", lambda kernel, tile: True),
    Kind("parts", lambda kernel, tile: False),  # rows that only a split reduction has: ways.py says where
)


def kind_of(kernel: ir.Kernel, tile: Tile) -> Kind:
    return next(kind for kind in KINDS if kind.fits(kernel, tile))


def schedule(kernel: ir.Kernel, layout: Layout, context: Context) -> Scheduled:
    kernel, tile = laid_out(kernel, layout)
    return kind_of(kernel, tile).launch(kernel, tile, layout, context)


def choices(kernel: ir.Kernel, layout: Layout, kind: str = "") -> Settings:
    """The settings that a launch may have in a layout. kind: the name of another than its own."""
    if not is_for(kernel, layout):
        return ()
    kernel, tile = laid_out(kernel, layout)
    own = next(k for k in KINDS if k.name == kind) if kind else kind_of(kernel, tile)
    return own.settings(kernel, tile, layout)


@dataclass(frozen=True)
class Beside:
    """A setting of a launch beside another. most: it is taken for up to so many elements along q, or of an outer
    reduction along p, where the one before it is not; None for any number."""

    setting: Setting
    most: int | None = None


def secondary_settings(kernel: ir.Kernel, layout: Layout, main: ir.Kernel) -> tuple[Beside, ...]:
    """The settings of a launch beside `main`, which a config is about: one that takes as many sizes as it can, behind
    those for fewer elements; none where it has none. Of all a call takes one."""
    kernel, tile = laid_out(kernel, layout)
    kind = kind_of(kernel, tile)
    if kind.beside:
        return (Beside(settings_of(kind.beside, "rows")[-1]),)
    own = kind.settings(kernel, tile, layout)
    first = tuple(map(Beside, own[:1]))
    if kind.name == "rows" and own and _reduces_columns(main):  # few columns would leave most of a wide block masked
        elements = own[0].p * own[0].q  # no more in any of them: of all that share a launch the most registers count
        narrow = sorted((replace(s, p=elements // s.q) for s in own if s.q < own[0].q), key=lambda s: s.q)
        return (*(Beside(s, s.q * (1 if s.is_by_thread(tile, layout) else SEVERAL)) for s in narrow), *first)
    if kind.name == "inner" and _has_parts_of_rows(kernel, main):
        few, short = settings_of("short", "rows")
        return (Beside(few, SEVERAL * few.q), Beside(short, SHORT), *first)
    if kind.name == "outer" and kernel.is_of_scratch and steps_of(main):
        return tuple(map(Beside, settings_of("tall", "rows")))
    if kind.name == "outer" and layout.merged and _adds_up_rows(kernel, main):
        return (*(replace(one, most=MANY_ROWS) for one in first), *map(Beside, settings_of("tall", "rows")))
    return first


def _reduces_columns(main: ir.Kernel) -> bool:
    """Whether it reduces columns, or parts of long ones: what stands beside it may have a single one. What stands
    beside a reduction of rows has rows that are no shorter."""
    return bool(main.reduced) and choose_tile(main, ROWS).reduced == "p"


def _adds_up_rows(kernel: ir.Kernel, main: ir.Kernel) -> bool:
    """Whether it reduces what other launches have left of rows, of which there are as many as in a tensor of `main`'s.
    Of parts there are few."""
    sizes = [size for b in main.buffers if b.kind != "scratch" for size in b.sizes]
    return kernel.is_of_scratch and all(any(ix.same(a.size, size) for size in sizes) for a in kernel.reduced)


def _has_parts_of_rows(kernel: ir.Kernel, main: ir.Kernel) -> bool:
    """Whether several of the rows that it reduces are one that `main` does: they have a dozen elements or a million."""
    own, whole = ([a.size for a in k.reduced] for k in (kernel, main))
    return len(own) < len(whole) and all(map(ix.same, own, whole[len(whole) - len(own) :]))
