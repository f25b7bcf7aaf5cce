"""The families of int4_mm: their kernels, what tests compile of them, and what is kept as PTX."""

from tk.aot.spec import Kernel, Point
from tk.kernels.int4 import dequantize, few_rows, gemv, general, tile
from tk.kernels.int4.op import DEQUANTIZE, OP
from tk.kernels.sampled import sampled_family

_SAMPLED = {
    "int4_few_rows": ("few_rows_64x128_p1_w4_c2", "few_rows_64x128_p1_w8_ahead_c2", "few_rows_64x32_p4_w8_c2"),
    "int4_gemv": ("gemv_32x128_w8", "gemv_32x32_w8"),
    "int4_tile": ("64x128x128_s3_w4", "64x128x32_s4_w4"),
    "int4_split_k": ("64x128x128_s3_w4_split_k", "64x128x32_s4_w4_split_k"),
}


def _usual(kernel: Kernel, point: Point) -> dict[str, object]:
    """bf16."""
    return {"dtype": "bf16", "out": "same", "rows": 8 if kernel.name == "int4_few_rows" else 1, "aligned": True}


_KERNELS = (*few_rows.KERNELS, *gemv.KERNELS, *tile.KERNELS, *general.KERNELS)
FAMILIES = (
    sampled_family(OP, _KERNELS, _SAMPLED, _usual),
    sampled_family(DEQUANTIZE, dequantize.KERNELS, _SAMPLED, _usual),
)
