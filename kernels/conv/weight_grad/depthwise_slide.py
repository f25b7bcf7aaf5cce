"""The weight's gradient of groups of one channel with 3, 5 or 7 taps along w, channels-last: a thread keeps the sums of
all of a line's taps for its channels, and an element of x is loaded and converted once for all of them."""

from dataclasses import replace

import triton
import triton.language as tl

from tk.aot.expr import Expr, ceil_div
from tk.aot.spec import Config, Const, Int, Kernel, Launch, Plan, Point, require
from tk.kernels.conv.arguments import leave_out
from tk.kernels.conv.cost import multiplications, plain_cores
from tk.kernels.conv.forward.depthwise import args_in_pieces, in_pieces, piece_of, pitches_in_pieces
from tk.kernels.conv.forward.depthwise_slide import Tile, element_of_line, with_product, zeros_of
from tk.kernels.conv.geometry import Spatial, line, place
from tk.kernels.conv.op import DTYPE_AXIS
from tk.kernels.conv.weight_grad.depthwise import whole_pixels
from tk.kernels.conv.weight_grad.op import GRAD, OP, OUT
from tk.kernels.conv.weight_grad.pointer import G, problem_args
from tk.kernels.conv.weight_grad.reduce import SHARE, SPLITS, split_locals, split_plan
from tk.kernels.gemm.pointer import ARCHS


@triton.jit
def _add_pixels(acc, x, grads, AT: tl.constexpr, TILE: tl.constexpr):
    """Element AT of those that OUTPUTS pixels read, times their gradients, into the taps by which they read it."""
    TAPS: tl.constexpr = TILE.TAPS
    for tap in tl.static_range(TAPS):
        if TILE.is_read(AT, tap):
            acc = with_product(acc, x, grads[(AT - tap) // TILE.STRIDE], tap)
    return acc


@triton.jit
def _add_line(acc, grad_at, grad_pitch, x_at, x_pitch, first, size, there, col_exists, TILE: tl.constexpr):
    """OUTPUTS neighbouring pixels, all of which exist: an x that only others read would be multiplied with a 0 in their
    place, and must not be where it is NaN."""
    OUTPUTS: tl.constexpr = TILE.OUTPUTS
    READ: tl.constexpr = TILE.READ
    grads = ()
    for _ in tl.static_range(OUTPUTS):
        grads = grads + (tl.load(grad_at, mask=there[:, None] & col_exists[None, :], other=0.0).to(tl.float32),)
        grad_at += grad_pitch
    for i in tl.static_range(READ):
        a = element_of_line(x_at, i, first, size, there, col_exists).to(tl.float32)
        acc = _add_pixels(acc, a, grads, i, TILE)
        x_at += x_pitch
    return acc


@triton.jit
def weight_grad_slide(grad, x, partials, lines, channels, taps, sizes, share, geometry, grad_stride, x_stride,
                      TILE: tl.constexpr, SINGLE: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    """Program (channels, line of taps, split): TILE.ROWS lines of the result at a time, OUTPUTS pixels of each, of
    `share` lines. Into partials [splits, channels, taps]. SINGLE: the same of one pixel."""
    channels = in_pieces(channels, PIECE)
    grad_stride = pitches_in_pieces(grad_stride, PIECE)
    x_stride = pitches_in_pieces(x_stride, PIECE)
    cols = tl.program_id(0) * TILE.COLS + tl.arange(0, TILE.COLS)
    line_of_taps = tl.program_id(1)
    split = tl.program_id(2)
    col_exists = cols < channels
    kd = line_of_taps // sizes.kernel.h
    kh = line_of_taps - kd * sizes.kernel.h
    grad_pitch, x_pitch = grad_stride.pixel.w, x_stride.pixel.w
    acc = zeros_of(TILE.TAPS, TILE)
    begin = split * share
    end = begin + min(share, lines - begin)
    for first in range(begin, end, TILE.ROWS):
        row = first + tl.arange(0, TILE.ROWS)
        image, pd, ph = line(row, sizes.out)
        d = pd * geometry.stride.d - geometry.padding.d + kd * geometry.dilation.d
        h = ph * geometry.stride.h - geometry.padding.h + kh * geometry.dilation.h
        there = (row < end) & (d >= 0) & (d < sizes.image.d) & (h >= 0) & (h < sizes.image.h)
        pw = row * 0  # one number for all rows, as in forward/depthwise_slide.py
        w = pw - geometry.padding.w
        of_grad = image.to(tl.int64) * grad_stride.n + place(Spatial(pd, ph, pw), grad_stride.pixel)
        of_x = image.to(tl.int64) * x_stride.n + place(Spatial(d, h, w), x_stride.pixel)
        grad_at = grad + of_grad[:, None] + cols[None, :]
        x_at = x + of_x[:, None] + cols[None, :]
        for _ in range(sizes.out.w // TILE.OUTPUTS):
            acc = _add_line(acc, grad_at, grad_pitch, x_at, x_pitch, w, sizes.image.w, there, col_exists, TILE)
            grad_at += TILE.OUTPUTS * grad_pitch
            x_at += TILE.OUTPUTS * TILE.STRIDE * x_pitch
            w += TILE.OUTPUTS * TILE.STRIDE
        for _ in range(sizes.out.w % TILE.OUTPUTS):
            acc = _add_line(acc, grad_at, grad_pitch, x_at, x_pitch, w, sizes.image.w, there, col_exists, SINGLE)
            grad_at += grad_pitch
            x_at += TILE.STRIDE * x_pitch
            w += TILE.STRIDE
    TAPS: tl.constexpr = TILE.TAPS
    to = partials + (split.to(tl.int64) * channels + cols) * taps + line_of_taps * TAPS
    for tap in tl.static_range(TAPS):
        tl.store(to + tap, tl.sum(acc[tap], axis=0), mask=col_exists)


def _plan(point: Point) -> Plan:
    c = point.config
    lines: Expr = GRAD.size(0) * GRAD.size(3) * GRAD.size(4)
    tile = Tile(c.block_r, c.block_c, c.pixels, point.taps, point.stride)
    args = args_in_pieces(problem_args(point))
    args |= dict(
        lines=Int(lines),
        channels=Int(G),
        taps=args["sizes"].taps,
        sizes=leave_out(args["sizes"], "pixels", "groups", "out_channels", "channels", "taps", "kernel.w"),
        share=Int(SHARE),
        geometry=leave_out(args["geometry"], "stride.w", "dilation.w"),
        TILE=Const(tile),
        SINGLE=Const(replace(tile, OUTPUTS=1)),
        PIECE=Const(piece_of(point)),
        **{name: leave_out(args[name], "g", "c") for name in ("grad_stride", "x_stride")},
    )
    del args["per_split"]  # of pixels: here lines are split
    blocks = ceil_div(G, c.block_c)
    lines_of_taps = OUT.size(3) * OUT.size(4)
    # 60 multiplications a nanosecond of a multiprocessor, which `occupancy` programs share.
    step_ns = c.occupancy * c.block_r * c.block_c * point.taps * GRAD.size(5) // 60 + 1
    launch = Launch(weight_grad_slide, args, (blocks, lines_of_taps, SPLITS), num_warps=c.num_warps, num_stages=1)
    width, stride, dilation = OUT.size(5), OP.int("stride_w"), OP.int("dilation_w")
    constraints = (
        whole_pixels(point),
        require(lines < 2**31 - 2**16, "less than 2**31 - 65536 lines"),
        require(width == point.taps, f"{point.taps} taps along w"),
        require((stride == point.stride) & (dilation == 1), f"a stride of {point.stride} along w, no dilation"),
    )
    splits = split_locals(blocks * lines_of_taps, c.occupancy, c.block_r, 1, step_ns, length=lines)
    return split_plan(point, launch, splits, constraints, plain_cores(point, OP, multiplications(OP), 6000, launches=2))


_CONFIGS = (Config("slide_w4_32x32_w4", dict(block_r=32, block_c=32, pixels=4, num_warps=4, occupancy=3)),)
_AXES = {
    "dtype": DTYPE_AXIS,
    "precision": ("ieee",),
    "layout": ("channels_last",),
    "taps": (3, 5, 7),
    "stride": (1, 2),
}

KERNELS = (Kernel("weight_grad_slide", OP, _AXES, dict.fromkeys(ARCHS, _CONFIGS), _plan),)
