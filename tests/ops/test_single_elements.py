"""Scans and reductions of dimensions of one element: copies of it, which no kernel of tk makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from function_samples import MIRRORED
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import tk

SCANS = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
REDUCTIONS = ("sum", "mean", "prod", "amax", "amin", "max", "min", "logsumexp")
NAMES = (*SCANS, *REDUCTIONS)
# Whose gradient ATen has as no number where the element is none, or infinite: then a kernel's formula has it too.
BY_FORMULA = ("amax", "amin", "logsumexp", "logcumsumexp")
DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int16, torch.uint8, torch.bool)


class _Ops(TorchDispatchMode):
    """The ops that reach the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _parts(found: Any) -> tuple[Tensor, ...]:
    return tuple(found) if isinstance(found, tuple) else (found,)


def _layouts(x: Tensor) -> list[tuple[Tensor, int]]:
    """x of three dimensions: (a tensor with a dimension of one element, that dimension)."""
    return [
        (x[:, :1], 1),
        (x[:, 1:2, ::2], -2),
        (x[..., 2:3].transpose(0, 1), 2),
        (x[:1], 0),
        (x[:1].expand(3, -1, -1)[:, :1], 1),
        (x[0, 0, 0], 0),
        (x[:0, :, :1], 2),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*NAMES, "argmax", "argmin", "any", "all"])
def test_values(name: str, dtype: torch.dtype) -> None:
    ours, torchs = MIRRORED[name]
    if (name == "mean" and not dtype.is_floating_point) or (name == "logcumsumexp" and not dtype.is_floating_point):
        pytest.skip("of floats")
    if dtype == torch.bool and name in ("argmax", "argmin"):
        pytest.skip("torch has it not")
    values = torch.randn(3, 4, 5, dtype=torch.float64) * 4
    if dtype.is_floating_point:
        values[0, 0, 0], values[1, 0, 2], values[0, 1, 2] = float("nan"), float("inf"), -float("inf")
    x = values.to(dtype) if dtype != torch.uint8 else values.abs().to(dtype)
    for given, dim in _layouts(x):
        with _Ops() as seen:
            found = _parts(ours(given, dim))
        assert not [n for n in seen.names if n.startswith("tk.")]
        for mine, theirs in zip(found, _parts(torchs(given, dim)), strict=True):
            assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
            assert not given.numel() or mine.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
        if name in REDUCTIONS and given.dim():
            for mine, theirs in zip(_parts(ours(given, dim, True)), _parts(torchs(given, dim, True)), strict=True):
                assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["sum", "mean", "prod", "amax", "amin", "logsumexp", "any", "all"])
def test_all_of_one_element(name: str) -> None:
    ours, torchs = MIRRORED[name]
    x = torch.randn(1, 1)
    dims: tuple[Any, ...] = ((0, 1),) if name != "prod" else (0,)
    assert_close(ours(x, *dims), torchs(x, *dims))
    if name != "logsumexp":
        assert_close(ours(x), torchs(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str, dtype: torch.dtype) -> None:
    ours, torchs = MIRRORED[name]
    for given, dim in _layouts(torch.randn(3, 4, 5).to(dtype)):
        found, expected = (_gradient(f, given, dim) for f in (ours, torchs))
        assert_close(found, expected)
    if name in BY_FORMULA:
        x = torch.tensor([[float("nan")], [-float("inf")], [1.0]], dtype=dtype)
        assert_close(_gradient(ours, x, 1), _gradient(torchs, x, 1), equal_nan=True)


def _gradient(function: Callable[..., Any], x: Tensor, dim: int) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    found = _parts(function(leaf, dim))[0]
    return torch.autograd.grad(found, leaf, torch.arange(1.0, found.numel() + 1).view(found.shape).to(x.dtype))[0]


def test_the_gradient_of_a_log_sum_runs_no_kernel() -> None:
    """It was three scans, and what makes and joins their operands."""
    x = torch.tensor([[1.5], [-float("inf")], [float("inf")], [float("nan")], [-1e4]], requires_grad=True)
    grad = torch.tensor([[0.0], [1.0], [-2.0], [3.0], [-5.0]])
    for dtype in (torch.float32, torch.bfloat16):
        found = tk.logcumsumexp(x.to(dtype), 1)
        with _Ops() as seen:
            (of_x,) = torch.autograd.grad(found, x, grad.to(dtype))
        assert not [n for n in seen.names if n.startswith("tk.")]
        assert_close(of_x, torch.tensor([[0.0], *[[float("nan")]] * 3, [-5.0]]), equal_nan=True)


@pytest.mark.parametrize("name", ["cumsum", "cummax", "sum", "max"])
def test_gradients_run_no_kernel(name: str) -> None:
    """Of cumsum none at all: it is the result's."""
    x = torch.randn(6, 1, 4, requires_grad=True)
    with _Ops() as seen:
        found = _parts(getattr(tk, name)(x, 1))[0]
        found.sum().backward()
    assert not [n for n in seen.names if n.startswith("tk.")]


@pytest.mark.parametrize("name", [*NAMES, "argmax", "any"])
def test_meta_tensors_and_graphs(name: str) -> None:
    ours, torchs = MIRRORED[name]
    meta = torch.empty(3, 1, 4, device="meta")
    for mine, theirs in zip(_parts(ours(meta, 1)), _parts(torchs(meta, 1)), strict=True):
        assert mine.is_meta and mine.shape == theirs.shape and mine.dtype == theirs.dtype

    torch._dynamo.reset()

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return _parts(ours(x, 1))

    x = torch.randn(3, 1, 4)
    for dynamic in (False, True):
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for mine, theirs in zip(compiled(x), function(x), strict=True):
            assert mine.stride() == theirs.stride()
            assert_close(mine, theirs)


@pytest.mark.parametrize("name", ["cumsum", "cummax", "sum", "amax", "argmax"])
def test_strict_mode_and_batches(name: str) -> None:
    ours, torchs = MIRRORED[name]
    x = torch.randn(2, 3, 1)
    with tk.config.strict():
        for mine, theirs in zip(_parts(ours(x, 2)), _parts(torchs(x, 2)), strict=True):
            assert_close(mine, theirs)
    batched = torch.func.vmap(lambda x: _parts(ours(x, 1)))(x)
    for mine, theirs in zip(batched, _parts(torchs(x, 2)), strict=True):
        assert_close(mine, theirs)


def test_a_config_that_is_given_names_a_kernel() -> None:
    with _Ops() as seen:
        tk.cumsum(torch.randn(3, 1), 1, config=0)
    assert [n for n in seen.names if n.startswith("tk.")] == ["tk.cumsum.default"]


def test_explain_says_that_nothing_is_launched() -> None:
    assert "no kernel is launched" in str(tk.explain("cumsum", torch.randn(3, 1), 1, arch=90))
