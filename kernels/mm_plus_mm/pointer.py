"""Two products in one accumulator, in plain Triton, for every GPU and every layout."""

from typing import Any

import triton
import triton.language as tl

from tk.aot.expr import ceil_div, device
from tk.aot.spec import Arg, Bundle, Config, Kernel, Launch, Plan, Point
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
from tk.kernels.gemm.problem import (
    DTYPE_AXIS,
    EPILOGUE_AXIS,
    ORDER_AXIS,
    OUT_AXIS,
    PRECISION_AXIS,
    makes_sense,
    serves,
)
from tk.kernels.mm_plus_mm.op import FIRST, K2, OP, SECOND

M, N, K = FIRST.M, FIRST.N, FIRST.K


@triton.jit
def mm_plus_mm_pointer(a, b, c, d, bias, out, size, K2, strides, second_strides, stride_om, stride_on, epilogue,
                       TILE: tl.constexpr):  # fmt: skip
    """One program, one tile of out: the one product's sum, then the other's on top."""
    rows, cols = tile_indices(tl.program_id(0), size.M, size.N, TILE)
    acc = accumulate(a, b, rows, cols, size.M, size.N, 0, size.K, strides, TILE)
    acc += accumulate(c, d, rows, cols, size.M, size.N, 0, K2, second_strides, TILE)
    finish(acc, bias, out, rows, cols, size.M, size.N, stride_om, stride_on, epilogue, "matrix")


def _second_args(point: Point) -> dict[str, Arg | Bundle]:
    args: dict[str, Any] = product_args(SECOND, point)
    return dict(c=args["a"], d=args["b"], K2=args["size"].K, second_strides=args["strides"])


def _is_compiled(point: Point) -> bool:
    c = point.config
    fma = point.dtype == "fp32" and point.precision == "ieee"
    if not makes_sense(point) or c.fma != fma or not fits_shared(point):
        return False
    if not point.aligned:
        return c.unaligned
    # What suits 16-byte loads suits TMA: on Hopper that is the other kernel's.
    return point.order != "ss" and not (point.arch == 90 and point.dtype != "fp32")


def _plan(point: Point) -> Plan | None:
    if not _is_compiled(point):
        return None
    c = point.config

    def tiles(rows):  # type: ignore[no-untyped-def]
        return ceil_div(rows, c.block_m) * ceil_div(N, c.block_n)

    launch = Launch(
        mm_plus_mm_pointer,
        product_args(FIRST, point) | _second_args(point) | finish_args(FIRST, point, "matrix"),
        grid=(tiles(M), 1, 1),
        num_warps=c.num_warps,
        num_stages=c.num_stages,
    )
    waves = ceil_div(tiles(FIRST.M_choice), device.sm_count * c.occupancy)
    work = Work(
        FIRST,
        waves=waves,
        k_blocks=waves * (ceil_div(K, c.block_k) + ceil_div(K2, c.block_k)) * c.occupancy,
        flops=2 * c.block_m * c.block_n * c.block_k,
        dram=FIRST.traffic(),
        tile=(c.block_m, c.block_n),
        boxes=(1, 1),
    )
    of_both = dict.fromkeys((*constraints(FIRST, point), *constraints(SECOND, point)))
    return Plan(
        constraints=tuple(of_both),
        serves=serves(point, EPILOGUE_AXIS),
        launches=(launch,),
        cost=predict(point, work, slowdown(point)),
        terms=work.terms(point),
        general=not point.aligned,
    )


# --- The grid ---


def _tile(block_m: int, block_n: int, block_k: int, num_stages: int, num_warps: int, occupancy: int = 1,
          fma: bool = False, unaligned: bool = False) -> Config:  # fmt: skip
    """As of mm_pointer."""
    shape = dict(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=num_stages, num_warps=num_warps)
    name = f"{block_m}x{block_n}x{block_k}_s{num_stages}_w{num_warps}{'_fma' if fma else ''}"
    return Config(name, shape | dict(occupancy=occupancy, fma=fma, unaligned=unaligned))


_CONFIGS = (
    _tile(64, 64, 64, 3, 4, 2, unaligned=True),
    _tile(128, 128, 32, 4, 8),
    _tile(32, 64, 16, 3, 4, 2, fma=True, unaligned=True),
    _tile(128, 64, 16, 3, 8, fma=True),
)
_AXES = {
    "dtype": DTYPE_AXIS,
    "precision": PRECISION_AXIS,
    "order": ORDER_AXIS,
    "aligned": (True, False),
    "even_k": (False,),
    "out": OUT_AXIS,
}
KERNELS = (Kernel("mm_plus_mm_pointer", OP, _AXES, dict.fromkeys((80, 90, 100), _CONFIGS), _plan),)
