"""tk.varlen_attn against each sequence by itself, in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest

import tk
from tk import errors
from tk.dropin import flash
from tk.flex import create_block_mask, packed, varlen
from tk.flex.packed import Window
from tk.flex.tracing import trace
from tk.kernels.attention import pairs

from .dense import attention

H, H_KV, D = 4, 2, 8
WINDOWS = ((-1, -1), (-1, 0), (9, 0), (140, 3), (-1, 5), (0, 0))
LENGTHS = {
    "one": [40],
    "one token each": [1, 1, 1],
    "empty ones": [0, 5, 0, 0, 300, 1, 130, 0],
    "none": [],
    "nothing in any": [0, 0],
    "whole blocks": [128, 256, 128],
    "drawn": [random.Random(i).randint(0, 90) for i in range(12)],
    "drawn long": [random.Random(i).randint(0, 400) for i in range(4)],
}


def starts_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def inputs(lengths: Sequence[int], of_keys: Sequence[int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    sizes = ((sum(lengths), H), (sum(of_keys), H_KV), (sum(of_keys), H_KV))
    return [torch.randn(total, heads, D, dtype=dtype, requires_grad=True) for total, heads in sizes]


def seen(m: int, n: int, window: tuple[int, int]) -> Tensor:
    """The last query stands at the last key."""
    distance = torch.arange(n) - torch.arange(m).view(-1, 1) - (n - m)
    left, right = (size if size >= 0 else m + n for size in window)
    return (distance <= right) & (-distance <= left)


def each_by_itself(
    operands: Sequence[Tensor], lengths: Sequence[int], of_keys: Sequence[int], window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    query, key, value = operands
    parts = [
        attention(*(x.transpose(0, 1).unsqueeze(0) for x in part), None, seen(m, n, window))
        for *part, m, n in zip(
            query.split(list(lengths)), key.split(list(of_keys)), value.split(list(of_keys)), lengths, of_keys,
            strict=True,
        )
    ]  # fmt: skip
    out = [out[0].transpose(0, 1) for out, _ in parts]
    return torch.cat([query[:0], *out]), torch.cat([query.new_zeros(H, 0), *(lse[0] for _, lse in parts)], 1)


def check(lengths: Sequence[int], of_keys: Sequence[int], window: tuple[int, int]) -> None:
    operands = inputs(lengths, of_keys)
    starts = starts_of(lengths)
    starts_of_keys = starts if of_keys is lengths else starts_of(of_keys)
    longest = (max(lengths, default=0), max(of_keys, default=0))
    out, lse = tk.varlen_attn(
        *operands,
        starts,
        starts_of_keys,
        *longest,
        window_size=window,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    wanted, wanted_lse = each_by_itself(operands, lengths, of_keys, window)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, operands, grad)
    exact = torch.autograd.grad(wanted, operands, grad, allow_unused=True, materialize_grads=True)
    for mine, other in zip(grads, exact, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.fixture(params=[0, 1 << 62], ids=["lists", "walk"])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With lists of blocks and without."""
    monkeypatch.setattr(packed, "_FEW", request.param)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", LENGTHS)
def test_each_sequence_sees_itself(name: str, window: tuple[int, int]) -> None:
    check(LENGTHS[name], LENGTHS[name], window)


@pytest.mark.parametrize("window", WINDOWS)
def test_other_lengths_of_keys(window: tuple[int, int]) -> None:
    """And of these sequences some have no keys, and some more queries than keys."""
    check([5, 0, 3, 140, 7, 128], [9, 4, 0, 150, 2, 128], window)


def test_equal_lengths_in_two_tensors() -> None:
    lengths = LENGTHS["drawn"]
    check(lengths, list(lengths), (-1, 0))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("is_same", [True, False])
def test_lists_have_the_blocks_that_the_mask_has(window: tuple[int, int], is_same: bool) -> None:
    lengths, of_keys = LENGTHS["empty ones"], LENGTHS["empty ones"]
    if not is_same:
        window, of_keys = (-1, -1), [3, 0, 9, 40, 200, 129, 5, 1]
    n_queries, n_keys = sum(lengths), sum(of_keys)
    bounds, block = Window.of(*window), 128
    of_rows, of_columns = (packed._ids(starts_of(x), sum(x)) for x in (lengths, of_keys))

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (of_rows[q] == of_columns[k]) & (k - q <= bounds.right) & (q - k <= bounds.left)

    rows = packed._lists(of_rows, starts_of(of_keys), n_keys, bounds, block)
    columns = packed._lists(of_columns, starts_of(lengths), n_queries, Window(bounds.right, bounds.left), block)
    wanted = create_block_mask(mask, None, None, n_queries, n_keys, "cpu", block)
    transposed = create_block_mask(lambda b, h, k, q: mask(b, h, q, k), None, None, n_keys, n_queries, "cpu", block)
    for found, other in ((rows, wanted), (columns, transposed)):
        for i, name in ((0, "kv"), (2, "full_kv")):
            counts, indices = getattr(other, f"{name}_num_blocks")[0, 0], getattr(other, f"{name}_indices")[0, 0]
            for row, n in enumerate(counts.tolist()):
                assert found[i][0, 0, row] == n
                assert found[i + 1][0, 0, row, :n].tolist() == sorted(indices[row, :n].tolist())


def test_the_wheel_has_the_pairs() -> None:
    """As they are: no other pair has to stand in."""
    held = {traced.fingerprint for traced, _ in pairs.pairs()}
    for kind in ("none", "causal", "band", "causal_documents", "documents"):
        assert trace.parse(packed._pair(kind)[0]).fingerprint in held, kind


def test_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_FEW", 0)
    operands, starts = inputs([40, 100, 7], [40, 100, 7]), starts_of([40, 100, 7])

    def call(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Any:
        return tk.varlen_attn(q, k, v, starts, starts, 100, 100, window_size=(20, 0), enable_gqa=True)

    wanted = call(*operands, starts)
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(*operands, starts)
    torch.testing.assert_close(found, wanted)
    grads = (torch.autograd.grad(out.square().sum(), operands) for out in (found, wanted))
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other)


def test_tensors_without_memory() -> None:
    q, k, v = (x.detach().to("meta").requires_grad_() for x in inputs([2000], [2000], torch.bfloat16))
    starts = torch.empty(5, dtype=torch.int32, device="meta")
    out, lse = tk.varlen_attn(
        q, k, v, starts, starts, 9, 9, window_size=(-1, 0), enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    out.sum().backward()
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (H, 2000), torch.float32)
    assert k.grad is not None and k.grad.shape == k.shape


def test_what_inference_made_serves_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_FEW", 0)
    packed._constants.clear()
    with torch.inference_mode():
        tk.varlen_attn(*inputs([300], [300]), starts_of([300]), starts_of([300]), 300, 300, enable_gqa=True)
    check([300], [300], (-1, -1))


@pytest.mark.parametrize("takes_gqa", [True, False])
def test_what_is_torchs_own_on_cuda(takes_gqa: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever arguments this version of torch has."""
    if not takes_gqa:
        monkeypatch.setattr(varlen, "_torch_takes", lambda name: False)
    heads = dict(enable_gqa=varlen._torch_takes("enable_gqa"))
    q, k, v = inputs([40, 30], [40, 30], torch.bfloat16)
    k, v = (k, v) if heads["enable_gqa"] else (x.repeat_interleave(2, 1) for x in (k, v))
    starts = starts_of([40, 30])
    settings: Any = dict(return_aux=AuxRequest(lse=True), scale=0.5, window_size=(-1, 0), enable_gqa=True)
    active = flash.Activated("CPU")
    try:
        out, lse = varlen._torchs(q, k, v, starts, starts, 40, 40, num_splits=None, **settings)
    finally:
        active.remove()
    wanted, wanted_lse = tk.varlen_attn(q, k, v, starts, starts, 40, 40, **settings)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    with pytest.raises(errors.UnsupportedError, match="takes bfloat16 and float16"):
        varlen._torchs(Q, num_splits=None, enable_gqa=False)
    if not takes_gqa:
        with pytest.raises(errors.UnsupportedError, match="does not take num_splits"):
            varlen._torchs(q, num_splits=1, enable_gqa=False)


Q, K, S = torch.ones(6, 4, 8), torch.ones(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
GOOD: dict[str, Any] = dict(query=Q, key=Q, value=Q, cu_seq_q=S, cu_seq_k=S, max_q=4, max_k=4)


@pytest.mark.parametrize(
    ("bad", "kind", "said"),
    [
        (dict(query=[1]), TypeError, "query must be a Tensor, is list"),
        (dict(query=Q[None]), ValueError, "query is .1, 6, 4, 8., must have 3 dimensions"),
        (dict(value=Q[:3]), ValueError, "value is .3, 4, 8., must be .6, 4."),
        (dict(key=K, value=K), ValueError, "give enable_gqa=True"),
        (dict(key=Q.double()), ValueError, "key is torch.float64"),
        (dict(query=Q.int(), key=Q.int(), value=Q.int()), errors.UnsupportedError, "query is torch.int32"),
        (dict(enable_gqa=1), TypeError, "enable_gqa must be a bool"),
        (dict(cu_seq_q=[0, 6]), TypeError, "cu_seq_q must be a Tensor"),
        (dict(cu_seq_k=None), TypeError, "cu_seq_k must be a Tensor"),
        (dict(cu_seq_q=S.long()), TypeError, "cu_seq_q is torch.int64, must be int32"),
        (dict(cu_seq_k=S[None]), ValueError, "cu_seq_k is .1, 3., must be .n . 1."),
        (dict(cu_seq_k=S[:0]), ValueError, "cu_seq_k is .0., must be"),
        (dict(cu_seq_k=S[[0, 2]], max_k=6), ValueError, "of as many sequences"),
        (dict(cu_seq_q=S + 1), ValueError, "must begin with 0"),
        (dict(cu_seq_q=S[:2]), ValueError, "end with the number of rows, 6; it is .0, 2."),
        (dict(cu_seq_q=S[[0, 2, 1, 2]]), ValueError, "never fall"),
        (dict(max_q=3), ValueError, "max_q is 3, and cu_seq_q has a sequence of 4 rows"),
        (dict(max_k=2.5), TypeError, "max_k must be an int"),
        (dict(window_size=(-2, 0)), ValueError, "must not be less than -1"),
        (dict(window_size=3), TypeError, "window_size must be two ints"),
        (dict(num_splits=1.5), TypeError, "num_splits must be an int"),
        (dict(scale="1"), TypeError, "scale must be a number"),
        (dict(return_aux=True), TypeError, "return_aux must be an AuxRequest"),
        (dict(seqused_k=S), errors.UnsupportedError, "seqused_k must be None"),
        (dict(block_table=S), errors.UnsupportedError, "block_table must be None"),
    ],
)
def test_bad_input(bad: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=rf"^tk\.varlen_attn: .*{said}"):
        tk.varlen_attn(**{**GOOD, **bad})
