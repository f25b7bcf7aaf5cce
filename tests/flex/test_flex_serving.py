"""Pairs of the wheel serve their neighbours: other bounds, none, an offset, other ids, other slopes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import seeds
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import tk
from tk.flex import matching, mods, own_ops
from tk.flex.tracing import trace
from tk.kernels.attention import pairs

from . import serving
from .serving import H, check, only, serve, wheel

LONG = 64
IDS = torch.arange(LONG).div(5, rounding_mode="floor").int().repeat(serving.B, 1)
IDS[1] = IDS[1] // 2
OTHER_IDS = IDS.flip(1).contiguous()
SLOPES = 2.0 ** -torch.arange(1, H + 1)  # of which halves are exact, and their products with distances
behind = pairs.behind


@pytest.fixture(autouse=True)
def of_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, wheel())


def documents(ids: torch.Tensor) -> list[Any]:
    return [
        mods.document(ids), mods.and_masks(mods.causal, mods.document(ids)),
        mods.and_masks(mods.document(ids), mods.sliding_window(4)),
        mods.and_masks(mods.document(ids), lambda b, h, q, k: (q - k).abs() <= 3),
    ]  # fmt: skip


BANDS: dict[str, Any] = {
    "none": None,
    "causal": mods.causal,
    "window": mods.sliding_window(4),
    "both sides": lambda b, h, q, k: (q - k < 4) & (k - q < 3),
    "one side": lambda b, h, q, k: k - q < 3,
    "past": lambda b, h, q, k: q - k >= 2,
    "distance": lambda b, h, q, k: (q - k).abs() <= 3,
    "strictly causal": lambda b, h, q, k: k < q,
}
DOCUMENTS: dict[str, Any] = {
    f"{name} {i}": mask
    for name, ids in {"ids": IDS, "wide ids": IDS.long(), "ids of all": IDS[0], "wide of all": IDS[0].long()}.items()
    for i, mask in enumerate(documents(ids))
} | {
    "of two tensors": lambda b, h, q, k: IDS[b, q] == OTHER_IDS[b, k],
    "by key first": lambda b, h, q, k: (OTHER_IDS[b, k] == IDS[b, q]) & (k <= q),
}  # fmt: skip
MASKS = BANDS | DOCUMENTS
MASKS |= {f"{name} at {n}": behind(mask, n) for name, mask in MASKS.items() if mask is not None for n in (6, -2)}
SCORES: dict[str, Any] = {
    "none": None,
    "alibi": mods.alibi(SLOPES),
    "alibi in half": mods.alibi(SLOPES.half()),
    "alibi of heads": mods.alibi(H),
    "slopes of its own": lambda s, b, h, q, k: s - (q - k) * 2.0 ** (-(h + 1)),
    "alibi at 6": lambda s, b, h, q, k: mods.alibi(SLOPES)(s, b, h, q + 6, k),
    "alibi of heads at 6": lambda s, b, h, q, k: mods.alibi(H)(s, b, h, q + 6, k),
    "cap": mods.soft_cap(2.0),
}


@pytest.mark.parametrize("score", SCORES)
def test_the_wheel_serves_neighbours(score: str) -> None:
    """And says what they say."""
    for name, mask in MASKS.items():
        try:
            check(serve(SCORES[score], mask))
        except (AssertionError, tk.Error) as error:
            raise AssertionError(f"{score}, {name}") from error


@pytest.mark.parametrize("score", SCORES)
def test_the_compiler_spells_numbers_out(score: str) -> None:
    """A pair's numbers may be constants of its graph."""
    for left, right in ((0, 3), (4, 0), (5, 7), (0, 0)):
        source = f"lambda b, h, q, k: (q - k <= {left}) & (k - q <= {right}) & (IDS[b, q + 2] == IDS[b, k])"
        check(serve(SCORES[score], eval(source, {"IDS": IDS})))


@pytest.mark.parametrize("offset", [5, 0])
def test_what_needs_no_more_than_the_plain_pairs_gets_them(offset: int) -> None:
    for score, mask in ((None, None), (None, mods.causal), (mods.alibi(SLOPES), mods.causal),
                        (mods.soft_cap(2.0), mods.causal), (None, documents(IDS)[1])):  # fmt: skip
        served = serve(score, mask)
        assert served.general is served.given.traced
    assert serve(mods.alibi(H), mods.causal).general is trace.pair(mods.alibi(SLOPES), mods.causal).traced


def test_an_offset_in_the_memory_of_a_gpu() -> None:
    offset = torch.tensor(0, device="meta")
    for mask in (mods.causal, mods.sliding_window(3)):
        served = serve(None, behind(mask, offset))
        assert served.general is trace.pair(None, pairs.BEHIND_TENSOR).traced

        def read(values: Any) -> list[Any]:
            return [torch.tensor(6) if x is offset else x for x in values]

        given = trace.Pair(served.given.traced, tuple(read(served.given.values)))
        check(serving.Served(given, served.general, read(served.values), served.own))


@pytest.mark.parametrize("mask", [m for n, m in MASKS.items() if m is not None and "at" in n][::5])
def test_a_mask_that_is_written_as_a_score(mask: Any) -> None:
    for score in (lambda s, b, h, q, k: s, mods.soft_cap(2.0)):

        def masked(s: Any, b: Any, h: Any, q: Any, k: Any, score: Any = score) -> Any:
            return torch.where(mask(b, h, q, k), score(s, b, h, q, k), -float("inf"))

        check(serve(masked, None))


# --- What is found once ---


def test_a_pair_is_sought_once_for_all_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder's offset is another one in every step."""
    serve(None, behind(mods.causal, 3))
    monkeypatch.setattr(matching, "numbers", None)
    for offset in (4, -5, 0):
        check(serve(None, behind(mods.causal, offset)))


def test_numbers_that_must_be_equal_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The general pair takes one number where the call has two: it serves while they are equal."""

    def call(n: float, m: float) -> Any:
        return lambda s, b, h, q, k: torch.tanh(s * n) * m

    cap = 2.0
    only(monkeypatch, [trace.pair(lambda s, b, h, q, k: torch.tanh(s * cap) * cap, None).traced])
    check(serve(call(3.0, 3.0), None))
    with pytest.raises(tk.VariantNotFoundError):
        serve(call(3.0, 4.0), None)
    check(serve(call(5.0, 5.0), None))


def test_slopes_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [serve(mods.alibi(n), mods.causal).values[0] for n in (H, H, 2 * H)]
    assert made[0] is made[1] and not torch.equal(made[0], made[2])
    torch.testing.assert_close(made[0], 2.0 ** (-8.0 * torch.arange(1, H + 1) / H))


def test_what_is_worked_out_under_a_mode_is_not_kept() -> None:
    with FakeTensorMode():
        fake = serve(mods.alibi(H), mods.causal).values[0]
    assert isinstance(fake, FakeTensor)
    assert not isinstance(serve(mods.alibi(H), mods.causal).values[0], FakeTensor)


def test_gradients_of_what_is_worked_out_go_nowhere() -> None:
    served = serve(mods.alibi(H), mods.sliding_window(3))
    assert served.own.gradients(served.given.traced, [], [torch.ones(H)]) == []


def test_what_is_repeated_takes_no_memory() -> None:
    served = serve(None, documents(IDS[0])[2])
    repeated = [x for x in served.values if isinstance(x, torch.Tensor)]
    assert [x.stride() for x in repeated] == [(0, 1)] * 2
    assert all(x.untyped_storage().data_ptr() == IDS.untyped_storage().data_ptr() for x in repeated)


# --- Who is not served ---


def test_tables_with_gradients_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradient would be of the size of all batch entries and heads."""
    only(monkeypatch, [trace.pair(mods.learned_bias(torch.zeros(1, 1, 1)), None).traced])
    with pytest.raises(tk.VariantNotFoundError):
        serve(mods.learned_bias(torch.zeros(8, 8)), None)


@pytest.mark.parametrize("mask", [
    lambda b, h, q, k: (q - k < 4) | (k < 3),
    lambda b, h, q, k: (q - k < 4) & (k < q + IDS[b, k]),
    lambda b, h, q, k: (q - 2 * k < 4) & (k <= q),
    lambda b, h, q, k: IDS[b, q] != IDS[b, k],
    lambda b, h, q, k: (IDS[b, q] == IDS[b, k]) & (OTHER_IDS[b, q] == OTHER_IDS[b, k]),
    lambda b, h, q, k: IDS[h, q] == IDS[h, k],
])  # fmt: skip
def test_other_masks_are_not_taken_for_a_band(mask: Any) -> None:
    with pytest.raises(tk.VariantNotFoundError):
        serve(None, mask)


def test_random_conjunctions() -> None:
    """Conditions of a band and of documents, in any order and spelling, at any offset."""
    seed = seeds.seed("TK_MODS_SEED")
    for case in range(60):
        rng = random.Random(f"{seed} {case}")
        mask, text = _drawn(rng)
        try:
            check(serve(rng.choice(list(SCORES.values())), mask))
        except (AssertionError, tk.Error) as error:
            raise AssertionError(f"TK_MODS_SEED={seed}, case {case}: {text}") from error


def _drawn(rng: random.Random) -> tuple[Any, str]:
    n, m, at = rng.randrange(-3, 9), rng.randrange(-3, 9), rng.choice([0, 5, -3])
    q = "q" if not at else "(q + at)"
    left = [f"{q} - k < n", f"k > {q} - n", f"~({q} - k >= n)", f"k + n > {q}", f"k - {q} > -n", f"-n < k - {q}"]
    right = [
        f"k - {q} <= m",
        f"{q} >= k - m",
        f"torch.logical_not(k > {q} + m)",
        f"{q} - k > -m - 1",
        f"k < {q} + m + 1",
    ]
    causal = [f"k <= {q}", f"~(k > {q})", f"{q} - k > -1", f"k < {q} + 1"]
    same = [f"i[b, {q}] == i[b, k]", f"i[b, k] == i[b, {q}]", f"o[{q}] == o[k]", f"~(o[k] != o[{q}])"]
    chosen = [rng.choice(some) for some in rng.sample([left, rng.choice([right, causal]), same], rng.randint(1, 3))]
    rng.shuffle(chosen)
    joined = chosen[0]
    for part in chosen[1:]:
        joined = f"({joined}) & ({part})" if rng.random() < 0.5 else f"torch.logical_and({part}, {joined})"
    ids = IDS if rng.random() < 0.5 else IDS.long()
    found = {"torch": torch, "n": n, "m": m, "at": at, "i": ids, "o": ids[0]}
    return eval(f"lambda b, h, q, k: {joined}", found), f"{joined}, n={n} m={m} at={at}"


# --- What is walked without a block mask ---


@pytest.mark.parametrize("name", MASKS)
def test_what_is_walked_contains_what_is_seen(name: str) -> None:
    served = serve(None, MASKS[name])
    scores = torch.zeros(serving.B, H, serving.M, serving.N)
    seen = serving.said(served.given.traced, served.given.values, scores) > -torch.inf
    walked, unasked = serving.walked(served)
    assert bool((seen <= walked).all()) and bool((unasked <= seen).all())


def test_a_band_is_walked_alone() -> None:
    everywhere = 1 << 29
    for mask, band in (
        (BANDS["both sides"], (3, 2, 1)), (BANDS["distance"], (3, 3, 1)), (BANDS["past"], (everywhere, 0, 0)),
        (BANDS["strictly causal"], (everywhere, 0, 0)), (behind(mods.causal, 6), (everywhere, 6, 1)),
        (behind(mods.sliding_window(4), 6), (0, 6, 0)), (documents(IDS)[2], (3, 0, 0)),
        (mods.document(IDS), (everywhere, everywhere, 0)),
    ):  # fmt: skip
        pair = trace.pair(None, mask)
        assert own_ops._band(pair.traced, pair.traced.by_kind(pair.values)[2]) == band


@pytest.mark.parametrize("ids", [torch.zeros(19, dtype=torch.int64), torch.zeros(2, 19, dtype=torch.int32)])
def test_what_models_call_most_has_kernels_that_look_at_nothing_else(ids: torch.Tensor) -> None:
    """A band that lets all through is worked out for each score all the same: documents took 1.8 times as long."""
    own = (
        (None, mods.document(ids), None, mods.document(pairs.IDS)),
        (mods.soft_cap(20.0), None, pairs.SOFT_CAP, None),
        (mods.alibi(torch.ones(4)), None, pairs.ALIBI, None),
    )
    for score, mask, score_of_wheel, mask_of_wheel in own:
        found = serve(score, mask).general
        assert found.fingerprint == trace.pair(score_of_wheel, mask_of_wheel).traced.fingerprint
