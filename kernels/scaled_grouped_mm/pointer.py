"""Groups of rows of float8 in plain Triton: any strides, any alignment."""

import triton
import triton.language as tl

from tk.aot.expr import ceil_div, device
from tk.aot.spec import Arg, Bundle, Const, Int, Kernel, Launch, Plan, Point, Pointer, require
from tk.kernels.gemm.cost import predict
from tk.kernels.gemm.pointer import constraints, slowdown
from tk.kernels.grouped_mm.op import longest
from tk.kernels.grouped_mm.pointer import Groups, find_group, rows_of_group
from tk.kernels.scaled_grouped_mm.op import BIAS, GROUPS, OFFS, OP, SCALE_A, SCALE_B, SCALED_ROWS, STRIDE_OFFS, B
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
    work_of,
)

M, N, K = SCALED_ROWS.M, SCALED_ROWS.N, SCALED_ROWS.K


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


def _group_args(point: Point) -> dict[str, Arg | Bundle]:
    return dict(
        groups=Groups(Pointer(OFFS, "i32", aligned=False), Int(GROUPS), Int(STRIDE_OFFS, "i64")),
        stride_bb=Int(B.batch_stride, "i64", divisible=point.aligned),
        stride_scale_bb=Int(SCALE_B.batch_stride, "i64"),
        stride_bias_b=Int(BIAS.batch_stride, "i64"),
        SEARCHED=Const(128),
    )


def _plan(point: Point) -> Plan | None:
    if not is_compiled(point):
        return None
    c = point.config
    n_n = ceil_div(N, c.block_n)
    args = pointer_args(SCALED_ROWS, point, SCALE_A, SCALE_B) | _group_args(point)
    launch = Launch(
        scaled_grouped_mm_pointer,
        args,
        grid=((M // c.block_m + GROUPS) * n_n, 1, 1),
        num_warps=c.num_warps,
        num_stages=c.num_stages,
    )
    tiles = GROUPS * ceil_div(longest(SCALED_ROWS.M_choice, GROUPS), c.block_m) * n_n
    work = work_of(SCALED_ROWS, point, ceil_div(tiles, device.sm_count))
    apart = (require(B.batch_stride % 16 == 0, "b's matrices a multiple of 16 elements apart"),)
    return Plan(
        constraints=(
            has_float8(),
            *constraints(SCALED_ROWS, point),
            require(GROUPS < 2**20, "fewer than 2**20 groups"),
            *(apart if point.aligned else ()),
        ),
        serves=serves(point),
        launches=(launch,),
        cost=predict(point, work, slowdown(point)),
        terms=work.terms(point),
        general=not point.aligned,
    )


_CONFIGS = (tile(64, 64, 64, 3, 4, unaligned=True), tile(128, 128, 64, 3, 8))
KERNELS = (Kernel("scaled_grouped_mm_pointer", OP, AXES, dict.fromkeys((80, 90, 100), _CONFIGS), _plan),)
