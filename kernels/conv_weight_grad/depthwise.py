"""The weight's gradient where a group has one input channel: no product, but a sum for each channel and tap."""

import triton
import triton.language as tl

from tk.aot.expr import ceil_div
from tk.aot.spec import Config, Const, Constraint, Kernel, Launch, Plan, Point, require
from tk.kernels.conv.cost import multiplications, plain_cores
from tk.kernels.conv.depthwise import in_pieces, piece_of, pitches_in_pieces, without_divisors
from tk.kernels.conv.geometry import inside, pixel, place, tap_of
from tk.kernels.conv.op import DTYPE_AXIS, fits_32_bits, has_pieces, serves
from tk.kernels.conv.pointer import ARCHS
from tk.kernels.conv_weight_grad.op import GRAD, OP, OUT, X
from tk.kernels.conv_weight_grad.pointer import G, N, problem_args
from tk.kernels.conv_weight_grad.reduce import PARTIALS, SPLITS, reduce_launch, split_locals


@triton.jit
def weight_grad_depthwise(grad, x, partials, M, G, OC, D, H, W, taps, KH, KW, PD, PH, PW, per_split,
                          stride_d, stride_h, stride_w, padding_d, padding_h, padding_w,
                          dilation_d, dilation_h, dilation_w,
                          grad_n, grad_g, grad_o, grad_d, grad_h, grad_w, x_n, x_g, x_d, x_h, x_w,
                          BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    """Program (channels, tap, split): its sum, BLOCK_P pixels at a time, goes into partials [splits, G, O, taps]."""
    grad_n, grad_d, grad_h, grad_w = pitches_in_pieces(grad_n, grad_d, grad_h, grad_w, PIECE)
    x_n, x_d, x_h, x_w = pitches_in_pieces(x_n, x_d, x_h, x_w, PIECE)
    channels = in_pieces(G * OC, PIECE)
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    tap = tl.program_id(1)
    split = tl.program_id(2)
    col_exists = cols < channels
    group = (cols // OC).to(tl.int64)
    channel = (cols % OC).to(tl.int64)
    kd, kh, kw = tap_of(tap, KH, KW)
    d_tap = kd * dilation_d - padding_d
    h_tap = kh * dilation_h - padding_h
    w_tap = kw * dilation_w - padding_w
    grad_at = grad + group * grad_g + channel * grad_o
    x_at = x + group * x_g
    acc = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    begin = split * per_split
    end = begin + min(per_split, M - begin)
    for k in range(begin, end, BLOCK_P):
        pixels = k + tl.arange(0, BLOCK_P)
        image, pd, ph, pw = pixel(pixels, PD, PH, PW)
        d = pd * stride_d + d_tap
        h = ph * stride_h + h_tap
        w = pw * stride_w + w_tap
        there = ((pixels < end) & inside(d, h, w, D, H, W))[:, None] & col_exists[None, :]
        from_grad = image.to(tl.int64) * grad_n + place(pd, ph, pw, grad_d, grad_h, grad_w)
        from_x = image.to(tl.int64) * x_n + place(d, h, w, x_d, x_h, x_w)
        a = tl.load(grad_at[None, :] + from_grad[:, None], mask=there, other=0.0)
        b = tl.load(x_at[None, :] + from_x[:, None], mask=there, other=0.0)
        acc += a.to(tl.float32) * b.to(tl.float32)
    at = partials + (split.to(tl.int64) * channels + cols) * taps + tap
    tl.store(at, tl.sum(acc, axis=0), mask=col_exists)


def whole_pixels(point: Point) -> Constraint:
    """What channels-last kernels of groups of one channel want of images."""
    piece = piece_of(point)
    holds = (OUT.size(2) == 1) & (N == 1) & (G % piece == 0) & has_pieces(GRAD, 1, piece) & has_pieces(X, 1, piece)
    return require(holds, f"groups of 1 channel, a multiple of {piece}, beside each other on 16-byte boundaries")


def _plan(point: Point) -> Plan | None:
    c = point.config
    if c.layout != point.layout:
        return None
    last = point.layout == "channels_last"
    args = without_divisors({k: v for k, v in problem_args(point).items() if k != "x_c"})
    if last:
        args |= dict(x_g=Const(1), grad_g=Const(1), OC=Const(1))
    args |= dict(BLOCK_P=Const(c.block_p), BLOCK_C=Const(c.block_c), PIECE=Const(piece_of(point)))
    channels = ceil_div(G * N, c.block_c)
    taps = OP.local("taps")
    shapes = whole_pixels(point) if last else require(OUT.size(2) == 1, "1 input channel in each group")
    launch = Launch(weight_grad_depthwise, args, (channels, taps, SPLITS), num_warps=c.num_warps, num_stages=2)
    return Plan(
        constraints=(fits_32_bits(OP, X), shapes),
        # The precision of fp32 makes no difference where nothing is a product.
        serves=serves(point) | {"precision": (0, 1)},
        launches=(launch, reduce_launch(point.dtype)),
        locals=split_locals(channels * taps, 4, c.block_p, 4, 400),
        buffers=(PARTIALS,),
        cost=plain_cores(point, OP, multiplications(OP), 600 if last else 400, launches=2),
    )


def _block(block_p: int, block_c: int, num_warps: int, layout: str) -> Config:
    name = f"depthwise_{block_p}x{block_c}_w{num_warps}" if block_c > 1 else f"depthwise_1x{block_p}_w{num_warps}"
    return Config(name, dict(block_p=block_p, block_c=block_c, num_warps=num_warps, layout=layout))


_CONFIGS = (_block(32, 64, 4, "channels_last"), _block(1024, 1, 4, "any"))
_AXES = {"dtype": DTYPE_AXIS, "precision": ("ieee",), "layout": ("channels_last", "any")}

KERNELS = (Kernel("weight_grad_depthwise", OP, _AXES, dict.fromkeys(ARCHS, _CONFIGS), _plan),)
