"""The family `conv_weight_grad`: its kernels, what tests compile of them, and what is kept as PTX."""

from tk.aot.spec import Kernel, Point
from tk.kernels.conv.weight_grad import depthwise, depthwise_slide, pointer, tma_plans
from tk.kernels.conv.weight_grad.op import OP
from tk.kernels.sampled import sampled_family

_SAMPLED = {
    "weight_grad_pointer": ("32x32x32_s4_w4", "32x64x32_s2_w4", "32x32x16_s3_w4_fma"),
    "weight_grad_tma": ("128x128x64_s6_coop",),
    "weight_grad_tma_whole": ("128x128x64_s6_coop_whole",),
    "weight_grad_slide": ("slide_w4_32x32_w4",),
    "weight_grad_depthwise": ("depthwise_32x64_w4", "depthwise_1x1024_w4"),
}


def _usual(kernel: Kernel, point: Point) -> dict[str, object]:
    """bf16, channels-last and without groups."""
    return {"dtype": "bf16", "layout": "channels_last", "grouped": False, "spatial": 2, "taps": 3, "stride": 1}


_KERNELS = (*depthwise_slide.KERNELS, *depthwise.KERNELS, *tma_plans.KERNELS, *pointer.KERNELS)
# Portable: one small tile and one large, and all that there is of depthwise kernels.
FAMILY = sampled_family(OP, _KERNELS, _SAMPLED, _usual, portable=("64x64x32_s4_w4",))
