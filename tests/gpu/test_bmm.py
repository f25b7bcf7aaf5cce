"""bmm and baddbmm: every config in every bucket, random problems, batches of every kind, gradients, graphs."""

from __future__ import annotations

import random

import pytest
import torch

import tk

from .device import DEVICE
from .other_products import (
    BF16,
    FP16,
    FP32,
    LETTERS,
    activated,
    as_computed,
    draws,
    every_config,
    matrices,
    problem,
    size,
)

KINDS = ((BF16, None, "ieee"), (BF16, FP32, "ieee"), (FP16, None, "ieee"), (FP32, None, "ieee"), (FP32, None, "tf32"))
PRECISION = {"ieee": 0, "tf32": 1}
ORDERS = ("nn", "nt", "tn", "tt", "ss")
SIZES = ((3, 272, 320, 208), (40, 32, 32, 32), (2, 130, 65, 33), (1, 64, 128, 64), (5, 16, 48, 1040))


def check(a, b, bias, activation, out_dtype, precision, config=-1, beta=1.0, alpha=1.0) -> list[str]:  # type: ignore[no-untyped-def]
    z = alpha * (as_computed(a, precision) @ as_computed(b, precision))
    if bias is not None:
        z = z + beta * bias.double()
    reference = activated(z, activation)

    def call(config: int) -> torch.Tensor:
        settings = (activation, out_dtype, PRECISION[precision], config)
        if bias is None:
            return torch.ops.tk.bmm(a, b, None, *settings)
        return torch.ops.tk.baddbmm(bias, a, b, beta, alpha, *settings)

    wrong = []
    for name, result in every_config(call):
        if said := problem(result, reference, a.shape[2], a, b, abs(alpha) + abs(beta)):
            wrong.append(f"{name}: {said}")
    return wrong


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_every_config(order: str, kind: tuple[torch.dtype, torch.dtype | None, str]) -> None:
    dtype, out_dtype, precision = kind
    wrong = []
    for batch, m, n, k in SIZES:
        for odd in (False, True):
            a = matrices(batch, m, k, dtype=dtype, letter=order[0], odd=odd)
            b = matrices(batch, k, n, dtype=dtype, letter=order[1], odd=odd)
            for shape, activation in ((None, 0), ((n,), 1), ((batch, m, 1), 3), ((batch, m, n), 4)):
                bias = None if shape is None else torch.randn(shape, device=DEVICE).to(dtype)
                found = check(a, b, bias, activation, out_dtype, precision)
                wrong += [f"{batch}x{m}x{n}x{k}{' odd' if odd else ''} bias {shape} {x}" for x in found]
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("chunk", range(4))
def test_random_batches(chunk: int) -> None:
    torch.manual_seed(chunk)
    wrong = []
    for rng in draws(f"bmm {chunk}", 300):
        dtype, out_dtype, precision = rng.choice(KINDS)
        batch, m, n, k = size(rng, 64), size(rng, 512), size(rng, 512), size(rng, 1024)
        a = operand(rng, batch, m, k, dtype)
        b = operand(rng, batch, k, n, dtype)
        shape = rng.choice((None, (n,), (m, 1), (m, n), (batch, 1, n), (batch, m, n)))
        bias = None if shape is None else torch.randn(shape, device=DEVICE).to(dtype)
        alpha, beta = rng.choice(((1.0, 1.0), (0.5, -2.0))) if bias is not None else (1.0, 1.0)
        z = alpha * (as_computed(a, precision) @ as_computed(b, precision))
        z = z if bias is None else z + beta * bias.double()
        activation = rng.randrange(5)
        settings = (activation, out_dtype, PRECISION[precision])
        if bias is None:
            result = torch.ops.tk.bmm(a, b, None, *settings)
        else:
            result = torch.ops.tk.baddbmm(bias, a, b, beta, alpha, *settings)
        if said := problem(result, activated(z, activation), k, a, b, abs(alpha) + abs(beta)):
            wrong.append(f"{dtype} {batch}x{m}x{n}x{k} strides {a.stride()} {b.stride()}: {said}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:10])


def operand(rng: random.Random, batch: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Also one that all share, and one whose batch lies in the middle."""
    kind = rng.choice(("plain", "plain", "shared", "middle", "tail"))
    letter, odd = rng.choice(LETTERS + "nt"), rng.random() < 0.3
    if kind == "shared":
        return matrices(rows, cols, dtype=dtype, letter=letter, odd=odd).expand(batch, rows, cols)
    if kind == "middle":
        return matrices(rows, batch, cols, dtype=dtype, odd=odd).transpose(0, 1)
    x = matrices(batch, rows, cols, dtype=dtype, letter=letter, odd=odd)
    return x if kind == "plain" else matrices(batch + 1, rows, cols, dtype=dtype, letter=letter, odd=odd)[1:]


def test_neighbours_are_not_touched() -> None:
    """Rows, columns and matrices beside the result keep their NaN, and NaN beside the operands stays there."""
    for m, n, k in ((200, 136, 72), (129, 64, 40), (30, 24, 56)):
        whole = torch.full((4, m + 8, n + 8), float("nan"), device=DEVICE, dtype=BF16)
        a = torch.full((4, m + 8, k + 8), float("nan"), device=DEVICE, dtype=BF16)
        b = torch.full((4, k + 8, n + 8), float("nan"), device=DEVICE, dtype=BF16)
        views = a[1:3, :m, :k], b[1:3, :k, :n]
        for x in views:
            x.copy_(torch.randn(x.shape, device=DEVICE))
        out = whole[1:3, :m, :n]
        tk.bmm(*views, out=out)
        assert not problem(out, views[0].double() @ views[1].double(), k, *views)
        assert int(whole.isnan().sum()) == whole.numel() - out.numel()


def test_gradients() -> None:
    a, b = matrices(6, 72, 136).requires_grad_(), matrices(136, 80).requires_grad_()
    bias = matrices(1, 80).requires_grad_()
    wide = [x.detach().double().requires_grad_() for x in (a, b, bias)]
    tk.baddbmm(bias, a, b.expand(6, -1, -1), beta=0.5, activation="gelu").float().square().sum().backward()
    torch.nn.functional.gelu(wide[0] @ wide[1] + 0.5 * wide[2]).square().sum().backward()
    for ours, exact in zip((a, b, bias), wide, strict=True):
        assert ours.grad is not None and exact.grad is not None
        error = (ours.grad.double() - exact.grad).norm() / exact.grad.norm()
        assert error < 1e-2


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are CUDA's")
def test_in_a_graph() -> None:
    a, b = matrices(8, 128, 64), matrices(8, 64, 128)
    tk.bmm(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tk.bmm(a, b)
    a.copy_(matrices(8, 128, 64))
    graph.replay()
    assert not problem(out, a.double() @ b.double(), 64, a, b)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU's memory")
def test_more_elements_than_2_to_the_31() -> None:
    batch, m, n = 9_000, 480, 512
    a, b = torch.randn(batch, m, 16, device=DEVICE).bfloat16(), torch.randn(batch, 16, n, device=DEVICE).bfloat16()
    out = tk.bmm(a, b)
    for i in (0, batch // 2, batch - 1):
        assert not problem(out[i], a[i].double() @ b[i].double(), 16, a[i], b[i])
