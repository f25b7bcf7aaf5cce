"""Batches for Hopper: the persistent kernel of kernels/mm/tma.py, whose tiles are those of one matrix after another.

Operands and result are tensor maps of three dimensions, so that what lies outside of a matrix is never its neighbour's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tk.kernels.hopper.epilogue import BatchBiasActivation, BiasActivation, TmaStoreBatch
from tk.kernels.hopper.pipeline import allocate_barriers
from tk.kernels.hopper.stream_k import NoFixup
from tk.kernels.hopper.tile_scheduler import BatchTileOrder, PersistentScheduler, TileOrder
from tk.kernels.hopper.tma_load import TmaOperandBatch, layout_of_matrix
from tk.kernels.hopper.warp_roles import Consumer, Producer, specialize
from tk.kernels.hopper.wgmma import Wgmma


@gluon.jit
def _operand(desc, step, STAGES: gl.constexpr, TILE: gl.constexpr, BLOCKS: gl.constexpr, K_MAJOR: gl.constexpr):
    LAYOUT: gl.constexpr = layout_of_matrix(desc.layout)
    smem = gl.allocate_shared_memory(desc.dtype, [STAGES * BLOCKS] + desc.block_shape[1:], LAYOUT)
    return TmaOperandBatch(desc, smem, step, gl.to_tensor(0), TILE, BLOCKS, K_MAJOR, False)


@gluon.jit
def bmm_tma(a_desc, b_desc, out_desc, bias, rows, cols, K, tiles, a_step, b_step, group, stride_bias_b, stride_bias_m,
            stride_bias_n, alpha, beta, activation, has_bias,
            BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, COOPERATIVE: gl.constexpr,
            PINGPONG: gl.constexpr, A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, STAGES: gl.constexpr,
            SUBTILE_N: gl.constexpr, EPILOGUE_STAGES: gl.constexpr, EPILOGUE: gl.constexpr,
            CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr):  # fmt: skip
    """D = A B^T of each matrix of a batch, rows x cols; parameters as of ``mm_tma``. tiles: of the whole batch. a_step,
    b_step: from one matrix of the operand's tensor map to the next: 0 where the batch shares one, else 1."""
    ROWS: gl.constexpr = BLOCK_M // COOPERATIVE
    CONSUMERS: gl.constexpr = 2 if PINGPONG else COOPERATIVE
    a = _operand(a_desc, a_step, STAGES, BLOCK_M, COOPERATIVE, A_K_MAJOR)
    b = _operand(b_desc, b_step, STAGES, BLOCK_N, 1, B_K_MAJOR)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS * EPILOGUE_STAGES] + out_desc.block_shape[1:],
                                         layout_of_matrix(out_desc.layout))  # fmt: skip
    pipeline, order = allocate_barriers(STAGES, 2, COOPERATIVE, 2 if PINGPONG else 1)
    fence_async_shared()
    gl.barrier()
    of_matrix = TileOrder(gl.cdiv(rows, BLOCK_M), gl.cdiv(cols, BLOCK_N), group)
    scheduler = PersistentScheduler(tiles, gl.cdiv(K, BLOCK_K), BatchTileOrder(of_matrix))
    store = TmaStoreBatch(out_smem, out_desc, gl.to_tensor(0), EPILOGUE_STAGES)
    of_bias = BiasActivation(rows, cols, bias, stride_bias_m, stride_bias_n, alpha, beta, activation, has_bias, False,
                             EPILOGUE)  # fmt: skip
    epilogue = BatchBiasActivation(of_bias, stride_bias_b, EPILOGUE)
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
