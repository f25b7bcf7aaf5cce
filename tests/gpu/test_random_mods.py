"""Random mods, built here, against float64: forward, gradients, and those of captured tensors.

TK_MODS_COUNT: how many at most (default 100); TK_MODS_SECONDS: how long to build (default 300; those that are built by
then are judged, for as long again at most); TK_MODS_SEED: which, the second with a seed that is one higher;
TK_MODS_REPORT: a file with a line of JSON for each pair, written as they are judged (default build/random_mods.jsonl);
TK_MODS_WHOLE: every how many-th pair has all of its kernels, not only those that take every call (default 40). Every
core builds, and each GPU judges what is built: many_packs.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import seeds
import torch

import tk

from . import random_mod_packs
from .device import DEVICE
from .many_packs import REFUSED, Many
from .random_mod_packs import B, D, H, M, N, pair_of

# random_mod_packs has put tests on the path.
from flex import dense, random_mods  # isort: skip

COUNT = int(os.environ.get("TK_MODS_COUNT", "100"))
SEED = seeds.seed("TK_MODS_SEED")
SECONDS = float(os.environ.get("TK_MODS_SECONDS", "300"))
REPORT = Path(os.environ.get("TK_MODS_REPORT", "build/random_mods.jsonl"))
ARCH = os.environ.get("TK_MODS_ARCH")  # to build without a GPU, and judge nothing
MOST_REFUSED = 0.2


def test_random_mods(tmp_path: Path) -> None:
    print(f"TK_MODS_SEED={SEED}")
    if DEVICE != "cuda" and not ARCH:
        problems = [judge(SEED, n, None, tmp_path) for n in range(COUNT)]
        wrong = [p for p in problems if p and not p.startswith(REFUSED)]
        assert not wrong, "\n\n".join(wrong)
        assert sum(p.startswith(REFUSED) for p in problems) <= COUNT * MOST_REFUSED
        return
    for needed in ("triton", "zstandard"):
        pytest.importorskip(needed, reason=f"{needed} is not installed here: pip install torch-tk[build]")
    script = random_mod_packs.__file__
    Many("mods", COUNT, SEED, SECONDS, script, _source, judge, MOST_REFUSED, ARCH).check(tmp_path, REPORT)


def _source(number: int) -> str:
    return _described(SEED + number)


def _described(seed: int) -> str:
    score, mask = pair_of(seed, "cpu")
    return f"TK_MODS_SEED={seed} TK_MODS_COUNT=1: {score.source}; {mask.source}"


def judge(seed: int, number: int, pack: Path | None, folder: Path) -> str:
    """What is wrong with a pair of mods of a pack."""
    if pack is not None:
        tk.load_pack(pack)
    score, mask = pair_of(seed + number, DEVICE)
    try:
        check(score, mask, seed + number)
    except tk.UnsupportedError as error:
        return f"{REFUSED}{error}"
    except torch.AcceleratorError:  # nothing runs after it
        raise
    except Exception as error:
        return f"{_described(seed + number)}: {type(error).__name__}: {error}"
    return ""


def check(score: random_mods.RandomMod, mask: random_mods.RandomMod, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    q, k, v, grad = (torch.randn(B, H, n, D, generator=generator).to(dtype).to(DEVICE) for n in (M, N, N, M))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    block_mask = tk.flex.create_block_mask(mask.function(), B, H, M, N, DEVICE, 128)
    mod, leaves = random_mods.with_gradients(score)
    out = tk.flex_attention(*inputs, score_mod=mod, block_mask=block_mask)
    found = torch.autograd.grad(out, [*inputs, *leaves], grad, allow_unused=True)

    exact, exact_leaves = on_cpu(score)
    wide = [x.detach().cpu().double().requires_grad_() for x in inputs]
    allowed = dense.mask_of(on_cpu(mask)[0], B, H, M, N)
    expected, _ = dense.attention(*wide, score_mod=exact, mask=allowed)
    wanted = torch.autograd.grad(expected, [*wide, *exact_leaves], grad.cpu().double(), allow_unused=True)
    near(out, expected, "the result")
    for name, x, e in zip(("query", "key", "value", *score.wanted), found, wanted, strict=True):
        if e is not None:
            near(torch.zeros_like(e) if x is None else x, e, f"the gradient of {name}")


def on_cpu(mod: random_mods.RandomMod) -> tuple[Any, Any]:
    held = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in mod.captured.items()}
    return random_mods.with_gradients(random_mods.RandomMod(mod.source, held, mod.wanted))


def near(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """But for a few elements: where a mod takes a step, rounding may come to stand on its other side."""
    found, expected = found.detach().cpu().double(), expected.detach().double()
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    is_far = ~torch.isclose(found, expected, rtol=3e-2, atol=3e-2 * scale, equal_nan=True)
    assert is_far.sum() <= max(1, found.numel() // 200), (what, is_far.sum().item(), (found - expected).abs().max())
