"""Gradients against fp64, beside torch's own."""

from collections.abc import Callable

import pytest
import torch
from second_order import CASES, Case, hessian_product

import tk
from benchmarks import accuracy, products

from .cases import rms
from .device import DEVICE

ACTIVATIONS = [name for name, _ in products.ACTIVATIONS]


def product_tk(x, w, bias, activation):
    return tk.mm(x, w, bias, activation=activation)


def addmm_tk(x, w, bias, activation):
    return tk.addmm(bias, x, w, beta=0.5, alpha=2.0, activation=activation)


def linear_tk(x, w, bias, activation):
    return tk.linear(x.unflatten(0, (2, -1)), w.t(), bias, activation=activation).flatten(0, 1)


def with_torch(form: Callable) -> Callable:
    alpha, beta = (2.0, 0.5) if form is addmm_tk else (1.0, 1.0)

    def run(x, w, bias, activation):
        z = torch.addmm(bias, x, w, beta=beta, alpha=alpha)
        return products.ACTIVATIONS[ACTIVATIONS.index(activation)][1](z)

    return run


def gradients(form: Callable, tensors: tuple[torch.Tensor, ...], grad: torch.Tensor, activation: str):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = form(*leaves, activation)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("form", [product_tk, addmm_tk, linear_tk], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=products.SHORT.get)
def test_gradients(dtype: torch.dtype, form: Callable, activation: str) -> None:
    m, n, k = 150, 264, 200
    tensors = tuple(torch.randn(s, device=DEVICE).to(dtype) for s in ((m, k), (k, n), (n,)))
    tensors = (tensors[0], tensors[1] / k**0.5, tensors[2])
    grad = torch.randn(m, n, device=DEVICE).to(dtype)
    ours = gradients(form, tensors, grad, activation)
    torchs = gradients(with_torch(form), tensors, grad, activation)
    exact = gradients(with_torch(form), tuple(t.double() for t in tensors), grad.double(), activation)
    for name, mine, theirs, reference in zip(("out", "x", "w", "bias"), ours, torchs, exact, strict=True):
        room = accuracy.slack(max(m, n, k), rms(reference), dtype != torch.float32)
        verdict = accuracy.judge(mine, theirs, reference, room)
        assert verdict.ok, f"{name}: {verdict}"


def test_a_gradient_that_nobody_asks_for_is_not_made() -> None:
    x, w = (torch.randn(64, 64, device=DEVICE) for _ in range(2))
    w.requires_grad_()
    tk.mm(x, w).sum().backward()
    assert x.grad is None
    torch.testing.assert_close(w.grad, x.sum(0)[:, None].expand(64, 64), rtol=1e-3, atol=1e-3)


# --- Gradients of gradients ---


@pytest.fixture
def ieee(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def dtype_of(case: Case) -> torch.dtype:
    return torch.bfloat16 if case.function == "grouped_mm" else torch.float32


def assert_near(mine, exact, dtype: torch.dtype) -> None:
    rtol, of_largest = (5e-2, 5e-2) if dtype == torch.bfloat16 else (2e-4, 5e-5)
    for a, b in zip(mine, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=1e-5 + of_largest * float(b.abs().max()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_hessian_vector_products(case: Case, ieee: None) -> None:
    dtype = dtype_of(case)
    mine = hessian_product(case.ours, case.leaves(dtype, DEVICE))
    assert_near(mine, hessian_product(case.torchs, case.leaves(torch.float64, DEVICE)), dtype)


def of_each(f: Callable) -> Callable:
    return torch.func.vmap(torch.func.grad(f))


@pytest.mark.parametrize("transform", [torch.func.hessian, torch.func.jacfwd, of_each])
@pytest.mark.parametrize("name", ["softmax", "rms_norm plain", "silu", "logsumexp", "norm", "cumsum"])
def test_transforms(name: str, transform: Callable) -> None:
    case = next(case for case in CASES if case.name == name)
    x = torch.randn(2, 3, 6, device=DEVICE)
    mine = transform(lambda x: case.ours(x).sin().sum())(x)
    assert_near([mine], [transform(lambda x: case.torchs(x).sin().sum())(x.double())], torch.float32)


def test_an_op_without_a_gradient_refuses() -> None:
    x = torch.randn(4, 16, device=DEVICE, requires_grad=True)
    with pytest.raises(NotImplementedError, match="quantize_fp8_tensor has no gradient"):
        torch.ops.tk.quantize_fp8_tensor(x, True)
    with pytest.raises(NotImplementedError, match="quantize_fp8_tensor has no gradient"):
        torch.func.grad(lambda x: torch.ops.tk.quantize_fp8_tensor(x, True)[1].sum())(x.detach())
    with torch.no_grad():
        torch.ops.tk.quantize_fp8_tensor(x, True)
    others = [[torch.zeros(4, 16, device=DEVICE)] for _ in range(3)]
    step = [torch.zeros((), device=DEVICE)]
    numbers = (0.1, 0.9, 0.999, 1e-8, 0.01, 1.0)
    with pytest.raises(NotImplementedError, match="adamw has no gradient"):
        torch.ops.tk.adamw([x], *others, step, *numbers)
    tk.adamw_([x], *others, step, lr=0.1)
    assert not torch.ops.tk.row_argmax(x, 1.0).requires_grad


def test_what_is_written_in_place_is_noticed() -> None:
    a = torch.randn(16, 16, device=DEVICE)
    seed = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for write in (lambda out: torch.ops.tk.fill_uniform(out, seed, 0), lambda out: tk.mm(a, a, out=out)):
        w, out = torch.randn(16, 16, device=DEVICE, requires_grad=True), torch.randn(16, 16, device=DEVICE)
        loss = (w * out).sum()
        write(out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    p = torch.randn(16, 16, device=DEVICE)
    w = torch.randn(16, 16, device=DEVICE, requires_grad=True)
    loss = (w * p).sum()
    others = [[torch.zeros_like(p)] for _ in range(3)]
    with torch.no_grad():
        torch.ops.tk.adamw([p], *others, [torch.zeros((), device=DEVICE)], 0.1, 0.9, 0.999, 1e-8, 0.01, 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
