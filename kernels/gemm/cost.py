"""The predicted time of a product: a sum of terms that a plan declares, weighted by what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tk.aot.expr import Expr, ceil_div, const, maximum, select
from tk.aot.spec import Constraint, Launch, Plan, Point
from tk.kernels.gemm.problem import Gemm
from tk.kernels.tuned_tables import load as load_tuned

# What the hardware can do, by architecture: bytes a nanosecond from memory and from L2, and operations a nanosecond of
# one multiprocessor by dtype, for fp32 by precision. Data sheets of A100 and H100, at about the share that is reached.
# u8: bytes of float8 that are widened on their way to the tensor cores.
_MEMORY = {80: 1500, 90: 4200}
_L2 = {80: 4000, 90: 7000}
_OPERATIONS = {
    80: {"bf16": 2000, "fp16": 2000, "tf32": 900, "ieee": 120, "u8": 1500},
    90: {"bf16": 6000, "fp16": 6000, "tf32": 3000, "ieee": 400, "u8": 2500, "fp8e4nv": 11000, "fp8e5": 11000},
}

# By "few" and "many" (rows): a weight, picoseconds, for each of a Work's terms.
Weights = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Work:
    """What a plan has to do, in the terms that its predicted time is a sum of.

    waves: tiles that a program does one after the other. k_blocks: blocks of K in all of these. flops: of one k block.
    dram: bytes from and to memory. tile: rows and columns of a tile of out, which needs so many rows of a and columns
    of b. boxes: rows of a and columns of b that come together or not at all (TMA boxes). fixups: how many partial sums
    are added up for a tile. sm_k_blocks: k blocks of the busiest multiprocessor, where several programs share one.
    b_reads: how often all of b is read, where that is not once for each row of tiles: of groups, each has a part of
    it."""

    gemm: Gemm
    waves: Expr
    k_blocks: Expr
    flops: int
    dram: Expr
    tile: tuple[int, int]
    boxes: tuple[int, int]
    fixups: Expr = const(0)
    sm_k_blocks: Expr = const(0)
    b_reads: Expr | None = None

    def terms(self) -> dict[str, Expr]:
        """What the predicted time is a sum of. Bytes by the KB: one takes less than a picosecond.

        launch, pdl_launch: a launch, and one that begins before its predecessors end. l2_kb: what programs fetch.
        unaligned_kb: of that, what comes from rows whose pitch is no multiple of 128 bytes, which takes two requests
        instead of one. oob_kb: what TMA boxes hold of rows that are out of bounds. It is not free: many multiprocessors
        that ask for it wait for one another."""
        local = self.gemm.op.local
        a, b = self._fetched()
        return {
            "launch": ~local("pdl"),
            "pdl_launch": local("pdl"),
            "wave": self.waves,
            "k_block": self.k_blocks,
            "sm_k_block": self.sm_k_blocks,
            "dram_kb": self.dram // 1024,
            "l2_kb": (a + b) // 1024,
            "unaligned_kb": (local("a_pitch_unaligned") * a + local("b_pitch_unaligned") * b) // 1024,
            "oob_kb": self._out_of_bounds() // 1024,
            "fixup": self.fixups,
        }

    def plan(self, cost: Expr, launches: tuple[Launch, ...], serves: Mapping[str, tuple[int, ...]],
             constraints: tuple[Constraint, ...], **more: Any) -> Plan:  # fmt: skip
        """A plan that does this. more: other fields of it."""
        return Plan(constraints, serves, launches, cost, terms=self.terms(), **more)

    def roofline(self, point: Point) -> Expr:
        """Nanoseconds that the slowest of tensor cores, memory and L2 takes for its part."""
        a, b = self._fetched()
        arch = nearest(point.arch)
        return maximum(
            maximum(self.dram // _MEMORY[arch], (a + b) // _L2[arch]),
            self.k_blocks * (self.flops // _OPERATIONS[arch][kind_of(point)]),
        )

    def _fetched(self) -> tuple[Expr, Expr]:
        """Bytes of a and of b: each once for every tile that needs it."""
        gemm, (tile_m, tile_n) = self.gemm, self.tile
        a_bytes, b_bytes = gemm.op.local("a_bytes"), gemm.op.local("b_bytes")
        b_reads = ceil_div(gemm.M_choice, tile_m) if self.b_reads is None else self.b_reads
        return ceil_div(gemm.N, tile_n) * a_bytes, b_reads * b_bytes

    def _out_of_bounds(self) -> Expr:
        """Bytes."""
        gemm, (tile_m, tile_n), (box_m, box_n) = self.gemm, self.tile, self.boxes
        down, across = ceil_div(gemm.M_choice, tile_m), ceil_div(gemm.N, tile_n)
        rows = ceil_div(gemm.M_choice, box_m) * box_m - gemm.M_choice
        columns = ceil_div(gemm.N, box_n) * box_n - gemm.N
        return (across * rows + down * columns) * gemm.op.local("k_bytes")


def nearest(arch: int) -> int:
    """The newest architecture with figures that is not newer, or the oldest."""
    return max((a for a in _MEMORY if a <= arch), default=min(_MEMORY))


def kind_of(point: Point) -> str:
    """The kind of operations: the dtype, and for fp32 the precision."""
    return point.precision if point.dtype == "fp32" else point.dtype


_AS_FAST = {"fp16": "bf16", "fp8e5": "fp8e4nv"}


def weights_name(point: Point) -> str:
    """The name of the weights that points have in common: "config/dtype/order", and what changes a config's pace. What
    has one order of operands has nn."""
    kind = _AS_FAST.get(kind_of(point), kind_of(point))
    loads = "" if point.axes.get("aligned", True) else " unaligned"
    rows = f" {point.rows} rows" if "rows" in point.axes else ""
    sums = f" {point.accumulation}" if "accumulation" in point.axes else ""
    return f"{point.config.name}{rows}{sums}{loads}/{kind}/{point.axes.get('order', 'nn')}"


@dataclass(frozen=True)
class Like:
    """What a point of another op takes as long as, until its own op was measured: mm's weights of that name.

    percent: what a k block takes of mm's. launch: picoseconds that a launch takes more."""

    name: str
    percent: int = 100
    launch: int = 0

    def weights(self, arch: int) -> Weights:
        found = fitted("mm", arch, self.name)
        assert found, f"mm has no weights of {self.name}"
        return {rows: self._adapted(of_rows) for rows, of_rows in found.items()}

    def _adapted(self, weights: Mapping[str, int]) -> dict[str, int]:
        of_blocks = {name: weights.get(name, 0) * self.percent // 100 for name in ("k_block", "sm_k_block")}
        of_launch = {name: weights.get(name, 0) + self.launch for name in ("launch", "pdl_launch")}
        return {**weights, **of_blocks, **of_launch}


def predict(point: Point, work: Work, slowdown: int = 1, like: Like | None = None) -> Expr:
    """Picoseconds: the work's terms, weighted.

    The weights, some for few rows and some for many, are fitted to measurements (kernels/tuned/, tools/fit_cost.py);
    without, they are those of `like`; without that too, the roofline counts `slowdown` times, and starting, a tile and
    a fix-up cost what they usually do."""
    if like is not None:
        guess = weighted(point, work, like.weights(point.arch))
    else:
        guess = 3_000_000 + 500_000 * work.waves + 3_000_000 * work.fixups + 2000 * slowdown * work.roofline(point)
    return predict_or(point, work, guess)


def predict_or(point: Point, work: Work, guess: Expr) -> Expr:
    """Picoseconds: the work's terms with the weights that were fitted, or a guess where none were."""
    weights = fitted(work.gemm.op.name, point.arch, weights_name(point))
    return guess if weights is None else weighted(point, work, weights)


def is_fitted(point: Point, work: Work) -> bool:
    """Whether the op's own kernels were measured at such points."""
    return fitted(work.gemm.op.name, point.arch, weights_name(point)) is not None


def memory_time(point: Point, work: Work) -> Expr:
    """Picoseconds of a launch that does nothing but move the operands and the result."""
    return 2_500_000 + 1000 * (work.dram // _MEMORY[nearest(point.arch)])


def fitted(op: str, arch: int, name: str) -> Weights | None:
    """The weights that were fitted for that op; None where nothing was measured."""
    found: Weights | None = load_tuned(op, arch).get("coefficients", {}).get(name)
    return found


def weighted(point: Point, work: Work, weights: Weights) -> Expr:
    """Picoseconds. Of a weight for few rows and one for many, as it is for the problem."""
    total = const(0)
    for name, term in work.terms().items():
        few, many = (weights[rows].get(name, 0) for rows in ("few", "many"))
        total += (few if few == many else select(work.gemm.op.local("few_rows"), few, many)) * term
    return total
