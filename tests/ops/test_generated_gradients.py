"""Of several results some are used: what has no gradient takes no part in the backward, however infinite it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tk

# At x = 0 or w = 0 the derivative of one of the results is not finite.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "moments": lambda x, w: (x.square().mean(-1), torch.log(x)),
    "roots": lambda x, w: (x * 2 + w, x.sqrt(), (x * w).sum(-1)),
    "quotients": lambda x, w: (x / w, x - w, w.reciprocal()),
    "norms": lambda x, w: (x * torch.rsqrt((x * x).mean(-1, keepdim=True)), x + w),
    "places": lambda x, w: (x.argmax(-1), x.log2(), x.exp()),
    "shared": lambda x, w: (y := x.pow(0.5), y * 0 + w, x.sin()),
    "overflowing": lambda x, w: ((x * 60).exp(), x * w),
}
TEXTS = {"x": "fp32[..., N]", "w": "fp32[N]"}


def some(results: Any, which: tuple[int, ...]) -> Tensor:
    floats = [y for y in results if y.is_floating_point()]
    return sum(floats[i].sum() * (i + 1) for i in which if i < len(floats))  # type: ignore[return-value]


def leaves() -> tuple[Tensor, Tensor]:
    x = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, 0.5]]).repeat(2, 1, 1)
    return x.requires_grad_(), torch.tensor([0.0, 1.0, 2.0, 0.0], requires_grad=True)


def gradients(f: Callable[..., Any], which: tuple[int, ...]) -> list[Tensor]:
    given = leaves()
    found = torch.autograd.grad(some(f(*given), which), given, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(given, found, strict=True)]


SUBSETS = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_subset_of_the_results(declare: Callable[..., Any], name: str) -> None:
    fn = FUNCTIONS[name]
    op = declare(named(lambda x, w: fn(x, w), name), **TEXTS)
    floats = [y for y in fn(*leaves()) if y.is_floating_point()]
    for which in SUBSETS:
        if max(which) < len(floats):
            close(gradients(op, which), gradients(fn, which), f"{name} {which}")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_and_transformed(declare: Callable[..., Any], name: str) -> None:
    """The unused result stays inside of what is compiled; torch.func's grad, and a graph that could be differentiated
    again."""
    fn = FUNCTIONS[name]
    op = declare(named(lambda x, w: fn(x, w), name), **TEXTS)
    torch._dynamo.reset()
    for which in ((0,), (1,)):
        expected = gradients(fn, which)
        compiled = torch.compile(lambda x, w, which=which: some(op(x, w), which), backend="aot_eager", fullgraph=True)
        given = leaves()
        found = torch.autograd.grad(compiled(*given), given, allow_unused=True)
        close([torch.zeros_like(x) if g is None else g for x, g in zip(given, found, strict=True)], expected, name)
        given = tuple(x.detach() for x in leaves())
        close(torch.func.grad(lambda *a, which=which: some(op(*a), which), (0, 1))(*given), expected, name)
        given = leaves()
        again = torch.autograd.grad(some(op(*given), which), given, create_graph=True, allow_unused=True)
        close([torch.zeros_like(x) if g is None else g for x, g in zip(given, again, strict=True)], expected, name)


def named(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    fn.__name__ = f"of_{name}"
    return fn


def close(found: Any, expected: Any, message: str) -> None:
    for a, b in itertools.zip_longest(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True, msg=lambda m: f"{message}: {m}")


@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
def test_norms_of_a_sum(name: str, which: tuple[int, ...]) -> None:
    """Rows of zeros and no eps: the sum's own gradient is finite. A norm alone is differentiated by its kernel, for
    which zeros in the sum's place do."""
    x, residual = (torch.zeros(2, 8, requires_grad=True) for _ in range(2))
    more = {"bias": torch.zeros(8)} if name == "add_layer_norm" else {}
    results = getattr(tk, name)(x, residual, weight=torch.ones(8), eps=0.0, **more)
    with Called() as called:
        found = torch.autograd.grad(sum(results[i].sum() for i in which), (x, residual))
    assert (f"tk::{name}_backward" in called.names) == (0 in which)
    for grad in found:
        assert grad.isnan().all() if 0 in which else torch.equal(grad, torch.ones(2, 8))


SEVERAL: dict[str, Callable[..., Any]] = {
    "chain": lambda x, w: (x.sin(), w.cos(), x * w),
    "detached": lambda x, w: (x * w.detach(), w + x.detach().amax(-1, keepdim=True)),
    "sizes": lambda x, w: (w * x.shape[-1], x + 1),
    "places": lambda x, w: (x.argmax(-1), w.exp(), (x + w).sum(-1)),
    "one": lambda x, w: x * w.detach(),
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL)
def test_a_result_that_depends_on_nothing_that_needs_a_gradient(declare: Callable[..., Any], name: str) -> None:
    """As torch's own functions have it: eagerly, compiled, and of the op's backward."""
    fn = SEVERAL[name]
    op = declare(named(lambda x, w: fn(x, w), name), **TEXTS)
    for needed in itertools.product((False, True), repeat=2):
        x, w = (torch.rand(*size).requires_grad_(n) for size, n in zip(((3, 4), (4,)), needed, strict=True))
        expected = needing(fn(x, w))
        assert needing(op(x, w)) == expected, needed
        torch._dynamo.reset()
        assert needing(torch.compile(op, backend="aot_eager", fullgraph=True)(x, w)) == expected, needed


def needing(results: Any) -> list[bool]:
    return [y.requires_grad for y in (results if isinstance(results, tuple) else (results,))]


@pytest.mark.parametrize("needed", [*itertools.product((False, True), repeat=4)])
def test_sums_beside_norms_need_what_they_depend_on(needed: tuple[bool, ...]) -> None:
    sizes = ((3, 8), (3, 8), (8,), (8,))
    x, residual, weight, bias = (torch.rand(size).requires_grad_(n) for size, n in zip(sizes, needed, strict=True))
    of_sum = x.requires_grad or residual.requires_grad
    found = torch.ops.tk.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert needing(found) == [any(needed), of_sum]
    assert needing(torch.ops.tk.add_rms_norm(x, residual, weight, 1e-5)) == [any(needed[:3]), of_sum]
    if any(needed):
        given = [t for t, n in zip((x, residual, weight, bias), needed, strict=True) if n]
        total = x + residual
        norm = torch.nn.functional.layer_norm(total, (8,), weight, bias)
        expected = torch.autograd.grad((norm.sin() + total * of_sum).sum(), given)
        close(torch.autograd.grad((found[0].sin() + found[1] * of_sum).sum(), given), expected, str(needed))


@pytest.mark.parametrize("function", [tk.var_mean, tk.std_mean])
def test_a_mean_without_its_variance(function: Callable[..., Any]) -> None:
    x = torch.tensor([[1.0, float("inf")], [2.0, 3.0]], requires_grad=True)
    (found,) = torch.autograd.grad(function(x, -1)[1].sum(), x)
    assert torch.equal(found, torch.full((2, 2), 0.5))


class Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


SUMS = {"row_sum": lambda x: x.sum(-1), "row_mean": lambda x: x.mean(-1), "column_sum": lambda x: x.sum(0)}


@pytest.mark.parametrize(("name", "torchs"), SUMS.items(), ids=SUMS)
def test_gradients_of_sums_are_no_copies(name: str, torchs: Callable[..., Tensor]) -> None:
    """What all elements share is there once, as in ATen."""
    x = torch.randn(3, 5, requires_grad=True)
    grad = torch.randn_like(torchs(x))
    (found,) = torch.autograd.grad(getattr(torch.ops.tk, name)(x), x, grad)
    (wanted,) = torch.autograd.grad(torchs(x), x, grad)
    assert torch.equal(found, wanted)
    assert 0 in found.stride()


@pytest.mark.parametrize(("name", "torchs"), SUMS.items(), ids=SUMS)
def test_sums_are_differentiated_twice(name: str, torchs: Callable[..., Tensor]) -> None:
    x = torch.randn(3, 4, dtype=torch.float64 if name == "row_sum" else torch.float32, requires_grad=True)
    found = getattr(torch.ops.tk, name)(x.square())
    (first,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    y = x.detach().double().requires_grad_()
    (first,) = torch.autograd.grad(torchs(y.square()).square().sum(), y, create_graph=True)
    (wanted,) = torch.autograd.grad(first.sum(), y)
    torch.testing.assert_close(second.double(), wanted, rtol=1e-5, atol=1e-5)
