"""Kernels of the wheel's pairs for calls that are not quite theirs, against float64 and what the call says: another
bound or none, an offset, ids of all batch entries, slopes that are worked out."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import seeds
import torch

from tk.aot.spec import Family
from tk.flex import mods, own_ops
from tk.flex.tracing import trace
from tk.kernels.attention import pairs

from . import test_attention, test_attention_backward
from .attention_host import Call, block_lists
from .test_attention import Pair, qkv

SEED = seeds.seed("TK_MODS_SEED")
COUNT = int(os.environ.get("TK_MODS_COUNT", "40")) // 10
LONG = 160


@dataclass
class Served(Pair):
    """Mods as a call has them, with the kernels of the wheel's pair that serves them."""

    families: list[Family] = field(init=False)
    band: tuple[int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        given = trace.pair(self.score, self.mask)
        tensors, floats, ints = given.traced.by_kind(given.values)
        own = own_ops.find(given.traced, tensors, floats, ints)
        (general,) = (t for t in own_ops._known() if t.fingerprint == own.op)
        values = general.values_of(own.captured(tensors, torch.empty(1, HEADS, 1, 1)), own.floats, own.ints)
        self.captured = {f"c{i}": x for i, x in enumerate(values)}
        self.families = test_attention._families(trace.Pair(general, tuple(values)))
        self.band = own_ops._band(given.traced, ints)


HEADS = 2
IDS = torch.stack([torch.arange(LONG) // 17, torch.arange(LONG) // 31]).int()


@pytest.fixture(autouse=True)
def of_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    known = [traced for traced, _ in pairs.pairs()]
    names = {t.fingerprint for t in known}
    monkeypatch.setattr(own_ops, "_known", lambda: known)
    monkeypatch.setattr(own_ops, "_packed", lambda t, suffix: t.fingerprint if t.fingerprint in names else None)
    for cache in ("_matched", "_found", "_worked"):
        monkeypatch.setattr(own_ops, cache, {})


def both_sides(left: int, right: int) -> Any:
    return lambda b, h, q, k: (q - k <= left) & (k - q <= right)


MASKS = {
    "chunk": pairs.behind(mods.causal, 61),
    "window of a chunk": pairs.behind(mods.sliding_window(40), 61),
    "both sides": both_sides(20, 35),
    "past": both_sides(500, -3),
    "documents of a chunk": pairs.behind(mods.and_masks(mods.causal, mods.document(IDS)), 37),
    "documents of all": mods.and_masks(mods.sliding_window(25), mods.document(IDS[0])),
    "documents": mods.document(IDS.long()),
}


def later(score_mod: Any, at: int) -> Any:
    return lambda s, b, h, q, k: score_mod(s, b, h, q + at, k)


SCORES = {
    "none": lambda at: None,
    "alibi": lambda at: later(mods.alibi(torch.tensor([0.3, 0.1])), at),
    "alibi of heads": lambda at: later(mods.alibi(HEADS), at),
    "cap": lambda at: mods.soft_cap(2.0),
}


def call_of(pair: Served, M: int, N: int, lists: bool, dtype: torch.dtype) -> Call:
    call = Call(*qkv(2, HEADS, 1, M, N, 64, 64, dtype))
    if lists:
        call.q_block, call.kv_block = 32, 48
        call.lists = block_lists(pair.dense(2, HEADS, M, N), 32, 48)
    else:
        call.band = pair.band
    return call


@pytest.mark.drawn
@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks(mask: Any, lists: bool) -> None:
    pair = Served(None, mask)
    test_attention.check(pair, call_of(pair, 77, 139, lists, torch.float32))
    test_attention_backward.check(lambda: pair, [], call_of(pair, 77, 139, lists, torch.float16))


@pytest.mark.drawn
@pytest.mark.parametrize("mask", [None, "window of a chunk", "documents of a chunk"])
@pytest.mark.parametrize("score", [s for s in SCORES if s != "none"])
def test_scores(score: str, mask: str | None) -> None:
    pair = Served(SCORES[score](61), MASKS[mask] if mask else None)
    test_attention.check(pair, call_of(pair, 45, 110, False, torch.float16))
    test_attention_backward.check(lambda: pair, [], call_of(pair, 45, 110, False, torch.float32), captures=False)


def test_gradients_of_slopes() -> None:
    mask = pairs.behind(mods.sliding_window(30), 9)

    def make(slopes: torch.Tensor) -> Any:
        return (Pair if slopes.dtype == torch.float64 else Served)(later(mods.alibi(slopes), 9), mask)

    slopes = torch.tensor([0.3, 0.1])
    test_attention_backward.check(make, [slopes], call_of(make(slopes), 45, 70, False, torch.float32))


@pytest.mark.parametrize("n", range(COUNT))
def test_random_neighbours(n: int) -> None:
    rng = random.Random(f"{SEED} {n}")
    at, left, right = rng.choice([0, -7, 19, 64]), rng.randrange(-5, 90), rng.randrange(-5, 90)
    parts = [lambda b, h, q, k: q - k <= left, lambda b, h, q, k: k - q <= right, mods.causal,
             mods.document(rng.choice([IDS, IDS.long(), IDS[0]]))]  # fmt: skip
    wanted = rng.sample(range(4), rng.randint(1, 3))
    mask = pairs.behind(mods.and_masks(*(parts[i] for i in wanted if not (i == 1 and 2 in wanted))), at)
    score = rng.choice(list(SCORES))
    M, N, lists = rng.randint(1, 90), rng.randint(1, 60), rng.random() < 0.5
    where = f"TK_MODS_SEED={SEED}, case {n}: {score}, parts {wanted} at {at}, left {left}, right {right}, {M} x {N}"
    try:
        pair = Served(SCORES[score](at), mask)
        dtype = rng.choice([torch.float16, torch.float32])
        test_attention.check(pair, call_of(pair, M, N, lists, dtype))
        test_attention_backward.check(lambda: pair, [], call_of(pair, M, N, lists, dtype), captures=False)
    except Exception as error:
        raise AssertionError(where) from error
