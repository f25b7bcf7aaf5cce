"""The weight's gradient in plain Triton. Rows are output channels, columns input channels — of one tap, or packed: of
all taps in turn, for few channels —, and the sum runs over the pixels of the result. Several small groups are one
product, of which only the blocks on the diagonal are kept."""

import triton
import triton.language as tl

from tk.aot.expr import Expr, ceil_div, device, local, maximum, minimum
from tk.aot.spec import (
    ITEMSIZE,
    Arg,
    Config,
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
from tk.kernels.conv.cost import predict, step_ns
from tk.kernels.conv.geometry import inside, pixel, place, tap_of
from tk.kernels.conv.op import (
    DTYPE_AXIS,
    GEOMETRY,
    PRECISION_AXIS,
    SPATIAL,
    fits_32_bits,
    has_pieces,
    makes_sense,
    serves,
)
from tk.kernels.conv.pointer import ARCHS, dot, first_channel
from tk.kernels.conv_weight_grad.op import GRAD, OP, OUT, X
from tk.kernels.conv_weight_grad.reduce import (
    FREE_LOCAL,
    PARTIALS,
    SHARE,
    SPLITS,
    reduce_launch,
    split_locals,
)

# --- The device function ---


@triton.jit
def weight_grad_pointer(grad, x, partials, M, G, OC, C, D, H, W, taps, KH, KW, PD, PH, PW, merge, per_split,
                        stride_d, stride_h, stride_w, padding_d, padding_h, padding_w,
                        dilation_d, dilation_h, dilation_w,
                        grad_n, grad_g, grad_o, grad_d, grad_h, grad_w, x_n, x_g, x_c, x_d, x_h, x_w,
                        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                        PACKED: tl.constexpr, GROUPED: tl.constexpr, JOINED: tl.constexpr,
                        PRECISION: tl.constexpr):  # fmt: skip
    """Program (tile, groups, split) leaves its sum in partials [splits, G, O, taps, C], fp32. Tiles: of rows, within
    them of columns. JOINED: the channels of neighbouring groups lie beside each other."""
    first = tl.program_id(1) * merge
    groups = min(merge, G - first)
    channels = groups * C
    if JOINED:
        channels = tl.multiple_of(channels, 8)
    columns = merge * C * taps if PACKED else merge * C
    n_tiles = tl.cdiv(columns, BLOCK_N) if PACKED else tl.cdiv(columns, BLOCK_N) * taps
    tile = tl.program_id(0)
    m = tile // n_tiles
    n = tile - m * n_tiles
    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    if PACKED:
        at_column = n * BLOCK_N + tl.arange(0, BLOCK_N)
        tap = at_column // channels
        col = at_column - tap * channels
        col_exists = tap < taps
    else:
        tap = n % taps
        col = n // taps * BLOCK_N + tl.arange(0, BLOCK_N)
        col_exists = col < channels
    kd, kh, kw = tap_of(tap, KH, KW)
    row = tl.minimum(rows, groups * OC - 1)
    row_group = row * 0
    row_channel = row
    col_channel = col
    grad_at = grad + row.to(tl.int64) * grad_o
    x_at = x + col.to(tl.int64) * x_c
    if GROUPED:
        row_group = row // OC
        col_group = col // C
        row_channel = row - row_group * OC
        col_channel = col - col_group * C
        if not JOINED:
            grad_at = grad + row_group.to(tl.int64) * grad_g + row_channel.to(tl.int64) * grad_o
            x_at = x + col_group.to(tl.int64) * x_g + col_channel.to(tl.int64) * x_c
        # Only here: no product with a group's stride, which is no multiple of anything, where there is one group.
        grad_at += first_channel(first, grad_g, JOINED)
        x_at += first_channel(first, x_g, JOINED)
    d_tap = kd * dilation_d - padding_d
    h_tap = kh * dilation_h - padding_h
    w_tap = kw * dilation_w - padding_w
    if PACKED:
        x_at += place(d_tap, h_tap, w_tap, x_d, x_h, x_w)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    split = tl.program_id(2)
    begin = split * per_split
    end = begin + min(per_split, M - begin)
    for k in range(begin, end, BLOCK_K):
        pixels = k + tl.arange(0, BLOCK_K)
        pixel_exists = pixels < end
        image, pd, ph, pw = pixel(pixels, PD, PH, PW)
        d0 = pd * stride_d
        h0 = ph * stride_h
        w0 = pw * stride_w
        from_grad = image.to(tl.int64) * grad_n + place(pd, ph, pw, grad_d, grad_h, grad_w)
        if PACKED:
            there = inside(d0[:, None] + d_tap[None, :], h0[:, None] + h_tap[None, :], w0[:, None] + w_tap[None, :],
                           D, H, W)  # fmt: skip
            there = there & pixel_exists[:, None]
            from_x = image.to(tl.int64) * x_n + place(d0, h0, w0, x_d, x_h, x_w)
        else:
            there = (pixel_exists & inside(d0 + d_tap, h0 + h_tap, w0 + w_tap, D, H, W))[:, None]
            from_x = image.to(tl.int64) * x_n + place(d0 + d_tap, h0 + h_tap, w0 + w_tap, x_d, x_h, x_w)
        a = tl.load(grad_at[None, :] + from_grad[:, None], mask=pixel_exists[:, None], other=0.0)
        b = tl.load(x_at[None, :] + from_x[:, None], mask=there & col_exists[None, :], other=0.0)
        acc = dot(a.trans(), b, acc, PRECISION)

    group = (first + row_group).to(tl.int64)
    line = (split.to(tl.int64) * G + group) * OC + row_channel
    at = partials + (line * taps * C)[:, None] + (tap * C + col_channel)[None, :]
    keep = (rows < groups * OC)[:, None] & col_exists[None, :]
    if GROUPED:
        keep = keep & (row_group[:, None] == col_group[None, :])
    tl.store(at, acc, mask=keep)


# --- Plans ---

M, N = OP.local("M"), OP.local("N")
G, C, TAPS = OP.local("groups"), OUT.size(2), OP.local("taps")
_MERGE = local(FREE_LOCAL)


def strides(point: Point) -> dict[str, Arg]:
    """Of grad and x. One that is 1 by the point's layout is a constant."""
    last = point.layout == "channels_last"
    found: dict[str, Arg] = {}
    for name, tensor, unit in (("grad", GRAD, "o"), ("x", X, "c")):
        for i, d in enumerate(("n", "g", unit, *SPATIAL)):
            wide = last and d != "g"
            found[f"{name}_{d}"] = Const(1) if last and d == unit else Int(tensor.stride(i), "i64", divisible=wide)
    return found


def problem_args(point: Point) -> dict[str, Arg]:
    """All that says which convolution it is, and how it is split."""
    last = point.layout == "channels_last"
    return dict(
        grad=Pointer(GRAD, point.dtype, last),
        x=Pointer(X, point.dtype, last),
        partials=Scratch(0, "fp32"),
        M=Int(M),
        G=Int(G),
        OC=Int(N),
        **{name: Int(X.size(3 + i)) for i, name in enumerate(("D", "H", "W"))},
        taps=Int(TAPS),
        KH=Int(OUT.size(4)),
        KW=Int(OUT.size(5)),
        **{name: Int(GRAD.size(3 + i)) for i, name in enumerate(("PD", "PH", "PW"))},
        per_split=Int(SHARE),
        **{name: Int(OP.int(name)) for name in GEOMETRY},
        **strides(point),
    )


def layout_constraints(point: Point) -> tuple[Constraint, ...]:
    found: tuple[Constraint, ...] = (fits_32_bits(OP, X),)
    if point.layout == "any":
        return found
    for t in (GRAD, X):
        found += (
            require(has_pieces(t, 2, 16), f"{t.name} on a 16-byte boundary, its channels contiguous and 16 to a pixel"),
        )
    return found


def merged_groups(point: Point) -> Expr:
    """Of a program: as many as fit its tile, one at least."""
    c = point.config
    return minimum(maximum(minimum(c.block_m // maximum(N, 1), c.block_n // maximum(C, 1)), 1), G)


def _constraints(point: Point) -> tuple[Constraint, ...]:
    found = layout_constraints(point)
    if not point.grouped:
        found += (require(G == 1, "1 group"),)
    elif point.layout == "channels_last":
        merge = merged_groups(point)
        joined = (X.stride(1) == C) & (GRAD.stride(1) == N) & (merge * C % 8 == 0) & (merge * N % 8 == 0)
        found += (require(joined, "groups side by side, a multiple of 8 channels in each program"),)
    return found


_SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that a program may use


def _plan(point: Point) -> Plan | None:
    c = point.config
    fma = point.dtype == "fp32" and point.precision == "ieee"
    shared = c.num_stages * (c.block_m + c.block_n) * c.block_k * ITEMSIZE[point.dtype]
    if not makes_sense(point) or c.fma != fma or shared > _SHARED[point.arch]:
        return None
    packed = point.layout == "any"
    if packed != c.general or (point.grouped and not (c.grouped or packed)):
        return None
    if point.arch == 90 and point.dtype != "fp32" and not (packed or c.grouped):
        return None  # the TMA kernel's, but for what it cannot reach
    width = _MERGE * C * TAPS if packed else _MERGE * C
    tiles = ceil_div(_MERGE * N, c.block_m) * ceil_div(width, c.block_n) * (1 if packed else TAPS)
    merge = merged_groups(point)
    groups = ceil_div(G, _MERGE)
    percent = 15 if packed else 50
    step = c.occupancy * step_ns(point, (c.block_m, c.block_n), c.block_k, percent)
    per_tile = (ceil_div(N, c.block_m) * ceil_div(C * TAPS if packed else C, c.block_n)) * (1 if packed else TAPS)
    args = problem_args(point) | dict(
        C=Int(C),
        merge=Int(_MERGE),
        BLOCK_M=Const(c.block_m),
        BLOCK_N=Const(c.block_n),
        BLOCK_K=Const(c.block_k),
        PACKED=Const(packed),
        GROUPED=Const(point.grouped),
        JOINED=Const(not packed),
        PRECISION=Const(point.precision),
    )
    launch = Launch(weight_grad_pointer, args, (tiles, groups, SPLITS), num_warps=c.num_warps, num_stages=c.num_stages)
    programs = tiles * groups * SPLITS
    waves = ceil_div(programs, device.sm_count * c.occupancy) * c.occupancy
    again = 8 * SPLITS * OP.local("groups") * N * OP.local("K")  # the partial sums are written and read
    return Plan(
        constraints=_constraints(point),
        serves=serves(point),
        launches=(launch, reduce_launch(point.dtype)),
        locals=(*split_locals(per_tile * ceil_div(G, merge), c.occupancy, c.block_k, 8, step), merge),
        buffers=(PARTIALS,),
        cost=predict(
            point, OP, (c.block_m, c.block_n), programs, waves, SHARE,
            percent=percent, extra_bytes=again, launches=2,
        ),
        general=packed,
    )  # fmt: skip


# --- The grid ---


def _tile(block_m: int, block_n: int, block_k: int, num_stages: int, num_warps: int, occupancy: int = 1,
          fma: bool = False, general: bool = False, grouped: bool = False) -> Config:  # fmt: skip
    """As kernels/conv/pointer.py has them."""
    shape = dict(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=num_stages, num_warps=num_warps)
    return Config(
        f"{block_m}x{block_n}x{block_k}_s{num_stages}_w{num_warps}{'_fma' if fma else ''}",
        shape | dict(occupancy=occupancy, fma=fma, general=general, grouped=grouped),
    )


_CONFIGS = (
    _tile(32, 64, 32, 2, 4, 2, general=True),
    _tile(32, 32, 32, 4, 4, 2, grouped=True),
    _tile(64, 64, 32, 4, 4, 2),
    _tile(128, 128, 32, 4, 8),
    _tile(32, 32, 16, 2, 4, 4, fma=True, general=True),
    _tile(32, 32, 16, 3, 4, 4, fma=True, grouped=True),
    _tile(64, 64, 16, 3, 4, 2, fma=True),
)
_AXES = {
    "dtype": DTYPE_AXIS,
    "precision": PRECISION_AXIS,
    "layout": ("channels_last", "any"),
    "grouped": (False, True),
}

KERNELS = (Kernel("weight_grad_pointer", OP, _AXES, dict.fromkeys(ARCHS, _CONFIGS), _plan),)
