"""Which launches of a plan are one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_generated_compile import compile_all

from tk.aot.spec import Plan
from tk.codegen.family import Generated, generate
from tk.codegen.tile import LAYOUTS
from tk.codegen.ways import WAYS
from tk.generated import op

TEXTS = {"x": "fp32[M, N]", "y": "bf16[K]", "z": "fp32[A, B]"}


def made(fn: Callable[..., object]) -> Generated:
    return generate(fn, op(**TEXTS)(fn).signature, fn.__name__)


def plans(made: Generated, *ways: str) -> list[Plan]:
    """In all ways, or in these."""
    own = [(s, way) for _, s, way in made.ways() if way in (ways or WAYS)]
    found = [made.plan(made.graphs[0], layout, s, way) for s, way in own for layout in LAYOUTS]
    return [plan for plan in found if plan is not None]


def pointwise(x, y, z):
    return x * 2, y.exp(), z.relu(), torch.tanh(y)


def of_every_kind(x, y, z):
    return x.softmax(-1), z.sum(0), y * 2


def one_after_another(x, y, z):
    return x - x.sum(), y.float() + x.sum()


def sorted_beside(x, y, z):
    return x.sort(-1)[0], y + 1, z * 2


@pytest.mark.parametrize("fn", [pointwise, of_every_kind], ids=lambda fn: fn.__name__)
def test_independent_results_are_one_launch(fn: Callable[..., object]) -> None:
    found = plans(made(fn), *(WAYS.keys() - {"long"}))
    assert found and min(len(plan.launches) for plan in found) == 1
    # A split sum has a second launch, over its parts.
    assert max(len(plan.launches) for plan in found) <= 2


def test_a_softmax_of_shared_rows_is_five_launches() -> None:
    """Of maxima and of sums one over parts and one over those, and itself: what is independent is beside them."""
    assert {len(plan.launches) for plan in plans(made(of_every_kind), "long")} == {5}


def test_what_follows_is_a_launch_behind() -> None:
    op = made(one_after_another)
    whole = [op.plan(op.graphs[0], layout, s, way) for _, s, way in op.ways() for layout in LAYOUTS if way == "whole"]
    assert {len(plan.launches) for plan in whole if plan is not None} == {2}


def test_a_sort_stays_for_itself() -> None:
    assert min(len(plan.launches) for plan in plans(made(sorted_beside))) == 2


def test_compiles() -> None:
    assert compile_all(made(of_every_kind)) >= 3
