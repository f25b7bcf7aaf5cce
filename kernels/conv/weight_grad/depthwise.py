"""The weight's gradient where a group has one input channel: no product, but a sum for each channel and tap."""

import triton
import triton.language as tl

from tk.aot.expr import ceil_div
from tk.aot.spec import Const, Constraint, Kernel, Launch, Plan, Point, require
from tk.kernels.conv.arguments import leave_out
from tk.kernels.conv.cost import multiplications, plain_cores
from tk.kernels.conv.forward.depthwise import args_in_pieces, block, in_pieces, piece_of, pitches_in_pieces
from tk.kernels.conv.geometry import inside, pixel, place, plus, read_by, tap_of, times
from tk.kernels.conv.op import DTYPE_AXIS, has_pieces
from tk.kernels.conv.weight_grad.op import GRAD, OP, OUT, X
from tk.kernels.conv.weight_grad.pointer import G, N, problem_args
from tk.kernels.conv.weight_grad.reduce import SPLITS, split_locals, split_plan
from tk.kernels.gemm.pointer import ARCHS


@triton.jit
def weight_grad_depthwise(grad, x, partials, sizes, per_split, geometry, grad_stride, x_stride,
                          BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    """Program (channels, tap, split): its sum, BLOCK_P pixels at a time, goes into partials [splits, G, O, taps]."""
    grad_stride = pitches_in_pieces(grad_stride, PIECE)
    x_stride = pitches_in_pieces(x_stride, PIECE)
    channels = in_pieces(sizes.groups * sizes.out_channels, PIECE)
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    tap = tl.program_id(1)
    split = tl.program_id(2)
    col_exists = cols < channels
    group = (cols // sizes.out_channels).to(tl.int64)
    channel = (cols % sizes.out_channels).to(tl.int64)
    of_tap = read_by(tap_of(tap, sizes.kernel), geometry)
    grad_at = grad + group * grad_stride.g + channel * grad_stride.c
    x_at = x + group * x_stride.g
    acc = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    begin = split * per_split
    end = begin + min(per_split, sizes.pixels - begin)
    for k in range(begin, end, BLOCK_P):
        pixels = k + tl.arange(0, BLOCK_P)
        image, out_at = pixel(pixels, sizes.out)
        at = plus(times(out_at, geometry.stride), of_tap)
        there = ((pixels < end) & inside(at, sizes.image))[:, None] & col_exists[None, :]
        from_grad = image.to(tl.int64) * grad_stride.n + place(out_at, grad_stride.pixel)
        from_x = image.to(tl.int64) * x_stride.n + place(at, x_stride.pixel)
        a = tl.load(grad_at[None, :] + from_grad[:, None], mask=there, other=0.0)
        b = tl.load(x_at[None, :] + from_x[:, None], mask=there, other=0.0)
        acc += a.to(tl.float32) * b.to(tl.float32)
    to = partials + (split.to(tl.int64) * channels + cols) * sizes.taps + tap
    tl.store(to, tl.sum(acc, axis=0), mask=col_exists)


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
    args = args_in_pieces(problem_args(point))
    args |= dict(sizes=leave_out(args["sizes"], "channels"), x_stride=leave_out(args["x_stride"], "c"))
    if last:
        args |= {name: args[name]._replace(g=Const(1)) for name in ("x_stride", "grad_stride")}
        args |= dict(sizes=args["sizes"]._replace(out_channels=Const(1)))
    args |= dict(BLOCK_P=Const(c.block_p), BLOCK_C=Const(c.block_c), PIECE=Const(piece_of(point)))
    channels = ceil_div(G * N, c.block_c)
    taps = OP.local("taps")
    shapes = whole_pixels(point) if last else require(OUT.size(2) == 1, "1 input channel in each group")
    splits = split_locals(channels * taps, 4, c.block_p, 4, 400)
    cost = plain_cores(point, OP, multiplications(OP), 600 if last else 400, launches=2)
    launch = Launch(weight_grad_depthwise, args, (channels, taps, SPLITS), num_warps=c.num_warps, num_stages=2)
    return split_plan(point, launch, splits, (shapes,), cost)


_CONFIGS = (block(32, 64, 4, "channels_last"), block(1024, 1, 4, "any"))
_AXES = {"dtype": DTYPE_AXIS, "precision": ("ieee",), "layout": ("channels_last", "any")}

KERNELS = (Kernel("weight_grad_depthwise", OP, _AXES, dict.fromkeys(ARCHS, _CONFIGS), _plan),)
