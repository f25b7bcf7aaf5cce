"""Grouped products in plain Triton: any strides, any alignment, on every GPU."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tk.aot.expr import Expr, Tensor, ceil_div
from tk.aot.spec import Arg, Bundle, Config, Const, Constraint, Int, Kernel, Plan, Point, Pointer, require
from tk.kernels.epilogue import finish
from tk.kernels.gemm.pointer import (
    ARCHS,
    AXES,
    accumulate,
    constraints,
    finish_args,
    fits_shared,
    pointer_plan,
    product_args,
    shape,
    tile_indices,
)
from tk.kernels.gemm.problem import ORDER_AXIS, OUT_AXIS, Batch, Gemm
from tk.kernels.gemm.tiles import Tiles, tiles_of
from tk.kernels.grouped_mm.op import (
    BIAS,
    DTYPE_AXIS,
    GROUPS,
    INNER,
    INNER_OUT,
    OF_INNER,
    OF_ROWS,
    OFFS,
    ROWS,
    B,
    longest,
)

# --- The device functions ---


class Groups(NamedTuple):
    """offs: where the groups end, `count` numbers that lie `stride` apart."""

    offs: Any
    count: Any
    stride: Any


@triton.jit
def _ends(offs, g, groups, stride_offs, T):
    """Where the groups `g` begin and end, within [0, T]; both 0 where there is no such group."""
    end = tl.load(offs + g.to(tl.int64) * stride_offs, mask=(g >= 0) & (g < groups), other=0)
    begin = tl.load(offs + (g - 1).to(tl.int64) * stride_offs, mask=(g > 0) & (g < groups), other=0)
    end = tl.minimum(tl.maximum(end, 0), T)
    begin = tl.minimum(tl.maximum(begin, 0), T)
    return tl.minimum(begin, end), end


@triton.jit
def find_group(offs, groups, stride_offs, T, tile, BLOCK_M: tl.constexpr, SEARCHED: tl.constexpr):
    """Whose `tile`-th row of tiles it is, where each group begins one of its own: (group, its first tile). The group is
    `groups` where there are not so many. SEARCHED groups are looked at together."""
    group = 0
    first = 0
    before = 0
    for start in range(0, groups, SEARCHED):
        g = start + tl.arange(0, SEARCHED)
        begin, end = _ends(offs, g, groups, stride_offs, T)
        until = before + tl.cumsum(tl.cdiv(end - begin, BLOCK_M), 0)
        is_over = (until <= tile) & (g < groups)
        group += tl.sum(is_over.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(is_over, until, 0), 0))
        before = tl.max(until, 0)
    return group, first


@triton.jit
def rows_of_group(groups, group, tile, M, TILE: tl.constexpr):
    """The rows of a group's `tile`-th row of tiles, and where the group's rows end."""
    begin, end = _ends(groups.offs, group, groups.count, groups.stride, M)
    return begin + tile * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M), end


@triton.jit
def grouped_mm_pointer(a, b, bias, out, groups, size, strides, stride_bb, stride_bias_b, stride_om, stride_on, epilogue,
                       TILE: tl.constexpr, SEARCHED: tl.constexpr):  # fmt: skip
    """Ragged rows. One program, one tile of one group; there are programs for as many tiles as there can be."""
    n_n = tl.cdiv(size.N, TILE.BLOCK_N)
    tile = tl.program_id(0) // n_n
    group, first = find_group(groups.offs, groups.count, groups.stride, size.M, tile, TILE.BLOCK_M, SEARCHED)
    if group < groups.count:
        rows, end = rows_of_group(groups, group, tile - first, size.M, TILE)
        cols = tl.program_id(0) % n_n * TILE.BLOCK_N + tl.arange(0, TILE.BLOCK_N)
        g = group.to(tl.int64)
        acc = accumulate(a, b + g * stride_bb, rows, cols, end, size.N, 0, size.K, strides, TILE)
        finish(acc, bias + g * stride_bias_b, out, rows, cols, end, size.N, stride_om, stride_on, epilogue, "vector")


@triton.jit
def grouped_mm_inner_pointer(a, b, bias, out, groups, size, strides, stride_bias_b, stride_ob, stride_om, stride_on,
                             epilogue, TILE: tl.constexpr):  # fmt: skip
    """A ragged inner size. One program, one tile of one group's result."""
    tiles = tl.cdiv(size.M, TILE.BLOCK_M) * tl.cdiv(size.N, TILE.BLOCK_N)
    group = tl.program_id(0) // tiles
    rows, cols = tile_indices(tl.program_id(0) % tiles, size.M, size.N, TILE)
    begin, end = _ends(groups.offs, group, groups.count, groups.stride, size.K)
    acc = accumulate(a, b, rows, cols, size.M, size.N, begin, end, strides, TILE)
    g = group.to(tl.int64)
    finish(acc, bias + g * stride_bias_b, out + g * stride_ob, rows, cols, size.M, size.N, stride_om, stride_on,
           epilogue, "vector")  # fmt: skip


# --- Plans ---


def serves(point: Point) -> dict[str, tuple[int, ...]]:
    """What takes any strides serves every order with results in fp32, which have no unaligned variant else."""
    takes_all = point.order == "ss" and point.out == "fp32"
    return {
        "dtype": (DTYPE_AXIS.index(point.dtype),),
        "order": tuple(range(len(ORDER_AXIS))) if takes_all else (ORDER_AXIS.index(point.order),),
        "out": (OUT_AXIS.index(point.out),),
    }


def _is_compiled(point: Point) -> bool:
    if not fits_shared(point):
        return False
    if not point.aligned:
        return point.config.unaligned and (point.out == "same" or point.order == "ss")
    return point.order != "ss"


def _is_for_tma(point: Point) -> bool:
    """What suits 16-byte loads along K suits TMA: on Hopper that is the other kernel's."""
    return point.arch == 90 and point.aligned and point.order in ("nn", "nt")


def groups_of(offs: Tensor) -> Groups:
    """offs: a matrix of one row."""
    return Groups(Pointer(offs, "i32", aligned=False), Int(offs.size(1)), Int(offs.stride(1), "i64"))


def _group_args(gemm: Gemm, point: Point) -> dict[str, Arg | Bundle]:
    shared = product_args(gemm, point) | finish_args(gemm, point, "vector")
    return shared | dict(groups=groups_of(OFFS), stride_bias_b=Int(BIAS.batch_stride, "i64"))


def group_constraints(point: Point, gemm: Gemm, groups: Expr, batched: Batch) -> tuple[Constraint, ...]:
    """batched: what has a matrix for each group."""
    found = (*constraints(gemm, point), require(groups < 2**20, "fewer than 2**20 groups"))
    return (*found, batched.apart(16)) if point.aligned else found


def tiles_of_rows(gemm: Gemm, groups: Expr, config: Config) -> Tiles:
    """The tiles that there can be at most: every group may begin a row of tiles of its own."""
    n_tiles = ceil_div(gemm.N, config.block_n)
    expected = groups * ceil_div(longest(gemm.M_choice, groups), config.block_m) * n_tiles
    return replace(tiles_of(gemm, config), count=(gemm.M // config.block_m + groups) * n_tiles, expected=expected)


def _plan(point: Point) -> Plan | None:
    if not _is_compiled(point) or _is_for_tma(point):
        return None
    stride_bb = Int(B.batch_stride, "i64", divisible=point.aligned)
    return pointer_plan(
        point,
        tiles_of_rows(OF_ROWS, GROUPS, point.config),
        grouped_mm_pointer,
        _group_args(OF_ROWS, point) | dict(stride_bb=stride_bb, SEARCHED=Const(128)),
        serves(point),
        group_constraints(point, OF_ROWS, GROUPS, B),
    )


def _plan_inner(point: Point) -> Plan | None:
    # Where K is contiguous a group begins anywhere within 16 bytes.
    if not _is_compiled(point) or (point.aligned and point.order != "tn"):
        return None
    c = point.config
    count = GROUPS * ceil_div(OF_INNER.M, c.block_m) * ceil_div(OF_INNER.N, c.block_n)
    k_blocks = ceil_div(longest(OF_INNER.K, GROUPS), c.block_k)
    return pointer_plan(
        point,
        replace(tiles_of(OF_INNER, c), count=count, expected=count, k_blocks=k_blocks),
        grouped_mm_inner_pointer,
        _group_args(OF_INNER, point) | dict(stride_ob=Int(INNER_OUT.batch_stride, "i64", divisible=point.aligned)),
        serves(point),
        group_constraints(point, OF_INNER, GROUPS, INNER_OUT),
    )


# --- The grid ---

_tile = partial(shape, unaligned=False)
_CONFIGS = (
    _tile(16, 64, 128, 4, 4),
    _tile(64, 64, 64, 3, 4, unaligned=True),
    _tile(64, 128, 64, 4, 4),
    _tile(128, 128, 64, 3, 8),
)
_AXES = AXES | {"dtype": DTYPE_AXIS, "precision": ("ieee",)}
_OF_ARCHS = dict.fromkeys(ARCHS, _CONFIGS)
KERNELS = (Kernel("grouped_mm_pointer", ROWS, _AXES, _OF_ARCHS, _plan),)
INNER_KERNELS = (Kernel("grouped_mm_inner_pointer", INNER, _AXES, _OF_ARCHS, _plan_inner),)
