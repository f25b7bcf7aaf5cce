"""Few long rows, which programs share, and reductions over dimensions that do not lie beside each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import host
import pytest
import torch
from test_ops import agree

from tk.codegen.family import Generated, generate
from tk.codegen.ways import WAYS
from tk.generated import op

LONG = (2, 17_001)  # elements: three parts of a row


def sums(x):
    return x.sum(-1), x.square().mean(-1), x.abs().amax(-1), (x > 2).any(-1)


def moments(x):
    return torch.var_mean(x, -1)


def softmax(x):
    return torch.softmax(x, -1)


def logsumexp(x):
    return torch.logsumexp(x, -1)


def largest(x):
    return x.amax(-1)


def sum_of_channels(x):
    return x.sum((0, 2))


@cache
def made_of(fn: Callable[..., Any], letters: str, grad: bool = False) -> Generated:
    return generate(fn, op(x=f"fp32[{letters}]")(fn).signature, fn.__name__, grad)


def compare(made: Generated, wanted: Any, *args: Any, only: str | None = None) -> list[str]:
    """The names of the variants that ran."""
    wanted, names = wanted if isinstance(wanted, tuple) else (wanted,), []
    for name, results in host.run_all(made, *args, only=only):
        names.append(name)
        for result, one in zip(results, wanted, strict=True):
            agree(result, one.float() if one.is_floating_point() else one, f"{made.name} {name}")
    return names


@pytest.mark.parametrize("lie", ["in rows", "every other", "in columns"])
@pytest.mark.parametrize("fn", [sums, moments, softmax, logsumexp], ids=lambda fn: fn.__name__)
def test_programs_share_a_row(fn: Callable[..., Any], lie: str) -> None:
    step = 2 if lie == "every other" else 1
    x = torch.randn(LONG[0], LONG[1] * step, generator=torch.Generator().manual_seed(0))[:, ::step]
    x = x.T.contiguous().T if lie == "in columns" else x
    for layout in ("gathered", "columns"):  # either takes them however they lie
        assert len(compare(made_of(fn, "M, N"), fn(x.double()), x, only=f"{layout} long_")) == 1


def places(x):
    return x.argmax(-1), x.argmin(-1)


@pytest.mark.parametrize("lie", ["in rows", "in columns"])
def test_programs_share_the_search_for_an_extreme(lie: str) -> None:
    """The first of equal ones, in whichever part of a row it is; NaN before all numbers; nothing but infinities."""
    x = torch.randint(-50, 50, (4, LONG[1]), generator=torch.Generator().manual_seed(0)).float()
    x[1, 9_000:] = float("inf")
    x[1, 12_345], x[1, 16_000] = float("nan"), float("nan")
    x[2], x[3] = float("-inf"), float("inf")
    wanted = places(x)
    x = x.T.contiguous().T if lie == "in columns" else x
    for layout in ("gathered", "columns"):
        assert len(compare(made_of(places, "M, N"), wanted, x, only=f"{layout} long_")) == 1


def test_means_of_many_steps() -> None:
    """A lane's mean is rounded at every step, and to what it counts from if that is as far away as an element."""
    made, rows = made_of(moments, "M, N"), torch.randn(4, 6_000, generator=torch.Generator().manual_seed(0))
    for x in (rows, rows * 0.01 + 1e6, rows + torch.arange(6_000) / 100):
        variance, mean = torch.var_mean(x.double(), -1)
        for name, (found, around) in host.run_all(made, x, only="columns loop_64x32"):
            rounding = 2.0**-24 * mean.abs()
            assert ((around - mean).abs() <= 4 * rounding + 1.5e-8 * variance.sqrt()).all(), name
            assert ((found - variance).abs() <= 1e-6 * variance).all(), name


def test_gradients_of_a_long_row() -> None:
    """Equal elements share that of the largest."""
    x = torch.randn(LONG, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    made, grad = made_of(largest, "M, N", grad=True).backward, torch.tensor([1.0, -2.0])
    leaf = x.double().requires_grad_()
    (wanted,) = torch.autograd.grad(leaf.amax(-1), leaf, grad.double())
    assert made is not None
    for layout in ("gathered", "columns"):
        assert len(compare(made, wanted, grad, x, only=f"{layout} long_")) == 1


def test_batch_invariant_rows_are_not_shared() -> None:
    made = made_of(sums, "M, N")
    call = host.Call.of(made, (torch.zeros(LONG),))
    graph = made.graphs[0]
    shared = [(layout, s) for layout in host.LAYOUTS for s in made.choices(graph, layout, "long")]
    assert [layout.name for layout, _ in shared] == ["gathered", "columns"]
    for layout, setting in shared:
        plan = made.plan(graph, layout, setting, "long")
        assert plan is not None and any("batch_invariant" in c.message for c in plan.constraints)
        assert call.prepared((layout, setting, "long")) is not None
    assert [w.name for w in WAYS.values() if not w.is_batch_invariant] == ["long", "long_interleaved"]


# --- Dimensions apart ---


def outer_and_last(x):
    return x.sum((0, 2)), x.amax((0, 2)), x.mean((0, 2)), (x > 1).any(2).any(0), x.prod(2).prod(0)


def moments_of_channels(x):
    return torch.var_mean(x, (0, 2), correction=0)


def batch_norm(x):
    variance, mean = torch.var_mean(x, (0, 2), correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-3)


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 4, 40), (6, 1, 33), (9, 16, 1)], ids=str)
@pytest.mark.parametrize("fn", [outer_and_last, moments_of_channels, batch_norm], ids=lambda fn: fn.__name__)
def test_dimensions_apart(fn: Callable[..., Any], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 2
    assert any(not name.startswith("strided") for name in compare(made_of(fn, "B, C, S"), fn(x.double()), x))


@pytest.mark.parametrize("shape", [(2, 3, 0), (0, 3, 2)], ids=str)
def test_no_elements_apart(shape: tuple[int, ...]) -> None:
    assert compare(made_of(sum_of_channels, "B, C, S"), torch.zeros(3), torch.zeros(shape))


def test_what_is_apart_is_read_in_runs() -> None:
    """So that rows that run together are enough, and nothing asks batches and positions to."""
    made = made_of(sum_of_channels, "B, C, S")
    x = torch.zeros(4, 16, 64)
    assert any(name.startswith("aligned") for name in host.variants(made, x))


@pytest.mark.parametrize("positions", [5, 2100])
def test_parts_of_rows_are_short_or_long(positions: int) -> None:
    """Gradients of a group norm: along channels' positions, of which a group's rows have several."""

    def grouped(x, weight):
        variance, mean = torch.var_mean(x, (1, 2), correction=0, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + 1e-3) * weight[:, None]

    generator = torch.Generator().manual_seed(2)
    x, weight, grad = (torch.randn(s, generator=generator) for s in ((3, 4, positions), (4,), (3, 4, positions)))
    made = generate(grouped, op(x="fp32[B, C, S]", weight="fp32[C]")(grouped).signature, "grouped", True).backward
    assert made is not None
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    wanted = torch.autograd.grad(grouped(*leaves), leaves, grad.double())
    given = dict(grad_0=grad, x=x, weight=weight)
    ran = compare(made, wanted, *(given[name] for name in made.signature.params))
    assert any(name.startswith("rows") for name in ran)
