"""A captured tensor of no dimensions on the CPU is a number, whatever device the query is on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tk
from tk.flex import source
from tk.flex.checks import moved
from tk.flex.tracing import trace

SCORES: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "factor": lambda t: lambda s, b, h, q, k: s * t,
    "on the left": lambda t: lambda s, b, h, q, k: t * s,
    "term": lambda t: lambda s, b, h, q, k: s - t,
    "divisor": lambda t: lambda s, b, h, q, k: s / t,
    "method": lambda t: lambda s, b, h, q, k: s + t.exp(),
    "cap": lambda t: lambda s, b, h, q, k: torch.tanh(s / t) * t,
    "choice": lambda t: lambda s, b, h, q, k: torch.where(q >= k, s, t),
    "clamp": lambda t: lambda s, b, h, q, k: torch.clamp(s, max=t),
    "minimum": lambda t: lambda s, b, h, q, k: torch.minimum(s, t),
    "made of two": lambda t: lambda s, b, h, q, k: s * (t * 2 + 1),
    "default": lambda t: lambda s, b, h, q, k, x=t: s * x,
    "in a dict": lambda t: lambda s, b, h, q, k: s * {"t": t}["t"],
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)


def dense(score_mod: Any, q: torch.Tensor) -> torch.Tensor:
    s = q @ q.mT * q.shape[-1] ** -0.5
    i, j = (torch.arange(q.shape[2], dtype=torch.int32).view(v) for v in ((-1, 1), (1, -1)))
    zero = torch.zeros(1, 1, dtype=torch.int32)
    return torch.softmax(score_mod(s, zero, zero, i, j).float(), -1) @ q


@pytest.mark.parametrize(("name", "dtype"), list(itertools.product(SCORES, DTYPES)))
def test_its_value_is_a_run_time_argument(name: str, dtype: torch.dtype) -> None:
    if dtype.is_floating_point is False and name == "minimum":
        pytest.skip("of two dtypes")
    t = torch.tensor(2, dtype=dtype)
    mod, q = SCORES[name](t), torch.randn(1, 1, 9, 8)
    first = trace.pair(mod, None)
    assert all(c.kind != "tensor" for c in first.captures) and first.captures
    for value in (3, 1):
        t.fill_(value)
        pair = trace.pair(mod, None)
        assert pair.traced is first.traced and pair.values != first.values
        torch.testing.assert_close(tk.flex_attention(q, q, q, mod), dense(mod, q), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["factor", "term", "cap", "divisor"])
def test_it_is_the_pair_of_a_number(name: str) -> None:
    given, number = (trace.pair(SCORES[name](x), None) for x in (torch.tensor(2.0), 2.0))
    assert given.fingerprint == number.fingerprint and given.values == number.values


def test_one_with_a_gradient_has_it() -> None:
    t, q = torch.tensor(2.0), torch.randn(1, 1, 9, 8)
    mod = SCORES["factor"](t)
    without = trace.pair(mod, None)
    t.requires_grad_()
    assert trace.pair(mod, None).captures[0].kind == "tensor"
    (grad,) = torch.autograd.grad(tk.flex_attention(q, q, q, mod).square().sum(), t)
    (expected,) = torch.autograd.grad(dense(mod, q).square().sum(), t)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)
    assert trace.pair(SCORES["factor"](torch.tensor(1.0)), None).traced is without.traced


def test_what_is_no_number_is_moved() -> None:
    """A tensor with a gradient, or of bool: with "meta" for the device of the query."""
    query = torch.empty(1, device="meta")
    t, table = torch.tensor(2.0, requires_grad=True), torch.randn(3)
    found = moved([t, table], query)
    assert found[0].device.type == "meta" and found[0].grad_fn is not None and found[1] is table


@pytest.mark.parametrize("value", [True, False])
def test_a_bool_is_one_pair_for_both(value: bool) -> None:
    t, q = torch.tensor(value), torch.randn(1, 1, 9, 8)

    def mod(s, b, h, q, k):  # type: ignore[no-untyped-def]
        return torch.where(t, s, s * 0.5)

    assert trace.pair(mod, None).captures[0].dtype is torch.bool
    torch.testing.assert_close(tk.flex_attention(q, q, q, mod), dense(mod, q))


def test_a_number_that_decides_is_structure() -> None:
    t = torch.tensor(2)

    def mod(s, b, h, q, k):  # type: ignore[no-untyped-def]
        return s * 2 if t.item() > 2 else s + t

    assert trace.pair(mod, None).captures == []
    assert trace.pair(mod, None).score is not None
    t.fill_(3)
    assert trace.pair(mod, None).score.result.target is torch.ops.aten.mul.Tensor  # type: ignore[union-attr]


@pytest.mark.parametrize("write", ["add_", "mul_"])
def test_it_is_not_written(write: str) -> None:
    t = torch.tensor(2.0)
    with pytest.raises(tk.UnsupportedError, match="writes t, which it captures"):
        trace.pair(lambda s, b, h, q, k: s + getattr(t, write)(1.0), None)


def test_a_file_that_registers_one_of_a_gpu_means_that() -> None:
    pair = trace.pair(SCORES["factor"](torch.tensor(2.0, device="meta")), None)
    scope: dict[str, Any] = {}
    text = (
        source.source_of(pair.traced).rpartition("tk.flex.register(")[0]
        + "\nmod = score(torch.empty([], device='meta'))"
    )
    exec(text, scope)
    assert "device='meta'" in source.source_of(pair.traced)
    assert trace.pair(scope["mod"], None).fingerprint == pair.fingerprint
