"""The families of int4_mm: their kernels, what tests compile of them, and what is kept as PTX."""

from tk.aot.spec import Family, Kernel, Point
from tk.kernels.int4 import dequantize, few_rows, gemv, general, tile
from tk.kernels.int4.op import DEQUANTIZE, OP

_SAMPLED = {
    "int4_few_rows": ("few_rows_64x128_p1_w4_c2", "few_rows_64x128_p1_w8_ahead_c2", "few_rows_64x32_p4_w8_c2"),
    "int4_gemv": ("gemv_32x128_w8", "gemv_32x32_w8"),
    "int4_tile": ("64x128x128_s3_w4", "64x128x32_s4_w4"),
    "int4_split_k": ("64x128x128_s3_w4_split_k", "64x128x32_s4_w4_split_k"),
}


def _sample(kernel: Kernel, point: Point) -> bool:
    """Every value of every axis: bf16, and what differs from it in one respect."""
    if kernel.name in _SAMPLED and point.config.name not in _SAMPLED[kernel.name]:
        return False
    usual = {"dtype": "bf16", "out": "same", "rows": 8 if kernel.name == "int4_few_rows" else 1, "aligned": True}
    return sum(point.axes.get(axis, value) != value for axis, value in usual.items()) <= 1


def _portable(kernel: Kernel, point: Point) -> bool:
    return kernel.name not in _SAMPLED or point.config.name in _SAMPLED[kernel.name]


FAMILIES = (
    Family(
        OP,
        (*few_rows.KERNELS, *gemv.KERNELS, *tile.KERNELS, *general.KERNELS),
        _sample,
        tuned="int4_mm",
        portable=_portable,
    ),
    Family(DEQUANTIZE, dequantize.KERNELS, _sample, tuned="int4_dequantize", portable=_portable),
)
