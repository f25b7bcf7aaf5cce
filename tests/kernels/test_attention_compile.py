"""Attention's kernels compile for the GPUs that the wheel is for: the interpreter takes more than the compiler does,
and Gluon's have no interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's: install torch-tk[build]")

from tk.aot.build import SHARED_LIMIT
from tk.aot.compile import Target, compile_source, source_of
from tk.aot.grid import enumerate_grid
from tk.flex import family, mods, trace

WANTED = family.Wanted(("bf16",), ((128, 128),), ((128, 128),), paged=True)
TABLE = torch.zeros(1, 3, dtype=torch.bfloat16)
PAIRS = {
    "none": (None, None),
    "documents": (None, mods.and_masks(mods.causal, mods.document(torch.zeros(1, 1, dtype=torch.int32)))),
    "relative": (mods.relative_bias(TABLE, 1), mods.sliding_window(4)),
    "soft_cap": (mods.soft_cap(2.0), mods.causal),
}


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_kernels_compile(pair: tuple, arch: int) -> None:
    """One variant of each kernel: the layout and captures that ask for most."""
    compiled = set()
    for f in family.families(trace.pair(*pair).traced, WANTED):
        for variant in reversed(enumerate_grid(f, arch).variants):
            if variant.kernel.name in compiled:
                continue
            compiled.add(variant.kernel.name)
            for launch in variant.plan.launches:
                artifact = compile_source(source_of(variant.plan, launch, Target(arch)))
                assert artifact.spill_bytes <= launch.max_spill_bytes, launch.fn
                assert artifact.shared <= SHARED_LIMIT[arch]
    assert len(compiled) == (5 if arch == 90 else 3)
