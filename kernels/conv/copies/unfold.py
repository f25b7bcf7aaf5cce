"""conv_unfold: the taps of a line as channels, side by side, for convolutions of few channels or an odd number of them.

out[n, k * C + c, d, h, p] = x[n, c, d, h, p * stride - padding + k * dilation] for k < taps: 0 where that lies outside,
and in the channels that are left over. With one tap and a stride of 1 it is a channels-last copy with more channels.
"""

import triton
import triton.language as tl

from tk.aot.expr import ceil_div
from tk.aot.spec import Config, Const, Int, Plan, Point, Pointer, require
from tk.kernels.conv.arguments import extents, image_strides, leave_out
from tk.kernels.conv.copies.op import OUT, X, copy_family, copy_op, copy_plan
from tk.kernels.conv.geometry import Spatial, pixel, place
from tk.kernels.conv.op import channels_together

# x [N, 1, C, D, H, W], out [N, 1, K, D, H, P]. taps, stride, padding and dilation are those along w.
OP = copy_op(
    "conv_unfold",
    {
        "pixels": OUT.size(0) * OUT.size(3) * OUT.size(4) * OUT.size(5),
        "channels": OUT.size(2),
    },
    ints=("taps", "stride", "padding", "dilation"),
)
PIXELS, CHANNELS = OP.local("pixels"), OP.local("channels")


@triton.jit
def conv_unfold(x, out, pixels, channels, x_channels, x_width, out_sizes, taps, stride, padding, dilation,
                x_stride, out_stride,
                BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """Program (pixels, channels) of out."""
    rows = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    k = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    exists = rows < pixels
    image, at = pixel(rows, out_sizes)
    tap = k // x_channels
    c = k - tap * x_channels
    w0 = at.w * stride - padding
    step = tap * dilation
    w = w0[:, None] + step[None, :]
    there = exists[:, None] & (tap < taps)[None, :] & (w >= 0) & (w < x_width)
    line = image.to(tl.int64) * x_stride.n + place(Spatial(at.d, at.h, w0), x_stride.pixel)
    of_tap = step.to(tl.int64) * x_stride.pixel.w + c.to(tl.int64) * x_stride.c
    found = tl.load(x + line[:, None] + of_tap[None, :], mask=there, other=0)
    to = out + (image.to(tl.int64) * out_stride.n + place(at, out_stride.pixel))[:, None] + k[None, :]
    tl.store(to, found, mask=exists[:, None] & (k < channels)[None, :])


def _plan(point: Point) -> Plan:
    c = point.config
    args = dict(
        x=Pointer(X, point.bits, aligned=False),
        out=Pointer(OUT, point.bits),
        pixels=Int(PIXELS),
        channels=Int(CHANNELS, divisible=True),
        x_channels=Int(X.size(2)),
        x_width=Int(X.size(5)),
        out_sizes=extents(OUT),
        **{name: Int(OP.int(name)) for name in OP.ints},
        x_stride=leave_out(image_strides(X), "g"),
        out_stride=leave_out(image_strides(OUT, divisible=True), "g", "c"),
        BLOCK_P=Const(c.block_p),
        BLOCK_C=Const(c.block_c),
    )
    small = (PIXELS < 2**31 - 2**16) & (CHANNELS < 2**31 - 2**16) & (X.size(5) < 2**30)
    traffic = PIXELS * CHANNELS * OP.local("itemsize")
    constraints = (
        channels_together(OUT, CHANNELS),
        require((X.size(1) == 1) & (OUT.size(1) == 1), "1 group"),
        require((X.size(2) > 0) & (OP.int("taps") * X.size(2) <= CHANNELS), "channels for all taps"),
        require(small, "less than 2**31 - 65536 pixels and channels, and 2**30 of a line"),
    )
    grid = (ceil_div(PIXELS, c.block_p), ceil_div(CHANNELS, c.block_c), 1)
    return copy_plan(point, conv_unfold, args, grid, constraints, traffic // 2)


FAMILY = copy_family(OP, _plan, (Config("128x32_w4", {"block_p": 128, "block_c": 32}),))
