"""Groups of rows of float8 for Hopper: the kernel of kernels/grouped_mm/tma.py, with scales in its epilogue and sums
that are kept in fp32 where accumulation is to be slow."""

from dataclasses import replace

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tk.aot.expr import ceil_div
from tk.aot.spec import Int, Kernel, Plan, Point, Pointer
from tk.kernels.gemm.problem import out_dtype
from tk.kernels.grouped_mm.op import longest
from tk.kernels.grouped_mm.pointer import tiles_of_rows
from tk.kernels.grouped_mm.tma import group_args, groups_suit_tma
from tk.kernels.hopper.epilogue import store_group_rows
from tk.kernels.hopper.plans import maps_of, persistent_plan, subtile, tensor_map
from tk.kernels.hopper.product import multiply, schedule_groups
from tk.kernels.hopper.scales import GroupScales, ScaleBiasActivation
from tk.kernels.hopper.stream_k import NoFixup
from tk.kernels.hopper.tma_load import group_operands
from tk.kernels.scaled_grouped_mm.op import GROUPS, OFFS, OP, OUT, SCALE_A, SCALE_B, SCALED_ROWS
from tk.kernels.scaled_mm.op import ACCUMULATION_AXIS, OUT_AXIS
from tk.kernels.scaled_mm.tma import multiplier
from tk.kernels.scaled_mm.tma_plans import constants, predict, scale_args, serves, takes, tile


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


def _plan(point: Point) -> Plan | None:
    if not takes(point):
        return None
    c = point.config
    # A row of tiles reads its own group's part of b alone.
    b_reads = ceil_div(longest(SCALED_ROWS.M_choice, GROUPS), c.block_m)
    tiles = replace(tiles_of_rows(SCALED_ROWS, GROUPS, c), b_reads=b_reads)
    args = scale_args(SCALED_ROWS, point, SCALE_A, SCALE_B) | group_args(SCALED_ROWS, OFFS) | constants(point)
    of_out = tensor_map(OUT, out_dtype(point), 1, (c.block_m // c.cooperative, subtile(point)))
    args |= dict(
        maps=maps_of(SCALED_ROWS, point)._replace(out=of_out),
        size=SCALED_ROWS.size(),
        stride_scale_bb=Int(SCALE_B.batch_stride, "i64"),
        out=Pointer(OUT, out_dtype(point)),
    )
    return persistent_plan(
        point,
        tiles,
        scaled_grouped_mm_tma,
        args,
        serves(point),
        groups_suit_tma(point, SCALED_ROWS, GROUPS, tiles),
        predict,
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
