"""The family `conv`: its kernels, what tests compile of them, and what is kept as PTX."""

from tk.aot.spec import Kernel, Point
from tk.kernels.conv.forward import depthwise, depthwise_slide, pointer, tma_plans
from tk.kernels.conv.op import OP
from tk.kernels.sampled import sampled_family

_SAMPLED = {
    "conv_pointer": ("64x64x32_s2_w4", "128x32x32_s4_w4", "64x32x16_s3_w4_fma"),
    "conv_tma": ("128x128x64_s6_coop", "128x64x64_s8_coop", "64x128x64_s8_pingpong", "128x128x32_s6_coop_tf32"),
    "conv_depthwise": ("depthwise_32x64_w4", "depthwise_1x512_w4"),
    "conv_depthwise_slide": ("slide_w8_32x32_w4", "slide_w4_8x32_w2", "slide_h8_8x64_w4"),
}


def _usual(kernel: Kernel, point: Point) -> dict[str, object]:
    """bf16, channels-last and without groups."""
    return {"dtype": "bf16", "layout": "channels_last", "grouped": False, "spatial": 2, "store": "matrix",
            "epilogue": "vector", "taps": 3, "stride": 1}  # fmt: skip


_KERNELS = (*depthwise_slide.KERNELS, *depthwise.KERNELS, *tma_plans.KERNELS, *pointer.KERNELS)
# Portable: one small tile and one large, and all that there is of depthwise kernels.
FAMILY = sampled_family(OP, _KERNELS, _SAMPLED, _usual, portable=("128x64x32_s4_w4",))
