"""The weight's gradient in plain Triton. Rows are output channels, columns input channels — of one tap, or packed: of
all taps in turn, for few channels —, and the sum runs over the pixels of the result. Several small groups are one
product, of which only the blocks on the diagonal are kept."""

from typing import Any

import triton
import triton.language as tl

from tk.aot.expr import Expr, ceil_div, local
from tk.aot.spec import (
    Const,
    Constraint,
    Int,
    Kernel,
    Launch,
    Plan,
    Point,
    Pointer,
    Scratch,
    require,
)
from tk.kernels.conv.arguments import geometry_of, image_strides, leave_out, sizes_of
from tk.kernels.conv.cost import predict, step_ns
from tk.kernels.conv.forward.pointer import Tile, dot, first_channel, merged_groups, tile, wide_channels
from tk.kernels.conv.geometry import (
    across,
    down,
    inside,
    pixel,
    place,
    plus,
    read_by,
    tap_of,
    times,
)
from tk.kernels.conv.op import (
    DTYPE_AXIS,
    PRECISION_AXIS,
    makes_sense,
)
from tk.kernels.conv.weight_grad.op import GRAD, OP, OUT, X
from tk.kernels.conv.weight_grad.reduce import (
    FREE_LOCAL,
    SHARE,
    SPLITS,
    split_locals,
    split_plan,
)
from tk.kernels.gemm.pointer import ARCHS, suits_config

# --- The device function ---


@triton.jit
def weight_grad_pointer(grad, x, partials, sizes, merge, per_split, geometry, grad_stride, x_stride,
                        TILE: tl.constexpr):  # fmt: skip
    """Program (tile, groups, split) leaves its sum in partials [splits, G, O, taps, C], fp32. Tiles: of rows, within
    them of columns; PACKED is of columns, and what lies along K are pixels."""
    first = tl.program_id(1) * merge
    groups = min(merge, sizes.groups - first)
    channels = groups * sizes.channels
    if TILE.JOINED:
        channels = tl.multiple_of(channels, 8)
    columns = merge * sizes.channels * sizes.taps if TILE.PACKED else merge * sizes.channels
    n_tiles = tl.cdiv(columns, TILE.N) if TILE.PACKED else tl.cdiv(columns, TILE.N) * sizes.taps
    tile = tl.program_id(0)
    m = tile // n_tiles
    n = tile - m * n_tiles
    rows = m * TILE.M + tl.arange(0, TILE.M)
    if TILE.PACKED:
        at_column = n * TILE.N + tl.arange(0, TILE.N)
        tap = at_column // channels
        col = at_column - tap * channels
        col_exists = tap < sizes.taps
    else:
        tap = n % sizes.taps
        col = n // sizes.taps * TILE.N + tl.arange(0, TILE.N)
        col_exists = col < channels
    kernel_at = tap_of(tap, sizes.kernel)
    row = tl.minimum(rows, groups * sizes.out_channels - 1)
    row_group = row * 0
    row_channel = row
    col_channel = col
    grad_at = grad + row.to(tl.int64) * grad_stride.c
    x_at = x + col.to(tl.int64) * x_stride.c
    if TILE.GROUPED:
        row_group = row // sizes.out_channels
        col_group = col // sizes.channels
        row_channel = row - row_group * sizes.out_channels
        col_channel = col - col_group * sizes.channels
        if not TILE.JOINED:
            grad_at = grad + row_group.to(tl.int64) * grad_stride.g + row_channel.to(tl.int64) * grad_stride.c
            x_at = x + col_group.to(tl.int64) * x_stride.g + col_channel.to(tl.int64) * x_stride.c
        # Only here: no product with a group's stride, which is no multiple of anything, where there is one group.
        grad_at += first_channel(first, grad_stride.g, TILE.JOINED)
        x_at += first_channel(first, x_stride.g, TILE.JOINED)
    of_tap = read_by(kernel_at, geometry)
    if TILE.PACKED:
        x_at += place(of_tap, x_stride.pixel)
    acc = tl.zeros((TILE.M, TILE.N), dtype=tl.float32)
    split = tl.program_id(2)
    begin = split * per_split
    end = begin + min(per_split, sizes.pixels - begin)
    for k in range(begin, end, TILE.K):
        pixels = k + tl.arange(0, TILE.K)
        pixel_exists = pixels < end
        image, out_at = pixel(pixels, sizes.out)
        from_out = times(out_at, geometry.stride)
        from_grad = image.to(tl.int64) * grad_stride.n + place(out_at, grad_stride.pixel)
        if TILE.PACKED:
            there = inside(plus(down(from_out), across(of_tap)), sizes.image)
            there = there & pixel_exists[:, None]
            from_x = image.to(tl.int64) * x_stride.n + place(from_out, x_stride.pixel)
        else:
            at = plus(from_out, of_tap)
            there = (pixel_exists & inside(at, sizes.image))[:, None]
            from_x = image.to(tl.int64) * x_stride.n + place(at, x_stride.pixel)
        a = tl.load(grad_at[None, :] + from_grad[:, None], mask=pixel_exists[:, None], other=0.0)
        b = tl.load(x_at[None, :] + from_x[:, None], mask=there & col_exists[None, :], other=0.0)
        acc = dot(a.trans(), b, acc, TILE.PRECISION)

    group = (first + row_group).to(tl.int64)
    line = (split.to(tl.int64) * sizes.groups + group) * sizes.out_channels + row_channel
    at = partials + (line * sizes.taps * sizes.channels)[:, None] + (tap * sizes.channels + col_channel)[None, :]
    keep = (rows < groups * sizes.out_channels)[:, None] & col_exists[None, :]
    if TILE.GROUPED:
        keep = keep & (row_group[:, None] == col_group[None, :])
    tl.store(at, acc, mask=keep)


# --- Plans ---

M, N = OP.local("M"), OP.local("N")
G, C, TAPS = OP.local("groups"), OUT.size(2), OP.local("taps")
_MERGE = local(FREE_LOCAL)


def problem_args(point: Point) -> dict[str, Any]:
    """All that says which convolution it is, and how it is split."""
    last = point.layout == "channels_last"
    return dict(
        grad=Pointer(GRAD, point.dtype, last),
        x=Pointer(X, point.dtype, last),
        partials=Scratch(0, "fp32"),
        sizes=leave_out(sizes_of(OP, X, OUT, GRAD), "kernel.d"),
        per_split=Int(SHARE),
        geometry=geometry_of(OP),
        grad_stride=image_strides(GRAD, divisible=last, together=last),
        x_stride=image_strides(X, divisible=last, together=last),
    )


def _merged(point: Point) -> Expr:
    return merged_groups(OP, C, point.config.block_m, point.config.block_n)


def _constraints(point: Point) -> tuple[Constraint, ...]:
    found: tuple[Constraint, ...] = ()
    if point.layout == "channels_last":
        found += (wide_channels(GRAD), wide_channels(X))
    if not point.grouped:
        found += (require(G == 1, "1 group"),)
    elif point.layout == "channels_last":
        merge = _merged(point)
        joined = (X.stride(1) == C) & (GRAD.stride(1) == N) & (merge * C % 8 == 0) & (merge * N % 8 == 0)
        found += (require(joined, "groups side by side, a multiple of 8 channels in each program"),)
    return found


def _plan(point: Point) -> Plan | None:
    c = point.config
    if not makes_sense(point) or not suits_config(point):
        return None
    packed = point.layout == "any"
    if packed != c.general or (point.grouped and not (c.grouped or packed)):
        return None
    if point.arch == 90 and point.dtype != "fp32" and not (packed or c.grouped):
        return None  # the TMA kernel's, but for what it cannot reach
    width = _MERGE * C * TAPS if packed else _MERGE * C
    tiles = ceil_div(_MERGE * N, c.block_m) * ceil_div(width, c.block_n) * (1 if packed else TAPS)
    merge = _merged(point)
    groups = ceil_div(G, _MERGE)
    percent = (50 if c.fma else 15) if packed else 50
    step = c.occupancy * step_ns(point, percent)
    per_tile = (ceil_div(N, c.block_m) * ceil_div(C * TAPS if packed else C, c.block_n)) * (1 if packed else TAPS)
    compiled_for = Tile(c.block_m, c.block_n, c.block_k, packed, point.grouped, not packed, point.precision)
    args = problem_args(point) | dict(merge=Int(_MERGE), TILE=Const(compiled_for))
    launch = Launch(weight_grad_pointer, args, (tiles, groups, SPLITS), num_warps=c.num_warps, num_stages=c.num_stages)
    programs = tiles * groups * SPLITS
    again = 8 * SPLITS * OP.local("groups") * N * OP.local("K")  # the partial sums are written and read
    splits = split_locals(per_tile * ceil_div(G, merge), c.occupancy, c.block_k, 8, step)
    cost = predict(point, OP, programs, SHARE, occupancy=c.occupancy, percent=percent, extra_bytes=again, launches=2)
    return split_plan(point, launch, (*splits, merge), _constraints(point), cost, general=packed)


# --- The grid ---


_CONFIGS = (
    tile(32, 64, 32, 2, 4, 2, general=True),
    tile(32, 32, 32, 4, 4, 2, grouped=True),
    tile(64, 64, 32, 4, 4, 2),
    tile(128, 128, 32, 4, 8),
    tile(32, 32, 16, 2, 4, 4, fma=True, general=True),
    tile(32, 32, 16, 3, 4, 4, fma=True, grouped=True),
    tile(64, 64, 16, 3, 4, 2, fma=True),
)
_AXES = {
    "dtype": DTYPE_AXIS,
    "precision": PRECISION_AXIS,
    "layout": ("channels_last", "any"),
    "grouped": (False, True),
}

KERNELS = (Kernel("weight_grad_pointer", OP, _AXES, dict.fromkeys(ARCHS, _CONFIGS), _plan),)
