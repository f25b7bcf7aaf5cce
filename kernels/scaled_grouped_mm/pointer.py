"""Groups of rows of float8 in plain Triton: any strides, any alignment."""

import triton
import triton.language as tl

from tk.aot.spec import Const, Int, Kernel, Plan, Point
from tk.kernels.gemm.pointer import ARCHS, pointer_plan
from tk.kernels.grouped_mm.pointer import find_group, group_constraints, groups_of, rows_of_group, tiles_of_rows
from tk.kernels.scaled_grouped_mm.op import BIAS, GROUPS, OFFS, OP, SCALE_A, SCALE_B, SCALED_ROWS, B
from tk.kernels.scaled_mm.pointer import (
    AXES,
    accumulate_float8,
    finish_scaled,
    has_float8,
    is_compiled,
    pointer_args,
    scale,
    serves,
    tile,
)


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


def _plan(point: Point) -> Plan | None:
    if not is_compiled(point):
        return None
    args = pointer_args(SCALED_ROWS, point, SCALE_A, SCALE_B) | dict(
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
        serves(point),
        (has_float8(), *group_constraints(point, SCALED_ROWS, GROUPS, B)),
    )


_CONFIGS = (tile(64, 64, 64, 3, 4, unaligned=True), tile(128, 128, 64, 3, 8))
KERNELS = (Kernel("scaled_grouped_mm_pointer", OP, AXES, dict.fromkeys(ARCHS, _CONFIGS), _plan),)
