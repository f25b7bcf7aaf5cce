"""conv_blocks: the weight of several groups that are multiplied as one: their filters as blocks on a diagonal, zeros
elsewhere, channels-last.

out[m, g * O + o, g * C + c, tap] = x[m * merge + g, o, c, tap] for g < merge, which out's sizes tell.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tk.aot.expr import ceil_div
from tk.aot.spec import Config, Const, Int, Plan, Point, Pointer, require
from tk.kernels.conv.arguments import extents, leave_out, weight_strides
from tk.kernels.conv.copies.op import OUT, X, copy_family, copy_op, copy_plan
from tk.kernels.conv.geometry import place, tap_of
from tk.kernels.conv.op import OF_TAPS, channels_together

# x [G, O, C, KD, KH, KW], out [G / merge, merge O, merge C, KD, KH, KW].
OP = copy_op(
    "conv_blocks",
    {
        "filters": OUT.size(1),  # of a product, as are channels
        "channels": OUT.size(2),
        "slices": OUT.size(0) * X.size(3) * X.size(4) * X.size(5),  # of products, one for each tap
    },
)
FILTERS, CHANNELS, SLICES = (OP.local(name) for name in ("filters", "channels", "slices"))


class OfGroup(NamedTuple):
    """The sizes of a group."""

    filters: Any
    channels: Any


@triton.jit
def conv_blocks(x, out, filters, channels, taps, merge, of_group, kernel, x_stride, out_stride,
                BLOCK_F: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """Program (a tap of a product, filters, channels). of_group: filters and channels of a group."""
    product = tl.program_id(0) // taps
    at = tap_of(tl.program_id(0) - product * taps, kernel)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    exists = (f < filters)[:, None] & (c < channels)[None, :]
    row = f // of_group.filters
    col = c // of_group.channels
    group = (product * merge + row).to(tl.int64)
    filter_at = group * x_stride.g + (f - row * of_group.filters).to(tl.int64) * x_stride.o
    channel_at = place(at, x_stride.tap) + (c - col * of_group.channels).to(tl.int64) * x_stride.c
    on_diagonal = exists & (row[:, None] == col[None, :])
    found = tl.load(x + filter_at[:, None] + channel_at[None, :], mask=on_diagonal, other=0)
    to = out + product.to(tl.int64) * out_stride.g + place(at, out_stride.tap)
    tl.store(to + (f.to(tl.int64) * out_stride.o)[:, None] + c[None, :], found, mask=exists)


def _plan(point: Point) -> Plan:
    c = point.config
    merge = X.size(0) // OUT.size(0)
    args = dict(
        x=Pointer(X, point.bits, aligned=False),
        out=Pointer(OUT, point.bits),
        filters=Int(FILTERS),
        channels=Int(CHANNELS, divisible=True),
        taps=Int(X.size(3) * X.size(4) * X.size(5)),
        merge=Int(merge),
        of_group=OfGroup(Int(X.size(1)), Int(X.size(2))),
        kernel=leave_out(extents(X), "d"),
        x_stride=weight_strides(X),
        out_stride=leave_out(weight_strides(OUT, divisible=True), "c"),
        BLOCK_F=Const(c.block_f),
        BLOCK_C=Const(c.block_c),
    )
    fits = (OUT.size(0) * merge == X.size(0)) & (FILTERS == merge * X.size(1)) & (CHANNELS == merge * X.size(2))
    small = (FILTERS < 2**31 - 2**16) & (CHANNELS < 2**31 - 2**16) & (X.size(0) < 2**31)
    blocks = ceil_div(FILTERS, c.block_f), ceil_div(CHANNELS, c.block_c)
    constraints = (
        require(fits, "out of the sizes of merged groups"),
        channels_together(OUT, CHANNELS, OF_TAPS),
        require(small, "less than 2**31 - 65536 filters and channels of a product, and 2**31 groups"),
    )
    traffic = SLICES * FILTERS * CHANNELS * OP.local("itemsize")
    return copy_plan(point, conv_blocks, args, (SLICES, *blocks), constraints, traffic // 2)


FAMILY = copy_family(OP, _plan, (Config("16x64_w4", {"block_f": 16, "block_c": 64}),))
