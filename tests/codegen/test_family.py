"""The records: what the build and the run time read of a generated op."""

from __future__ import annotations

import json
import types
from dataclasses import replace
from functools import cache

import ops
import pytest
import torch

from tk.aot.expr import MODE_BITS, Problem, TensorValue, evaluate_locals
from tk.aot.grid import enumerate_grid
from tk.codegen import families_of
from tk.codegen.errors import TraceError
from tk.codegen.family import Generated, generate
from tk.codegen.tile import ALIGNED, STRIDED
from tk.generated import Declared, interpret, op

NAMES = [name for name, x in vars(ops).items() if isinstance(x, Declared)]


@cache
def generated(name: str) -> Generated:
    declared = getattr(ops, name)
    return generate(declared.fn, declared.signature, name, declared.grad)


@pytest.mark.parametrize("name", NAMES)
def test_some_variant_takes_everything(name: str) -> None:
    """The strided layout asks nothing of a problem; where rows are sorted, that 31 bits number their elements."""
    g = generated(name)
    for graph in g.graphs:
        is_sort = any(v.op == "sort" for k in graph.kernels for v in k.values)
        way = "whole" if g.choices(graph, STRIDED, "whole") else "split"
        plans = [p for s in g.settings(way) if (p := g.plan(graph, STRIDED, s, way)) is not None]
        asked = {c.message.split(" than ")[0] for p in plans for c in p.constraints}
        assert plans and asked == ({"rows of fewer"} if is_sort else set()) and all(p.general for p in plans)


@pytest.mark.parametrize("name", ["scaled_gelu", "statistics", "maybe_scaled"])
def test_the_grid(name: str) -> None:
    family = generated(name).family
    full, sample = enumerate_grid(family, 90), enumerate_grid(family, 90, sample=True)
    assert len(full.variants) > len(sample.variants) >= 3
    names = [v.name for v in full.variants]
    assert len(set(names)) == len(names)


def test_configs_differ_within_a_bucket() -> None:
    """A config's name says what runs: the settings of one layout are told apart by it."""
    g = generated("statistics")
    configs = g.family.kernels[0].configs[90]
    assert len({c.name for c in configs}) == len(configs)


def test_the_backward() -> None:
    def fn(x, weight, scale):
        """Doc."""
        return (x * weight).sum(-1) * scale, x + 1

    declared = op(x="T[..., N]", weight="T[N]", scale="float", T=("bf16", "fp32"), grad=True)(fn)
    g = generate(fn, declared.signature, "fn", grad=True)
    assert g.backward is not None
    assert [f.op.name for f in g.families] == ["fn", "fn_backward"]
    params = {p.name: (p.leading, p.rank) for p in g.backward.op.params if p.kind == "tensor"}
    assert params == {"grad_0": (True, 0), "grad_1": (True, 1), "x": (True, 1), "weight": (False, 1)}
    assert g.backward.op.floats == ("scale",)
    meta = json.loads(g.op.meta)
    assert meta["doc"] == "Doc."
    assert meta["backward"] == {
        "op": "fn_backward", "saved_inputs": [0, 1], "saved_outputs": [], "extra_outputs": 0, "grads": [0, 1],
    }  # fmt: skip


def test_what_the_gradient_does_not_read_is_not_saved() -> None:
    def fn(x, y):
        return x * 2 + y

    g = generate(fn, op(x="fp32[...]", y="fp32[...]", grad=True)(fn).signature, "fn", grad=True)
    assert g.backward is not None and list(g.backward.signature.params) == ["grad_0"]
    assert json.loads(g.op.meta)["backward"]["saved_inputs"] == []


def test_a_tensor_whose_shape_alone_is_needed_is_saved() -> None:
    def fn(x):
        return x.sum(-1)

    g = generate(fn, op(x="fp32[..., N]", grad=True)(fn).signature, "fn", grad=True)
    assert g.backward is not None and list(g.backward.signature.params) == ["grad_0", "x"]


def test_a_size_of_what_is_not_saved_is_read_of_what_is() -> None:
    def fn(x, y):
        return x.sum(0), y.exp().sum()

    g = generate(fn, op(x="fp32[M, N]", y="fp32[M]", grad=True)(fn).signature, "fn", grad=True)
    assert g.backward is not None and list(g.backward.signature.params) == ["grad_0", "grad_1", "y"]
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, requires_grad=True)
    grads = torch.randn(4), torch.randn(())
    given = {"grad_0": grads[0], "grad_1": grads[1], "y": y.detach()}
    found = interpret.evaluate(g.backward.graphs[0].trace.recorded, given, "fn_backward")
    for a, e in zip(found, torch.autograd.grad(fn(x, y), (x, y), grads), strict=True):
        torch.testing.assert_close(a, e)


def test_a_tensor_whose_number_of_elements_alone_is_needed_is_saved() -> None:
    def fn(x, y):
        return x.mean(), y * 2

    g = generate(fn, op(x="fp32[M, N]", y="fp32[M, N]", grad=True)(fn).signature, "fn", grad=True)
    assert g.backward is not None and list(g.backward.signature.params) == ["grad_0", "grad_1", "x"]


@pytest.mark.parametrize("correction", [0, 1, 2])
def test_sizes_less_a_float(correction: int) -> None:
    """Torch takes a correction as a float: N - 1.0 is no index expression."""

    def fn(x):
        return torch.var_mean(x, -1, correction=correction)

    g = generate(fn, op(x="fp32[..., N]", grad=True)(fn).signature, "fn", grad=True)
    assert g.backward is not None
    for part in (g, g.backward):
        assert all(part.plan(part.graphs[0], STRIDED, s) for s in part.choices(part.graphs[0], STRIDED, "whole"))


def test_batch_invariance() -> None:
    """Which setting is predicted the fastest for a row does not depend on how many rows there are."""
    g = generated("softmax")
    graph, t = g.graphs[0], g.op.tensors[0]
    costs = {s.name: p.cost for s in g.settings() if (p := g.plan(graph, ALIGNED, s)) is not None}

    def order(rows: int, bit: int) -> list[str]:
        x = TensorValue((1, 1, rows, 1024), (0, 0, 1024, 1), 15)
        problem = Problem((x, x), (), bit, {"sm_count": 132, "arch": 90, "shared_optin": 0, "l2_bytes": 0})
        problem = replace(problem, locals=evaluate_locals(g.op.locals.values(), problem))
        return sorted(costs, key=lambda name: costs[name].evaluate(problem))

    assert t.name == "x"
    assert order(1, 0) != order(100_000, 0)
    assert order(1, MODE_BITS["batch_invariant"]) == order(100_000, MODE_BITS["batch_invariant"])


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("softmax", (32768, 4096), "1x4096_w4"),
        ("softmax", (131072, 1024), "2x1024_w4"),
        ("softmax", (64, 131072), "loop_"),
        ("scaled_gelu", (100_000, 64), "32x64_w4"),
        ("column_sum", (32768, 512), "split_loop_64x32_w8"),
        ("column_sum", (64, 65536), "loop_64x32_w8"),
    ],
)
def test_what_is_predicted_the_fastest(name: str, shape: tuple[int, int], expected: str) -> None:
    """Rows in one piece while they fit, columns cut where there are many rows and few columns."""
    g = generated(name)
    x = TensorValue((1, 1, *shape), (0, 0, shape[1], 1), 15)
    if name == "column_sum":
        x = TensorValue(shape, (shape[1], 1), 6)
    vector = TensorValue(shape[1:], (1,), 15)
    tensors = [x if p.rank == len(x.sizes) or p.leading else vector for p in g.op.params if p.kind == "tensor"]
    tensors += [x if o.leading is not None else vector for o in g.op.outputs]
    problem = Problem(tensors, (), 0, {"sm_count": 132, "arch": 90, "shared_optin": 0, "l2_bytes": 0})
    problem = replace(problem, locals=evaluate_locals(g.op.locals.values(), problem))
    costs = {}
    for config, setting, way in g.ways():
        plan = g.plan(g.graphs[0], ALIGNED, setting, way)
        if plan is not None and all(c.holds.evaluate(problem) for c in plan.constraints):
            costs[config.name] = plan.cost.evaluate(problem)
    found = min(costs, key=lambda n: costs[n])
    assert found.startswith(expected) if expected.endswith("_") else found == expected, costs


def test_fp8_e4m3_needs_sm89() -> None:
    def fn(x):
        import torch

        return x.to(torch.float8_e4m3fn)

    family = generate(fn, op(x="fp32[...]")(fn).signature, "fn").family
    assert enumerate_grid(family, 90).variants and not enumerate_grid(family, 80).variants


def test_only_what_a_file_declares_itself() -> None:
    def own(x):
        return x + 1

    own.__module__ = "user"
    module = types.ModuleType("user")
    module.own, module.imported = op(x="fp32[M]")(own), ops.total  # type: ignore[attr-defined]
    assert [f.op.name for f in families_of(module)] == ["own"]


def test_a_function_without_a_name() -> None:
    fn = lambda x: x + 1  # noqa: E731
    with pytest.raises(TraceError, match="an op needs a name"):
        generate(fn, op(x="fp32[M]")(fn).signature, fn.__name__)


def test_a_piece_that_others_leave_is_not_negative() -> None:
    def pieces(x):
        two, rest = x.split([2, x.shape[1] - 2], 1)
        return two * 2, rest + 1

    made = generate(pieces, op(x="fp32[M, N]")(pieces).signature, "pieces")
    (check,) = [c for c in made.op.checks if "would have a size" in c.message]
    assert check.message == "result 1 would have a size of N - 2"

    def holds(n: int) -> bool:
        problem = Problem((TensorValue((4, n), (n, 1), 6),), (), 0, {"sm_count": 132})
        problem = replace(problem, locals=evaluate_locals(made.op.locals.values(), problem))
        return bool(check.holds.evaluate(problem))

    assert holds(2) and holds(7) and not holds(1)


def test_what_is_alike_in_several_graphs_is_one_local() -> None:
    """There may be 64 locals. With one for every graph, four bools beside a sum over columns were too many."""

    @op(x="fp32[N, M]", a="bool", b="bool", c="bool", tall="bool")
    def fn(x, a, b, c, tall):
        x = x * 2 if a else x
        x = x.exp() if b else x
        x = x - x.amax(1, keepdim=True) if c else x
        y = x if tall else torch.nn.functional.pad(x, (0, 0, 0, 1))
        return y.square().sum(0), x.sum(1)

    g = generate(fn.fn, fn.signature, "fn")
    parts = {p for graph in g.graphs for p in graph.parts}
    assert len(g.graphs) == 16 and len(g.op.locals) < 16
    of_columns = {p.cut for p in parts if not (p.are_rows or p.interleaved)}
    assert len(of_columns) == 2  # with and without one more row
    assert len({p.name for p in parts}) == len(parts)  # no name has two meanings
