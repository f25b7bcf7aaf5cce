"""Which of the wheel's pairs serves a call, and what it says with what it is then given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tk.flex import own_ops
from tk.flex.tracing import evaluate, trace
from tk.kernels.attention import pairs

B, H, M, N = 2, 4, 13, 19  # queries and keys


@cache
def wheel() -> tuple[trace.Traced, ...]:
    return tuple(traced for traced, _ in pairs.pairs())


@dataclass
class Served:
    """The pair that a call is of, and the wheel's, with what it captures."""

    given: trace.Pair
    general: trace.Traced
    values: list[Any]
    own: own_ops.OwnOp


def only(monkeypatch: pytest.MonkeyPatch, known: Any) -> None:
    """As if the loaded packs had these pairs. Each one's op is its fingerprint."""
    names = {t.fingerprint for t in known}
    monkeypatch.setattr(own_ops, "_known", lambda: list(known))
    monkeypatch.setattr(own_ops, "_packed", lambda t, suffix: t.fingerprint if t.fingerprint in names else None)
    monkeypatch.setattr(own_ops, "_matched", {})
    monkeypatch.setattr(own_ops, "_found", {})
    monkeypatch.setattr(own_ops, "_worked", {})


def serve(score: Any, mask: Any) -> Served:
    """Raises tk.VariantNotFoundError."""
    given = trace.pair(score, mask)
    tensors, floats, ints = given.traced.by_kind(given.values)
    own = own_ops.find(given.traced, tensors, floats, ints)
    general = next(t for t in own_ops._known() if t.fingerprint == own.op)
    captured = own.captured(tensors, torch.empty(B, H, M, 8))
    return Served(given, general, general.values_of(captured, own.floats, own.ints), own)


def said(traced: trace.Traced, values: Any, score: Tensor) -> Tensor:
    """The scores, -inf where the mask lets nothing through."""
    at = evaluate.indices(range(B), range(H), (0, M), (0, N), "cpu")
    if traced.score is not None:
        score = evaluate.evaluate(traced.score, (score, *at), values)
    if traced.mask is not None:
        score = torch.where(evaluate.evaluate(traced.mask, at, values), score, -torch.inf)
    return score


def check(served: Served) -> None:
    scores = torch.randn(B, H, M, N, generator=torch.Generator().manual_seed(0))
    expected = said(served.given.traced, served.given.values, scores)
    torch.testing.assert_close(said(served.general, served.values, scores).expand(expected.shape), expected)


def walked(served: Served) -> Iterator[Tensor]:
    """Bool [M, N]: what kernels walk without a block mask, and where they do not ask the mask."""
    _, _, ints = served.given.traced.by_kind(served.given.values)
    left, right, is_exact = own_ops._band(served.given.traced, ints)
    difference = torch.arange(N) - torch.arange(M)[:, None]
    inside = (difference <= right) & (-difference <= left)
    yield inside
    yield inside if is_exact else torch.zeros_like(inside)
