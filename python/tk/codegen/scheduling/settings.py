"""Settings: how large a block is, with how many warps. One table, by kind of tile and by layout.

A setting is a config of the op. What is tried before it comes into the table is tools/time_settings.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

from tk.aot.spec import Config
from tk.codegen.scheduling.sorts import TILE
from tk.codegen.tile import Layout, Tile

T = TypeVar("T")

FEW, SHORTEST = 4, 16  # elements of rows that are a thread's each


@dataclass(frozen=True)
class Setting:
    """Block sizes along the tile's dimensions, warps, and whether the reduced dimension is run through in blocks.

    spread: its blocks are programs of their own. digits: the block is that of the launch that sorts rows by digits.
    segments: a row that one program has at once is this many blocks beside each other. It is longer than all but the
    last, so that only that one has masks, and little is masked.
    Rows that begin anywhere, in vectors. vectors: those between two addresses of 16 bytes; what lies before and behind
    these, up to seven elements, is read and written for itself. realigned, of scans: from the 16 bytes in which a row
    begins; up to a vector's elements fewer fit into a block.
    Of walks: stages: so many blocks of rows are under way, all but the first on their way into shared memory. ahead:
    the next block's rows are on their way into the L2 cache. rereads: what a reduction has used is loaded again after
    it, from the caches, so that it needs no registers meanwhile. registers: of a thread at most, 0 for no limit: with
    fewer, two programs are resident on a multiprocessor.
    across: of rows that are read as columns, where the same block has another meaning than where they are read along.
    everywhere: architectures for which nothing was measured, and fp16, have it as well, as they have the first of
    each layout. narrow: graphs of fp32 and fp64 do not have it. Their memory takes longer, and a neighbour with more
    masked lanes or less in vectors is as fast."""

    p: int
    q: int
    warps: int
    looped: bool = False
    spread: bool = False
    segments: int = 1
    vectors: bool = False
    realigned: bool = False
    digits: bool = False
    stages: int = 1
    ahead: bool = False
    rereads: bool = False
    registers: int = 0
    across: bool = False
    everywhere: bool = field(default=False, compare=False)
    narrow: bool = field(default=False, compare=False)

    @property
    def name(self) -> str:
        way = "loop_" if self.looped else "spread_" if self.spread else ""
        way = f"realigned_{way}" if self.realigned else f"across_{way}" if self.across else way
        row = f"{self.segments}x{self.q}" if self.segments > 1 else f"{self.q}"
        more = "_vectors" * self.vectors + (f"_s{self.stages}" if self.stages > 1 else "")
        more += "_ahead" * self.ahead + "_rereads" * self.rereads + (f"_r{self.registers}" if self.registers else "")
        return f"{way}{self.p}x{row}_w{self.warps}{more}"

    @property
    def row(self) -> int:
        """Elements along q."""
        return self.q * self.segments

    def is_by_thread(self, tile: Tile, layout: Layout) -> bool:
        """Whether a thread has whole rows, since these are short and there are enough of them: nothing is exchanged
        between lanes, and where a row begins is worked out once. Rows without gaps are shared by lanes, which so read
        and write what lies beside each other."""
        return self.q <= SHORTEST and self.p >= 32 * self.warps and tile.reduced != "p" and not layout.dense

    def turns_results(self, tile: Tile, layout: Layout) -> bool:
        """Whether a block whose rows are a thread's each is turned before it is stored: a warp would else write to as
        many sectors of memory as it has lanes. Of rows of a few elements that takes no longer."""
        return self.is_by_thread(tile, layout) and self.q > FEW

    @property
    def is_for_small(self) -> bool:
        return not self.vectors and self.p in (2, 8, 32, 64, 128)

    @property
    def config(self) -> Config:
        params = {"p": self.p, "q": self.row, "num_warps": self.warps, "looped": self.looped}
        params |= {n: getattr(self, n) for n, usual in UNUSUAL.items() if getattr(self, n) != usual}
        return Config(self.name, params)


# Parameters of a config that only those have in whose settings they are another.
UNUSUAL: Mapping[str, int | bool] = {
    "spread": False, "digits": False, "segments": 1, "vectors": False, "realigned": False, "stages": 1, "ahead": False,
    "rereads": False, "registers": 0, "across": False,
}  # fmt: skip

Table = Mapping[str, Mapping[str, tuple[Setting, ...]]]

# Of columns, each of which is one thread's.
_OUTER_SCAN: Mapping[str, tuple[Setting, ...]] = {
    **dict.fromkeys(("aligned", "rows", "pitched", "gathered"), (Setting(16, 128, 4, True),)),
    "columns": (Setting(16, 128, 4, True), Setting(4, 512, 4, True, everywhere=True)),
    "strided": (Setting(32, 32, 4, True),),
}

# By kind of launch (schedule.kind_of; "parts" are the inner reductions of a split one). Of a kind's settings those that
# a layout gets, the first for every size: it is all that PTX has. The strided one serves what nothing else takes. Of
# one name a call has that of the first layout that it fits. docs/performance.md has what they were chosen by.
SETTINGS: Table = {
    "flat": {
        "aligned": (Setting(1, 2048, 4), Setting(1, 1024, 4)),
        "rows": (Setting(1, 2048, 4), Setting(1, 2048, 4, vectors=True, narrow=True), Setting(1, 512, 4)),
        "strided": (Setting(1, 1024, 4),),
    },
    "rows": {
        "aligned": (Setting(8, 256, 4), Setting(32, 64, 4)),
        "rows": (Setting(2, 512, 4), Setting(16, 64, 4)),
        "pitched": (Setting(4, 512, 4), Setting(32, 64, 4)),
        "gathered": (
            Setting(1, 512, 4), Setting(16, 64, 4), Setting(128, 16, 4, everywhere=True),
            Setting(512, 4, 4, everywhere=True), Setting(1024, 1, 4, everywhere=True),
        ),
        "strided": (Setting(32, 32, 4),),
    },
    # Every step of a search waits for the one before, and takes a line for each element: few to a thread.
    "search": {
        "rows": (Setting(1, 256, 4), Setting(64, 4, 4)),
        "gathered": (Setting(1, 256, 4), Setting(64, 4, 4, everywhere=True)),
        "strided": (Setting(1, 128, 4),),
    },
    "inner": {
        "aligned": (
            Setting(1, 4096, 16, True), Setting(32, 64, 4), Setting(16, 128, 4), Setting(8, 256, 4),
            Setting(4, 512, 4), Setting(2, 1024, 4, everywhere=True), Setting(1, 2048, 4),
            Setting(1, 4096, 4), Setting(1, 2048, 8, segments=3), Setting(1, 8192, 8),
            Setting(1, 4096, 16, segments=3), Setting(1, 16384, 16), Setting(1, 32768, 32),
            Setting(1, 8192, 32, True),
        ),
        "rows": (
            Setting(1, 2048, 8, True), Setting(32, 64, 4), Setting(2, 1024, 4, everywhere=True),
            Setting(16, 128, 4, vectors=True), Setting(4, 256, 4, vectors=True),
            *(Setting(4, 256, 4, segments=n, vectors=True) for n in (2, 3, 4)),
            Setting(1, 1024, 4, segments=2, vectors=True), Setting(1, 1024, 4, segments=3, vectors=True, narrow=True),
            Setting(1, 1024, 4, segments=3),
            *(Setting(1, 2048, 8, segments=n, vectors=True) for n in (2, 3, 4)),
            Setting(1, 4096, 16, segments=3, vectors=True),
            Setting(128, 16, 4), Setting(512, 4, 4), Setting(1, 8192, 32, True),
        ),
        "pitched": (Setting(1, 4096, 16, True), Setting(32, 64, 4), Setting(4, 512, 4), Setting(1, 4096, 4)),
        "gathered": (
            Setting(1, 2048, 8, True), Setting(16, 64, 4), Setting(4, 256, 4), Setting(2, 512, 4), Setting(1, 2048, 4),
            Setting(128, 16, 4), Setting(512, 4, 4), Setting(1024, 1, 4),
        ),
        "columns": (Setting(4, 512, 4, True),),
        "strided": (Setting(16, 64, 4, True),),
    },
    "parts": {
        "aligned": (Setting(1, 4096, 16, True),),
        "rows": (Setting(1, 2048, 8, True),),
        "pitched": (Setting(1, 4096, 16, True),),
        "gathered": (Setting(1, 2048, 8, True),),
        "strided": (Setting(1, 1024, 4, True), Setting(16, 64, 4, True)),
    },
    # Beside a launch along whole rows: along parts of them, where these are short. Of as many elements each, so that
    # neither needs more registers, which what shares its launch would have as well.
    "short": {
        "rows": (Setting(256, 4, 4, True), Setting(4, 256, 4, True)),
    },
    # Beside another launch: over many rows, of each of which that left a few numbers, or over its interleaved parts, of
    # which there are many where there are few columns. As many elements as where there are few rows, for the same
    # reason.
    "tall": {
        "rows": (Setting(256, 8, 8, True),),
    },
    "walk": {
        "aligned": (
            Setting(2, 1024, 4), Setting(32, 64, 4), Setting(16, 128, 4), Setting(8, 256, 4),
            Setting(1, 2048, 4, stages=3, registers=128),
            Setting(1, 4096, 8, stages=3, registers=128), Setting(1, 8192, 8),
            Setting(1, 4096, 16, segments=3, ahead=True, rereads=True),
        ),
        "rows": (
            Setting(1, 2048, 4), Setting(32, 64, 4), Setting(8, 256, 4), Setting(1, 2048, 4, vectors=True, ahead=True),
            Setting(1, 4096, 8, vectors=True, ahead=True),
            *(Setting(1, 4096, 16, segments=n, vectors=True, ahead=True, rereads=True) for n in (2, 3)),
        ),
        "pitched": (Setting(2, 1024, 4), Setting(32, 64, 4)),
        "gathered": (Setting(1, 2048, 4),),
    },
    "full": {
        "aligned": (Setting(1, 4096, 8, True),),
        "rows": (Setting(1, 4096, 8, True),),
        "strided": (Setting(1, 1024, 4, True),),
    },
    "outer": {
        "aligned": (Setting(64, 32, 8, True), Setting(2, 1024, 4, True, everywhere=True)),
        "rows": (Setting(64, 32, 8, True), Setting(2, 1024, 4, True, everywhere=True)),
        "pitched": (Setting(64, 32, 8, True), Setting(2, 1024, 4, True, everywhere=True)),
        "gathered": (
            Setting(64, 32, 8, True), Setting(2, 1024, 4, True, everywhere=True),
            Setting(512, 4, 4, True, everywhere=True),
        ),
        "columns": (Setting(64, 32, 8, True), Setting(64, 32, 4), Setting(8, 256, 4, across=True, everywhere=True)),
        "strided": (Setting(32, 32, 4, True),),
    },
    # Along rows; the spread ones where programs may share a row.
    "scan": {
        "aligned": (
            Setting(1, 2048, 4, True), Setting(8, 256, 4), Setting(1, 1024, 4), Setting(1, 2048, 4, narrow=True),
            Setting(1, 4096, 8, narrow=True),
        ),
        "rows": (
            Setting(1, 4096, 8, True), Setting(8, 256, 4), Setting(1, 4096, 8, spread=True, everywhere=True),
            Setting(1, 1024, 4, realigned=True), Setting(1, 2048, 4, realigned=True, narrow=True),
            Setting(1, 4096, 8, realigned=True, narrow=True),
            Setting(1, 2048, 4, True, realigned=True, everywhere=True),
            Setting(1, 4096, 8, spread=True, realigned=True, everywhere=True),
        ),
        "pitched": (Setting(1, 2048, 4, True), Setting(32, 64, 4), Setting(8, 256, 4)),
        "gathered": (Setting(1, 2048, 4, True), Setting(128, 16, 4, everywhere=True), Setting(32, 64, 4)),
        "strided": (Setting(16, 64, 4, True),),
    },
    "outer_scan": _OUTER_SCAN,
    # The same of logarithms: lanes that have no column take as long as those that have one.
    "outer_log_scan": {**_OUTER_SCAN, "columns": (*_OUTER_SCAN["columns"], Setting(4, 64, 2, True, everywhere=True))},
    # A warp sorts up to 512 elements without a barrier. These kernels take long to compile and wait for no memory:
    # vector loads would gain nothing, and what has strides of its own is sorted in runs.
    "sort": {
        "aligned": (Setting(16, 64, 4),),
        "rows": (
            Setting(16, 64, 4), Setting(128, 8, 4, everywhere=True), Setting(1, 256, 1),
            Setting(1, 512, 1, everywhere=True), Setting(1, 1024, 2),
            Setting(1, 2048, 4, everywhere=True),
        ),
    },
    # Of the first few of what is sorted: as many as a block holds are kept while a row is run through.
    "top": {
        "aligned": (Setting(16, 64, 4, True),),
        "rows": (
            Setting(16, 64, 4, True), Setting(128, 8, 4, everywhere=True), Setting(1, 512, 1),
            Setting(1, 2048, 4, everywhere=True),
        ),
    },
    # The same in 32 bits, of rows that are not long.
    "narrow": {
        "aligned": (Setting(4, 64, 1, True),),
        "rows": (Setting(4, 64, 1, True),),
    },
    # In shared memory, 16 elements a thread; for 64-bit numbers of 16,384 there is not enough.
    "digits": {
        "rows": tuple(Setting(1, 512 * warps, warps, digits=True, everywhere=True) for warps in (4, 8, 16, 32)),
    },
    # In scratch memory, by many programs.
    "radix": {
        "rows": (Setting(1, 4096, 8, spread=True, everywhere=True),),
    },
    "runs": {
        "rows": (Setting(1, TILE, 4, spread=True),),
        "strided": (Setting(1, TILE, 4, spread=True),),
    },
}  # fmt: skip

# Ops of the package that have few settings on every architecture and in every dtype (those that are `everywhere`, and
# the first of each layout): there is no room in the wheel for all of what is seldom called.
SELDOM_CALLED = frozenset({
    "row_norm", "row_prod", "row_amax_backward", "logsumexp_backward", "cross_entropy_sum",
    "cross_entropy_sum_backward",
})  # fmt: skip

# Ops of the package that are called for what is small, and for all else give way to another of all settings: there is
# room for blocks of several short rows alone.
FOR_SMALL = frozenset({"row_max"})

# Ops of the package whose rows are seldom both few and long, and are not split over programs: no room in the wheel.
SHORT_ROWS = frozenset({
    "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "cross_entropy_rows", "cross_entropy_sum",
    "cross_entropy_mean", "cross_entropy_weighted", "cross_entropy_of_probabilities",
})  # fmt: skip

# Of these ops of the package, graphs of 64-bit floats and of integers, and those of ops of one dtype, have a single
# setting, in the layouts that ask for no alignment: enough to be served, for they are called least of all.
GENERAL = frozenset({
    "row_sum", "row_amax", "row_amax_backward", "row_argmax", "row_prod", "row_norm",
    "row_var_mean", "logsumexp", "logsumexp_backward", "cumsum", "cumsum_backward", "cumprod", "cummax", "row_sum_int",
    "row_extreme_int", "row_place_int", "cumsum_int", "cross_entropy_weighted", "cross_entropy_weighted_backward",
    "cross_entropy_of_probabilities", "cross_entropy_of_probabilities_backward", "gather", "gather_columns",
    "scatter_add", "scatter_add_columns", "index_add", "put", "put_rows", "flat_index",
})  # fmt: skip
GENERAL_DTYPES = frozenset({"fp64", "i64", "i32", "i16", "i8"})

_table: Table = SETTINGS


def settings_of(kind: str, layout: str) -> tuple[Setting, ...]:
    """Those of a kind of tile in a layout, the first of them the one that every graph has."""
    return _table[kind].get(layout, ())


def kept(method: Callable[..., T]) -> Callable[..., T]:
    """What a method of an op gives for a graph is worked out once: it is asked for by every target, layout and setting.
    Not while the table is another."""
    name = f"_kept_{method.__name__}"

    @wraps(method)
    def found(op: Any, graph: Any, *which: object) -> T:
        if _table is not SETTINGS:
            return method(op, graph, *which)
        known = op.__dict__.setdefault(name, {})
        key = (graph.label, *which)
        if key not in known:
            known[key] = method(op, graph, *which)
        return known[key]

    return found


@contextmanager
def replaced(table: Table) -> Iterator[None]:
    """Puts other settings in the table's place, to time what is not in it."""
    global _table
    before, _table = _table, table
    try:
        yield
    finally:
        _table = before
