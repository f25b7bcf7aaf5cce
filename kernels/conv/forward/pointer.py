"""Convolutions in plain Triton, for every GPU, layout and number of groups.

Rows are output pixels, columns output channels, and the sum runs over taps and input channels. Taps are looped over, a
block of K has channels of one tap, and a row of x is there or not as a whole; or they are packed, and a block of K runs
across taps, for few channels. Where groups are small, a program has several of them as one product, whose weight is a
block diagonal: tensor cores have nothing smaller than 16 x 8 x 16. What is NaN then is worked out again, by a launch of
its own (contained.py): within this kernel, that would leave the sum no registers.
"""

from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from tk.aot.expr import Expr, Tensor, ceil_div, local, maximum, minimum, select
from tk.aot.spec import Config, Const, Constraint, Int, Kernel, Launch, Op, Plan, Point, Pointer, require
from tk.kernels.conv.arguments import geometry_of, image_strides, leave_out, sizes_of, weight_strides
from tk.kernels.conv.cost import predict, tiles_of
from tk.kernels.conv.forward.contained import conv_contained
from tk.kernels.conv.geometry import (
    Epilogue,
    ImageStrides,
    across,
    down,
    first_read,
    inside,
    pixel,
    place,
    plus,
    tap_of,
    times,
)
from tk.kernels.conv.op import (
    BIAS,
    DTYPE_AXIS,
    OF_PIXELS,
    OF_TAPS,
    OP,
    OUT,
    PRECISION_AXIS,
    WEIGHT,
    X,
    fits_32_bits,
    has_pieces,
    makes_sense,
    serves,
)
from tk.kernels.epilogue import activate
from tk.kernels.gemm.pointer import ARCHS, _round_to_tf32, shape, suits_config, tile_coordinates

# --- The device functions ---


@triton.jit
def dot(x, y, acc, PRECISION: tl.constexpr):
    """x y on top of acc."""
    if PRECISION == "ieee" and x.dtype == tl.float32:
        acc += tl.dot(x, y, input_precision=PRECISION)  # sums of blocks: one long chain of additions errs more
    else:
        if PRECISION == "tf32":
            x = _round_to_tf32(x)
            y = _round_to_tf32(y)
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
    return acc


@triton.jit
def first_channel(group, stride, JOINED: tl.constexpr):
    """Where a program's groups begin. JOINED: on 16 bytes of 16-bit elements."""
    at = group.to(tl.int64) * stride
    if JOINED:
        at = tl.multiple_of(at, 8)
    return at


@triton.jit
def finish_pixels(acc, bias, out, pixels, exists, cols, col_exists, epilogue, bias_at):
    """Store activation(acc + bias): `pixels` and `cols` are offsets of the rows and columns in out."""
    if epilogue.has_bias != 0:
        acc += tl.load(bias + bias_at, mask=col_exists, other=0.0).to(tl.float32)[None, :]
    acc = activate(acc, epilogue.activation)
    at = out + pixels[:, None] + cols[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=exists[:, None] & col_exists[None, :])


@dataclass(frozen=True)
class Tile:
    """What a kernel of implicit products is compiled for: the sizes of its blocks, and how it goes through the
    channels. PACKED: taps and channels in one line. GROUPED: there are groups. JOINED: the channels of neighbouring
    groups of x lie beside each other."""

    M: int
    N: int
    K: int
    PACKED: bool
    GROUPED: bool
    JOINED: bool
    PRECISION: str


@triton.jit
def conv_pointer(x, weight, bias, out, sizes, merge, geometry, x_stride, weight_stride, out_stride, epilogue,
                 GROUP_M: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """One program: a tile of out, of `merge` groups. GROUP_M: see tile_coordinates. DEPENDENT: what looks at out
    afterwards may begin beside it."""
    if DEPENDENT:
        gdc_launch_dependents()
    first = tl.program_id(1) * merge  # group
    groups = min(merge, sizes.groups - first)
    channels = groups * sizes.channels
    if TILE.JOINED:
        channels = tl.multiple_of(channels, 8)
    m, n = tile_coordinates(tl.program_id(0), sizes.pixels, merge * sizes.out_channels, TILE.M, TILE.N, GROUP_M)
    rows = m * TILE.M + tl.arange(0, TILE.M)
    cols = n * TILE.N + tl.arange(0, TILE.N)
    exists = rows < sizes.pixels
    image, out_at = pixel(tl.minimum(rows, sizes.pixels - 1), sizes.out)
    begin = first_read(out_at, geometry)
    # Columns past the last read the last one; what that gives is not stored.
    col = tl.minimum(cols, groups * sizes.out_channels - 1)
    x_at = x + image.to(tl.int64) * x_stride.n + place(begin, x_stride.pixel)
    if TILE.GROUPED:
        col_group = col // sizes.out_channels
        col_channel = (col - col_group * sizes.out_channels).to(tl.int64)
        of_col = (first + col_group).to(tl.int64)
        x_at += first_channel(first, x_stride.g, TILE.JOINED)
        weight_at = weight + of_col * weight_stride.g + col_channel * weight_stride.o
        to = of_col * out_stride.g + col_channel * out_stride.c
        bias_at = of_col * epilogue.bias_g + col_channel * epilogue.bias_o
    else:  # no product with a group's stride, which is no multiple of anything
        weight_at = weight + col.to(tl.int64) * weight_stride.o
        to = cols.to(tl.int64) * out_stride.c
        bias_at = col.to(tl.int64) * epilogue.bias_o
    acc = tl.zeros((TILE.M, TILE.N), dtype=tl.float32)

    blocks = tl.cdiv(sizes.taps * channels if TILE.PACKED else channels, TILE.K)
    steps = blocks if TILE.PACKED else sizes.taps * blocks
    for step in range(steps):
        if TILE.PACKED:
            k = step * TILE.K + tl.arange(0, TILE.K)
            tap = k // channels
            c = k - tap * channels
            kernel_at = tap_of(tap, sizes.kernel)
            k_exists = tap < sizes.taps
        else:
            tap = step // blocks
            c = (step - tap * blocks) * TILE.K + tl.arange(0, TILE.K)
            kernel_at = tap_of(tap, sizes.kernel)
            k_exists = c < channels
        c_channel = c
        c_at = c.to(tl.int64) * x_stride.c
        if TILE.GROUPED:
            c_group = c // sizes.channels
            c_channel = c - c_group * sizes.channels
            if not TILE.JOINED:
                c_at = c_group.to(tl.int64) * x_stride.g + c_channel.to(tl.int64) * x_stride.c
        of_tap = times(kernel_at, geometry.dilation)
        shift = place(of_tap, x_stride.pixel)
        in_weight = place(kernel_at, weight_stride.tap) + c_channel.to(tl.int64) * weight_stride.c
        if TILE.PACKED:
            there = inside(plus(down(begin), across(of_tap)), sizes.image)
            at = x_at[:, None] + (shift + c_at)[None, :]
        else:
            there = inside(plus(begin, of_tap), sizes.image)[:, None]
            at = (x_at + shift)[:, None] + c_at[None, :]
        a = tl.load(at, mask=there & k_exists[None, :], other=0.0)
        of_weight = k_exists[:, None]
        if TILE.GROUPED:
            of_weight = of_weight & (c_group[:, None] == col_group[None, :])
        b = tl.load(weight_at[None, :] + in_weight[:, None], mask=of_weight, other=0.0)
        acc = dot(a, b, acc, TILE.PRECISION)

    pixels = image.to(tl.int64) * out_stride.n + place(out_at, out_stride.pixel)
    finish_pixels(acc, bias, out, pixels, exists, to, cols < groups * sizes.out_channels, epilogue, bias_at)


# --- Plans ---

M, N, K = OP.local("M"), OP.local("N"), OP.local("K")
G, C, TAPS = OP.local("groups"), WEIGHT.size(2), OP.local("taps")


def _has_wide_channels(point: Point) -> bool:
    return point.layout in ("channels_last", "mixed")


def _out_strides(point: Point) -> ImageStrides:
    last = point.layout == "channels_last"
    found = image_strides(OUT, divisible=last, together=last)
    return found._replace(pixel=found.pixel._replace(w=Const(1))) if point.layout == "mixed" else found


def problem_args(point: Point, wide_weight: bool) -> dict[str, Any]:
    """All that says which convolution it is. wide_weight: the weight's strides are multiples of 16, which a group's few
    channels need not be."""
    wide = _has_wide_channels(point)
    bias_strides = (Int(BIAS.stride(d), "i64") for d in (0, 1))
    return dict(
        x=Pointer(X, point.dtype, wide),
        weight=Pointer(WEIGHT, point.dtype, wide and wide_weight),
        bias=Pointer(BIAS, point.dtype, aligned=False),
        out=Pointer(OUT, point.dtype, point.layout == "channels_last"),
        sizes=leave_out(sizes_of(OP, X, WEIGHT, OUT), "kernel.d"),
        geometry=geometry_of(OP),
        x_stride=image_strides(X, divisible=wide, together=wide),
        weight_stride=weight_strides(WEIGHT, divisible=wide and wide_weight, together=wide),
        out_stride=_out_strides(point),
        epilogue=Epilogue(*bias_strides, Int(OP.int("activation")), Int(BIAS.present)),
    )


_LOOK = 128  # pixels of a program that looks for NaN, one for each thread
_PIECE = ((128, 2), (4, 64))  # pixels and channels that it works out at once: where pixels, or channels, lie together


def contained_launch(point: Point, merge: Expr, when: Expr | int = 1) -> Launch:
    """Works out again what is NaN in the result of groups of which `merge` were multiplied as one. The point's layout
    says whether out has wide channels on 16-byte boundaries: channels_last."""
    last = point.layout == "channels_last"
    rows, cols = _PIECE[last]
    args = problem_args(replace(point, axes={**point.axes, "layout": "any"}), wide_weight=False)
    if last:
        args |= dict(out=Pointer(OUT, point.dtype), out_stride=image_strides(OUT, divisible=True, together=True))
    dependent = point.arch >= 90
    args |= dict(merge=Int(merge), PIXELS=Const(_LOOK), ROWS=Const(rows), COLS=Const(cols), LAST=Const(last),
                 DEPENDENT=Const(dependent))  # fmt: skip
    grid = (ceil_div(M, _LOOK), ceil_div(G, merge), 1)
    return Launch(conv_contained, args, grid, num_warps=4, num_stages=1, when=when, dependent=int(dependent))


def contained_cost(point: Point, merge: Expr) -> Expr:
    """The cost of contained_launch, picoseconds: of each pixel and each product two elements are read, which lie in one
    sector of 32 bytes or beside those of other pixels, and hardly ever is there more to do."""
    bytes_read = 32 if point.layout == "channels_last" else 2 * OP.local("itemsize")
    return 2_000_000 + OP.local("M_choice") * ceil_div(G, merge) * bytes_read // 4


def merged_groups(op: Op, channels: Expr, outputs: int, inputs: int) -> Expr:
    """The groups that a program merges: as many as fit blocks of so many output and input channels, one at least.
    channels: that go into a group."""
    room = minimum(outputs // maximum(op.local("N"), 1), inputs // maximum(channels, 1))
    return minimum(maximum(room, 1), op.local("groups"))


def _merged(point: Point) -> Expr:
    return merged_groups(OP, C, point.config.block_n, point.config.block_k)


def wide_channels(t: Tensor, others: tuple[int, ...] = OF_PIXELS) -> Constraint:
    """others: see ``has_pieces``."""
    holds = has_pieces(t, 2, 16, others=others)
    return require(holds, f"{t.name} on a 16-byte boundary, its channels contiguous and 16 to a pixel")


def constraints(point: Point) -> tuple[Constraint, ...]:
    found: tuple[Constraint, ...] = (fits_32_bits(OP, X),)
    if not point.grouped:
        found += (require(G == 1, "1 group"),)
    if point.layout == "any":
        return found
    c = G * C  # of all groups, which lie beside each other
    # A group's few channels need not begin on any boundary in the weight.
    wide = [(X, OF_PIXELS), (WEIGHT, () if point.grouped else OF_TAPS)]
    if point.layout == "channels_last":
        wide.append((OUT, OF_PIXELS))
    else:
        found += (require(OUT.stride(5) == 1, "out contiguous along its last dimension"),)
    found += tuple(wide_channels(t, others) for t, others in wide)
    if point.grouped:
        joined = (X.stride(1) == C) & ((point.layout != "channels_last") | (OUT.stride(1) == N))
        joined = joined & (c % 16 == 0) & (_merged(point) * C % 8 == 0)
        return (*found, require(joined, "groups side by side, a multiple of 8 channels in each program, of 16 in all"))
    return (*found, require(C % 16 == 0, "a multiple of 16 channels"))


def _worth_a_cubin(point: Point) -> bool:
    c = point.config
    if not makes_sense(point) or not suits_config(point):
        return False
    if point.grouped and point.layout == "mixed":
        return False  # "any" serves
    if point.layout == "any":
        return c.general
    if point.grouped:
        return c.grouped
    accumulators = c.block_m * c.block_n // (32 * c.num_warps)  # of a thread
    if point.layout == "mixed" and accumulators > 32:
        return False  # with an address for each of them, they would not stay in registers
    # On Hopper, what is aligned is the TMA kernel's, but for what it cannot reach.
    return not c.general and (point.arch != 90 or point.dtype == "fp32" or c.grouped)


def _plan(point: Point) -> Plan | None:
    if not _worth_a_cubin(point):
        return None
    c = point.config
    packed = point.layout == "any"
    merge = local(len(OP.locals))
    tile = (c.block_m, c.block_n)
    groups = ceil_div(G, merge)
    args = problem_args(point, not point.grouped)
    if not (packed or point.grouped):
        args["sizes"] = args["sizes"]._replace(channels=Int(C, divisible=True))
    compiled_for = Tile(c.block_m, c.block_n, c.block_k, packed, point.grouped, not packed, point.precision)
    args |= dict(
        merge=Int(merge),
        GROUP_M=Const(8),
        TILE=Const(compiled_for),
        DEPENDENT=Const(point.grouped and point.arch >= 90),
    )
    launch = Launch(
        conv_pointer, args, (tiles_of(M, merge * N, tile), groups, 1), num_warps=c.num_warps, num_stages=c.num_stages
    )
    depth = ceil_div(K * merge, c.block_k) * c.block_k if packed else TAPS * ceil_div(C * merge, c.block_k) * c.block_k
    tiles = tiles_of(OP.local("M_choice"), merge * N, tile) * groups
    # The weight of several groups is read by single elements, of which a mask says whether they are on the diagonal.
    percent = (2 if packed else 6) if point.grouped else (15 if packed else 60)
    if c.fma:  # which is as slow as the loads of single elements are
        percent = min(5 * percent, 60)
    cost = predict(point, OP, tiles, depth, occupancy=c.occupancy, percent=percent)
    launches: tuple[Launch, ...] = (launch,)
    if point.grouped:
        launches += (contained_launch(point, merge, when=merge > 1),)
        cost += select(merge > 1, contained_cost(point, merge), 0)
    return Plan(
        constraints=constraints(point),
        serves=serves(point),
        launches=launches,
        locals=(_merged(point),),
        cost=cost,
        general=packed,
    )


# --- The grid ---


def tile(block_m: int, block_n: int, block_k: int, num_stages: int, num_warps: int, occupancy: int = 1,
         fma: bool = False, general: bool = False, grouped: bool = False) -> Config:  # fmt: skip
    """occupancy: programs that a multiprocessor holds at once. fma: for fp32 without tensor cores. general: for any
    layout: loads of single elements go through registers, so the tile is small. grouped: for groups, too."""
    flags = dict(occupancy=occupancy, fma=fma, general=general, grouped=grouped)
    return shape(block_m, block_n, block_k, num_stages, num_warps, "_fma" if fma else "", **flags)


CONFIGS = (
    tile(64, 64, 32, 2, 4, 2, general=True),
    tile(128, 64, 32, 2, 8, 2, general=True),
    tile(128, 32, 32, 4, 4, 2, grouped=True),
    tile(64, 64, 32, 4, 4, 2),
    tile(128, 64, 32, 4, 4, 2),
    tile(128, 128, 32, 4, 8),
    tile(64, 32, 16, 2, 4, 4, fma=True, general=True),
    tile(64, 32, 16, 3, 4, 4, fma=True, grouped=True),
    tile(128, 64, 16, 3, 8, 1, fma=True),
)
AXES = {
    "dtype": DTYPE_AXIS,
    "precision": PRECISION_AXIS,
    "layout": ("channels_last", "mixed", "any"),
    "grouped": (False, True),
}

KERNELS = (Kernel("conv_pointer", OP, AXES, dict.fromkeys(ARCHS, CONFIGS), _plan),)
