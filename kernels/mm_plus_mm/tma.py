"""Two products in one accumulator for Hopper: the persistent kernel of kernels/mm/tma.py, whose ring first brings the
blocks of K of the one and then those of the other."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tk.aot.spec import Const, Int, Kernel, Plan, Point
from tk.kernels.hopper.epilogue import BiasActivation, InMatrix, tma_store
from tk.kernels.hopper.plans import (
    AXES,
    config,
    is_compiled,
    maps_of,
    persistent_plan,
    predict_like_mm,
    product_args,
    serves_epilogues,
)
from tk.kernels.hopper.product import multiply
from tk.kernels.hopper.stream_k import NoFixup
from tk.kernels.hopper.tile_scheduler import PersistentScheduler, TileOrder
from tk.kernels.hopper.tma_load import TmaOperand, TmaOperandPair, allocate_blocks
from tk.kernels.hopper.wgmma import wgmma
from tk.kernels.mm_plus_mm.op import FIRST, K2, OP, SECOND, tiles_of_both


class Maps(NamedTuple):
    """c and d as a and b: of the second product."""

    a: Any
    b: Any
    c: Any
    d: Any
    out: Any


@gluon.jit
def _operand(first, second, second_begins, TILE_ROWS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
             K_MAJOR: gl.constexpr):  # fmt: skip
    """Of the tensor maps of both."""
    smem = allocate_blocks(first, STAGES * BLOCKS)
    a = TmaOperand(first, smem, TILE_ROWS, BLOCKS, K_MAJOR, False, None, False)
    return TmaOperandPair(a, gl.aggregate_replace(a, desc=second), second_begins, smem, TILE_ROWS, K_MAJOR, False)


@gluon.jit
def mm_plus_mm_tma(maps, bias, size, K2, tiles, group, epilogue, TILE: gl.constexpr, A_K_MAJOR: gl.constexpr,
                   B_K_MAJOR: gl.constexpr, EPILOGUE: gl.constexpr):  # fmt: skip
    """Parameters as of ``mm_tma``. K is a's and b's, K2 c's and d's, which are stored the same way round."""
    k_blocks = gl.cdiv(size.K, TILE.BLOCK_K)
    second_begins = k_blocks * TILE.BLOCK_K
    a = _operand(maps.a, maps.c, second_begins, TILE.BLOCK_M, TILE.COOPERATIVE, TILE.STAGES, A_K_MAJOR)
    b = _operand(maps.b, maps.d, second_begins, TILE.BLOCK_N, 1, TILE.STAGES, B_K_MAJOR)
    store = tma_store(maps.out, InMatrix(False), TILE)
    order = TileOrder(gl.cdiv(size.M, TILE.BLOCK_M), gl.cdiv(size.N, TILE.BLOCK_N), group)
    scheduler = PersistentScheduler(tiles, k_blocks + gl.cdiv(K2, TILE.BLOCK_K), order)
    finish = BiasActivation(size.M, size.N, bias, epilogue, False, EPILOGUE)
    multiply(a, b, wgmma(a, b, TILE), scheduler, NoFixup(TILE.BLOCK_M), store, finish, TILE)


# --- The plan ---


def _plan(point: Point) -> Plan | None:
    if not is_compiled(point):
        return None
    tiles = tiles_of_both(point.config)
    first, second = (maps_of(gemm, point) for gemm in (FIRST, SECOND))
    args = product_args(FIRST, point) | dict(
        maps=Maps(first.a, first.b, second.a, second.b, first.out),
        K2=Int(K2),
        tiles=Int(tiles.count),
        group=Const(8),
        EPILOGUE=Const(point.epilogue),
    )
    return persistent_plan(
        point,
        tiles,
        mm_plus_mm_tma,
        args,
        serves_epilogues(point),
        (*FIRST.operands_suit_tma(point), *SECOND.loads_16_bytes(point), FIRST.out_suits_tma(point)),
        predict_like_mm,
    )


_CONFIGS = (
    config(64, 128, 8, 64, 32, kinds="plain matrix"),
    config(128, 64, 8, 32, 16, kinds="plain"),
    config(128, 128, 6, 32, 16, kinds="plain"),
    config(128, 128, 6, 64, 32, pingpong=False, kinds="plain matrix fp32"),
    config(128, 256, 4, 64, 32, pingpong=False, kinds="plain"),
)
KERNELS = (Kernel("mm_plus_mm_tma", OP, AXES, {90: _CONFIGS}, _plan),)
