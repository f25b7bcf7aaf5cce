"""Fingerprints: the same for the same mod however it is written down and whatever it captures, never for two mods."""

from __future__ import annotations

import functools
import itertools
import math
import random
import subprocess
import sys
import timeit
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex

import tk
from tk.flex import mods
from tk.flex.tracing import trace
from tk.flex.tracing.evaluate import evaluate

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
    assert [p.values for p in pairs] == [(n - 1,) for n in (3, 4, 9, 5, 7, 2, 6, 6, 8, 5, 5, 5)]  # distance <= n - 1


def test_numbers_and_tensors_are_read_anew() -> None:
    module = Window(2)
    first = trace.pair(None, module)
    module.size = 11
    again = trace.pair(None, module)
    assert again.traced is first.traced
    assert (first.values, again.values) == ((1,), (10,))


def test_a_global_that_changes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trace.pair(None, global_number).values == (4,)
    monkeypatch.setitem(globals(), "WIDTH", 12)
    assert trace.pair(None, global_number).values == (11,)
    monkeypatch.setitem(globals(), "WIDTH", torch.tensor(3))  # a number as well
    assert trace.pair(None, global_number).values == (2,)
    monkeypatch.setitem(globals(), "WIDTH", torch.tensor(3, device="meta"))  # of another kind: another graph
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
        fingerprint(scaled(2.0)), fingerprint(scaled(torch.tensor(2.0, device="meta"))),
        fingerprint(None, flagged(True)), fingerprint(None, flagged(False)),
        fingerprint(lambda score, b, h, q, kv: score * 2.0), fingerprint(lambda score, b, h, q, kv: score * 3.0),
        fingerprint(lambda score, b, h, q, kv: score - kv), fingerprint(lambda score, b, h, q, kv: kv - score),
        fingerprint(scaled(2.0), mods.causal), fingerprint(scaled(2.0), mods.sliding_window(2)),
    ]  # fmt: skip
    assert len(set(found)) == len(found)
    assert fingerprint(scaled(2)) == fingerprint(scaled(2.0))  # an argument, which the call makes a float of


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
    assert pair.values == (2,)  # kv_idx >= 2


def test_text_reads_back() -> None:
    for (_, score), (_, mask) in itertools.product(dense.SCORES.items(), dense.MASKS.items()):
        traced = trace.pair(score(*SIZES)[0], mask(*SIZES)).traced
        trace._by_text.pop(traced.text)
        assert "\n" not in traced.text  # Inductor writes an op's arguments into comments of its code
        read = trace.parse(traced.text)
        assert read is not traced and read.fingerprint == traced.fingerprint
        texts = [(g.text if g else None) for t in (traced, read) for g in (t.score, t.mask)]
        assert texts[:2] == texts[2:]
        assert [(c.kind, c.dtype, c.rank, c.of) for c in read.captures] == [
            (c.kind, c.dtype, c.rank, c.of) for c in traced.captures
        ]


def test_packs_made_before_still_match() -> None:
    """The fingerprints are the names of ops in packs: a change of theirs is one of the packs' format."""
    found = {name: fingerprint(None, make(*SIZES)) for name, make in dense.MASKS.items()}
    found |= {f"score {name}": fingerprint(make(*SIZES)[0]) for name, make in dense.SCORES.items()}
    assert {name: f[:16] for name, f in found.items()} == FINGERPRINTS


FINGERPRINTS = {
    "none": "b05755e49fddad51",
    "causal": "2eb6e8afc531839e",
    "sliding_window": "d62980babdbd59ba",
    "dilated_window": "211ad70ae1416d87",
    "prefix_lm": "e21048688c3dced3",
    "prefix_lm_by_entry": "35bc819f0b5bcfa9",
    "document": "25a97539109e7789",
    "document_of_all": "5f6a1c344b1e22e9",
    "natten_2d": "e8d9f95cb8c60325",
    "causal_document": "344e0005298e2460",
    "window_or_prefix": "6c86b3752e085db6",
    "by_head": "46133025a9c07c5a",
    "score none": "b05755e49fddad51",
    "score alibi": "683e66e58a1855bb",
    "score alibi_slopes": "0898f4a9e80371bd",
    "score relative_bias": "5799014308a6e81b",
    "score per_head_bias": "5cd8a954600f8caa",
    "score soft_cap": "3f9ec0c0c730e1bb",
    "score learned_bias_2": "300862b8eab04fd2",
    "score learned_bias_3": "891fbf4aa139116b",
    "score learned_bias_4": "2208c72419a420cb",
    "score read_twice": "a5cafabe4155b302",
    "score temperature": "d09c5f91e1265e90",
}


# --- Sizes ---


def test_a_size_of_a_captured_tensor_is_read_anew() -> None:
    def biased(table):
        return lambda score, b, h, q, kv: score + table[h, q.clamp(0, table.shape[1] - 1)] * table.size(-1)

    q = torch.randn(1, 4, 20, 8)
    for table in (torch.randn(4, 9), torch.randn(4, 13)):
        found = tk.flex_attention(q, q, q, biased(table))
        at = torch.arange(20).clamp(0, table.shape[1] - 1)
        bias = (table[:, at] * table.shape[1]).view(1, 4, 20, 1)
        expected = torch.softmax(q @ q.mT * 8**-0.5 + bias, -1) @ q
        torch.testing.assert_close(found, expected)
    pairs = [trace.pair(biased(torch.randn(4, n)), None) for n in (9, 13)]
    assert pairs[0].traced is pairs[1].traced
    assert pairs[0].values[1:] == (8, 9.0)  # the call works them out


ADDED = {
    "add": lambda score, x, f: torch.add(score, x, alpha=f),
    "sub": lambda score, x, f: torch.sub(x, score, alpha=f),
    "rsub": lambda score, x, f: torch.rsub(score, x, alpha=f),
    "add_": lambda score, x, f: score.clone().add_(x, alpha=f),
    "a number": lambda score, x, f: torch.add(score, 2, alpha=f) + x,
}


@pytest.mark.parametrize("name", ADDED)
def test_the_factor_of_a_sum_is_read_anew(name: str) -> None:
    def mod_of(f):
        return lambda score, b, h, q, kv: ADDED[name](score, q * 0.5, f)

    pairs = [trace.pair(mod_of(f), None) for f in (0.25, -3.5)]
    assert pairs[0].fingerprint == pairs[1].fingerprint
    score, position = torch.tensor(0.75), torch.tensor(3, dtype=torch.int32)
    for f, pair in zip((0.25, -3.5), pairs, strict=True):
        expected = mod_of(f)(score, position, position, position, position)
        inputs = [x.view(1, 1, 1, 1) for x in (score, *[position] * 4)]
        torch.testing.assert_close(evaluate(pair.score, inputs, pair.values).view(()), expected)


def test_the_factor_of_a_sum_of_integers() -> None:
    def near(n):
        return lambda b, h, q, kv: torch.add(q, kv, alpha=n) < 40

    assert fingerprint(None, near(2)) == fingerprint(None, near(3))
    with pytest.raises(Exception, match="alpha must not be a floating point number"):
        trace.pair(None, near(2.5))


def test_a_size_that_is_decided_by_is_structure() -> None:
    def last(table):
        def mod(score, b, h, q_idx, kv_idx):
            assert table.dim() == 2 and len(table) > 1
            return score + table[h, q_idx] if table.shape[1] > 10 else score

        return mod

    kinds = [trace.pair(last(torch.randn(4, n)), None).traced for n in (3, 13, 3, 14)]
    assert kinds[0] is kinds[2] and kinds[0].score is None
    assert kinds[1].fingerprint == kinds[3].fingerprint != kinds[0].fingerprint


def test_a_number_that_becomes_text_is_structure() -> None:
    def named(n):
        return lambda b, h, q, kv: q < len(f"{n}")

    assert fingerprint(None, named(9)) != fingerprint(None, named(10))


# --- In place ---


def test_what_is_written_is_what_shares_the_memory() -> None:
    def copied(score, b, h, q_idx, kv_idx):
        return score + score.clone().add_(1)

    def viewed(score, b, h, q_idx, kv_idx):
        view = score.view(())
        view.add_(1)
        return score + view

    def twice(score, b, h, q_idx, kv_idx):
        one, other = score * 2, score * 2
        one.add_(1)
        return one + other

    score = torch.tensor(3.0)
    for mod in (copied, viewed, twice):
        graph = trace.pair(mod, None).score
        value = score.view(1, 1, 1, 1).clone()
        found = evaluate(graph, [value, *[torch.zeros(1, 1, 1, 1, dtype=torch.int32)] * 4], [])
        assert found.item() == mod(score.clone(), *[torch.tensor(0)] * 4).item(), mod.__name__


def test_powers_in_place() -> None:
    pair = trace.pair(lambda score, b, h, q, kv: score.pow_(2), None)
    assert pair.fingerprint == fingerprint(lambda score, b, h, q, kv: score**2)


# --- Random mods ---


class Written:
    """Random mods as text, over captured numbers N, K and F and tensors T [4, 13], S [24] and half H [4]."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def one_of(self, *texts: str) -> str:
        return self.random.choice(texts)

    def number(self, depth: int) -> str:
        if depth == 0 or self.random.random() < 0.4:
            return self.one_of("N", "K", "F", "3", "1.5", "T.shape[1]", "len(S)", "H.size(0)")
        return f"({self.number(depth - 1)} {self.one_of(*'+-*/%')} {self.number(depth - 1)})"

    def index(self, depth: int) -> str:
        if depth == 0 or self.random.random() < 0.2:
            return self.one_of("b", "h", "q", "kv", "q - kv")
        inner = self.index(depth - 1)
        return self.one_of(
            f"S[({inner}) % S.shape[0]]",
            f"(({inner}) {self.one_of('+', '-', '*', '//', '%')} {self.one_of('N', 'K', '5')})",
            f"(({inner}) {self.one_of(*'+-*')} ({self.index(depth - 1)}))", f"torch.clamp({inner}, 0, N - 1)",
        )  # fmt: skip

    def mask(self, depth: int) -> str:
        if depth == 0 or self.random.random() < 0.4:
            compare = self.one_of("<", "<=", ">", ">=", "==", "!=")
            return f"(({self.index(2)}) {compare} {self.one_of(self.number(2), f'({self.index(1)})')})"
        return self.one_of(
            f"~{self.mask(depth - 1)}", f"({self.mask(depth - 1)} {self.one_of(*'&|^')} {self.mask(depth - 1)})"
        )

    def score(self, depth: int) -> str:
        if depth == 0 or self.random.random() < 0.15:
            return self.one_of("s", "s", f"T[h, ({self.index(1)}) % 13]", "T[h][kv % T.shape[1]]", "H[h]")
        inner = self.score(depth - 1)
        operator = self.one_of(*"+-*/")
        return self.one_of(
            f"torch.{self.one_of('tanh', 'sigmoid', 'abs', 'sin', 'relu')}({inner})",
            f"({inner} {operator} {self.number(2)})",
            f"({self.number(1)} {operator} {inner})", f"({inner} {operator} {self.score(depth - 1)})",
            f"torch.where({self.mask(1)}, {inner}, {self.one_of('0.0', 'F', 's')})",
            f"({inner}).clone().add_({self.index(1)})",
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_a_random_mod_is_what_its_graph_says(seed: int) -> None:
    written = Written(seed)
    known = dict(
        torch=torch, N=5, K=7, F=2.5, T=torch.randn(4, 13), S=torch.arange(24) * 7 % 24, H=torch.randn(4).half()
    )
    for kind, text in (("s, b, h, q, kv", written.score(4)), ("b, h, q, kv", written.mask(3))):
        mod = eval(f"lambda {kind}: {text}", dict(known))
        is_score = kind.startswith("s")
        pair = trace.pair(mod, None) if is_score else trace.pair(None, mod)
        graph = pair.score or pair.mask
        arguments = [torch.tensor(i, dtype=torch.int32) for i in (1, 3, 9, 4)]
        if is_score:
            arguments = [torch.tensor(0.75), *arguments]
        expected = mod(*[x.clone() for x in arguments])
        if graph is None:
            assert torch.equal(expected, arguments[0] if is_score else torch.tensor(True))
            continue
        found = evaluate(graph, [x.view(1, 1, 1, 1).clone() for x in arguments], pair.values).view(())
        assert found.dtype == expected.dtype, text
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=text)


# --- Where it is traced ---


def around(name: str, run: Any) -> Any:
    found: list[Any] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        found.append(run())
        return x.sum()

    if name == "vmap":
        torch.vmap(body)(torch.randn(3))
    elif name == "grad":
        torch.func.grad(body)(torch.randn(3))
    else:
        with AROUND[name]():
            body(torch.ones(2))
    return found[0]


AROUND = {
    "vmap": None, "grad": None, "inference": torch.inference_mode, "fake": FakeTensorMode,
    "device": lambda: torch.device("meta"), "below autograd": torch._C._AutoDispatchBelowAutograd,
}  # fmt: skip


@pytest.mark.parametrize("name", AROUND)
def test_a_trace_does_not_see_what_is_around_it(name: str) -> None:
    def made() -> Any:
        table = torch.ones(4, device="cpu")
        made = "lambda score, b, h, q, kv: torch.where(q >= kv, score + table[h], torch.tensor(-1.5))"
        return eval(made, {"table": table, "torch": torch})

    plain = trace.pair(made(), None)
    found = around(name, lambda: trace.pair(made(), None))
    assert found.traced is not plain.traced and found.traced.text == plain.traced.text


def test_a_first_call_imports_no_compiler() -> None:
    """Each takes a second of the first call."""
    code = """
import sys, torch, tk
q = torch.randn(1, 2, 16, 16)
mask = tk.flex.create_block_mask(tk.flex.mods.sliding_window(4), 1, 1, 16, 16, "cpu", 16)
tk.flex_attention(q, q, q, tk.flex.mods.relative_bias(torch.randn(2, 13), 6), mask)
tk.flex_attention(q, q, q, lambda score, b, h, q_idx, kv_idx: score.mul_(2.5).clamp(max=9) - q_idx.abs() // 2 + h**2)
found = {"torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "sympy", "triton"}
assert not found & set(sys.modules), found & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- What is refused ---


def test_control_flow_on_tensors_is_refused_with_its_line() -> None:
    def mod(b, h, q_idx, kv_idx):
        if q_idx > kv_idx:
            return q_idx > 3
        return q_idx == kv_idx

    with pytest.raises(tk.UnsupportedError, match=rf"{__file__}:{mod.__code__.co_firstlineno + 1}.*torch.where"):
        trace.pair(None, mod)


def _caught(q: Any, kv: Any) -> Any:
    try:
        return kv > 0 if q > kv else kv < 0
    except Exception:
        return q > kv


NUMBER, NUMBERS = torch.tensor(2.0), [2.5]
REFUSED = {
    "item": (lambda b, h, q, kv: q.item() > kv, tk.UnsupportedError, "control flow on a tensor"),
    "int": (lambda b, h, q, kv: TABLE[int(q)] > 0, tk.UnsupportedError, "control flow on a tensor"),
    "whole tensor": (lambda b, h, q, kv: TABLE.sum() > q, tk.UnsupportedError, "whole tensor"),
    "made tensor": (lambda b, h, q, kv: (TABLE * 2)[h] > q, tk.UnsupportedError, "whole tensor"),
    "caught": (lambda b, h, q, kv: _caught(q, kv), tk.UnsupportedError, "control flow on a tensor"),
    "list": (lambda b, h, q, kv: q > q.tolist(), tk.UnsupportedError, "control flow on a tensor"),
    "written capture": (lambda b, h, q, kv: NUMBER.add_(1) > q, tk.UnsupportedError, "writes NUMBER, which it capt"),
    "size of a made tensor": (lambda b, h, q, kv: q < TABLE.view(-1).shape[0], tk.UnsupportedError, "whole tensor"),
    "stride": (lambda b, h, q, kv: q < TABLE.stride(0), tk.UnsupportedError, "asks for a stride"),
    "floor": (lambda b, h, q, kv: q < math.floor(NUMBERS[0]), tk.UnsupportedError, "uses floor on captured numbers"),
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
    assert pair.values[1] == 29 and pair.values[0].shape == (8,)


def test_looking_up_takes_microseconds() -> None:
    slopes, ids = torch.randn(4), dense.ids(2, 24)

    def look_up() -> None:
        trace.pair(mods.alibi(slopes), mods.and_masks(mods.causal, mods.document(ids)))

    look_up()
    best = min(timeit.repeat(look_up, number=1000, repeat=5)) / 1000
    assert best < 100e-6  # 10 on an idle machine
