"""tk.flex_attention on the CPU against attention as it is written in a book, and against torch's own."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import tk
from tk.flex import mods, reference
from tk.ops.flex import Request

from . import dense


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few dozen keys are several tiles."""
    monkeypatch.setattr(reference, "_Q_TILE", 32)
    monkeypatch.setattr(reference, "_KV_TILE", 32)


def inputs(B: int, H: int, H_kv: int, M: int, N: int, D: int, D_v: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    shapes = ((B, H, M, D), (B, H_kv, N, D), (B, H_kv, N, D_v))
    return tuple(torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)


def block_mask(mask_mod: Any, B: int, H: int, M: int, N: int, block: Any = 16) -> Any:
    return None if mask_mod is None else tk.flex.create_block_mask(mask_mod, B, H, M, N, "cpu", block)


def compare(
    qkv: tuple[Tensor, ...],
    score: Any,
    captured: list[Tensor],
    mask_mod: Any,
    sinks: Tensor | None = None,
    block: Any = 16,
) -> None:
    """Result, lse and all gradients."""
    q, k, v = qkv
    B, H, M, _ = q.shape
    N = k.shape[2]
    mask = None if mask_mod is None else dense.mask_of(mask_mod, B, H, M, N)
    expected = dense.attention(q, k, v, score, mask, sinks=sinks)
    found = tk.flex_attention(
        q, k, v, score, block_mask(mask_mod, B, H, M, N, block), enable_gqa=True, return_lse=True, sinks=sinks
    )
    if mask is not None:
        is_seen = mask.any(-1).expand(B, H, M)
        assert torch.equal(found[0].abs().sum(-1) > 0, is_seen)
        if sinks is None:
            assert torch.equal(found[1] > -dense.INF, is_seen)
    close(found, expected)
    grads = torch.randn_like(found[0]), torch.randn_like(found[1])
    wanted = [*qkv, *captured, *(() if sinks is None else (sinks,))]
    losses = [
        sum((x.masked_fill(x == -dense.INF, 0) * g).sum() for x, g in zip(pair, grads, strict=True))
        for pair in (found, expected)
    ]
    close(*(torch.autograd.grad(loss, wanted) for loss in losses))


def close(found: Any, expected: Any) -> None:
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x.to(y.dtype), y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", dense.MASKS)
@pytest.mark.parametrize("score_name", dense.SCORES)
def test_every_pair_of_the_library(name: str, score_name: str) -> None:
    B, H, H_kv, M, N = 2, 4, 2, 37, 53
    score, captured = dense.SCORES[score_name](B, H, M, N)
    mask_mod = dense.MASKS[name](B, H, M, N)
    compare(inputs(B, H, H_kv, M, N, 8, 8, torch.float64), score, captured, mask_mod)


SHAPES = [
    (1, 1, 1, 1, 1, 8, 8), (1, 2, 1, 1, 65, 8, 8), (3, 2, 2, 65, 1, 16, 8), (2, 6, 2, 33, 32, 5, 24),
    (2, 3, 1, 31, 97, 64, 64), (5, 1, 1, 16, 16, 8, 8),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", [16, (16, 32), (64, 16), (24, 40), 128], ids=str)
def test_shapes_and_blocks(shape: tuple[int, ...], block: Any) -> None:
    B, H, _, M, N, *_ = shape
    score, captured = dense.SCORES["alibi_slopes"](B, H, M, N)
    compare(inputs(*shape, torch.float64), score, captured, dense.MASKS["causal_document"](B, H, M, N), block=block)


@pytest.mark.parametrize("name", ["none", "causal", "document"])
def test_sinks(name: str) -> None:
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    compare(inputs(2, 4, 4, 20, 40, 8, 8, torch.float64), None, [], dense.MASKS[name](2, 4, 20, 40), sinks)


@pytest.mark.parametrize("M, N", list(itertools.product([0, 3], [0, 3])))
def test_lengths_of_0(M: int, N: int) -> None:
    q, k, v = inputs(2, 2, 2, M, N, 8, 4, torch.float32)
    out, lse = tk.flex_attention(q, k, v, return_lse=True)
    assert out.shape == (2, 2, M, 4) and lse.shape == (2, 2, M)
    if not N:
        assert not out.any() and bool((lse == -dense.INF).all())
    assert not out.sum().backward() and q.grad is not None and k.grad is not None


def test_rows_without_keys_are_0() -> None:
    q, k, v = inputs(1, 2, 2, 40, 40, 8, 8, torch.float32)
    mask_mod = lambda b, h, q_idx, kv_idx: (q_idx > 20) & (kv_idx < 3)  # noqa: E731
    out, lse = tk.flex_attention(q, k, v, None, block_mask(mask_mod, 1, 1, 40, 40), return_lse=True)
    assert not out[:, :, :21].any() and bool((lse[:, :, :21] == -dense.INF).all())
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(bool(g.isfinite().all()) for g in grads) and not grads[0][:, :, :21].any()


def test_gradcheck() -> None:
    q, k, v = inputs(1, 2, 1, 5, 7, 3, 2, torch.float64)
    table = torch.randn(2, 7, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    mask = block_mask(mods.sliding_window(4), 1, 1, 5, 7, (2, 3))

    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor, sinks: Tensor) -> Any:
        score = mods.relative_bias(table, 3)
        capped = mods.soft_cap(3.0)
        both = lambda s, *at: capped(score(s, *at), *at)  # noqa: E731
        return tk.flex_attention(q, k, v, both, mask, enable_gqa=True, return_lse=True, sinks=sinks)

    assert torch.autograd.gradcheck(run, (q, k, v, table, sinks))


def test_a_second_gradient_is_refused() -> None:
    q, k, v = inputs(1, 1, 1, 4, 4, 4, 4, torch.float32)
    with pytest.raises(NotImplementedError, match="no gradient of its gradient"):
        torch.autograd.grad(tk.flex_attention(q, k, v).sum(), q, create_graph=True)[0].sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["causal", "document", "natten_2d"])
def test_agrees_with_torch(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's BlockMask as it is."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    B, H, M, N = 2, 4, 64, 64
    q, k, v = (x.detach() for x in inputs(B, H, 2, M, N, 16, 16, dtype))
    mask_mod, (score, _) = dense.MASKS[name](B, H, M, N), dense.SCORES["alibi"](B, H, M, N)
    mask = torch_flex.create_block_mask(mask_mod, B, H, M, N, "cpu", 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = torch_flex.flex_attention(q, k, v, score, mask, enable_gqa=True, return_lse=True)
    ours = tk.flex_attention(q, k, v, score, mask, enable_gqa=True, return_lse=True)
    exact = dense.attention(*(x.double() for x in (q, k, v)), score, dense.mask_of(mask_mod, B, H, M, N))[0]
    error = [float((x[0].double() - exact).abs().mean()) for x in (ours, theirs)]
    assert error[0] <= 1.1 * error[1] + 1e-7
    assert ours[1].dtype == torch.float32


def test_torch_s_mask_of_nothing_and_torch_s_sliced_mask() -> None:
    q, k, v = inputs(1, 2, 2, 40, 40, 8, 8, torch.float32)
    nothing = torch_flex._create_empty_block_mask(q, k)
    close([tk.flex_attention(q, k, v, None, nothing)], [tk.flex_attention(q, k, v)])
    sliced = torch_flex.create_block_mask(mods.causal, 1, 2, 40, 40, "cpu", 16)[:, :1]
    with pytest.raises(tk.UnsupportedError, match="sliced BlockMask"):
        tk.flex_attention(q, k, v, None, sliced)


def test_a_mask_of_one_block_is_a_mask() -> None:
    q, k, v = inputs(1, 2, 2, 40, 40, 8, 8, torch.float64)
    one = torch_flex.BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        BLOCK_SIZE=1 << 30, mask_mod=mods.causal, seq_lengths=(40, 40),
    )  # fmt: skip
    expected = dense.attention(q, k, v, None, dense.mask_of(mods.causal, 1, 2, 40, 40))[0]
    close([tk.flex_attention(q, k, v, None, one)], [expected])


def test_gradients_of_captures_are_left_out_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    backward = reference.backward
    monkeypatch.setattr(reference, "backward", lambda *args: (asked.append(args[-1]), backward(*args))[1])
    q, k, v = inputs(1, 2, 2, 8, 8, 8, 8, torch.float64)
    for needs in (False, True):
        slopes = torch.randn(2, dtype=torch.float64, requires_grad=needs)
        tk.flex_attention(q, k, v, mods.alibi(slopes)).sum().backward()
        assert (slopes.grad is not None) == needs
    assert asked == [False, True]


def test_the_lists_rule_over_the_mask() -> None:
    """Blocks that a hand-made mask calls full are not masked; those that it leaves out are not seen."""
    q, k, v = inputs(1, 1, 1, 32, 32, 8, 8, torch.float64)
    mask = tk.flex.BlockMask.from_kv_blocks(
        torch.tensor([[[1, 0]]], dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32),
        torch.tensor([[[0, 1]]], dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32),
        BLOCK_SIZE=16, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0,
    )  # fmt: skip
    allowed = torch.zeros(1, 1, 32, 32, dtype=torch.bool)
    allowed[..., :16, 16::2] = True
    allowed[..., 16:, 16:] = True
    close([tk.flex_attention(q, k, v, None, mask)], [dense.attention(q, k, v, None, allowed)[0]])


# --- Captured tensors ---


def test_masked_lanes_are_never_read() -> None:
    """A table that ends where the window does."""
    q, k, v = inputs(1, 2, 2, 40, 40, 8, 8, torch.float64)
    table = torch.randn(5, dtype=torch.float64, requires_grad=True)

    def score(s, b, h, q_idx, kv_idx):
        return s + table[q_idx - kv_idx]

    def safe(s, b, h, q_idx, kv_idx):
        return s + table[torch.clamp(q_idx - kv_idx, 0, 4)]

    mask = block_mask(mods.sliding_window(5), 1, 1, 40, 40)
    expected = dense.attention(q, k, v, safe, dense.mask_of(mods.sliding_window(5), 1, 2, 40, 40))[0]
    found = tk.flex_attention(q, k, v, score, mask)
    close([found], [expected])
    close(torch.autograd.grad(found.sum(), (q, table)), torch.autograd.grad(expected.sum(), (q, table)))
    with pytest.raises(IndexError, match=r"reads index -?\d+ of a captured tensor of 5"):
        tk.flex_attention(q, k, v, score, block_mask(mods.causal, 1, 1, 40, 40))


def test_a_derivative_that_is_infinite_where_masked_does_not_spread() -> None:
    q, k, v = inputs(1, 1, 1, 20, 20, 8, 8, torch.float64)
    t = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)

    def score(s, b, h, q_idx, kv_idx):
        return s - torch.sqrt((q_idx - kv_idx) * t)  # NaN above the diagonal, infinite slope on it

    mask_mod = lambda b, h, q_idx, kv_idx: q_idx > kv_idx  # noqa: E731
    out = tk.flex_attention(q, k, v, score, block_mask(mask_mod, 1, 1, 20, 20))
    for grad in torch.autograd.grad(out.sum(), (q, k, v, t)):
        assert bool(grad.isfinite().all())


def test_nan_in_a_bias_is_seen_in_its_rows_alone() -> None:
    q, k, v = inputs(1, 1, 1, 20, 20, 8, 8, torch.float32)
    table = torch.zeros(20)
    table[7] = float("nan")
    out = tk.flex_attention(q, k, v, lambda s, b, h, q_idx, kv_idx: s + table[q_idx])
    assert torch.equal(out.isnan().all(-1)[0, 0], torch.arange(20) == 7)


def test_a_table_of_16_bits_has_its_gradient_summed_in_32() -> None:
    q, k, v = inputs(1, 1, 1, 64, 64, 8, 8, torch.float32)
    table = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    slope = torch.zeros(1, requires_grad=True)
    grads = []
    for t in (table, slope):
        out = tk.flex_attention(q, k, v, lambda s, b, h, q_idx, kv_idx, t=t: s + t[h] * (kv_idx - q_idx))
        grads += torch.autograd.grad((out * v).sum(), t)
    assert grads[0].dtype == torch.bfloat16
    torch.testing.assert_close(grads[0].float(), grads[1], rtol=1e-2, atol=1e-2)


# --- Lengths and pages ---


def test_kv_lengths() -> None:
    q, k, v = inputs(4, 4, 2, 9, 50, 8, 8, torch.float64)
    lengths = torch.tensor([0, 1, 33, 50], dtype=torch.int32)
    mask = (torch.arange(50) < lengths[:, None])[:, None, None].expand(4, 4, 9, 50)
    score, captured = dense.SCORES["alibi_slopes"](4, 4, 9, 50)
    found = tk.flex_attention(q, k, v, score, enable_gqa=True, return_lse=True, kv_lengths=lengths)
    expected = dense.attention(q, k, v, score, mask)
    close(found, expected)
    k.data[0], v.data[0], k.data[1, :, 1:] = float("nan"), float("nan"), float("nan")  # not read
    close(tk.flex_attention(q, k, v, score, enable_gqa=True, return_lse=True, kv_lengths=lengths), found)
    assert captured


def pages_of(x: Tensor, size: int, table: Tensor, n_pages: int) -> Tensor:
    """[B, Hkv, N, D] -> [n_pages, Hkv, size, D]"""
    found = torch.full((n_pages, x.shape[1], size, x.shape[3]), float("nan"), dtype=x.dtype)
    for b, p in itertools.product(range(x.shape[0]), range(table.shape[1])):
        part = x[b, :, p * size : (p + 1) * size]
        found[table[b, p], :, : part.shape[1]] = part
    return found


@pytest.mark.parametrize("size", [16, 24])
def test_page_table(size: int) -> None:
    B, H, H_kv, M, N, D = 3, 4, 2, 5, 3 * size, 8
    q, k, v = (x.detach() for x in inputs(B, H, H_kv, M, N, D, D, torch.float64))
    table = torch.randperm(12)[:9].view(3, 3).int()
    lengths = torch.tensor([N, size + 3, 2], dtype=torch.int32)
    paged = [pages_of(x, size, table, 12).nan_to_num().requires_grad_() for x in (k, v)]
    flat = [x.clone().requires_grad_() for x in (k, v)]
    table[1, 2] = -1  # past the end of entry 1: not read
    mask = block_mask(mods.sliding_window(11), 1, 1, M, N)
    out = tk.flex_attention(q, *paged, None, mask, enable_gqa=True, kv_lengths=lengths, page_table=table)
    expected = tk.flex_attention(q, *flat, None, mask, enable_gqa=True, kv_lengths=lengths)
    close([out], [expected])
    out.square().sum().backward()
    expected.square().sum().backward()
    for x, y in zip(paged, flat, strict=True):
        for b, p in itertools.product(range(B), range(3)):
            if table[b, p] >= 0:
                close([x.grad[table[b, p]]], [y.grad[b, :, p * size : (p + 1) * size]])
    with pytest.raises(IndexError, match="page_table names pages -1"):
        tk.flex_attention(q, *paged, enable_gqa=True, page_table=table)


def test_key_and_value_of_one_batch_entry() -> None:
    q, k, v = inputs(3, 2, 2, 20, 30, 8, 8, torch.float64)
    k1, v1 = k[:1].detach().requires_grad_(), v[:1].detach().requires_grad_()
    out = tk.flex_attention(q, k1, v1, mods.alibi(2))
    expected = dense.attention(q, k1.expand(3, -1, -1, -1), v1.expand(3, -1, -1, -1), mods.alibi(2))[0]
    close([out], [expected])
    close(torch.autograd.grad(out.sum(), (k1, v1)), torch.autograd.grad(expected.sum(), (k1, v1)))


def test_strides() -> None:
    q, k, v = (x.detach() for x in inputs(2, 3, 3, 20, 20, 8, 8, torch.float32))
    other = [torch.empty(2, 20, 3, 16)[..., ::2].transpose(1, 2).copy_(x) for x in (q, k, v)]
    close([tk.flex_attention(*other)], [tk.flex_attention(q, k, v)])


# --- sdpa ---


@pytest.mark.parametrize("shape", [(2, 3, 17, 8), (3, 17, 8), (17, 8), (2, 2, 3, 17, 8)], ids=str)
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "additive"])
def test_sdpa(shape: tuple[int, ...], kind: str) -> None:
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3))
    arguments: dict[str, Any] = {"is_causal": True} if kind == "causal" else {}
    if kind == "bool":
        arguments["attn_mask"] = torch.rand(17, 17) > 0.4
    if kind == "additive":
        arguments["attn_mask"] = torch.randn(17, 17, dtype=torch.float64, requires_grad=True)
    found, expected = (f(q, k, v, **arguments) for f in (tk.sdpa, torch.nn.functional.scaled_dot_product_attention))
    close([found], [expected])
    wanted = [q, k, v, *([arguments["attn_mask"]] if kind == "additive" else [])]
    close(*(torch.autograd.grad(x.sum(), wanted) for x in (found, expected)))


def test_sdpa_of_groups() -> None:
    q, k, v = inputs(2, 4, 2, 9, 9, 8, 8, torch.float64)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    close([tk.sdpa(q, k, v, is_causal=True, enable_gqa=True)], [sdpa(q, k, v, is_causal=True, enable_gqa=True)])


def test_sdpa_refuses_dropout_and_two_masks() -> None:
    q, k, v = inputs(1, 1, 1, 4, 4, 4, 4, torch.float32)
    with pytest.raises(tk.UnsupportedError, match=r"dropout_p is 0\.5"):
        tk.sdpa(q, k, v, dropout_p=0.5)
    with pytest.raises(ValueError, match="not both"):
        tk.sdpa(q, k, v, torch.ones(4, 4, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match=r"attn_mask is \[3, 4\], must broadcast to"):
        tk.sdpa(q, k, v, torch.ones(3, 4, dtype=torch.bool))


# --- Memory ---


def test_long_sequences_need_no_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of the call is larger than a few tiles or the inputs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.undo()
    S, largest = 8192, 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(found):
                if isinstance(x, Tensor) and x.is_contiguous():
                    largest = max(largest, x.numel())
            return found

    q, k, v = inputs(1, 1, 1, S, S, 8, 8, torch.float32)
    with Sizes():
        mask = tk.flex.create_block_mask(mods.sliding_window(100), None, None, S, S, "cpu")
        pair = tk.flex.tracing.trace.pair(None, mods.sliding_window(100))
        operands = (x.detach() for x in (q, k, v))
        lists = mask.as_tuple()[2:10]
        captured = pair.traced.by_kind(pair.values)
        request = Request(*operands, pair.traced.text, *captured, *lists, None, None, None, 1.0, 128, 128)
        problem = reference.Problem(request)
        out, lse, _ = reference.forward(problem)
        reference.backward(problem, out, lse, torch.ones_like(out), torch.zeros_like(lse))
    assert 0 < largest <= 1 << 22 < S * S
