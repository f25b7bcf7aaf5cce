"""Groups of rows of float8 for Hopper: the kernel of kernels/grouped_mm/tma.py, with scales in its epilogue and sums
that are kept in fp32 where accumulation is to be slow."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tk.aot.spec import Arg, Int, Kernel, Launch, Plan, Point, Pointer, require
from tk.kernels.gemm.problem import out_dtype
from tk.kernels.grouped_mm.tma import tiles_of_groups
from tk.kernels.hopper.epilogue import TmaStore, TmaStoreGroupRows
from tk.kernels.hopper.pipeline import allocate_barriers
from tk.kernels.hopper.plans import batch_tensor_map, tensor_map
from tk.kernels.hopper.scales import GroupScales, ScaleBiasActivation
from tk.kernels.hopper.stream_k import NoFixup
from tk.kernels.hopper.tile_scheduler import GroupScheduler
from tk.kernels.hopper.tma_load import TmaOperand, TmaOperandBatch, TmaOperandGroupRows, layout_of_matrix
from tk.kernels.hopper.warp_roles import Consumer, Producer, specialize
from tk.kernels.scaled_grouped_mm.op import GROUPS, OP, OUT, SCALE_A, SCALE_B, SCALED_ROWS, A, B
from tk.kernels.scaled_grouped_mm.pointer import group_args
from tk.kernels.scaled_mm.op import ACCUMULATION_AXIS, OUT_AXIS
from tk.kernels.scaled_mm.tma import multiplier
from tk.kernels.scaled_mm.tma_plans import constants, predict, scale_args, serves, subtile, takes, tile

M, N, K = SCALED_ROWS.M, SCALED_ROWS.N, SCALED_ROWS.K


@gluon.jit
def scaled_grouped_mm_tma(a_desc, b_desc, out_desc, offs, scale_rows, scale_cols, bias, out, rows, cols, K, groups,
                          stride_offs, b_step, stride_scale_rows, stride_scale_bb, stride_scale_cols, stride_bias_b,
                          stride_bias, stride_om, activation, has_bias,
                          BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
                          COOPERATIVE: gl.constexpr, PINGPONG: gl.constexpr, STAGES: gl.constexpr,
                          SUBTILE_N: gl.constexpr, EPILOGUE_STAGES: gl.constexpr, PROMOTED: gl.constexpr,
                          CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr):  # fmt: skip
    """Parameters as of ``scaled_mm_tma`` and ``grouped_mm_tma``."""
    ROWS: gl.constexpr = BLOCK_M // COOPERATIVE
    CONSUMERS: gl.constexpr = 2 if PINGPONG else COOPERATIVE
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * COOPERATIVE] + a_desc.block_shape, a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_shape[1:], layout_of_matrix(b_desc.layout))
    of_all = TmaOperand(a_desc, a_smem, BLOCK_M, COOPERATIVE, True, False, None, False)
    a = TmaOperandGroupRows(of_all, gl.to_tensor(0), BLOCK_M, False)
    b = TmaOperandBatch(b_desc, b_smem, b_step, gl.to_tensor(0), BLOCK_N, 1, True, False)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS * EPILOGUE_STAGES] + out_desc.block_shape,
                                         out_desc.layout)  # fmt: skip
    pipeline, order = allocate_barriers(STAGES, 2, COOPERATIVE, 2 if PINGPONG else 1)
    fence_async_shared()
    gl.barrier()
    scheduler = GroupScheduler(offs, stride_offs, groups, rows, gl.cdiv(cols, BLOCK_N), gl.cdiv(K, BLOCK_K), BLOCK_M)
    whole = TmaStore(out_smem, out_desc, False, EPILOGUE_STAGES)
    store = TmaStoreGroupRows(whole, out_desc, out, stride_om, cols, gl.to_tensor(0), gl.to_tensor(0), EPILOGUE_STAGES)
    of_rows = ScaleBiasActivation(rows, cols, scale_rows, scale_cols, bias, stride_scale_rows, stride_scale_cols,
                                  stride_bias, activation, has_bias, False, "vector")  # fmt: skip
    epilogue = GroupScales(of_rows, stride_scale_bb, stride_bias_b, "vector")
    producer_a = Producer(a, pipeline, scheduler, 0, BLOCK_K)
    producer_b = Producer(b, pipeline, scheduler, 1, BLOCK_K)
    consumer = Consumer(multiplier(of_all, b, ROWS, COOPERATIVE, 0, PROMOTED), store, pipeline, order, NoFixup(BLOCK_M),
                        scheduler, epilogue, BLOCK_M, BLOCK_N, SUBTILE_N, COOPERATIVE, PINGPONG, 0)  # fmt: skip
    consumers = (consumer,)
    for i in gl.static_range(1, CONSUMERS):
        mma = multiplier(of_all, b, ROWS, COOPERATIVE, i % COOPERATIVE, PROMOTED)
        consumers = consumers + (gl.aggregate_replace(consumer, mma=mma, INDEX=i),)
    specialize(consumers, (producer_a, producer_b), CONSUMER_REGS, PRODUCER_REGS)


# --- The plan ---


def _arguments(point: Point) -> dict[str, Arg]:
    c = point.config
    rows = c.block_m // c.cooperative
    maps = dict(
        a_desc=tensor_map(A, point.dtype, 1, (rows, c.block_k)),
        b_desc=batch_tensor_map(B, point.b_dtype, 0, (c.block_k, c.block_n), is_shared=True),
        out_desc=tensor_map(OUT, out_dtype(point), 1, (rows, subtile(point))),
    )
    rest = dict(
        out=Pointer(OUT, out_dtype(point)),
        stride_om=Int(OUT.stride(0), "i64"),
        b_step=Int(B.batch_stride != 0),
        rows=Int(M),
        cols=Int(N),
        K=Int(K),
    )
    return maps | rest | scale_args(SCALED_ROWS, point, SCALE_A, SCALE_B) | group_args() | constants(point)


def _plan(point: Point) -> Plan | None:
    if not takes(point):
        return None
    work, grid, countable = tiles_of_groups(SCALED_ROWS, GROUPS, point.config, each_reads_b=True)
    constraints = (
        *SCALED_ROWS.suits_tma(point),
        SCALED_ROWS.out_suits_tma(point),
        require(K > 0, "K > 0"),
        require(B.batch_stride % 16 == 0, "b's matrices a multiple of 16 elements apart"),
        *countable,
    )
    return Plan(
        constraints=constraints,
        serves=serves(point),
        launches=(Launch(scaled_grouped_mm_tma, _arguments(point), grid=(grid, 1, 1), num_warps=4),),
        cost=predict(point, work),
        terms=work.terms(point),
    )


# --- The grid ---

_CONFIGS = (
    tile(64, 128, 8, 64, 32, "slow fast", "pingpong"),
    tile(64, 256, 4, 32, 16, "fast", "pingpong"),
    tile(128, 128, 6, 64, 32, all_types=True),
    tile(128, 256, 4, 32, 16, "fast"),
)
# Of torch's own there is but the product of two e4m3fn. What gives another dtype has one config.
_AXES = {
    "dtype": ("fp8e4nv",),
    "b_dtype": ("fp8e4nv",),
    "out": OUT_AXIS,
    "accumulation": ACCUMULATION_AXIS,
    "order": ("nt",),
}
KERNELS = (Kernel("scaled_grouped_mm_tma", OP, _AXES, {90: _CONFIGS}, _plan),)
