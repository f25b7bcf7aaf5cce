"""Attention's gradients against autograd in float64: every variant of a pair's backward op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tk.flex.codegen import family
from tk.flex.tracing import trace
from tk.kernels.attention.bundles import RowStrides, Strides
from tk.kernels.attention.hopper_backward import attention_statistics

from .attention_host import Call, block_lists, reference, run_all, scratch_bytes
from .test_attention import (
    Pair,
    alibi,
    causal,
    document,
    heads_differ,
    learned,
    lists_that_decide,
    qkv,
    relative,
    soft_cap,
    window,
    within,
)

TOLERANCE = {torch.float16: 6e-3, torch.float32: 5e-5}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def check(make: Callable[..., Pair], captured: list[torch.Tensor], call: Call, expect: str = "", at_least: int = 1,
          captures: bool = True) -> None:  # fmt: skip
    """make: the pair of mods from captured tensors; expect: variants whose names have this."""
    pair = make(*captured)
    call.captured = pair.captured
    wide = {n: x.detach().double().requires_grad_() for n, x in
            dict(query=call.query, key=call.key, value=call.value).items()}  # fmt: skip
    if call.sinks is not None:
        wide["sinks"] = call.sinks.double().requires_grad_()
    tables = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in captured]
    exact = make(*tables)
    exact_call = Call(**{**vars(call), **wide})
    out, lse = reference(exact_call, exact.score, exact.mask)
    grad_out = torch.randn(out.shape).to(call.query.dtype)
    grad_lse = torch.randn(lse.shape)
    grad_lse = torch.where(lse.detach() == float("-inf"), 0.0, grad_lse).float()
    in_order = [i for value in pair.captured.values() for i, x in enumerate(captured) if x is value]  # the op's
    wanted = [*wide.values(), *(tables[i] for i in in_order if tables[i].is_floating_point())]
    seen = torch.where(lse == float("-inf"), 0.0, lse)
    expected = torch.autograd.grad([out, seen], wanted, [grad_out.double(), grad_lse.double()], allow_unused=True)
    expected = [torch.zeros_like(x) if g is None else g for g, x in zip(expected, wanted, strict=True)]

    family = pair.families[1]
    named = call.tensors() | dict(grad_0=grad_out, grad_1=grad_lse, result_0=out.detach().to(call.query.dtype),
                                  result_1=lse.detach().float())  # fmt: skip
    call.captured = call.captured | {"grad_captures": int(captures)}
    count = 0
    for name, grads in run_all(family, named, call.ints(family.op), call.floats(family.op), lambda v: expect in v.name):
        grads = [g for g, o in zip(grads, ("query", "key", "value", "sinks", *in_order), strict=False)
                 if not isinstance(o, str) or o in wide]  # fmt: skip
        for i, (g, e) in enumerate(zip(grads, expected, strict=True)):
            tolerance = TOLERANCE[g.dtype]
            if i >= len(wide) and not captures:
                e = torch.zeros_like(e)
            scale = max(1.0, e.abs().max().item() if e.numel() else 1.0)
            torch.testing.assert_close(g.double(), e, atol=tolerance * scale, rtol=tolerance,
                                       msg=lambda m: f"{name}, gradient {i}: {m}")  # noqa: B023  # fmt: skip
        count += 1
    assert count >= at_least


SHAPES = {  # B, H, H_kv, M, N, D, DV
    "square": (2, 2, 2, 70, 70, 64, 64),
    "grouped": (1, 4, 2, 33, 65, 64, 64),
    "odd_heads": (1, 1, 1, 17, 90, 40, 24),
    "one": (1, 2, 1, 1, 1, 64, 64),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("mask", [None, causal])
def test_shapes(shape: tuple[int, ...], mask: Any) -> None:
    check(lambda: Pair(mask=mask), [], Call(*qkv(*shape, torch.float16)))


MASKS = {
    "window": window(9),
    "document": document(torch.tensor([[0] * 20 + [1] * 30 + [2] * 50, [3] * 70 + [4] * 30])),
    "heads_differ": heads_differ,
    "nothing": lambda b, h, q, kv: (q < 20) & (kv < 30),
}


@pytest.mark.drawn
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("lists", [False, True])
def test_masks(mask: Any, lists: bool) -> None:
    pair = Pair(mask=mask)
    call = Call(*qkv(2, 2, 1, 70, 100, 64, 64, torch.float32))
    if lists:
        call.q_block, call.kv_block = 32, 20
        call.lists = block_lists(pair.dense(2, 2, 70, 100), 32, 20)
    elif mask is MASKS["window"]:
        call.band = (8, 0, 1)
    check(lambda: Pair(mask=mask), [], call)


def twice(table: torch.Tensor, other: torch.Tensor) -> Any:
    """One tensor read at two places, another by query alone, in its own dtype."""

    def score_mod(score, b, h, q, kv):
        return torch.where(q > kv, score * table[h, q % 7] + table[h, kv % 5], score.sigmoid() * other[q])

    return score_mod


SCORES = {
    "alibi": (alibi, [torch.rand(4)]),
    "soft_cap": (lambda: soft_cap(2.0), []),
    "relative": (lambda t: relative(t, 4), [torch.randn(4, 9)]),
    "learned": (learned, [torch.randn(4, 50, 70)]),
    "within": (within, [torch.randn(4, 9)]),
    # One without dimensions is a number, unless it needs a gradient.
    "temperature": (lambda t: lambda score, b, h, q, kv: score * t, [torch.tensor(1.5, requires_grad=True)]),
    "twice": (twice, [torch.randn(4, 7), torch.randn(50).half()]),
}


@pytest.mark.drawn
@pytest.mark.parametrize(("make", "captured"), SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("mask", [None, causal])
def test_scores(make: Any, captured: list[torch.Tensor], mask: Any) -> None:
    call = Call(*qkv(1, 4, 2, 50, 70, 64, 64, torch.float32))
    check(lambda *x: Pair(make(*x), mask), captured, call)


# --- Tables with an element of their own for each score: their gradients are written, and take no other memory ---


def of_entry(table: torch.Tensor) -> Any:
    return lambda score, b, h, q, kv: score + table[b, h, q, kv]


def turned(table: torch.Tensor) -> Any:
    """Dimensions in another order, and one more; not linear, and read where it is part of its own derivative."""
    return lambda score, b, h, q, kv: torch.tanh(score * table[kv, 1, q, h, b]) * (1 + score)


PER_SCORE = {
    "of_entry": (of_entry, lambda B, H, M, N, dtype: torch.randn(B, H, M, N).to(dtype)),
    "of_heads": (of_entry, lambda B, H, M, N, dtype: torch.randn(1, H, M, N).to(dtype).expand(B, -1, -1, -1)),
    "of_all": (of_entry, lambda B, H, M, N, dtype: torch.randn(1, 1, M, N).to(dtype).expand(B, H, -1, -1)),
    "matrix": (of_entry, lambda B, H, M, N, dtype: torch.randn(M, N).to(dtype).expand(B, H, -1, -1)),
    "of_batch": (of_entry, lambda B, H, M, N, dtype: torch.randn(B, 1, M, N).to(dtype).expand(-1, H, -1, -1)),
    "of_keys": (of_entry, lambda B, H, M, N, dtype: torch.randn(B, 1, 1, N).to(dtype).expand(-1, H, M, -1)),
    "larger": (of_entry, lambda B, H, M, N, dtype: torch.randn(B + 1, H, M + 3, N + 1).to(dtype)),
    "turned": (turned, lambda B, H, M, N, dtype: torch.randn(N, 2, M, H, B).to(dtype)),
}


@pytest.mark.drawn
@pytest.mark.parametrize(("make", "table"), PER_SCORE.values(), ids=PER_SCORE)
@pytest.mark.parametrize(("dtype", "of_table"), [(torch.float32, torch.float32), (torch.float16, torch.float32),
                                                 (torch.float16, torch.float16)])  # fmt: skip
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_tables_of_scores(make: Any, table: Any, dtype: torch.dtype, of_table: torch.dtype,
                                       masked: bool) -> None:  # fmt: skip
    B, H, M, N = 2, 3, 37, 45
    call = Call(*qkv(B, H, 1, M, N, 64, 64, dtype))
    if masked:  # what is not walked, or is hidden, has a gradient of 0
        call.kv_lengths = torch.tensor([N, 11], dtype=torch.int32)
        call.q_block, call.kv_block = 16, 16
        call.lists = block_lists(Pair(mask=causal).dense(1, 1, M, N), 16, 16)
    mask = causal if masked else None
    captured = [table(B, H, M, N, of_table)]
    check(lambda t: Pair(make(t), mask), captured, call, "captures=wanted")


def scratch(make: Any, table: torch.Tensor, call: Call) -> set[int]:
    """The bytes that the gradients with those of the table ask for."""
    pair = Pair(make(table))
    call.captured = pair.captured | {"grad_captures": 1}
    family = pair.families[1]
    statistics = torch.zeros(call.query.shape[:3])
    out = torch.zeros(*call.query.shape[:3], call.value.shape[3], dtype=call.query.dtype)
    named = call.tensors() | dict(grad_0=out, grad_1=statistics, result_0=out, result_1=statistics)
    return set(scratch_bytes(family, named, call.ints(family.op), lambda v: "captures=wanted" in v.name))


def test_gradients_of_tables_of_scores_take_no_scratch_for_their_elements() -> None:
    """And others 16 bytes an element of what is captured, whatever it is expanded to."""
    B, H, M, N = 2, 3, 37, 45
    of_rows = 2 * 4 * B * H * M + 4

    def call() -> Call:
        return Call(*qkv(B, H, 1, M, N, 64, 64, torch.float16))

    for make, table in PER_SCORE.values():
        assert scratch(make, table(B, H, M, N, torch.float16), call()) == {of_rows}
    of_heads = torch.randn(H, M, N)
    assert scratch(learned, of_heads, call()) == {of_rows + 16 * H * M * N}
    first = lambda t: lambda score, b, h, q, kv: score + t[0, h, q, kv]  # noqa: E731
    assert scratch(first, of_heads[None], call()) == {of_rows + 16 * H * M * N}
    both = lambda t: lambda score, b, h, q, kv: score * t[b, h, q, kv] + t[b, h, 0, kv]  # noqa: E731
    assert scratch(both, torch.randn(B, H, M, N), call()) == {of_rows + 16 * B * H * M * N}


def test_gradients_of_captures_that_nobody_wants_are_zero() -> None:
    call = Call(*qkv(1, 4, 2, 20, 30, 64, 64, torch.float32))
    check(lambda x: Pair(alibi(x)), [torch.rand(4)], call, "captures=none", captures=False)


def test_a_contribution_that_fixed_point_cannot_hold_is_nan() -> None:
    call = Call(*qkv(1, 1, 1, 4, 4, 64, 64, torch.float32))
    pair = Pair(alibi(torch.rand(1)))
    call.captured = pair.captured | {"grad_captures": 1}
    grad = torch.full((1, 1, 4, 64), 1e-6)
    call.value *= 1e30
    named = call.tensors() | dict(grad_0=grad, grad_1=torch.zeros(1, 1, 4), result_0=torch.zeros(1, 1, 4, 64),
                                  result_1=torch.zeros(1, 1, 4))  # fmt: skip
    op = pair.families[1].op
    found = list(run_all(pair.families[1], named, call.ints(op), call.floats(op), lambda v: "wanted" in v.name))
    assert found and all(grads[4].isnan().all() for _, grads in found)


def captured_gradient(make: Any, captured: torch.Tensor, call: Call, grad_out: torch.Tensor | None = None,
                      grad_lse: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Of one captured tensor, by the kernels and in float64; from the output as the forward pass rounds it."""
    exact = captured.double().requires_grad_()
    out, lse = reference(call, make(exact))
    grad_out = torch.zeros(out.shape) if grad_out is None else grad_out
    grad_lse = torch.zeros(lse.shape) if grad_lse is None else grad_lse
    (expected,) = torch.autograd.grad([out, lse], [exact], [grad_out.double(), grad_lse.double()], allow_unused=True)
    pair = Pair(make(captured))
    call.captured = pair.captured | {"grad_captures": 1}
    dtype = call.query.dtype
    named = call.tensors() | dict(grad_0=grad_out.to(dtype), grad_1=grad_lse.float(), result_0=out.detach().to(dtype),
                                  result_1=lse.detach().float())  # fmt: skip
    family = pair.families[1]
    only = "layout=aligned"
    found = list(run_all(family, named, call.ints(family.op), call.floats(family.op), lambda v: only in v.name))
    expected = torch.zeros_like(exact) if expected is None else expected
    return found[0][1][4], expected


def test_gradients_of_captures_where_the_log_sum_exp_is_large() -> None:
    """Its rounding makes the weights of a row sum to 1.0001, and far more than that of what a row adds up cancels."""
    torch.manual_seed(0)
    call = Call(*qkv(1, 2, 2, 20, 70, 64, 64, torch.float16))
    found, expected = captured_gradient(lambda t: lambda score, b, h, q, kv: score + t[h] * (kv + 3000),
                                        torch.rand(2), call, torch.randn(1, 2, 20, 64).half())  # fmt: skip
    torch.testing.assert_close(found.double(), expected, atol=1e-4 * expected.abs().max().item(), rtol=1e-4)


def per_head(bias: torch.Tensor) -> Any:
    return lambda score, b, h, q, kv: score + bias[h]


def test_sums_over_all_scores_cancel() -> None:
    """A bias for all scores of a head changes nothing: its gradient is 0, which it is not with delta = rowsum(grad_out
    out) of an output that was rounded (0.05 here)."""
    call = Call(*qkv(1, 2, 1, 64, 200, 64, 64, torch.float16))
    grad = torch.randn(1, 2, 64, 64).half()
    for make, table in ((per_head, torch.zeros(2)), (alibi, torch.tensor([0.02, 0.1]))):
        found, expected = captured_gradient(make, table, call, grad)
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("size", [1.0, 1e-25, 1e15])
def test_gradients_of_captures_by_the_lse_alone(size: float) -> None:
    call = Call(*qkv(1, 2, 1, 20, 30, 64, 64, torch.float32))
    found, expected = captured_gradient(alibi, torch.rand(2), call, grad_lse=torch.randn(1, 2, 20) * size)
    torch.testing.assert_close(found.double() / size, expected / size, atol=1e-4, rtol=1e-5)
    found, expected = captured_gradient(alibi, torch.rand(2), call)
    assert (found == 0).all() and (expected == 0).all()


def test_gradients_of_captures_that_are_no_numbers_stay_where_they_are() -> None:
    call = Call(*qkv(1, 4, 1, 20, 30, 64, 64, torch.float32))
    grad_lse = torch.randn(1, 4, 20)
    grad_lse[0, 1, 3], grad_lse[0, 2, 5], grad_lse[0, 3, 5] = float("nan"), float("inf"), float("-inf")
    found, expected = captured_gradient(per_head, torch.rand(4), call, torch.randn(1, 4, 20, 64), grad_lse)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5, equal_nan=True)


def test_what_the_mask_says_of_full_blocks_does_not_count() -> None:
    call = Call(*qkv(1, 2, 1, 70, 90, 64, 64, torch.float32), q_block=32, kv_block=20)
    call.lists, mask = lists_that_decide(70, 90, 32, 20)
    pair = Pair(mask=causal)
    exact = Call(**{**vars(call), **{n: getattr(call, n).double().requires_grad_() for n in ("query", "key", "value")}})
    out, lse = reference(exact, None, mask)
    grad = torch.randn(out.shape)
    expected = torch.autograd.grad(out, [exact.query, exact.key, exact.value], grad.double())
    named = call.tensors() | dict(grad_0=grad, grad_1=torch.zeros(lse.shape),
                                  result_0=out.float(), result_1=lse.float())  # fmt: skip
    op = pair.families[1].op
    found = list(run_all(pair.families[1], named, call.ints(op), call.floats(op)))
    assert found
    for name, grads in found:
        for g, e in zip(grads, expected, strict=False):
            torch.testing.assert_close(g.double(), e, atol=5e-5, rtol=5e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023


def test_wide_heads() -> None:
    traced = trace.pair(None, causal).traced
    pair = Pair(mask=causal)
    pair.families = family.families(traced, family.Wanted(("fp32",), (), ((64, 64), (512, 512))))
    check(lambda: pair, [], Call(*qkv(1, 2, 1, 9, 20, 300, 40, torch.float32)), "to_512x512")


def test_gradients_past_a_length_are_zero_whatever_is_there() -> None:
    lengths = torch.tensor([0, 17, 50], dtype=torch.int32)
    for score in (None, soft_cap(2.0)):
        call = Call(*qkv(3, 2, 1, 20, 50, 64, 64, torch.float32), kv_lengths=lengths)
        pair = Pair(score)
        wide = {n: getattr(call, n).double().requires_grad_() for n in ("query", "key", "value")}
        out, lse = reference(Call(**{**vars(call), **wide}), score)
        grad = torch.randn(out.shape)
        expected = torch.autograd.grad(out, list(wide.values()), grad.double())
        for b, length in enumerate(lengths):
            call.key[b, :, length:], call.value[b, :, length:] = float("nan"), float("inf")
        call.captured = pair.captured
        named = call.tensors() | dict(grad_0=grad, grad_1=torch.zeros(lse.shape), result_0=out.detach().float(),
                                      result_1=lse.detach().float())  # fmt: skip
        op = pair.families[1].op
        found = list(run_all(pair.families[1], named, call.ints(op), call.floats(op)))
        assert found
        for name, grads in found:
            for g, e in zip(grads, expected, strict=False):
                torch.testing.assert_close(g.double(), e, atol=5e-5, rtol=5e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023


def test_lengths_sinks_shared_keys_and_strides() -> None:
    sinks = torch.tensor([1.0, -2.0, 0.0, -30.0])
    lengths = torch.tensor([0, 17, 50], dtype=torch.int32)
    check(
        lambda: Pair(mask=causal),
        [],
        Call(*qkv(3, 4, 2, 20, 50, 64, 64, torch.float32), kv_lengths=lengths, sinks=sinks),
    )
    check(lambda: Pair(), [], Call(*qkv(3, 4, 2, 20, 50, 64, 64, torch.float32, B_kv=1)))
    q, k, v = (torch.randn(2, 40, 3, 64).transpose(1, 2) for _ in range(3))
    check(lambda: Pair(mask=causal), [], Call(q, k, v))
    q, k, v = (torch.randn(2, 3, 64, 40).transpose(2, 3) for _ in range(3))
    check(lambda: Pair(mask=causal), [], Call(q, k, v), "strided")


def test_a_mask_without_its_lists_by_key_is_refused() -> None:
    pair = Pair(mask=causal)
    op = pair.families[1].op
    call = Call(*qkv(1, 1, 1, 20, 20, 64, 64, torch.float32), q_block=16, kv_block=16)
    lists = block_lists(pair.dense(1, 1, 20, 20), 16, 16)
    call.lists = {n: x for n, x in lists.items() if "kv" in n}
    call.captured = {"grad_captures": 0}
    named = call.tensors() | dict(grad_0=call.query, grad_1=torch.zeros(1, 1, 20), result_0=call.query,
                                  result_1=torch.zeros(1, 1, 20))  # fmt: skip
    with pytest.raises(ValueError, match="lists by key"):
        list(run_all(pair.families[1], named, call.ints(op), call.floats(op)))


@pytest.mark.parametrize(("M", "DV"), [(1, 64), (100, 40), (128, 64), (129, 64)])
def test_statistics_are_padded_with_rows_that_see_nothing(M: int, DV: int) -> None:
    """What Hopper's kernels read instead of bounds: Gluon's own have no interpreter."""
    B, H, padded, block = 2, 3, -(-M // 128) * 128, 32
    out, grad = (torch.randn(B, H, M, DV).half() for _ in range(2))
    lse, grad_lse = torch.randn(B, H, M), torch.randn(B, H, M)
    lse[:, 1, ::2] = float("-inf")
    found, delta = (torch.full((B * H + 1, padded), float("nan")) for _ in range(2))
    attention_statistics[(padded // block, B * H + 1)](
        out, grad, lse, grad_lse, found, delta, B, H, M, DV, padded, Strides(*out.stride()), Strides(*grad.stride()),
        RowStrides(*lse.stride()), RowStrides(*grad_lse.stride()), EVEN=DV == 64, BLOCK_M=block,
        BLOCK_DV=64)  # fmt: skip
    expected, expected_delta = torch.full((B * H + 1, padded), float("inf")), torch.zeros(B * H + 1, padded)
    expected[: B * H, :M] = torch.where(lse == float("-inf"), float("inf"), lse).view(B * H, M)
    expected_delta[: B * H, :M] = ((out.float() * grad.float()).sum(-1) - grad_lse).view(B * H, M)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(delta, expected_delta, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("slope", [1e30, 1e8])
def test_very_large_scores(slope: float) -> None:
    """Every query sees itself alone: exp2 of a score and its log-sum-exp, which is as large, is 1."""

    def own(score, b, h, q, kv):
        return score + slope * (300 - (q - kv).abs())

    check(lambda: Pair(own, causal), [], Call(*qkv(1, 2, 1, 70, 70, 64, 64, torch.float16)))
