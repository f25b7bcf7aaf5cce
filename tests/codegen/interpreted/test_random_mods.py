"""What is printed of random mods, run by Triton's interpreter: scores, masks and derivatives against torch's own."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import host  # noqa: F401  # libdevice, which the interpreter has not
import seeds
import torch

from tk import errors
from tk.codegen import source
from tk.flex.codegen import printing
from tk.flex.tracing import trace

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "kernels")]
from flex import random_mods  # noqa: E402
from interpreted import attention_host  # noqa: E402  # a comparison of numbers stays a bool

COUNT = int(os.environ.get("TK_MODS_COUNT", "40"))
SEED = seeds.seed("TK_MODS_SEED")
B, H, M, N = 2, 2, 8, 16
_BODY = """
    rows = tl.arange(0, 8)[:, None]
    cols = tl.arange(0, 16)[None, :]
    at = rows * 16 + cols
    s = tl.load(scores + at)
    x = score_mod(s, b, h, rows, cols, captures)
    keep = mask_mod(b, h, rows, cols, captures) & (rows >= 0) & (cols >= 0)
    g = score_grad(s, b, h, rows, cols, captures, (), tl.load(grads + at), keep, 0, False)
    tl.store(out + at, x)
    tl.store(kept + at, keep.to(tl.int32))
    tl.store(grad_out + at, g)
"""
_NOTHING = {
    "score": "@triton.jit\ndef score_mod(score, b, h, q_idx, kv_idx, captures):\n    return score\n",
    "mask": "@triton.jit\ndef mask_mod(b, h, q_idx, kv_idx, captures):\n    return kv_idx >= 0\n",
    "score_grad": "@triton.jit\ndef score_grad(score, b, h, q_idx, kv_idx, captures, grads, grad, keep, "
    "Q_AXIS: tl.constexpr, WITH_CAPTURES: tl.constexpr):\n    return tl.where(keep, grad, 0.0)\n",
}


def kernel_of(pair: Any, name: str) -> tuple[Any, list[Any]]:
    """The kernel, and what it is given of the captures."""
    mods, captures = printing.mods_of(pair.traced, True), printing.captures_of(pair.traced)
    names = [n for c in captures for n in printing.argument_names(c)]
    given: list[Any] = []
    for capture, value in zip(captures, pair.values, strict=True):
        if not isinstance(value, torch.Tensor):
            given.append(value)
        elif capture.has_two_widths:
            words = 2 if value.dtype == torch.int64 else 1
            given += [attention_host.as_words(value, "i32"), words, *value.shape, *value.stride()]
        else:
            given += [value, *value.shape, *value.stride()]
    texts = [getattr(mods, part) or nothing for part, nothing in _NOTHING.items()]
    head = "import triton\nimport triton.language as tl\n" + "\n".join(mods.imports)
    passed = f"    captures = ({''.join(f'{n}, ' for n in names)})"
    signature = ", ".join(["scores", "grads", "out", "kept", "grad_out", "b", "h", *names])
    kernel = f"@triton.jit\ndef {name}({signature}):\n{passed}{_BODY}"
    return source.function(name, "\n\n".join([head, *texts, kernel])), given


def test_random_mods() -> None:
    print(f"TK_MODS_SEED={SEED}")
    for i in range(COUNT):
        rng = random.Random(SEED + i)
        captured = random_mods.captured_of(rng, B, H, M, N)
        score, mask = random_mods.score_mod(rng, captured), random_mods.mask_mod(rng, captured)
        try:
            check(score, mask, SEED + i)
        except errors.UnsupportedError as error:
            assert "<random mod>" in str(error) or "gradient" in str(error), error
        except Exception as error:
            error.add_note(f"TK_MODS_SEED={SEED + i}: {score.source}; {mask.source}")
            raise


def check(score: random_mods.RandomMod, mask: random_mods.RandomMod, seed: int) -> None:
    pair = trace.pair(score.function(), mask.function())
    kernel, given = kernel_of(pair, f"random_mod_{seed}")
    generator = torch.Generator().manual_seed(seed)
    s, grad = (torch.randn(M, N, generator=generator) for _ in range(2))
    for b, h in ((0, 1), (1, 0)):
        out, kept, found = torch.empty(M, N), torch.empty(M, N, dtype=torch.int32), torch.empty(M, N)
        kernel[(1,)](s, grad, out, kept, found, b, h, *given)
        allowed, *rounded = of_torch(score, mask, s, grad, b, h)
        _, *unrounded = of_torch(without_rounding(score), mask, s, grad, b, h)
        assert torch.equal(kept != 0, allowed)
        for mine, *both in zip((out, found), rounded, unrounded, strict=True):
            close(mine, *both)


def without_rounding(mod: random_mods.RandomMod) -> random_mods.RandomMod:
    """torch rounds what it works out of 16 bits alone, and a kernel does not; of what then cancels little is left."""
    return replace(mod, captured={**mod.captured, "HALF": mod.captured["HALF"].float()})


def of_torch(score: Any, mask: Any, s: torch.Tensor, grad: torch.Tensor, b: int, h: int) -> tuple[torch.Tensor, ...]:
    """What the mask allows, the scores, and their gradient where it does; by single scores, as mods are written."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    at = [torch.tensor(b, dtype=torch.int32), torch.tensor(h, dtype=torch.int32),
          torch.arange(M, dtype=torch.int32), torch.arange(N, dtype=torch.int32)]  # fmt: skip

    def mapped(mod: Any, *first: torch.Tensor) -> torch.Tensor:
        own = (0,) * len(first)
        inner = torch.vmap(mod, in_dims=(*own, None, None, None, 0))
        with TransformGetItemToIndex():
            return torch.vmap(inner, in_dims=(*own, None, None, 0, None))(*first, *at)

    x = s.clone().requires_grad_()
    result = mapped(score.function(), x)
    wanted = torch.zeros_like(s)
    if result.requires_grad:
        (wanted,) = torch.autograd.grad(result.float(), x, grad, allow_unused=True, materialize_grads=True)
    allowed = mapped(mask.function()).expand(M, N)
    return allowed, result.detach().float().expand(M, N), torch.where(allowed, wanted, 0.0)


def close(found: torch.Tensor, rounded: torch.Tensor, unrounded: torch.Tensor) -> None:
    """To either, or between them. Where a step is taken one number may come to stand on its other side."""
    least, most = torch.minimum(rounded, unrounded), torch.maximum(rounded, unrounded)
    is_close = torch.isclose(found, found.clamp(least, most), rtol=2e-3, atol=2e-3, equal_nan=True)
    is_close &= found.isnan() == rounded.isnan()
    assert (~is_close).sum() <= 1, (found[~is_close], rounded[~is_close], unrounded[~is_close])
