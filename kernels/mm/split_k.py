"""Split-K in plain Triton, for products of few tiles: K is split over several programs, and a second launch adds up
their partial sums, always in the same order."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import triton
import triton.language as tl

from tk.aot.expr import Expr, ceil_div, const, device, local, maximum, minimum
from tk.aot.spec import (
    Arg,
    Buffer,
    Bundle,
    Config,
    Const,
    Constraint,
    Int,
    Kernel,
    Launch,
    Plan,
    Point,
    Scratch,
    require,
)
from tk.kernels.epilogue import finish
from tk.kernels.gemm.cost import Work
from tk.kernels.gemm.pointer import (
    ARCHS,
    accumulate,
    constraints,
    finish_args,
    predicted,
    product_args,
    tile_indices,
)
from tk.kernels.gemm.problem import EPILOGUE_AXIS, Gemm, batch_invariant, serves
from tk.kernels.gemm.tiles import tiles_of
from tk.kernels.mm.op import MM, OP
from tk.kernels.mm.pointer import AXES, SMALL, worth_a_cubin

# --- The device functions ---


@triton.jit
def store_partials(partials, x, s, rows, cols, M, N):
    """The sum of the s-th part of K, into fp32 [splits, M, N]."""
    at = partials + (s.to(tl.int64) * M + rows[:, None]) * N + cols[None, :]
    tl.store(at, x, mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit
def mm_split_k(a, b, partials, size, k_per_split, strides, TILE: tl.constexpr):
    """Program (tile, s) leaves the sum over its k_per_split values of k in partials[s]."""
    rows, cols = tile_indices(tl.program_id(0), size.M, size.N, TILE)
    s = tl.program_id(1)
    k_lo = s * k_per_split
    k_hi = k_lo + min(k_per_split, size.K - k_lo)  # where k_lo + k_per_split may pass 2**31
    acc = accumulate(a, b, rows, cols, size.M, size.N, k_lo, k_hi, strides, TILE)
    store_partials(partials, acc, s, rows, cols, size.M, size.N)


@triton.jit
def mm_split_k_reduce(partials, bias, out, M, N, splits, stride_om, stride_on, epilogue, BLOCK_N: tl.constexpr):
    """The second pass: the partial sums in the order of K, then the epilogue. Program (m, n): BLOCK_N columns of a
    row."""
    rows = tl.program_id(0) + tl.arange(0, 1)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = partials + rows[:, None].to(tl.int64) * N + cols[None, :]
    inside = (cols < N)[None, :]
    acc = tl.zeros((1, BLOCK_N), dtype=tl.float32)
    for _ in range(splits):
        acc += tl.load(at, mask=inside, other=0.0)
        at += M.to(tl.int64) * N
    finish(acc, bias, out, rows, cols, M, N, stride_om, stride_on, epilogue, "matrix")


# --- Plans ---


@dataclass(frozen=True)
class SplitK:
    """How K is split over programs: into as many parts as there is `room` for, of whole steps, none shorter than
    `least` of them. Its locals are the first of the plan's."""

    gemm: Gemm
    room: Expr
    step: int
    least: int

    @property
    def k_per_split(self) -> Expr:
        return local(len(self.gemm.op.locals))

    @property
    def splits(self) -> Expr:
        return local(len(self.gemm.op.locals) + 1)

    @property
    def _wanted(self) -> Expr:
        return maximum(minimum(self.room, ceil_div(self.gemm.K, self.least * self.step)), 1)

    def pays(self, what: str) -> Constraint:
        return require(self._wanted > 1, f"few enough {what} and a K long enough that a split pays")

    def plan(
        self,
        point: Point,
        fn: object,
        args: Mapping[str, Arg | Bundle],
        tiles: Expr,
        serves: Mapping[str, tuple[int, ...]],
        constraints: tuple[Constraint, ...],
        cost: Callable[[Point, Work], Expr],
        work: Work,
        general: bool = False,
    ) -> Plan:
        """Programs (tile, split) of `fn`, then the sums of the splits. args: all of fn's but its partials."""
        gemm, c = self.gemm, point.config
        partials: dict[str, Arg | Bundle] = {"partials": Scratch(0, "fp32")}
        split = Launch(
            fn,
            {**args, **partials},
            (tiles, self.splits, 1),
            num_warps=c.num_warps,
            num_stages=c.params.get("num_stages", Launch.num_stages),
        )
        of_sums = dict(M=Int(gemm.M), N=Int(gemm.N, divisible=point.aligned), splits=Int(self.splits))
        reduce = Launch(
            mm_split_k_reduce,
            finish_args(gemm, point, "matrix") | partials | of_sums | {"BLOCK_N": Const(256)},
            (gemm.M, ceil_div(gemm.N, 256), 1),
            num_warps=2,
        )
        k_per_split = ceil_div(ceil_div(gemm.K, self.step), self._wanted) * self.step
        own = dict(
            locals=(k_per_split, ceil_div(gemm.K, self.k_per_split)),
            buffers=(Buffer(self.splits * gemm.M * gemm.N * 4),),
            general=general,
        )
        return work.plan(cost(point, work), (split, reduce), serves, constraints, **own)


def _plan(point: Point) -> Plan | None:
    if not worth_a_cubin(point):
        return None
    c = point.config
    tiles = tiles_of(MM, c).count
    cut = SplitK(MM, device.sm_count * c.occupancy // tiles, c.block_k, least=4)
    work = Work(
        MM,
        waves=const(1),
        k_blocks=cut.k_per_split // c.block_k,
        flops=2 * c.block_m * c.block_n * c.block_k,
        dram=MM.traffic() + 8 * cut.splits * MM.M_choice * MM.N,  # the partial sums are written and read
        tile=(c.block_m, c.block_n),
        boxes=(1, 1),
        fixups=cut.splits,
    )
    return cut.plan(
        point,
        mm_split_k,
        product_args(MM, point) | {"k_per_split": Int(cut.k_per_split)},
        tiles,
        serves(point, EPILOGUE_AXIS),
        (*constraints(MM, point), batch_invariant(), cut.pays("tiles")),
        predicted,
        work,
        general=not point.aligned,
    )


# --- The grid ---

_CONFIGS = tuple(Config(f"{c.name}_split_k", c.params) for c in SMALL)

KERNELS = (Kernel("mm_split_k", OP, AXES, dict.fromkeys(ARCHS, _CONFIGS), _plan),)
