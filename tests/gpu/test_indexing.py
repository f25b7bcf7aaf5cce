"""tk.gather, tk.scatter_add, tk.index_add and tk.index_put on CUDA against the same on the CPU, at sizes of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tk

from .device import DEVICE

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-12}


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    x = torch.randn(shape) * 4
    return x > 0 if dtype == torch.bool else x.abs().to(dtype) if dtype == torch.uint8 else x.to(dtype)


def calls(dtype: torch.dtype) -> dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]]:
    x, at = numbers(dtype, 60, 33, 70), torch.randint(0, 33, (60, 40, 70))
    rows, last = torch.randint(0, 60, (500,)), torch.randint(-70, 70, (60, 1))
    found: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {
        "gather": (tk.gather, (x, 1, at)),
        "gather last": (tk.gather, (x, -1, torch.randint(0, 70, (60, 33, 99), dtype=torch.int32))),
        "gather first of a part": (tk.gather, (x.mT, 0, torch.randint(0, 60, (200, 50, 30)))),
        "scatter_add": (tk.scatter_add, (x, 1, at, numbers(dtype, 60, 41, 70))),
        "scatter_add last": (tk.scatter_add, (x, 2, torch.randint(0, 70, (60, 33, 99)), numbers(dtype, 60, 33, 99))),
        "index_add": (tk.index_add, (x, 0, rows, numbers(dtype, 500, 33, 70))),
        "index_add last": (tk.index_add, (x, -1, rows % 70, numbers(dtype, 60, 33, 500))),
    }
    for accumulate in (False, True):
        name = "accumulate" if accumulate else "put"
        found |= {
            f"{name} rows": (tk.index_put, (x, (rows,), numbers(dtype, 500, 33, 70), accumulate)),
            f"{name} elements": (tk.index_put, (x, (rows, rows % 33, rows - 60), numbers(dtype, 500), accumulate)),
            f"{name} columns": (tk.index_put, (x, (None, None, last), numbers(dtype, 60, 1), accumulate)),
            f"{name} apart": (tk.index_put, (x, (rows, None, rows), numbers(dtype, 500, 33), accumulate)),
            f"{name} a mask": (tk.index_put, (x, (x > 1,), numbers(dtype, int((x > 1).sum())), accumulate)),
            f"{name} one by a mask": (tk.index_put, (x, (x[:, :, 0] > 1,), numbers(dtype, 70), accumulate)),
            f"{name} nothing": (tk.index_put, (x, (rows[:0],), numbers(dtype, 70), accumulate)),
        }
    return found


def on_cuda(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(on_cuda, x))
    return x.to(DEVICE) if isinstance(x, Tensor) else x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", calls(torch.float32))
def test_as_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    function, args = calls(dtype)[name]
    found, expected = function(*on_cuda(args)).cpu(), function(*_wide(args)).to(dtype)
    if ("add" in name or "accumulate" in name) and dtype.is_floating_point:
        assert bool(((found.double() - expected.double()).abs() <= _most_off(function, args, dtype)).all())
    else:
        assert_close(found, expected, rtol=0, atol=0)


def _wide(args: tuple[Any, ...]) -> list[Any]:
    return [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]


def _most_off(function: Callable[..., Tensor], args: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    """Of sums whose order is free, and which are rounded after each addition, as torch's are: half a unit of all that
    is added, each time, and once more for the expected result's own rounding."""
    wide = _wide(args)
    sizes = function(*(a.abs() if isinstance(a, Tensor) and a.is_floating_point() else a for a in wide))
    ones = [torch.ones_like(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in wide]
    additions = function(torch.zeros_like(wide[0]), *ones[1:])
    both = 2 if dtype == torch.float64 else 1  # are rounded
    return both * (additions + 1) * sizes * torch.finfo(dtype).eps / 2 * (1 + 1e-9)


@pytest.mark.parametrize("name", calls(torch.float32))
def test_gradients(name: str) -> None:
    function, args = calls(torch.float32)[name]
    found = []
    for of in (on_cuda, lambda x: x):
        given = [
            of(a).detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else of(a) for a in args
        ]
        result = function(*given)
        weights = torch.linspace(-1, 1, result.numel()).reshape(result.shape).to(result.device)
        sources = [g for g in given if isinstance(g, Tensor) and g.requires_grad]
        found.append(torch.autograd.grad(result, sources, weights))
    for mine, wanted in zip(*found, strict=True):
        assert_close(mine.cpu(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["scatter_add", "scatter_add last", "index_add", "accumulate rows"])
def test_deterministic_sums(name: str, dtype: torch.dtype) -> None:
    function, args = calls(dtype)[name]
    given = on_cuda(args)
    with tk.config.deterministic():
        if dtype == torch.float64:
            with pytest.raises(tk.VariantNotFoundError):
                function(*given)
            return
        first = function(*given)
        assert all(torch.equal(first, function(*given)) for _ in range(5))
    wide = _wide(args)
    assert_close(first.cpu(), function(*wide).to(dtype), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 100_001])
def test_one_addition_a_place_leaves_its_neighbours_alone(n: int, dtype: torch.dtype) -> None:
    """Of 16 bits elements are added in pairs, of which one is -0.0: also of what is none of a number."""
    x, source = torch.randn(n).to(dtype), torch.randn(n).to(dtype)
    for place, special in enumerate((-0.0, float("inf"), float("nan"), 1e-7)[:n]):
        x[place] = special
    index = torch.randperm(n)[: (n + 1) // 2]
    expected = x.clone()
    expected[index] = (x[index].float() + source[: len(index)].float()).to(dtype)
    given = x.to(DEVICE), 0, index.to(DEVICE), source[: len(index)].to(DEVICE)
    for found in (tk.scatter_add(*given), tk.index_add(*given), tk.index_put(given[0], (given[2],), given[3], True)):
        assert torch.equal(
            found.cpu().view(torch.int16)[~expected.isnan()], expected.view(torch.int16)[~expected.isnan()]
        )
        assert torch.equal(found.cpu().isnan(), expected.isnan())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_place_and_one_value_for_all(dtype: torch.dtype) -> None:
    """Which have no order; in strict mode by the kernels all the same."""
    x = numbers(dtype, 60, 70)
    for rows in (torch.tensor([7]), torch.tensor([3, -1, 3, 59])):
        for values in (numbers(dtype), numbers(dtype, 70), numbers(dtype, 1, 70)):
            expected = torch.index_put(x, (rows,), values)
            for strict in (False, True):
                with tk.config.strict(strict):
                    assert torch.equal(tk.index_put(*on_cuda((x, (rows,), values))).cpu(), expected)


def test_a_place_keeps_the_last_in_every_call() -> None:
    x, rows, values = torch.zeros(10, 64), torch.randint(0, 10, (100_000,)), torch.randn(100_000, 64)
    expected = tk.index_put(x, (rows,), values)
    for _ in range(5):
        assert torch.equal(tk.index_put(x.to(DEVICE), (rows.to(DEVICE),), values.to(DEVICE)).cpu(), expected)
