"""Kernels that write at indices: what is refused, which variants there are, and that they compile."""

from __future__ import annotations

import pytest
import scatter_cases
import torch
from test_generated_compile import SM90

from tk.aot.compile import Target, compile_source, source_of
from tk.aot.grid import enumerate_grid
from tk.codegen.errors import TraceError
from tk.codegen.family import generate
from tk.codegen.tile import ALIGNED, LAYOUTS, STRIDED
from tk.generated import op

BY_NAME = {c.name: c for c in scatter_cases.CASES}


def build(name: str):
    case = BY_NAME[name]
    return generate(case.fn, op(**case.texts)(case.fn).signature, "f")


@pytest.mark.parametrize(
    "name", ["scatter_add_bf16", "amax_fp32", "scatter", "in_place", "scatter_add_fp64", "amin_u8"]
)
def test_compiles(name: str) -> None:
    found = build(name)
    for way in ("whole", "deterministic"):
        for layout in (ALIGNED, STRIDED):
            plans = [p for s in found.settings(way) if (p := found.plan(found.graphs[0], layout, s, way))]
            for launch in [one for p in plans[:1] for one in p.launches]:
                compile_source(source_of(plans[0], launch, SM90))
            assert bool(plans) == (way == "whole" or bool(found.graphs[0].kernels_of("deterministic")))


def test_only_what_depends_on_order_is_said_to() -> None:
    def flags(name: str) -> set[tuple[bool, bool]]:
        found = build(name)
        plans = [(way, found.plan(found.graphs[0], LAYOUTS[-1], s, way))
                 for way in ("whole", "deterministic") for s in found.settings(way)]  # fmt: skip
        return {(way != "whole", p.deterministic) for way, p in plans if p is not None}

    assert flags("scatter_add_bf16") == flags("scatter") == {(False, False), (True, True)}
    assert flags("scatter_add_i64") == flags("amax_fp32") == {(False, True)}
    assert flags("scatter_add_fp64") == {(False, False)}


def test_16_bits_are_added_up_in_32() -> None:
    (kernels,) = [g.kernels for g in build("scatter_add_bf16").graphs]
    puts = [v for k in kernels for v in k.values if v.op == "store" and v.data == "add"]
    assert [v.dtype for v in puts] == ["fp32"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_few_additions_of_16_bits_are_in_pairs(dtype: str) -> None:
    """One launch writes the base, the next adds to it; of the result nothing is kept in fp32."""

    def add(x, at, y):
        return x.index_add(0, at, y)

    found = generate(add, op(x=f"{dtype}[M, N]", at="i64[K]", y=f"{dtype}[K, N]")(add).signature, "add")
    kernels = found.graphs[0].kernels_of("rounded")
    assert len(kernels) == 2 and not any(b.kind == "scratch" for k in kernels for b in k.buffers)
    plan = found.plan(found.graphs[0], ALIGNED, found.settings("rounded")[0], "rounded")
    assert plan is not None and not plan.deterministic
    assert any("additions a place" in c.message for c in plan.constraints)
    text = compile_source(source_of(plan, plan.launches[-1], Target(90, ptx=True))).image.decode()
    assert f"add.noftz.{dtype.replace('fp', 'f')}x2" in text and "atom." not in text
    of = {arch: {v.point.config.name for v in enumerate_grid(found.family, arch).variants} for arch in (80, 90)}
    assert any("rounded" in c for c in of[90]) and not any("rounded" in c for c in of[80])


def test_what_is_written_in_place_has_no_neighbour_touched() -> None:
    def add(x, at, y):
        x.index_add_(0, at, y)

    found = generate(add, op(x="bf16[M, N]", at="i64[K]", y="bf16[K, N]")(add).signature, "add")
    assert not found.settings("rounded")


def test_an_argument_written_in_place_is_not_copied_first() -> None:
    def add(x, at, y):
        x.index_add_(0, at, y)

    found = generate(add, op(x="fp32[M, N]", at="i64[K]", y="fp32[K, N]")(add).signature, "add")
    assert [len(g.kernels) for g in found.graphs] == [1]


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x, at, y: x.scatter_reduce(0, at, y, "prod"), "there are no atomic products"),
        (lambda x, at, y: x.scatter(0, at, y, reduce="multiply"), "there are no atomic products"),
        (lambda x, at, y: torch.index_put(x, (x > 0,), y[0]), "use torch.where"),
    ],
)
def test_refusals(fn, message: str) -> None:
    texts = {"x": "fp32[M, N]", "at": "i64[K, N]", "y": "fp32[K, N]"}
    with pytest.raises(TraceError, match=message):
        generate(fn, op(**texts)(fn).signature, "f")


@pytest.mark.parametrize("at", ["i64[K]", "i64[]", "i32[]"])
def test_an_index_out_of_bounds_is_a_trap(at: str) -> None:
    """In the machine's code too, of indices of any number of dimensions."""

    def select(x, at):
        return x.index_select(0, at)

    found = generate(select, op(x="fp32[M, N]", at=at)(select).signature, "f")
    plans = (found.plan(found.graphs[0], LAYOUTS[-1], setting) for setting in found.settings())
    plan = next(plan for plan in plans if plan is not None)
    (launch,) = plan.launches
    assert "@p trap;" in compile_source(source_of(plan, launch, Target(80, ptx=True))).image.decode()
