"""Fingerprints: the same for the same mod however it is written down and whatever it captures, never for two mods."""

from __future__ import annotations

import functools
import itertools
import math
import timeit
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import tk
from tk.flex import mods, trace

from . import dense

SIZES = (2, 4, 24, 24)


def fingerprint(score_mod: Any = None, mask_mod: Any = None) -> str:
    return trace.pair(score_mod, mask_mod).fingerprint


# --- The same mod ---


def window_of(size: int) -> Any:
    def mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < size)

    return mod


def renamed(width: int) -> Any:
    def anything(batch, head, row, column):
        distance = row - column
        unused = head * 3  # noqa: F841
        is_before = row >= column
        return is_before & (distance < width)

    return anything


WIDTH = 5
TABLE = torch.randn(4)


def global_number(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WIDTH)


def default_number(b, h, q_idx, kv_idx, width=7):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < width)


class Window(torch.nn.Module):
    scale = 1

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def is_near(self, q_idx, kv_idx):
        return q_idx - kv_idx < self.size

    def forward(self, b, h, q_idx, kv_idx):
        return mods.causal(b, h, q_idx, kv_idx) & self.is_near(q_idx, kv_idx)


class Plain:
    def __init__(self, size: int):
        self.size = [size]

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < self.size[0])


def with_size(size, b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < size)


def test_a_window_is_a_window_however_it_is_written() -> None:
    written = [
        window_of(3), window_of(4), renamed(9), global_number, default_number, Window(2), Plain(6), Plain(6).__call__,
        functools.partial(with_size, 8), mods.sliding_window(5),
        mods.and_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: q - kv < WIDTH),
        torch_flex.and_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: q - kv < WIDTH),
    ]  # fmt: skip
    pairs = [trace.pair(None, m) for m in written]
    assert len({p.fingerprint for p in pairs}) == 1
    assert [p.values for p in pairs] == [(n,) for n in (3, 4, 9, 5, 7, 2, 6, 6, 8, 5, 5, 5)]


def test_numbers_and_tensors_are_read_anew() -> None:
    module = Window(2)
    first = trace.pair(None, module)
    module.size = 11
    again = trace.pair(None, module)
    assert again.traced is first.traced
    assert (first.values, again.values) == ((2,), (11,))


def test_a_global_that_changes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trace.pair(None, global_number).values == (5,)
    monkeypatch.setitem(globals(), "WIDTH", 12)
    assert trace.pair(None, global_number).values == (12,)
    monkeypatch.setitem(globals(), "WIDTH", torch.tensor(3))  # of another kind: another graph
    pair = trace.pair(None, global_number)
    assert pair.captures[0].kind == "tensor" and pair.captures[0].rank == 0


def test_a_function_that_a_mod_calls_is_seen() -> None:
    def outer(inner):
        def mod(b, h, q_idx, kv_idx):
            return inner(b, h, q_idx, kv_idx) & (kv_idx > 2)

        return mod

    fingerprints = {fingerprint(None, outer(m)) for m in (mods.causal, window_of(3), window_of(4), mods.prefix_lm(2))}
    assert len(fingerprints) == 3


def test_ways_of_writing_the_same_thing_meet() -> None:
    table = torch.randn(4, 9)

    def a(score, b, h, q_idx, kv_idx):
        return score + table[h, q_idx]

    def b_(score, b, h, q_idx, kv_idx):
        score += table[h][q_idx]
        return score

    def c(score, b, h, q_idx, kv_idx):
        return (score.clone() + table[h, q_idx].to(torch.float32)).reshape(())

    assert len({fingerprint(m) for m in (a, b_, c)}) == 1


def test_what_changes_nothing_is_no_mod() -> None:
    assert trace.pair(lambda score, b, h, q, kv: score, torch_flex.noop_mask).traced.score is None
    assert fingerprint(lambda score, b, h, q, kv: score, torch_flex.noop_mask) == fingerprint(None, None)


# --- Different mods ---


def test_the_library_has_no_two_alike() -> None:
    masks = {name: fingerprint(None, make(*SIZES)) for name, make in dense.MASKS.items()}
    scores = {name: fingerprint(make(*SIZES)[0]) for name, make in dense.SCORES.items() if name != "none"}
    found = {**masks, **{f"score {n}": f for n, f in scores.items()}}
    for (name, one), (other_name, other) in itertools.combinations(found.items(), 2):
        assert one != other, f"{name} and {other_name}"


def test_dtype_rank_structure_and_role_count() -> None:
    def table(x):
        return lambda score, b, h, q, kv: score + x[h]

    def flagged(flag):
        return lambda b, h, q, kv: (q >= kv) if flag else (q > kv)

    def scaled(x):
        return lambda score, b, h, q, kv: score * x

    found = [
        fingerprint(table(torch.randn(4))), fingerprint(table(torch.randn(4, dtype=torch.float16))),
        fingerprint(scaled(2)), fingerprint(scaled(2.0)), fingerprint(scaled(torch.tensor(2.0))),
        fingerprint(None, flagged(True)), fingerprint(None, flagged(False)),
        fingerprint(lambda score, b, h, q, kv: score * 2.0), fingerprint(lambda score, b, h, q, kv: score * 3.0),
        fingerprint(lambda score, b, h, q, kv: score - kv), fingerprint(lambda score, b, h, q, kv: kv - score),
        fingerprint(scaled(2.0), mods.causal), fingerprint(scaled(2.0), mods.sliding_window(2)),
    ]  # fmt: skip
    assert len(set(found)) == len(found)


def test_a_number_that_is_decided_by_is_structure() -> None:
    def stripes(n):
        def mod(b, h, q_idx, kv_idx):
            found = q_idx == kv_idx
            for i in range(n):
                found = found | (kv_idx == 3 * i)
            return found

        return mod

    assert fingerprint(None, stripes(2)) == fingerprint(None, stripes(2)) != fingerprint(None, stripes(3))
    assert trace.pair(None, stripes(2)).values == ()

    def root(n):
        return lambda score, b, h, q, kv: score * math.sqrt(n)

    assert fingerprint(root(2.0)) == fingerprint(root(2.0)) != fingerprint(root(3.0))


def test_two_numbers_of_one_name_are_kept_apart() -> None:
    def above(limit):
        return lambda b, h, q, kv: kv > limit

    def below(limit):
        return lambda b, h, q, kv: (kv < limit) if limit > 3 else (kv == 0)  # decided by

    pair = trace.pair(None, mods.and_masks(above(1), below(20)))
    assert pair.values == (1,)


def test_text_reads_back() -> None:
    for (_, score), (_, mask) in itertools.product(dense.SCORES.items(), dense.MASKS.items()):
        traced = trace.pair(score(*SIZES)[0], mask(*SIZES)).traced
        trace._by_text.pop(traced.text)
        read = trace.parse(traced.text)
        assert read is not traced and read.fingerprint == traced.fingerprint
        texts = [(g.text if g else None) for t in (traced, read) for g in (t.score, t.mask)]
        assert texts[:2] == texts[2:]
        assert [(c.kind, c.dtype, c.rank, c.of) for c in read.captures] == [
            (c.kind, c.dtype, c.rank, c.of) for c in traced.captures
        ]


# --- What is refused ---


def test_control_flow_on_tensors_is_refused_with_its_line() -> None:
    def mod(b, h, q_idx, kv_idx):
        if q_idx > kv_idx:
            return q_idx > 3
        return q_idx == kv_idx

    with pytest.raises(tk.UnsupportedError, match=rf"{__file__}:{mod.__code__.co_firstlineno + 1}.*torch.where"):
        trace.pair(None, mod)


REFUSED = {
    "item": (lambda b, h, q, kv: q.item() > kv, tk.UnsupportedError, "control flow on a tensor"),
    "int": (lambda b, h, q, kv: TABLE[int(q)] > 0, tk.UnsupportedError, "control flow on a tensor"),
    "whole tensor": (lambda b, h, q, kv: TABLE.sum() > q, tk.UnsupportedError, "whole tensor"),
    "made tensor": (lambda b, h, q, kv: (TABLE * 2)[h] > q, tk.UnsupportedError, "whole tensor"),
    "random": (lambda b, h, q, kv: torch.rand(()) > 0.5, tk.UnsupportedError, "random"),
    "integer mask": (lambda b, h, q, kv: q - kv, TypeError, "returns int32; a mask must be bool"),
    "no tensor": (lambda b, h, q, kv: True, TypeError, "returns bool; it must return a tensor"),
    "parameters": (lambda b, h, q: q > 1, TypeError, r"must take \(b, h, q_idx, kv_idx\)"),
    "vector": (lambda b, h, q, kv: q < TABLE, TypeError, "1 dimensions"),
    "no function": (3, TypeError, "must be a function"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    mod, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        trace.pair(None, mod)


def test_a_score_that_is_no_score_is_refused() -> None:
    with pytest.raises(TypeError, match="returns bool; a score must be floating-point"):
        trace.pair(lambda score, b, h, q, kv: q > kv, None)


def test_a_mod_that_writes_its_object_is_refused() -> None:
    class Counting:
        n = 0

        def __call__(self, b, h, q, kv):
            self.n = 1
            return q > kv

    with pytest.raises(tk.UnsupportedError, match="must not write n"):
        trace.pair(None, Counting())


# --- Time ---


def test_a_closure_made_anew_is_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trace.pair(mods.alibi(torch.randn(4)), window_of(3))

    def forbidden(*args: Any) -> Any:
        raise AssertionError("traced again")

    monkeypatch.setattr(trace, "_trace", forbidden)
    pair = trace.pair(mods.alibi(torch.randn(8)), window_of(30))
    assert pair.values[1] == 30 and pair.values[0].shape == (8,)


def test_looking_up_takes_microseconds() -> None:
    slopes, ids = torch.randn(4), dense.ids(2, 24)

    def look_up() -> None:
        trace.pair(mods.alibi(slopes), mods.and_masks(mods.causal, mods.document(ids)))

    look_up()
    best = min(timeit.repeat(look_up, number=1000, repeat=5)) / 1000
    assert best < 100e-6  # 10 on an idle machine
