"""Random numbers: the same bits in every variant and layout, and on the CPU."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import host
import pytest
import torch
import torch.nn.functional as F

from tk.codegen.family import Generated, generate
from tk.generated import interpret, op, random

SEED = torch.tensor(0x1234_5678_9ABC_DEF0)


@op(x="T[..., N]", p="float", T=("fp32", "bf16"), grad=True)
def dropped(x, p):
    return F.dropout(x, p), torch.rand_like(x)


@op(x="fp32[M, N]")
def many(x):
    noise = torch.randn_like(x)
    coin = torch.bernoulli(torch.full_like(x, 0.3))
    return noise, coin, torch.randint(-5, 9, x.shape, device=x.device), torch.empty_like(x).exponential_(2.0)


@op(x="fp32[M, N]")
def summed(x):
    return (x + torch.rand_like(x)).sum(-1), torch.rand_like(x.t()).t() + x


@op(x="fp32[M, N]", seed="i64[]", offset="int")
def with_its_own(x, seed, offset):
    return torch.rand(x.shape, device=x.device)


@cache
def build(declared) -> Generated:
    return generate(declared.fn, declared.signature, declared.name, declared.grad)


def on_the_cpu(generated: Generated, *args: Any) -> list[torch.Tensor]:
    graph = next(g for g in json.loads(generated.op.meta)["graphs"]
                 if all({"fp32": torch.float32, "bf16": torch.bfloat16}[d] == args[0].dtype
                        for d in g["dtypes"].values()))  # fmt: skip
    given = dict(zip(generated.signature.params, args, strict=True))
    x = args[0]
    if generated.signature.tensors[next(iter(given))].leading:
        given[next(iter(given))] = x.reshape(-1, x.shape[-1])
    return interpret.evaluate(graph["nodes"], given, "op")


@pytest.mark.parametrize("offset", [0, 4, 5, 7, 2**34 - 2])
@pytest.mark.parametrize("layout", ["dense", "transposed", "stepped"])
@pytest.mark.parametrize("shape", [(3, 4, 32), (2, 3, 5), (2, 3, 36)])
def test_dropout(shape: tuple[int, ...], layout: str, offset: int) -> None:
    x = torch.randn(shape)
    if layout == "transposed":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "stepped":
        x = torch.stack([x, x], -1).flatten(-2)[..., ::2]
    found = build(dropped)
    assert list(found.signature.params) == ["x", "p", "seed", "offset"]
    expected = on_the_cpu(found, x, 0.25, SEED, offset)
    names = []
    for name, results in host.run_all(found, x, 0.25, SEED, offset):
        names.append(name)
        for result, value in zip(results, expected, strict=True):
            assert torch.equal(result.reshape(value.shape), value), name
    assert any("strided" in n for n in names)
    assert any("aligned" in n for n in names) == (layout == "dense" and shape[-1] % 4 == 0)
    uniform = random.bits(SEED, offset, 1, shape)
    assert torch.equal(expected[1].reshape(shape), ((uniform >> 8) & 0xFFFFFF).float() * 2.0**-24)


def test_a_backward_draws_what_the_forward_drew() -> None:
    found, x = build(dropped), torch.randn(5, 48)
    (y, _), grads = on_the_cpu(found, x, 0.5, SEED, 0), torch.randn(5, 48)
    given = {"grad_0": grads, "grad_1": grads, "x": x, "p": 0.5, "seed": SEED, "offset": 0}
    for name, (grad,) in host.run_all(found.backward, *(given[n] for n in found.backward.signature.params)):
        assert torch.equal(grad, torch.where(y != 0, grads * 2, 0.0)), name


def test_distributions() -> None:
    x = torch.zeros(256, 64)
    found = build(many)
    expected = on_the_cpu(found, x, SEED, 0)
    for name, results in host.run_all(found, x, SEED, 0):
        for result, value in zip(results, expected, strict=True):
            torch.testing.assert_close(result, value, msg=name)
    noise, coin, whole, waited = expected
    assert abs(noise.mean()) < 0.03 and abs(noise.std() - 1) < 0.03
    assert abs(coin.mean() - 0.3) < 0.02 and set(coin.unique().tolist()) == {0.0, 1.0}
    assert whole.min() == -5 and whole.max() == 8
    assert abs(waited.mean() - 0.5) < 0.02 and waited.min() >= 0


@pytest.mark.parametrize("shape", [(7, 64), (5, 33)])
def test_beside_reductions_and_views(shape: tuple[int, int]) -> None:
    found, x = build(summed), torch.randn(shape)
    expected = on_the_cpu(found, x, SEED, 8)
    count = 0
    for name, results in host.run_all(found, x, SEED, 8):
        count += 1
        torch.testing.assert_close(results[0], expected[0], msg=name)
        assert torch.equal(results[1], expected[1]), name
    assert count >= 3


def test_declared_seed() -> None:
    found, x = build(with_its_own), torch.empty(4, 16)
    assert list(found.signature.params) == ["x", "seed", "offset"]
    (expected,) = on_the_cpu(found, x, SEED, 0)
    (shifted,) = on_the_cpu(found, x, SEED, 3)
    assert torch.equal(expected.flatten()[3:], shifted.flatten()[:-3])
    (other,) = on_the_cpu(found, x, SEED + 1, 0)
    assert (other != expected).float().mean() > 0.99
