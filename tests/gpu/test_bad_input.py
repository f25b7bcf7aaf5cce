"""Wrong and unusual arguments on a GPU, mixtures of devices among them (tests/ops/bad_input.py)."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ops.bad_input import failures, report
from torch.nn.attention import SDPBackend, sdpa_kernel

import tk

from .device import DEVICE

CASES = 4000


def test_changed_calls_of_every_function(monkeypatch: pytest.MonkeyPatch):
    """Another seed in every run; a failure prints it. An illegal access would show at the synchronisation."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions are compared as float32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [*failures(seed, CASES, DEVICE, "cpu"), *failures(seed + 1, CASES // 4, DEVICE, "meta")]
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert not found, f"seed {seed}:\n{report(found)}"


def test_attention_where_value_has_no_elements():
    """It answers where ATen does, with its shape: which torch 2.11 broadcasts on CUDA."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng, wrong, answered = random.Random(seed), [], 0
    for _ in range(600):
        q, k, v, mask, is_grouped = _few_elements(rng)
        arguments = dict(attn_mask=mask, enable_gqa=is_grouped)
        try:
            expected = list(_of_torch(q, k, v, **arguments).shape)
        except (RuntimeError, IndexError) as error:
            expected = f"{type(error).__name__}: {error}"
        try:
            found = list(tk.sdpa(q, k, v, **arguments).shape)
        except (ValueError, TypeError, tk.UnsupportedError) as error:
            found = f"{type(error).__name__}: {error}"
        answered += isinstance(expected, list)
        if found != expected and not (isinstance(found, str) and isinstance(expected, str)):
            shapes = [None if x is None else list(x.shape) for x in (q, k, v, mask)]
            wrong.append(f"{shapes}, enable_gqa={is_grouped}: {found}, torch {expected}")
    assert answered > 100 and not wrong, f"seed {seed}:\n" + "\n".join(wrong[:40])


def _of_torch(*operands: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """By torch's reference: of its fused backends on CUDA some give None in 2.11."""
    with sdpa_kernel(SDPBackend.MATH) if DEVICE == "cuda" else nullcontext():
        return F.scaled_dot_product_attention(*operands, **arguments)


def _few_elements(rng: random.Random) -> tuple[Any, ...]:
    """Operands that mostly go together, in places of size 1 or another; value has a size of 0."""
    dims = rng.choice((2, 3, 4, 4, 5))
    batch = [rng.choice((0, 1, 2, 3)) for _ in range(dims - 2)]
    m, n, d, dv = rng.choice((1, 3, 8)), rng.choice((0, 1, 8)), rng.choice((0, 8)), rng.choice((0, 0, 8))
    shapes = [[*batch, m, d], [*batch, n, d], [*batch, n, dv]]
    for shape in shapes:
        if rng.random() < 0.3:
            shape[rng.randrange(dims)] = rng.choice((1, 2, 4))
        if rng.random() < 0.15:
            del shape[0]
    if 0 not in shapes[2]:
        shapes[2][-1] = 0
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes)
    mask = torch.ones(m, n, dtype=torch.bool, device=DEVICE) if rng.random() < 0.2 else None
    has_no_heads = any(x.dim() > 2 and x.shape[-3] == 0 for x in (k, v))  # torch divides by their number, unasked
    return q, k, v, mask, rng.random() < 0.2 and not has_no_heads
