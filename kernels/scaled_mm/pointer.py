"""Products of float8 in plain Triton: any strides, any alignment, any size.

An element is loaded as a byte and widened to fp16, which has room for both formats: one image serves every pair of
them, also in PTX for GPUs that came before float8's own instructions. The tensor cores then sum in fp32, which does for
slow accumulation as for fast.
"""

from functools import partial
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tk.aot.expr import Tensor, device
from tk.aot.spec import DTYPES, Arg, Bundle, Const, Constraint, Int, Kernel, Plan, Point, Pointer, require
from tk.kernels.epilogue import finish
from tk.kernels.gemm import pointer
from tk.kernels.gemm.arguments import Epilogue, ScaledEpilogue, Scales
from tk.kernels.gemm.pointer import (
    ARCHS,
    _edge,
    constraints,
    fits_shared,
    masked_load,
    pointer_plan,
    product_args,
    shape,
    tile_indices,
)
from tk.kernels.gemm.problem import Gemm, out_dtype
from tk.kernels.gemm.tiles import tiles_of
from tk.kernels.scaled_mm.op import OP as SCALED_MM
from tk.kernels.scaled_mm.op import ORDER_AXIS, OUT_AXIS, SCALE_A, SCALE_B, SCALED, SELECTOR_AXES

# --- The device functions ---


class Formats(NamedTuple):
    """0: e4m3fn, 1: e5m2."""

    a_is_e5m2: Any
    b_is_e5m2: Any


@triton.jit
def widen(x, is_e5m2):
    """Bytes of float8_e5m2, or of float8_e4m3fn, as fp16: every value is itself.

    The fields go where fp16 has its own. e5m2 is then done; e4m3fn's exponent has a bias of 7 instead of 15, and its
    only NaN, all bits of the magnitude, would be a number."""
    bits = x.to(tl.uint16)
    magnitude = bits & 0x7F
    wide = magnitude << (7 + is_e5m2).to(tl.uint16)
    wide = tl.where(magnitude > 0x7E + is_e5m2, 0x7E00, wide)
    wide = wide | ((bits & 0x80) << 8)
    return wide.to(tl.uint16).to(tl.float16, bitcast=True) * (256 - 255 * is_e5m2).to(tl.float16)


@triton.jit
def accumulate_float8(a, b, rows, cols, M, N, K, strides, formats, TILE: tl.constexpr):
    """The fp32 sum over K of the products of bytes."""
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    rows, _ = _edge(rows, M, False)
    cols, _ = _edge(cols, N, False)
    ks = tl.arange(0, BLOCK_K).to(tl.int64)
    a_at = a + rows[:, None] * strides.am + ks[None, :] * strides.ak
    b_at = b + ks[:, None] * strides.bk + cols[None, :] * strides.bn
    acc = tl.zeros((TILE.BLOCK_M, TILE.BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        left = tl.arange(0, BLOCK_K) < K - k
        x = widen(masked_load(a_at, left[None, :], left[None, :], False, True), formats.a_is_e5m2)
        y = widen(masked_load(b_at, left[:, None], left[:, None], False, True), formats.b_is_e5m2)
        acc = tl.dot(x, y, acc)
        a_at += tl.cast(strides.ak, tl.int64) * BLOCK_K
        b_at += tl.cast(strides.bk, tl.int64) * BLOCK_K
    return acc


@triton.jit
def scale(acc, scale_a, scale_b, rows, cols, M, N, stride_scale_a, stride_scale_b):
    """scale_a[rows] * scale_b[cols] * acc, rows and cols within M and N."""
    x = tl.load(scale_a + rows.to(tl.int64) * stride_scale_a, mask=rows < M, other=0.0)
    y = tl.load(scale_b + cols.to(tl.int64) * stride_scale_b, mask=cols < N, other=0.0)
    return acc * y[None, :] * x[:, None]


@triton.jit
def finish_scaled(acc, bias, out, rows, cols, M, N, stride_om, stride_on, epilogue):
    """epilogue: a ``ScaledEpilogue``, whose scales `acc` already has. bias: one row."""
    plain = Epilogue(0, epilogue.stride_bias, 1.0, 1.0, epilogue.activation, epilogue.has_bias)
    finish(acc, bias, out, rows, cols, M, N, stride_om, stride_on, plain, "vector")


@triton.jit
def scaled_mm_pointer(a, b, scales, bias, out, size, strides, formats, stride_om, stride_on, epilogue,
                      TILE: tl.constexpr):  # fmt: skip
    """One program, one tile of out."""
    rows, cols = tile_indices(tl.program_id(0), size.M, size.N, TILE)
    acc = accumulate_float8(a, b, rows, cols, size.M, size.N, size.K, strides, formats, TILE)
    acc = scale(acc, scales.rows, scales.cols, rows, cols, size.M, size.N, epilogue.stride_scale_rows,
                epilogue.stride_scale_cols)  # fmt: skip
    finish_scaled(acc, bias, out, rows, cols, size.M, size.N, stride_om, stride_on, epilogue)


# --- Plans ---


def has_float8() -> Constraint:
    return require(device.arch >= 89, "a GPU with float8: compute capability 8.9 or newer")


def is_compiled(point: Point) -> bool:
    if not fits_shared(point):
        return False
    if not point.aligned:
        return point.config.unaligned
    # What suits 16-byte loads suits TMA: on Hopper that is the TMA kernels'.
    return point.order == "nt" and point.arch != 90


def serves(point: Point) -> dict[str, tuple[int, ...]]:
    """A pointer kernel serves both formats and both accumulations."""
    every = {name: tuple(range(len(values))) for name, values in SELECTOR_AXES.items()}
    return every | {"order": (ORDER_AXIS.index(point.order),), "out": (OUT_AXIS.index(point.out),)}


def pointer_args(gemm: Gemm, point: Point, scale_a: Tensor, scale_b: Tensor) -> dict[str, Arg | Bundle]:
    """Gives the arguments that have to do with one product. The scales: [M, 1] and [1, N]."""

    def is_e5m2(t: Tensor) -> Int:
        return Int(t.dtype == DTYPES["fp8e5"])

    return product_args(gemm, point) | dict(
        scales=Scales(Pointer(scale_a, "fp32", aligned=False), Pointer(scale_b, "fp32", aligned=False)),
        bias=gemm.bias_pointer(out_dtype(point)),
        out=Pointer(gemm.out, out_dtype(point), point.aligned),
        formats=Formats(is_e5m2(gemm.a), is_e5m2(gemm.b)),
        stride_om=Int(gemm.out.stride(0), "i64", divisible=point.aligned),
        stride_on=Const(1) if point.order == "nt" else Int(gemm.out.stride(1), "i64"),
        epilogue=scaled_epilogue(gemm, scale_a, scale_b),
    )


def scaled_epilogue(gemm: Gemm, scale_a: Tensor, scale_b: Tensor, swap_ab: bool = False) -> ScaledEpilogue:
    """swap_ab: of the transposed result."""
    strides = (Int(scale_a.stride(0), "i64"), Int(scale_b.stride(1), "i64"))
    return ScaledEpilogue(
        *(strides[::-1] if swap_ab else strides),
        stride_bias=Int(gemm.bias.stride(1), "i64"),
        activation=Int(gemm.op.int("activation")),
        has_bias=Int(gemm.bias.present),
    )


def _plan(point: Point) -> Plan | None:
    if not is_compiled(point):
        return None
    return pointer_plan(
        point,
        tiles_of(SCALED, point.config),
        scaled_mm_pointer,
        pointer_args(SCALED, point, SCALE_A, SCALE_B),
        serves(point),
        (has_float8(), *constraints(SCALED, point)),
    )


# --- The grid ---

tile = partial(shape, unaligned=False)
CONFIGS = (
    tile(16, 64, 128, 4, 4),
    tile(64, 64, 64, 3, 4, unaligned=True),
    tile(128, 128, 64, 3, 8),
)
AXES = pointer.AXES | {
    "dtype": ("u8",),  # bytes, whatever they hold
    "precision": ("ieee",),
    "order": ORDER_AXIS,
    "out": OUT_AXIS,
}
KERNELS = (Kernel("scaled_mm_pointer", SCALED_MM, AXES, dict.fromkeys(ARCHS, CONFIGS), _plan),)
