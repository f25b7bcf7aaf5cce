"""Matrix products in plain Triton, for every GPU and every layout.

`mm_pointer` takes every problem: any strides, any alignment, any size.
"""

import triton
import triton.language as tl

from tk.aot.expr import ceil_div, device
from tk.aot.spec import Config, Const, Kernel, Launch, Plan, Point
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
    wide_k,
)
from tk.kernels.gemm.problem import DTYPE_AXIS, ORDER_AXIS, OUT_AXIS, PRECISION_AXIS, makes_sense, serves
from tk.kernels.mm.op import MM, OP

M, N, K = MM.M, MM.N, MM.K

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
    c = point.config
    fma = point.dtype == "fp32" and point.precision == "ieee"
    if not makes_sense(point) or c.fma != fma or not fits_shared(point):
        return False
    if not point.aligned:
        return c.unaligned and not point.even_k
    if point.order == "ss":
        return False
    if not point.even_k and wide_k(point) and 16 % c.block_k == 0:
        return False  # K is a multiple of 16: it is always even
    # What suits 16-byte loads suits TMA: on Hopper that is the TMA kernels'.
    return not (point.arch == 90 and point.dtype != "fp32")


def _plan(point: Point) -> Plan | None:
    if not worth_a_cubin(point) or (point.order == "ss" and point.epilogue == "vector"):
        return None
    accumulators = point.config.block_m * point.config.block_n // (32 * point.config.num_warps)  # of a thread
    if point.epilogue == "matrix" and accumulators > 64:
        return None  # with the addresses of a whole tile of bias beside them, they would not stay in registers
    c = point.config

    def tiles(rows):
        return ceil_div(rows, c.block_m) * ceil_div(N, c.block_n)

    launch = Launch(
        mm_pointer,
        product_args(MM, point) | finish_args(MM, point, point.epilogue) | {"EPILOGUE": Const(point.epilogue)},
        grid=(tiles(M), 1, 1),
        num_warps=c.num_warps,
        num_stages=c.num_stages,
    )
    waves = ceil_div(tiles(MM.M_choice), device.sm_count * c.occupancy)
    work = Work(
        MM,
        waves=waves,
        k_blocks=waves * ceil_div(K, c.block_k),
        flops=2 * c.block_m * c.block_n * c.block_k,
        dram=MM.traffic(),
        tile=(c.block_m, c.block_n),
        boxes=(1, 1),
    )
    # A strided product is not worth a kernel of its own for one row of bias.
    everything = ("plain", "vector", "matrix")
    served = {"vector": ("plain", "vector"), "matrix": everything if point.order == "ss" else ("matrix",)}
    return Plan(
        constraints=constraints(MM, point),
        serves=serves(point, served[point.epilogue]),
        launches=(launch,),
        cost=predict(point, work, slowdown(point)),
        terms=work.terms(point),
        general=not point.aligned,
    )


# --- The grid ---


def _tile(block_m: int, block_n: int, block_k: int, num_stages: int, num_warps: int, occupancy: int = 1,
          fma: bool = False, unaligned: bool = False) -> Config:  # fmt: skip
    """occupancy: programs that a multiprocessor holds at once. fma: for fp32 without tensor cores. unaligned: compiled
    also for operands that cannot be loaded 16 bytes at a time."""
    shape = dict(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=num_stages, num_warps=num_warps)
    return Config(
        f"{block_m}x{block_n}x{block_k}_s{num_stages}_w{num_warps}{'_fma' if fma else ''}",
        shape | dict(occupancy=occupancy, fma=fma, unaligned=unaligned),
    )


SMALL = (
    _tile(16, 64, 128, 4, 4, 2),
    _tile(32, 64, 64, 4, 4, 2, unaligned=True),
    _tile(64, 64, 64, 4, 4, 2, unaligned=True),
    _tile(16, 32, 32, 3, 4, 4, fma=True, unaligned=True),
    _tile(32, 64, 16, 3, 4, 4, fma=True),
    _tile(64, 64, 16, 3, 4, 2, fma=True),
)
_LARGE = (
    _tile(64, 128, 64, 4, 4),
    _tile(128, 64, 64, 4, 4),
    _tile(128, 128, 32, 4, 4),
    _tile(128, 128, 64, 3, 8, unaligned=True),
    _tile(128, 256, 32, 3, 8),
    _tile(256, 128, 32, 3, 8),
    _tile(128, 64, 16, 3, 8, fma=True, unaligned=True),
    _tile(128, 128, 8, 3, 8, fma=True),
)

AXES = {
    "dtype": DTYPE_AXIS,
    "precision": PRECISION_AXIS,
    "order": ORDER_AXIS,
    "aligned": (True, False),
    "even_k": (True, False),
    "out": OUT_AXIS,
}
ARCHS = (80, 90, 100)

_POINTER_AXES = AXES | {"epilogue": ("vector", "matrix")}
KERNELS = (Kernel("mm_pointer", OP, _POINTER_AXES, dict.fromkeys(ARCHS, SMALL + _LARGE), _plan),)
