"""Gradients of what picks elements: to where they came from, in no more launches than torch makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tk

CALLS: dict[str, tuple[Any, ...]] = {
    "max": (False,), "min": (True,), "sort": (True,), "topk": (2,), "cummax": (), "cummin": (),
}  # fmt: skip
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "outermost last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "every other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[:, :1].expand_as(x),
}


class Launches(TorchDispatchMode):
    """Ops that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.__name__:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def call(library: Any, name: str, x: Tensor, dim: int) -> Tensor:
    args = (*CALLS[name], dim) if name == "topk" else (dim, *CALLS[name])
    values: Tensor = getattr(library, name)(x, *args)[0]
    return values


def drawn(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Tensor:
    """Different along every dimension, so that which of equal ones is picked is no question."""
    n = torch.Size(shape).numel()
    x = torch.randperm(n).reshape(shape).to(dtype) / max(n, 1)
    return LAYOUTS[layout](x).detach().requires_grad_()


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 1, 6), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_first_and_second_derivatives(name: str, shape: tuple[int, ...], layout: str, dim: int) -> None:
    if name == "topk" and shape[dim] < 2:
        return
    for dtype in (torch.float32, torch.float64):
        x = drawn(shape, layout, dtype)
        found: list[list[Tensor]] = []
        for library in (tk, torch):
            values = call(library, name, x, dim)
            grad = torch.arange(values.numel(), dtype=dtype).reshape(values.shape).add(1).requires_grad_()
            (of_x,) = torch.autograd.grad(values, x, grad, create_graph=True)
            (of_grad,) = torch.autograd.grad((of_x * x.detach()).sum(), grad)
            found.append([of_x.detach(), of_grad])
        for ours, torchs in zip(*found, strict=True):
            assert torch.equal(ours, torchs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_equal_elements_have_one_gradient_in_all(dim: int, layout: str) -> None:
    x = LAYOUTS[layout](torch.randint(0, 3, (4, 5, 6)).float()).detach().requires_grad_()
    for name in CALLS:
        values = call(tk, name, x, dim)
        (grad,) = torch.autograd.grad(values.sum(), x)
        assert torch.equal(grad.sum(), torch.tensor(float(values.numel()))), name
        assert torch.equal((grad * x.detach()).sum(), values.detach().sum()), name  # as the values do


@pytest.mark.parametrize("name", CALLS)
def test_no_more_launches_than_torch(name: str) -> None:
    """Of the indices, which have no gradient, no zeros are made."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = drawn((6, 7, 8), "contiguous", dtype)
        counts = []
        for library in (tk, torch):
            values = call(library, name, x, 2)
            grad = torch.ones_like(values)
            with Launches() as launches:
                torch.autograd.grad(values, x, grad)
            counts.append(launches.names)
        assert len(counts[0]) <= len(counts[1]), counts


@pytest.mark.parametrize("n", [1, 3, 12, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_gradient_of_a_gather(dim: int, layout: str, n: int) -> None:
    """In place in zeros, but where there are many additions a place, or one of the switches is on."""
    shape = [4, 5, 6]
    x = LAYOUTS[layout](torch.randn(shape, dtype=torch.float64)).detach().requires_grad_()
    index = torch.randint(0, shape[dim], [n if d == dim else s for d, s in enumerate(shape)])
    grad = torch.randn(index.shape, dtype=torch.float64).requires_grad_()
    (wanted,) = torch.autograd.grad(x.gather(dim, index), x, grad)
    results = {}
    for way in ("usual", "deterministic", "torch's"):
        torch.use_deterministic_algorithms(way == "torch's")
        try:
            with tk.config.deterministic(way == "deterministic"):
                found = tk.gather(x, dim, index)
            with Launches() as launches:
                (of_x,) = torch.autograd.grad(found, x, grad, create_graph=True)
        finally:
            torch.use_deterministic_algorithms(False)
        (of_grad,) = torch.autograd.grad((of_x * x.detach()).sum(), grad)
        torch.testing.assert_close(of_x, wanted)
        torch.testing.assert_close(of_grad, x.detach().gather(dim, index))
        results[way] = launches.names
    in_place = ["new_zeros.default", "scatter_.src" if n == 1 else "scatter_add_.default"]
    assert (results["usual"] == in_place) == (n <= 2 * shape[dim])
    assert results["deterministic"] != in_place and results["torch's"] != in_place


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
def test_the_gradient_of_an_extreme_lies_as_its_input(layout: str, dim: int) -> None:
    x = drawn((3, 4, 5), layout, torch.float32)
    (grad,) = torch.autograd.grad(tk.max(x, dim).values.sum(), x)
    assert grad.stride() == torch.empty_like(x).stride()


def test_a_sorts_gradient_writes_every_place() -> None:
    """Deterministic mode fills what is allocated with NaN."""
    x = torch.randint(0, 3, (5, 6)).float().requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        for dim in (0, 1):
            (grad,) = torch.autograd.grad(tk.sort(x, dim).values.sum(), x)
            assert torch.equal(grad, torch.ones_like(x))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)], ids=str)
def test_without_elements(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, requires_grad=True)
    for name in ("sort", "cummax"):
        (grad,) = torch.autograd.grad(call(tk, name, x, len(shape) - 1).sum(), x)
        assert grad.shape == shape


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("is_of_rows", [True, False])
def test_what_was_overwritten_has_no_gradient(is_of_rows: bool, index_dtype: torch.dtype) -> None:
    found = []
    for library in (tk, torch):
        x = torch.zeros(4, 5, requires_grad=True)
        index = (torch.tensor([1, 3, 1], dtype=index_dtype), *(() if is_of_rows else (torch.tensor([0, 2, 0]),)))
        values = torch.zeros((3, 5) if is_of_rows else (3,), requires_grad=True)
        out = library.index_put(x, index, values)
        grad = torch.arange(20.0).add(1).reshape(4, 5).requires_grad_()
        with Launches() as launches:
            first = torch.autograd.grad(out, (x, values), grad, create_graph=True)
        second = torch.autograd.grad([y.square().sum() for y in first], grad)
        found.append((*first, *second))
        assert len(launches.names) <= (2 if library is tk and index_dtype == torch.int64 else 4)
    for ours, torchs in zip(*found, strict=True):
        assert torch.equal(ours, torchs)
