"""The family `mm`: its kernels, what tests compile of them, and what is kept as PTX."""

from tk.aot.spec import Kernel, Point
from tk.kernels.mm import cluster_split_k, gemv, pointer, split_k, tma_plans
from tk.kernels.mm.op import OP
from tk.kernels.sampled import sampled_family

# A tile for tensor cores and one without, what all rows and orders of a GEMV need, and of Hopper's kernels one for each
# schedule.
_SAMPLED = {
    "mm_pointer": ("32x64x64_s4_w4", "16x32x32_s3_w4_fma"),
    "mm_split_k": ("32x64x64_s4_w4_split_k", "16x32x32_s3_w4_fma_split_k"),
    "mm_gemv": ("gemv_2x2048_w4", "gemv_2x1024_w4", "gemv_32x256_w32"),
    "mm_gemv_split_k": ("gemv_128x8_w4_split_k",),
    "mm_tma": (
        "128x128x64_s6_coop",
        "128x128x32_s6_coop_tf32",
        "128x128x64_s6_pingpong",
        "128x128x64_s6_pingpong_c2x1",
    ),
    "mm_tma_stream_k": ("64x64x128_s6_ws_swap_ab_stream_k", "64x64x64_s6_ws_swap_ab_stream_k_tf32"),
    "mm_tma_cluster_split_k": (
        "16x64x128_s5_cluster_split_k_c1x1x4",
        "16x64x64_s5_cluster_split_k_c1x1x4_tf32",
    ),
}
_HOPPER = (*cluster_split_k.KERNELS, *tma_plans.KERNELS)


def _usual(kernel: Kernel, point: Point) -> dict[str, object]:
    """The bf16 product of row-major matrices."""
    epilogues = kernel.axes.get("epilogue", (None,))
    return {
        "dtype": "bf16",
        "order": "nt" if (kernel in _HOPPER and point.dtype == "fp32") or point.axes.get("rows", 1) == 8 else "nn",
        "rows": 1,
        "epilogue": epilogues[-1] if point.order == "ss" else epilogues[0],
        "out": "same",
    }


def _respects(kernel: Kernel, point: Point) -> int:
    """The number of respects in which tests compile a point that differs from the usual one: of Hopper's further
    schedules almost none, for they take the longest to compile."""
    is_usual = kernel.name != "mm_tma" or "_coop" in point.config.name or point.epilogue == "vector"
    return 1 if is_usual else 0


_KERNELS = (*gemv.KERNELS, *_HOPPER, *pointer.KERNELS, *split_k.KERNELS)
# Portable: one small tile and one large, and what the sample has: a split, and both without tensor cores.
FAMILY = sampled_family(OP, _KERNELS, _SAMPLED, _usual, portable=("128x128x32_s4_w4",), respects=_respects)
