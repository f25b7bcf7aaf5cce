"""The Hopper kernels of float8 compile, which the interpreter cannot say of Gluon: one variant of each, and of each
kind that is code of its own."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the kernels are Triton's: install torch-tk[build]")

from tk.aot.cache import Artifact
from tk.aot.compile import Target, compile_source, source_of
from tk.aot.grid import enumerate_grid
from tk.build.packs import SHARED_LIMIT
from tk.kernels.scaled_grouped_mm.family import FAMILY as GROUPED
from tk.kernels.scaled_mm.family import FAMILY

VARIANTS = [v for f in (FAMILY, GROUPED) for v in enumerate_grid(f, 90).variants]


def compiled(kernel: str, config: str, **axes: str) -> Artifact:
    axes = dict(dtype="fp8e4nv", b_dtype="fp8e4nv", out="bf16", accumulation="slow") | axes
    v = next(
        v for v in VARIANTS
        if v.kernel.name == kernel and v.point.config.name == config and axes.items() <= v.point.axes.items()
    )  # fmt: skip
    (launch,) = v.plan.launches
    artifact = compile_source(source_of(v.plan, launch, Target(90)))
    assert artifact.spill_bytes <= launch.max_spill_bytes and artifact.shared <= SHARED_LIMIT[90]
    return artifact


@pytest.mark.parametrize(
    ("kernel", "config", "axes"),
    (
        ("scaled_mm_tma", "128x128x128_s6_coop", {}),
        ("scaled_mm_tma", "128x128x128_s6_pingpong_c2x1", {"accumulation": "fast"}),
        ("scaled_mm_tma", "128x128x128_s6_coop", {"b_dtype": "fp8e5", "out": "fp32", "accumulation": "fast"}),
        ("scaled_mm_tma_stream_k", "32x64x128_s16_ws_swap_ab_stream_k", {"dtype": "fp8e5", "out": "fp16"}),
        ("scaled_mm_tma_stream_k", "128x128x128_s6_coop_swap_ab_stream_k", {"accumulation": "fast"}),
        ("scaled_mm_tma_cluster_split_k", "16x64x128_s10_cluster_split_k_c1x1x4", {}),
        ("scaled_mm_tma_cluster_split_k", "64x64x256_s6_cluster_split_k_c1x1x4", {"accumulation": "fast"}),
        ("scaled_grouped_mm_tma", "64x128x128_s8_pingpong", {}),
        ("scaled_grouped_mm_tma", "128x256x128_s4_coop", {"accumulation": "fast"}),
    ),
)
def test_kernels_compile(kernel: str, config: str, axes: dict[str, str]) -> None:
    artifact = compiled(kernel, config, **axes)
    assert artifact.global_scratch == 0 and len(artifact.tensor_maps) == (2 if "cluster" in config else 3)


def test_tensor_maps_made_on_the_device_lie_in_scratch_memory() -> None:
    artifact = compiled("scaled_mm_tma_device_maps", "128x128x128_s6_coop_device_maps")
    assert artifact.global_scratch == 3 * 128 and artifact.global_scratch_alignment == 128
    assert not artifact.tensor_maps
