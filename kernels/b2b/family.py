"""The family of b2b_gemm whose f goes by its name."""

from tk.aot.spec import REDUCED_FLOATS, Family, Kernel, Point
from tk.kernels.b2b.fused import kernel, named
from tk.kernels.b2b.op import BUILTIN, Problem

PROBLEM = Problem(BUILTIN, REDUCED_FLOATS, (("activation", "int"),))


def sample(kernel: Kernel, point: Point) -> bool:
    """Every value of every axis."""
    usual = {"dtype": "bf16", "size": (128, 128), "layout": "left"}
    if point.layout == "strided":
        usual |= {"layout": "strided", "size": (256, 128)}
    return sum(point.axes[axis] != value for axis, value in usual.items()) <= 1


def portable(kernel: Kernel, point: Point) -> bool:
    return point.layout == "strided"


FAMILY = Family(PROBLEM.op, (kernel(PROBLEM, named),), sample, tuned="b2b_fused", portable=portable)
