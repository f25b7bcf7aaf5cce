"""The plan and the grid of ``bmm_tma``."""

from tk.aot.expr import Expr, ceil_div, maximum, minimum, select
from tk.aot.spec import Arg, Bundle, Const, Int, Kernel, Launch, Plan, Point
from tk.kernels.bmm.op import BATCH, BATCH_CHOICE, BIAS, BMM, OP, OUT, A, B, batches_suit_tma
from tk.kernels.bmm.tma import bmm_tma
from tk.kernels.gemm.cost import Work, is_fitted, memory_time, predict
from tk.kernels.gemm.problem import EPILOGUE_AXIS, OUT_AXIS, Batch, makes_sense, out_dtype, serves
from tk.kernels.hopper.arguments import Maps
from tk.kernels.hopper.plans import (
    batch_tensor_map,
    config,
    k_major,
    like_mm,
    resident_clusters,
    subtile,
    tile_of,
)

M, N, K = BMM.M, BMM.N, BMM.K


def _maps(point: Point) -> Maps:
    c = point.config
    rows = c.block_m // c.cooperative
    a_k, b_k = k_major(point)
    return Maps(
        a=batch_tensor_map(A, point.dtype, 1 if a_k else 0, (rows, c.block_k), is_shared=True),
        b=batch_tensor_map(B, point.dtype, 0 if b_k else 1, (c.block_k, c.block_n), is_shared=True),
        out=batch_tensor_map(OUT, out_dtype(point), 1, (rows, subtile(point)), round_to_tf32=False),
    )


def _step(t: Batch) -> Int:
    return Int(select(t.batch_stride == 0, 0, 1))


def _arguments(point: Point) -> dict[str, Arg | Bundle]:
    a_k, b_k = k_major(point)
    return dict(
        maps=_maps(point),
        bias=BMM.bias_pointer(point.dtype),
        size=BMM.size(),
        tiles=Int(_tiles(point, M, BATCH)),
        a_step=_step(A),
        b_step=_step(B),
        group=Const(8),
        stride_bias_b=Int(BIAS.batch_stride, "i64"),
        epilogue=BMM.epilogue(),
        TILE=Const(tile_of(point)),
        A_K_MAJOR=Const(a_k),
        B_K_MAJOR=Const(b_k),
        EPILOGUE=Const(point.epilogue),
    )


def _tiles(point: Point, rows, batch):  # type: ignore[no-untyped-def]
    return ceil_div(rows, point.config.block_m) * ceil_div(N, point.config.block_n) * batch


def _cost(point: Point, work: Work) -> Expr:
    """Picoseconds. mm's weights come from products that reuse what they read; a batch of small ones waits for memory,
    and is then still the faster for tiles that suit it."""
    found = predict(point, work, like=like_mm(point))
    return found if is_fitted(point, work) else maximum(found, memory_time(point, work) + found // 8)


def _plan(point: Point) -> Plan | None:
    c = point.config
    kinds = c.kinds.split()
    is_compiled = point.epilogue in kinds if point.out == "same" else "fp32" in kinds and point.epilogue == "matrix"
    if not makes_sense(point) or not is_compiled:
        return None
    waves = ceil_div(_tiles(point, BMM.M_choice, BATCH_CHOICE), resident_clusters(1))
    work = Work(
        BMM,
        waves=waves,
        k_blocks=waves * ceil_div(K, c.block_k),
        flops=2 * c.block_m * c.block_n * c.block_k,
        dram=BMM.traffic(),
        tile=(c.block_m, c.block_n),
        boxes=(c.block_m, c.block_n),
    )
    grid = minimum(resident_clusters(1), _tiles(point, M, BATCH))
    served = ("plain",) if point.epilogue == "plain" else EPILOGUE_AXIS[0 if point.out == "fp32" else 1 :]
    return Plan(
        constraints=(*BMM.suits_tma(point), BMM.out_suits_tma(point), *batches_suit_tma(point)),
        serves=serves(point, served),
        launches=(Launch(bmm_tma, _arguments(point), grid=(grid, 1, 1), num_warps=4),),
        cost=_cost(point, work),
        terms=work.terms(point),
    )


# --- The grid ---


# Where a consumer has more than 64 accumulators for each thread, a matrix of bias does not fit beside them.
_CONFIGS = (
    config(64, 64, 10, 32, 16),
    config(64, 128, 8, 64, 32, kinds="plain matrix"),
    config(128, 64, 8, 32, 16),
    config(128, 128, 6, 32, 16),
    config(128, 128, 6, 64, 32, pingpong=False, kinds="plain matrix fp32"),
    config(128, 256, 4, 64, 32, pingpong=False),
)
_AXES = {
    "dtype": ("bf16", "fp16"),
    "precision": ("ieee",),
    "out": OUT_AXIS,
    "order": ("nn", "nt", "tn", "tt"),
    "epilogue": ("plain", "matrix"),
}
KERNELS = (Kernel("bmm_tma", OP, _AXES, {90: _CONFIGS}, _plan),)
