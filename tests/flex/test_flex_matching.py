"""Pairs with their numbers spelled out find the pair that takes them as arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tk
from tk.flex import compiled, matching, mods, own_ops
from tk.flex.tracing import evaluate, trace

from . import dense


def summed(factor: float) -> Any:
    return lambda score, b, h, q_idx, kv_idx: torch.add(score, (q_idx - kv_idx) * 0.5, alpha=factor)


TABLE, SLOPES = torch.randn(4, 13), torch.randn(4)
PAIRS: dict[str, tuple[Any, Any]] = {
    "window": (None, lambda n: mods.sliding_window(3 + n)),
    "dilated": (None, lambda n: mods.dilated_window(4, 2 + n)),
    "prefix": (None, lambda n: mods.prefix_lm(5 + n)),
    "natten": (None, lambda n: mods.natten_2d(4 + n, 8, 3)),
    "alibi": (lambda n: mods.alibi(3 + n), None),
    "slopes and window": (lambda n: mods.alibi(SLOPES), lambda n: mods.sliding_window(2 + n)),
    "factor of a sum": (lambda n: summed(2.5 + n), None),
    "cap": (lambda n: mods.soft_cap(2.5 + n), lambda n: mods.causal),
    "relative": (lambda n: mods.relative_bias(TABLE, 6), lambda n: mods.sliding_window(2 + n)),
    "library": (None, lambda n: mods.or_masks(mods.sliding_window(9 + n), mods.prefix_lm(2))),
}


def recorded(make: Any, monkeypatch: pytest.MonkeyPatch) -> trace.Pair:
    """The pair as torch.compile hands it over."""
    seen: list[trace.Pair] = []
    pair = trace.pair
    monkeypatch.setattr(compiled.trace, "pair", lambda *mods: seen.append(pair(*mods)) or seen[-1])
    torch._dynamo.reset()
    score, mask = make
    q = torch.randn(1, 4, 32, 8)

    def run(q: torch.Tensor) -> torch.Tensor:
        block_mask = None if mask is None else tk.flex.create_block_mask(mask(1), 1, 1, 32, 32, "cpu", 16)
        return tk.flex_attention(q, q, q, None if score is None else score(1), block_mask)

    torch.compile(run, fullgraph=True, backend="eager")(q)
    monkeypatch.undo()
    return seen[-1]


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_recorded_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    score, mask = PAIRS[name]
    given = recorded(PAIRS[name], monkeypatch)
    general, other = (trace.pair(score and score(n), mask and mask(n)) for n in (0, 1))
    found = matching.numbers(general.traced, given.traced, given.values)
    assert found is not None
    for value, expected in zip(found, other.values, strict=True):
        assert value is expected or torch.equal(torch.as_tensor(value), torch.as_tensor(expected))
        assert type(value) is type(expected)


def test_only_what_is_the_same_is_found() -> None:
    """A mask serves another one where it says the same with what it is given."""
    sizes = (2, 4, 24, 24)
    masks = {n: trace.pair(None, make(*sizes)) for n, make in dense.MASKS.items() if n != "none"}
    at = evaluate.indices(range(2), range(4), (0, 24), (0, 24), "cpu")
    others = set()
    for name, one in masks.items():
        for other_name, other in masks.items():
            found = matching.numbers(one.traced, other.traced, other.values)
            assert found is not None or name != other_name
            if found is None:
                continue
            if name != other_name:
                others.add((name, other_name))
            values = [matching.repeated(x.value, x.dims) if isinstance(x, matching.Repeated) else x for x in found]
            assert one.mask is not None and other.mask is not None
            assert torch.equal(*torch.broadcast_tensors(evaluate.evaluate(one.mask, at, values),
                                                        evaluate.evaluate(other.mask, at, other.values)))  # fmt: skip
    assert others == {("sliding_window", "causal"), ("document", "document_of_all")}


def test_numbers_of_a_pair_are_found_one_by_one() -> None:
    general = trace.pair(mods.relative_bias(TABLE, 6), None).traced
    for low in (-6, -5):
        source = f"lambda score, b, h, q, kv: score + TABLE[h, torch.clamp(kv - q, {low}, 6) + 6]"
        given = trace.pair(eval(source, {"TABLE": TABLE, "torch": torch}), None)
        assert given.values == (TABLE,)
        assert matching.numbers(general, given.traced, given.values) == [TABLE, low, 6]


def test_a_window_of_one_key_is_found() -> None:
    """Where what is spelled out is 0, the difference stands as a comparison."""
    general = trace.pair(None, mods.sliding_window(3)).traced
    given = trace.pair(None, lambda b, h, q, kv: (q >= kv) & (q - kv < 1))
    assert matching.numbers(general, given.traced, given.values) == [0]


def test_wider_captures_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    general = trace.pair(mods.alibi(torch.zeros(4)), mods.document(torch.zeros(8, dtype=torch.int64))).traced
    slopes, ids = torch.rand(4).half(), torch.zeros(8, dtype=torch.int32)
    given = trace.pair(mods.alibi(slopes), mods.document(ids))
    monkeypatch.setattr(own_ops, "_known", lambda: [general])
    monkeypatch.setattr(own_ops, "_packed", lambda traced, suffix: object() if traced is general else None)
    monkeypatch.setattr(own_ops, "_matched", {})
    own = own_ops.find(given.traced, [slopes, ids], [], [])
    query = torch.empty(1, 4, 8, 8)
    first, second = own.captured([slopes, ids], query)
    assert torch.equal(first, slopes.float()) and second is ids
    (grad,) = own.gradients(given.traced, [slopes, ids], [torch.ones(4)])
    assert grad.dtype == torch.float16
    expanded = slopes[:1].expand(4)
    assert own.captured([expanded, ids], query)[0].stride() == (0,)
    narrow, wide = trace.pair(mods.alibi(slopes), None), trace.pair(mods.alibi(slopes.float()), None)
    assert matching.numbers(narrow.traced, wide.traced, wide.values) is None


def test_the_op_of_the_general_pair_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    given = trace.pair(None, lambda b, h, q, kv: (q >= kv) & (q - kv < 8))
    general = trace.pair(None, mods.sliding_window(3)).traced
    monkeypatch.setattr(own_ops, "_known", lambda: [general])
    own = object()
    monkeypatch.setattr(own_ops, "_packed", lambda traced, suffix: own if traced is general else None)
    found = own_ops.find(given.traced, [], [], [])
    assert (found.op, list(found.ints)) == (own, [7])


BANDS = {
    "none": (None, (1 << 29, 1 << 29, 1)),
    "causal": (mods.causal, (1 << 29, 0, 1)),
    "window": (mods.sliding_window(7), (6, 0, 1)),
    "prefix": (mods.prefix_lm(7), (1 << 29, 1 << 29, 0)),
}


@pytest.mark.parametrize("name", BANDS)
def test_bands(name: str) -> None:
    """Behind a score_mod with numbers of its own."""
    mask_mod, band = BANDS[name]
    pair = trace.pair(mods.relative_bias(TABLE, 6), mask_mod)
    _, _, ints = pair.traced.by_kind(pair.values)
    assert own_ops._band(pair.traced, ints) == band


# --- Signs ---

# Of a number, which may be negative: then it is spelled with its sign elsewhere.
SIGNED: dict[str, Any] = {
    "sum": lambda a: lambda s, b, h, i, j: s + a,
    "difference": lambda a: lambda s, b, h, i, j: s - a,
    "the other way round": lambda a: lambda s, b, h, i, j: a - s,
    "product": lambda a: lambda s, b, h, i, j: s * a,
    "quotient": lambda a: lambda s, b, h, i, j: s / a,
    "distance": lambda a: lambda s, b, h, i, j: s + a * (i - j),
    "distance taken off": lambda a: lambda s, b, h, i, j: s - (i - j) * a,
    "negated": lambda a: lambda s, b, h, i, j: s + (-a) * (i - j),
    "absolute": lambda a: lambda s, b, h, i, j: s + a * (i - j).abs(),
    "where": lambda a: lambda s, b, h, i, j: torch.where(i >= j, s, a),
    "a sum where": lambda a: lambda s, b, h, i, j: torch.where(i >= j, s, s + a),
    "cap": lambda a: lambda s, b, h, i, j: torch.tanh(s / a) * a,
    "decay": lambda a: lambda s, b, h, i, j: s + torch.exp(a * (i - j)),
    "decay taken off": lambda a: lambda s, b, h, i, j: s - torch.exp(a * (i - j)) * a,
    "clamp": lambda a: lambda s, b, h, i, j: torch.clamp(s, min=a),
    "comparison": lambda a: lambda s, b, h, i, j: torch.where(s > a, s, s * 0.5),
    "both": lambda a: lambda s, b, h, i, j: (s - a) * a - a * (s - a * j),
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNED)
def test_a_negative_number_that_torch_compile_spells_out_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with what is found, the pair that takes it as an argument computes the same, bit for bit."""
    make = SIGNED[name]
    for general_number, number in ((0.75, -0.5), (-0.75, 2.0), (0.75, -1.0)):
        general = trace.pair(make(general_number), None).traced
        given = recorded((lambda _, n=number: make(n), None), monkeypatch)
        found = matching.numbers(general, given.traced, given.values)
        assert found is not None, number
        assert torch.equal(scores(general, found), scores(given.traced, given.values)), number


def scores(traced: trace.Traced, values: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    s = torch.randn(1, 1, 6, 6, generator=generator)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    i, j = torch.arange(6, dtype=torch.int32)[:, None], torch.arange(6, dtype=torch.int32)
    assert traced.score is not None
    return evaluate.evaluate(traced.score, (s, zero, zero, i[None, None], j[None, None, None]), values)


def test_what_differs_by_more_than_signs_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all pairs of these, what is found computes the same."""
    given = {name: recorded((lambda _, make=make: make(-0.5), None), monkeypatch) for name, make in SIGNED.items()}
    found_of_others = 0
    for name, make in SIGNED.items():
        general = trace.pair(make(0.75), None).traced
        for other, pair in given.items():
            found = matching.numbers(general, pair.traced, pair.values)
            assert found is not None or other != name
            if found is not None:
                found_of_others += other != name
                assert torch.equal(scores(general, found), scores(pair.traced, pair.values)), (name, other)
    assert found_of_others < len(SIGNED)


def test_a_call_that_is_compiled_with_a_negative_number() -> None:
    shift, q = -0.5, torch.randn(1, 4, 32, 8)

    def score_mod(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return score + shift * (q_idx - kv_idx)

    torch._dynamo.reset()
    compiled_call = torch.compile(lambda q: tk.flex_attention(q, q, q, score_mod), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled_call(q), tk.flex_attention(q, q, q, score_mod))
