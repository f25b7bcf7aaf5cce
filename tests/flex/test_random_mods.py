"""Random mods against torch's own attention, forward and gradients, with those of captured tensors. What fails says
its seed, which TK_MODS_SEED gives again."""

from __future__ import annotations

import os
import random

import pytest
import seeds
import torch
from torch.nn.attention import flex_attention as torch_flex

import tk

from . import dense, random_mods

COUNT = int(os.environ.get("TK_MODS_COUNT", "60"))
SEED = seeds.seed("TK_MODS_SEED")
B, H, M, N, D = 2, 2, 9, 12, 4


@pytest.mark.parametrize("part", range(4))
def test_random_mods(part: int) -> None:
    print(f"TK_MODS_SEED={SEED}")
    for i in range(part * COUNT // 4, (part + 1) * COUNT // 4):
        rng = random.Random(SEED + i)
        captured = random_mods.captured_of(rng, B, H, M, N)
        score, mask = random_mods.score_mod(rng, captured), random_mods.mask_mod(rng, captured)
        try:
            check(score, mask, rng.random() < 0.5, SEED + i)
        except tk.UnsupportedError as error:  # refused, with the line
            assert "<random mod>:" in str(error), error
        except Exception as error:
            error.add_note(f"TK_MODS_SEED={SEED + i}: {score.source}; {mask.source}")
            raise


def check(score: random_mods.RandomMod, mask: random_mods.RandomMod, lists: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, n, D, generator=generator, dtype=torch.float64) for n in (M, N, N))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    mask_mod = mask.function()
    block_mask = tk.flex.create_block_mask(mask_mod, B, H, M, N, "cpu", 4)
    allowed = dense.mask_of(mask_mod, B, H, M, N)
    mod, leaves = random_mods.with_gradients(score)
    out, lse = tk.flex_attention(*inputs, score_mod=mod, block_mask=block_mask, return_lse=True)
    expected, expected_lse = dense.attention(*inputs, score_mod=mod, mask=allowed)
    is_half = "HALF" in score.source  # arithmetic of which torch rounds to 16 bits, and a mod does not
    tolerance = 5e-3 if is_half else 1e-7
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance, equal_nan=True)
    torch.testing.assert_close(lse, expected_lse, atol=tolerance, rtol=tolerance, equal_nan=True)
    if lists:
        of_torch = torch_flex.create_block_mask(mask_mod, B, H, M, N, device="cpu")
        with torch.no_grad():
            eager = torch_flex.flex_attention(
                *(x.detach() for x in inputs), score_mod=score.function(), block_mask=of_torch
            )
        torch.testing.assert_close(out, eager, atol=max(tolerance, 1e-6), rtol=max(tolerance, 1e-6), equal_nan=True)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    everything = [*inputs, *leaves]
    if not expected.requires_grad:
        return
    found = torch.autograd.grad(out, everything, grad, allow_unused=True)
    wanted = torch.autograd.grad(expected, everything, grad, allow_unused=True)
    for x, g, e in zip(everything, found, wanted, strict=True):
        g, e = (torch.zeros_like(x) if y is None else y for y in (g, e))
        tolerance = 2e-2 if is_half else 1e-5 if x.dtype == torch.float32 else 1e-6
        torch.testing.assert_close(g, e, atol=tolerance, rtol=tolerance, equal_nan=True)
