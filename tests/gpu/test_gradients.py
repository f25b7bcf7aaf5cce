"""Gradients against fp64, beside torch's own."""

from collections.abc import Callable

import pytest
import torch

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
