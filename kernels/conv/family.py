"""The family `conv`: its kernels, what tests compile of them, and what is kept as PTX."""

from tk.aot.spec import Family, Kernel, Point
from tk.kernels.conv import depthwise, depthwise_slide, pointer, tma_plans
from tk.kernels.conv.op import OP

_SAMPLED = {
    "conv_pointer": ("64x64x32_s2_w4", "128x32x32_s4_w4", "64x32x16_s3_w4_fma"),
    "conv_tma": ("128x128x64_s6_coop", "128x64x64_s8_coop", "64x128x64_s8_pingpong", "128x128x32_s6_coop_tf32"),
    "conv_depthwise": ("depthwise_32x64_w4", "depthwise_1x512_w4"),
    "conv_depthwise_slide": ("slide_w8_32x32_w4", "slide_w4_8x32_w2", "slide_h8_8x64_w4"),
}


def _sample(kernel: Kernel, point: Point) -> bool:
    """Every value of every axis: bf16, channels-last and without groups, and what differs from it in one respect."""
    usual = {"dtype": "bf16", "layout": "channels_last", "grouped": False, "spatial": 2, "store": "matrix",
             "epilogue": "vector", "taps": 3, "stride": 1}  # fmt: skip
    different = sum(point.axes.get(axis, value) != value for axis, value in usual.items())
    return point.config.name in _SAMPLED[kernel.name] and different <= 1


def _portable(kernel: Kernel, point: Point) -> bool:
    """One small tile and one large, and all that there is of depthwise kernels."""
    return point.config.name in (*_SAMPLED[kernel.name], "128x64x32_s4_w4")


_KERNELS = (*depthwise_slide.KERNELS, *depthwise.KERNELS, *tma_plans.KERNELS, *pointer.KERNELS)
FAMILY = Family(OP, _KERNELS, _sample, tuned="conv", portable=_portable)
