"""Groups of one channel, 3, 5 or 7 taps along one dimension: a thread keeps some neighbouring outputs along it, so that
an element is loaded and converted once for all of them and all of these taps.

What is left is about one multiplication and addition for each tap, which is what the plain cores do best.
Channels-last, threads have channels, and outputs lie along w; contiguous, threads have pixels of a line, and outputs
lie along h.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tk.aot.expr import Expr, ceil_div, maximum, select
from tk.aot.spec import (
    Arg,
    Buffer,
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
from tk.kernels.conv.cost import plain_cores, waiting_ns
from tk.kernels.conv.depthwise import (
    CHANNELS_LAST,
    in_pieces,
    piece_of,
    pitches_in_pieces,
    whole_pixels,
    without_divisors,
)
from tk.kernels.conv.geometry import place, tap_of
from tk.kernels.conv.op import DTYPE_AXIS, OP, OUT, WEIGHT, X, fits_32_bits, serves
from tk.kernels.conv.pointer import ARCHS, finish_pixels, problem_args
from tk.kernels.epilogue import activate

# --- The device functions ---


@triton.jit
def with_product(acc, x, weight, J: tl.constexpr):
    """acc, with x times weight on top of its J-th."""
    return acc[:J] + (acc[J] + x * weight,) + acc[J + 1 :]


@triton.jit
def add_taps(acc, x, weights, AT: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr, OUTPUTS: tl.constexpr):
    """Element AT of those that the outputs read, times the taps by which they read it. acc: a tuple of the outputs;
    weights: of the taps."""
    for tap in tl.static_range(TAPS):
        if AT >= tap and (AT - tap) % STRIDE == 0 and (AT - tap) // STRIDE < OUTPUTS:
            acc = with_product(acc, x, weights[tap], (AT - tap) // STRIDE)
    return acc


@triton.jit
def zeros_of(COUNT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A tuple."""
    found = (tl.zeros((ROWS, COLS), dtype=tl.float32),)
    for _ in tl.static_range(1, COUNT):
        found = found + (tl.zeros((ROWS, COLS), dtype=tl.float32),)
    return found


@triton.jit
def depthwise_weight(weight, copy, channels, taps, KH, KW, is_flipped, weight_g, weight_d, weight_h, weight_w,
                     BLOCK_C: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """copy [taps, channels], fp32, of weight; is_flipped: taps along w the other way round. Program: channels, tap.
    DEPENDENT: what reads the copy may begin beside it."""
    if DEPENDENT:
        gdc_launch_dependents()
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    tap = tl.program_id(1)
    kd, kh, kw = tap_of(tap, KH, KW)
    if is_flipped != 0:
        kw = KW - 1 - kw
    exists = cols < channels
    found = tl.load(weight + cols.to(tl.int64) * weight_g + place(kd, kh, kw, weight_d, weight_h, weight_w), exists)
    tl.store(copy + tap.to(tl.int64) * channels + cols, found.to(tl.float32), exists)


@triton.jit
def line_of_taps(line, KH, d0, h0, D, H, x_d, x_h, dilation_d, dilation_h):
    """Where x has it, from the first of all taps, and whether it is inside of the image, of each row."""
    kd = line // KH
    d = kd * dilation_d
    h = (line - kd * KH) * dilation_h
    there = (d0 + d >= 0) & (d0 + d < D) & (h0 + h >= 0) & (h0 + h < H)
    return d.to(tl.int64) * x_d + h.to(tl.int64) * x_h, there


@triton.jit
def pixels_of_line(at, x_w, w0, W, there, col_exists, COUNT: tl.constexpr):
    """A tuple of neighbouring ones, as they lie in memory."""
    found = ()
    for i in tl.static_range(COUNT):
        mask = (there & (w0 + i >= 0) & (w0 + i < W))[:, None] & col_exists[None, :]
        found = found + (tl.load(at, mask=mask, other=0.0),)
        at += x_w
    return found


@triton.jit
def weights_of_line(at, channels, exists, TAPS: tl.constexpr):
    """A tuple."""
    found = ()
    for _ in tl.static_range(TAPS):
        found = found + (tl.load(at, mask=exists, other=0.0),)
        at += channels
    return found


@triton.jit
def depthwise_along_w(x, weight, bias, out, rows, channels, D, H, W, KD, KH, PD, PH, PW, stride_d, stride_h,
                      padding_d, padding_h, padding_w, dilation_d, dilation_h, x_n, x_d, x_h, x_w,
                      out_n, out_d, out_h, out_w, bias_g, activation, has_bias,
                      BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, OUTPUTS: tl.constexpr, TAPS: tl.constexpr,
                      STRIDE: tl.constexpr, PIECE: tl.constexpr, AHEAD: tl.constexpr,
                      DEPENDENT: tl.constexpr):  # fmt: skip
    """Channels-last: BLOCK_R lines of the result, OUTPUTS pixels of each, BLOCK_C channels. weight [taps, channels].
    PIECE: what channels and pitches are multiples of. AHEAD: a line of taps is loaded while the one before it is
    multiplied. DEPENDENT: the kernel ahead, which writes the weight, may still run."""
    channels = in_pieces(channels, PIECE)
    x_n, x_d, x_h, x_w = pitches_in_pieces(x_n, x_d, x_h, x_w, PIECE)
    blocks = tl.cdiv(PW, OUTPUTS)
    first = tl.program_id(0) % blocks * OUTPUTS
    row = tl.program_id(0) // blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    exists = row < rows
    col_exists = cols < channels
    plane = row // PH
    ph = row - plane * PH
    image = plane // PD
    pd = plane - image * PD
    d0 = pd * stride_d - padding_d
    h0 = ph * stride_h - padding_h
    # One number for all rows: blocks of it, since Triton's interpreter makes integers of a mask and a single truth.
    first_of_row = first + row * 0
    w0 = first_of_row * STRIDE - padding_w
    x_at = x + (image.to(tl.int64) * x_n + place(d0, h0, w0, x_d, x_h, x_w))[:, None] + cols[None, :]
    # As many addresses as x has, in its layout: that costs loads that meet in L1, a change of layout costs a barrier.
    weight_at = weight + (row * 0)[:, None] + cols[None, :]
    acc = zeros_of(OUTPUTS, BLOCK_R, BLOCK_C)
    COUNT: tl.constexpr = (OUTPUTS - 1) * STRIDE + TAPS
    if AHEAD:
        at, there = line_of_taps(0, KH, d0, h0, D, H, x_d, x_h, dilation_d, dilation_h)
        pixels = pixels_of_line(x_at + at, x_w, w0, W, exists & there, col_exists, COUNT)
        if DEPENDENT:
            gdc_wait()
        weights = weights_of_line(weight_at, channels, col_exists[None, :], TAPS)
        for line in range(1, KD * KH + 1):
            is_line = cols * 0 + line < KD * KH  # a block, as above
            at, there = line_of_taps(line, KH, d0, h0, D, H, x_d, x_h, dilation_d, dilation_h)
            weight_at += channels * TAPS
            of_next = col_exists & is_line
            next_pixels = pixels_of_line(x_at + at, x_w, w0, W, exists & there, of_next, COUNT)
            next_weights = weights_of_line(weight_at, channels, of_next[None, :], TAPS)
            for i in tl.static_range(COUNT):
                acc = add_taps(acc, pixels[i].to(tl.float32), weights, i, TAPS, STRIDE, OUTPUTS)
            pixels = next_pixels
            weights = next_weights
    else:
        if DEPENDENT:
            gdc_wait()
        for line in range(KD * KH):
            at, there = line_of_taps(line, KH, d0, h0, D, H, x_d, x_h, dilation_d, dilation_h)
            weights = weights_of_line(weight_at, channels, col_exists[None, :], TAPS)
            weight_at += channels * TAPS
            line_at = x_at + at
            for i in tl.static_range(COUNT):
                mask = (exists & there & (w0 + i >= 0) & (w0 + i < W))[:, None] & col_exists[None, :]
                a = tl.load(line_at, mask=mask, other=0.0).to(tl.float32)
                line_at += x_w
                acc = add_taps(acc, a, weights, i, TAPS, STRIDE, OUTPUTS)
    # Not earlier: they would take registers from the sums.
    out_n, out_d, out_h, out_w = pitches_in_pieces(out_n, out_d, out_h, out_w, PIECE)
    at = image.to(tl.int64) * out_n + place(pd, ph, first, out_d, out_h, out_w)
    # A loop at run time, as in kernels/hopper/epilogue.py: unrolled, the activations are more than the instruction
    # cache holds.
    for j in range(OUTPUTS):
        finish_pixels(acc[0], bias, out, at, exists & (first_of_row + j < PW), cols.to(tl.int64), col_exists,
                      cols.to(tl.int64) * bias_g, activation, has_bias)  # fmt: skip
        at += out_w
        acc = acc[1:] + acc[:1]


@triton.jit
def depthwise_along_h(x, weight, bias, out, rows, channels, OC, D, H, W, KD, KW, PD, PH, PW, stride_d, stride_w,
                      padding_d, padding_h, padding_w, dilation_d, dilation_w, is_flipped, x_n, x_g, x_d, x_h, x_w,
                      weight_g, weight_o, weight_d, weight_h, weight_w, out_n, out_g, out_o, out_d, out_h, out_w,
                      bias_g, bias_o, activation, has_bias,
                      BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, OUTPUTS: tl.constexpr, TAPS: tl.constexpr,
                      STRIDE: tl.constexpr):  # fmt: skip
    """Contiguous: BLOCK_R planes of the result, which are (image, output channel, pd), OUTPUTS lines of each, BLOCK_W
    pixels. is_flipped: the taps along h are walked backwards."""
    blocks = tl.cdiv(PH, OUTPUTS)
    first = tl.program_id(0) % blocks * OUTPUTS
    row = tl.program_id(0) // blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    pw = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    exists = row < rows
    of_all = row // PD
    pd = row - of_all * PD
    image = of_all // channels
    channel = of_all - image * channels
    group = channel // OC
    channel = (channel - group * OC).to(tl.int64)
    group = group.to(tl.int64)
    d0 = pd * stride_d - padding_d
    first_of_row = first + row * 0  # as above
    h0 = first_of_row * STRIDE - padding_h
    w0 = pw * stride_w - padding_w
    plane = image.to(tl.int64) * x_n + group * x_g + d0.to(tl.int64) * x_d
    x_at = x + (plane + h0.to(tl.int64) * x_h)[:, None] + (w0.to(tl.int64) * x_w)[None, :]
    weight_at = weight + group * weight_g + channel * weight_o
    acc = zeros_of(OUTPUTS, BLOCK_R, BLOCK_W)
    for column in range(KD * KW):
        kd = column // KW
        kw = column - kd * KW
        d = kd * dilation_d
        w = kw * dilation_w
        row_there = exists & (d0 + d >= 0) & (d0 + d < D)
        there = (w0 + w >= 0) & (w0 + w < W)
        weights = ()
        for tap in tl.static_range(TAPS):
            kh = tl.where(is_flipped != 0, TAPS - 1 - tap, tap)
            at = weight_at + place(kd, kh, kw, weight_d, weight_h, weight_w)
            weights = weights + (tl.load(at, mask=exists, other=0.0).to(tl.float32)[:, None],)
        column_at = x_at + (d.to(tl.int64) * x_d + w.to(tl.int64) * x_w)
        for i in tl.static_range((OUTPUTS - 1) * STRIDE + TAPS):
            is_inside = (h0 + i >= 0) & (h0 + i < H)
            mask = (row_there & is_inside)[:, None] & there[None, :]
            a = tl.load(column_at, mask=mask, other=0.0).to(tl.float32)
            column_at += x_h
            acc = add_taps(acc, a, weights, i, TAPS, STRIDE, OUTPUTS)
    plane = image.to(tl.int64) * out_n + group * out_g + channel * out_o
    at = (
        out
        + (plane + pd.to(tl.int64) * out_d + first.to(tl.int64) * out_h)[:, None]
        + (pw.to(tl.int64) * out_w)[None, :]
    )
    z = tl.zeros((BLOCK_R,), dtype=tl.float32)
    if has_bias != 0:
        z = tl.load(bias + group * bias_g + channel * bias_o, mask=exists, other=0.0).to(tl.float32)
    for j in range(OUTPUTS):
        y = activate(acc[0] + z[:, None], activation).to(out.dtype.element_ty)
        tl.store(at, y, mask=(exists & (first_of_row + j < PH))[:, None] & (pw < PW)[None, :])
        at += out_h
        acc = acc[1:] + acc[:1]


# --- Plans ---

_CHANNELS = OP.local("groups") * OP.local("N")


def _backwards(dimension: str) -> Expr:
    """Whether the taps along it are: then they are taken in the other order, from a padding that much larger."""
    return OP.int(f"dilation_{dimension}") == -1


def _slide_constraints(point: Point, dimension: str, taps: Expr) -> tuple[Constraint, ...]:
    step, dilation = OP.int(f"stride_{dimension}"), OP.int(f"dilation_{dimension}")
    return (
        fits_32_bits(OP, X),
        require(WEIGHT.size(2) == 1, "1 input channel in each group"),
        require(taps == point.taps, f"{point.taps} taps along {dimension}"),
        require(step == point.stride, f"a stride of {point.stride} along {dimension}"),
        require((dilation == 1) | (dilation == -1), f"no dilation along {dimension}"),
        require(_CHANNELS * OUT.size(0) * OUT.size(3) < 2**31 - 2**16, "less than 2**31 - 65536 planes"),
    )


def _shared_args(point: Point, left_out: tuple[str, ...], sliding: str) -> dict[str, Arg]:
    names = ("M", "G", "taps", "KH", "KW", "x_c", "weight_c", f"stride_{sliding}", f"dilation_{sliding}", *left_out)
    args = {k: v for k, v in problem_args(point, wide_weight=False).items() if k not in names}
    args = without_divisors(args)
    padding = OP.int(f"padding_{sliding}")
    args[f"padding_{sliding}"] = Int(select(_backwards(sliding), padding + (point.taps - 1), padding))
    c = point.config
    return args | dict(
        channels=Int(_CHANNELS),
        KD=Int(WEIGHT.size(3)),
        BLOCK_R=Const(c.block_r),
        OUTPUTS=Const(c.outputs),
        TAPS=Const(point.taps),
        STRIDE=Const(point.stride),
    )


def _cost(point: Point, lines: Expr, along: Expr, across: Expr, steps: Expr, per_ns: int, launches: int = 1) -> Expr:
    """Picoseconds. lines: of the result, of which a program has a block; along, across: outputs of a line, in the two
    directions that blocks of it have; steps: lines of taps. A program waits for memory in each of them."""
    c = point.config
    wasted = 1000 * c.outputs * ceil_div(along, c.outputs) // maximum(along, 1)
    wasted = wasted * c.block * ceil_div(across, c.block) // maximum(across, 1)
    work = OP.local("M_choice") * _CHANNELS * OP.local("taps") // 1000 * wasted
    programs = ceil_div(lines, c.block_r) * ceil_div(along, c.outputs) * ceil_div(across, c.block)
    waits = waiting_ns(programs, c.occupancy, steps, c.step_ns)
    return plain_cores(point, OP, work, per_ns, launches=launches, least_ns=waits)


def _channels_last_plan(point: Point) -> Plan:
    c = point.config
    dependent = c.ahead and point.arch >= 90  # elsewhere nothing is done before the wait, which then costs
    weight = {f"weight_{d}": Int(WEIGHT.stride(i), "i64") for d, i in (("g", 0), ("d", 3), ("h", 4), ("w", 5))}
    copy = dict(
        weight=Pointer(WEIGHT, point.dtype, aligned=False),
        copy=Scratch(0, "fp32"),
        channels=Int(_CHANNELS),
        taps=Int(OP.local("taps")),
        KH=Int(WEIGHT.size(4)),
        KW=Int(WEIGHT.size(5)),
        is_flipped=Int(_backwards("w")),
        BLOCK_C=Const(128),
        DEPENDENT=Const(dependent),
        **weight,
    )
    left_out = ("OC", "x_g", "out_g", "out_o", "bias_o", "weight_o", *weight)
    rows = OUT.size(0) * OUT.size(3) * OUT.size(4)
    lines = OP.local("M_choice") // OUT.size(5)
    per_ns = c.per_ns if point.layout == "channels_last" else c.per_ns // 2  # elements are loaded one by one
    args = _shared_args(point, left_out, "w") | dict(
        weight=Scratch(0, "fp32"),
        KH=Int(WEIGHT.size(4)),
        rows=Int(rows),
        BLOCK_C=Const(c.block),
        PIECE=Const(piece_of(point)),
        AHEAD=Const(c.ahead),
        DEPENDENT=Const(dependent),
    )
    grid = (ceil_div(rows, c.block_r) * ceil_div(OUT.size(5), c.outputs), ceil_div(_CHANNELS, c.block), 1)
    return Plan(
        constraints=(
            *_slide_constraints(point, "w", WEIGHT.size(5)),
            whole_pixels(point),
        ),
        serves=serves(point) | {"precision": (0, 1)},
        launches=(
            Launch(depthwise_weight, copy, (ceil_div(_CHANNELS, 128), OP.local("taps"), 1), num_warps=4),
            Launch(depthwise_along_w, args, grid, num_warps=c.num_warps, num_stages=1, dependent=int(dependent)),
        ),
        buffers=(Buffer(4 * _CHANNELS * OP.local("taps")),),
        cost=_cost(point, lines, OUT.size(5), _CHANNELS, WEIGHT.size(3) * WEIGHT.size(4), per_ns, launches=2),
    )


def _contiguous_plan(point: Point) -> Plan:
    c = point.config
    rows = OUT.size(0) * _CHANNELS * OUT.size(3)
    lines = OP.local("M_choice") // (OUT.size(4) * OUT.size(5)) * _CHANNELS
    args = _shared_args(point, (), "h") | dict(
        KW=Int(WEIGHT.size(5)),
        is_flipped=Int(_backwards("h")),
        rows=Int(rows),
        x_w=Const(1),
        out_w=Const(1),
        BLOCK_W=Const(c.block),
    )
    grid = (ceil_div(rows, c.block_r) * ceil_div(OUT.size(4), c.outputs), ceil_div(OUT.size(5), c.block), 1)
    return Plan(
        constraints=(
            *_slide_constraints(point, "h", WEIGHT.size(4)),
            require((X.stride(5) == 1) & (OUT.stride(5) == 1), "lines contiguous"),
        ),
        serves=serves(point) | {"precision": (0, 1)},
        launches=(Launch(depthwise_along_h, args, grid, num_warps=c.num_warps, num_stages=1),),
        cost=_cost(point, lines, OUT.size(4), OUT.size(5), WEIGHT.size(3) * WEIGHT.size(5), c.per_ns),
    )


def _plan(point: Point) -> Plan | None:
    c = point.config
    if point.layout not in c.layouts.split():
        return None
    return _channels_last_plan(point) if point.layout in CHANNELS_LAST else _contiguous_plan(point)


# --- The grid ---


def _block(block_r: int, block: int, outputs: int, layouts: str, per_ns: int, num_warps: int = 4, occupancy: int = 3,
           step_ns: int = 1000, ahead: bool = False) -> Config:  # fmt: skip
    """layouts: those that it is compiled for. per_ns: multiplications of a GPU that is full. occupancy: programs that a
    multiprocessor holds at once. step_ns: that one takes for a line of taps, alone. ahead: the next is loaded then."""
    along = "h" if layouts == "contiguous" else "w"
    params = dict(block_r=block_r, block=block, outputs=outputs, layouts=layouts, per_ns=per_ns, num_warps=num_warps,
                  occupancy=occupancy, step_ns=step_ns, ahead=ahead)  # fmt: skip
    return Config(f"slide_{along}{outputs}_{block_r}x{block}_w{num_warps}", params)


_CONFIGS = (
    _block(32, 32, 8, "channels_last", 9000, occupancy=2),
    # Small images: eight times as many programs, which wait less. Of single elements, more outputs would not stay in
    # registers.
    _block(8, 32, 4, "channels_last channels_last_odd", 7500, num_warps=2, occupancy=7, step_ns=500, ahead=True),
    _block(8, 64, 8, "contiguous", 4000, occupancy=4, step_ns=1300),
    _block(32, 16, 8, "contiguous", 4000, occupancy=4, step_ns=1300),
    # Lines of 7 pixels, and few of any.
    _block(8, 8, 8, "contiguous", 3000, num_warps=1, occupancy=14, step_ns=700),
)
_AXES = {
    "dtype": DTYPE_AXIS,
    "precision": ("ieee",),
    "layout": (*CHANNELS_LAST, "contiguous"),
    "taps": (3, 5, 7),
    "stride": (1, 2),
}

KERNELS = (Kernel("conv_depthwise_slide", OP, _AXES, dict.fromkeys(ARCHS, _CONFIGS), _plan),)
