"""How functions that draw random numbers are traced, and that their kernels compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_generated_compile import SM90, compile_all

from tk.aot.compile import compile_source, source_of
from tk.codegen import source
from tk.codegen.errors import TraceError
from tk.codegen.family import generate
from tk.codegen.tile import ALIGNED, ROWS, Layout
from tk.generated import op


def made(fn, **texts):
    declared = op(**texts)(fn)
    return generate(fn, declared.signature, "f")


def test_seed_and_offset_come_after_the_functions_own_parameters() -> None:
    found = made(lambda x, a: F.dropout(x, a), x="fp32[M]", a="float")
    assert found.op.schema.startswith("f(Tensor x, float a, Tensor seed, SymInt offset, int config")
    assert "seed" not in made(lambda x: x + 1, x="fp32[M]").op.schema


def test_a_parameter_of_another_kind_is_refused() -> None:
    with pytest.raises(TraceError, match=r"come of its parameters seed='i64\[\]' and offset='int'; seed='float'"):
        made(lambda x, seed: torch.rand_like(x) + seed, x="fp32[M]", seed="float")


def test_probability() -> None:
    with pytest.raises(TraceError, match=r"between 0 and 1, but got 1\.5"):
        made(lambda x: F.dropout(x, 1.5), x="fp32[M]")


def test_every_call_has_its_own_stream() -> None:
    found = made(lambda x: torch.rand_like(x) + torch.rand_like(x), x="fp32[M]")
    assert sorted(v.data for v in found.graphs[0].kernels[0].values if v.op == "random") == [0, 1]


def test_the_order_of_leading_dimensions_is_kept() -> None:
    assert [p.in_order for p in made(lambda x: torch.rand_like(x), x="fp32[...]").op.params] == [True, False, False]
    assert not made(lambda x: x + 1, x="fp32[...]").op.params[0].in_order


def test_counting_from_the_front_is_seen() -> None:
    with pytest.raises(TraceError, match="how many dimensions"):
        made(lambda x: F.dropout(x, 0.5).sum(0), x="fp32[..., N]")


def test_four_words_of_a_block_are_used_in_rows() -> None:
    found = made(lambda x: torch.rand_like(x), x="fp32[M, N]")
    for layout in (ALIGNED, ROWS):
        ((one, own),) = found.scheduled(found.graphs[0].kernels, layout, found.settings()[0])
        assert "device.random_run(" in source.text_of(one.launch(own).fn)
        assert not any("offset" in c.message for c in one.constraints)  # wherever it begins


def test_what_is_read_stands_before_what_is_drawn() -> None:
    def ops_of(fn, dtype: str) -> str:
        found = made(fn, x=dtype, y=dtype, z=dtype)
        return " ".join(v.op for v in found.graphs[0].kernels[0].values if v.op in ("load", "random", "store"))

    # The key comes first of all. No more than fits beside the random bits is read ahead.
    assert ops_of(lambda x, y, z: F.dropout(x, 0.5) * y + z, "bf16[M]") == "load load load load random store"
    assert ops_of(lambda x, y, z: F.dropout(x, 0.5) * y + z, "fp32[M]") == "load load load random load store"


@pytest.mark.parametrize("layout", [ALIGNED, ROWS], ids=lambda x: x.name)
def test_nothing_is_spilled_where_rows_begin_within_a_block(layout: Layout) -> None:
    found = made(lambda out: out.copy_(torch.rand_like(out)), out="bf16[...]")
    plan = found.plan(found.graphs[0], layout, found.settings()[0])
    assert plan is not None
    for launch in plan.launches:
        assert compile_source(source_of(plan, launch, SM90)).spill_bytes == 0


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (F.dropout(x, 0.5), torch.randn_like(x)),
        lambda x: (torch.randint(0, 2**40, x.shape, device=x.device), (x * torch.rand_like(x)).sum(-1)),
        lambda x: (torch.rand(x.shape, dtype=torch.float64, device=x.device), torch.rand_like(x).bfloat16()),
    ],
)
def test_compiles(fn) -> None:
    assert compile_all(made(fn, x="fp32[M, N]")) >= 3
