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
        lambda b, h, q, k: (q >= k) == True, lambda b, h, q, k: -q <= -k,  # noqa: E712
    ]),
    "window": (mods.sliding_window(W), [
        gym_window, lambda b, h, q, k: (q - k < W) & (k <= q), lambda b, h, q, k: (k <= q) & (k > q - W),
        lambda b, h, q, k: (q - W < k) & ~(k > q), lambda b, h, q, k: torch.logical_and(q >= k, q - k < W),
        transformers_and(transformers_causal, transformers_window),
        transformers_and(transformers_window, transformers_causal),
        torch_flex.and_masks(lambda b, h, q, k: q - k <= W, torchs_causal), lambda b, h, q, k: ~((q < k) | (q - k > W)),
    ]),
    "offset": (offset_of(mods.causal, OFFSET), [
        lambda b, h, q, k: k <= q + OFFSET, lambda b, h, q, k: k - OFFSET <= q, lambda b, h, q, k: OFFSET + q >= k,
        lambda b, h, q, k: q >= k - OFFSET, lambda b, h, q, k: q - k >= -OFFSET, lambda b, h, q, k: ~(k > q + OFFSET),
        lambda b, h, q, k: k <= q + ON_HOST, lambda b, h, q, k: ON_HOST * 1 + q >= k,
        lambda b, h, q, k: k - q <= ON_HOST,
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


@pytest.mark.parametrize("kind", ["mask", "score"])
def test_no_value_changes(kind: str) -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    b, h, q, k = indices((0, 1), (0, 1), (0, 7), (0, 9), "cpu")
    score = torch.randn(2, 2, 7, 9, generator=torch.Generator().manual_seed(seed))
    for _ in range(150):
        body = (
            random_bool(rng, rng.randint(0, 3)) if kind == "mask" else f"s * 0 + {random_float(rng, rng.randint(1, 4))}"
        )
        names = "b, h, q, k" if kind == "mask" else "s, b, h, q, k"
        mod = eval(f"lambda {names}: {body}", captured(rng))
        arguments = [b, h, q, k] if kind == "mask" else [score, b, h, q, k]
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
