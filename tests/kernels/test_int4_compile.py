"""int4_mm's kernel of few rows compiles: what moves between lanes, where nothing should, is the compiler's error, and
the interpreter does not see it."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the kernels are Triton's: install torch-tk[build]")

from tk.aot.compile import Target, compile_source, source_of
from tk.aot.grid import enumerate_grid
from tk.build.packs import SHARED_LIMIT
from tk.kernels.int4.family import FAMILIES

VARIANTS = {
    (v.point.config.name, v.point.rows, v.point.dtype): v
    for v in enumerate_grid(FAMILIES[0], 90).variants
    if v.kernel.name == "int4_few_rows"
}


@pytest.mark.parametrize(
    "variant",
    (
        ("few_rows_32x128_p2_w16", 8, "bf16"),
        ("few_rows_64x128_p1_w4_c2", 32, "fp16"),
        ("few_rows_64x128_p1_w8_ahead_c2", 16, "bf16"),
        ("few_rows_128x128_p1_w4_c4", 8, "fp16"),
        ("few_rows_64x64_p2_w8_c2", 16, "bf16"),
        ("few_rows_64x32_p4_w8_c2", 16, "bf16"),
    ),
    ids=str,
)
def test_few_rows_stay_in_registers(variant: tuple[str, int, str]) -> None:
    v = VARIANTS[variant]
    (launch,) = v.plan.launches
    artifact = compile_source(source_of(v.plan, launch, Target(90)))
    assert artifact.spill_bytes == 0 and artifact.shared <= SHARED_LIMIT[90]
    c = v.point.config
    # The exchange of sums is all that shared memory is for.
    assert artifact.shared == 4 * c.num_warps * c.cols * v.point.rows and artifact.cluster == c.cluster
