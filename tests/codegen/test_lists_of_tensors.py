"""Functions over lists of tensors: what is made of them, what compiles, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tk.aot.compile import Target, compile_source, source_of
from tk.aot.grid import enumerate_grid
from tk.codegen.errors import TraceError
from tk.codegen.family import generate_any
from tk.codegen.lists import ALIGNED, ANY, GeneratedLists
from tk.generated import op
from tk.kernels.generated import optimizers
from tk.kernels.lists import table

SM90 = Target(90)


def made(fn: Callable[..., Any], **texts: Any) -> GeneratedLists:
    declared = op(**texts)(fn)
    found = generate_any(fn, declared.signature, fn.__name__, declared.grad)
    assert isinstance(found, GeneratedLists)
    return found


def test_the_op() -> None:
    def scale(xs, ys, alpha):
        """Doc."""
        for x, y in zip(xs, ys, strict=True):
            x.mul_(alpha).add_(y)

    g = made(scale, xs="T[...]*", ys="U[...]*", alpha="float", T=("bf16", "fp32"), U=("bf16", "fp32"))
    assert g.op.schema == ("scale(Tensor(a!)[] xs, Tensor[] ys, float alpha, int config=-1, int mode_bits=0) -> ()")
    assert len(enumerate_grid(g.family, 90).variants) == 8  # four choices of dtypes, two layouts
    assert len(enumerate_grid(g.family, 80, portable=True).variants) == 4
    assert '"doc": "Doc."' in g.op.meta


def test_what_has_no_size_is_written_last() -> None:
    """Every program reads the step that was, so a launch of its own writes the new one."""
    g = generate_any(optimizers.adamw.fn, optimizers.adamw.signature, "adamw")
    assert isinstance(g, GeneratedLists)
    kernels = g.graphs[0].kernels
    assert [bool(k.axes) for k in kernels] == [True, False]
    written = [{v.buffer for v in k.values if v.op == "store"} for k in kernels]
    assert written == [{"params", "exp_avgs", "exp_avg_sqs"}, {"steps"}]


@pytest.mark.parametrize("layout", [ALIGNED, ANY])
def test_it_compiles(layout: str) -> None:
    g = generate_any(optimizers.adamw_mixed.fn, optimizers.adamw_mixed.signature, "adamw_mixed")
    assert isinstance(g, GeneratedLists)
    plan = g.plan(g.graphs[0], layout)
    for launch in plan.launches:
        assert compile_source(source_of(plan, launch, SM90)).spill_bytes == 0


def test_the_table_compiles() -> None:
    plan = table.FAMILY.kernels[0].plan(None)  # type: ignore[arg-type]
    assert compile_source(source_of(plan, plan.launches[0], SM90)).spill_bytes == 0


def returns(xs):
    return [x + 1 for x in xs] * 2


def places(xs):
    return [x.argmax() for x in xs]


def scans(xs):
    for x in xs:
        x.copy_(x.flatten().cumsum(0).reshape(x.shape))


def shares(xs, y):
    for x in xs:
        y.add_(x.sum())


def adds_up(xs):
    return sum(x.sum() for x in xs)


def flips(xs, ys):
    for x, y in zip(xs, ys, strict=True):
        x.copy_(y.flatten().flip(0).reshape(y.shape))


def mixes(xs):
    for x in xs:
        x.add_(len(xs))


def plain(xs, y):
    for x in xs:
        x.add_(y)


WRONG: dict[str, tuple[Callable[..., Any], dict[str, str], str]] = {
    "returns too many": (returns, {"xs": "fp32[...]*"}, "a result that is a list has a tensor for each place"),
    "places": (places, {"xs": "fp32[...]*"}, "argmax of the tensors of a list: there are sums, products, extremes"),
    "scans": (scans, {"xs": "fp32[...]*"}, "works element by element"),
    "changes what is shared": (shares, {"xs": "fp32[...]*", "y": "fp32[]"}, "y, which all places of the lists share"),
    "adds up in Python": (adds_up, {"xs": "fp32[...]*"}, "but for torch.stack of a number for each tensor"),
    "reads elsewhere": (flips, {"xs": "fp32[...]*", "ys": "fp32[...]*"}, "works element by element"),
    "counts the lists": (mixes, {"xs": "fp32[...]*"}, "depends on the others"),
    "a tensor beside": (plain, {"xs": "fp32[...]*", "y": "fp32[N]"}, "is no list beside others that are"),
    "dimensions": (plain, {"xs": "fp32[M]*", "y": "fp32[M]*"}, r"are 'T\[...\]\*' or 'T\[\]\*'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str) -> None:
    fn, texts, message = WRONG[name]
    with pytest.raises(TraceError, match=message):
        made(fn, **texts)


def test_results_and_reductions_compile() -> None:
    """A launch over all places, those of chunks and of places, and one over all elements."""

    def clip(grads, most):
        total = torch.stack([g.norm() for g in grads]).norm()
        scale = (most / (total + 1e-6)).clamp(max=1)
        return total, [g * scale for g in grads], [(g - g.mean()).abs().amax() for g in grads]

    g = made(clip, grads="bf16[...]*", most="float")
    assert g.op.schema.endswith("-> (Tensor, Tensor[], Tensor[])") and g.results == ("all", "each", "place")
    plan = g.plan(g.graphs[0], ANY)
    for launch in plan.launches:
        assert compile_source(source_of(plan, launch, SM90)).spill_bytes == 0


def test_a_gradient_is_refused() -> None:
    def add(xs):
        for x in xs:
            x.add_(1)

    with pytest.raises(TraceError, match="leave out grad=True"):
        made(add, xs="fp32[...]*", grad=True)
    xs = [torch.zeros(2)]
    op(xs="fp32[...]*")(add)(xs)  # a declared function still runs
    assert xs[0].tolist() == [1, 1]
