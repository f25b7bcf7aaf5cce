"""Split sums: how many parts, and the second pass that adds them up."""

import triton
import triton.language as tl

from tk.aot.expr import Expr, ceil_div, device, local, maximum, minimum
from tk.aot.spec import Buffer, Const, Int, Launch, Pointer, Scratch
from tk.kernels.conv.geometry import place, tap_of
from tk.kernels.conv.op import SPATIAL
from tk.kernels.conv_weight_grad.op import OP, OUT

M = OP.local("M")
_COUNT = OP.local("groups") * OP.local("N") * OP.local("K")
_BLOCK = 512


@triton.jit
def weight_grad_reduce(partials, out, count, splits, OC, C, taps, KH, KW,
                       out_g, out_o, out_c, out_d, out_h, out_w, BLOCK: tl.constexpr):  # fmt: skip
    """partials [splits, G, O, taps, C], fp32: the parts in order, then one rounding."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = i < count
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    at = partials + i
    for _ in range(splits):
        acc += tl.load(at, mask=exists, other=0.0)
        at += count
    c = i % C
    rest = i // C
    tap = rest % taps
    channel = rest // taps
    group = channel // OC
    kd, kh, kw = tap_of(tap, KH, KW)
    at = group * out_g + (channel - group * OC) * out_o + c * out_c + place(kd, kh, kw, out_d, out_h, out_w)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=exists)


# Of a plan: its locals are those of `split_locals`, its buffer PARTIALS, its second launch `reduce_launch`.
PIXELS_PER_SPLIT, SPLITS = local(len(OP.locals)), local(len(OP.locals) + 1)
PARTIALS = Buffer(SPLITS * _COUNT * 4)
_MOST_SCRATCH = 1 << 28  # bytes


def split_locals(tiles: Expr, occupancy: int, step: int, least: int) -> tuple[Expr, Expr]:
    """As many parts as there is room for, of whole steps, none shorter than `least` of them."""
    room = maximum(2 * device.sm_count * occupancy // maximum(tiles, 1), 1)
    affordable = maximum(_MOST_SCRATCH // maximum(4 * _COUNT, 1), 1)
    wanted = maximum(minimum(minimum(room, affordable), ceil_div(M, least * step)), 1)
    return ceil_div(ceil_div(M, step), wanted) * step, ceil_div(M, PIXELS_PER_SPLIT)


def reduce_launch(dtype: str) -> Launch:
    strides = {f"out_{d}": Int(OUT.stride(i), "i64") for i, d in enumerate(("g", "o", "c", *SPATIAL))}
    args = dict(
        partials=Scratch(0, "fp32"),
        out=Pointer(OUT, dtype, aligned=False),
        count=Int(_COUNT, "i64"),
        splits=Int(SPLITS),
        OC=Int(OP.local("N")),
        C=Int(OUT.size(2)),
        taps=Int(OP.local("taps")),
        KH=Int(OUT.size(4)),
        KW=Int(OUT.size(5)),
        BLOCK=Const(_BLOCK),
        **strides,
    )
    return Launch(weight_grad_reduce, args, (ceil_div(_COUNT, _BLOCK), 1, 1), num_warps=4)
