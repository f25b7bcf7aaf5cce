"""conv_contained: after a convolution whose groups were merged into one, by a weight of zeros between them. A NaN or an
infinity of one group made NaN of others' results: what is NaN is worked out again, of each group by itself.

Of each pixel two elements are read, and nothing is written where they are no NaN. The kernel is that of contained.py.
"""

from tk.aot.spec import Config, Family, Kernel, Op, Plan, Point, require
from tk.kernels.conv.forward.pointer import contained_cost, contained_launch
from tk.kernels.conv.op import BIAS, DTYPE_AXIS, OUT, WEIGHT, X, conv_locals, fits_32_bits, has_pieces
from tk.kernels.conv.op import OP as CONV
from tk.kernels.gemm.pointer import ARCHS
from tk.kernels.gemm.problem import dtype_selector

# Everything as `conv` has it, and how many groups were multiplied as one; the precision makes no difference.
OP = Op(
    name="conv_contained",
    tensors=(X, WEIGHT, BIAS, OUT),
    ints=(*CONV.ints, "merge"),
    floats=(),
    locals=conv_locals(X, WEIGHT, OUT),
    selectors={"dtype": dtype_selector(X)},
    dims=("M", "N", "K"),
)


def _plan(point: Point) -> Plan:
    merge = OP.int("merge")
    constraints = [fits_32_bits(OP, X), require(merge > 1, "groups that were multiplied as one")]
    if point.layout == "channels_last":
        constraints.append(require(has_pieces(OUT, 2, 16), "out channels-last, a multiple of 16 channels"))
    return Plan(
        constraints=tuple(constraints),
        serves={"dtype": (DTYPE_AXIS.index(point.dtype),)},
        launches=(contained_launch(point, merge),),
        cost=contained_cost(point, merge),
    )


_CONFIGS = (Config("128_w4", {}),)
_AXES = {"dtype": DTYPE_AXIS, "layout": ("channels_last", "any")}
KERNEL = Kernel("conv_contained", OP, _AXES, dict.fromkeys(ARCHS, _CONFIGS), _plan)
FAMILY = Family(OP, (KERNEL,), sample=lambda kernel, point: True)
