"""Groups of rows of float8 in plain Triton: any strides, any alignment."""

import triton
import triton.language as tl

from tk.aot.expr import ceil_div, device
from tk.aot.spec import Arg, Const, Int, Kernel, Launch, Plan, Point, Pointer, require
from tk.kernels.epilogue import finish
from tk.kernels.gemm.cost import predict
from tk.kernels.gemm.pointer import constraints, slowdown
from tk.kernels.grouped_mm.op import longest
from tk.kernels.grouped_mm.pointer import _ends, find_group
from tk.kernels.scaled_grouped_mm.op import BIAS, GROUPS, OFFS, OP, SCALE_A, SCALE_B, SCALED_ROWS, STRIDE_OFFS, B
from tk.kernels.scaled_mm.pointer import (
    AXES,
    accumulate_float8,
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
def scaled_grouped_mm_pointer(a, b, scale_a, scale_b, offs, bias, out, M, N, K, groups, stride_offs, stride_am,
                              stride_ak, stride_bb, stride_bk, stride_bn, stride_scale_a, stride_scale_bb,
                              stride_scale_b, stride_bias_b, stride_bias_n, stride_om, stride_on, a_is_e5m2, b_is_e5m2,
                              activation, has_bias, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                              BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SEARCHED: tl.constexpr):  # fmt: skip
    """One program, one tile of one group; there are programs for as many tiles as there can be."""
    n_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // n_n
    group, first = find_group(offs, groups, stride_offs, M, tile, BLOCK_M, SEARCHED)
    if group < groups:
        begin, end = _ends(offs, group, groups, stride_offs, M)
        rows = begin + (tile - first) * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = tl.program_id(0) % n_n * BLOCK_N + tl.arange(0, BLOCK_N)
        g = group.to(tl.int64)
        acc = accumulate_float8(a, b + g * stride_bb, rows, cols, end, N, K, stride_am, stride_ak, stride_bk, stride_bn,
                                a_is_e5m2, b_is_e5m2, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
        acc = scale(acc, scale_a, scale_b + g * stride_scale_bb, rows, cols, end, N, stride_scale_a, stride_scale_b)
        finish(acc, bias + g * stride_bias_b, out, rows, cols, end, N, 0, stride_bias_n, stride_om, stride_on, 1.0, 1.0,
               activation, has_bias, "vector")  # fmt: skip


def group_args() -> dict[str, Arg]:
    """What every kernel asks of the groups."""
    return dict(
        offs=Pointer(OFFS, "i32", aligned=False),
        groups=Int(GROUPS),
        stride_offs=Int(STRIDE_OFFS, "i64"),
        stride_scale_bb=Int(SCALE_B.batch_stride, "i64"),
        stride_bias_b=Int(BIAS.batch_stride, "i64"),
    )


def _plan(point: Point) -> Plan | None:
    if not is_compiled(point):
        return None
    c = point.config
    n_n = ceil_div(N, c.block_n)
    args = pointer_args(SCALED_ROWS, point, SCALE_A, SCALE_B) | group_args()
    args |= dict(stride_bb=Int(B.batch_stride, "i64", divisible=point.aligned), SEARCHED=Const(128))
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
