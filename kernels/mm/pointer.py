"""Matrix products in plain Triton, for every GPU and every layout.

`mm_pointer` takes every problem: any strides, any alignment, any size.
"""

import triton
import triton.language as tl

from tk.aot.spec import Const, Kernel, Plan, Point
from tk.kernels.epilogue import finish
from tk.kernels.gemm import pointer
from tk.kernels.gemm.pointer import (
    ARCHS,
    accumulate,
    constraints,
    finish_args,
    is_compiled,
    pointer_plan,
    product_args,
    tile,
    tile_indices,
    wide_k,
)
from tk.kernels.gemm.problem import EPILOGUE_AXIS, serves
from tk.kernels.gemm.tiles import tiles_of
from tk.kernels.mm.op import MM, OP

# --- The device function ---


@triton.jit
def mm_pointer(a, b, bias, out, size, strides, stride_om, stride_on, epilogue, TILE: tl.constexpr,
               EPILOGUE: tl.constexpr):  # fmt: skip
    """One program, one tile of out."""
    rows, cols = tile_indices(tl.program_id(0), size.M, size.N, TILE)
    acc = accumulate(a, b, rows, cols, size.M, size.N, 0, size.K, strides, TILE)
    finish(acc, bias, out, rows, cols, size.M, size.N, stride_om, stride_on, epilogue, EPILOGUE)


# --- The plan ---


def worth_a_cubin(point: Point) -> bool:
    if point.even_k and not point.aligned:
        return False
    if not point.even_k and point.aligned and wide_k(point) and 16 % point.config.block_k == 0:
        return False  # K is a multiple of 16: it is always even
    return is_compiled(point)


def _plan(point: Point) -> Plan | None:
    if not worth_a_cubin(point) or (point.order == "ss" and point.epilogue == "vector"):
        return None
    accumulators = point.config.block_m * point.config.block_n // (32 * point.config.num_warps)  # of a thread
    if point.epilogue == "matrix" and accumulators > 64:
        return None  # with the addresses of a whole tile of bias beside them, they would not stay in registers
    # A strided product is not worth a kernel of its own for one row of bias.
    served = {"vector": ("plain", "vector"), "matrix": EPILOGUE_AXIS if point.order == "ss" else ("matrix",)}
    return pointer_plan(
        point,
        tiles_of(MM, point.config),
        mm_pointer,
        product_args(MM, point) | finish_args(MM, point, point.epilogue) | {"EPILOGUE": Const(point.epilogue)},
        serves(point, served[point.epilogue]),
        constraints(MM, point),
        point.config.occupancy,
    )


# --- The grid ---


SMALL = (
    tile(16, 64, 128, 4, 4, 2),
    tile(32, 64, 64, 4, 4, 2, unaligned=True),
    tile(64, 64, 64, 4, 4, 2, unaligned=True),
    tile(16, 32, 32, 3, 4, 4, fma=True, unaligned=True),
    tile(32, 64, 16, 3, 4, 4, fma=True),
    tile(64, 64, 16, 3, 4, 2, fma=True),
)
_LARGE = (
    tile(64, 128, 64, 4, 4),
    tile(128, 64, 64, 4, 4),
    tile(128, 128, 32, 4, 4),
    tile(128, 128, 64, 3, 8, unaligned=True),
    tile(128, 256, 32, 3, 8),
    tile(256, 128, 32, 3, 8),
    tile(128, 64, 16, 3, 8, fma=True, unaligned=True),
    tile(128, 128, 8, 3, 8, fma=True),
)

AXES = pointer.AXES | {"even_k": (True, False)}
KERNELS = (
    Kernel("mm_pointer", OP, AXES | {"epilogue": EPILOGUE_AXIS[1:]}, dict.fromkeys(ARCHS, SMALL + _LARGE), _plan),
)
