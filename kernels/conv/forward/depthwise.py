"""Groups of one input channel, any of them: each output is a sum over the taps of one channel, and no product.

A program has a block of pixels times a block of channels. Which of the two is contiguous in memory is the layout's; the
loads of neighbouring taps meet in L1. Channels-last, 16 bytes of channels are loaded at a time where pixels begin on
such boundaries, else single elements.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

from tk.aot.expr import ceil_div
from tk.aot.spec import ITEMSIZE, Config, Const, Constraint, Int, Kernel, Launch, Plan, Point, require
from tk.kernels.conv.arguments import leave_out
from tk.kernels.conv.cost import multiplications, plain_cores, tiles_of, waiting_ns
from tk.kernels.conv.forward.pointer import finish_pixels, problem_args
from tk.kernels.conv.geometry import ImageStrides, Spatial, first_read, inside, pixel, place, plus, tap_of, times
from tk.kernels.conv.op import DTYPE_AXIS, OP, OUT, WEIGHT, X, fits_32_bits, has_pieces, serves
from tk.kernels.gemm.pointer import ARCHS


@triton.jit
def in_pieces(n, PIECE: tl.constexpr):
    """n, which is a multiple of PIECE: so the compiler sees it, which can be told of an argument only that of 16."""
    return n // PIECE * PIECE


@triton.jit
def pitches_in_pieces(stride, PIECE: tl.constexpr):
    """Those of an image."""
    n = in_pieces(stride.n, PIECE)
    d, h, w = stride.pixel
    return ImageStrides(n, stride.g, stride.c, Spatial(in_pieces(d, PIECE), in_pieces(h, PIECE), in_pieces(w, PIECE)))


@triton.jit
def conv_depthwise(x, weight, bias, out, sizes, geometry, x_stride, weight_stride, out_stride, epilogue,
                   BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, MULTIPLIER: tl.constexpr,
                   PIECE: tl.constexpr):  # fmt: skip
    """BLOCK_P pixels of BLOCK_C output channels. MULTIPLIER: a group may have more than one output channel. PIECE: what
    channels and the pitches of both images are multiples of."""
    channels = in_pieces(sizes.groups * sizes.out_channels, PIECE)
    x_stride = pitches_in_pieces(x_stride, PIECE)
    out_stride = pitches_in_pieces(out_stride, PIECE)
    rows = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    exists = rows < sizes.pixels
    col_exists = cols < channels
    image, out_at = pixel(rows, sizes.out)
    begin = first_read(out_at, geometry)
    if MULTIPLIER:
        group = (cols // sizes.out_channels).to(tl.int64)
        channel = (cols % sizes.out_channels).to(tl.int64)
    else:
        group = cols.to(tl.int64)
        channel = group * 0
    x_at = x + (image.to(tl.int64) * x_stride.n + place(begin, x_stride.pixel))[:, None] + (group * x_stride.g)[None, :]
    weight_at = weight + group * weight_stride.g + channel * weight_stride.o
    acc = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    for tap in range(sizes.taps):
        kernel_at = tap_of(tap, sizes.kernel)
        step = times(kernel_at, geometry.dilation)
        there = (exists & inside(plus(begin, step), sizes.image))[:, None] & col_exists[None, :]
        a = tl.load(x_at + place(step, x_stride.pixel), mask=there, other=0.0)
        b = tl.load(weight_at + place(kernel_at, weight_stride.tap), mask=col_exists, other=0.0)
        acc += a.to(tl.float32) * b.to(tl.float32)[None, :]
    pixels = image.to(tl.int64) * out_stride.n + place(out_at, out_stride.pixel)
    finish_pixels(acc, bias, out, pixels, exists, group * out_stride.g + channel * out_stride.c, col_exists,
                  epilogue, group * epilogue.bias_g + channel * epilogue.bias_o)  # fmt: skip


# Channels-last, as a point's layout: by pieces of 16 bytes, and at any pitch.
CHANNELS_LAST = ("channels_last", "channels_last_odd")
_CHANNELS = OP.local("groups") * OP.local("N")


def piece_of(point: Point) -> int:
    """Elements that are loaded at a time."""
    return 16 // ITEMSIZE[point.dtype] if point.layout == "channels_last" else 1


def whole_pixels(point: Point) -> Constraint:
    """What channels-last kernels of groups of one channel want of images."""
    piece = piece_of(point)
    if piece == 1:
        holds = (X.stride(1) == 1) & (OUT.stride(1) == 1) & (WEIGHT.size(1) == 1)
        return require(holds, "channels contiguous, one for one")
    holds = (WEIGHT.size(1) == 1) & (_CHANNELS % piece == 0) & has_pieces(X, 1, piece) & has_pieces(OUT, 1, piece)
    return require(holds, f"channels contiguous, a multiple of {piece}, on 16-byte boundaries, one for one")


def without_divisors(arg: Any) -> Any:
    """The argument without the divisors of its numbers, in bundles too: the kernel has them in pieces."""
    if isinstance(arg, tuple):
        return type(arg)(*map(without_divisors, arg))
    return replace(arg, divisible=False) if isinstance(arg, Int) else arg


def args_in_pieces(args: Mapping[str, Any]) -> dict[str, Any]:
    return {name: without_divisors(arg) for name, arg in args.items()}


def _constraints(point: Point) -> tuple[Constraint, ...]:
    found = (fits_32_bits(OP, X), require(WEIGHT.size(2) == 1, "1 input channel in each group"))
    return (*found, whole_pixels(point)) if point.layout in CHANNELS_LAST else found


# Of groups of one channel.
_UNREAD = (("sizes", "channels"), ("x_stride", "c"), ("weight_stride", "c"))


def _plan(point: Point) -> Plan | None:
    c = point.config
    is_last = point.layout in CHANNELS_LAST
    if is_last != (c.layout == "channels_last"):
        return None
    args = args_in_pieces(problem_args(point, wide_weight=False))
    args |= {name: leave_out(args[name], field) for name, field in _UNREAD}
    if is_last:
        args |= {name: args[name]._replace(g=Const(1)) for name in ("x_stride", "out_stride")}
    args |= dict(
        BLOCK_P=Const(c.block_p), BLOCK_C=Const(c.block_c), MULTIPLIER=Const(not is_last), PIECE=Const(piece_of(point))
    )
    grid = (ceil_div(OP.local("M"), c.block_p), ceil_div(_CHANNELS, c.block_c), 1)
    # Each tap is waited for: little work takes as long as all of them.
    programs = tiles_of(OP.local("M_choice"), _CHANNELS, (c.block_p, c.block_c))
    waits = waiting_ns(programs, 5, OP.local("taps"), 420 if point.layout == "any" else 400)
    per_ns = {"channels_last": 1000, "channels_last_odd": 600, "any": 500}[point.layout]
    return Plan(
        constraints=_constraints(point),
        serves=serves(point),
        launches=(Launch(conv_depthwise, args, grid, num_warps=c.num_warps, num_stages=2),),
        cost=plain_cores(point, OP, multiplications(OP), per_ns, least_ns=waits),
    )


def block(block_p: int, block_c: int, num_warps: int, layout: str) -> Config:
    name = f"depthwise_{block_p}x{block_c}_w{num_warps}" if block_c > 1 else f"depthwise_1x{block_p}_w{num_warps}"
    return Config(name, dict(block_p=block_p, block_c=block_c, num_warps=num_warps, layout=layout))


_CONFIGS = (block(32, 64, 4, "channels_last"), block(512, 1, 4, "any"))
_AXES = {"dtype": DTYPE_AXIS, "precision": ("ieee",), "layout": (*CHANNELS_LAST, "any")}

KERNELS = (Kernel("conv_depthwise", OP, _AXES, dict.fromkeys(ARCHS, _CONFIGS), _plan),)
