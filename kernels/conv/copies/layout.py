"""conv_layout: a copy of images whose channels are apart in memory, in which they are together, for convolutions."""

import triton
import triton.language as tl

from tk.aot.expr import ceil_div
from tk.aot.spec import Config, Const, Int, Plan, Point, Pointer, require
from tk.kernels.conv.arguments import extents, image_strides, leave_out
from tk.kernels.conv.copies.op import OUT, X, copy_family, copy_op, copy_plan
from tk.kernels.conv.geometry import pixel, place
from tk.kernels.conv.op import channels_together

# Both [N, G, C, D, H, W].
OP = copy_op(
    "conv_layout",
    {
        "images": X.size(0),
        "channels": X.size(1) * X.size(2),
        "pixels": X.size(3) * X.size(4) * X.size(5),
    },
)
IMAGES, CHANNELS, PIXELS = (OP.local(name) for name in ("images", "channels", "pixels"))


@triton.jit
def conv_layout(x, out, channels, pixels, sizes, x_stride, out_stride,
                BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, JOINED: tl.constexpr):  # fmt: skip
    """Program (pixels of an image, channels). JOINED: x's pixels lie one behind the other, and all on 16 bytes."""
    tiles = tl.cdiv(pixels, BLOCK_P)
    image = (tl.program_id(0) // tiles).to(tl.int64)
    p = tl.program_id(0) % tiles * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    _, at_pixel = pixel(p, sizes)
    if JOINED:
        at = p.to(tl.int64)
    else:
        at = place(at_pixel, x_stride.pixel)
    there = (c < channels)[:, None] & (p < pixels)[None, :]
    found = tl.load(x + image * x_stride.n + (c.to(tl.int64) * x_stride.c)[:, None] + at[None, :], mask=there, other=0)
    to = out + image * out_stride.n + place(at_pixel, out_stride.pixel)[:, None] + c[None, :]
    tl.store(to, found.trans(), mask=there.trans())


def _plan(point: Point) -> Plan:
    c = point.config
    aligned = point.joined
    args = dict(
        x=Pointer(X, point.bits, aligned),
        out=Pointer(OUT, point.bits),
        channels=Int(CHANNELS, divisible=True),
        pixels=Int(PIXELS, divisible=aligned),
        sizes=extents(X),
        x_stride=leave_out(image_strides(X, divisible=aligned), "g")._replace(pixel=image_strides(X).pixel),
        out_stride=leave_out(image_strides(OUT, divisible=True), "g", "c"),
        BLOCK_C=Const(c.block_c),
        BLOCK_P=Const(c.block_p),
        JOINED=Const(point.joined),
    )
    constraints = [
        channels_together(OUT, CHANNELS),
        require((X.size(1) == 1) | (X.stride(1) == X.size(2) * X.stride(2)), "x whose groups are evenly spaced"),
        require((CHANNELS < 2**31) & (PIXELS < 2**31), "less than 2**31 channels and pixels of an image"),
    ]
    if point.joined:
        holds = (X.alignment >= 16) & (X.stride(0) % 16 == 0) & (X.stride(2) % 16 == 0) & (PIXELS % 16 == 0)
        pitch = X.size(5)
        holds = holds & (X.stride(5) == 1) & ((X.size(4) == 1) | (X.stride(4) == pitch))
        holds = holds & ((X.size(3) == 1) | (X.stride(3) == pitch * X.size(4)))
        constraints.append(require(holds, "x with pixels one behind the other, a multiple of 16 of them"))
    # Of whole tiles: a 3x3 filter has 9 pixels.
    blocks = ceil_div(PIXELS, c.block_p), ceil_div(CHANNELS, c.block_c)
    traffic = 2 * IMAGES * (blocks[0] * blocks[1]) * c.block_p * c.block_c * OP.local("itemsize")
    if c.block_p < 64:
        traffic = traffic * 5 // 4  # reads of 32 bytes at a time
    grid = (IMAGES * blocks[0], blocks[1], 1)
    return copy_plan(point, conv_layout, args, grid, constraints, traffic // (3 if point.joined else 2))


_CONFIGS = (
    Config("64x64_w4", {"block_c": 64, "block_p": 64}),
    Config("128x16_w4", {"block_c": 128, "block_p": 16}),
)
FAMILY = copy_family(OP, _plan, _CONFIGS, {"joined": (True, False)})
