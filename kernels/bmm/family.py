"""The family `bmm`: its kernels, what tests compile of them, and what is kept as PTX."""

from tk.aot.spec import Family, Kernel, Point
from tk.kernels.bmm import pointer, tma_plans
from tk.kernels.bmm.op import OP

_SAMPLED = {
    "bmm_pointer": ("32x32x32_s2_w1", "64x64x64_s3_w4", "64x64x16_s3_w4_fma"),
    "bmm_tma": ("128x128x64_s6_pingpong", "128x128x64_s6_coop"),
}


def _sample(kernel: Kernel, point: Point) -> bool:
    """Every value of every axis: the bf16 product of row-major matrices, and what differs from it in one respect."""
    if point.config.name not in _SAMPLED[kernel.name]:
        return False
    usual = {"dtype": "bf16", "order": "nn", "out": "same", "aligned": True, "epilogue": "plain"}
    if point.order == "ss":
        usual["aligned"] = False
    if point.out == "fp32":
        usual["epilogue"] = "matrix"
    return sum(point.axes.get(axis, value) != value for axis, value in usual.items()) <= 1


def _portable(kernel: Kernel, point: Point) -> bool:
    return point.config.name in (*_SAMPLED[kernel.name], "128x128x32_s4_w8")


FAMILY = Family(OP, (*tma_plans.KERNELS, *pointer.KERNELS), _sample, tuned="bmm", portable=_portable)
