"""Groups of rows of float8 for Hopper: the kernel of kernels/grouped_mm/tma.py, with scales in its epilogue and sums
that are kept in fp32 where accumulation is to be slow."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tk.aot.spec import Arg, Bundle, Int, Kernel, Launch, Plan, Point, Pointer, require
from tk.kernels.gemm.problem import out_dtype
from tk.kernels.grouped_mm.tma import tiles_of_groups
from tk.kernels.hopper.arguments import Maps
from tk.kernels.hopper.epilogue import store_group_rows
from tk.kernels.hopper.plans import batch_tensor_map, subtile, tensor_map
from tk.kernels.hopper.product import multiply, schedule_groups
from tk.kernels.hopper.scales import GroupScales, ScaleBiasActivation
from tk.kernels.hopper.stream_k import NoFixup
from tk.kernels.hopper.tma_load import group_operands
from tk.kernels.scaled_grouped_mm.op import (
    BIAS,
    GROUPS,
    OFFS,
    OP,
    OUT,
    SCALE_A,
    SCALE_B,
    SCALED_ROWS,
    STRIDE_OFFS,
    A,
    B,
)
from tk.kernels.scaled_mm.op import ACCUMULATION_AXIS, OUT_AXIS
from tk.kernels.scaled_mm.tma import multiplier
from tk.kernels.scaled_mm.tma_plans import constants, predict, scale_args, serves, takes, tile

K = SCALED_ROWS.K


@gluon.jit
def scaled_grouped_mm_tma(maps, offs, scales, bias, out, size, groups, stride_offs, b_step, stride_scale_bb,
                          stride_bias_b, epilogue, stride_om, TILE: gl.constexpr, PROMOTED: gl.constexpr):  # fmt: skip
    """Parameters as of ``scaled_mm_tma`` and ``grouped_mm_tma``."""
    a, b = group_operands(maps, b_step, TILE, True, True)
    store = store_group_rows(maps.out, out, stride_om, size.N, TILE)
    scheduler = schedule_groups(offs, stride_offs, groups, size, TILE)
    of_rows = ScaleBiasActivation(size.M, size.N, scales.rows, scales.cols, bias, epilogue, False, "vector")
    finish = GroupScales(of_rows, stride_scale_bb, stride_bias_b, "vector")
    multiply(a, b, multiplier(a, b, TILE, PROMOTED), scheduler, NoFixup(TILE.BLOCK_M), store, finish, TILE)


# --- The plan ---


def _arguments(point: Point) -> dict[str, Arg | Bundle]:
    c = point.config
    rows = c.block_m // c.cooperative
    maps = Maps(
        a=tensor_map(A, point.dtype, 1, (rows, c.block_k)),
        b=batch_tensor_map(B, point.b_dtype, 0, (c.block_k, c.block_n), is_shared=True),
        out=tensor_map(OUT, out_dtype(point), 1, (rows, subtile(point))),
    )
    rest = dict(
        maps=maps,
        offs=Pointer(OFFS, "i32", aligned=False),
        groups=Int(GROUPS),
        stride_offs=Int(STRIDE_OFFS, "i64"),
        stride_scale_bb=Int(SCALE_B.batch_stride, "i64"),
        stride_bias_b=Int(BIAS.batch_stride, "i64"),
        out=Pointer(OUT, out_dtype(point)),
        stride_om=Int(OUT.stride(0), "i64"),
        b_step=Int(B.batch_stride != 0),
        size=SCALED_ROWS.size(),
    )
    return rest | scale_args(SCALED_ROWS, point, SCALE_A, SCALE_B) | constants(point)


def _plan(point: Point) -> Plan | None:
    if not takes(point):
        return None
    work, grid, countable = tiles_of_groups(SCALED_ROWS, GROUPS, point.config, each_reads_b=True)
    constraints = (
        *SCALED_ROWS.suits_tma(point),
        SCALED_ROWS.out_suits_tma(point),
        require(K > 0, "K > 0"),
        require(B.batch_stride % 16 == 0, "b's matrices a multiple of 16 elements apart"),
        *countable,
    )
    return Plan(
        constraints=constraints,
        serves=serves(point),
        launches=(Launch(scaled_grouped_mm_tma, _arguments(point), grid=(grid, 1, 1), num_warps=4),),
        cost=predict(point, work),
        terms=work.terms(point),
    )


# --- The grid ---

_CONFIGS = (
    tile(64, 128, 8, 64, 32, "slow fast", "pingpong"),
    tile(64, 256, 4, 32, 16, "fast", "pingpong"),
    tile(128, 128, 6, 64, 32, all_types=True),
    tile(128, 256, 4, 32, 16, "fast"),
)
# Of torch's own there is but the product of two e4m3fn. What gives another dtype has one config.
_AXES = {
    "dtype": ("fp8e4nv",),
    "b_dtype": ("fp8e4nv",),
    "out": OUT_AXIS,
    "accumulation": ACCUMULATION_AXIS,
    "order": ("nt",),
}
KERNELS = (Kernel("scaled_grouped_mm_tma", OP, _AXES, {90: _CONFIGS}, _plan),)
