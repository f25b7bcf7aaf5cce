"""Random mods, built into one pack by ``tk build`` on this machine, against float64: forward, gradients, and those of
captured tensors. TK_MODS_COUNT says how many, TK_MODS_SEED which. Built here where Triton is; TK_TEST_PACKS names a
folder with random_mods.tkpack built elsewhere, of this count and seed."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import seeds
import torch

import tk

from .device import DEVICE, build

TESTS = Path(__file__).parents[1]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))
from flex import dense, random_mods  # noqa: E402

COUNT = int(os.environ.get("TK_MODS_COUNT", "100"))
SEED = seeds.seed("TK_MODS_SEED")
B, H, M, N, D = 2, 2, 150, 200, 64
FILE = """
import sys

sys.path.insert(0, {tests!r})
from gpu.test_random_mods import announce

announce({seed}, {count})
"""


def pair_of(seed: int, device: str) -> tuple[random_mods.RandomMod, random_mods.RandomMod]:
    rng = random.Random(seed)
    captured = random_mods.captured_of(rng, B, H, M, N, device)
    return random_mods.score_mod(rng, captured), random_mods.mask_mod(rng, captured)


def announce(seed: int, count: int) -> None:
    """What the file for ``tk build`` does."""
    seen = set()
    for i in range(count):
        score, mask = pair_of(seed + i, "cpu")
        try:
            fingerprint = tk.flex.tracing.trace.pair(score.function(), mask.function()).fingerprint
            if fingerprint not in seen:
                tk.flex.register(f"random_{i}", score.function(), mask.function(), head_dims=(D,), decode=False)
            seen.add(fingerprint)
        except tk.UnsupportedError as error:
            print(f"random_{i}: {error}")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> None:
    if DEVICE != "cuda":
        return
    if given := os.environ.get("TK_TEST_PACKS"):
        tk.load_pack(Path(given) / "random_mods.tkpack")
        return
    for needed in ("triton", "zstandard"):
        pytest.importorskip(needed, reason=f"{needed} is not installed here: pip install torch-tk[build]")
    folder = tmp_path_factory.mktemp("random_mods")
    file, out = folder / "random_mods_of_test.py", folder / "random.tkpack"
    file.write_text(FILE.format(tests=str(TESTS), seed=SEED, count=COUNT))
    print(f"TK_MODS_SEED={SEED}")
    tk.load_pack(build(file, out))


def test_random_mods(pack: None) -> None:
    print(f"TK_MODS_SEED={SEED}")
    failed, refused = [], 0
    for seed in range(SEED, SEED + COUNT):
        score, mask = pair_of(seed, DEVICE)
        try:
            check(score, mask, seed)
        except tk.UnsupportedError:
            refused += 1
        except Exception as error:
            failed.append(f"TK_MODS_SEED={seed}: {score.source}; {mask.source}: {type(error).__name__}: {error}")
    assert not failed, "\n\n".join(failed)
    assert refused <= COUNT // 5


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
