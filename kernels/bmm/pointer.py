"""Batches in plain Triton: any strides, any alignment, any size, on every GPU; and everywhere matrices of a tile or
less, for which a program is a warp, so that a multiprocessor works on 32 of them at a time."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tk.aot.expr import Expr, ceil_div, device
from tk.aot.spec import Config, Constraint, Int, Kernel, Launch, Plan, Point, require
from tk.kernels.bmm.op import BATCH, BATCH_CHOICE, BIAS, BMM, OP, OUT, A, B
from tk.kernels.epilogue import finish
from tk.kernels.gemm.cost import Work, is_fitted, predict
from tk.kernels.gemm.pointer import (
    accumulate,
    constraints,
    finish_args,
    fits_shared,
    product_args,
    slowdown,
    tile_indices,
)
from tk.kernels.gemm.problem import (
    DTYPE_AXIS,
    EPILOGUE_AXIS,
    ORDER_AXIS,
    OUT_AXIS,
    PRECISION_AXIS,
    makes_sense,
    serves,
)

M, N, K = BMM.M, BMM.N, BMM.K


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


def _is_compiled(point: Point) -> bool:
    c = point.config
    fma = point.dtype == "fp32" and point.precision == "ieee"
    if not makes_sense(point) or c.fma != fma or not fits_shared(point):
        return False
    if not point.aligned:
        return c.unaligned
    # What suits 16-byte loads suits TMA: of 16-bit operands Hopper's other kernels take all but what is small.
    is_for_tma = point.arch == 90 and point.dtype != "fp32" and not c.small
    return point.order != "ss" and not is_for_tma


def _aligned(point: Point) -> tuple[Constraint, ...]:
    if not point.aligned:
        return ()
    return tuple(
        require(t.batch_stride % 16 == 0, f"{t.name}'s matrices a multiple of 16 elements apart") for t in (A, B, OUT)
    )


def _cost(point: Point, work: Work) -> Expr:
    """Picoseconds. On Hopper what is small is compared with tiles by TMA, whose times were measured; of it one was:
    5.5 us for 512 products of 64, memory's time and some."""
    if point.arch == 90 and point.config.small and point.aligned and not is_fitted(point, work):
        return 2_500_000 + 300_000 * work.waves + 1000 * work.roofline(point)
    return predict(point, work, slowdown(point))


def _plan(point: Point) -> Plan | None:
    if not _is_compiled(point):
        return None
    c = point.config
    apart = BatchStrides(
        a=Int(A.batch_stride, "i64", divisible=point.aligned),
        b=Int(B.batch_stride, "i64", divisible=point.aligned),
        bias=Int(BIAS.batch_stride, "i64"),
        out=Int(OUT.batch_stride, "i64", divisible=point.aligned),
    )

    def tiles(rows):  # type: ignore[no-untyped-def]
        return ceil_div(rows, c.block_m) * ceil_div(N, c.block_n)

    launch = Launch(
        bmm_pointer,
        product_args(BMM, point) | finish_args(BMM, point, "matrix") | {"apart": apart},
        grid=(tiles(M) * BATCH, 1, 1),
        num_warps=c.num_warps,
        num_stages=c.num_stages,
    )
    waves = ceil_div(BATCH_CHOICE * tiles(BMM.M_choice), device.sm_count * c.occupancy)
    work = Work(
        BMM,
        waves=waves,
        # Programs that share a multiprocessor share its tensor cores.
        k_blocks=waves * ceil_div(K, c.block_k) * c.occupancy,
        flops=2 * c.block_m * c.block_n * c.block_k,
        dram=BMM.traffic(),
        tile=(c.block_m, c.block_n),
        boxes=(1, 1),
    )
    return Plan(
        constraints=(*constraints(BMM, point), *_aligned(point)),
        serves=serves(point, EPILOGUE_AXIS),
        launches=(launch,),
        cost=_cost(point, work),
        terms=work.terms(point),
        general=not point.aligned,
    )


# --- The grid ---


def _tile(block_m: int, block_n: int, block_k: int, num_stages: int, num_warps: int, occupancy: int,
          **other: bool) -> Config:  # fmt: skip
    """occupancy: programs that a multiprocessor holds at once. fma: for fp32 without tensor cores. unaligned: compiled
    also for operands that cannot be loaded 16 bytes at a time. small: worth a program of its own on Hopper too."""
    flags = dict(fma=False, unaligned=False, small=False) | other
    params = dict(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=num_stages, num_warps=num_warps)
    name = f"{block_m}x{block_n}x{block_k}_s{num_stages}_w{num_warps}{'_fma' if flags['fma'] else ''}"
    return Config(name, params | dict(occupancy=occupancy) | flags)


_CONFIGS = (
    _tile(32, 32, 32, 2, 1, 16, small=True),
    _tile(64, 64, 64, 3, 4, 3, unaligned=True),
    _tile(128, 128, 32, 4, 8, 1),
    _tile(32, 32, 16, 2, 1, 16, fma=True),
    _tile(64, 64, 16, 3, 4, 3, fma=True, unaligned=True),
)
_ARCHS = (80, 90, 100)
_AXES = {
    "dtype": DTYPE_AXIS,
    "precision": PRECISION_AXIS,
    "order": ORDER_AXIS,
    "aligned": (True, False),
    "even_k": (False,),
    "out": OUT_AXIS,
}
KERNELS = (Kernel("bmm_pointer", OP, _AXES, dict.fromkeys(_ARCHS, _CONFIGS), _plan),)
