"""The numbers that choose what an op of the package's reductions does, and reductions of all of a tensor."""

from __future__ import annotations

import itertools
import math
from functools import cache

import backwards
import host
import pytest
import torch
import torch.nn.functional as F

from tk.codegen.family import Generated, generate
from tk.generated import op
from tk.kernels.generated import reductions


@cache
def generated(name: str) -> Generated:
    d = getattr(reductions, name)
    return generate(d.fn, d.signature, name, d.grad)


@pytest.mark.parametrize(("sign", "mirror"), itertools.product((1.0, -1.0), repeat=2))
def test_extremes(sign: float, mirror: float) -> None:
    """With NaN, infinities and equal ones, which share the gradient."""
    x = torch.randn(4, 33).clamp(-1, 1)
    x[1, 2], x[2, 3], x[2, 4] = math.nan, math.inf, -math.inf
    size = x if mirror == 1 else x.abs()
    expected = size.amax(-1) if sign == 1 else size.amin(-1)
    for variant, (found,) in host.run_all(generated("row_amax"), x, sign, mirror):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=variant)
    x = x[[0, 3]].requires_grad_()
    size = x if mirror == 1 else x.abs()
    (wanted,) = torch.autograd.grad((size.amax(-1) if sign == 1 else size.amin(-1)).sum(), x)
    given = dict(grad_0=torch.ones(2), x=x.detach(), sign=sign, mirror=mirror)
    backward = generated("row_amax").backward
    assert backward is not None
    for variant, (found,) in host.run_all(backward, *(given[p] for p in backward.signature.params)):
        torch.testing.assert_close(found, wanted, msg=variant)


def test_the_place_of_the_smallest() -> None:
    x = torch.tensor([[2.0, -1.0, 3.0, -1.0], [0.0, math.nan, -math.inf, math.nan]])
    for variant, (found,) in host.run_all(generated("row_argmax"), x, -1.0):
        assert found.tolist() == [1, 1], variant


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extremes_and_their_places(dtype: torch.dtype, sign: float) -> None:
    """Of equal ones and of NaN the first."""
    x = torch.randn(6, 300).to(dtype).round()
    x[1, 40], x[1, 41], x[2, 299], x[3] = math.nan, math.inf, -sign * math.inf, -sign * math.inf
    values, places = (torch.max if sign == 1 else torch.min)(x, -1)
    for variant, (value, place) in host.run_all(generated("row_max"), x, sign):
        torch.testing.assert_close(value, values, rtol=0, atol=0, equal_nan=True, msg=variant)
        assert torch.equal(place, places), variant


@pytest.mark.parametrize("at", [0, 40, -1])
def test_the_deviation_from_an_infinity_is_none(at: int) -> None:
    """And that of equal numbers is 0, in every way of adding up."""
    x = torch.randn(3, 300)
    x[0, at], x[1] = math.inf, x[1, 0].item()
    for variant, (found, mean) in host.run_all(generated("row_var_mean"), x, 300 / 299, 1.0):
        assert found[0].isnan() and not mean[0].isfinite(), variant
        torch.testing.assert_close(found[1:], x[1:].var(-1), rtol=1e-5, atol=1e-12, msg=variant)
        assert found[1] >= 0, variant


@pytest.mark.parametrize(("offset", "spread"), [(0, 1.0), (1e3, 0.01), (1e6, 1.0), (-1e6, 0.1)])
@pytest.mark.parametrize("rows", [40, 1500])
def test_variances_far_from_zero(rows: int, offset: float, spread: float) -> None:
    """As exact as the elements are, whatever they have in common: of rows, of columns in groups, and of everything. Of
    equal numbers it is 0, and never less."""
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, 6, generator=generator) * spread + offset * (1 + torch.rand(6, generator=generator))).float()
    x[:, 5] = x[0, 5]
    exact, mean = torch.var_mean(x.double(), 0, correction=0)

    def hold(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=0, msg=lambda m: f"{what}: {m}")

    for given in (x.T, x.T.contiguous()):
        for variant, (found, middle) in host.run_all(generated("row_var_mean"), given, 1.0, 1.0):
            hold(found[:5], exact[:5], variant)
            assert 0 <= found[5] <= 1e-13 * mean[5] ** 2, variant
            torch.testing.assert_close(middle.double(), mean, rtol=3e-7, atol=3e-8, msg=variant)
    for variant, (found,) in host.run_all(columns(), x):
        hold(found[:5], exact[:5], variant)
    assert rows < 1000 or any("split" in variant for variant in host.variants(columns(), x))
    one = x[:, :1].reshape(-1, 20).contiguous()
    for variant, (found, _) in host.run_all(generated("total_var_mean"), one, 1.0, 1.0):
        hold(found, exact[0], variant)


def normed(x, eps):
    wide = x.reshape(x.shape[0], 4, -1)
    return (
        F.layer_norm(x, x.shape[-1:], eps=eps),
        F.group_norm(x, 2, eps=eps),
        F.layer_norm(wide, wide.shape[1:], eps=eps),
    )


@cache
def all_normed() -> Generated:
    return generate(normed, op(x="fp32[B, C, N]", eps="float")(normed).signature, "normed", True)


@pytest.mark.parametrize("n", [5, 45, 300, 1030])
def test_equal_numbers_are_their_mean(n: int) -> None:
    """To the last bit, or else a small eps makes much of what rounding has left."""
    numbers = torch.randn(3, 1, 1) * torch.tensor([1.0, 1e3, 1e-3]).view(3, 1, 1)
    x = numbers.expand(3, 4, n).contiguous()
    fn = all_normed()
    for variant, results in host.run_all(fn, x, 1e-12):
        assert all(found.count_nonzero() == 0 for found in results), variant
    gradients = [torch.randn_like(x), torch.randn_like(x), torch.randn(3, 4, n)]
    wide = x.double().requires_grad_()
    results = normed(wide, 1e-5)
    given = dict(x=x, eps=1e-5) | backwards.arguments(gradients, [r.float() for r in results])
    expected = torch.autograd.grad(results, wide, [g.double() for g in gradients])[0]
    assert fn.backward is not None
    for variant, (found,) in host.run_all(fn.backward, *(given[p] for p in fn.backward.signature.params)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3, msg=variant)


def of_columns(x):
    return x.var(0, correction=0)


@cache
def columns() -> Generated:
    return generate(of_columns, op(x="fp32[M, N]")(of_columns).signature, "of_columns")


@pytest.mark.parametrize("n", [0, 1, 33, 48])
def test_truth(n: int) -> None:
    x = torch.zeros(4, n, dtype=torch.bool)
    if n:
        x[1, -1] = x[2] = True
    for wanted, torchs in ((1, torch.any), (0, torch.all)):
        for variant, (found,) in host.run_all(generated("row_any"), x, wanted):
            assert torch.equal(found, torchs(x, -1)), variant


@pytest.mark.parametrize("numbers", [(1.0, 1.0, 1.0), (0.0, math.inf, 0.5)])
@pytest.mark.parametrize("shape", [(300, 64), (20_001, 1), (0, 4)])
def test_norms_of_everything(shape: tuple[int, int], numbers: tuple[float, ...]) -> None:
    x = torch.randn(shape)
    expected = torch.linalg.vector_norm(x.double(), 1 / numbers[-1]).float()
    for variant, (found,) in host.run_all(generated("total_norm"), x, *numbers):
        torch.testing.assert_close(found, expected, msg=variant)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [0, 1, 3, 7])
@pytest.mark.parametrize("n", [0, 1, 15, 16, 23, 4089, 4096, 40_003, 40_960])
def test_sums_of_everything_at_any_address(n: int, first: int, dtype: torch.dtype) -> None:
    """Every element once, and nothing beside them, however many there are and wherever they begin."""
    memory = torch.full((n + 16,), math.nan, dtype=dtype)
    x = memory[first : first + n].view(n, 1)
    x.copy_(torch.randint(-8, 9, (n, 1)))
    x[-1:] = 8
    expected = (x.double().sum() / 64).to(dtype)
    for variant, (found,) in host.run_all(generated("total_sum"), x, 1 / 64):
        assert torch.equal(found, expected), variant
    ways = {variant.split("x")[0] for variant in host.variants(generated("total_sum"), x, 1 / 64)}
    assert n < 16 or "rows split_loop_1" in ways


def test_moments_of_everything() -> None:
    x = torch.randn(300, 64) + 100
    deviation, mean = torch.std_mean(x.double())
    n = x.numel()
    for variant, found in host.run_all(generated("total_var_mean"), x, n / (n - 1), 0.5):
        torch.testing.assert_close(list(found), [deviation.float(), mean.float()], rtol=1e-4, atol=1e-4, msg=variant)


@pytest.mark.parametrize("name", ["row_var_mean", "total_var_mean"])
def test_moments_of_nothing(name: str) -> None:
    for variant, found in host.run_all(generated(name), torch.empty(3, 0), 1.0, 1.0):
        assert all(x.isnan().all() for x in found), variant
