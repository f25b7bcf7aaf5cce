"""mm, addmm and linear: out = activation(alpha * a @ b + beta * bias).

The op and its problem are in mm_op.py. mm_pointer.py takes every product on every GPU, mm_gemv.py those of a few rows;
mm_hopper.py and mm_hopper_rows.py are what sm_90 runs where the operands suit TMA.
"""

from tk.aot.spec import Family, Kernel, Point
from tk.kernels import mm_gemv, mm_hopper, mm_hopper_rows, mm_pointer
from tk.kernels.mm_op import OP

# A tile for tensor cores and one without, what all rows and orders of a GEMV need, and of Hopper's kernels one for each
# way of using them.
_SAMPLED = {
    "mm_pointer": ("32x64x64_s4_w4", "16x32x32_s3_w4_fma"),
    "mm_split_k": ("split_32x64x64_s4_w4", "split_16x32x32_s3_w4_fma"),
    "mm_gemv": ("gemv_2x128x16_w4", "gemv_2x128x8_w4", "gemv_32x32x8_w32"),
    "mm_gemv_split": ("gemv_split_128x4x2_w4",),
    "mm_hopper_tiles": ("tiles_128x128", "tiles_128x128_tf32", "turns_128x128", "turns_128x128_c2"),
    "mm_hopper_split": ("split_64x64", "split_64x64_tf32"),
    "mm_hopper_rows": ("rows_64x16_c4_r2", "rows_64x16_c4_r2_tf32"),
}
_HOPPER = (*mm_hopper_rows.KERNELS, *mm_hopper.KERNELS)


def _sample(kernel: Kernel, point: Point) -> bool:
    """Every value of every axis: the bf16 product of row-major matrices, and what differs from it in one respect."""
    if point.config.name not in _SAMPLED[kernel.name]:
        return False
    epilogues = kernel.axes.get("epilogue", (None,))
    usual = {
        "dtype": "bf16",
        "order": "nt" if (kernel in _HOPPER and point.dtype == "fp32") or point.axes.get("rows", 1) == 8 else "nn",
        "rows": 1,
        "epilogue": epilogues[-1] if point.order == "ss" else epilogues[0],
        "out": "same",
    }
    return sum(point.axes.get(axis, value) != value for axis, value in usual.items()) <= 1


def _portable(kernel: Kernel, point: Point) -> bool:
    """One small tile and one large, and what the sample has: a split, and both without tensor cores."""
    return point.config.name in (*_SAMPLED[kernel.name], "128x128x32_s4_w4")


FAMILY = Family(OP, (*mm_gemv.KERNELS, *_HOPPER, *mm_pointer.KERNELS), _sample, tuned="mm", portable=_portable)
