"""Attention on a GPU: every mod of the library with every mask, forward, gradients and decoding, against float64.

The pack is the wheel's: `torch.ops.tk.flex_<fingerprint>` by way of tk.flex_attention. Errors are held against those of
torch's own attention in the same dtype where it has one (no mods), else against bounds of the dtype.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tk
from tk.flex import mods

from .device import DEVICE

B, H = 2, 4
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}
DTYPES = (torch.bfloat16, torch.float16)

Mod = Callable[..., Tensor]


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def ids(length: int) -> Tensor:
    return (torch.arange(length, device=DEVICE) * 5 // max(length, 1)).int().expand(B, -1).contiguous()


MASKS: dict[str, Callable[[int], Mod | None]] = {
    "none": lambda n: None,
    "causal": lambda n: mods.causal,
    "window": lambda n: mods.sliding_window(max(1, n // 3)),
    "document": lambda n: mods.and_masks(mods.causal, mods.document(ids(n))),
    "prefix": lambda n: mods.prefix_lm(n // 3),
    "prefixes": lambda n: mods.prefix_lm(torch.tensor([n // 3, n], device=DEVICE, dtype=torch.int32)),
    "documents_both_ways": lambda n: mods.document(ids(n)),
    "documents_of_all": lambda n: mods.document(ids(n)[0]),
    "long_ids": lambda n: mods.document(ids(n).long()),
    "dilated": lambda n: mods.dilated_window(7, 3),
}
SCORES: dict[str, Callable[[int, int], tuple[Mod | None, list[Tensor]]]] = {
    "none": lambda m, n: (None, []),
    "alibi": lambda m, n: with_table(mods.alibi, torch.rand(H, device=DEVICE)),
    "soft_cap": lambda m, n: (mods.soft_cap(2.0), []),
    "relative": lambda m, n: with_table(lambda t: mods.relative_bias(t, 20), tensor(H, 41)),
    "per_head": lambda m, n: with_table(mods.per_head_bias, tensor(H)),
    "learned": lambda m, n: with_table(mods.learned_bias, tensor(H, m, n)),
}
_BUILT = [(s, m) for s, m in itertools.product(SCORES, list(MASKS)[:4])
          if s not in ("per_head", "learned") or m in ("none", "causal")]  # fmt: skip
PAIRS = [*_BUILT, *(("none", mask) for mask in list(MASKS)[4:])]
RARE = {"per_head", "learned", "prefixes", "documents_of_all", "long_ids", "dilated"}  # bfloat16 alone


def with_table(mod: Callable[[Tensor], Mod], table: Tensor) -> tuple[Mod, list[Tensor]]:
    return mod(table), [table]


def is_built(score: str, mask: str, dtype: torch.dtype) -> bool:
    rare = {score, mask} & RARE or (score == "relative" and mask in ("window", "document"))
    return dtype == torch.bfloat16 or not rare


def exact(q: Tensor, k: Tensor, v: Tensor, score_mod: Mod | None, mask_mod: Mod | None, sinks: Tensor | None = None,
          lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """In float64, densely. Captured tensors keep their dtype; score mods see float64 scores."""
    q, k, v = q.double(), k.double(), v.double()
    batch, heads, m, d = q.shape
    n = k.shape[2]
    k, v = (x.expand(batch, *x.shape[1:]).repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * d**-0.5
    at = [torch.arange(size, device=q.device).view([-1 if i == j else 1 for j in range(4)])
          for i, size in enumerate((batch, heads, m, n))]  # fmt: skip
    if score_mod is not None:
        s = score_mod(s, *at)
    keep = torch.ones((), dtype=torch.bool, device=q.device) if mask_mod is None else mask_mod(*at)
    if lengths is not None:
        keep = keep & (at[3] < lengths.view(-1, 1, 1, 1))
    s = s.masked_fill(~keep, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double().view(1, -1, 1, 1).expand(batch, heads, m, 1)], -1)
    lse = torch.logsumexp(s, -1)
    weights = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])[..., :n]
    return weights @ v, lse


def block_mask(mask: Mod | None, m: int, n: int) -> Any:
    return None if mask is None else tk.flex.create_block_mask(mask, B, None, m, n, device=DEVICE)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, what: str, room: float = 1) -> None:
    tolerance = room * TOLERANCE[dtype]
    scale = max(1.0, expected.abs().nan_to_num(0, 0, 0).max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(
        found.double(), expected, atol=tolerance * scale, rtol=tolerance, msg=lambda m: f"{what}: {m}"
    )


def check(q: Tensor, k: Tensor, v: Tensor, score: str, mask: str, gradients: bool = True) -> None:
    m, n = q.shape[2], k.shape[2]
    score_mod, tables = SCORES[score](m, n)
    mask_mod = MASKS[mask](n)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    tables = [t.requires_grad_() for t in tables]
    out, lse = tk.flex_attention(*inputs, score_mod, block_mask(mask_mod, m, n), enable_gqa=True, return_lse=True)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = exact(*wide, score_mod, mask_mod)
    name = f"{score}, {mask}, {q.dtype}, {list(q.shape)} x {list(k.shape)}"
    close(out, expected, q.dtype, name)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-3, rtol=2e-3, msg=name)
    if not gradients:
        return
    grad, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad([out, lse], [*inputs, *tables], [grad, grad_lse])
    wanted = torch.autograd.grad([expected, expected_lse], [*wide, *tables], [grad.double(), grad_lse.double()])
    for what, f, w in zip(("query", "key", "value"), found, wanted, strict=False):
        close(f, w, q.dtype, f"gradient of {what}, {name}")
    for f, w in zip(found[3:], wanted[3:], strict=True):  # sums over all rows and keys, of terms that cancel
        close(f, w.double(), q.dtype, f"gradient of the table, {name}", room=4)


@pytest.mark.parametrize(("score", "mask"), PAIRS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mods(score: str, mask: str, dtype: torch.dtype) -> None:
    """Head sizes that are compiled, and others; groups of heads; lengths of all kinds."""
    if not is_built(score, mask, dtype):
        pytest.skip("the package has it in bfloat16")
    for d, h_kv, m, n in (
        (64, H, 256, 256),
        (128, 1, 384, 384),
        (128, 2, 333, 333),
        (80, H, 200, 200),
        (256, 2, 129, 129),
    ):
        check(tensor(B, H, m, d, dtype=dtype), *(tensor(B, h_kv, n, d, dtype=dtype) for _ in range(2)), score, mask)


@pytest.mark.parametrize(("score", "mask"), PAIRS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_rows(score: str, mask: str, dtype: torch.dtype) -> None:
    """Of many keys, as decoding has them: each head alone, groups of heads, one head of keys for all."""
    if not is_built(score, mask, dtype):
        pytest.skip("the package has it in bfloat16")
    for d, h_kv, m, n in ((128, 1, 1, 777), (64, 2, 7, 1025), (80, H, 3, 300), (256, 2, 16, 130)):
        q, k, v = tensor(B, H, m, d, dtype=dtype), *(tensor(B, h_kv, n, d, dtype=dtype) for _ in range(2))
        check(q, k, v, score, mask, gradients=False)


def test_positions_of_an_image() -> None:
    mask = mods.natten_2d(24, 16, 7)
    q, k, v = (tensor(B, H, 384, 128, dtype=torch.bfloat16) for _ in range(3))
    out = tk.flex_attention(q, k, v, block_mask=block_mask(mask, 384, 384))
    close(out, exact(q, k, v, None, mask)[0], q.dtype, "natten_2d")


@pytest.mark.parametrize(("qk", "v"), [(192, 128), (96, 64), (64, 128), (40, 24)])
def test_values_of_another_size(qk: int, v: int) -> None:
    for mask in ("none", "causal"):
        q, k = (tensor(B, H, 300, qk, dtype=torch.bfloat16) for _ in range(2))
        check(q, k, tensor(B, H, 300, v, dtype=torch.bfloat16), "none", mask)


@pytest.mark.parametrize(("score", "mask"), [("none", "causal"), ("alibi", "causal"), ("soft_cap", "window")])
def test_as_torchs_flex_attention(score: str, mask: str) -> None:
    """No further from float64 than torch's own, compiled, of the same mods."""
    from torch.nn.attention import flex_attention as torchs

    n = 700
    q, k, v = (tensor(B, H, n, 64, dtype=torch.bfloat16) for _ in range(3))
    score_mod, mask_mod = SCORES[score](n, n)[0], MASKS[mask](n)
    theirs = torch.compile(torchs.flex_attention, dynamic=False)(
        q, k, v, score_mod, torchs.create_block_mask(mask_mod, B, None, n, n, device=DEVICE)
    )
    out = tk.flex_attention(q, k, v, score_mod, block_mask(mask_mod, n, n))
    expected = exact(q, k, v, score_mod, mask_mod)[0]
    ours, others = ((x.double() - expected).abs() for x in (out, theirs))
    assert ours.mean() <= 1.1 * others.mean() and ours.max() <= 2 * others.max() + 1e-3


@pytest.mark.parametrize("mask", list(MASKS)[:4])
def test_lengths(mask: str) -> None:
    for n in (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257, 511, 640, 1000, 1025):
        check(*(tensor(B, H, n, 64, dtype=torch.bfloat16) for _ in range(3)), "none", mask, gradients=n < 300)


def test_lengths_differ() -> None:
    for m, n in ((1, 700), (5, 1025), (300, 40), (128, 129)):
        q, k, v = (
            tensor(B, H, m, 128, dtype=torch.bfloat16),
            *(tensor(B, 2, n, 128, dtype=torch.bfloat16) for _ in range(2)),
        )
        check(q, k, v, "none", "none")
        check(q, k, v, "alibi", "causal")


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("tf32", [False, True])
def test_fp32(mask: str, tf32: bool) -> None:
    held = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        q, k, v = (tensor(B, H, 200, 64) for _ in range(3))
        if tf32:
            out = tk.flex_attention(q, k, v, block_mask=block_mask(MASKS[mask](200), 200, 200))
            close(out, exact(q, k, v, None, MASKS[mask](200))[0], torch.float16, "tf32")
        else:
            check(q, k, v, "none", mask)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = held


def test_errors_are_those_of_torch() -> None:
    for d, causal in itertools.product((64, 128), (False, True)):
        q, k, v = (tensor(B, H, 1024, d, dtype=torch.bfloat16) for _ in range(3))
        mask = mods.causal if causal else None
        out = tk.flex_attention(q, k, v, block_mask=block_mask(mask, 1024, 1024))
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        expected = exact(q, k, v, None, mask)[0]
        ours, others = ((x.double() - expected).abs() for x in (out, theirs))
        assert ours.mean() <= 1.1 * others.mean() and ours.max() <= 2 * others.max() + 1e-3


def test_layouts() -> None:
    """Heads inside of rows, as models have them; rows that are no multiple of 16 bytes; K and V of one batch entry."""
    q, k, v = (tensor(B, 300, H, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    check(q, k, v, "none", "causal")
    q, k, v = (tensor(B, H, 64, 300, dtype=torch.bfloat16).transpose(2, 3) for _ in range(3))
    check(q, k, v, "none", "causal")
    check(tensor(B, H, 200, 64, dtype=torch.bfloat16), *(tensor(1, H, 200, 64, dtype=torch.bfloat16) for _ in range(2)),
          "none", "none")  # fmt: skip


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("heads", [(32, 8), (16, 1), (4, 4), (24, 8)])
def test_decode_with_lengths_pages_and_sinks(rows: int, heads: tuple[int, int]) -> None:
    n_heads, h_kv = heads
    lengths = torch.tensor([1, 700, 1300, 2048], device=DEVICE, dtype=torch.int32)
    sinks = tensor(n_heads)
    q = tensor(4, n_heads, rows, 128, dtype=torch.bfloat16)
    pages = torch.randperm(600, device=DEVICE)[: 4 * 128].view(4, 128).int()
    k, v = (tensor(600, 16, h_kv, 128, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    dense = [x[pages.long()].permute(0, 2, 1, 3, 4).flatten(2, 3) for x in (k, v)]
    expected, expected_lse = exact(q, *dense, None, None, sinks, lengths)
    for keys in ((k, v), dense):
        table = {"page_table": pages} if keys is not dense else {}
        out, lse = tk.flex_attention(
            q, *keys, enable_gqa=True, return_lse=True, sinks=sinks, kv_lengths=lengths, **table
        )
        close(out, expected, q.dtype, f"{heads} {bool(table)}")
        torch.testing.assert_close(lse.double(), expected_lse, atol=2e-3, rtol=2e-3)


@pytest.mark.skipif(DEVICE != "cuda", reason="about a GPU's graphs")
def test_lengths_and_pages_may_change_between_replays() -> None:
    q = tensor(2, 8, 1, 128, dtype=torch.bfloat16)
    k, v = (tensor(64, 2, 16, 128, dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.tensor([100, 30], device=DEVICE, dtype=torch.int32)
    pages = torch.arange(64, device=DEVICE).view(2, 32).int()

    def step() -> Tensor:
        return tk.flex_attention(q, k, v, enable_gqa=True, kv_lengths=lengths, page_table=pages)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for new in ([512, 1], [7, 400]):
        lengths.copy_(torch.tensor(new))
        pages.copy_(torch.randperm(64).view(2, 32))
        graph.replay()
        torch.testing.assert_close(out, step())


def test_equal_calls_give_equal_bits() -> None:
    """Forward, under the counter that hands out tiles, and gradients, of a captured table too."""
    table = torch.randn(H, 2 * 64 + 1, device=DEVICE, requires_grad=True)
    q, k, v = (tensor(B, H, 512, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    mask = block_mask(mods.causal, 512, 512)
    grad = torch.randn_like(q)

    def once() -> list[Tensor]:
        out = tk.flex_attention(q, k, v, mods.relative_bias(table, 64), mask)
        return [out, *torch.autograd.grad(out, [q, k, v, table], grad)]

    first = once()
    for _ in range(1000):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


def test_rows_that_see_nothing() -> None:
    q, k, v = (tensor(B, H, 300, 64, dtype=torch.bfloat16) for _ in range(3))
    seen = torch.rand(300, 300, device=DEVICE) < 0.02
    seen[130:200] = False
    out = tk.sdpa(q, k, v, attn_mask=seen)
    expected, lse = exact(q, k, v, None, lambda b, h, i, j: seen[i, j])
    assert (lse[:, :, 130:200] == -math.inf).all() and (out[:, :, 130:200] == 0).all()
    close(out, expected, q.dtype, "sdpa")


def one_further(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


# Which of them lie in pairs along keys depends on the number of keys, too.
MASK_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "one_further": one_further,
    "odd_pitch": lambda x: torch.nn.functional.pad(x, (0, 1 + x.shape[-1] % 2))[..., : x.shape[-1]],
    "even_pitch": lambda x: torch.nn.functional.pad(x, (0, 2 - x.shape[-1] % 2))[..., : x.shape[-1]],
    "transposed": lambda x: x.mT.contiguous().mT,
    "every_other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "of_all_heads": lambda x: x[:, :1],
    "of_all_entries": lambda x: x[0],
    "of_all_queries": lambda x: x[:, :, :1],
}


@pytest.mark.parametrize("layout", MASK_LAYOUTS)
@pytest.mark.parametrize("d", [64, 100, 256])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32], ids=str)
def test_masks_of_any_layout(dtype: torch.dtype, d: int, layout: str) -> None:
    for m, n in ((200, 330), (130, 129), (64, 2), (3, 1)):
        q, k, v = tensor(B, H, m, d), tensor(B, H, n, d), tensor(B, H, n, d)
        q, k, v = (x.bfloat16() for x in (q, k, v))
        table = MASK_LAYOUTS[layout](tensor(B, H, m, n) > -0.5 if dtype == torch.bool else tensor(B, H, m, n).to(dtype))
        every = table.expand(B, H, m, n)
        if dtype == torch.bool:
            expected, _ = exact(q, k, v, None, lambda b, h, i, j, x=every: x[b, h, i, j])
        else:
            expected, _ = exact(q, k, v, lambda s, b, h, i, j, x=every: s + x[b, h, i, j], None)
        close(tk.sdpa(q, k, v, attn_mask=table), expected, q.dtype, f"{[*table.shape]} {table.stride()}")


# --- What a result does not depend on ---

KERNELS = ("_forward", "_hopper", "_decode")


def by_each_kernel(call: Callable[[], Any]) -> dict[str, Any]:
    """What a call gives by every kernel of the forward pass that takes it."""
    from benchmarks.attention_configs import pinned

    found = {}
    for name in KERNELS:
        try:
            with pinned("", name):
                found[name] = call()
        except ValueError as e:
            assert "for this call" in str(e)
    assert found
    return found


@pytest.mark.skipif(DEVICE != "cuda", reason="about a GPU's kernels")
@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("score", ["none", "alibi", "soft_cap"])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_what_is_past_a_length_may_be_no_number(rows: int, score: str, mask: str) -> None:
    """A weight of 0 does not hide it."""
    n = 700
    lengths = torch.tensor([n - 150, 61], device=DEVICE, dtype=torch.int32)
    for d in (64, 128, 256):
        q, k, v = (tensor(B, H, size, d, dtype=torch.bfloat16) for size in (rows, n, n))
        score_mod, mask_mod = SCORES[score](rows, n)[0], MASKS[mask](n)
        expected, expected_lse = exact(q, k, v, score_mod, mask_mod, lengths=lengths)
        for b, length in enumerate(lengths.tolist()):
            k[b, :, length:], v[b, :, length:] = math.nan, math.inf
        lists = block_mask(mask_mod, rows, n)
        found = by_each_kernel(
            lambda: tk.flex_attention(q, k, v, score_mod, lists, kv_lengths=lengths, return_lse=True)  # noqa: B023
        )
        for name, (out, lse) in found.items():
            close(out, expected, q.dtype, f"{name}, {d}")
            torch.testing.assert_close(lse.double(), expected_lse, atol=2e-3, rtol=2e-3, msg=f"{name}, {d}")


@pytest.mark.parametrize("score", ["none", "alibi", "soft_cap"])
def test_pages_past_a_length_may_be_anywhere(score: str) -> None:
    lengths = torch.tensor([33, 100], device=DEVICE, dtype=torch.int32)
    pages = torch.randperm(32, device=DEVICE)[:16].view(2, 8).int()
    q = tensor(2, H, 1, 128, dtype=torch.bfloat16)
    k, v = (tensor(32, 2, 16, 128, dtype=torch.bfloat16) for _ in range(2))
    score_mod = SCORES[score](1, 128)[0]
    dense = [x[pages.long()].permute(0, 2, 1, 3, 4).flatten(2, 3) for x in (k, v)]
    expected, _ = exact(q, *dense, score_mod, None, lengths=lengths)
    for b, length in enumerate(lengths.tolist()):
        k[pages[b, length // 16].long(), :, length % 16 :] = math.nan
        v[pages[b, length // 16].long(), :, length % 16 :] = -math.inf
        pages[b, -(-length // 16) :] = 1 << 20
    out = tk.flex_attention(q, k, v, score_mod, enable_gqa=True, kv_lengths=lengths, page_table=pages)
    close(out, expected, q.dtype, score)


def test_gradients_past_a_length_are_zero() -> None:
    lengths = torch.tensor([200, 61], device=DEVICE, dtype=torch.int32)
    for score in ("none", "soft_cap"):
        q, k, v = (tensor(B, H, 256, 64, dtype=torch.bfloat16) for _ in range(3))
        score_mod = SCORES[score](256, 256)[0]
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        grad = torch.randn_like(q)
        wanted = torch.autograd.grad(exact(*wide, score_mod, None, lengths=lengths)[0], wide, grad.double())
        for b, length in enumerate(lengths.tolist()):
            k[b, :, length:], v[b, :, length:] = math.nan, math.inf
        near = [x.requires_grad_() for x in (q, k, v)]
        out = tk.flex_attention(*near, score_mod, kv_lengths=lengths)
        for what, f, w in zip("qkv", torch.autograd.grad(out, near, grad), wanted, strict=True):
            close(f, w, q.dtype, f"gradient of {what}, {score}")
            assert what == "q" or (f[1, :, 61:] == 0).all()


@pytest.mark.parametrize("rows", [3, 512])
@pytest.mark.parametrize("n", [512, 700])
def test_block_lists_decide(rows: int, n: int) -> None:
    """What the mask_mod says of full blocks does not count: in every kernel, also where keys end within a tile."""
    at = torch.arange(-(-rows // 128), device=DEVICE)[:, None] + torch.arange(-(-n // 128), device=DEVICE)[None, :]
    full, partial = at % 3 == 0, at % 3 == 1
    lists = [(x.sum(-1).int()[None, None], (~x).int().argsort(dim=-1, stable=True).int()[None, None])
             for x in (partial, full)]  # fmt: skip
    mask_mod = MASKS["prefix"](30)  # sees little
    mask = tk.flex.BlockMask.from_kv_blocks(*lists[0], *lists[1], (128, 128), mask_mod, (rows, n))
    i, j = torch.arange(rows, device=DEVICE)[:, None], torch.arange(n, device=DEVICE)[None, :]
    seen = full[i // 128, j // 128] | (partial[i // 128, j // 128] & mask_mod(0, 0, i, j))
    q, k, v = (tensor(B, H, size, 64, dtype=torch.bfloat16) for size in (rows, n, n))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = exact(*wide, None, lambda b, h, q_idx, kv_idx: seen[q_idx, kv_idx])[0]
    grad = torch.randn_like(q)
    wanted = torch.autograd.grad(expected, wide, grad.double())
    if DEVICE == "cuda":
        for name, out in by_each_kernel(lambda: tk.flex_attention(q, k, v, block_mask=mask)).items():
            close(out, expected, q.dtype, name)
    from benchmarks.attention_configs import pinned

    for kernel in ("backward", "backward_hopper") if DEVICE == "cuda" else ():
        near = [x.detach().requires_grad_() for x in (q, k, v)]
        out = tk.flex_attention(*near, block_mask=mask)
        try:
            with pinned("_backward", kernel):
                found = torch.autograd.grad(out, near, grad)
        except ValueError as e:
            assert kernel == "backward_hopper" and "for this call" in str(e)
            continue
        for what, f, w in zip("qkv", found, wanted, strict=True):
            close(f, w, q.dtype, f"gradient of {what} by {kernel}")


@pytest.mark.skipif(DEVICE != "cuda", reason="about a GPU's kernels")
@pytest.mark.parametrize("rows", [1, 333])
@pytest.mark.parametrize(("score", "mask"), [("none", "none"), ("none", "causal"), ("soft_cap", "causal")])
def test_largest_scores(rows: int, score: str, mask: str) -> None:
    from torch.nn.attention.flex_attention import AuxRequest

    q, k, v = (tensor(B, H, size, 128, dtype=torch.bfloat16) for size in (rows, 700, 700))
    score_mod, mask_mod = SCORES[score](rows, 700)[0], MASKS[mask](700)
    sinks, lengths = tensor(H) * 5, torch.tensor([0, 500], device=DEVICE, dtype=torch.int32)
    lists = block_mask(mask_mod, rows, 700)

    def call(aux: Any) -> Any:
        return tk.flex_attention(q, k, v, score_mod, lists, return_aux=aux, sinks=sinks, kv_lengths=lengths)

    s = q.double() @ k.double().mT * 128**-0.5
    i, j = torch.arange(rows, device=DEVICE)[:, None], torch.arange(700, device=DEVICE)[None, :]
    s = s if score_mod is None else 2.0 * torch.tanh(s / 2.0)
    keep = (j < lengths.view(-1, 1, 1, 1)) & (True if mask_mod is None else mask_mod(0, 0, i, j))
    expected = s.masked_fill(~keep, -math.inf).amax(-1)
    both = by_each_kernel(lambda: call(AuxRequest(lse=True, max_scores=True)))
    for name, (out, aux) in both.items():
        torch.testing.assert_close(aux.max_scores.double(), expected, atol=2e-3, rtol=2e-3, msg=name)
        alone, plain = by_each_kernel(lambda: call(AuxRequest(lse=True)))[name]
        assert torch.equal(out, alone) and torch.equal(aux.lse, plain.lse), name


@pytest.mark.parametrize("d", [257, 320, 512])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_wide_heads(d: int, mask: str) -> None:
    for dtype in DTYPES:
        for rows, n in ((130, 130), (1, 200)):
            q, k, v = tensor(B, H, rows, d, dtype=dtype), *(tensor(B, 2, n, d, dtype=dtype) for _ in range(2))
            check(q, k, v, "none", mask, gradients=rows > 1)
    q, k = (tensor(B, H, 70, 40, dtype=torch.bfloat16) for _ in range(2))
    check(q, k, tensor(B, H, 70, d, dtype=torch.bfloat16), "none", mask)
