"""Which graphs hold values against each other, and what follows; interpreted/test_comparisons.py has the numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tk.codegen.comparisons import any_compared
from tk.codegen.family import Generated, generate
from tk.codegen.tile import LAYOUTS
from tk.codegen.ways import WAYS
from tk.generated import op


def made_of(fn: Callable[..., object], dtype: str = "fp32", grad: bool = False) -> Generated:
    made = generate(fn, op(x=f"{dtype}[M, N]")(fn).signature, "f", grad=grad)
    return made.backward if grad else made


def contracts(made: Generated) -> set[bool]:
    """Whether launches contract products into sums: of all plans."""
    graph = made.graphs[0]
    plans = (made.plan(graph, x, s, way) for way in WAYS for x in LAYOUTS for s in made.choices(graph, x, way))
    return {one.options.get("enable_fp_fusion", True) for plan in plans if plan for one in plan.launches}


@pytest.mark.parametrize(("fn", "grad"), [
    (lambda x: (y := x.exp()) >= y.topk(3).values[:, -1:], False),
    (lambda x: (x.exp() - x.exp().amax(0)) == 0, False),
    (lambda x: torch.searchsorted(F.softmax(x, -1).sort(-1)[0], F.softmax(x, -1)), False),
    (lambda x: x.var(-1).amax(), True),
])  # fmt: skip
def test_compared(fn: Callable[..., object], grad: bool) -> None:
    made = made_of(fn, grad=grad)
    assert not any(v.fast for way in WAYS for k in made.graphs[0].kernels_of(way) for v in k.values)


@pytest.mark.parametrize(("fn", "dtype", "grad"), [
    (lambda x: x == x.amax(0), "fp32", False),  # as they were read
    (lambda x: x.amax(-1), "bf16", True),
    (lambda x: F.relu(F.layer_norm(x, (x.shape[-1],))), "bf16", True),  # next to 0 either will do
    (lambda x: torch.where(x * 2 > x.exp(), x, 0), "bf16", False),  # at one place
    (lambda x: F.softmax(x, -1), "bf16", True),
])  # fmt: skip
def test_not_compared(fn: Callable[..., object], dtype: str, grad: bool) -> None:
    made = made_of(fn, dtype, grad)
    assert not any_compared(made.graphs[0].kernels)


@pytest.mark.parametrize("fn", [
    lambda x: (y := x * 2.3 + x) == y.amax(0),
    lambda x: (y := x / x.atan() * x.tan()) - y,
    lambda x: torch.sign(x * x - x * x * 1.0),
    lambda x: F.softmax(x, -1),
])  # fmt: skip
def test_no_product_is_contracted(fn: Callable[..., object]) -> None:
    assert contracts(made_of(fn)) == {False}


def test_what_is_compared_is_worked_out_once() -> None:
    """The sums of a softmax, which rows and the masks of their largest share."""
    made = made_of(lambda x: (y := F.softmax(x, -1)) >= y.topk(3).values[:, -1:])
    for way in ("whole", "split"):
        sums = [v for k in made.graphs[0].kernels_of(way) for v in k.values if v.op == "reduce" and v.data == "sum"]
        assert len(sums) == 1, way


def test_16_bit_operands_are_compared_as_such() -> None:
    made = made_of(lambda x: (y := x * 0.7) >= y.topk(3).values[:, -1:], "bf16")
    for kernel in made.graphs[0].kernels:
        for v in kernel.values:
            if v.op == "ge":
                assert [kernel.value(n).op for n in v.args] == ["cast", "cast"]
                assert {kernel.value(kernel.value(n).args[0]).dtype for n in v.args} == {"bf16"}
                return
    raise AssertionError("nothing is compared")
