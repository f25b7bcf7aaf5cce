"""Matrix products for Hopper: TMA producers, wgmma consumers, persistent programs (kernels/hopper/).

One device function serves two kernels, which differ in their tile scheduler:

    mm_tma           whole tiles. Cooperative consumers share a tile, ping-pong consumers have every other one.
    mm_tma_stream_k  for few rows: tiles are cut along K for want of tiles. Always with swap-AB.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tk.kernels.hopper.epilogue import BiasActivation, InMatrix, tma_store
from tk.kernels.hopper.product import multiply, schedule_tiles
from tk.kernels.hopper.tma_load import EVICT_FIRST, TmaOperand, TmaOperandExtra, TmaOperandRagged, allocate_blocks
from tk.kernels.hopper.wgmma import WgmmaExtra, wgmma


class Maps(NamedTuple):
    """b_extra: a view of B for a tile's EXTRA_N rows, None where that is 0. box: a view of BOX rows of the op's a, for
    tiles that reach past its end; None where BOX is 0."""

    a: Any
    b: Any
    b_extra: Any
    box: Any
    out: Any


@gluon.jit
def _operand_b(maps, TILE: gl.constexpr, K_MAJOR: gl.constexpr, POLICY: gl.constexpr, AHEAD: gl.constexpr):
    """B's tiles, which all blocks of a cluster share."""
    MULTICAST: gl.constexpr = gl.num_ctas() > 1
    smem = allocate_blocks(maps.b, TILE.STAGES)
    main = TmaOperand(maps.b, smem, TILE.MAIN_N, 1, K_MAJOR, MULTICAST, POLICY, AHEAD)
    if TILE.EXTRA_N == 0:
        return main
    else:
        smem = allocate_blocks(maps.b_extra, TILE.STAGES)
        extra = TmaOperand(maps.b_extra, smem, TILE.EXTRA_N, 1, K_MAJOR, MULTICAST, POLICY, AHEAD)
        return TmaOperandExtra(main, extra, TILE.BLOCK_N, AHEAD)


@gluon.jit
def _wgmma(a, b, TILE: gl.constexpr):
    if TILE.EXTRA_N == 0:
        return wgmma(a, b, TILE)
    else:
        return WgmmaExtra(wgmma(a, b.main, TILE), wgmma(a, b.extra, TILE))


@gluon.jit
def mm_tma(maps, partials, bias, size, schedule, epilogue, TILE: gl.constexpr, BOX: gl.constexpr,
           A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, SWAP_AB: gl.constexpr, STREAM_K: gl.constexpr,
           EVICT_FIRST_B: gl.constexpr, EPILOGUE: gl.constexpr):  # fmt: skip
    """D = A B^T (kernels/hopper/__init__.py), of bundles (kernels/hopper/arguments.py, kernels/gemm/arguments.py).

    A_K_MAJOR, B_K_MAJOR: K is the operand's contiguous dimension. EVICT_FIRST_B: the op's b leaves L2 first. EPILOGUE:
    the KIND of BiasActivation."""
    WEIGHTS: gl.constexpr = EVICT_FIRST if EVICT_FIRST_B else None
    a_smem = allocate_blocks(maps.a, TILE.STAGES * TILE.COOPERATIVE)
    a = TmaOperand(maps.a, a_smem, TILE.BLOCK_M, TILE.COOPERATIVE, A_K_MAJOR, False, WEIGHTS if SWAP_AB else None,
                   SWAP_AB)  # fmt: skip
    b = _operand_b(maps, TILE, B_K_MAJOR, None if SWAP_AB else WEIGHTS, not SWAP_AB)
    mma = _wgmma(a, b, TILE)
    a_loads, b_loads = a, b
    if BOX > 0:
        if SWAP_AB:
            main = b.main if TILE.EXTRA_N > 0 else b
            b_loads = TmaOperandRagged(b, main, maps.box, size.N, BOX, TILE.BLOCK_N, b.AHEAD)
        else:
            a_loads = TmaOperandRagged(a, a, maps.box, size.M, BOX, TILE.BLOCK_M, a.AHEAD)
    store = tma_store(maps.out, InMatrix(SWAP_AB), TILE)
    scheduler, fixup = schedule_tiles(size, schedule, partials, TILE, STREAM_K)
    finish = BiasActivation(size.M, size.N, bias, epilogue, SWAP_AB, EPILOGUE)
    multiply(a_loads, b_loads, mma, scheduler, fixup, store, finish, TILE, DEPENDENT=True)
