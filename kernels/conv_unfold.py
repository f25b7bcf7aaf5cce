"""conv_unfold: the taps of a line as channels, side by side, for convolutions of few channels or an odd number of them.

out[n, k * C + c, d, h, p] = x[n, c, d, h, p * stride - padding + k * dilation] for k < taps: 0 where that lies outside,
and in the channels that are left over. With one tap and a stride of 1 it is a channels-last copy with more channels.
"""

import triton
import triton.language as tl

from tk.aot.expr import Expr, ceil_div, select, tensors
from tk.aot.spec import DTYPES, Config, Const, Family, Int, Kernel, Launch, Op, Plan, Point, Pointer, Selector, require
from tk.kernels.conv.geometry import pixel, place

# x [N, 1, C, D, H, W], out [N, 1, K, D, H, P]. Only the size of an element matters. taps, stride, padding and dilation
# are those along w.
X, OUT = tensors("x", "out")
OP = Op(
    name="conv_unfold",
    tensors=(X, OUT),
    ints=("taps", "stride", "padding", "dilation"),
    floats=(),
    locals={
        "pixels": OUT.size(0) * OUT.size(3) * OUT.size(4) * OUT.size(5),
        "channels": OUT.size(2),
        "itemsize": select(X.dtype == DTYPES["fp32"], 4, 2),
    },
    selectors={"bits": Selector(X.dtype == DTYPES["fp32"], 2)},
    dims=("pixels", "channels"),
)
PIXELS, CHANNELS = OP.local("pixels"), OP.local("channels")
_BITS = ("i16", "i32")


@triton.jit
def conv_unfold(x, out, pixels, channels, C, W, D, H, P, taps, stride, padding, dilation,
                x_n, x_c, x_d, x_h, x_w, out_n, out_d, out_h, out_p,
                BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """Program (pixels, channels) of out."""
    rows = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    k = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    exists = rows < pixels
    image, d, h, p = pixel(rows, D, H, P)
    tap = k // C
    c = k - tap * C
    w0 = p * stride - padding
    step = tap * dilation
    w = w0[:, None] + step[None, :]
    there = exists[:, None] & (tap < taps)[None, :] & (w >= 0) & (w < W)
    line = image.to(tl.int64) * x_n + place(d, h, w0, x_d, x_h, x_w)
    of_tap = step.to(tl.int64) * x_w + c.to(tl.int64) * x_c
    found = tl.load(x + line[:, None] + of_tap[None, :], mask=there, other=0)
    to = out + (image.to(tl.int64) * out_n + place(d, h, p, out_d, out_h, out_p))[:, None] + k[None, :]
    tl.store(to, found, mask=exists[:, None] & (k < channels)[None, :])


def _is_wide() -> Expr:
    holds = (OUT.alignment >= 16) & (OUT.stride(2) == 1) & (CHANNELS % 16 == 0)
    for d in (0, 3, 4, 5):
        holds = holds & (OUT.stride(d) % 16 == 0)
    return holds


def _plan(point: Point) -> Plan:
    c = point.config
    args = dict(
        x=Pointer(X, point.bits, aligned=False),
        out=Pointer(OUT, point.bits),
        pixels=Int(PIXELS),
        channels=Int(CHANNELS, divisible=True),
        C=Int(X.size(2)),
        W=Int(X.size(5)),
        D=Int(OUT.size(3)),
        H=Int(OUT.size(4)),
        P=Int(OUT.size(5)),
        **{name: Int(OP.int(name)) for name in OP.ints},
        **{f"x_{d}": Int(X.stride(i), "i64") for d, i in (("n", 0), ("c", 2), ("d", 3), ("h", 4), ("w", 5))},
        **{f"out_{d}": Int(OUT.stride(i), "i64", divisible=True) for d, i in (("n", 0), ("d", 3), ("h", 4), ("p", 5))},
        BLOCK_P=Const(c.block_p),
        BLOCK_C=Const(c.block_c),
    )
    small = (PIXELS < 2**31 - 2**16) & (CHANNELS < 2**31 - 2**16) & (X.size(5) < 2**30)
    traffic = PIXELS * CHANNELS * OP.local("itemsize")
    return Plan(
        constraints=(
            require(_is_wide(), "out with channels together, a multiple of 16, on a 16-byte boundary"),
            require((X.size(1) == 1) & (OUT.size(1) == 1), "1 group"),
            require((X.size(2) > 0) & (OP.int("taps") * X.size(2) <= CHANNELS), "channels for all taps"),
            require(small, "less than 2**31 - 65536 pixels and channels, and 2**30 of a line"),
        ),
        serves={"bits": (_BITS.index(point.bits),)},
        launches=(
            Launch(conv_unfold, args, (ceil_div(PIXELS, c.block_p), ceil_div(CHANNELS, c.block_c), 1), num_warps=4),
        ),
        cost=3_000_000 + traffic // 2,
    )


_CONFIGS = (Config("128x32_w4", {"block_p": 128, "block_c": 32}),)
KERNEL = Kernel("conv_unfold", OP, {"bits": _BITS}, dict.fromkeys((80, 90, 100), _CONFIGS), _plan)
FAMILY = Family(OP, (KERNEL,), sample=lambda kernel, point: True)
