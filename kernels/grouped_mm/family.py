"""The families of grouped_mm: their kernels, what tests compile of them, and what is kept as PTX."""

from tk.aot.spec import Family, Kernel, Point
from tk.kernels.grouped_mm import pointer
from tk.kernels.grouped_mm.op import INNER, ROWS

_SAMPLED = {
    "grouped_mm_pointer": "64x64x64_s3_w4",
    "grouped_mm_inner_pointer": "64x64x64_s3_w4",
}


def _sample(kernel: Kernel, point: Point) -> bool:
    """Every value of every axis: the bf16 product of a forward or a backward, and what differs in one respect."""
    if point.config.name != _SAMPLED[kernel.name]:
        return False
    usual = {"dtype": "bf16", "order": "tn" if kernel.op is INNER else "nt", "out": "same", "aligned": True}
    if kernel.op is INNER and point.order not in ("tn", "ss"):
        usual["aligned"] = False
    if point.order == "ss":
        usual |= {"aligned": False, "order": "ss"}
    return sum(point.axes.get(axis, value) != value for axis, value in usual.items()) <= 1


FAMILIES = (
    Family(ROWS, pointer.KERNELS, _sample, tuned="grouped_mm"),
    Family(INNER, pointer.INNER_KERNELS, _sample, tuned="grouped_mm_inner"),
)
