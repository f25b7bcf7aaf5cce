"""Matrix products for Hopper: TMA producers, wgmma consumers, persistent programs (kernels/hopper/).

One device function serves two kernels, which differ in their tile scheduler:

    mm_tma           whole tiles. Cooperative consumers share a tile, ping-pong consumers have every other one.
    mm_tma_stream_k  for few rows: tiles are cut along K for want of tiles. Always with swap-AB.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tk.kernels.hopper.dependent_launch import launch_dependents
from tk.kernels.hopper.epilogue import BiasActivation, TmaStore
from tk.kernels.hopper.pipeline import allocate_barriers
from tk.kernels.hopper.stream_k import Fixup, NoFixup
from tk.kernels.hopper.tile_scheduler import PersistentScheduler, StreamKScheduler, TileOrder
from tk.kernels.hopper.tma_load import EVICT_FIRST, TmaOperand, TmaOperandExtra, TmaOperandRagged
from tk.kernels.hopper.warp_roles import Consumer, Producer, specialize
from tk.kernels.hopper.wgmma import Wgmma, WgmmaExtra


@gluon.jit
def _operand_b(desc, extra_desc, STAGES: gl.constexpr, MAIN_N: gl.constexpr, EXTRA_N: gl.constexpr,
               K_MAJOR: gl.constexpr, POLICY: gl.constexpr, AHEAD: gl.constexpr):  # fmt: skip
    """B's tiles, which all blocks of a cluster share."""
    MULTICAST: gl.constexpr = gl.num_ctas() > 1
    smem = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_shape, desc.layout)
    main = TmaOperand(desc, smem, MAIN_N, 1, K_MAJOR, MULTICAST, POLICY, AHEAD)
    if EXTRA_N == 0:
        return main
    else:
        smem = gl.allocate_shared_memory(desc.dtype, [STAGES] + extra_desc.block_shape, extra_desc.layout)
        extra = TmaOperand(extra_desc, smem, EXTRA_N, 1, K_MAJOR, MULTICAST, POLICY, AHEAD)
        return TmaOperandExtra(main, extra, MAIN_N + EXTRA_N, AHEAD)


@gluon.jit
def _wgmma(a, b, ROWS: gl.constexpr, COOPERATIVE: gl.constexpr, INDEX: gl.constexpr, EXTRA_N: gl.constexpr):
    """What consumer INDEX multiplies of the operands `a` and `b`."""
    if EXTRA_N == 0:
        return Wgmma(a.smem, b.smem, ROWS, b.TILE, a.K_MAJOR, b.K_MAJOR, COOPERATIVE, INDEX)
    else:
        return WgmmaExtra(
            Wgmma(a.smem, b.main.smem, ROWS, b.main.TILE, a.K_MAJOR, b.main.K_MAJOR, COOPERATIVE, INDEX),
            Wgmma(a.smem, b.extra.smem, ROWS, EXTRA_N, a.K_MAJOR, b.extra.K_MAJOR, COOPERATIVE, INDEX),
        )


@gluon.jit
def mm_tma(a_desc, b_desc, b_extra_desc, box_desc, out_desc, workspace, counters, bias, rows, cols, K, whole, share,
           group, stride_bias_m, stride_bias_n, alpha, beta, activation, has_bias,
           BLOCK_M: gl.constexpr, MAIN_N: gl.constexpr, EXTRA_N: gl.constexpr, BOX: gl.constexpr,
           BLOCK_K: gl.constexpr, COOPERATIVE: gl.constexpr, PINGPONG: gl.constexpr, A_K_MAJOR: gl.constexpr,
           B_K_MAJOR: gl.constexpr, SWAP_AB: gl.constexpr, STAGES: gl.constexpr, SUBTILE_N: gl.constexpr,
           EPILOGUE_STAGES: gl.constexpr, STREAM_K: gl.constexpr, EVICT_FIRST_B: gl.constexpr,
           EPILOGUE: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr):  # fmt: skip
    """D = A B^T, rows x cols (kernels/hopper/__init__.py). whole, share: tiles that are not cut, and how many k blocks
    of the others a program takes. group: of the tile order.

    A tile is BLOCK_M x (MAIN_N + EXTRA_N), which need not be a power of two: b_extra_desc is a view of B for its
    EXTRA_N rows, None where EXTRA_N is 0. BLOCK_M is the cluster's. box_desc: a view of BOX rows of the op's a, for
    tiles that reach past its end; None where BOX is 0. A_K_MAJOR, B_K_MAJOR: K is the operand's contiguous dimension.
    COOPERATIVE: consumer warp groups that share a tile. workspace, counters: of stream-K's fix-up, else None.
    EVICT_FIRST_B: the op's b leaves L2 first. SUBTILE_N: columns of the tile that go out at a time, through the next of
    EPILOGUE_STAGES buffers."""
    ROWS: gl.constexpr = BLOCK_M // COOPERATIVE
    BLOCK_N: gl.constexpr = MAIN_N + EXTRA_N
    WEIGHTS: gl.constexpr = EVICT_FIRST if EVICT_FIRST_B else None
    CONSUMERS: gl.constexpr = 2 if PINGPONG else COOPERATIVE
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * COOPERATIVE] + a_desc.block_shape, a_desc.layout)
    a = TmaOperand(a_desc, a_smem, BLOCK_M, COOPERATIVE, A_K_MAJOR, False, WEIGHTS if SWAP_AB else None, SWAP_AB)
    b = _operand_b(b_desc, b_extra_desc, STAGES, MAIN_N, EXTRA_N, B_K_MAJOR, None if SWAP_AB else WEIGHTS, not SWAP_AB)
    a_loads, b_loads = a, b
    if BOX > 0:
        if SWAP_AB:
            b_loads = TmaOperandRagged(b, b.main if EXTRA_N > 0 else b, box_desc, cols, BOX, BLOCK_N, b.AHEAD)
        else:
            a_loads = TmaOperandRagged(a, a, box_desc, rows, BOX, BLOCK_M, a.AHEAD)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS * EPILOGUE_STAGES] + out_desc.block_shape,
                                         out_desc.layout)  # fmt: skip
    pipeline, order = allocate_barriers(STAGES, 2, COOPERATIVE, 2 if PINGPONG else 1)
    fence_async_shared()
    gl.barrier()
    launch_dependents()
    tiles = TileOrder(gl.cdiv(rows, BLOCK_M), gl.cdiv(cols, BLOCK_N), group)
    k_blocks = gl.cdiv(K, BLOCK_K)
    if STREAM_K:
        scheduler = StreamKScheduler(whole, tiles.m_tiles * tiles.n_tiles, k_blocks, share, tiles)
        fixup = Fixup(workspace, counters, BLOCK_M)
    else:
        scheduler = PersistentScheduler(whole, k_blocks, tiles)
        fixup = NoFixup(BLOCK_M)
    store = TmaStore(out_smem, out_desc, SWAP_AB, EPILOGUE_STAGES)
    epilogue = BiasActivation(rows, cols, bias, stride_bias_m, stride_bias_n, alpha, beta, activation, has_bias,
                              SWAP_AB, EPILOGUE)  # fmt: skip
    producer_a = Producer(a_loads, pipeline, scheduler, 0, BLOCK_K)
    producer_b = Producer(b_loads, pipeline, scheduler, 1, BLOCK_K)
    consumer = Consumer(_wgmma(a, b, ROWS, COOPERATIVE, 0, EXTRA_N), store, pipeline, order, fixup, scheduler, epilogue,
                        BLOCK_M, BLOCK_N, SUBTILE_N, COOPERATIVE, PINGPONG, 0)  # fmt: skip
    consumers = (consumer,)
    for i in gl.static_range(1, CONSUMERS):
        mma = _wgmma(a, b, ROWS, COOPERATIVE, i % COOPERATIVE, EXTRA_N)
        consumers = consumers + (gl.aggregate_replace(consumer, mma=mma, INDEX=i),)
    specialize(consumers, (producer_a, producer_b), CONSUMER_REGS, PRODUCER_REGS)
