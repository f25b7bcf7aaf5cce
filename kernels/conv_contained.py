"""conv_contained: after a convolution whose groups were merged into one, by a weight of zeros between them. A NaN or an
infinity of one group made NaN of others' results: what is NaN is worked out again, of each group by itself.

out is read once, and nothing is written where it has no NaN. kernels/conv/contained.py has the kernel.
"""

from dataclasses import replace

from tk.aot.expr import ceil_div, select
from tk.aot.spec import DTYPES, Config, Const, Family, Int, Kernel, Launch, Op, Plan, Point, Pointer, Selector, require
from tk.kernels.conv.contained import conv_contained
from tk.kernels.conv.op import BIAS, DTYPE_AXIS, OUT, WEIGHT, X, conv_locals, fits_32_bits
from tk.kernels.conv.op import OP as CONV
from tk.kernels.conv.pointer import ARCHS, problem_args

# Everything as `conv` has it; the precision makes no difference.
OP = Op(
    name="conv_contained",
    tensors=(X, WEIGHT, BIAS, OUT),
    ints=CONV.ints,
    floats=(),
    locals=conv_locals(X, WEIGHT, OUT),
    selectors={
        "dtype": Selector(
            select(X.dtype == DTYPES["bf16"], 0, select(X.dtype == DTYPES["fp16"], 1, 2)), len(DTYPE_AXIS)
        ),
    },
    dims=("M", "N", "K"),
)


def _plan(point: Point) -> Plan:
    c = point.config
    block_p, block_c = (c.along, c.across) if point.layout == "any" else (c.across, c.along)
    args = problem_args(replace(point, axes={**point.axes, "layout": "any"}), wide_weight=False)
    constraints = [fits_32_bits(OP, X)]
    if point.layout == "channels_last":
        args |= dict(out=Pointer(OUT, point.dtype), out_o=Const(1), out_g=Int(OUT.stride(1), "i64"))
        holds = (OUT.alignment >= 16) & (OUT.stride(2) == 1)
        for i, d in ((0, "n"), (3, "d"), (4, "h"), (5, "w")):
            args[f"out_{d}"] = Int(OUT.stride(i), "i64", divisible=True)
            holds = holds & (OUT.stride(i) % 16 == 0)
        constraints.append(require(holds, "out channels-last, a multiple of 16 channels"))
    args |= dict(
        C=Int(WEIGHT.size(2)),
        BLOCK_P=Const(block_p),
        BLOCK_C=Const(block_c),
        LAST=Const(point.layout == "channels_last"),
    )
    channels = OP.local("groups") * OP.local("N")
    grid = (ceil_div(OP.local("M"), block_p), ceil_div(channels, block_c), 1)
    traffic = OP.local("M") * channels * OP.local("itemsize")
    return Plan(
        constraints=tuple(constraints),
        serves={"dtype": (DTYPE_AXIS.index(point.dtype),)},
        launches=(Launch(conv_contained, args, grid, num_warps=4, num_stages=1),),
        cost=3_000_000 + traffic // (4 if point.layout == "channels_last" else 3),
    )


# Elements in the direction in which they lie beside each other, and in the other.
_CONFIGS = (Config("64x32_w4", {"along": 64, "across": 32}),)
_AXES = {"dtype": DTYPE_AXIS, "layout": ("channels_last", "any")}
KERNEL = Kernel("conv_contained", OP, _AXES, dict.fromkeys(ARCHS, _CONFIGS), _plan)
FAMILY = Family(OP, (KERNEL,), sample=lambda kernel, point: True)
