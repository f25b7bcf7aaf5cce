"""The families of grouped_mm: their kernels, what tests compile of them, and what is kept as PTX."""

from tk.aot.spec import Family, Kernel, Point
from tk.kernels.grouped_mm import pointer, tma
from tk.kernels.grouped_mm.op import INNER, ROWS

_SAMPLED = {
    "grouped_mm_tma": ("128x128x64_s6_pingpong", "128x128x64_s6_coop"),
    "grouped_mm_pointer": ("64x64x64_s3_w4",),
    "grouped_mm_inner_pointer": ("64x64x64_s3_w4",),
}


def _sample(kernel: Kernel, point: Point) -> bool:
    """Every value of every axis: the bf16 product of a forward or a backward, and what differs in one respect."""
    if point.config.name not in _SAMPLED[kernel.name]:
        return False
    usual = {"dtype": "bf16", "order": "tn" if kernel.op is INNER else "nt", "out": "same", "aligned": True}
    if point.order == "ss":
        usual |= {"aligned": False, "order": "ss"}
    elif kernel.op is INNER and point.order != "tn":
        usual["aligned"] = False
    elif kernel in pointer.KERNELS and point.arch == 90:  # what is aligned along K is the TMA kernel's
        usual |= {"order": "tn"} if point.aligned else {"aligned": False}
    return sum(point.axes.get(axis, value) != value for axis, value in usual.items()) <= 1


def _portable(kernel: Kernel, point: Point) -> bool:
    return point.config.name in (*_SAMPLED[kernel.name], "128x128x64_s3_w8")


FAMILIES = (
    Family(ROWS, (*tma.KERNELS, *pointer.KERNELS), _sample, tuned="grouped_mm", portable=_portable),
    Family(INNER, pointer.INNER_KERNELS, _sample, tuned="grouped_mm_inner", portable=_portable),
)
