"""How sums over rows, splits and loops are put into launches: what is read how often."""

from __future__ import annotations

import ops
import pytest

from tk.codegen.family import Generated, generate
from tk.codegen.ir import Kernel
from tk.codegen.passes import run
from tk.codegen.printing.loops import loops
from tk.codegen.scheduling.kinds import choices, kind_of
from tk.codegen.scheduling.settings import SETTINGS, Setting, replaced, settings_of
from tk.codegen.stages import text
from tk.codegen.tile import ALIGNED, LAYOUTS, ROWS, choose_tile
from tk.codegen.ways import Graph
from tk.generated import Declared, op
from tk.kernels.generated import losses, norms, reductions, softmax


def generated(declared: Declared, grad: bool = False) -> Generated:
    found = generate(declared.fn, declared.signature, declared.name, grad)
    return found.backward if grad and found.backward else found


def reads(kernels: tuple[Kernel, ...], buffer: str) -> int:
    return sum(v.op == "load" and v.buffer == buffer for k in kernels for v in k.values)


def kinds(kernels: tuple[Kernel, ...]) -> list[str]:
    return [kind_of(k, choose_tile(k, ALIGNED)).name for k in kernels]


@pytest.mark.parametrize("declared", [norms.rms_norm, norms.layer_norm, norms.add_rms_norm, norms.add_layer_norm])
def test_the_backward_of_a_norm_reads_everything_once(declared: Declared) -> None:
    graph = generated(declared, grad=True).graphs[0]
    assert kinds(graph.kernels_of("walk")) == ["walk", "outer"]
    x = "result_1" if declared.name.startswith("add_") else "x"
    assert reads(graph.kernels_of("walk"), x) == reads(graph.kernels_of("walk"), "grad_0") == 1
    assert reads(graph.kernels, x) == 2, "without walking it is read again for the weight"
    assert graph.walk is not None
    (axis,) = [a for a in graph.kernels_of("walk")[0].axes if a.walk]
    assert axis.size == graph.walk.symbol


@pytest.mark.parametrize("declared", [reductions.column_sum, softmax.softmax])
def test_without_rows_that_are_reduced_nothing_walks(declared: Declared) -> None:
    """Neither where no other launch has the rows, nor where nothing is added up over them."""
    graph = generated(declared).graphs[0]
    assert graph.kernels_of("walk") == () and graph.walk is None


def test_sums_over_rows_of_a_split_backward_are_outer() -> None:
    """A row's statistics, read beside the rows themselves, do not make the launch one that reduces rows."""
    graph = generated(norms.layer_norm, grad=True).graphs[0]
    assert kinds(graph.kernels_of("split")).count("inner") == 1


def test_every_way_has_settings_and_its_configs_their_names() -> None:
    g = generated(norms.rms_norm, grad=True)
    ways = {way for _, _, way in g.ways()}
    assert ways == {"whole", "split", "walk"}
    assert all(config.name.startswith(f"{way}_") for config, _, way in g.ways() if way != "whole")
    graph: Graph = g.graphs[0]
    # Where a split one serves what the layouts take, the whole one is left to the strided calls.
    assert {layout.name for layout in LAYOUTS if g.choices(graph, layout, "whole")} == {"columns", "strided"}
    assert all(g.choices(graph, layout, "split") for layout in LAYOUTS)


def test_main_is_the_launch_that_does_most() -> None:
    """Not the count of rows, which comes before it."""
    g = generated(losses.cross_entropy_mean, grad=True)
    graph = g.graphs[0]
    assert kinds(graph.kernels)[g.main(graph.kernels)] == "inner"


@pytest.mark.parametrize("declared", [losses.cross_entropy_sum, losses.cross_entropy_mean], ids=lambda d: d.name)
def test_main_is_the_launch_that_reads_the_rows(declared: Declared) -> None:
    """Not the sum of what they come to, which reads a logit of each at its target."""
    g = generated(declared)
    for way in ("whole", "split"):
        kernels = g.graphs[0].kernels_of(way)
        main = kernels[g.main(kernels)]
        assert any(v.op == "load" and v.buffer == "x" and v.axes == {"a0", "r0"} for v in main.values)


@pytest.mark.parametrize(
    ("declared", "grad", "count"),
    [
        (softmax.softmax, False, 2),
        (softmax.softmax, True, 2),
        (softmax.logsumexp, False, 1),
        (norms.rms_norm, False, 2),
        (reductions.row_sum, False, 1),
        (losses.cross_entropy_rows, False, 1),
    ],
)
def test_loops_over_long_rows(declared: Declared, grad: bool, count: int) -> None:
    """The maximum and the sum of exponentials are one."""
    kernel = generated(declared, grad).graphs[0].kernels[0]
    assert loops(kernel, choose_tile(kernel, ALIGNED)) == count


def test_hints_are_in_loops_alone() -> None:
    """There what is read again stays, and what is read for the last time goes."""
    printed = text(generated(softmax.softmax), "source", (ALIGNED,))
    parts = [p for p in printed.split("# --- ") if "bf16, aligned" in p]
    (looped,) = [p for p in parts if ", looped" in p]
    assert len(parts) == 3 and not any("eviction_policy" in p for p in parts if p != looped)
    assert looped.index("evict_last") < looped.index("evict_first")


def test_exponentials_are_divided_by_once_a_row() -> None:
    (kernel,) = generated(softmax.softmax).graphs[0].kernels
    assert [v.axes for v in kernel.values if v.op == "reciprocal"] == [frozenset({"a0"})]
    assert not any(v.op == "div" for v in kernel.values)
    fp32 = generated(softmax.softmax).graphs[2]
    assert fp32.trace.dtypes == {"T": "fp32"} and any(v.op == "div" for k in fp32.kernels for v in k.values)


@pytest.mark.parametrize(("tanh", "op_name"), [(False, "erfc"), (True, "sigmoid")])
def test_gelu_has_no_library_call_where_it_is_rounded(tanh: bool, op_name: str) -> None:
    from tk.kernels.generated.activations import gelu

    for graph in generated(gelu).graphs:
        found = {v.op for k in graph.kernels for v in k.values}
        if graph.trace.flags["tanh"] == tanh:
            is_rounded = graph.trace.dtypes["T"] != "fp32"
            assert (op_name in found) == is_rounded
            assert (("tanh" if tanh else "erf") in found) == (not is_rounded)


def test_a_division_by_a_small_sum_stays() -> None:
    """Its reciprocal may be infinite."""

    @op(x="bf16[M, N]")
    def normalized(x):
        return x / x.float().sum(-1, keepdim=True).to(x.dtype)

    (kernel,) = generated(normalized).graphs[0].kernels
    assert any(v.op == "div" for v in run(kernel).values)


def test_other_settings_for_a_while() -> None:
    one = Setting(1, 64, 1)
    table = {kind: {layout.name: (one,) for layout in LAYOUTS} for kind in SETTINGS}
    with replaced(table):
        assert settings_of("inner", "aligned") == (one,)
        assert generated(ops.softmax).settings() == (one,)
    assert settings_of("inner", "aligned") == SETTINGS["inner"]["aligned"]


def test_a_launch_that_two_ways_have_is_one() -> None:
    @op(x="fp32[M, N]", y="fp32[M, N]")
    def both(x, y):
        return x.sum(0), y.exp()

    graph = generated(both).graphs[0]
    assert graph.kernels[1] in graph.kernels_of("split") and graph.kernels[0] not in graph.kernels_of("split")


def test_vectors_at_any_address_want_rows() -> None:
    """What is read elsewhere in every row has none."""

    @op(x="fp32[M, N]")
    def reversed_rows(x):
        return x.flip(-1).sum(-1)

    (backwards,) = generated(reversed_rows).graphs[0].kernels
    (rows,) = generated(reductions.row_sum).graphs[0].kernels
    assert any(s.vectors for s in choices(rows, ROWS)) and not any(s.vectors for s in choices(backwards, ROWS))
