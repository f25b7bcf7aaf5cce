"""What people write, by the wheel's own kernels: other spellings, wider and narrower captures."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tk
from tk.flex import mods

from .device import DEVICE

TESTS = Path(__file__).parents[1]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))
from flex import dense  # noqa: E402

B, H, D = 2, 4, 64


def ids(n: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return (torch.arange(n, device=device) // 37).to(dtype)


def offset_causal(offset: Any) -> Any:
    return lambda b, h, q, kv: q + offset >= kv


MASKS: dict[str, Callable[[int, str], Any]] = {
    "mirrored_causal": lambda n, device: lambda b, h, q, kv: ~(kv > q),
    "window_up_to": lambda n, device: lambda b, h, q, kv: (q - kv <= 50) & (kv <= q),
    "window_and_documents": lambda n, device: mods.and_masks(
        mods.document(ids(n, torch.int32, device).expand(B, n)), mods.sliding_window(50)
    ),
    "causal_long_documents": lambda n, device: mods.and_masks(
        mods.document(ids(n, torch.int64, device).expand(B, n)), mods.causal
    ),
    "causal_documents_of_all": lambda n, device: mods.and_masks(
        mods.document(ids(n, torch.int32, device)), lambda b, h, q, kv: kv <= q
    ),
    "short_lengths": lambda n, device: mods.prefix_lm(torch.tensor([20, 90], dtype=torch.int32, device=device)),
    "offset": lambda n, device: offset_causal(n - 3),
    "offset_of_tensor": lambda n, device: offset_causal(torch.tensor(n - 3, device=device)),
    "offset_of_int32": lambda n, device: offset_causal(torch.tensor(n - 3, dtype=torch.int32, device=device)),
}
SCORES: dict[str, Callable[[str], Any]] = {
    "alibi_of_heads": lambda device: mods.alibi(H),
    "alibi_as_written": lambda device: lambda s, b, h, q, kv: s - (q - kv) * torch.exp2(-((h + 1) * 8.0 / H)),
    "narrow_slopes": lambda device: mods.alibi(torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device).bfloat16()),
    "soft_cap_of_int": lambda device: lambda s, b, h, q, kv: torch.tanh(s / 2) * 2,
}


def check(score: Any, mask: Any, of_cpu: tuple[Any, Any], M: int, N: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(B, H, n, D, device=DEVICE, dtype=dtype) for n in (M, N, N))
    block_mask = tk.flex.create_block_mask(mask, B, H, M, N, DEVICE, 128)
    out = tk.flex_attention(q, k, v, score, block_mask)
    allowed = dense.mask_of(of_cpu[1], B, H, M, N)
    expected, _ = dense.attention(*(x.cpu().double() for x in (q, k, v)), score_mod=of_cpu[0], mask=allowed)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    rows = (4, 200) if name.startswith("offset") else (200,)  # decoding, and a chunk of a prompt
    for M in rows:
        check(None, MASKS[name](200, DEVICE), (None, MASKS[name](200, "cpu")), M, 200, torch.bfloat16)


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    check(SCORES[name](DEVICE), mods.causal, (SCORES[name]("cpu"), mods.causal), 150, 150, torch.bfloat16)


@pytest.mark.parametrize("score", [mods.alibi, mods.soft_cap], ids=["alibi", "soft_cap"])
def test_float32(score: Any) -> None:
    argument = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if score is mods.alibi else 2.0
    given = argument.to(DEVICE) if isinstance(argument, torch.Tensor) else argument
    check(score(given), mods.causal, (score(argument), mods.causal), 150, 150, torch.float32)


def test_a_narrow_capture_has_its_own_gradient() -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE).bfloat16().requires_grad_()
    q = torch.randn(B, H, 130, D, device=DEVICE, dtype=torch.bfloat16)
    mask = tk.flex.create_block_mask(mods.causal, B, H, 130, 130, DEVICE, 128)
    (grad,) = torch.autograd.grad(tk.flex_attention(q, q, q, mods.alibi(slopes), mask).sum(), slopes)
    wide = slopes.detach().float().requires_grad_()
    (expected,) = torch.autograd.grad(tk.flex_attention(q, q, q, mods.alibi(wide), mask).sum(), wide)
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad.float(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_negative_number_that_torch_compile_spells_out(backend: str) -> None:
    """It is the wheel's pair of the cap, though its sign stands elsewhere."""
    size = -2.5

    def cap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return size * torch.tanh(score / size)

    q, k, v = (torch.randn(B, H, 96, D, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    torch._dynamo.reset()
    found = torch.compile(lambda q, k, v: tk.flex_attention(q, k, v, cap), fullgraph=True, backend=backend)(q, k, v)
    assert torch.equal(found, tk.flex_attention(q, k, v, cap))
    exact = tk.flex_attention(*(x.cpu().double() for x in (q, k, v)), cap)
    torch.testing.assert_close(found.cpu().double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("n_queries", [1, 300])
def test_tiles_that_kernel_options_name(n_queries: int) -> None:
    """Every config that takes the call may be asked for by its tile; gradients go on as without."""
    q = torch.randn(B, H, n_queries, D, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(B, H, 300, D, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    expected = tk.flex_attention(q, k, v)
    (gradient,) = torch.autograd.grad(expected.float().sum(), q)
    chosen = tk.explain("flex_attention", q, k, v)
    fitting = [row for row in chosen.candidates if row.fits]
    assert fitting
    for row in fitting:
        rows, cols = re.findall(r"(\d+)x(\d+)", row.config_name)[0]
        options = {"BLOCK_M": int(rows), "fwd_BLOCK_N": int(cols)}
        found = tk.flex_attention(q, k, v, kernel_options=options)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(torch.autograd.grad(found.float().sum(), q)[0], gradient, rtol=2e-2, atol=2e-2)
        explained = tk.explain("flex_attention", q, k, v, kernel_options=options)
        assert explained.choice is not None and f"{rows}x{cols}" in explained.choice.config_name
    with pytest.raises(tk.UnsupportedError, match=r"has BLOCK_M=1024; there are, by .*_s\d"):
        tk.flex_attention(q, k, v, kernel_options={"BLOCK_M": 1024})
