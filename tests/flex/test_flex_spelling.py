"""What people write for one mask or score meets in one fingerprint, which is that of the library's mod; and a spelling
never changes what a mod says."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import tk
from tk.flex import mods
from tk.flex.tracing import trace
from tk.flex.tracing.evaluate import evaluate, indices

W, OFFSET, PREFIX, CAP, H = 5, 3, 4, 20.0, 8
T, ON_HOST = torch.tensor(3, device="meta"), torch.tensor(3)  # one on a GPU, and a number
IDS = torch.zeros(64, dtype=torch.int32)
BATCH_IDS = torch.zeros(2, 64, dtype=torch.int32)
LENGTHS = torch.zeros(2, dtype=torch.int32)
SLOPES, BIAS = torch.rand(H), torch.rand(H, 64, 64)


def torchs_causal(b, h, q_idx, kv_idx):  # torch's documentation
    return q_idx >= kv_idx


def transformers_causal(batch_idx, head_idx, q_idx, kv_idx):
    return kv_idx <= q_idx


def transformers_window(batch_idx, head_idx, q_idx, kv_idx):
    return kv_idx > q_idx - W


def transformers_and(*mask_functions):
    def and_mask(batch_idx, head_idx, q_idx, kv_idx):
        result = q_idx.new_ones((), dtype=torch.bool)
        for mask in mask_functions:
            result = result & mask(batch_idx, head_idx, q_idx, kv_idx).to(result.device)
        return result

    return and_mask


def gym_window(b, h, q_idx, kv_idx):  # attention-gym
    causal_mask = q_idx >= kv_idx
    windowed_mask = q_idx - kv_idx <= W
    return causal_mask & windowed_mask


def offset_of(mask_mod, offset):  # gpt-fast, vLLM
    return lambda b, h, q, kv: mask_mod(b, h, q + offset, kv)


MASKS: dict[str, tuple[Any, list[Callable[..., Any]]]] = {
    "causal": (mods.causal, [
        torchs_causal, transformers_causal,
        lambda b, h, q, k: ~(k > q), lambda b, h, q, k: ~(q < k), lambda b, h, q, k: q - k >= 0,
        lambda b, h, q, k: k - q <= 0, lambda b, h, q, k: k < q + 1, lambda b, h, q, k: k - 1 < q,
        lambda b, h, q, k: torch.logical_not(k > q), lambda b, h, q, k: torch.ge(q, k), lambda b, h, q, k: k - q < 1,
        lambda b, h, q, k: (q >= k) | (k <= q), lambda b, h, q, k: (q - k + 1) > 0,
        mods.and_masks(mods.causal, mods.causal), torch_flex.and_masks(mods.causal), transformers_and(mods.causal),
        lambda b, h, q, k: q - k > -1, lambda b, h, q, k: torch.logical_and(q >= k, k < q + 1),
        lambda b, h, q, k: torch.sub(k, q).le(0), lambda b, h, q, k: torch.logical_not(q - k <= -1),
        lambda b, h, q, k: (q >= k) == True, lambda b, h, q, k: -q <= -k,  # noqa: E712
        lambda b, h, q, k: (q > k) | (q == k), lambda b, h, q, k: (k == q) | (k < q),
        lambda b, h, q, k: ~((k > q) & (q != k)),
        lambda b, h, q, k: torch.gt(q, k).logical_or(torch.eq(k, q)), lambda b, h, q, k: (q - k == 0) | (q - k > 0),
        lambda b, h, q, k: (q == k) | (q == k + 1) | (q > k + 1), lambda b, h, q, k: (q == k + 7) | (q >= k),
        lambda b, h, q, k: (q >= k) & (k <= q + 3), lambda b, h, q, k: (q - k >= -1) & (k != q + 1),
    ]),
    "before": (lambda b, h, q, k: k < q, [
        lambda b, h, q, k: (k <= q) & (k != q), lambda b, h, q, k: ~((k > q) | (k == q)),
        lambda b, h, q, k: (k - q <= 1) & (q != k) & (k - q != 1), lambda b, h, q, k: (q > k) & (q != k),
    ]),
    "window": (mods.sliding_window(W), [
        gym_window, lambda b, h, q, k: (q - k < W) & (k <= q), lambda b, h, q, k: (k <= q) & (k > q - W),
        lambda b, h, q, k: (q - W < k) & ~(k > q), lambda b, h, q, k: torch.logical_and(q >= k, q - k < W),
        transformers_and(transformers_causal, transformers_window),
        transformers_and(transformers_window, transformers_causal),
        torch_flex.and_masks(lambda b, h, q, k: q - k <= W, torchs_causal), lambda b, h, q, k: ~((q < k) | (q - k > W)),
    ]),
    "distance": (lambda b, h, q, k: (q - k <= W) & (k - q <= W), [
        lambda b, h, q, k: (q - k).abs() <= W, lambda b, h, q, k: torch.abs(k - q) < W + 1,
        lambda b, h, q, k: (k - q).abs() <= W, lambda b, h, q, k: ~((q - k).abs() > W),
        lambda b, h, q, k: torch.logical_and(q - W <= k, k <= q + W), lambda b, h, q, k: (q - k).abs() - W <= 0,
    ]),
    "far": (lambda b, h, q, k: (q - k > W) | (k - q > W), [
        lambda b, h, q, k: (q - k).abs() > W, lambda b, h, q, k: ~((k - q).abs() <= W),
    ]),
    "distance_at_offset": (lambda b, h, q, k: (q + OFFSET - k <= W) & (k - q - OFFSET <= W), [
        offset_of(lambda b, h, q, k: (q - k).abs() <= W, OFFSET),
    ]),
    "offset": (offset_of(mods.causal, OFFSET), [
        lambda b, h, q, k: k <= q + OFFSET, lambda b, h, q, k: k - OFFSET <= q, lambda b, h, q, k: OFFSET + q >= k,
        lambda b, h, q, k: q >= k - OFFSET, lambda b, h, q, k: q - k >= -OFFSET, lambda b, h, q, k: ~(k > q + OFFSET),
        lambda b, h, q, k: k <= q + ON_HOST, lambda b, h, q, k: ON_HOST * 1 + q >= k,
        lambda b, h, q, k: k - q <= ON_HOST, lambda b, h, q, k: (k < q + OFFSET) | (k == q + OFFSET),
        lambda b, h, q, k: (q - k == -OFFSET) | ~(k >= OFFSET + q),
    ]),
    "offset_of_tensor": (offset_of(mods.causal, T), [
        lambda b, h, q, k: k <= q + T, lambda b, h, q, k: T + q >= k, lambda b, h, q, k: ~(k > q + T),
        lambda b, h, q, k: k - q <= T, lambda b, h, q, k: k - T <= q, lambda b, h, q, k: q.long() + T >= k.long(),
    ]),
    "prefix": (mods.prefix_lm(PREFIX), [
        lambda b, h, q, k: (q >= k) | (k < PREFIX), lambda b, h, q, k: (k <= q) | (k <= PREFIX),
        torch_flex.or_masks(lambda b, h, q, k: k < PREFIX, torchs_causal),
        lambda b, h, q, k: ~((k > q) & (k >= PREFIX)),
        lambda b, h, q, k: (k < PREFIX) | (q >= k),
    ]),
    "prefix_by_entry": (mods.prefix_lm(LENGTHS), [
        lambda b, h, q, k: (q >= k) | (k < LENGTHS[b]), lambda b, h, q, k: (LENGTHS[b] > k) | ~(k > q),
    ]),
    "document": (mods.document(IDS), [
        lambda b, h, q, k: IDS[k] == IDS[q], lambda b, h, q, k: IDS[q] - IDS[k] == 0,
        lambda b, h, q, k: ~(IDS[q] != IDS[k]), lambda b, h, q, k: torch.eq(IDS[q], IDS[k]),
    ]),
    "causal_document": (mods.and_masks(mods.causal, mods.document(BATCH_IDS)), [
        mods.and_masks(mods.document(BATCH_IDS), mods.causal),
        lambda b, h, q, k: (BATCH_IDS[b, q] == BATCH_IDS[b, k]) & (q >= k),
        lambda b, h, q, k: (k <= q) & (BATCH_IDS[b][k] == BATCH_IDS[b][q]),
        transformers_and(transformers_causal, lambda b, h, q, k: BATCH_IDS[b, q] == BATCH_IDS[b, k]),
        torch_flex.and_masks(lambda b, h, q, k: BATCH_IDS[b, k] == BATCH_IDS[b, q], torchs_causal),
    ]),
    "window_document": (mods.and_masks(mods.sliding_window(W), mods.document(IDS)), [
        mods.and_masks(mods.document(IDS), mods.sliding_window(W)),
        lambda b, h, q, k: (q >= k) & (IDS[q] == IDS[k]) & (q - k < W),
    ]),
}  # fmt: skip
SCORES: dict[str, tuple[Any, list[Callable[..., Any]]]] = {
    "alibi": (mods.alibi(SLOPES), [
        lambda s, b, h, q, k: s + SLOPES[h] * (k - q), lambda s, b, h, q, k: (k - q) * SLOPES[h] + s,
        lambda s, b, h, q, k: s - SLOPES[h] * (q - k), lambda s, b, h, q, k: s + -(q - k) * SLOPES[h],
        lambda s, b, h, q, k: s + (k - q).float() * SLOPES[h], lambda s, b, h, q, k: s - (q - k) * SLOPES[h],
        lambda s, b, h, q, k: s + (k - q).to(s.dtype) * SLOPES[h], lambda s, b, h, q, k: s.add(SLOPES[h] * (k - q)),
    ]),
    "alibi_by_heads": (mods.alibi(H), [
        lambda s, b, h, q, k: s + torch.exp2(-((h + 1) * 8.0 / H)) * (k - q),  # attention-gym
        lambda s, b, h, q, k: s + (k - q) * torch.exp2(-8.0 * (h + 1) / H),
        lambda s, b, h, q, k: s - (q - k) * 2 ** (-8.0 * (h + 1) / H),
        lambda s, b, h, q, k: s + (k - q) * torch.pow(2.0, (-8.0 * (1 + h)) / H),
    ]),
    "soft_cap": (mods.soft_cap(CAP), [
        lambda s, b, h, q, k: CAP * torch.tanh(s / CAP), lambda s, b, h, q, k: (s / CAP).tanh() * CAP,
        lambda s, b, h, q, k: CAP * torch.tanh(torch.div(s, CAP)),
        lambda s, b, h, q, k: (lambda x: x * CAP)(torch.tanh(s / CAP)),
    ]),
    "learned": (mods.learned_bias(BIAS), [
        lambda s, b, h, q, k: s + BIAS[h, q, k], lambda s, b, h, q, k: BIAS[h][q][k] + s,
        lambda s, b, h, q, k: s.add_(BIAS[h, q, k]),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks_meet(name: str) -> None:
    expected, written = MASKS[name]
    for i, mask_mod in enumerate(written):
        assert trace.pair(None, mask_mod).fingerprint == trace.pair(None, expected).fingerprint, (name, i)


@pytest.mark.parametrize("name", SCORES)
def test_scores_meet(name: str) -> None:
    expected, written = SCORES[name]
    for i, score_mod in enumerate(written):
        assert trace.pair(score_mod, None).fingerprint == trace.pair(expected, None).fingerprint, (name, i)


def test_there_are_as_many_as_people_write() -> None:
    assert sum(len(written) for _, written in (*MASKS.values(), *SCORES.values())) > 70
    pairs = [trace.pair(None, m) for m, _ in MASKS.values()] + [trace.pair(s, None) for s, _ in SCORES.values()]
    assert len({p.fingerprint for p in pairs}) == len(MASKS) + len(SCORES)


# --- Values ---


def random_int(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(["b", "h", "q", "k", "q", "k", "N1", "N2", "IDS[q]", "IDS[k]", "T", str(rng.randint(-4, 9))])
    a, b = random_int(rng, depth - 1), random_int(rng, rng.randrange(depth))
    return rng.choice([f"({a} + {b})", f"({a} - {b})", f"(-{a})", f"({a} * {rng.randint(-3, 3)})", f"({a} % 5)",
                       f"({a} // 3)", f"(q * 0 + {a}).clamp(-5, 9)", f"({a} - {b})",
                       f"(q * 0 + {a}).long()"])  # fmt: skip


def random_bool(rng: random.Random, depth: int) -> str:
    if depth == 0:
        op = rng.choice(["<", "<=", ">", ">=", "==", "!="])
        return f"((k * 0 + {random_int(rng, rng.randint(0, 3))}) {op} {random_int(rng, rng.randint(0, 3))})"
    a, b = random_bool(rng, depth - 1), random_bool(rng, rng.randrange(depth))
    return rng.choice([f"({a} & {b})", f"({a} | {b})", f"(~{a})", f"torch.logical_not({a})", f"({a} ^ {b})",
                       f"torch.logical_and({a}, {b})", f"(({a}) == False)", f"(({a}) != ({b}))"])  # fmt: skip


def random_bounds(rng: random.Random) -> str:
    """Of one difference, or of its opposite."""

    def one() -> str:
        number = rng.choice([*map(str, range(-3, 4)), "N1", "(N1 + 1)", "(N1 - 1)"])
        return f"({rng.choice(['q - k', 'k - q', 'q'])} {rng.choice(['<', '<=', '>', '>=', '==', '!='])} {number})"

    body = one()
    for _ in range(rng.randint(1, 4)):
        body = rng.choice([f"({body} | {one()})", f"({one()} & {body})", f"(~{body})"])
    return body


def random_float(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(
            ["s", "s", "F[h]", "X", "2.5", "-0.5", f"(k * 0 + {random_int(rng, 2)})", "(q - k)", "(q - k).float()"]
        )
    a, b = random_float(rng, depth - 1), random_float(rng, rng.randrange(depth))
    return rng.choice([f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", f"(-({a}))", f"({a} / 3)", f"({a} - {b})",
                       f"torch.where({random_bool(rng, 0)}, {a}, {b} + s)", f"torch.tanh(s * 0 + {a})"])  # fmt: skip


def captured(rng: random.Random) -> dict[str, Any]:
    return {"torch": torch, "N1": rng.randint(-5, 5), "N2": rng.randint(1, 9), "X": rng.choice([1.5, -2.0]),
            "T": torch.tensor(rng.randint(-3, 3)), "IDS": torch.tensor([rng.randint(-4, 4) for _ in range(16)]).int(),
            "F": torch.tensor([0.5, -1.5])}  # fmt: skip


@pytest.mark.parametrize("kind", ["mask", "bounds", "score"])
def test_no_value_changes(kind: str) -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    b, h, q, k = indices((0, 1), (0, 1), (0, 7), (0, 9), "cpu")
    score = torch.randn(2, 2, 7, 9, generator=torch.Generator().manual_seed(seed))
    for _ in range(150):
        if kind == "score":
            body = f"s * 0 + {random_float(rng, rng.randint(1, 4))}"
        else:
            body = random_bool(rng, rng.randint(0, 3)) if kind == "mask" else random_bounds(rng)
        names = "s, b, h, q, k" if kind == "score" else "b, h, q, k"
        mod = eval(f"lambda {names}: {body}", captured(rng))
        arguments = [score, b, h, q, k] if kind == "score" else [b, h, q, k]
        with torch.no_grad():
            expected = mod(*arguments)
        pair = trace.pair(mod, None) if kind == "score" else trace.pair(None, mod)
        graph = pair.score if kind == "score" else pair.mask
        found = expected if graph is None else evaluate(graph, arguments, pair.values)
        torch.testing.assert_close(found.expand(2, 2, 7, 9), expected.expand(2, 2, 7, 9), equal_nan=True, rtol=1e-5,
                                   atol=1e-5, check_dtype=False, msg=lambda m: f"seed {seed}: {body}: {m}")  # noqa: B023  # fmt: skip


@pytest.mark.parametrize("size", [2**31, 2**40, 2**62])
def test_numbers_past_32_bits_do_not_wrap_around(size: int) -> None:
    q = torch.randn(1, 1, 6, 8)
    mask = tk.flex.create_block_mask(mods.sliding_window(size), 1, 1, 6, 6, "cpu", 4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(tk.flex_attention(q, q, q, block_mask=mask), expected)


def test_numbers_that_cannot_be_are_refused_with_the_mod() -> None:
    q, zero = torch.randn(1, 1, 6, 8), 0
    with pytest.raises(ValueError, match=r"test_flex_spelling\.py.*division by zero"):
        tk.flex_attention(q, q, q, lambda s, b, h, q, k: s * (3.0 / zero))
    with pytest.raises(ValueError, match="which 64 bits do not hold"):
        tk.flex.create_block_mask(mods.sliding_window(2**70), 1, 1, 6, 6, "cpu", 4)


# --- Masks that are written as scores ---

INF = float("inf")
MASKED: list[Callable[..., Any]] = [
    lambda s, b, h, q, k: torch.where(q >= k, s, -INF), lambda s, b, h, q, k: torch.where(k > q, -INF, s),
    lambda s, b, h, q, k: torch.where(~(k > q), s, torch.tensor(-INF)),
    lambda s, b, h, q, k: s.masked_fill(k > q, -INF), lambda s, b, h, q, k: s + torch.where(q >= k, 0.0, -INF),
    lambda s, b, h, q, k: s - torch.where(q >= k, 0.0, INF), lambda s, b, h, q, k: torch.where(q < k, -INF, 0.0) + s,
    lambda s, b, h, q, k: torch.where(q - k >= 0, s, s.new_full((), -INF)),
    lambda s, b, h, q, k: torch.where(q >= k, torch.where(k <= q, s, -INF), -INF),
    lambda s, b, h, q, k: torch.where(torch.logical_not(q < k), s, torch.full_like(s, -INF)),
    lambda s, b, h, q, k: torch.where(q >= k, s, torch.tensor(1.0) * -INF),
    lambda s, b, h, q, k: torch.where(torch.ones_like(q, dtype=torch.bool) & (q >= k), s, -INF),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(MASKED)))
def test_a_mask_written_as_a_score_is_the_mask(i: int) -> None:
    assert trace.pair(MASKED[i], None).fingerprint == trace.pair(None, mods.causal).fingerprint
    q = torch.randn(1, 2, 9, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(tk.flex_attention(q, q, q, MASKED[i]), expected)


def test_the_rest_of_such_a_score_is_the_score() -> None:
    def capped(s, b, h, q, k):  # type: ignore[no-untyped-def]
        return torch.where((q >= k) & (q - k < W), CAP * torch.tanh(s / CAP), -INF)

    expected = trace.pair(mods.soft_cap(CAP), mods.sliding_window(W))
    pair = trace.pair(capped, None)
    assert (pair.fingerprint, pair.values) == (expected.fingerprint, expected.values)
    biased = trace.pair(lambda s, b, h, q, k: torch.where(IDS[q] == IDS[k], s + BIAS[h, q, k], -INF), None)
    assert biased.fingerprint == trace.pair(mods.learned_bias(BIAS), mods.document(IDS)).fingerprint


@pytest.mark.parametrize("score_mod", [
    lambda s, b, h, q, k: torch.where(s > 0, s, -INF), lambda s, b, h, q, k: torch.where(q >= k, s, -1e30),
    lambda s, b, h, q, k: torch.where(q >= k, s, INF), lambda s, b, h, q, k: torch.where(q >= k, -INF, s) * 2,
    lambda s, b, h, q, k: s + torch.where(q >= k, 0.5, -INF), lambda s, b, h, q, k: torch.where(q >= k, 0.0, -INF) - s,
])  # fmt: skip
def test_what_is_no_mask_is_none(score_mod: Any) -> None:
    assert trace.pair(score_mod, None).mask is None


def test_with_a_block_mask_such_a_score_stays_one() -> None:
    """The blocks that a mask's lists call full are not asked about."""
    q = torch.randn(1, 2, 32, 8)
    block_mask = tk.flex.create_block_mask(lambda b, h, q, k: k < 16, 1, 1, 32, 32, "cpu", 16)
    assert block_mask.full_kv_num_blocks is not None and block_mask.full_kv_num_blocks.sum() > 0
    i, j = torch.arange(32)[:, None], torch.arange(32)
    seen = (i >= j) & (j < 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=seen)
    torch.testing.assert_close(tk.flex_attention(q, q, q, MASKED[0], block_mask), expected)
    lists = block_mask.as_tuple()[2:6]
    bare = tk.flex.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16, seq_lengths=(32, 32))  # without a mask_mod
    torch.testing.assert_close(tk.flex_attention(q, q, q, MASKED[0], bare), expected)


def test_random_masks_written_as_scores() -> None:
    """One fingerprint with the mask, and the same values."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    q = torch.randn(2, 2, 7, 8, generator=torch.Generator().manual_seed(seed))
    forms = ["torch.where({m}, s, -INF)", "torch.where(~{m}, -INF, s)", "s.masked_fill(~{m}, -INF)",
             "s + torch.where({m}, 0.0, -INF)", "torch.where({m}, s, torch.tensor(-INF))"]  # fmt: skip
    for _ in range(60):
        mask = random_bool(rng, rng.randint(0, 2))
        scope = captured(rng) | {"INF": INF}
        form = rng.choice(forms).format(m=mask)
        score_mod, mask_mod = (
            eval(f"lambda {n}: {x}", scope) for n, x in (("s, b, h, q, k", form), ("b, h, q, k", mask))
        )
        one, other = trace.pair(score_mod, None), trace.pair(None, mask_mod)
        if other.mask is None or other.mask.result.target is torch.ops.aten.full.default:
            continue  # it masks everything or nothing, and the choice is folded
        assert one.fingerprint == other.fingerprint, (seed, form)
        block_mask = tk.flex.create_block_mask(mask_mod, 2, 2, 7, 7, "cpu", 16)
        found = tk.flex_attention(q, q, q, score_mod)
        torch.testing.assert_close(found, tk.flex_attention(q, q, q, None, block_mask), msg=f"seed {seed}: {form}")


# --- Integers of both widths ---


@pytest.mark.parametrize("make", [
    lambda ids: mods.document(ids), lambda ids: mods.document(ids[None]), lambda ids: mods.prefix_lm(ids),
    lambda ids: mods.and_masks(mods.causal, mods.document(ids)),
    lambda ids: mods.and_masks(mods.document(ids), mods.sliding_window(W)),
    lambda ids: lambda b, h, q, k: ids[q] * 2 - ids[k] >= q % 5, lambda ids: lambda b, h, q, k: k <= q + ids[b],
    lambda ids: lambda b, h, q, k: (ids[q] // 3).long() == ids[k].long() - 1,
    lambda ids: lambda b, h, q, k: torch.where(q > 3, ids[q], ids[k]) < k,
    lambda ids: lambda b, h, q, k: ids[ids[q]] == torch.minimum(ids[k], q),
    lambda ids: lambda b, h, q, k: (ids[q].float() > 2.0) & (-ids[k] < q.clamp(max=3)),
])  # fmt: skip
def test_ids_of_both_widths_are_one_mask(make: Any) -> None:
    ids = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 5])
    narrow, wide = (trace.pair(None, make(ids.to(d))) for d in (torch.int32, torch.int64))
    assert narrow.fingerprint == wide.fingerprint
    masks = [tk.flex.create_block_mask(make(ids.to(d)), 1, 1, 12, 12, "cpu", 4) for d in (torch.int32, torch.int64)]
    assert torch.equal(masks[0].to_dense(), masks[1].to_dense())


def test_ids_past_32_bits_are_told_apart() -> None:
    ids = torch.tensor([5, 5, 5 + 2**32, 5 + 2**32])
    q = torch.randn(1, 1, 4, 8)
    block_mask = tk.flex.create_block_mask(mods.document(ids), 1, 1, 4, 4, "cpu", 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=ids[:, None] == ids)
    torch.testing.assert_close(tk.flex_attention(q, q, q, None, block_mask), expected)


@pytest.mark.parametrize(("one", "other"), [
    ("s * (torch.tensor(2.0) * torch.tensor(3.0))", "s * 6.0"), ("s + torch.tensor(2.0).exp().log()", "s + 2.0"),
    ("torch.where(torch.tensor(True), s, s * 2)", "s"), ("torch.where(q >= k, s, h)", "torch.where(k > q, h, s)"),
    ("torch.where(q.new_ones(()) > 0, s - 1.5, s)", "s - 1.5"), ("s + torch.tensor(1.0) / 4", "s + 0.25"),
    ("torch.clamp(s, max=2.0) * torch.tensor(4.0).sqrt()", "torch.clamp(s, max=2.0) * 2.0"),
])  # fmt: skip
def test_constants_are_folded(one: str, other: str) -> None:
    pairs = [trace.pair(eval(f"lambda s, b, h, q, k: {x}", {"torch": torch}), None) for x in (one, other)]
    assert pairs[0].fingerprint == pairs[1].fingerprint
