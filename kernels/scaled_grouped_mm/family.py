"""The family `scaled_grouped_mm`: its kernels, what tests compile of them, and what is kept as PTX."""

from tk.aot.spec import Kernel, Point
from tk.kernels.sampled import sampled_family
from tk.kernels.scaled_grouped_mm import pointer, tma
from tk.kernels.scaled_grouped_mm.op import OP

_SAMPLED = {"scaled_grouped_mm_pointer": ("64x64x64_s3_w4",), "scaled_grouped_mm_tma": ("128x128x128_s6_coop",)}


def _usual(kernel: Kernel, point: Point) -> dict[str, object]:
    """A result in bf16."""
    usual = {"out": "bf16", "accumulation": "slow", "order": "nt"}
    if kernel in pointer.KERNELS:
        usual |= {"aligned": point.order == "nt" and point.arch != 90}
    return usual


_KERNELS = (*tma.KERNELS, *pointer.KERNELS)
FAMILY = sampled_family(OP, _KERNELS, _SAMPLED, _usual, portable=("128x128x64_s3_w8",))
