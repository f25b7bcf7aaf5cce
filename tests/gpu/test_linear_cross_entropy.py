"""linear_cross_entropy: drawn problems against float64, and what it takes of memory at a large vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import seeds
import torch
import torch.nn.functional as F
from torch import Tensor

import tk
from tk.ops import linear_cross_entropy as blocks

from .device import DEVICE

SEED = seeds.seed("TK_LINEAR_CROSS_ENTROPY_SEED")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIB = 1 << 20


def torchs(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None, **kwargs: Any
) -> Tensor:
    return F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, **kwargs)


def results(f: Callable[..., Tensor], tensors: list[Tensor | None], dtype: torch.dtype, **kwargs: Any) -> list[Tensor]:
    """The loss and the gradients of input, linear_weight and linear_bias."""
    *leaves, weight = (None if x is None or not x.is_floating_point() else x.to(dtype) for x in tensors[:4])
    given = [x.requires_grad_() for x in leaves if x is not None]
    loss = f(leaves[0], leaves[1], tensors[4], linear_bias=leaves[2], weight=weight, **kwargs)
    return [
        loss.detach(),
        *torch.autograd.grad(
            loss, given, torch.linspace(1, 2, loss.numel(), device=DEVICE).to(loss).reshape(loss.shape)
        ),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", range(8))
def test_drawn_problems(number: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is at most twice torch's own, beside a rounding of the largest number. In blocks of 128 classes too."""
    print(f"TK_LINEAR_CROSS_ENTROPY_SEED={SEED + number}, number 0 repeats it")
    rng = Random(SEED + number)
    if (budget := rng.choice((None, 1 << 16, 1 << 20))) is not None:  # blocks of classes; of rows, of float32
        monkeypatch.setattr(blocks, "BUDGET_BYTES", budget)
        monkeypatch.setattr(blocks, "LEAST_ROWS", 16)
    rows, features, classes = rng.randint(1, 300), rng.choice((8, 33, 64, 257)), rng.choice((5, 128, 1000, 2049))
    generator = torch.Generator(DEVICE).manual_seed(SEED + number)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)

    bias = drawn(classes) if rng.random() < 0.5 else None
    weight = drawn(classes).abs() if rng.random() < 0.5 else None
    target = torch.randint(classes, (rows,), generator=generator, device=DEVICE)
    target[rng.randrange(rows)] = -100
    tensors = [drawn(rows, features), drawn(classes, features) / features**0.5, bias, weight, target]
    kwargs = {"reduction": rng.choice(("none", "mean", "sum")), "label_smoothing": rng.choice((0.0, 0.1))}
    exact = results(torchs, tensors, torch.float64, **kwargs)
    for ours, theirs, right in zip(
        results(tk.linear_cross_entropy, tensors, dtype, **kwargs), results(torchs, tensors, dtype, **kwargs), exact,
        strict=True,
    ):  # fmt: skip
        assert ours.dtype == theirs.dtype and ours.shape == right.shape
        if right.isnan().any():
            assert torch.equal(ours.isnan(), right.isnan())
            continue
        slack = 4 * torch.finfo(dtype).eps * float(right.abs().max())
        errors = [float((y.double() - right).abs().max()) for y in (ours, theirs)]
        assert errors[0] <= 2 * errors[1] + slack, (kwargs, tensors[0].shape, classes, errors)


@pytest.mark.parametrize("features", [1024, 4096])
def test_memory_of_131072_classes(features: int) -> None:
    """At most 256 MiB beside the weight and the gradients, of 8192 rows."""
    rows, classes = 8192, 131072
    if torch.cuda.mem_get_info()[0] < 8 * classes * features:
        pytest.skip("the GPU has no room for the weight and its gradient")
    x = torch.randn(rows, features, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    w = (torch.randn(classes, features, device=DEVICE, dtype=torch.bfloat16) / features**0.5).requires_grad_()
    target = torch.randint(classes, (rows,), device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tk.linear_cross_entropy(x, w, target).backward()
    gradients = 2 * features * (rows + classes)
    assert torch.cuda.max_memory_allocated() - before - gradients <= 256 * MIB


def test_memory_of_gradients_at_once() -> None:
    """Of a block that the budget just holds: at most 256 MiB beside the gradients, also in the backward."""
    rows, features, classes = 192, 1024, 131072
    x = torch.randn(rows, features, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    w = (torch.randn(classes, features, device=DEVICE, dtype=torch.bfloat16) / features**0.5).requires_grad_()
    target = torch.randint(classes, (rows,), device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (tk.linear_cross_entropy(x, w, target) * 3).backward()
    assert torch.cuda.max_memory_allocated() - before - 2 * features * (rows + classes) <= 256 * MIB


def test_a_graph_walked_twice() -> None:
    """Both multiply the gradients that the forward has saved."""
    x, w = (torch.randn(*s, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for s in ((64, 32), (500, 32)))
    loss = tk.linear_cross_entropy(x, w, torch.randint(500, (64,), device=DEVICE))
    first, second = (torch.autograd.grad(loss, (x, w), loss.detach() * 0 + 2, retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-2 * float(a.abs().max()))


def test_a_captured_graph() -> None:
    x, w = (torch.randn(*s, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for s in ((64, 32), (500, 32)))
    target = torch.randint(500, (64,), device=DEVICE)
    expected = torch.autograd.grad(tk.linear_cross_entropy(x, w, target), (x, w))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(tk.linear_cross_entropy(x, w, target), (x, w))
    graph.replay()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
