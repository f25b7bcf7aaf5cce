"""Groups of rows for Hopper: the persistent kernel of kernels/mm/tma.py, with a tile scheduler that walks the groups.

The rows of all groups are one tensor map, the groups' matrices one of three dimensions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tk.aot.expr import Expr, ceil_div, minimum
from tk.aot.spec import Arg, Config, Const, Constraint, Int, Kernel, Launch, Plan, Point, Pointer, require
from tk.kernels.gemm.cost import Work, predict
from tk.kernels.gemm.problem import OUT_AXIS, Gemm, out_dtype
from tk.kernels.grouped_mm.op import BIAS, DTYPE_AXIS, GROUPS, OF_ROWS, OFFS, OUT, ROWS, STRIDE_OFFS, A, B, longest
from tk.kernels.grouped_mm.pointer import serves
from tk.kernels.hopper.epilogue import BatchBiasActivation, BiasActivation, TmaStore, TmaStoreGroupRows
from tk.kernels.hopper.pipeline import allocate_barriers
from tk.kernels.hopper.plans import batch_tensor_map, resident_clusters, tensor_map
from tk.kernels.hopper.stream_k import NoFixup
from tk.kernels.hopper.tile_scheduler import GroupScheduler
from tk.kernels.hopper.tma_load import TmaOperand, TmaOperandBatch, TmaOperandGroupRows, layout_of_matrix
from tk.kernels.hopper.warp_roles import Consumer, Producer, specialize
from tk.kernels.hopper.wgmma import Wgmma

M, N, K = OF_ROWS.M, OF_ROWS.N, OF_ROWS.K


@gluon.jit
def grouped_mm_tma(a_desc, b_desc, out_desc, offs, bias, out, rows, cols, K, groups, stride_offs, b_step, stride_bias_b,
                   stride_bias_n, stride_om, alpha, beta, activation, has_bias,
                   BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, COOPERATIVE: gl.constexpr,
                   PINGPONG: gl.constexpr, A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, STAGES: gl.constexpr,
                   SUBTILE_N: gl.constexpr, EPILOGUE_STAGES: gl.constexpr, CONSUMER_REGS: gl.constexpr,
                   PRODUCER_REGS: gl.constexpr):  # fmt: skip
    """Parameters as of ``mm_tma`` and ``bmm_tma``."""
    ROWS: gl.constexpr = BLOCK_M // COOPERATIVE
    CONSUMERS: gl.constexpr = 2 if PINGPONG else COOPERATIVE
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * COOPERATIVE] + a_desc.block_shape, a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_shape[1:], layout_of_matrix(b_desc.layout))
    of_all = TmaOperand(a_desc, a_smem, BLOCK_M, COOPERATIVE, A_K_MAJOR, False, None, False)
    a = TmaOperandGroupRows(of_all, gl.to_tensor(0), BLOCK_M, False)
    b = TmaOperandBatch(b_desc, b_smem, b_step, gl.to_tensor(0), BLOCK_N, 1, B_K_MAJOR, False)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS * EPILOGUE_STAGES] + out_desc.block_shape,
                                         out_desc.layout)  # fmt: skip
    pipeline, order = allocate_barriers(STAGES, 2, COOPERATIVE, 2 if PINGPONG else 1)
    fence_async_shared()
    gl.barrier()
    scheduler = GroupScheduler(offs, stride_offs, groups, rows, gl.cdiv(cols, BLOCK_N), gl.cdiv(K, BLOCK_K), BLOCK_M)
    whole = TmaStore(out_smem, out_desc, False, EPILOGUE_STAGES)
    store = TmaStoreGroupRows(whole, out_desc, out, stride_om, cols, gl.to_tensor(0), gl.to_tensor(0), EPILOGUE_STAGES)
    none = gl.to_tensor(0)
    of_group = BiasActivation(rows, cols, bias, none, stride_bias_n, alpha, beta, activation, has_bias, False, "vector")
    epilogue = BatchBiasActivation(of_group, stride_bias_b, "vector")
    producer_a = Producer(a, pipeline, scheduler, 0, BLOCK_K)
    producer_b = Producer(b, pipeline, scheduler, 1, BLOCK_K)
    mma = Wgmma(a_smem, b_smem, ROWS, BLOCK_N, A_K_MAJOR, B_K_MAJOR, COOPERATIVE, 0)
    consumer = Consumer(mma, store, pipeline, order, NoFixup(BLOCK_M), scheduler, epilogue, BLOCK_M, BLOCK_N, SUBTILE_N,
                        COOPERATIVE, PINGPONG, 0)  # fmt: skip
    consumers = (consumer,)
    for i in gl.static_range(1, CONSUMERS):
        consumers = consumers + (
            gl.aggregate_replace(consumer, mma=gl.aggregate_replace(mma, INDEX=i % COOPERATIVE), INDEX=i),
        )
    specialize(consumers, (producer_a, producer_b), CONSUMER_REGS, PRODUCER_REGS)


# --- The plan ---


def _operands(point: Point) -> dict[str, Arg]:
    c = point.config
    rows = c.block_m // c.cooperative
    a_k, b_k = point.order[0] == "n", point.order[1] == "t"  # K contiguous
    subtile = c.subtile_n_fp32 if out_dtype(point) == "fp32" else c.subtile_n
    return dict(
        a_desc=tensor_map(A, point.dtype, 1 if a_k else 0, (rows, c.block_k)),
        b_desc=batch_tensor_map(B, point.dtype, 0 if b_k else 1, (c.block_k, c.block_n), is_shared=True),
        out_desc=tensor_map(OUT, out_dtype(point), 1, (rows, subtile), round_to_tf32=False),
        out=Pointer(OUT, out_dtype(point)),
        stride_om=Int(OUT.stride(0), "i64"),
        b_step=Int(B.batch_stride != 0),
        A_K_MAJOR=Const(a_k),
        B_K_MAJOR=Const(b_k),
        SUBTILE_N=Const(subtile),
    )


def _arguments(point: Point) -> dict[str, Arg]:
    c = point.config
    constants = dict(BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, COOPERATIVE=c.cooperative,
                     PINGPONG=c.pingpong, STAGES=c.num_stages, EPILOGUE_STAGES=2, CONSUMER_REGS=232,
                     PRODUCER_REGS=24)  # fmt: skip
    of_groups = dict(
        offs=Pointer(OFFS, "i32", aligned=False),
        groups=Int(GROUPS),
        stride_offs=Int(STRIDE_OFFS, "i64"),
        stride_bias_b=Int(BIAS.batch_stride, "i64"),
        stride_bias_n=Int(BIAS.stride(1), "i64"),
    )
    return (
        _operands(point)
        | OF_ROWS.epilogue_args(point.dtype)
        | of_groups
        | dict(rows=Int(M), cols=Int(N), K=Int(K))
        | {name: Const(value) for name, value in constants.items()}
    )


def tiles_of_groups(
    gemm: Gemm, groups: Expr, c: Config, each_reads_b: bool = False
) -> tuple[Work, Expr, tuple[Constraint, ...]]:
    """What a persistent kernel has to do for groups of rows, with how many programs, and what it cannot count.

    each_reads_b: a row of tiles reads its own group's part of b alone."""
    n_tiles = ceil_div(gemm.N, c.block_n)
    of_group = ceil_div(longest(gemm.M_choice, groups), c.block_m)
    waves = ceil_div(groups * of_group * n_tiles, resident_clusters(1))
    work = Work(
        gemm,
        waves=waves,
        k_blocks=waves * ceil_div(gemm.K, c.block_k),
        flops=2 * c.block_m * c.block_n * c.block_k,
        dram=gemm.traffic(),
        tile=(c.block_m, c.block_n),
        boxes=(c.block_m, c.block_n),
        b_reads=of_group if each_reads_b else None,
    )
    # No more programs than there can be tiles.
    most_tiles = (gemm.M // c.block_m + groups) * n_tiles
    constraints = (
        require(groups < 2**20, "fewer than 2**20 groups"),
        require(most_tiles < 2**31 - 2**16, "tiles that 32 bits can count"),
    )
    return work, minimum(resident_clusters(1), most_tiles), constraints


def _plan(point: Point) -> Plan | None:
    if point.out == "fp32" and not point.config.fp32_out:
        return None
    work, grid, countable = tiles_of_groups(OF_ROWS, GROUPS, point.config)
    constraints = (
        *OF_ROWS.suits_tma(point),
        OF_ROWS.out_suits_tma(point),
        require(K > 0, "K > 0"),
        require(B.batch_stride % 8 == 0, "b's matrices a multiple of 8 elements apart"),
        *countable,
    )
    return Plan(
        constraints=constraints,
        serves=serves(point),
        launches=(Launch(grouped_mm_tma, _arguments(point), grid=(grid, 1, 1), num_warps=4),),
        cost=predict(point, work),
        terms=work.terms(point),
    )


# --- The grid ---


def _tile(block_m: int, block_n: int, num_stages: int, subtile_n: int, subtile_n_fp32: int, pingpong: bool = True,
          fp32_out: bool = False) -> Config:  # fmt: skip
    """fp32_out: compiled for a result of float32 too."""
    params = dict(block_m=block_m, block_n=block_n, block_k=64, num_stages=num_stages, subtile_n=subtile_n,
                  subtile_n_fp32=subtile_n_fp32, pingpong=pingpong, cooperative=1 if pingpong else 2,
                  fp32_out=fp32_out)  # fmt: skip
    return Config(f"{block_m}x{block_n}x64_s{num_stages}_{'pingpong' if pingpong else 'coop'}", params)


_CONFIGS = (
    _tile(64, 128, 8, 64, 32),
    _tile(64, 256, 4, 64, 32),
    _tile(128, 128, 6, 32, 16),
    _tile(128, 128, 6, 64, 32, pingpong=False, fp32_out=True),
    _tile(128, 256, 4, 64, 32, pingpong=False),
)
_AXES = {"dtype": DTYPE_AXIS, "precision": ("ieee",), "out": OUT_AXIS, "order": ("nn", "nt")}
KERNELS = (Kernel("grouped_mm_tma", ROWS, _AXES, {90: _CONFIGS}, _plan),)
