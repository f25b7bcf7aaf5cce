"""Convolutions in plain Triton, for every GPU, layout and number of groups.

Rows are output pixels, columns output channels, and the sum runs over taps and input channels. Taps are looped over, a
block of K has channels of one tap, and a row of x is there or not as a whole; or they are packed, and a block of K runs
across taps, for few channels. Where groups are small, a program has several of them as one product, whose weight is a
block diagonal: tensor cores have nothing smaller than 16 x 8 x 16. What is NaN then is worked out again, by a launch of
its own (contained.py): within this kernel, that would leave the sum no registers.
"""

from dataclasses import replace

import triton
import triton.language as tl

from tk.aot.expr import Expr, ceil_div, device, local, maximum, minimum, select
from tk.aot.spec import ITEMSIZE, Arg, Config, Const, Constraint, Int, Kernel, Launch, Plan, Point, Pointer, require
from tk.kernels.conv.contained import conv_contained
from tk.kernels.conv.cost import predict, tiles_of
from tk.kernels.conv.geometry import inside, pixel, place, tap_of
from tk.kernels.conv.op import (
    BIAS,
    DTYPE_AXIS,
    GEOMETRY,
    OP,
    OUT,
    PRECISION_AXIS,
    SPATIAL,
    WEIGHT,
    X,
    fits_32_bits,
    makes_sense,
    serves,
)
from tk.kernels.epilogue import activate
from tk.kernels.gemm.pointer import _round_to_tf32, tile_coordinates

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
def finish_pixels(acc, bias, out, pixels, exists, cols, col_exists, bias_at, activation, has_bias):
    """Store activation(acc + bias): `pixels` and `cols` are offsets of the rows and columns in out."""
    if has_bias != 0:
        acc += tl.load(bias + bias_at, mask=col_exists, other=0.0).to(tl.float32)[None, :]
    acc = activate(acc, activation)
    at = out + pixels[:, None] + cols[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=exists[:, None] & col_exists[None, :])


@triton.jit
def conv_pointer(x, weight, bias, out, M, G, OC, C, D, H, W, taps, KH, KW, PD, PH, PW, merge,
                 stride_d, stride_h, stride_w, padding_d, padding_h, padding_w, dilation_d, dilation_h, dilation_w,
                 x_n, x_g, x_c, x_d, x_h, x_w, weight_g, weight_o, weight_c, weight_d, weight_h, weight_w,
                 out_n, out_g, out_o, out_d, out_h, out_w, bias_g, bias_o, activation, has_bias,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
                 PACKED: tl.constexpr, GROUPED: tl.constexpr, JOINED: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """One program: a tile of out, of `merge` groups. JOINED: the channels of neighbouring groups of x lie beside each
    other."""
    first = tl.program_id(1) * merge  # group
    groups = min(merge, G - first)
    channels = groups * C
    if JOINED:
        channels = tl.multiple_of(channels, 8)
    m, n = tile_coordinates(tl.program_id(0), M, merge * OC, BLOCK_M, BLOCK_N, GROUP_M)
    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = n * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = rows < M
    image, pd, ph, pw = pixel(tl.minimum(rows, M - 1), PD, PH, PW)
    d0 = pd * stride_d - padding_d
    h0 = ph * stride_h - padding_h
    w0 = pw * stride_w - padding_w
    # Columns past the last read the last one; what that gives is not stored.
    col = tl.minimum(cols, groups * OC - 1)
    x_at = x + image.to(tl.int64) * x_n + place(d0, h0, w0, x_d, x_h, x_w)
    if GROUPED:
        col_group = col // OC
        col_channel = (col - col_group * OC).to(tl.int64)
        of_col = (first + col_group).to(tl.int64)
        x_at += first_channel(first, x_g, JOINED)
        weight_at = weight + of_col * weight_g + col_channel * weight_o
        out_at = of_col * out_g + col_channel * out_o
        bias_at = of_col * bias_g + col_channel * bias_o
    else:  # no product with a group's stride, which is no multiple of anything
        weight_at = weight + col.to(tl.int64) * weight_o
        out_at = cols.to(tl.int64) * out_o
        bias_at = col.to(tl.int64) * bias_o
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)

    blocks = tl.cdiv(taps * channels if PACKED else channels, BLOCK_K)
    steps = blocks if PACKED else taps * blocks
    for step in range(steps):
        if PACKED:
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            tap = k // channels
            c = k - tap * channels
            kd, kh, kw = tap_of(tap, KH, KW)
            k_exists = tap < taps
        else:
            tap = step // blocks
            c = (step - tap * blocks) * BLOCK_K + tl.arange(0, BLOCK_K)
            kd, kh, kw = tap_of(tap, KH, KW)
            k_exists = c < channels
        c_channel = c
        c_at = c.to(tl.int64) * x_c
        if GROUPED:
            c_group = c // C
            c_channel = c - c_group * C
            if not JOINED:
                c_at = c_group.to(tl.int64) * x_g + c_channel.to(tl.int64) * x_c
        shift = place(kd * dilation_d, kh * dilation_h, kw * dilation_w, x_d, x_h, x_w)
        in_weight = place(kd, kh, kw, weight_d, weight_h, weight_w) + c_channel.to(tl.int64) * weight_c
        if PACKED:
            there = inside(d0[:, None] + (kd * dilation_d)[None, :], h0[:, None] + (kh * dilation_h)[None, :],
                           w0[:, None] + (kw * dilation_w)[None, :], D, H, W)  # fmt: skip
            at = x_at[:, None] + (shift + c_at)[None, :]
        else:
            there = inside(d0 + kd * dilation_d, h0 + kh * dilation_h, w0 + kw * dilation_w, D, H, W)[:, None]
            at = (x_at + shift)[:, None] + c_at[None, :]
        a = tl.load(at, mask=there & k_exists[None, :], other=0.0)
        of_weight = k_exists[:, None]
        if GROUPED:
            of_weight = of_weight & (c_group[:, None] == col_group[None, :])
        b = tl.load(weight_at[None, :] + in_weight[:, None], mask=of_weight, other=0.0)
        acc = dot(a, b, acc, PRECISION)

    pixels = image.to(tl.int64) * out_n + place(pd, ph, pw, out_d, out_h, out_w)
    finish_pixels(acc, bias, out, pixels, exists, out_at, cols < groups * OC, bias_at, activation, has_bias)


# --- Plans ---

M, N, K = OP.local("M"), OP.local("N"), OP.local("K")
G, C, TAPS = OP.local("groups"), WEIGHT.size(2), OP.local("taps")


def _has_wide_channels(point: Point) -> bool:
    return point.layout in ("channels_last", "mixed")


def strides(point: Point, wide_weight: bool) -> dict[str, Arg]:
    """Of all tensors. One that is 1 by the point's layout is a constant. wide_weight: the weight's are multiples of 16,
    which a group's few channels need not be."""
    names = {
        "x": (X, ("n", "g", "c", *SPATIAL)),
        "weight": (WEIGHT, ("g", "o", "c", *SPATIAL)),
        "out": (OUT, ("n", "g", "o", *SPATIAL)),
    }
    ones = {
        "channels_last": ("x_c", "weight_c", "out_o"),
        "mixed": ("x_c", "weight_c", "out_w"),
    }.get(point.layout, ())
    aligned = _has_wide_channels(point)
    found: dict[str, Arg] = {}
    for name, (tensor, dims) in names.items():
        for i, d in enumerate(dims):
            key = f"{name}_{d}"
            wide = aligned and d != "g" and (name != "out" or point.layout == "channels_last")
            wide = wide and (name != "weight" or wide_weight)
            found[key] = Const(1) if key in ones else Int(tensor.stride(i), "i64", divisible=wide)
    return found


def problem_args(point: Point, wide_weight: bool) -> dict[str, Arg]:
    """All that says which convolution it is."""
    return dict(
        x=Pointer(X, point.dtype, _has_wide_channels(point)),
        weight=Pointer(WEIGHT, point.dtype, _has_wide_channels(point) and wide_weight),
        bias=Pointer(BIAS, point.dtype, aligned=False),
        out=Pointer(OUT, point.dtype, point.layout == "channels_last"),
        M=Int(M),
        G=Int(G),
        OC=Int(N),
        **{name: Int(X.size(3 + i)) for i, name in enumerate(("D", "H", "W"))},
        taps=Int(TAPS),
        KH=Int(WEIGHT.size(4)),
        KW=Int(WEIGHT.size(5)),
        **{name: Int(OUT.size(3 + i)) for i, name in enumerate(("PD", "PH", "PW"))},
        **{name: Int(OP.int(name)) for name in GEOMETRY},
        **strides(point, wide_weight),
        bias_g=Int(BIAS.stride(0), "i64"),
        bias_o=Int(BIAS.stride(1), "i64"),
        activation=Int(OP.int("activation")),
        has_bias=Int(BIAS.present),
    )


_CONTAINED_BLOCK = (64, 32)  # elements in the direction in which they lie beside each other in out, and in the other


def contained_launch(point: Point, when: Expr | int = 1) -> Launch:
    """Works out again what is NaN in the result of groups that were multiplied as one. The point's layout says whether
    out has wide channels on 16-byte boundaries: channels_last."""
    last = point.layout == "channels_last"
    along, across = _CONTAINED_BLOCK
    block_p, block_c = (across, along) if last else (along, across)
    args = problem_args(replace(point, axes={**point.axes, "layout": "any"}), wide_weight=False)
    if last:
        args |= dict(out=Pointer(OUT, point.dtype), out_o=Const(1), out_g=Int(OUT.stride(1), "i64"))
        for i, d in ((0, "n"), (3, "d"), (4, "h"), (5, "w")):
            args[f"out_{d}"] = Int(OUT.stride(i), "i64", divisible=True)
    args |= dict(C=Int(C), BLOCK_P=Const(block_p), BLOCK_C=Const(block_c), LAST=Const(last))
    grid = (ceil_div(M, block_p), ceil_div(G * N, block_c), 1)
    return Launch(conv_contained, args, grid, num_warps=4, num_stages=1, when=when)


def contained_cost(point: Point) -> Expr:
    """Of contained_launch, picoseconds: out is read once, and hardly ever is there more to do."""
    return 3_000_000 + M * G * N * OP.local("itemsize") // (4 if point.layout == "channels_last" else 3)


def merged_groups(point: Point) -> Expr:
    """Of a program: as many as fit its tile, one at least."""
    c = point.config
    return minimum(maximum(minimum(c.block_n // maximum(N, 1), c.block_k // maximum(C, 1)), 1), G)


def constraints(point: Point) -> tuple[Constraint, ...]:
    found: tuple[Constraint, ...] = (fits_32_bits(OP, X),)
    if not point.grouped:
        found += (require(G == 1, "1 group"),)
    if point.layout == "any":
        return found
    c = G * C  # of all groups, which lie beside each other
    wide = [(X, 2, (0, 3, 4, 5)), (WEIGHT, 2, (1, 3, 4, 5))]
    if point.layout == "channels_last":
        wide.append((OUT, 2, (0, 3, 4, 5)))
    else:
        found += (require(OUT.stride(5) == 1, "out contiguous along its last dimension"),)
    for t, unit, others in wide:
        holds = (t.alignment >= 16) & (t.stride(unit) == 1)
        if t is not WEIGHT or not point.grouped:
            for d in others:
                holds = holds & (t.stride(d) % 16 == 0)
        found += (require(holds, f"{t.name} on a 16-byte boundary, its channels contiguous and 16 to a pixel"),)
    if point.grouped:
        joined = (X.stride(1) == C) & ((point.layout != "channels_last") | (OUT.stride(1) == N))
        joined = joined & (c % 16 == 0) & (merged_groups(point) * C % 8 == 0)
        return (*found, require(joined, "groups side by side, a multiple of 8 channels in each program, of 16 in all"))
    return (*found, require(C % 16 == 0, "a multiple of 16 channels"))


_SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that a program may use


def _worth_a_cubin(point: Point) -> bool:
    c = point.config
    fma = point.dtype == "fp32" and point.precision == "ieee"
    shared = c.num_stages * (c.block_m + c.block_n) * c.block_k * ITEMSIZE[point.dtype]
    if not makes_sense(point) or c.fma != fma or shared > _SHARED[point.arch]:
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
    args = problem_args(point, not point.grouped) | dict(
        C=Int(C, divisible=not (packed or point.grouped)),
        merge=Int(merge),
        BLOCK_M=Const(c.block_m),
        BLOCK_N=Const(c.block_n),
        BLOCK_K=Const(c.block_k),
        GROUP_M=Const(8),
        PACKED=Const(packed),
        GROUPED=Const(point.grouped),
        JOINED=Const(not packed),
        PRECISION=Const(point.precision),
    )
    launch = Launch(
        conv_pointer, args, (tiles_of(M, merge * N, tile), groups, 1), num_warps=c.num_warps, num_stages=c.num_stages
    )
    depth = ceil_div(K * merge, c.block_k) * c.block_k if packed else TAPS * ceil_div(C * merge, c.block_k) * c.block_k
    tiles = tiles_of(OP.local("M_choice"), merge * N, tile) * groups
    waves = ceil_div(tiles, device.sm_count * c.occupancy)
    # The weight of several groups is read by single elements, of which a mask says whether they are on the diagonal.
    percent = (2 if packed else 6) if point.grouped else (15 if packed else 60)
    cost = predict(point, OP, tile, tiles, waves * c.occupancy, depth, percent=percent)
    launches: tuple[Launch, ...] = (launch,)
    if point.grouped:
        launches += (contained_launch(point, when=merge > 1),)
        cost += select(merge > 1, contained_cost(point), 0)
    return Plan(
        constraints=constraints(point),
        serves=serves(point),
        launches=launches,
        locals=(merged_groups(point),),
        cost=cost,
        general=packed,
    )


# --- The grid ---


def _tile(block_m: int, block_n: int, block_k: int, num_stages: int, num_warps: int, occupancy: int = 1,
          fma: bool = False, general: bool = False, grouped: bool = False) -> Config:  # fmt: skip
    """occupancy: programs that a multiprocessor holds at once. fma: for fp32 without tensor cores. general: for any
    layout: loads of single elements go through registers, so the tile is small. grouped: for groups, too."""
    shape = dict(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=num_stages, num_warps=num_warps)
    return Config(
        f"{block_m}x{block_n}x{block_k}_s{num_stages}_w{num_warps}{'_fma' if fma else ''}",
        shape | dict(occupancy=occupancy, fma=fma, general=general, grouped=grouped),
    )


CONFIGS = (
    _tile(64, 64, 32, 2, 4, 2, general=True),
    _tile(128, 64, 32, 2, 8, 2, general=True),
    _tile(128, 32, 32, 4, 4, 2, grouped=True),
    _tile(64, 64, 32, 4, 4, 2),
    _tile(128, 64, 32, 4, 4, 2),
    _tile(128, 128, 32, 4, 8),
    _tile(64, 32, 16, 2, 4, 4, fma=True, general=True),
    _tile(64, 32, 16, 3, 4, 4, fma=True, grouped=True),
    _tile(128, 64, 16, 3, 8, 1, fma=True),
)
AXES = {
    "dtype": DTYPE_AXIS,
    "precision": PRECISION_AXIS,
    "layout": ("channels_last", "mixed", "any"),
    "grouped": (False, True),
}
ARCHS = (80, 90, 100)

KERNELS = (Kernel("conv_pointer", OP, AXES, dict.fromkeys(ARCHS, CONFIGS), _plan),)
