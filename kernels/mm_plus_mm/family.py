"""The family `mm_plus_mm`: its kernels, what tests compile of them, and what is kept as PTX."""

from tk.aot.spec import Kernel, Point
from tk.kernels.mm_plus_mm import pointer, tma
from tk.kernels.mm_plus_mm.op import OP
from tk.kernels.sampled import sampled_family

_SAMPLED = {
    "mm_plus_mm_pointer": ("64x64x64_s3_w4", "32x64x16_s3_w4_fma"),
    "mm_plus_mm_tma": ("128x128x64_s6_pingpong", "128x128x64_s6_coop"),
}


def _usual(kernel: Kernel, point: Point) -> dict[str, object]:
    """The bf16 product of row-major matrices."""
    usual = {"dtype": "bf16", "order": "nn", "out": "same", "aligned": kernel.name.endswith("tma"), "epilogue": "plain"}
    if point.out == "fp32":
        usual["epilogue"] = "matrix"
    if point.axes.get("aligned") and point.dtype == "fp32":  # on Hopper nothing else of it suits 16-byte loads
        usual["dtype"] = "fp32"
    return usual


def _respects(kernel: Kernel, point: Point) -> int:
    """Of Hopper's second schedule the usual product alone."""
    return 0 if point.config.name.endswith("_pingpong") else 1


_KERNELS = (*tma.KERNELS, *pointer.KERNELS)
FAMILY = sampled_family(
    OP, _KERNELS, _SAMPLED, _usual, tuned="mm_plus_mm", portable=("128x128x32_s4_w8",), respects=_respects
)
