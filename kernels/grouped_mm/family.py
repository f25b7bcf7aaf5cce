"""The families of grouped_mm: their kernels, what tests compile of them, and what is kept as PTX."""

from tk.aot.spec import Kernel, Point
from tk.kernels.grouped_mm import pointer, tma
from tk.kernels.grouped_mm.op import INNER, ROWS
from tk.kernels.sampled import sampled_family

_SAMPLED = {
    "grouped_mm_tma": ("128x128x64_s6_pingpong", "128x128x64_s6_coop"),
    "grouped_mm_pointer": ("64x64x64_s3_w4",),
    "grouped_mm_inner_pointer": ("64x64x64_s3_w4",),
}


def _usual(kernel: Kernel, point: Point) -> dict[str, object]:
    """The bf16 product of a forward or a backward."""
    usual = {"dtype": "bf16", "order": "tn" if kernel.op is INNER else "nt", "out": "same", "aligned": True}
    if point.order == "ss":
        usual |= {"aligned": False, "order": "ss"}
    elif kernel.op is INNER and point.order != "tn":
        usual["aligned"] = False
    elif kernel in pointer.KERNELS and point.arch == 90:  # what is aligned along K is the TMA kernel's
        usual |= {"order": "tn"} if point.aligned else {"aligned": False}
    return usual


_ROWS_KERNELS = (*tma.KERNELS, *pointer.KERNELS)
_PORTABLE = ("128x128x64_s3_w8",)
FAMILIES = (
    sampled_family(ROWS, _ROWS_KERNELS, _SAMPLED, _usual, portable=_PORTABLE),
    sampled_family(INNER, pointer.INNER_KERNELS, _SAMPLED, _usual, portable=_PORTABLE),
)
