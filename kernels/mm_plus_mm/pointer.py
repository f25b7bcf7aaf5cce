"""Two products in one accumulator, in plain Triton, for every GPU and every layout."""

from typing import Any

import triton
import triton.language as tl

from tk.aot.spec import Arg, Bundle, Kernel, Plan, Point
from tk.kernels.epilogue import finish
from tk.kernels.gemm.pointer import (
    ARCHS,
    AXES,
    accumulate,
    constraints,
    finish_args,
    is_compiled,
    pointer_plan,
    product_args,
    tile,
    tile_indices,
)
from tk.kernels.gemm.problem import EPILOGUE_AXIS, serves
from tk.kernels.mm_plus_mm.op import FIRST, OP, SECOND, tiles_of_both


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


def _plan(point: Point) -> Plan | None:
    if not is_compiled(point):
        return None
    return pointer_plan(
        point,
        tiles_of_both(point.config),
        mm_plus_mm_pointer,
        product_args(FIRST, point) | _second_args(point) | finish_args(FIRST, point, "matrix"),
        serves(point, EPILOGUE_AXIS),
        (*constraints(FIRST, point), *constraints(SECOND, point)),
        point.config.occupancy,
        sharing=point.config.occupancy,
    )


_CONFIGS = (
    tile(64, 64, 64, 3, 4, 2, unaligned=True),
    tile(128, 128, 32, 4, 8),
    tile(32, 64, 16, 3, 4, 2, fma=True, unaligned=True),
    tile(128, 64, 16, 3, 8, fma=True),
)
KERNELS = (Kernel("mm_plus_mm_pointer", OP, AXES, dict.fromkeys(ARCHS, _CONFIGS), _plan),)
