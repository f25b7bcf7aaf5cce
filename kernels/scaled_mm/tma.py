"""Products of float8 for Hopper: the persistent kernel of kernels/mm/tma.py with scales in its epilogue, and sums that
are kept in fp32 where accumulation is to be slow.

    scaled_mm_tma             tensor maps come from the host
    scaled_mm_tma_stream_k    the same function for few rows, whose tiles are cut along K; always with swap-AB
    scaled_mm_tma_device_maps each program makes the tensor maps, in scratch memory
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tk.kernels.hopper.arguments import Maps
from tk.kernels.hopper.epilogue import InMatrix, tma_store
from tk.kernels.hopper.product import multiply, schedule_tiles
from tk.kernels.hopper.scales import ScaleBiasActivation
from tk.kernels.hopper.tma_load import EVICT_FIRST, TmaOperand, allocate_blocks
from tk.kernels.hopper.wgmma import WgmmaPromoted, wgmma


@gluon.jit
def multiplier(a, b, TILE: gl.constexpr, PROMOTED: gl.constexpr):
    """What consumer 0 multiplies of the operands `a` and `b`. PROMOTED: sums are kept in fp32."""
    if PROMOTED:
        return WgmmaPromoted(a.smem, b.smem, TILE.ROWS, b.TILE, TILE.COOPERATIVE, 0)
    else:
        return wgmma(a, b, TILE)


@gluon.jit
def _multiply(maps, scheduler, fixup, epilogue, TILE: gl.constexpr, SWAP_AB: gl.constexpr, PROMOTED: gl.constexpr,
              WEIGHTS: gl.constexpr, AHEAD: gl.constexpr):  # fmt: skip
    """D = A B^T by the tiles of `scheduler`. WEIGHTS: the L2 policy of the op's b. AHEAD: b may be read before the
    kernels ahead have ended."""
    a_smem = allocate_blocks(maps.a, TILE.STAGES * TILE.COOPERATIVE)
    a = TmaOperand(maps.a, a_smem, TILE.BLOCK_M, TILE.COOPERATIVE, True, False, WEIGHTS if SWAP_AB else None,
                   SWAP_AB and AHEAD)  # fmt: skip
    b_smem = allocate_blocks(maps.b, TILE.STAGES)
    b = TmaOperand(maps.b, b_smem, TILE.BLOCK_N, 1, True, gl.num_ctas() > 1, None if SWAP_AB else WEIGHTS,
                   not SWAP_AB and AHEAD)  # fmt: skip
    store = tma_store(maps.out, InMatrix(SWAP_AB), TILE)
    mma = multiplier(a, b, TILE, PROMOTED)
    multiply(a, b, mma, scheduler, fixup, store, epilogue, TILE, DEPENDENT=True)


@gluon.jit
def scaled_mm_tma(maps, partials, scales, bias, size, schedule, epilogue, TILE: gl.constexpr, SWAP_AB: gl.constexpr,
                  PROMOTED: gl.constexpr, STREAM_K: gl.constexpr):  # fmt: skip
    """D = A B^T (kernels/hopper/__init__.py), both along K; the scales are D's. Other parameters as of ``mm_tma``."""
    scheduler, fixup = schedule_tiles(size, schedule, partials, TILE, STREAM_K)
    finish = ScaleBiasActivation(size.M, size.N, scales.rows, scales.cols, bias, epilogue, SWAP_AB, "vector")
    _multiply(maps, scheduler, fixup, finish, TILE, SWAP_AB, PROMOTED, EVICT_FIRST if STREAM_K else None, True)


class Matrices(NamedTuple):
    """Of which a program makes the tensor maps."""

    a: Any
    b: Any
    out: Any


class Pitches(NamedTuple):
    """From row to row of a and out, from column to column of b."""

    a: Any
    b: Any
    out: Any


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
def scaled_mm_tma_device_maps(matrices, scales, bias, size, schedule, pitches, epilogue, TILE: gl.constexpr,
                              PROMOTED: gl.constexpr):  # fmt: skip
    """The same by whole tiles, of matrices instead of their tensor maps."""
    a = _make_map(matrices.a, size.M, size.K, pitches.a, TILE.ROWS, TILE.BLOCK_K)
    b = _make_map(matrices.b, size.N, size.K, pitches.b, TILE.BLOCK_N, TILE.BLOCK_K)
    out = _make_map(matrices.out, size.M, size.N, pitches.out, TILE.ROWS, TILE.SUBTILE_N)
    scheduler, fixup = schedule_tiles(size, schedule, None, TILE, False)
    finish = ScaleBiasActivation(size.M, size.N, scales.rows, scales.cols, bias, epilogue, False, "vector")
    _multiply(Maps(a, b, out), scheduler, fixup, finish, TILE, False, PROMOTED, None, False)
