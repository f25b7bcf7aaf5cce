"""Gradients of captured tensors on a GPU: sums of the scores' gradients over so many places that they cancel."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import tk
from tk.flex import mods

from .device import DEVICE
from .test_attention import MASKS, SCORES, B, H, block_mask, exact, tensor

BF16 = torch.bfloat16


def inputs(m: int, n: int, d: int = 64, dtype: torch.dtype = BF16) -> list[Tensor]:
    return [tensor(B, H, m, d, dtype=dtype), tensor(B, H, n, d, dtype=dtype), tensor(B, H, n, d, dtype=dtype)]


def gradient(score: str, mask: str, qkv: list[Tensor], table: Tensor, grad_out: Tensor | None,
             grad_lse: Tensor | None) -> Tensor:  # fmt: skip
    """Of the table that the score_mod captures."""
    table = table.detach().requires_grad_()
    n = qkv[0].shape[2]
    out, lse = tk.flex_attention(*qkv, mod_of(score, table), block_mask(MASKS[mask](n), n, n), return_lse=True)
    parts = [(x, g) for x, g in ((out, grad_out), (lse, grad_lse)) if g is not None]
    (found,) = torch.autograd.grad([x for x, _ in parts], table, [g for _, g in parts])
    return found


def exactly(score: str, mask: str, qkv: list[Tensor], table: Tensor, grad_out: Tensor | None,
            grad_lse: Tensor | None) -> Tensor:  # fmt: skip
    table = table.detach().double().requires_grad_()
    out, lse = exact(*qkv, mod_of(score, table), MASKS[mask](qkv[0].shape[2]))
    parts = [(x, g.double()) for x, g in ((out, grad_out), (lse, grad_lse)) if g is not None]
    (found,) = torch.autograd.grad([x for x, _ in parts], table, [g for _, g in parts])
    return found


def mod_of(score: str, table: Tensor) -> mods.ScoreMod:
    return {"alibi": mods.alibi, "per_head": mods.per_head_bias, "relative": lambda t: mods.relative_bias(t, 20)}[
        score
    ](table)


def table_of(score: str) -> Tensor:
    return SCORES[score](1, 1)[1][0].detach()


@pytest.mark.parametrize("score", ["alibi", "per_head", "relative"])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_no_further_off_than_torchs(score: str, mask: str) -> None:
    """Torch's compiled kernel of a relative bias takes more shared memory than there is."""
    from torch.nn.attention import flex_attention as torchs

    n, table = 1000, table_of(score)
    qkv = inputs(n, n)
    grad = torch.randn_like(qkv[0])
    expected = exactly(score, mask, qkv, table, grad, None)
    ours = (gradient(score, mask, qkv, table, grad, None).double() - expected).abs()
    scale = expected.abs().max()
    assert ours.max() <= 1e-4 * scale + 2e-3, (ours.max(), scale)
    if score == "relative":
        return
    theirs_of = table.clone().requires_grad_()
    mask_mod = MASKS[mask](n)
    lists = None if mask_mod is None else torchs.create_block_mask(mask_mod, B, None, n, n, device=DEVICE)
    out = torch.compile(torchs.flex_attention, dynamic=False)(*qkv, mod_of(score, theirs_of), lists)
    theirs = (torch.autograd.grad(out, theirs_of, grad)[0].double() - expected).abs()
    assert ours.max() <= 2 * theirs.max() + 1e-5 * scale + 1e-3, (ours.max(), theirs.max(), scale)


@pytest.mark.parametrize("score", ["alibi", "per_head"])
@pytest.mark.parametrize("size", [1.0, 1e-25, 1e15])
def test_of_the_lse_alone(score: str, size: float) -> None:
    qkv, table = inputs(300, 300), table_of(score)
    grad_lse = torch.randn(B, H, 300, device=DEVICE) * size
    expected = exactly(score, "causal", qkv, table, None, grad_lse)
    found = gradient(score, "causal", qkv, table, None, grad_lse)
    torch.testing.assert_close(found.double() / size, expected / size, atol=1e-3, rtol=1e-4)


def test_of_both_by_any_mixture() -> None:
    qkv, table = inputs(300, 300), table_of("alibi")
    for out_size, lse_size in ((1.0, 1e-3), (1e-4, 100.0), (0.0, 0.0), (0.0, 1.0)):
        grad = torch.randn_like(qkv[0]) * out_size
        grad_lse = torch.randn(B, H, 300, device=DEVICE) * lse_size
        expected = exactly("alibi", "none", qkv, table, grad, grad_lse)
        found = gradient("alibi", "none", qkv, table, grad, grad_lse).double()
        torch.testing.assert_close(found, expected, atol=1e-4 * expected.abs().max().item() + 1e-3, rtol=1e-4)


def test_what_is_no_number_stays_where_it_is() -> None:
    qkv, table = inputs(200, 200), table_of("per_head")
    grad_lse = torch.randn(B, H, 200, device=DEVICE)
    grad_lse[0, 0, 3], grad_lse[1, 1, 5], grad_lse[0, 2, 5] = math.nan, math.inf, -math.inf
    expected = exactly("per_head", "none", qkv, table, None, grad_lse)
    found = gradient("per_head", "none", qkv, table, None, grad_lse).double()
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4, equal_nan=True)


def test_equal_calls_give_equal_bits() -> None:
    for score in ("alibi", "per_head", "relative"):
        qkv, table = inputs(700, 700), table_of(score)
        grad, grad_lse = torch.randn_like(qkv[0]), torch.randn(B, H, 700, device=DEVICE)
        first = gradient(score, "causal", qkv, table, grad, grad_lse)
        for _ in range(50):
            assert torch.equal(first, gradient(score, "causal", qkv, table, grad, grad_lse))
