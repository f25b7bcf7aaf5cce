"""Attention's kernels compile for the GPUs that the wheel is for: the interpreter takes more than the compiler does,
and Gluon's have no interpreter."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's: install torch-tk[build]")

from triton.tools.disasm import get_sass

from tk.aot.compile import Target, compile_source, source_of
from tk.aot.grid import Variant, enumerate_grid
from tk.build.packs import SHARED_LIMIT, _takes
from tk.flex import mods
from tk.flex.codegen import family
from tk.flex.registry import Registered
from tk.flex.tracing import trace
from tk.kernels.attention import pairs

WANTED = family.Wanted(("bf16",), ((128, 128),), ((128, 128),), paged=True)
TABLE = torch.zeros(1, 3, dtype=torch.bfloat16)
PAIRS = {
    "none": (None, None),
    "documents": (None, mods.and_masks(mods.causal, mods.document(torch.zeros(1, 1, dtype=torch.int32)))),
    "relative": (mods.relative_bias(TABLE, 1), mods.sliding_window(4)),
    "soft_cap": (mods.soft_cap(2.0), mods.causal),
}


@pytest.mark.drawn
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


def test_head_sizes_that_a_file_asks_for() -> None:
    """Some that differ have a kernel for the largest of both."""

    def heads(*sizes: int | tuple[int, int]) -> set[str]:
        traced = trace.pair(mods.soft_cap(1.0), None).traced
        found = family.registered_families(Registered("", traced, sizes, (torch.bfloat16,), True, True, ""))
        return {str(v.point.head) for f in found for v in enumerate_grid(f, 90).variants if v.point.layout == "strided"}

    assert heads(64) == {"to_64x64"}
    assert heads((64, 128), (128, 64)) == {"to_128x128"}
    assert heads(128, 300) == {"to_128x128", "to_512x512"}
    assert heads((512, 64)) == {"to_512x64"}


def test_which_variants_take_the_calls_of_another() -> None:
    """So that a build may leave it out: other configs, and the kernels for every layout, of heads that are as large."""
    wanted = family.Wanted(("bf16", "fp16"), ((64, 64),), ((128, 128), (512, 512)))
    for f in family.families(trace.pair(None, mods.causal).traced, wanted):
        variants = enumerate_grid(f, 90).variants
        for v in variants:
            others = [o for o in variants if o is not v and _takes(o, v)]
            assert all(o.point.layout == "strided" or o.kernel is v.kernel for o in others)
            assert all(o.point.dtype == v.point.dtype and o.point.head.qk >= v.point.head.qk for o in others)
            assert bool(others) == (v.point.layout != "strided" or v.point.head.qk < 512), v.name


@pytest.mark.parametrize("captures", ["none", "wanted"])
def test_a_table_of_scores_keeps_its_addresses_in_registers_on_ampere(captures: str) -> None:
    """With tiles of 64x128 it does not: 20 KB go through memory. Its gradient is written in place."""
    pair = trace.pair(mods.learned_bias(torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)), None).traced
    wanted = family.Wanted(("bf16",), ((64, 64),), ((128, 128),))
    (backward,) = (f for f in family.families(pair, wanted) if f.op.name.endswith("_backward"))
    axes = {"layout": "aligned", "captures": captures, "head": family.Head(64, 64, True)}
    (variant,) = (v for v in enumerate_grid(backward, 80).variants if axes.items() <= v.point.axes.items())
    for launch in variant.plan.launches:
        artifact = compile_source(source_of(variant.plan, launch, Target(80)))
        assert artifact.spill_bytes <= launch.max_spill_bytes, launch.fn


def table_of(dtype: torch.dtype) -> trace.Traced:
    """A mask that tk.sdpa is given."""
    table = torch.zeros(1, 1, 1, 1, dtype=dtype)
    is_bool = dtype == torch.bool
    score, mask = (None, mods.of_bool_table(table)) if is_bool else (mods.learned_bias(table), None)
    return trace.pair(score, mask).traced


@pytest.mark.parametrize(
    ("dtype", "one", "two"), [(torch.bool, "U8", "U16"), (torch.bfloat16, "U16", "32"), (torch.float32, "32", "64")]
)
def test_masks_are_read_by_two_elements(dtype: torch.dtype, one: str, two: str) -> None:
    """By the variant for those that lie so, which comes before the one for any. A step of a thread has 64 scores, and
    the tiles' lists are read by 32 bits."""
    wanted = family.Wanted(("bf16",), ((128, 128),), (), backward=False, decode=False)
    (found,) = family.families(table_of(dtype), wanted)
    variants = {v.point.captured: v for v in enumerate_grid(found, 90).variants}
    assert [*variants] == ["pairs", "any"]
    loads = {name: loads_of(v) for name, v in variants.items()}
    assert loads["pairs"][two] >= 64 > loads["pairs"][one]
    assert loads["any"][one] >= 128 > loads["any"][two]


def loads_of(variant: Variant) -> Counter[str]:
    """From global memory, by their bits."""
    (launch,) = variant.plan.launches
    sass = get_sass(compile_source(source_of(variant.plan, launch, Target(90))).image)
    return Counter(bits or "32" for bits in re.findall(r"\bLDG\.E(?:\.(U8|U16|64|128))?\b", sass))


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_no_product_is_fused_into_the_difference_from_a_maximum(pair: tuple) -> None:
    """Of every launch that makes weights of scores."""
    for f in family.families(trace.pair(*pair).traced, WANTED):
        for variant in enumerate_grid(f, 90).variants:
            launches = [x for x in variant.plan.launches if "mods" in x.args or x.fn.__name__ == "attention_combine"]
            assert launches
            assert all(x.options["enable_fp_fusion"] is False for x in launches), variant.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_the_wheel_has_masks_of_float32_queries(dtype: torch.dtype) -> None:
    """As tk.sdpa makes them of an attn_mask; with gradients, in both precisions and every head size up to 256."""
    traced = table_of(dtype)
    (wanted,) = (w for t, w in pairs.pairs() if t is traced)
    for found in family.families(traced, wanted):
        points = [v.point for v in enumerate_grid(found, 90).variants if v.point.dtype == "fp32"]
        largest = {(p.precision, p.layout) for p in points if p.head.qk == 256}
        assert largest == {(p, layout) for p in ("ieee", "tf32") for layout in ("aligned", "strided")}
