"""mm_plus_mm: every config in every bucket, random problems, gradients."""

from __future__ import annotations

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
SIZES = ((272, 320, 208, 1040), (130, 65, 33, 7), (16, 512, 64, 64), (1, 40, 72, 8))


def operands(m: int, n: int, k: int, k2: int, dtype: torch.dtype, orders: tuple[str, str], odd: bool = False):  # type: ignore[no-untyped-def]
    for inner, order in ((k, orders[0]), (k2, orders[1])):
        yield matrices(m, inner, dtype=dtype, letter=order[0], odd=odd)
        yield matrices(inner, n, dtype=dtype, letter=order[1], odd=odd)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("order", ("nn", "nt", "tn", "tt", "ss"))
def test_every_config(order: str, kind: tuple[torch.dtype, torch.dtype | None, str]) -> None:
    dtype, out_dtype, precision = kind
    wrong = []
    for shape in SIZES:
        m, n, k, k2 = shape
        for odd in (False, True):
            a, b, c, d = operands(*shape, dtype, (order, order), odd)
            z = sum(as_computed(x, precision) @ as_computed(y, precision) for x, y in ((a, b), (c, d)))
            for bias, activation in ((None, 0), (matrices(1, n, dtype=dtype)[0], 1), (matrices(m, n, dtype=dtype), 4)):
                reference = activated(z if bias is None else z + bias.double(), activation)

                def call(config: int, bias=bias, activation=activation, a=a, b=b, c=c, d=d):  # type: ignore[no-untyped-def]
                    settings = (activation, out_dtype, PRECISION[precision], config)
                    return torch.ops.tk.mm_plus_mm(a, b, c, d, bias, *settings)

                for name, result in every_config(call):
                    if said := problem(result, reference, k + k2, a, b, 4):
                        wrong.append(f"{shape}{' odd' if odd else ''} {name}: {said}")
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("chunk", range(4))
def test_random_pairs(chunk: int) -> None:
    torch.manual_seed(chunk)
    wrong = []
    for rng in draws(f"mm_plus_mm {chunk}", 300):
        dtype, out_dtype, precision = rng.choice(KINDS)
        m, n, k, k2 = size(rng, 1024), size(rng, 1024), size(rng, 2048), size(rng, 2048)
        orders = [rng.choice(LETTERS) + rng.choice(LETTERS) for _ in range(2)]
        if rng.random() < 0.7:
            orders[1] = orders[0]
        a, b, c, d = operands(m, n, k, k2, dtype, (orders[0], orders[1]), rng.random() < 0.3)
        z = sum(as_computed(x, precision) @ as_computed(y, precision) for x, y in ((a, b), (c, d)))
        activation = rng.randrange(5)
        result = torch.ops.tk.mm_plus_mm(a, b, c, d, None, activation, out_dtype, PRECISION[precision])
        if said := problem(result, activated(z, activation), k + k2, a, b, 4):
            wrong.append(f"{dtype} {m}x{n}x{k}+{k2} {orders}: {said}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:10])


def test_gradients() -> None:
    shapes = ((72, 136), (136, 80), (72, 40), (40, 80))
    tensors = [matrices(*s).requires_grad_() for s in shapes]
    wide = [x.detach().double().requires_grad_() for x in tensors]
    a, b, c, d = wide
    tk.mm_plus_mm(*tensors, activation="silu").float().square().sum().backward()  # type: ignore[misc]
    torch.nn.functional.silu(a @ b + c @ d).square().sum().backward()
    for ours, exact in zip(tensors, wide, strict=True):
        assert ours.grad is not None and exact.grad is not None
        assert (ours.grad.double() - exact.grad).norm() / exact.grad.norm() < 1e-2


def test_an_inner_size_of_0_leaves_the_other_product() -> None:
    a, b = matrices(40, 64), matrices(64, 24)
    c, d = torch.empty(40, 0, device=DEVICE, dtype=BF16), torch.empty(0, 24, device=DEVICE, dtype=BF16)
    assert torch.equal(tk.mm_plus_mm(a, b, c, d), tk.mm(a, b)) and torch.equal(tk.mm_plus_mm(c, d, a, b), tk.mm(a, b))
    assert not tk.mm_plus_mm(c, d, c, d).any()
