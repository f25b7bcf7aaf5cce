"""The family `mm_plus_mm`: its kernels with their plans, what tests compile of them, and what is kept as PTX."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tk.aot.spec import Arg, Bundle, Const, Int, Kernel, Plan, Point
from tk.kernels.epilogue import finish
from tk.kernels.gemm import pointer
from tk.kernels.gemm.pointer import accumulate, tile, tile_indices
from tk.kernels.gemm.problem import EPILOGUE_AXIS, serves
from tk.kernels.hopper import plans as hopper
from tk.kernels.hopper.epilogue import BiasActivation, InMatrix, tma_store
from tk.kernels.hopper.product import multiply
from tk.kernels.hopper.stream_k import NoFixup
from tk.kernels.hopper.tile_scheduler import PersistentScheduler, TileOrder
from tk.kernels.hopper.tma_load import TmaOperand, TmaOperandPair, allocate_blocks
from tk.kernels.hopper.wgmma import wgmma
from tk.kernels.mm_plus_mm.op import FIRST, K2, OP, SECOND, tiles_of_both
from tk.kernels.sampled import sampled_family

# --- In plain Triton ---


@triton.jit
def mm_plus_mm_pointer(a, b, c, d, bias, out, size, K2, strides, second_strides, stride_om, stride_on, epilogue,
                       TILE: tl.constexpr):  # fmt: skip
    """One program, one tile of out: the one product's sum, then the other's on top."""
    rows, cols = tile_indices(tl.program_id(0), size.M, size.N, TILE)
    acc = accumulate(a, b, rows, cols, size.M, size.N, 0, size.K, strides, TILE)
    acc += accumulate(c, d, rows, cols, size.M, size.N, 0, K2, second_strides, TILE)
    finish(acc, bias, out, rows, cols, size.M, size.N, stride_om, stride_on, epilogue, "matrix")


def _second_args(point: Point) -> dict[str, Arg | Bundle]:
    args: dict[str, Any] = pointer.product_args(SECOND, point)
    return dict(c=args["a"], d=args["b"], K2=args["size"].K, second_strides=args["strides"])


def _pointer_plan(point: Point) -> Plan | None:
    if not pointer.is_compiled(point):
        return None
    first = pointer.product_args(FIRST, point) | pointer.finish_args(FIRST, point, "matrix")
    return pointer.pointer_plan(
        point,
        tiles_of_both(point.config),
        mm_plus_mm_pointer,
        first | _second_args(point),
        serves(point, EPILOGUE_AXIS),
        (*pointer.constraints(FIRST, point), *pointer.constraints(SECOND, point)),
        point.config.occupancy,
        sharing=point.config.occupancy,
    )


# --- For Hopper ---
#
# The persistent kernel of kernels/mm/tma.py, whose ring first brings the blocks of K of the one product and then those
# of the other.


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


def _tma_plan(point: Point) -> Plan | None:
    if not hopper.is_compiled(point):
        return None
    tiles = tiles_of_both(point.config)
    first, second = (hopper.maps_of(gemm, point) for gemm in (FIRST, SECOND))
    args = hopper.product_args(FIRST, point) | dict(
        maps=Maps(first.a, first.b, second.a, second.b, first.out),
        K2=Int(K2),
        tiles=Int(tiles.count),
        group=Const(8),
        EPILOGUE=Const(point.epilogue),
    )
    return hopper.persistent_plan(
        point,
        tiles,
        mm_plus_mm_tma,
        args,
        hopper.serves_epilogues(point),
        (*FIRST.operands_suit_tma(point), *SECOND.loads_16_bytes(point), FIRST.out_suits_tma(point)),
        hopper.predict_like_mm,
    )


# --- The grid ---

_POINTER_CONFIGS = (
    tile(64, 64, 64, 3, 4, 2, unaligned=True),
    tile(128, 128, 32, 4, 8),
    tile(32, 64, 16, 3, 4, 2, fma=True, unaligned=True),
    tile(128, 64, 16, 3, 8, fma=True),
)
_TMA_CONFIGS = (
    hopper.config(64, 128, 8, 64, 32, kinds="plain matrix"),
    hopper.config(128, 64, 8, 32, 16, kinds="plain"),
    hopper.config(128, 128, 6, 32, 16, kinds="plain"),
    hopper.config(128, 128, 6, 64, 32, pingpong=False, kinds="plain matrix fp32"),
    hopper.config(128, 256, 4, 64, 32, pingpong=False, kinds="plain"),
)
_TMA = Kernel("mm_plus_mm_tma", OP, hopper.AXES, {90: _TMA_CONFIGS}, _tma_plan)
_POINTER = Kernel("mm_plus_mm_pointer", OP, pointer.AXES, dict.fromkeys(pointer.ARCHS, _POINTER_CONFIGS), _pointer_plan)
_SAMPLED = {
    _POINTER.name: ("64x64x64_s3_w4", "32x64x16_s3_w4_fma"),
    _TMA.name: ("128x128x64_s6_pingpong", "128x128x64_s6_coop"),
}


def _usual(kernel: Kernel, point: Point) -> dict[str, object]:
    """The bf16 product of row-major matrices."""
    usual = {"dtype": "bf16", "order": "nn", "out": "same", "aligned": kernel is _TMA, "epilogue": "plain"}
    if point.out == "fp32":
        usual["epilogue"] = "matrix"
    if point.axes.get("aligned") and point.dtype == "fp32":  # on Hopper nothing else of it suits 16-byte loads
        usual["dtype"] = "fp32"
    return usual


def _respects(kernel: Kernel, point: Point) -> int:
    """The number of respects in which tests compile a point that differs from the usual one: of Hopper's second
    schedule none."""
    return 0 if point.config.name.endswith("_pingpong") else 1


FAMILY = sampled_family(OP, (_TMA, _POINTER), _SAMPLED, _usual, portable=("128x128x32_s4_w8",), respects=_respects)
