"""The weight's gradient of groups of one channel with 3, 5 or 7 taps along w, channels-last: a thread keeps the sums of
all of a line's taps for its channels, and an element of x is loaded and converted once for all of them."""

import triton
import triton.language as tl

from tk.aot.expr import Expr, ceil_div
from tk.aot.spec import Config, Const, Int, Kernel, Launch, Plan, Point, Scratch, require
from tk.kernels.conv.cost import multiplications, plain_cores
from tk.kernels.conv.depthwise import in_pieces, piece_of, pitches_in_pieces, without_divisors
from tk.kernels.conv.depthwise_slide import with_product, zeros_of
from tk.kernels.conv.geometry import place
from tk.kernels.conv.op import DTYPE_AXIS, fits_32_bits, serves
from tk.kernels.conv.pointer import ARCHS
from tk.kernels.conv_weight_grad.depthwise import whole_pixels
from tk.kernels.conv_weight_grad.op import GRAD, OP, OUT, X
from tk.kernels.conv_weight_grad.pointer import G, problem_args
from tk.kernels.conv_weight_grad.reduce import PARTIALS, SHARE, SPLITS, reduce_launch, split_locals


@triton.jit
def _add_pixels(acc, x, grads, AT: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr, PIXELS: tl.constexpr):
    """Element AT of those that PIXELS pixels read, times their gradients, into the taps by which they read it."""
    for tap in tl.static_range(TAPS):
        if AT >= tap and (AT - tap) % STRIDE == 0 and (AT - tap) // STRIDE < PIXELS:
            acc = with_product(acc, x, grads[(AT - tap) // STRIDE], tap)
    return acc


@triton.jit
def _add_line(acc, grad_at, grad_w, x_at, x_w, w, W, there, col_exists,
              TAPS: tl.constexpr, STRIDE: tl.constexpr, PIXELS: tl.constexpr):  # fmt: skip
    """PIXELS neighbouring pixels, all of which exist: an x that only others read would be multiplied with a 0 in their
    place, and must not be where it is NaN."""
    grads = ()
    for _ in tl.static_range(PIXELS):
        grads = grads + (tl.load(grad_at, mask=there[:, None] & col_exists[None, :], other=0.0).to(tl.float32),)
        grad_at += grad_w
    for i in tl.static_range((PIXELS - 1) * STRIDE + TAPS):
        mask = (there & (w + i >= 0) & (w + i < W))[:, None] & col_exists[None, :]
        acc = _add_pixels(acc, tl.load(x_at, mask=mask, other=0.0).to(tl.float32), grads, i, TAPS, STRIDE, PIXELS)
        x_at += x_w
    return acc


@triton.jit
def weight_grad_slide(grad, x, partials, lines, channels, taps, D, H, W, KH, PD, PH, PW, share,
                      stride_d, stride_h, padding_d, padding_h, padding_w, dilation_d, dilation_h,
                      grad_n, grad_d, grad_h, grad_w, x_n, x_d, x_h, x_w,
                      BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PIXELS: tl.constexpr, TAPS: tl.constexpr,
                      STRIDE: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    """Program (channels, line of taps, split): BLOCK_R lines of the result at a time, PIXELS pixels of each, of `share`
    lines. Into partials [splits, channels, taps]."""
    channels = in_pieces(channels, PIECE)
    grad_n, grad_d, grad_h, grad_w = pitches_in_pieces(grad_n, grad_d, grad_h, grad_w, PIECE)
    x_n, x_d, x_h, x_w = pitches_in_pieces(x_n, x_d, x_h, x_w, PIECE)
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    line = tl.program_id(1)
    split = tl.program_id(2)
    col_exists = cols < channels
    kd = line // KH
    kh = line - kd * KH
    acc = zeros_of(TAPS, BLOCK_R, BLOCK_C)
    begin = split * share
    end = begin + min(share, lines - begin)
    for first in range(begin, end, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        plane = row // PH
        ph = row - plane * PH
        image = plane // PD
        pd = plane - image * PD
        d = pd * stride_d - padding_d + kd * dilation_d
        h = ph * stride_h - padding_h + kh * dilation_h
        there = (row < end) & (d >= 0) & (d < D) & (h >= 0) & (h < H)
        pw = row * 0  # one number for all rows, as in kernels/conv/depthwise_slide.py
        w = pw - padding_w
        of_grad = image.to(tl.int64) * grad_n + place(pd, ph, pw, grad_d, grad_h, grad_w)
        of_x = image.to(tl.int64) * x_n + place(d, h, w, x_d, x_h, x_w)
        grad_at = grad + of_grad[:, None] + cols[None, :]
        x_at = x + of_x[:, None] + cols[None, :]
        for _ in range(PW // PIXELS):
            acc = _add_line(acc, grad_at, grad_w, x_at, x_w, w, W, there, col_exists, TAPS, STRIDE, PIXELS)
            grad_at += PIXELS * grad_w
            x_at += PIXELS * STRIDE * x_w
            w += PIXELS * STRIDE
        for _ in range(PW % PIXELS):
            acc = _add_line(acc, grad_at, grad_w, x_at, x_w, w, W, there, col_exists, TAPS, STRIDE, 1)
            grad_at += grad_w
            x_at += STRIDE * x_w
            w += STRIDE
    at = partials + (split.to(tl.int64) * channels + cols) * taps + line * TAPS
    for tap in tl.static_range(TAPS):
        tl.store(at + tap, tl.sum(acc[tap], axis=0), mask=col_exists)


def _plan(point: Point) -> Plan:
    c = point.config
    names = ("M", "G", "OC", "KW", "taps", "per_split", "stride_w", "dilation_w", "grad_g", "grad_o", "x_g", "x_c")
    lines: Expr = GRAD.size(0) * GRAD.size(3) * GRAD.size(4)
    args = without_divisors({k: v for k, v in problem_args(point).items() if k not in names}) | dict(
        partials=Scratch(0, "fp32"),
        lines=Int(lines),
        channels=Int(G),
        taps=Int(OP.local("taps")),
        share=Int(SHARE),
        BLOCK_R=Const(c.block_r),
        BLOCK_C=Const(c.block_c),
        PIXELS=Const(c.pixels),
        TAPS=Const(point.taps),
        STRIDE=Const(point.stride),
        PIECE=Const(piece_of(point)),
    )
    blocks = ceil_div(G, c.block_c)
    lines_of_taps = OUT.size(3) * OUT.size(4)
    # 60 multiplications a nanosecond of a multiprocessor, which `occupancy` programs share.
    step_ns = c.occupancy * c.block_r * c.block_c * point.taps * GRAD.size(5) // 60 + 1
    launch = Launch(weight_grad_slide, args, (blocks, lines_of_taps, SPLITS), num_warps=c.num_warps, num_stages=1)
    width, stride, dilation = OUT.size(5), OP.int("stride_w"), OP.int("dilation_w")
    return Plan(
        constraints=(
            fits_32_bits(OP, X),
            whole_pixels(point),
            require(lines < 2**31 - 2**16, "less than 2**31 - 65536 lines"),
            require(width == point.taps, f"{point.taps} taps along w"),
            require((stride == point.stride) & (dilation == 1), f"a stride of {point.stride} along w, no dilation"),
        ),
        # The precision of fp32 makes no difference where nothing is a product.
        serves=serves(point) | {"precision": (0, 1)},
        launches=(launch, reduce_launch(point.dtype)),
        locals=split_locals(blocks * lines_of_taps, c.occupancy, c.block_r, 1, step_ns, length=lines),
        buffers=(PARTIALS,),
        cost=plain_cores(point, OP, multiplications(OP), 6000, launches=2),
    )


_CONFIGS = (Config("slide_w4_32x32_w4", dict(block_r=32, block_c=32, pixels=4, num_warps=4, occupancy=3)),)
_AXES = {
    "dtype": DTYPE_AXIS,
    "precision": ("ieee",),
    "layout": ("channels_last",),
    "taps": (3, 5, 7),
    "stride": (1, 2),
}

KERNELS = (Kernel("weight_grad_slide", OP, _AXES, dict.fromkeys(ARCHS, _CONFIGS), _plan),)
