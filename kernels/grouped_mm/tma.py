"""Groups of rows for Hopper: the persistent kernel of kernels/mm/tma.py, with a tile scheduler that walks the groups.

The rows of all groups are one tensor map, the groups' matrices one of three dimensions.
"""

from functools import partial

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tk.aot.expr import Expr, Tensor
from tk.aot.spec import ITEMSIZE, Arg, Bundle, Const, Constraint, Int, Kernel, Plan, Point, Pointer, require
from tk.kernels.gemm.cost import predict
from tk.kernels.gemm.problem import OUT_AXIS, Batch, Gemm, out_dtype
from tk.kernels.gemm.tiles import Tiles
from tk.kernels.grouped_mm.op import DTYPE_AXIS, GROUPS, OF_ROWS, OFFS, OUT, ROWS
from tk.kernels.grouped_mm.pointer import serves, tiles_of_rows
from tk.kernels.hopper.epilogue import BatchBiasActivation, BiasActivation, store_group_rows
from tk.kernels.hopper.plans import config, persistent_plan, product_args
from tk.kernels.hopper.product import multiply, schedule_groups
from tk.kernels.hopper.stream_k import NoFixup
from tk.kernels.hopper.tma_load import group_operands
from tk.kernels.hopper.wgmma import wgmma


@gluon.jit
def grouped_mm_tma(maps, offs, bias, out, size, groups, stride_offs, b_step, stride_bias_b, epilogue, stride_om,
                   TILE: gl.constexpr, A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr):  # fmt: skip
    """Parameters as of ``mm_tma`` and ``bmm_tma``."""
    a, b = group_operands(maps, b_step, TILE, A_K_MAJOR, B_K_MAJOR)
    store = store_group_rows(maps.out, out, stride_om, size.N, TILE)
    scheduler = schedule_groups(offs, stride_offs, groups, size, TILE)
    of_group = BiasActivation(size.M, size.N, bias, epilogue, False, "vector")
    finish = BatchBiasActivation(of_group, stride_bias_b, "vector")
    multiply(a, b, wgmma(a, b, TILE), scheduler, NoFixup(TILE.BLOCK_M), store, finish, TILE)


# --- The plan ---


def group_args(gemm: Gemm, offs: Tensor) -> dict[str, Arg | Bundle]:
    """Gives the arguments that have to do with the groups. offs: a matrix of one row."""
    assert isinstance(gemm.b, Batch) and isinstance(gemm.bias, Batch)
    return dict(
        offs=Pointer(offs, "i32", aligned=False),
        groups=Int(offs.size(1)),
        stride_offs=Int(offs.stride(1), "i64"),
        b_step=Int(gemm.b.batch_stride != 0),
        stride_bias_b=Int(gemm.bias.batch_stride, "i64"),
        stride_om=Int(gemm.out.stride(0), "i64"),
    )


def groups_suit_tma(point: Point, gemm: Gemm, groups: Expr, tiles: Tiles) -> tuple[Constraint, ...]:
    assert isinstance(gemm.b, Batch)
    return (
        *gemm.suits_tma(point),
        require(gemm.K > 0, "K > 0"),
        gemm.b.apart(16 // ITEMSIZE[point.dtype]),
        require(groups < 2**20, "fewer than 2**20 groups"),
        require(tiles.count < 2**31 - 2**16, "tiles that 32 bits can count"),
    )


def _plan(point: Point) -> Plan | None:
    if point.out == "fp32" and not point.config.fp32_out:
        return None
    tiles = tiles_of_rows(OF_ROWS, GROUPS, point.config)
    args = product_args(OF_ROWS, point) | group_args(OF_ROWS, OFFS)
    # A group's bias is one row.
    args |= dict(epilogue=OF_ROWS.epilogue()._replace(stride_bias_m=Const(0)), out=Pointer(OUT, out_dtype(point)))
    constraints = groups_suit_tma(point, OF_ROWS, GROUPS, tiles)
    return persistent_plan(point, tiles, grouped_mm_tma, args, serves(point), constraints, predict)


# --- The grid ---

_tile = partial(config, fp32_out=False)  # compiled for a result of float32 too
_CONFIGS = (
    _tile(64, 128, 8, 64, 32),
    _tile(64, 256, 4, 64, 32),
    _tile(128, 128, 6, 32, 16),
    _tile(128, 128, 6, 64, 32, pingpong=False, fp32_out=True),
    _tile(128, 256, 4, 64, 32, pingpong=False),
)
_AXES = {"dtype": DTYPE_AXIS, "precision": ("ieee",), "out": OUT_AXIS, "order": ("nn", "nt")}
KERNELS = (Kernel("grouped_mm_tma", ROWS, _AXES, {90: _CONFIGS}, _plan),)
