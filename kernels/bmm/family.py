"""The family `bmm`: its kernels, what tests compile of them, and what is kept as PTX."""

from tk.aot.spec import Kernel, Point
from tk.kernels.bmm import pointer, tma_plans
from tk.kernels.bmm.op import OP
from tk.kernels.sampled import sampled_family

_SAMPLED = {
    "bmm_pointer": ("32x32x32_s2_w1", "64x64x64_s3_w4", "64x64x16_s3_w4_fma"),
    "bmm_tma": ("128x128x64_s6_pingpong", "128x128x64_s6_coop"),
}


def _usual(kernel: Kernel, point: Point) -> dict[str, object]:
    """The bf16 product of row-major matrices."""
    usual = {"dtype": "bf16", "order": "nn", "out": "same", "aligned": True, "epilogue": "plain"}
    if point.order == "ss":
        usual["aligned"] = False
    if point.out == "fp32":
        usual["epilogue"] = "matrix"
    return usual


_KERNELS = (*tma_plans.KERNELS, *pointer.KERNELS)
FAMILY = sampled_family(OP, _KERNELS, _SAMPLED, _usual, portable=("128x128x32_s4_w8",))
