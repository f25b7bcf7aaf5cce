"""Groups of one channel, 3, 5 or 7 taps along one dimension: a thread keeps some neighbouring outputs along it, so that
an element is loaded and converted once for all of them and all of these taps.

What is left is about one multiplication and addition for each tap, which is what the plain cores do best.
Channels-last, threads have channels, and outputs lie along w; contiguous, threads have pixels of a line, and outputs
lie along h.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tk.aot.expr import Expr, ceil_div, maximum, select
from tk.aot.spec import (
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
from tk.kernels.conv.arguments import extents, geometry_of, leave_out, sizes_of, weight_strides
from tk.kernels.conv.cost import plain_cores, waiting_ns
from tk.kernels.conv.forward.depthwise import (
    CHANNELS_LAST,
    args_in_pieces,
    in_pieces,
    piece_of,
    pitches_in_pieces,
    whole_pixels,
)
from tk.kernels.conv.forward.pointer import finish_pixels, problem_args
from tk.kernels.conv.geometry import Spatial, line, place, tap_of
from tk.kernels.conv.op import DTYPE_AXIS, OP, OUT, WEIGHT, X, fits_32_bits, serves
from tk.kernels.epilogue import activate
from tk.kernels.gemm.pointer import ARCHS

# --- The device functions ---


@dataclass(frozen=True)
class Tile:
    """What a program has of the result: OUTPUTS beside each other of each of ROWS x COLS, from TAPS taps of each, where
    neighbouring outputs read STRIDE apart."""

    ROWS: int
    COLS: int
    OUTPUTS: int
    TAPS: int
    STRIDE: int

    @property
    def READ(self) -> int:
        """How many elements the outputs read."""
        return (self.OUTPUTS - 1) * self.STRIDE + self.TAPS

    def is_read(self, i: int, tap: int) -> bool:
        """Whether one of the outputs reads the i-th of them by this tap: output (i - tap) // STRIDE."""
        return i >= tap and (i - tap) % self.STRIDE == 0 and (i - tap) // self.STRIDE < self.OUTPUTS


@triton.jit
def with_product(acc, x, weight, J: tl.constexpr):
    """acc, with x times weight on top of its J-th."""
    return acc[:J] + (acc[J] + x * weight,) + acc[J + 1 :]


@triton.jit
def zeros_of(COUNT: tl.constexpr, TILE: tl.constexpr):
    """A tuple."""
    found = (tl.zeros((TILE.ROWS, TILE.COLS), dtype=tl.float32),)
    for _ in tl.static_range(1, COUNT):
        found = found + (tl.zeros((TILE.ROWS, TILE.COLS), dtype=tl.float32),)
    return found


@triton.jit
def element_of_line(at, i, first, size, row_exists, col_exists):
    """The i-th element of a line from its `first` on, as it lies in memory: 0 where that is none of `size`."""
    mask = (row_exists & (first + i >= 0) & (first + i < size))[:, None] & col_exists[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def elements_of_line(at, pitch, first, size, row_exists, col_exists, TILE: tl.constexpr):
    """A tuple of those that the outputs read."""
    READ: tl.constexpr = TILE.READ
    found = ()
    for i in tl.static_range(READ):
        found = found + (element_of_line(at, i, first, size, row_exists, col_exists),)
        at += pitch
    return found


@triton.jit
def add_taps(acc, x, weights, AT: tl.constexpr, TILE: tl.constexpr):
    """Element AT of those that the outputs read, times the taps by which they read it. acc: a tuple of the outputs;
    weights: of the taps."""
    TAPS: tl.constexpr = TILE.TAPS
    for tap in tl.static_range(TAPS):
        if TILE.is_read(AT, tap):
            acc = with_product(acc, x, weights[tap], (AT - tap) // TILE.STRIDE)
    return acc


@triton.jit
def depthwise_weight(weight, copy, channels, kernel, is_flipped, stride,
                     BLOCK_C: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """copy [taps, channels], fp32, of weight; is_flipped: taps along w the other way round. Program: channels, tap.
    DEPENDENT: what reads the copy may begin beside it."""
    if DEPENDENT:
        gdc_launch_dependents()
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    tap = tl.program_id(1)
    at = tap_of(tap, kernel)
    if is_flipped != 0:
        at = Spatial(at.d, at.h, kernel.w - 1 - at.w)
    exists = cols < channels
    found = tl.load(weight + cols.to(tl.int64) * stride.g + place(at, stride.tap), exists)
    tl.store(copy + tap.to(tl.int64) * channels + cols, found.to(tl.float32), exists)


@triton.jit
def line_of_taps(number, begin, sizes, geometry, x_stride):
    """Where x has it, from the first of all taps, and whether it is inside of the image, of each row."""
    kd = number // sizes.kernel.h
    d = kd * geometry.dilation.d
    h = (number - kd * sizes.kernel.h) * geometry.dilation.h
    there = (begin.d + d >= 0) & (begin.d + d < sizes.image.d) & (begin.h + h >= 0) & (begin.h + h < sizes.image.h)
    return d.to(tl.int64) * x_stride.pixel.d + h.to(tl.int64) * x_stride.pixel.h, there


@triton.jit
def weights_of_line(at, channels, exists, TILE: tl.constexpr):
    """A tuple."""
    TAPS: tl.constexpr = TILE.TAPS
    found = ()
    for _ in tl.static_range(TAPS):
        found = found + (tl.load(at, mask=exists, other=0.0),)
        at += channels
    return found


@triton.jit
def depthwise_along_w(x, weight, bias, out, rows, channels, sizes, geometry, x_stride, out_stride, epilogue,
                      TILE: tl.constexpr, PIECE: tl.constexpr, AHEAD: tl.constexpr,
                      DEPENDENT: tl.constexpr):  # fmt: skip
    """Channels-last: a tile has some lines of the result, OUTPUTS pixels of each, and some channels. weight
    [taps, channels]. PIECE: what channels and pitches are multiples of. AHEAD: a line of taps is loaded while the one
    before it is multiplied. DEPENDENT: the kernel ahead, which writes the weight, may still run."""
    channels = in_pieces(channels, PIECE)
    x_stride = pitches_in_pieces(x_stride, PIECE)
    blocks = tl.cdiv(sizes.out.w, TILE.OUTPUTS)
    first = tl.program_id(0) % blocks * TILE.OUTPUTS
    row = tl.program_id(0) // blocks * TILE.ROWS + tl.arange(0, TILE.ROWS)
    cols = tl.program_id(1) * TILE.COLS + tl.arange(0, TILE.COLS)
    exists = row < rows
    col_exists = cols < channels
    image, pd, ph = line(row, sizes.out)
    # One number for all rows: blocks of it, since Triton's interpreter makes integers of a mask and a single truth.
    first_of_row = first + row * 0
    begin = Spatial(pd * geometry.stride.d - geometry.padding.d, ph * geometry.stride.h - geometry.padding.h,
                    first_of_row * TILE.STRIDE - geometry.padding.w)  # fmt: skip
    x_at = x + (image.to(tl.int64) * x_stride.n + place(begin, x_stride.pixel))[:, None] + cols[None, :]
    # As many addresses as x has, in its layout: that costs loads that meet in L1, a change of layout costs a barrier.
    weight_at = weight + (row * 0)[:, None] + cols[None, :]
    acc = zeros_of(TILE.OUTPUTS, TILE)
    READ: tl.constexpr = TILE.READ
    lines = sizes.kernel.d * sizes.kernel.h
    pitch = x_stride.pixel.w
    if AHEAD:
        at, there = line_of_taps(0, begin, sizes, geometry, x_stride)
        pixels = elements_of_line(x_at + at, pitch, begin.w, sizes.image.w, exists & there, col_exists, TILE)
        if DEPENDENT:
            gdc_wait()
        weights = weights_of_line(weight_at, channels, col_exists[None, :], TILE)
        for number in range(1, lines + 1):
            is_line = cols * 0 + number < lines  # a block, as above
            at, there = line_of_taps(number, begin, sizes, geometry, x_stride)
            weight_at += channels * TILE.TAPS
            of_next = col_exists & is_line
            next_pixels = elements_of_line(x_at + at, pitch, begin.w, sizes.image.w, exists & there, of_next, TILE)
            next_weights = weights_of_line(weight_at, channels, of_next[None, :], TILE)
            for i in tl.static_range(READ):
                acc = add_taps(acc, pixels[i].to(tl.float32), weights, i, TILE)
            pixels = next_pixels
            weights = next_weights
    else:
        if DEPENDENT:
            gdc_wait()
        for number in range(lines):
            at, there = line_of_taps(number, begin, sizes, geometry, x_stride)
            weights = weights_of_line(weight_at, channels, col_exists[None, :], TILE)
            weight_at += channels * TILE.TAPS
            line_at = x_at + at
            for i in tl.static_range(READ):
                a = element_of_line(line_at, i, begin.w, sizes.image.w, exists & there, col_exists).to(tl.float32)
                line_at += pitch
                acc = add_taps(acc, a, weights, i, TILE)
    # Not earlier: they would take registers from the sums.
    out_stride = pitches_in_pieces(out_stride, PIECE)
    at = image.to(tl.int64) * out_stride.n + place(Spatial(pd, ph, first), out_stride.pixel)
    # A loop at run time, as in kernels/hopper/epilogue.py: unrolled, the activations are more than the instruction
    # cache holds.
    for j in range(TILE.OUTPUTS):
        finish_pixels(acc[0], bias, out, at, exists & (first_of_row + j < sizes.out.w), cols.to(tl.int64), col_exists,
                      epilogue, cols.to(tl.int64) * epilogue.bias_g)  # fmt: skip
        at += out_stride.pixel.w
        acc = acc[1:] + acc[:1]


@triton.jit
def depthwise_along_h(x, weight, bias, out, rows, channels, sizes, geometry, is_flipped, x_stride,
                      weight_stride, out_stride, epilogue, TILE: tl.constexpr):  # fmt: skip
    """Contiguous: a tile has some planes of the result, which are (image, output channel, pd), OUTPUTS lines of each,
    and some pixels of a line. is_flipped: the taps along h are walked backwards."""
    blocks = tl.cdiv(sizes.out.h, TILE.OUTPUTS)
    first = tl.program_id(0) % blocks * TILE.OUTPUTS
    row = tl.program_id(0) // blocks * TILE.ROWS + tl.arange(0, TILE.ROWS)
    pw = tl.program_id(1) * TILE.COLS + tl.arange(0, TILE.COLS)
    exists = row < rows
    of_all = row // sizes.out.d
    pd = row - of_all * sizes.out.d
    image = of_all // channels
    channel = of_all - image * channels
    group = channel // sizes.out_channels
    channel = (channel - group * sizes.out_channels).to(tl.int64)
    group = group.to(tl.int64)
    first_of_row = first + row * 0  # as above
    begin = Spatial(pd * geometry.stride.d - geometry.padding.d, first_of_row * TILE.STRIDE - geometry.padding.h,
                    pw * geometry.stride.w - geometry.padding.w)  # fmt: skip
    of_x, of_out = x_stride.pixel, out_stride.pixel
    plane = image.to(tl.int64) * x_stride.n + group * x_stride.g + begin.d.to(tl.int64) * of_x.d
    x_at = x + (plane + begin.h.to(tl.int64) * of_x.h)[:, None] + (begin.w.to(tl.int64) * of_x.w)[None, :]
    weight_at = weight + group * weight_stride.g + channel * weight_stride.o
    acc = zeros_of(TILE.OUTPUTS, TILE)
    TAPS: tl.constexpr = TILE.TAPS
    READ: tl.constexpr = TILE.READ
    for column in range(sizes.kernel.d * sizes.kernel.w):
        kd = column // sizes.kernel.w
        kw = column - kd * sizes.kernel.w
        d = kd * geometry.dilation.d
        w = kw * geometry.dilation.w
        row_there = exists & (begin.d + d >= 0) & (begin.d + d < sizes.image.d)
        there = (begin.w + w >= 0) & (begin.w + w < sizes.image.w)
        weights = ()
        for tap in tl.static_range(TAPS):
            kh = tl.where(is_flipped != 0, TAPS - 1 - tap, tap)
            at = weight_at + place(Spatial(kd, kh, kw), weight_stride.tap)
            weights = weights + (tl.load(at, mask=exists, other=0.0).to(tl.float32)[:, None],)
        column_at = x_at + (d.to(tl.int64) * of_x.d + w.to(tl.int64) * of_x.w)
        for i in tl.static_range(READ):
            is_inside = (begin.h + i >= 0) & (begin.h + i < sizes.image.h)
            mask = (row_there & is_inside)[:, None] & there[None, :]
            a = tl.load(column_at, mask=mask, other=0.0).to(tl.float32)
            column_at += of_x.h
            acc = add_taps(acc, a, weights, i, TILE)
    plane = image.to(tl.int64) * out_stride.n + group * out_stride.g + channel * out_stride.c
    at = out + (plane + pd.to(tl.int64) * of_out.d + first.to(tl.int64) * of_out.h)[:, None]
    at += (pw.to(tl.int64) * of_out.w)[None, :]
    z = tl.zeros((TILE.ROWS,), dtype=tl.float32)
    if epilogue.has_bias != 0:
        bias_at = bias + group * epilogue.bias_g + channel * epilogue.bias_o
        z = tl.load(bias_at, mask=exists, other=0.0).to(tl.float32)
    for j in range(TILE.OUTPUTS):
        y = activate(acc[0] + z[:, None], epilogue.activation).to(out.dtype.element_ty)
        tl.store(at, y, mask=(exists & (first_of_row + j < sizes.out.h))[:, None] & (pw < sizes.out.w)[None, :])
        at += of_out.h
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


def _problem_args(point: Point, along: str, rows: Expr) -> dict[str, Any]:
    """along: the dimension in which outputs lie beside each other; rows: of blocks of them."""
    args = args_in_pieces(problem_args(point, wide_weight=False))
    padding = OP.int(f"padding_{along}")
    before = Int(select(_backwards(along), padding + (point.taps - 1), padding))
    places = geometry_of(OP)
    places = places._replace(padding=places.padding._replace(**{along: before}))
    unread = ("pixels", "groups", "channels", "taps", f"kernel.{along}")
    c = point.config
    return args | dict(
        sizes=leave_out(sizes_of(OP, X, WEIGHT, OUT), *unread),
        geometry=leave_out(places, f"stride.{along}", f"dilation.{along}"),
        x_stride=leave_out(args["x_stride"], "c"),
        rows=Int(rows),
        channels=Int(_CHANNELS),
        TILE=Const(Tile(c.block_r, c.block, c.outputs, point.taps, point.stride)),
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
    copy = dict(
        weight=Pointer(WEIGHT, point.dtype, aligned=False),
        copy=Scratch(0, "fp32"),
        channels=Int(_CHANNELS),
        kernel=extents(WEIGHT),
        is_flipped=Int(_backwards("w")),
        stride=weight_strides(WEIGHT),
        BLOCK_C=Const(128),
        DEPENDENT=Const(dependent),
    )
    rows = OUT.size(0) * OUT.size(3) * OUT.size(4)
    lines = OP.local("M_choice") // OUT.size(5)
    per_ns = c.per_ns if point.layout == "channels_last" else c.per_ns // 2  # elements are loaded one by one
    args = _problem_args(point, "w", rows)
    args |= dict(
        weight=Scratch(0, "fp32"),
        sizes=leave_out(args["sizes"], "out_channels"),
        x_stride=leave_out(args["x_stride"], "g"),
        out_stride=leave_out(args["out_stride"], "g", "c"),
        epilogue=leave_out(args["epilogue"], "bias_o"),
        PIECE=Const(piece_of(point)),
        AHEAD=Const(c.ahead),
        DEPENDENT=Const(dependent),
    )
    del args["weight_stride"]  # the copy is dense
    grid = (ceil_div(rows, c.block_r) * ceil_div(OUT.size(5), c.outputs), ceil_div(_CHANNELS, c.block), 1)
    return Plan(
        constraints=(
            *_slide_constraints(point, "w", WEIGHT.size(5)),
            whole_pixels(point),
        ),
        serves=serves(point),
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
    args = _problem_args(point, "h", rows)
    args |= dict(weight_stride=leave_out(args["weight_stride"], "c"), is_flipped=Int(_backwards("h")))
    for name in ("x_stride", "out_stride"):
        pixel = args[name].pixel
        args[name] = args[name]._replace(pixel=pixel._replace(w=Const(1)))
    grid = (ceil_div(rows, c.block_r) * ceil_div(OUT.size(4), c.outputs), ceil_div(OUT.size(5), c.block), 1)
    return Plan(
        constraints=(
            *_slide_constraints(point, "h", WEIGHT.size(4)),
            require((X.stride(5) == 1) & (OUT.stride(5) == 1), "lines contiguous"),
        ),
        serves=serves(point),
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
