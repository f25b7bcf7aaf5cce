"""Under torch.compile a mod's numbers become symbols with their second value: the same results as eagerly, for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tk
from tk.flex import and_masks, create_block_mask, mods, or_masks
from tk.flex.tracing import trace

S = 64
attention: Any = tk.flex_attention


def scaled(n: Any) -> Any:
    return lambda score, b, h, i, j: score * n


def distance(n: Any) -> Any:
    return lambda score, b, h, i, j: score + n * (i - j)


def capped(n: Any) -> Any:
    return lambda score, b, h, i, j: torch.tanh(score / n) * n


def magnitude(n: Any) -> Any:
    return lambda score, b, h, i, j: score * abs(n) - abs(-n)


def near(n: Any) -> Any:
    return lambda b, h, i, j: i - j < n


def arithmetic(n: Any) -> Any:
    return lambda b, h, i, j: (i + n) * n - i // n - n > j * 2 - n // 2


SCORES: dict[str, Callable[[Any], Any]] = {
    "soft_cap": mods.soft_cap,
    "alibi": mods.alibi,
    "relative_bias": lambda n: mods.relative_bias(torch.arange(2.0 * (2 * n + 1)).view(2, -1), n),
    "scaled": scaled,
    "distance": distance,
    "capped": capped,
    "magnitude": magnitude,
}
MASKS: dict[str, Callable[[Any], Any]] = {
    "sliding_window": mods.sliding_window,
    "dilated_window": lambda n: mods.dilated_window(n, 2),
    "prefix_lm": mods.prefix_lm,
    "natten_2d": lambda n: mods.natten_2d(8, 8, n),
    "and_masks": lambda n: and_masks(mods.causal, mods.sliding_window(n)),
    "or_masks": lambda n: or_masks(mods.sliding_window(n), mods.prefix_lm(n)),
    "near": near,
    "arithmetic": arithmetic,
}
FLOATS = ("soft_cap", "scaled", "distance", "capped", "magnitude", "near")
INTS = (2, 3, 5)
CASES = [(name, INTS) for name in (*SCORES, *MASKS)] + [(name, (2.5, 3.5, 1.25)) for name in FLOATS]


def attend(qkv: Any, name: str, mod: Any) -> Any:
    if name in SCORES:
        return attention(*qkv, score_mod=mod)
    mask = create_block_mask(mod, None, None, S, S, "cpu", 16)
    return attention(*qkv, block_mask=mask)


@pytest.fixture
def qkv() -> Any:
    torch._dynamo.reset()
    return [torch.randn(1, 2, S, 16, requires_grad=True) for _ in range(3)]


def same(found: Tensor, expected: Tensor, qkv: Any) -> None:
    torch.testing.assert_close(found, expected)
    both = [torch.autograd.grad(x.square().sum(), qkv) for x in (found, expected)]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("place", ["inside", "given"])
@pytest.mark.parametrize(("name", "values"), CASES, ids=lambda x: x if isinstance(x, str) else type(x[0]).__name__)
def test_values(name: str, values: tuple[Any, ...], place: str, qkv: Any) -> None:
    """Of a mod that is made in the compiled function, and of one that the function is given."""
    make = (SCORES | MASKS)[name]
    inside = torch.compile(lambda n: attend(qkv, name, make(n)), backend="aot_eager", fullgraph=True)
    given = torch.compile(lambda mod: attend(qkv, name, mod), backend="aot_eager", fullgraph=True)
    for n in values:
        found = inside(n) if place == "inside" else given(make(n))
        same(found, attend(qkv, name, make(n)), qkv)


@pytest.mark.parametrize("name", ["near", "sliding_window", "prefix_lm"])
def test_masks_that_were_made_before(name: str, qkv: Any) -> None:
    run = torch.compile(lambda mask: attention(*qkv, block_mask=mask), backend="aot_eager", fullgraph=True)
    for n in INTS:
        mask = create_block_mask(MASKS[name](n), None, None, S, S, "cpu", 16)
        same(run(mask), attention(*qkv, block_mask=mask), qkv)


@pytest.mark.parametrize("name", ["soft_cap", "capped"])
def test_inductor(name: str, qkv: Any) -> None:
    run = torch.compile(lambda n: attend(qkv, name, SCORES[name](n)), fullgraph=True)
    for n in (2.5, 3.5):
        same(run(n), attend(qkv, name, SCORES[name](n)), qkv)


@pytest.mark.parametrize("n", [0, -3])
def test_refused_numbers(n: int, qkv: Any) -> None:
    """The message holds no digits there."""
    run = torch.compile(lambda n: attend(qkv, "sliding_window", mods.sliding_window(n)), backend="aot_eager")
    for good in (4, 5):
        run(good)
    with pytest.raises(ValueError, match="size is"):
        run(n)


@pytest.mark.parametrize("x", [3.0, 3])
def test_item_of_a_captured_tensor_is_a_number(x: float) -> None:
    qkv: Any = [torch.randn(1, 2, S, 16) for _ in range(3)]
    held = torch.tensor(x)
    found = attention(*qkv, score_mod=lambda score, b, h, i, j: score * held.item())
    torch.testing.assert_close(found, attention(*qkv, score_mod=scaled(x)))
    pairs = [trace.pair(f, None) for f in (lambda s, b, h, i, j: s * held.item(), scaled(x))]
    assert pairs[0].fingerprint == pairs[1].fingerprint
