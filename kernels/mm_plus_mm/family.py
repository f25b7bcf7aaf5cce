"""The family `mm_plus_mm`: its kernels, what tests compile of them, and what is kept as PTX."""

from tk.aot.spec import Family, Kernel, Point
from tk.kernels.mm_plus_mm import pointer, tma
from tk.kernels.mm_plus_mm.op import OP

_SAMPLED = {
    "mm_plus_mm_pointer": ("64x64x64_s3_w4", "32x64x16_s3_w4_fma"),
    "mm_plus_mm_tma": ("128x128x64_s6_pingpong", "128x128x64_s6_coop"),
}


def _sample(kernel: Kernel, point: Point) -> bool:
    """Every value of every axis: the bf16 product of row-major matrices, and what differs from it in one respect. Of
    Hopper's second schedule the product alone."""
    if point.config.name not in _SAMPLED[kernel.name]:
        return False
    usual = {"dtype": "bf16", "order": "nn", "out": "same", "aligned": kernel.name.endswith("tma"), "epilogue": "plain"}
    if point.out == "fp32":
        usual["epilogue"] = "matrix"
    if point.axes.get("aligned") and point.dtype == "fp32":  # on Hopper nothing else of it suits 16-byte loads
        usual["dtype"] = "fp32"
    differs = sum(point.axes.get(axis, value) != value for axis, value in usual.items())
    return differs <= (0 if point.config.name.endswith("_pingpong") else 1)


def _portable(kernel: Kernel, point: Point) -> bool:
    return point.config.name in (*_SAMPLED[kernel.name], "128x128x32_s4_w8")


FAMILY = Family(OP, (*tma.KERNELS, *pointer.KERNELS), _sample, tuned="mm_plus_mm", portable=_portable)
