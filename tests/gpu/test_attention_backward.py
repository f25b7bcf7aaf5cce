"""Attention's gradients by the kernels for Hopper, each asked for by name: against float64 and the plain kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tk
from benchmarks.attention_configs import config_of, pinned
from tk.flex import mods

from .device import DEVICE
from .test_attention import MASKS, PAIRS, SCORES, B, H, block_mask, check, close, exact, tensor

pytestmark = pytest.mark.skipif(
    DEVICE != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="about Hopper's own kernels",
)
BF16 = torch.bfloat16


@pytest.fixture
def hopper() -> Iterator[None]:
    """Gradients by Hopper's kernels alone: a call that they do not take fails."""
    with pinned("_backward", "backward_hopper"):
        yield


def inputs(m: int, n: int, d: int, h_kv: int = H, dv: int | None = None, b_kv: int = B,
           dtype: torch.dtype = BF16) -> list[torch.Tensor]:  # fmt: skip
    return [
        tensor(B, H, m, d, dtype=dtype),
        tensor(b_kv, h_kv, n, d, dtype=dtype),
        tensor(b_kv, h_kv, n, dv or d, dtype=dtype),
    ]


@pytest.mark.parametrize("mask", list(MASKS)[:5])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_masks(hopper: None, mask: str, d: int, dtype: torch.dtype) -> None:
    for n in (128, 333, 1024):
        check(*inputs(n, n, d, dtype=dtype), "none", mask)


@pytest.mark.parametrize("d", [64, 128])
def test_lengths(hopper: None, d: int) -> None:
    for n in (1, 2, 15, 63, 64, 65, 127, 129, 191, 255, 257, 640):
        check(*inputs(n, n, d), "none", "none")
        check(*inputs(n, n, d), "none", "causal")
    for m, n in ((1, 700), (130, 5), (5, 1025), (300, 40), (128, 129), (129, 128)):
        for mask in ("none", "causal", "window"):
            check(*inputs(m, n, d), "none", mask)


@pytest.mark.parametrize("h_kv", [1, 2])
@pytest.mark.parametrize("mask", ["none", "causal", "document"])
def test_groups_of_heads(hopper: None, h_kv: int, mask: str) -> None:
    check(*inputs(400, 400, 128, h_kv), "none", mask)
    check(*inputs(400, 400, 64, h_kv), "none", mask)


def test_keys_of_one_batch_entry(hopper: None) -> None:
    check(*inputs(300, 300, 128, b_kv=1), "none", "none")
    check(*inputs(300, 300, 64, h_kv=2, b_kv=1), "none", "causal")


@pytest.mark.parametrize(("qk", "v"), [(80, 80), (48, 48), (128, 64), (64, 128), (16, 112)])
def test_head_sizes(hopper: None, qk: int, v: int) -> None:
    for mask in ("none", "causal"):
        check(*inputs(300, 300, qk, dv=v), "none", mask)


@pytest.mark.parametrize(("score", "mask"), [
    (score, mask) for score, mask in PAIRS
    if score in ("alibi", "soft_cap", "learned", "relative") and mask in ("none", "causal", "window")
])  # fmt: skip
def test_scores(hopper: None, score: str, mask: str) -> None:
    """Without gradients of tables; one that is read outside of its bounds where the last tile ends."""
    for d in (64, 128):
        for m, n in ((256, 256), (333, 333)):
            q, k, v = inputs(m, n, d)
            score_mod, _ = SCORES[score](m, n)
            mask_mod = MASKS[mask](n)
            near = [x.detach().requires_grad_() for x in (q, k, v)]
            wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
            out = tk.flex_attention(*near, score_mod, block_mask(mask_mod, m, n))
            expected = exact(*wide, score_mod, mask_mod)[0]
            grad = torch.randn_like(out)
            found = torch.autograd.grad(out, near, grad)
            wanted = torch.autograd.grad(expected, wide, grad.double())
            for what, f, w in zip(("query", "key", "value"), found, wanted, strict=True):
                close(f, w, BF16, f"gradient of {what}, {score}, {mask}, {d}, {n}")


def test_rows_that_see_nothing(hopper: None) -> None:
    """And blocks of keys that no query sees: zeros, where memory had something else."""
    q, k, v = (x.requires_grad_() for x in inputs(512, 512, 128))
    seen = torch.zeros(512, 512, dtype=torch.bool, device=DEVICE)
    seen[130:300, :200] = True
    out = tk.sdpa(q, k, v, attn_mask=seen)
    grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, :, :130] == 0).all() and (grads[0][:, :, 300:] == 0).all()
    assert all((g[:, :, 200:] == 0).all() for g in grads[1:])
    assert all((g[:, :, :200] != 0).any() for g in grads[1:])


@pytest.mark.parametrize("mask", ["none", "causal", "document"])
def test_no_further_off_than_the_plain_kernels(mask: str) -> None:
    n = 1500
    for d in (64, 128):
        q, k, v = inputs(n, n, d, h_kv=2)
        mask_mod = MASKS[mask](n)
        grad = torch.randn_like(q)
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        wanted = torch.autograd.grad(exact(*wide, None, mask_mod)[0], wide, grad.double())
        errors = {}
        for kernel in ("backward_hopper", "backward"):
            near = [x.detach().requires_grad_() for x in (q, k, v)]
            with pinned("_backward", kernel):
                out = tk.flex_attention(*near, block_mask=block_mask(mask_mod, n, n), enable_gqa=True)
                found = torch.autograd.grad(out, near, grad)
            errors[kernel] = [(f.double() - w).abs().mean().item() for f, w in zip(found, wanted, strict=True)]
        for ours, plain in zip(*errors.values(), strict=True):
            assert ours <= 1.1 * plain, errors


def test_equal_calls_give_equal_bits(hopper: None) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(1000, 1000, 128, h_kv=2))
    out = tk.flex_attention(q, k, v, block_mask=block_mask(mods.causal, 1000, 1000), enable_gqa=True)
    grad = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    for _ in range(300):
        again = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_long_sequences_take_them() -> None:
    for d in (64, 128):
        q, k, v = (tensor(B, H, 4096, d, dtype=BF16).requires_grad_() for _ in range(3))
        for mask in (None, mods.causal):
            with config_of("_backward") as chosen:
                out = tk.flex_attention(q, k, v, block_mask=block_mask(mask, 4096, 4096))
                torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
            assert all(name.startswith("hopper") for name in chosen), chosen
