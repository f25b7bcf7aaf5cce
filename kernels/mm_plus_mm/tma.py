"""Two products in one accumulator for Hopper: the persistent kernel of kernels/mm/tma.py, whose ring first brings the
blocks of K of the one and then those of the other."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tk.aot.expr import ceil_div, minimum
from tk.aot.spec import Arg, Const, Int, Kernel, Launch, Plan, Point
from tk.kernels.gemm.cost import Work, predict
from tk.kernels.gemm.problem import EPILOGUE_AXIS, OUT_AXIS, makes_sense, out_dtype, serves
from tk.kernels.hopper.epilogue import BiasActivation, TmaStore
from tk.kernels.hopper.pipeline import allocate_barriers
from tk.kernels.hopper.plans import config, like_mm, resident_clusters, tensor_map
from tk.kernels.hopper.stream_k import NoFixup
from tk.kernels.hopper.tile_scheduler import PersistentScheduler, TileOrder
from tk.kernels.hopper.tma_load import TmaOperand, TmaOperandPair
from tk.kernels.hopper.warp_roles import Consumer, Producer, specialize
from tk.kernels.hopper.wgmma import Wgmma
from tk.kernels.mm_plus_mm.op import BIAS, FIRST, K2, OP, OUT, A, B, C, D, suits_tma

M, N, K = FIRST.M, FIRST.N, FIRST.K


@gluon.jit
def _operand(first_desc, second_desc, second_begins, STAGES: gl.constexpr, TILE: gl.constexpr, BLOCKS: gl.constexpr,
             K_MAJOR: gl.constexpr):  # fmt: skip
    smem = gl.allocate_shared_memory(first_desc.dtype, [STAGES * BLOCKS] + first_desc.block_shape, first_desc.layout)
    first = TmaOperand(first_desc, smem, TILE, BLOCKS, K_MAJOR, False, None, False)
    second = TmaOperand(second_desc, smem, TILE, BLOCKS, K_MAJOR, False, None, False)
    return TmaOperandPair(first, second, second_begins, smem, TILE, False)


@gluon.jit
def mm_plus_mm_tma(a_desc, b_desc, c_desc, d_desc, out_desc, bias, rows, cols, K, K2, tiles, group, stride_bias_m,
                   stride_bias_n, alpha, beta, activation, has_bias,
                   BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, COOPERATIVE: gl.constexpr,
                   PINGPONG: gl.constexpr, A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, STAGES: gl.constexpr,
                   SUBTILE_N: gl.constexpr, EPILOGUE_STAGES: gl.constexpr, EPILOGUE: gl.constexpr,
                   CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr):  # fmt: skip
    """Parameters as of ``mm_tma``. K is a's and b's, K2 c's and d's, which are stored the same way round."""
    ROWS: gl.constexpr = BLOCK_M // COOPERATIVE
    CONSUMERS: gl.constexpr = 2 if PINGPONG else COOPERATIVE
    k_blocks = gl.cdiv(K, BLOCK_K)
    second_begins = k_blocks * BLOCK_K
    a = _operand(a_desc, c_desc, second_begins, STAGES, BLOCK_M, COOPERATIVE, A_K_MAJOR)
    b = _operand(b_desc, d_desc, second_begins, STAGES, BLOCK_N, 1, B_K_MAJOR)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS * EPILOGUE_STAGES] + out_desc.block_shape,
                                         out_desc.layout)  # fmt: skip
    pipeline, order = allocate_barriers(STAGES, 2, COOPERATIVE, 2 if PINGPONG else 1)
    fence_async_shared()
    gl.barrier()
    tile_order = TileOrder(gl.cdiv(rows, BLOCK_M), gl.cdiv(cols, BLOCK_N), group)
    scheduler = PersistentScheduler(tiles, k_blocks + gl.cdiv(K2, BLOCK_K), tile_order)
    store = TmaStore(out_smem, out_desc, False, EPILOGUE_STAGES)
    epilogue = BiasActivation(rows, cols, bias, stride_bias_m, stride_bias_n, alpha, beta, activation, has_bias, False,
                              EPILOGUE)  # fmt: skip
    producer_a = Producer(a, pipeline, scheduler, 0, BLOCK_K)
    producer_b = Producer(b, pipeline, scheduler, 1, BLOCK_K)
    mma = Wgmma(a.smem, b.smem, ROWS, BLOCK_N, A_K_MAJOR, B_K_MAJOR, COOPERATIVE, 0)
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
    maps = {
        name: tensor_map(t, point.dtype, 1 if a_k else 0, (rows, c.block_k)) for name, t in (("a", A), ("c", C))
    } | {
        name: tensor_map(t, point.dtype, 0 if b_k else 1, (c.block_k, c.block_n), 1) for name, t in (("b", B), ("d", D))
    }
    return {f"{name}_desc": m for name, m in maps.items()} | dict(
        out_desc=tensor_map(OUT, out_dtype(point), 1, (rows, subtile), round_to_tf32=False),
        A_K_MAJOR=Const(a_k),
        B_K_MAJOR=Const(b_k),
        SUBTILE_N=Const(subtile),
    )


def _arguments(point: Point, tiles) -> dict[str, Arg]:  # type: ignore[no-untyped-def]
    c = point.config
    constants = dict(BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, COOPERATIVE=c.cooperative,
                     PINGPONG=c.pingpong, STAGES=c.num_stages, EPILOGUE_STAGES=2, EPILOGUE=point.epilogue,
                     CONSUMER_REGS=232, PRODUCER_REGS=24)  # fmt: skip
    return (
        _operands(point)
        | FIRST.epilogue_args(point.dtype)
        | dict(stride_bias_m=Int(BIAS.stride(0), "i64"), stride_bias_n=Int(BIAS.stride(1), "i64"))
        | dict(rows=Int(M), cols=Int(N), K=Int(K), K2=Int(K2), tiles=Int(tiles), group=Const(8))
        | {name: Const(value) for name, value in constants.items()}
    )


def _plan(point: Point) -> Plan | None:
    c = point.config
    kinds = c.kinds.split()
    is_compiled = point.epilogue in kinds if point.out == "same" else "fp32" in kinds and point.epilogue == "matrix"
    if not makes_sense(point) or not is_compiled:
        return None

    def tiles(rows):  # type: ignore[no-untyped-def]
        return ceil_div(rows, c.block_m) * ceil_div(N, c.block_n)

    waves = ceil_div(tiles(FIRST.M_choice), resident_clusters(1))
    work = Work(
        FIRST,
        waves=waves,
        k_blocks=waves * (ceil_div(K, c.block_k) + ceil_div(K2, c.block_k)),
        flops=2 * c.block_m * c.block_n * c.block_k,
        dram=FIRST.traffic(),
        tile=(c.block_m, c.block_n),
        boxes=(c.block_m, c.block_n),
    )
    served = ("plain",) if point.epilogue == "plain" else EPILOGUE_AXIS[0 if point.out == "fp32" else 1 :]
    grid = minimum(resident_clusters(1), tiles(M))
    return Plan(
        constraints=suits_tma(point),
        serves=serves(point, served),
        launches=(Launch(mm_plus_mm_tma, _arguments(point, tiles(M)), grid=(grid, 1, 1), num_warps=4),),
        cost=predict(point, work, like=like_mm(point)),
        terms=work.terms(point),
    )


# --- The grid ---


_CONFIGS = (
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
KERNELS = (Kernel("mm_plus_mm_tma", OP, _AXES, {90: _CONFIGS}, _plan),)
