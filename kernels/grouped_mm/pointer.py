"""Grouped products in plain Triton: any strides, any alignment, on every GPU."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tk.aot.expr import Expr, ceil_div, device
from tk.aot.spec import Arg, Bundle, Config, Const, Constraint, Int, Kernel, Launch, Op, Plan, Point, Pointer, require
from tk.kernels.epilogue import finish
from tk.kernels.gemm.cost import Work, predict
from tk.kernels.gemm.pointer import (
    accumulate,
    constraints,
    finish_args,
    fits_shared,
    product_args,
    slowdown,
    tile_indices,
)
from tk.kernels.gemm.problem import ORDER_AXIS, OUT_AXIS, Gemm
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
    STRIDE_OFFS,
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


def _group_args(gemm: Gemm, point: Point) -> dict[str, Arg | Bundle]:
    shared = product_args(gemm, point) | finish_args(gemm, point, "vector")
    return shared | dict(
        groups=Groups(Pointer(OFFS, "i32", aligned=False), Int(GROUPS), Int(STRIDE_OFFS, "i64")),
        stride_bias_b=Int(BIAS.batch_stride, "i64"),
    )


def _apart(t, point: Point) -> tuple[Constraint, ...]:  # type: ignore[no-untyped-def]
    if not point.aligned:
        return ()
    return (require(t.batch_stride % 16 == 0, f"{t.name}'s matrices a multiple of 16 elements apart"),)


def _finished(point: Point, gemm: Gemm, launch: Launch, waves: Expr, k: Expr, found: tuple[Constraint, ...]) -> Plan:
    """k: the inner size of a group."""
    c = point.config
    work = Work(
        gemm,
        waves=waves,
        k_blocks=waves * ceil_div(k, c.block_k),
        flops=2 * c.block_m * c.block_n * c.block_k,
        dram=gemm.traffic(),
        tile=(c.block_m, c.block_n),
        boxes=(1, 1),
    )
    return Plan(
        constraints=(*constraints(gemm, point), require(GROUPS < 2**20, "fewer than 2**20 groups"), *found),
        serves=serves(point),
        launches=(launch,),
        cost=predict(point, work, slowdown(point)),
        terms=work.terms(point),
        general=not point.aligned,
    )


def _launch(fn, args: dict[str, Arg | Bundle], programs: Expr, point: Point) -> Launch:  # type: ignore[no-untyped-def]
    c = point.config
    return Launch(fn, args, grid=(programs, 1, 1), num_warps=c.num_warps, num_stages=c.num_stages)


def _plan(point: Point) -> Plan | None:
    if not _is_compiled(point) or _is_for_tma(point):
        return None
    c, gemm = point.config, OF_ROWS
    n_n = ceil_div(gemm.N, c.block_n)
    args = _group_args(gemm, point) | dict(
        stride_bb=Int(B.batch_stride, "i64", divisible=point.aligned), SEARCHED=Const(128)
    )
    launch = _launch(grouped_mm_pointer, args, (gemm.M // c.block_m + GROUPS) * n_n, point)
    tiles = GROUPS * ceil_div(longest(gemm.M_choice, GROUPS), c.block_m) * n_n
    return _finished(point, gemm, launch, ceil_div(tiles, device.sm_count), gemm.K, _apart(B, point))


def _plan_inner(point: Point) -> Plan | None:
    # Where K is contiguous a group begins anywhere within 16 bytes.
    if not _is_compiled(point) or (point.aligned and point.order != "tn"):
        return None
    c, gemm = point.config, OF_INNER
    args = _group_args(gemm, point) | dict(stride_ob=Int(INNER_OUT.batch_stride, "i64", divisible=point.aligned))
    tiles = GROUPS * ceil_div(gemm.M, c.block_m) * ceil_div(gemm.N, c.block_n)
    launch = _launch(grouped_mm_inner_pointer, args, tiles, point)
    waves = ceil_div(tiles, device.sm_count)
    return _finished(point, gemm, launch, waves, longest(gemm.K, GROUPS), _apart(INNER_OUT, point))


# --- The grid ---


def _tile(block_m: int, block_n: int, block_k: int, num_stages: int, num_warps: int, unaligned: bool = False) -> Config:
    """unaligned: compiled also for operands that cannot be loaded 16 bytes at a time."""
    shape = dict(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=num_stages, num_warps=num_warps)
    return Config(f"{block_m}x{block_n}x{block_k}_s{num_stages}_w{num_warps}", shape | dict(unaligned=unaligned))


_CONFIGS = (
    _tile(16, 64, 128, 4, 4),
    _tile(64, 64, 64, 3, 4, unaligned=True),
    _tile(64, 128, 64, 4, 4),
    _tile(128, 128, 64, 3, 8),
)
_AXES = {
    "dtype": DTYPE_AXIS,
    "precision": ("ieee",),
    "order": ORDER_AXIS,
    "aligned": (True, False),
    "even_k": (False,),
    "out": OUT_AXIS,
}


def _kernels(name: str, op: Op, plan) -> tuple[Kernel, ...]:  # type: ignore[no-untyped-def]
    return (Kernel(name, op, _AXES, dict.fromkeys((80, 90, 100), _CONFIGS), plan),)


KERNELS = _kernels("grouped_mm_pointer", ROWS, _plan)
INNER_KERNELS = _kernels("grouped_mm_inner_pointer", INNER, _plan_inner)
