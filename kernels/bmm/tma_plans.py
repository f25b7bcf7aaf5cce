"""The plan and the grid of ``bmm_tma``."""

from tk.aot.expr import Expr, maximum, select
from tk.aot.spec import Const, Int, Kernel, Plan, Point
from tk.kernels.bmm.op import BIAS, BMM, OP, A, B, batch_tiles, batches_suit_tma
from tk.kernels.bmm.tma import bmm_tma
from tk.kernels.gemm.cost import Work, is_fitted, memory_time
from tk.kernels.gemm.problem import Batch
from tk.kernels.hopper.plans import (
    AXES,
    config,
    is_compiled,
    persistent_plan,
    predict_like_mm,
    product_args,
    serves_epilogues,
)


def _step(t: Batch) -> Int:
    return Int(select(t.batch_stride == 0, 0, 1))


def _cost(point: Point, work: Work) -> Expr:
    """Picoseconds. mm's weights come from products that reuse what they read; a batch of small ones waits for memory,
    and is then still the faster for tiles that suit it."""
    found = predict_like_mm(point, work)
    return found if is_fitted(point, work) else maximum(found, memory_time(point, work) + found // 8)


def _plan(point: Point) -> Plan | None:
    if not is_compiled(point):
        return None
    tiles = batch_tiles(point.config)
    args = product_args(BMM, point) | dict(
        tiles=Int(tiles.count),
        a_step=_step(A),
        b_step=_step(B),
        group=Const(8),
        stride_bias_b=Int(BIAS.batch_stride, "i64"),
        EPILOGUE=Const(point.epilogue),
    )
    constraints = (*BMM.suits_tma(point), *batches_suit_tma(point))
    return persistent_plan(point, tiles, bmm_tma, args, serves_epilogues(point), constraints, _cost)


# --- The grid ---


# Where a consumer has more than 64 accumulators for each thread, a matrix of bias does not fit beside them.
_CONFIGS = (
    config(64, 64, 10, 32, 16, kinds="plain"),
    config(64, 128, 8, 64, 32, kinds="plain matrix"),
    config(128, 64, 8, 32, 16, kinds="plain"),
    config(128, 128, 6, 32, 16, kinds="plain"),
    config(128, 128, 6, 64, 32, pingpong=False, kinds="plain matrix fp32"),
    config(128, 256, 4, 64, 32, pingpong=False, kinds="plain"),
)
KERNELS = (Kernel("bmm_tma", OP, AXES, {90: _CONFIGS}, _plan),)
