"""What tk.flex_attention gives besides its output, and what it may not depend on: on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

import tk
from tk.flex import mods

B, H, M, N, D = 2, 4, 40, 70, 16


def qkv(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = ((B, H, M, D), (B, 2, N, D), (B, 2, N, D))
    return [torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype) for i, shape in enumerate(shapes)]


def scores(q: torch.Tensor, k: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(q @ k.repeat_interleave(H // 2, 1).mT * D**-0.5 / cap)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> Any:
    return tk.flex_attention(q, k, v, mods.soft_cap(2.0), enable_gqa=True, **more)


def test_largest_scores() -> None:
    """After the score_mod, without the sink; -inf for a row that sees nothing."""
    q, k, v = qkv()
    mask = tk.flex.create_block_mask(lambda b, h, i, j: (j <= i) & (i > 3), B, None, M, N, "cpu", 16)
    aux_of = dict(block_mask=mask, sinks=torch.full((H,), 9.0), return_aux=AuxRequest(lse=True, max_scores=True))
    out, aux = attend(q, k, v, **aux_of)
    seen = (torch.arange(N) <= torch.arange(M)[:, None]) & (torch.arange(M)[:, None] > 3)
    expected = scores(q, k, 2.0).masked_fill(~seen, -math.inf).amax(-1)
    torch.testing.assert_close(aux.max_scores, expected)
    alone, lse = attend(q, k, v, block_mask=mask, sinks=aux_of["sinks"], return_lse=True)
    assert torch.equal(out, alone) and torch.equal(aux.lse, lse)
    _, only = attend(q, k, v, return_aux=AuxRequest(max_scores=True))
    assert only.lse is None and only.max_scores.shape == (B, H, M)


def test_gradients_beside_the_largest_scores() -> None:
    """They are those of out and lse alone."""
    q, k, v = (x.requires_grad_() for x in qkv())
    out, aux = attend(q, k, v, return_aux=AuxRequest(lse=True, max_scores=True))
    assert not aux.max_scores.requires_grad
    found = torch.autograd.grad(out.sum() + aux.lse.square().sum(), (q, k, v))
    out, lse = attend(q, k, v, return_lse=True)
    expected = torch.autograd.grad(out.sum() + lse.square().sum(), (q, k, v))
    torch.testing.assert_close(found, expected)


def test_largest_scores_in_a_compiled_graph() -> None:
    def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        out, aux = attend(q, k, v, return_aux=AuxRequest(max_scores=True))
        return out, aux.max_scores

    torch.testing.assert_close(torch.compile(both, backend="aot_eager", fullgraph=True)(*qkv()), both(*qkv()))


def test_what_return_aux_must_be() -> None:
    with pytest.raises(TypeError, match=r"return_aux must be an AuxRequest .* is dict"):
        attend(*qkv(), return_aux={"lse": True})


def test_gradients_of_captures_are_sums_that_cancel() -> None:
    """A bias for all scores of a head changes nothing: its gradient is 0, not the error of an output of 16 bits."""
    q, k, v = qkv(torch.bfloat16)
    bias = torch.zeros(H, requires_grad=True)
    out, lse = tk.flex_attention(q, k, v, mods.per_head_bias(bias), enable_gqa=True, return_lse=True)
    (grad,) = torch.autograd.grad(out, bias, torch.randn_like(out), retain_graph=True)
    assert grad.abs().max() < 1e-4
    (grad,) = torch.autograd.grad(lse.sum(), bias)
    torch.testing.assert_close(grad, torch.full((H,), float(B * M)))


def test_block_lists_decide() -> None:
    """What the mask_mod says of full blocks does not count, forward and backward."""
    q, k, v = (x.requires_grad_() for x in qkv())
    blocks = torch.tensor([[[[0, 2, 4, 1, 3], [1, 3, 0, 2, 4], [4, 0, 1, 2, 3]]]], dtype=torch.int32)
    counts = torch.tensor([[[3, 2, 1]]], dtype=torch.int32)
    nothing = torch.zeros_like(counts)
    mask = tk.flex.BlockMask.from_kv_blocks(nothing, blocks, counts, blocks, (16, 16), lambda b, h, i, j: j < 0,
                                            (M, N))  # fmt: skip
    out = tk.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    seen = torch.zeros(3, 5, dtype=torch.bool)
    for row in range(3):
        seen[row, blocks[0, 0, row, : counts[0, 0, row]].long()] = True
    seen = seen.repeat_interleave(16, 0)[:M].repeat_interleave(16, 1)[:, :N]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad)
    )


@pytest.mark.parametrize("score", [None, mods.soft_cap(2.0), mods.alibi(torch.tensor([0.5, 0.25, 0.1, 0.2]))])
def test_what_is_past_a_length_does_not_count(score: Any) -> None:
    lengths = torch.tensor([33, 0], dtype=torch.int32)
    clean = [x.requires_grad_() for x in qkv()]
    dirty = [x.clone() for x in qkv()]
    for b, length in enumerate(lengths):
        dirty[1][b, :, length:], dirty[2][b, :, length:] = float("nan"), float("inf")
    dirty = [x.requires_grad_() for x in dirty]
    results = []
    for q, k, v in (clean, dirty):
        out = tk.flex_attention(q, k, v, score, enable_gqa=True, kv_lengths=lengths)
        results.append([out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert (results[1][2][0, :, 33:] == 0).all()
