"""The family `conv_input_grad`: its kernel, and what tests compile of it."""

from tk.aot.spec import Family, Kernel, Point
from tk.kernels.conv_input_grad.op import OP
from tk.kernels.conv_input_grad.tma_plans import KERNELS

_SAMPLED = ("128x128x64_s6_coop", "64x128x64_s8_pingpong")


def _sample(kernel: Kernel, point: Point) -> bool:
    """Every value of every axis: bf16, two dimensions and a stride, and what differs from it in one respect."""
    usual = {"dtype": "bf16", "spatial": 2, "store": "channels_last"}
    different = sum(point.axes[axis] != value for axis, value in usual.items())
    return point.config.name in _SAMPLED and different <= 1


FAMILY = Family(OP, KERNELS, _sample, tuned="conv_input_grad")
