"""Batches for Hopper: the persistent kernel of kernels/mm/tma.py, whose tiles are those of one matrix after another.

Operands and result are tensor maps of three dimensions, so that what lies outside of a matrix is never its neighbour's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tk.kernels.hopper.epilogue import BatchBiasActivation, BiasActivation, InBatch, tma_store
from tk.kernels.hopper.product import multiply
from tk.kernels.hopper.stream_k import NoFixup
from tk.kernels.hopper.tile_scheduler import BatchTileOrder, PersistentScheduler, TileOrder
from tk.kernels.hopper.tma_load import TmaOperandBatch, allocate_blocks
from tk.kernels.hopper.wgmma import wgmma


@gluon.jit
def bmm_tma(maps, bias, size, tiles, a_step, b_step, group, stride_bias_b, epilogue, TILE: gl.constexpr,
            A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, EPILOGUE: gl.constexpr):  # fmt: skip
    """D = A B^T of each matrix of a batch; parameters as of ``mm_tma``. tiles: of the whole batch. a_step, b_step: from
    one matrix of the operand's tensor map to the next: 0 where the batch shares one, else 1."""
    a_smem = allocate_blocks(maps.a, TILE.STAGES * TILE.COOPERATIVE)
    a = TmaOperandBatch(maps.a, a_smem, a_step, TILE.BLOCK_M, TILE.COOPERATIVE, A_K_MAJOR, False)
    b_smem = allocate_blocks(maps.b, TILE.STAGES)
    b = TmaOperandBatch(maps.b, b_smem, b_step, TILE.BLOCK_N, 1, B_K_MAJOR, False)
    store = tma_store(maps.out, InBatch(gl.to_tensor(0), False), TILE)
    of_matrix = TileOrder(gl.cdiv(size.M, TILE.BLOCK_M), gl.cdiv(size.N, TILE.BLOCK_N), group)
    scheduler = PersistentScheduler(tiles, gl.cdiv(size.K, TILE.BLOCK_K), BatchTileOrder(of_matrix))
    of_bias = BiasActivation(size.M, size.N, bias, epilogue, False, EPILOGUE)
    finish = BatchBiasActivation(of_bias, stride_bias_b, EPILOGUE)
    multiply(a, b, wgmma(a, b, TILE), scheduler, NoFixup(TILE.BLOCK_M), store, finish, TILE)
