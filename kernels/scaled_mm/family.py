"""The family `scaled_mm`: its kernels, what tests compile of them, and what is kept as PTX."""

from tk.aot.spec import Kernel, Point
from tk.kernels.sampled import sampled_family
from tk.kernels.scaled_mm import cluster_split_k, pointer, tma_plans
from tk.kernels.scaled_mm.op import OP

_SAMPLED = {
    "scaled_mm_pointer": ("64x64x64_s3_w4",),
    "scaled_mm_tma": ("128x128x128_s6_coop",),
    "scaled_mm_tma_stream_k": ("32x64x128_s16_ws_swap_ab_stream_k", "32x64x256_s8_ws_swap_ab_stream_k"),
    "scaled_mm_tma_cluster_split_k": (
        "16x64x128_s10_cluster_split_k_c1x1x4",
        "16x64x256_s5_cluster_split_k_c1x1x4",
    ),
    "scaled_mm_tma_device_maps": ("128x256x128_s4_coop_device_maps", "128x128x128_s6_coop_device_maps"),
}


def _usual(kernel: Kernel, point: Point) -> dict[str, object]:
    """The product of two e4m3fn matrices in bf16."""
    usual = {"b_dtype": "fp8e4nv", "out": "bf16", "accumulation": "slow", "order": "nt"}
    if kernel in pointer.KERNELS:
        usual |= {"aligned": point.order == "nt" and point.arch != 90}
    else:
        usual |= {"dtype": "fp8e4nv"}
        if kernel.name != "scaled_mm_tma":
            usual["accumulation"] = point.accumulation  # of which each config has one
    return usual


_KERNELS = (*cluster_split_k.KERNELS, *tma_plans.KERNELS, *pointer.KERNELS)
FAMILY = sampled_family(OP, _KERNELS, _SAMPLED, _usual, portable=("128x128x64_s3_w8",))
