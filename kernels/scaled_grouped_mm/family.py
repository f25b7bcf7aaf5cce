"""The family `scaled_grouped_mm`: its kernels, what tests compile of them, and what is kept as PTX."""

from tk.aot.spec import Family, Kernel, Point
from tk.kernels.scaled_grouped_mm import pointer, tma
from tk.kernels.scaled_grouped_mm.op import OP

_SAMPLED = {"scaled_grouped_mm_pointer": "64x64x64_s3_w4", "scaled_grouped_mm_tma": "128x128x128_s6_coop"}


def _sample(kernel: Kernel, point: Point) -> bool:
    """Every value of every axis: bf16, and what differs in one respect."""
    if point.config.name != _SAMPLED[kernel.name]:
        return False
    usual = {"out": "bf16", "accumulation": "slow", "order": "nt"}
    if kernel in pointer.KERNELS:
        usual |= {"aligned": point.order == "nt" and point.arch != 90}
    return sum(point.axes.get(axis, value) != value for axis, value in usual.items()) <= 1


def _portable(kernel: Kernel, point: Point) -> bool:
    return point.config.name in (*_SAMPLED.values(), "128x128x64_s3_w8")


FAMILY = Family(OP, (*tma.KERNELS, *pointer.KERNELS), _sample, tuned="scaled_grouped_mm", portable=_portable)
