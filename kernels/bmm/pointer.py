"""Batches in plain Triton: any strides, any alignment, any size, on every GPU; and everywhere matrices of a tile or
less, for which a program is a warp, so that a multiprocessor works on 32 of them at a time."""

from functools import partial
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tk.aot.expr import Expr
from tk.aot.spec import Constraint, Int, Kernel, Plan, Point
from tk.kernels.bmm.op import BIAS, BMM, OP, OUT, A, B, batch_tiles
from tk.kernels.epilogue import finish
from tk.kernels.gemm.cost import Work, is_fitted
from tk.kernels.gemm.pointer import (
    ARCHS,
    AXES,
    accumulate,
    constraints,
    finish_args,
    is_compiled,
    pointer_plan,
    predicted,
    product_args,
    tile,
    tile_indices,
)
from tk.kernels.gemm.problem import EPILOGUE_AXIS, serves


class BatchStrides(NamedTuple):
    """From one matrix to the next."""

    a: Any
    b: Any
    bias: Any
    out: Any


@triton.jit
def bmm_pointer(a, b, bias, out, size, strides, apart, stride_om, stride_on, epilogue, TILE: tl.constexpr):
    """One program, one tile of one matrix of the batch. apart: ``BatchStrides``."""
    tiles = tl.cdiv(size.M, TILE.BLOCK_M) * tl.cdiv(size.N, TILE.BLOCK_N)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    rows, cols = tile_indices(tl.program_id(0) % tiles, size.M, size.N, TILE)
    a += batch * apart.a
    b += batch * apart.b
    acc = accumulate(a, b, rows, cols, size.M, size.N, 0, size.K, strides, TILE)
    finish(acc, bias + batch * apart.bias, out + batch * apart.out, rows, cols, size.M, size.N, stride_om, stride_on,
           epilogue, "matrix")  # fmt: skip


def _aligned(point: Point) -> tuple[Constraint, ...]:
    return tuple(t.apart(16) for t in (A, B, OUT)) if point.aligned else ()


def _cost(point: Point, work: Work) -> Expr:
    """Picoseconds. On Hopper what is small is compared with tiles by TMA, whose times were measured; of it one was:
    5.5 us for 512 products of 64, memory's time and some."""
    if point.arch == 90 and point.config.small and point.aligned and not is_fitted(point, work):
        return 2_500_000 + 300_000 * work.waves + 1000 * work.roofline(point)
    return predicted(point, work)


def _plan(point: Point) -> Plan | None:
    if not is_compiled(point, beside_tma=point.config.small):
        return None
    apart = BatchStrides(
        a=Int(A.batch_stride, "i64", divisible=point.aligned),
        b=Int(B.batch_stride, "i64", divisible=point.aligned),
        bias=Int(BIAS.batch_stride, "i64"),
        out=Int(OUT.batch_stride, "i64", divisible=point.aligned),
    )
    return pointer_plan(
        point,
        batch_tiles(point.config),
        bmm_pointer,
        product_args(BMM, point) | finish_args(BMM, point, "matrix") | {"apart": apart},
        serves(point, EPILOGUE_AXIS),
        (*constraints(BMM, point), *_aligned(point)),
        point.config.occupancy,
        sharing=point.config.occupancy,
        cost=_cost,
    )


# --- The grid ---

_tile = partial(tile, small=False)  # small: worth a program of its own on Hopper too
_CONFIGS = (
    _tile(32, 32, 32, 2, 1, 16, small=True),
    _tile(64, 64, 64, 3, 4, 3, unaligned=True),
    _tile(128, 128, 32, 4, 8),
    _tile(32, 32, 16, 2, 1, 16, fma=True),
    _tile(64, 64, 16, 3, 4, 3, fma=True, unaligned=True),
)
KERNELS = (Kernel("bmm_pointer", OP, AXES, dict.fromkeys(ARCHS, _CONFIGS), _plan),)
