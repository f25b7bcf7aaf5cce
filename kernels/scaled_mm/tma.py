"""Products of float8 for Hopper: the persistent kernel of kernels/mm/tma.py with scales in its epilogue, and sums that
are kept in fp32 where accumulation is to be slow.

    scaled_mm_tma             tensor maps come from the host
    scaled_mm_tma_stream_k    the same function for few rows, whose tiles are cut along K; always with swap-AB
    scaled_mm_tma_device_maps each program makes the tensor maps, in scratch memory
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tk.kernels.hopper.dependent_launch import launch_dependents
from tk.kernels.hopper.epilogue import TmaStore
from tk.kernels.hopper.pipeline import allocate_barriers
from tk.kernels.hopper.scales import ScaleBiasActivation
from tk.kernels.hopper.stream_k import Fixup, NoFixup
from tk.kernels.hopper.tile_scheduler import PersistentScheduler, StreamKScheduler, TileOrder
from tk.kernels.hopper.tma_load import EVICT_FIRST, TmaOperand
from tk.kernels.hopper.warp_roles import Consumer, Producer, specialize
from tk.kernels.hopper.wgmma import Wgmma, WgmmaPromoted


@gluon.jit
def multiplier(a, b, ROWS: gl.constexpr, COOPERATIVE: gl.constexpr, INDEX: gl.constexpr, PROMOTED: gl.constexpr):
    """What consumer INDEX multiplies of the operands `a` and `b`."""
    if PROMOTED:
        return WgmmaPromoted(a.smem, b.smem, ROWS, b.TILE, COOPERATIVE, INDEX)
    else:
        return Wgmma(a.smem, b.smem, ROWS, b.TILE, True, True, COOPERATIVE, INDEX)


@gluon.jit
def _multiply(a_desc, b_desc, out_desc, scheduler, fixup, epilogue,
              BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
              COOPERATIVE: gl.constexpr, PINGPONG: gl.constexpr, SWAP_AB: gl.constexpr, STAGES: gl.constexpr,
              SUBTILE_N: gl.constexpr, EPILOGUE_STAGES: gl.constexpr, PROMOTED: gl.constexpr,
              WEIGHTS: gl.constexpr, AHEAD: gl.constexpr, CONSUMER_REGS: gl.constexpr,
              PRODUCER_REGS: gl.constexpr):  # fmt: skip
    """D = A B^T by the tiles of `scheduler`. WEIGHTS: the L2 policy of the op's b. AHEAD: b may be read before the
    kernels ahead have ended."""
    ROWS: gl.constexpr = BLOCK_M // COOPERATIVE
    CONSUMERS: gl.constexpr = 2 if PINGPONG else COOPERATIVE
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * COOPERATIVE] + a_desc.block_shape, a_desc.layout)
    a = TmaOperand(a_desc, a_smem, BLOCK_M, COOPERATIVE, True, False, WEIGHTS if SWAP_AB else None, SWAP_AB and AHEAD)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_shape, b_desc.layout)
    b = TmaOperand(b_desc, b_smem, BLOCK_N, 1, True, gl.num_ctas() > 1, None if SWAP_AB else WEIGHTS,
                   not SWAP_AB and AHEAD)  # fmt: skip
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS * EPILOGUE_STAGES] + out_desc.block_shape,
                                         out_desc.layout)  # fmt: skip
    pipeline, order = allocate_barriers(STAGES, 2, COOPERATIVE, 2 if PINGPONG else 1)
    fence_async_shared()
    gl.barrier()
    launch_dependents()
    store = TmaStore(out_smem, out_desc, SWAP_AB, EPILOGUE_STAGES)
    producer_a = Producer(a, pipeline, scheduler, 0, BLOCK_K)
    producer_b = Producer(b, pipeline, scheduler, 1, BLOCK_K)
    consumer = Consumer(multiplier(a, b, ROWS, COOPERATIVE, 0, PROMOTED), store, pipeline, order, fixup, scheduler,
                        epilogue, BLOCK_M, BLOCK_N, SUBTILE_N, COOPERATIVE, PINGPONG, 0)  # fmt: skip
    consumers = (consumer,)
    for i in gl.static_range(1, CONSUMERS):
        mma = multiplier(a, b, ROWS, COOPERATIVE, i % COOPERATIVE, PROMOTED)
        consumers = consumers + (gl.aggregate_replace(consumer, mma=mma, INDEX=i),)
    specialize(consumers, (producer_a, producer_b), CONSUMER_REGS, PRODUCER_REGS)


@gluon.jit
def scaled_mm_tma(a_desc, b_desc, out_desc, workspace, counters, scale_rows, scale_cols, bias, rows, cols, K, whole,
                  share, group, stride_scale_rows, stride_scale_cols, stride_bias, activation, has_bias,
                  BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
                  COOPERATIVE: gl.constexpr, PINGPONG: gl.constexpr, SWAP_AB: gl.constexpr, STAGES: gl.constexpr,
                  SUBTILE_N: gl.constexpr, EPILOGUE_STAGES: gl.constexpr, PROMOTED: gl.constexpr,
                  STREAM_K: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr):  # fmt: skip
    """D = A B^T, rows x cols (kernels/hopper/__init__.py), both along K; scale_rows and scale_cols are D's. Other
    parameters as of ``mm_tma``. PROMOTED: sums are kept in fp32."""
    tiles = TileOrder(gl.cdiv(rows, BLOCK_M), gl.cdiv(cols, BLOCK_N), group)
    k_blocks = gl.cdiv(K, BLOCK_K)
    if STREAM_K:
        scheduler = StreamKScheduler(whole, tiles.m_tiles * tiles.n_tiles, k_blocks, share, tiles)
        fixup = Fixup(workspace, counters, BLOCK_M)
    else:
        scheduler = PersistentScheduler(whole, k_blocks, tiles)
        fixup = NoFixup(BLOCK_M)
    epilogue = ScaleBiasActivation(rows, cols, scale_rows, scale_cols, bias, stride_scale_rows, stride_scale_cols,
                                   stride_bias, activation, has_bias, SWAP_AB, "vector")  # fmt: skip
    _multiply(a_desc, b_desc, out_desc, scheduler, fixup, epilogue, BLOCK_M, BLOCK_N, BLOCK_K, COOPERATIVE,
              PINGPONG, SWAP_AB, STAGES, SUBTILE_N, EPILOGUE_STAGES, PROMOTED, EVICT_FIRST if STREAM_K else None, True,
              CONSUMER_REGS, PRODUCER_REGS)  # fmt: skip


@gluon.constexpr_function
def _layout(dtype, cols):
    """In shared memory, of rows of `cols` elements."""
    bits = dtype.primitive_bitwidth
    return gl.NVMMASharedLayout(min(128, bits * cols // 8), bits, 2)


@gluon.jit
def _make_map(matrix, rows, cols, stride, ROWS: gl.constexpr, COLS: gl.constexpr):
    """A tensor map of a matrix whose rows lie `stride` apart, for blocks of ROWS x COLS."""
    LAYOUT: gl.constexpr = _layout(matrix.dtype.element_ty, COLS)
    return tma.make_tensor_descriptor(matrix, [rows, cols], [stride, 1], [ROWS, COLS], LAYOUT)


@gluon.jit
def scaled_mm_tma_device_maps(a, b, out, scale_rows, scale_cols, bias, rows, cols, K, whole, group, stride_a, stride_b,
                              stride_out, stride_scale_rows, stride_scale_cols, stride_bias, activation, has_bias,
                              BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
                              COOPERATIVE: gl.constexpr, PINGPONG: gl.constexpr,
                              STAGES: gl.constexpr, SUBTILE_N: gl.constexpr, EPILOGUE_STAGES: gl.constexpr,
                              PROMOTED: gl.constexpr, CONSUMER_REGS: gl.constexpr,
                              PRODUCER_REGS: gl.constexpr):  # fmt: skip
    """The same by whole tiles, of matrices instead of their tensor maps. stride_a: from row to row of a, stride_b: from
    column to column of b."""
    ROWS: gl.constexpr = BLOCK_M // COOPERATIVE
    a_desc = _make_map(a, rows, K, stride_a, ROWS, BLOCK_K)
    b_desc = _make_map(b, cols, K, stride_b, BLOCK_N, BLOCK_K)
    out_desc = _make_map(out, rows, cols, stride_out, ROWS, SUBTILE_N)
    tiles = TileOrder(gl.cdiv(rows, BLOCK_M), gl.cdiv(cols, BLOCK_N), group)
    scheduler = PersistentScheduler(whole, gl.cdiv(K, BLOCK_K), tiles)
    epilogue = ScaleBiasActivation(rows, cols, scale_rows, scale_cols, bias, stride_scale_rows, stride_scale_cols,
                                   stride_bias, activation, has_bias, False, "vector")  # fmt: skip
    _multiply(a_desc, b_desc, out_desc, scheduler, NoFixup(BLOCK_M), epilogue, BLOCK_M, BLOCK_N, BLOCK_K,
              COOPERATIVE, PINGPONG, False, STAGES, SUBTILE_N, EPILOGUE_STAGES, PROMOTED, None, False,
              CONSUMER_REGS, PRODUCER_REGS)  # fmt: skip
