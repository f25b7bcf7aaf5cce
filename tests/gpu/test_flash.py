"""tk beneath ATen's flash attention, and tk.varlen_attn: against float64, and against torch's own kernels."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    _registry,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.profiler import ProfilerActivity, profile

import tk
from tk.flex import packed as packing

from .device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="about ATen's ops on CUDA")
BF16 = torch.bfloat16
SDPA, FLASH = "_scaled_dot_product_flash_attention", "_flash_attention_forward"
GQA: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}  # else always
WINDOWS = ((-1, -1), (-1, 0), (100, 0), (60, 30))
LENGTHS = {
    "short": [random.Random(i).randint(0, 90) for i in range(8)],
    "long": [700, 0, 1, 1300, 128, 65, 256, 900],
}


def ours(*operands: Any, **settings: Any) -> Any:
    return tk.varlen_attn(*operands, **settings, enable_gqa=True)


def torchs(*operands: Any, **settings: Any) -> Any:
    return varlen_attn(*operands, **settings, **GQA)


@pytest.fixture
def calls() -> Iterator[dict[str, list[int]]]:
    """Of each op, how many calls tk served and left."""
    activate_flash_attention_impl("tk")
    active: Any = _registry._FLASH_ATTENTION_ACTIVE
    yield active[1].calls
    restore_flash_attention_impl()


def operands(*sizes: tuple[int, ...], dtype: torch.dtype = BF16) -> list[Tensor]:
    return [torch.randn(size, dtype=dtype, device=DEVICE, requires_grad=True) for size in sizes]


def dense(n: int, size: int, heads: int = 4, dtype: torch.dtype = BF16) -> list[Tensor]:
    return operands((2, 4, n, size), (2, heads, n, size), (2, heads, n, size), dtype=dtype)


def packed(lengths: Sequence[int], size: int, dtype: torch.dtype = BF16) -> tuple[list[Tensor], Tensor]:
    total = sum(lengths)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    return operands((total, 4, size), (total, 2, size), (total, 2, size), dtype=dtype), starts


def doubles(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in tensors]


def attention(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int] = (-1, -1)) -> tuple[Tensor, Tensor]:
    """[H, M, D] in float64; out and lse."""
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    m, n = q.shape[1], k.shape[1]
    distance = torch.arange(n, device=q.device) - torch.arange(m, device=q.device).view(-1, 1) - (n - m)
    left, right = (size if size >= 0 else m + n for size in window)
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill((distance > right) | (-distance > left), -torch.inf)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def each_sequence(given: Sequence[Tensor], lengths: Sequence[int], window: tuple[int, int]) -> tuple[Tensor, Tensor]:
    parts = [x.split(list(lengths)) for x in given]
    found = [attention(*(x.transpose(0, 1) for x in part), window) for part in zip(*parts, strict=True)]
    return torch.cat([out.transpose(0, 1) for out, _ in found]), torch.cat([lse for _, lse in found], 1)


def close(found: Tensor, exact: Tensor, tolerance: float = 2e-2) -> None:
    scale = exact.abs().max().clamp(min=1e-3)
    torch.testing.assert_close(found.double() / scale, exact / scale, atol=tolerance, rtol=0)


def check_gradients(out: Tensor, given: Sequence[Tensor], wanted: Tensor, exact: Sequence[Tensor]) -> None:
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, given, grad), torch.autograd.grad(wanted, exact, grad.double())
    for mine, other in zip(*grads, strict=True):
        close(mine, other, 3e-2)


def kernels(call: Callable[[], Any]) -> list[str]:
    """The names of the kernels that it launches."""
    call()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return [event.name for event in profiled.events() if event.device_type == cuda]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("size", [64, 128, 80, 256])
@pytest.mark.parametrize("n", [512, 300])
def test_sdpa(calls: dict[str, list[int]], is_causal: bool, heads: int, size: int, n: int) -> None:
    given = dense(n, size, heads)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(*given, is_causal=is_causal, enable_gqa=heads != 4)
    exact = doubles(given)
    of_entries = [attention(*entry, (-1, 0) if is_causal else (-1, -1)) for entry in zip(*exact, strict=True)]
    wanted = torch.stack([x for x, _ in of_entries])
    close(out, wanted)
    check_gradients(out, given, wanted, exact)
    assert calls[SDPA] == calls[f"{SDPA}_backward"] == [1, 0]


def test_sdpa_is_as_torchs(calls: dict[str, list[int]]) -> None:
    """Its results in every respect, and lse."""
    given = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in dense(512, 64)]
    op = getattr(torch.ops.aten, SDPA)
    mine = op(*given, 0.0, True)
    restore_flash_attention_impl()
    theirs = op(*given, 0.0, True)
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(b, Tensor):
            assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)
        else:
            assert a == b
    close(mine[0], theirs[0].double())
    torch.testing.assert_close(mine[1], theirs[1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("call", [torchs, ours])
@pytest.mark.parametrize("few", [0, 1 << 62])
def test_packed_sequences(
    calls: dict[str, list[int]],
    window: tuple[int, int],
    name: str,
    size: int,
    call: Callable[..., Any],
    few: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With lists of blocks, and without."""
    monkeypatch.setattr(packing, "_FEW", few)
    lengths = LENGTHS[name]
    given, starts = packed(lengths, size)
    out, lse = call(
        *given, starts, starts, max(lengths), max(lengths), window_size=window,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    exact = doubles(given)
    wanted, wanted_lse = each_sequence(exact, lengths, window)
    close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse.float(), atol=2e-3, rtol=2e-3)
    check_gradients(out, given, wanted, exact)
    if call is torchs:
        assert calls[FLASH] == calls["_flash_attention_backward"] == [1, 0]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
def test_other_lengths_of_keys(calls: dict[str, list[int]], window: tuple[int, int]) -> None:
    """Of which a window is torch's own kernel's."""
    lengths, of_keys = [700, 0, 400, 65], [900, 30, 400, 700]
    q, k, v = operands((sum(lengths), 4, 64), (sum(of_keys), 2, 64), (sum(of_keys), 2, 64))
    starts, starts_of_keys = (
        torch.tensor([0, *accumulate(x)], dtype=torch.int32, device=DEVICE) for x in (lengths, of_keys)
    )
    for call in (torchs, ours):
        out = call(q, k, v, starts, starts_of_keys, 700, 900, window_size=window)
        exact = doubles([q, k, v])
        parts = [x.split(n) for x, n in zip(exact, (lengths, of_keys, of_keys), strict=True)]
        found = [attention(*(x.transpose(0, 1) for x in part), window)[0] for part in zip(*parts, strict=True)]
        wanted = torch.cat([x.transpose(0, 1) for x in found])
        close(out, wanted)
        check_gradients(out, (q, k, v), wanted, exact)
    assert calls[FLASH] == ([1, 0] if window == (-1, -1) else [0, 2])


def test_float32_packed() -> None:
    lengths = LENGTHS["long"]
    given, starts = packed(lengths, 64, torch.float32)
    out = ours(*given, starts, starts, 1300, 1300, window_size=(-1, 0))
    exact = doubles(given)
    wanted, _ = each_sequence(exact, lengths, (-1, 0))
    close(out, wanted, 1e-4)
    check_gradients(out, given, wanted, exact)


def test_the_kernels_are_tks(calls: dict[str, list[int]]) -> None:
    given, packs = dense(512, 64), packed(LENGTHS["long"], 64)

    def sdpa() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(*given, is_causal=True).sum().backward()

    def varlen() -> None:
        operands, starts = packs
        torchs(*operands, starts, starts, 1300, 1300, window_size=(-1, 0)).sum().backward()

    mine = [kernels(call) for call in (sdpa, varlen)]
    restore_flash_attention_impl()
    theirs = [kernels(call) for call in (sdpa, varlen)]
    activate_flash_attention_impl("tk")  # for the fixture's end
    for of_tk, of_torch in zip(mine, theirs, strict=True):
        assert any("flash_fwd" in name for name in of_torch) and any("flash_bwd" in name for name in of_torch), of_torch
        assert of_tk and not any("flash_fwd" in name or "flash_bwd" in name for name in of_tk), of_tk


def test_what_tk_does_not_take_is_torchs(calls: dict[str, list[int]]) -> None:
    given = [x.detach() for x in dense(256, 64)]
    op = getattr(torch.ops.aten, SDPA)
    torch.manual_seed(1)
    mine = op(*given, 0.5, True)[0]
    left = calls[SDPA]
    restore_flash_attention_impl()
    torch.manual_seed(1)
    assert torch.equal(mine, op(*given, 0.5, True)[0])
    assert left == [0, 1]


def test_gradients_of_dropout(calls: dict[str, list[int]]) -> None:
    """Go to torch's kernel as well."""
    given = dense(256, 64)

    def run() -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        out = getattr(torch.ops.aten, SDPA)(*given, 0.5, True)[0]
        return torch.autograd.grad(out.square().sum(), given)

    mine = run()
    restore_flash_attention_impl()
    for a, b in zip(mine, run(), strict=True):
        close(a, b.double(), 1e-2)  # whose sums are in no fixed order


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_parts_of_the_keys_make_the_whole(calls: dict[str, list[int]], parts: int) -> None:
    """The shares of a ring, one after the other."""
    q, k, v = (x.detach() for x in dense(1024, 64))
    op = getattr(torch.ops.aten, SDPA)
    whole, whole_lse, *_ = op(q, k, v)
    shares = zip(k.chunk(parts, 2), v.chunk(parts, 2), strict=True)
    results = [op(q, *share)[:2] for share in shares]
    lse = torch.logsumexp(torch.stack([x for _, x in results]), 0)
    out = torch.stack([torch.exp(x - lse).unsqueeze(-1) * part.float() for part, x in results]).sum(0)
    torch.testing.assert_close(lse, whole_lse, atol=1e-4, rtol=1e-4)
    close(out, whole.double(), 1e-2)
    assert calls[SDPA] == [parts + 1, 0]


def test_compiled(calls: dict[str, list[int]]) -> None:
    given = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in dense(256, 64)]
    packs, starts = packed(LENGTHS["long"], 64)

    def dense_call(*given: Tensor) -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*given[:3], is_causal=True)

    def packed_call(*given: Tensor) -> Any:
        return ours(*given, starts, starts, 1300, 1300, window_size=(-1, 0))

    for function, arguments in ((dense_call, given), (packed_call, packs)):
        found, wanted = torch.compile(function)(*arguments), function(*arguments)
        close(found, wanted.double(), 1e-2)
        grads = (torch.autograd.grad(x.float().square().sum(), arguments) for x in (found, wanted))
        for mine, other in zip(*grads, strict=True):
            close(mine, other.double())
    assert calls[SDPA] == [2, 0]


@pytest.mark.parametrize("few", [0, 1 << 62])
def test_a_cuda_graph(calls: dict[str, list[int]], few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed with other lengths in the same tensor."""
    monkeypatch.setattr(packing, "_FEW", few)
    (q, k, v), starts = packed([1000, 600, 448], 64)
    q, k, v = (x.detach() for x in (q, k, v))

    def call() -> Tensor:
        return torchs(q, k, v, starts, starts, 2048, 2048, window_size=(-1, 0))

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for lengths in ([1000, 600, 448], [3, 2000, 45]):
        starts.copy_(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))
        graph.replay()
        close(out, each_sequence([x.double() for x in (q, k, v)], lengths, (-1, 0))[0])
