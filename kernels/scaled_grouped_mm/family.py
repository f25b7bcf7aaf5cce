"""The family `scaled_grouped_mm`: its kernels with their plans, what tests compile of them, and what is kept as PTX."""

from dataclasses import replace

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tk.aot.expr import ceil_div
from tk.aot.spec import Const, Int, Kernel, Plan, Point, Pointer
from tk.kernels.gemm.pointer import ARCHS, pointer_plan
from tk.kernels.gemm.problem import out_dtype
from tk.kernels.grouped_mm.op import longest
from tk.kernels.grouped_mm.pointer import find_group, group_constraints, groups_of, rows_of_group, tiles_of_rows
from tk.kernels.grouped_mm.tma import group_args, groups_suit_tma
from tk.kernels.hopper.epilogue import store_group_rows
from tk.kernels.hopper.plans import maps_of, persistent_plan, subtile, tensor_map
from tk.kernels.hopper.product import multiply, schedule_groups
from tk.kernels.hopper.scales import GroupScales, ScaleBiasActivation
from tk.kernels.hopper.stream_k import NoFixup
from tk.kernels.hopper.tma_load import group_operands
from tk.kernels.sampled import sampled_family
from tk.kernels.scaled_grouped_mm.op import BIAS, GROUPS, OFFS, OP, OUT, SCALE_A, SCALE_B, SCALED_ROWS, B
from tk.kernels.scaled_mm import pointer, tma_plans
from tk.kernels.scaled_mm.pointer import accumulate_float8, finish_scaled, scale
from tk.kernels.scaled_mm.tma import multiplier

# --- In plain Triton: any strides, any alignment ---


@triton.jit
def scaled_grouped_mm_pointer(a, b, scales, bias, out, groups, size, strides, stride_bb, stride_scale_bb, stride_bias_b,
                              formats, stride_om, stride_on, epilogue, TILE: tl.constexpr,
                              SEARCHED: tl.constexpr):  # fmt: skip
    """As ``grouped_mm_pointer``, of what ``scaled_mm_pointer`` takes."""
    n_n = tl.cdiv(size.N, TILE.BLOCK_N)
    tile = tl.program_id(0) // n_n
    group, first = find_group(groups.offs, groups.count, groups.stride, size.M, tile, TILE.BLOCK_M, SEARCHED)
    if group < groups.count:
        rows, end = rows_of_group(groups, group, tile - first, size.M, TILE)
        cols = tl.program_id(0) % n_n * TILE.BLOCK_N + tl.arange(0, TILE.BLOCK_N)
        g = group.to(tl.int64)
        acc = accumulate_float8(a, b + g * stride_bb, rows, cols, end, size.N, size.K, strides, formats, TILE)
        acc = scale(acc, scales.rows, scales.cols + g * stride_scale_bb, rows, cols, end, size.N,
                    epilogue.stride_scale_rows, epilogue.stride_scale_cols)  # fmt: skip
        finish_scaled(acc, bias + g * stride_bias_b, out, rows, cols, end, size.N, stride_om, stride_on, epilogue)


def _pointer_plan(point: Point) -> Plan | None:
    if not pointer.is_compiled(point):
        return None
    args = pointer.pointer_args(SCALED_ROWS, point, SCALE_A, SCALE_B) | dict(
        groups=groups_of(OFFS),
        stride_bb=Int(B.batch_stride, "i64", divisible=point.aligned),
        stride_scale_bb=Int(SCALE_B.batch_stride, "i64"),
        stride_bias_b=Int(BIAS.batch_stride, "i64"),
        SEARCHED=Const(128),
    )
    return pointer_plan(
        point,
        tiles_of_rows(SCALED_ROWS, GROUPS, point.config),
        scaled_grouped_mm_pointer,
        args,
        pointer.serves(point),
        (pointer.has_float8(), *group_constraints(point, SCALED_ROWS, GROUPS, B)),
    )


# --- For Hopper ---
#
# The kernel of kernels/grouped_mm/tma.py, with scales in its epilogue and sums that are kept in fp32 where accumulation
# is to be slow.


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


def _tma_plan(point: Point) -> Plan | None:
    if not tma_plans.takes(point):
        return None
    c = point.config
    # A row of tiles reads its own group's part of b alone.
    b_reads = ceil_div(longest(SCALED_ROWS.M_choice, GROUPS), c.block_m)
    tiles = replace(tiles_of_rows(SCALED_ROWS, GROUPS, c), b_reads=b_reads)
    args = (
        tma_plans.scale_args(SCALED_ROWS, point, SCALE_A, SCALE_B)
        | group_args(SCALED_ROWS, OFFS)
        | tma_plans.constants(point)
    )
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
        tma_plans.serves(point),
        groups_suit_tma(point, SCALED_ROWS, GROUPS, tiles),
        tma_plans.predict,
    )


# --- The grid ---

_POINTER_CONFIGS = (pointer.tile(64, 64, 64, 3, 4, unaligned=True), pointer.tile(128, 128, 64, 3, 8))
_TMA_CONFIGS = (
    tma_plans.tile(64, 128, 8, 64, 32, "slow fast", "pingpong"),
    tma_plans.tile(64, 256, 4, 32, 16, "fast", "pingpong"),
    tma_plans.tile(128, 128, 6, 64, 32, all_types=True),
    tma_plans.tile(128, 256, 4, 32, 16, "fast"),
)
# Of torch's own there is but the product of two e4m3fn. What gives another dtype has one config.
_TMA_AXES = tma_plans.AXES | {"dtype": ("fp8e4nv",), "b_dtype": ("fp8e4nv",)}
_TMA = Kernel("scaled_grouped_mm_tma", OP, _TMA_AXES, {90: _TMA_CONFIGS}, _tma_plan)
_POINTER = Kernel("scaled_grouped_mm_pointer", OP, pointer.AXES, dict.fromkeys(ARCHS, _POINTER_CONFIGS), _pointer_plan)
_SAMPLED = {_POINTER.name: ("64x64x64_s3_w4",), _TMA.name: ("128x128x128_s6_coop",)}


def _usual(kernel: Kernel, point: Point) -> dict[str, object]:
    """A result in bf16."""
    usual = {"out": "bf16", "accumulation": "slow", "order": "nt"}
    if kernel is _POINTER:
        usual |= {"aligned": point.order == "nt" and point.arch != 90}
    return usual


FAMILY = sampled_family(OP, (_TMA, _POINTER), _SAMPLED, _usual, portable=("128x128x64_s3_w8",))
