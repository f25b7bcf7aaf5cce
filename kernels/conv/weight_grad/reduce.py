"""Split sums: how many parts, and the second pass that adds them up."""

import triton
import triton.language as tl

from tk.aot.expr import Expr, ceil_div, device, local, maximum, minimum, select
from tk.aot.spec import Buffer, Const, Constraint, Int, Launch, Plan, Point, Pointer, Scratch
from tk.kernels.conv.arguments import extents, leave_out, weight_strides
from tk.kernels.conv.geometry import place, tap_of
from tk.kernels.conv.op import fits_32_bits, serves
from tk.kernels.conv.weight_grad.op import OP, OUT, X

M = OP.local("M")
_ROWS = OP.local("groups") * OP.local("N")  # of the gradient, each of `K` numbers
_COUNT = _ROWS * OP.local("K")
_PARTS, _BLOCK = 4, 256


@triton.jit
def weight_grad_reduce(partials, out, rows, K, splits, out_channels, channels, kernel, out_stride,
                       PARTS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """partials [splits, G, O, taps, C], fp32: the parts in order, PARTS at a time, then one rounding. A program has a
    block of a row, [taps, C]: within it 32-bit numbers do, and a division of 64-bit ones takes a hundred instructions.
    WIDE: K is a multiple of 8, and the compiler is told so, for loads of 16 bytes."""
    if WIDE:
        K = K // 8 * 8
    blocks = tl.cdiv(K, BLOCK)
    row = tl.program_id(0) // blocks
    i = (tl.program_id(0) - row * blocks) * BLOCK + tl.arange(0, BLOCK)
    exists = i < K
    parts = tl.arange(0, PARTS)
    line = rows.to(tl.int64) * K  # from one part to the next
    at = partials + row.to(tl.int64) * K + parts.to(tl.int64)[:, None] * line + i[None, :]
    acc = tl.zeros((PARTS, BLOCK), dtype=tl.float32)
    for first in range(0, splits, PARTS):
        acc += tl.load(at, mask=(first + parts < splits)[:, None] & exists[None, :], other=0.0)
        at += PARTS * line
    tap = i // channels
    c = i - tap * channels
    group = row // out_channels
    at_tap = tap_of(tap, kernel)
    to = out + group.to(tl.int64) * out_stride.g + (row - group * out_channels).to(tl.int64) * out_stride.o
    to += c.to(tl.int64) * out_stride.c + place(at_tap, out_stride.tap)
    tl.store(to, tl.sum(acc, axis=0).to(out.dtype.element_ty), mask=exists)


# Locals of a plan, which `split_locals` gives.
_ROOM = len(OP.locals)
_MOST_WAVES = 8
_BEST = _ROOM + _MOST_WAVES
_CHOSEN = _BEST + _MOST_WAVES - 1
SHARE, SPLITS = local(_CHOSEN), local(_CHOSEN + 1)
FREE_LOCAL = _CHOSEN + 2  # the first that is a plan's own
_MOST_SCRATCH = 1 << 28  # bytes
_BYTES_A_NANOSECOND = 4000


def split_locals(tiles: Expr, occupancy: int, step: int, least: int, step_ns: Expr | int,
                 length: Expr = M) -> tuple[Expr, ...]:  # fmt: skip
    """Into how many parts of whole steps the pixels of a tile are split, none shorter than `least` steps; or whatever
    there are `length` of.

    As many as make one to eight waves of programs, whichever is done first: more waves waste less of the last one, but
    every part is written and read once. step_ns: of `step` of them for a tile, while `occupancy` programs share a
    multiprocessor."""
    tiles = maximum(tiles, 1)
    at_once = device.sm_count * occupancy
    steps = ceil_div(length, step)
    affordable = maximum(_MOST_SCRATCH // maximum(4 * _COUNT, 1), 1)
    most = maximum(minimum(affordable, ceil_div(length, least * step)), 1)
    rooms = tuple(maximum(minimum(wave * at_once // tiles, most), 1) for wave in range(1, _MOST_WAVES + 1))

    def time(parts: Expr) -> Expr:
        waves = ceil_div(tiles * parts, at_once)
        return waves * ceil_div(steps, parts) * step_ns + parts * _COUNT * 8 // _BYTES_A_NANOSECOND

    best = [local(_ROOM)]
    better = []
    for i in range(1, _MOST_WAVES):
        this = local(_ROOM + i)
        better.append(select(time(this) < time(best[-1]), this, best[-1]))
        best.append(local(_BEST + i - 1))
    return (*rooms, *better, ceil_div(steps, best[-1]) * step, ceil_div(length, SHARE))


def split_plan(point: Point, launch: Launch, splits: tuple[Expr, ...], constraints: tuple[Constraint, ...], cost: Expr,
               wide: bool = False, general: bool = False) -> Plan:  # fmt: skip
    """launch: of programs of SHARE each, which leave their sums in scratch memory. splits: ``split_locals``, and the
    plan's own locals. wide: it takes a multiple of 8 channels."""
    return Plan(
        constraints=(fits_32_bits(OP, X), *constraints),
        serves=serves(point),
        launches=(launch, _reduce_launch(point.dtype, wide)),
        locals=splits,
        buffers=(Buffer(SPLITS * _COUNT * 4),),
        cost=cost,
        general=general,
    )


def _reduce_launch(dtype: str, wide: bool) -> Launch:
    args = dict(
        partials=Scratch(0, "fp32"),
        out=Pointer(OUT, dtype, aligned=False),
        rows=Int(_ROWS),
        K=Int(OP.local("K")),
        splits=Int(SPLITS),
        out_channels=Int(OP.local("N")),
        channels=Int(OUT.size(2)),
        kernel=leave_out(extents(OUT), "d"),
        out_stride=weight_strides(OUT),
        PARTS=Const(_PARTS),
        BLOCK=Const(_BLOCK),
        WIDE=Const(wide),
    )
    return Launch(weight_grad_reduce, args, (_ROWS * ceil_div(OP.local("K"), _BLOCK), 1, 1), num_warps=4)
