"""tk beneath ATen's flash attention. The kernels are put where the CPU looks, where ATen has none of these ops."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
)
from torch.nn.attention.varlen import AuxRequest, varlen_attn

import tk
from tk import errors
from tk.dropin import flash
from tk.flex import ops, packed

from .dense import attention

aten = torch.ops.aten
BF16 = torch.bfloat16
SDPA, FLASH = "_scaled_dot_product_flash_attention", "_flash_attention_forward"
GQA: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}  # else always
THERE = {name: getattr(aten, name).default for name in flash._OPS if hasattr(aten, name)}


def dispatcher() -> dict[str, str]:
    return {name: torch._C._dispatch_dump(f"aten::{name}") for name in THERE}


@pytest.fixture
def active() -> Iterator[flash.Activated]:
    before = dispatcher()
    handle = flash.Activated("CPU")
    yield handle
    handle.remove()
    assert dispatcher() == before


@pytest.fixture
def before() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Kernels that note what they are called with, there before tk's."""
    calls: list[tuple[str, dict[str, Any]]] = []
    library = Library("aten", "IMPL")

    def kernel_of(name: str, op: Any) -> Any:
        names = [a.name for a in op._schema.arguments]

        def kernel(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            calls.append((name, given))
            q = given["query"]
            if name.endswith("backward"):
                return tuple(torch.zeros_like(given[n]) for n in ("query", "key", "value"))
            lse = torch.full(q.shape[:-1], 7.0)
            rest = flash._unused(q)
            if name == SDPA:
                return torch.full_like(q, 7.0), lse, None, None, q.shape[2], given["key"].shape[2], *rest
            return lse if name.endswith("inplace") else (torch.full_like(q, 7.0), lse, *rest)

        return kernel

    for name, op in THERE.items():
        library.impl(name, kernel_of(name, op), "CPU")
    yield calls
    library._destroy()


def operands(*shape: int, heads: int | None = None) -> list[Tensor]:
    """[B, H, S, D] as a projection lays them; heads: of key and value."""
    B, H, S, D = shape
    sizes = ((B, S, H, D), *[(B, S, heads or H, D)] * 2)
    return [torch.randn(size, dtype=BF16).transpose(1, 2).requires_grad_() for size in sizes]


def close(found: Tensor, exact: Tensor) -> None:
    scale = exact.abs().max().clamp(min=1)
    torch.testing.assert_close(found.double() / scale, exact / scale, atol=1.5e-2, rtol=0)


def doubles(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in tensors]


# --- The registry ---


def test_torch_lists_it() -> None:
    assert "tk" in list_flash_attention_impls()


def test_restored_is_as_before() -> None:
    before = dispatcher()
    for _ in range(2):
        activate_flash_attention_impl("tk")
        assert current_flash_attention_impl() == "tk"
        assert all("dropin/flash.py" in text or text != before[name] for name, text in dispatcher().items())
        restore_flash_attention_impl()
        assert current_flash_attention_impl() is None
        assert dispatcher() == before


# --- What tk serves ---


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [4, 2])
def test_sdpa(active: flash.Activated, is_causal: bool, heads: int) -> None:
    given = operands(2, 4, 150, 16, heads=heads)
    found = getattr(aten, SDPA)(*given, 0.0, is_causal, scale=0.3)
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, debug = found
    exact = doubles(given)
    mask = torch.ones(150, 150, dtype=torch.bool).tril() if is_causal else None
    wanted, wanted_lse = attention(*exact, None, mask, 0.3)
    close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse.float(), atol=1e-3, rtol=1e-3)
    assert lse.dtype == torch.float32 and (cum_q, cum_k, max_q, max_k) == (None, None, 150, 150)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, given, grad), torch.autograd.grad(wanted, exact, grad.double())
    for mine, other in zip(*grads, strict=True):
        close(mine, other)
    assert active.calls[SDPA] == active.calls[f"{SDPA}_backward"] == [1, 0]
    # What torch.compile takes for granted.
    described = getattr(aten, SDPA)(*(x.detach().to("meta") for x in given), 0.0, is_causal, scale=0.3)
    for real, meta in zip((out, lse, seed, offset, debug), (*described[:2], *described[-3:]), strict=True):
        assert (real.shape, real.dtype, real.stride()) == (meta.shape, meta.dtype, meta.stride())
    for real, x in zip(grads[0], given, strict=True):
        assert real.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 0), (7, 4), (-1, 4)])
@pytest.mark.parametrize("n_queries", [150, 40, 1])
def test_dense_windows_end_at_the_last_key(active: flash.Activated, window: tuple[int, int], n_queries: int) -> None:
    q, k, v = (x.transpose(1, 2) for x in operands(2, 4, 150, 16, heads=2))
    q = q[:, :n_queries].detach().requires_grad_()
    left, right = window
    out, lse, *_ = getattr(aten, FLASH)(
        q, k, v, None, None, n_queries, 150, 0.0, window == (-1, 0), False, window_size_left=left,
        window_size_right=right,
    )  # fmt: skip
    at = torch.arange(150) - torch.arange(150 - n_queries, 150).view(-1, 1)
    mask = (at <= (right if right >= 0 else 150)) & (-at <= (left if left >= 0 else 150))
    exact = doubles([q, k, v])
    wanted, wanted_lse = attention(*(x.transpose(1, 2) for x in exact), None, mask)
    close(out, wanted.transpose(1, 2))
    torch.testing.assert_close(lse, wanted_lse.float(), atol=1e-3, rtol=1e-3)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(wanted.transpose(1, 2), exact, grad.double())
    for mine, other in zip(*grads, strict=True):
        close(mine, other)
    assert active.calls[FLASH] == active.calls["_flash_attention_backward"] == [1, 0]


def packed_inputs(lengths: Sequence[int], of_keys: Sequence[int]) -> tuple[list[Tensor], Tensor, Tensor]:
    starts = [torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in (lengths, of_keys)]
    sizes = ((sum(lengths), 4, 16), (sum(of_keys), 2, 16), (sum(of_keys), 2, 16))
    return [torch.randn(size, dtype=BF16, requires_grad=True) for size in sizes], *starts


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (20, 0), (5, 6)])
@pytest.mark.parametrize("few", [0, 1 << 62])
def test_varlen_attn(
    active: flash.Activated, window: tuple[int, int], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_FEW", few)
    lengths = [random.Random(i).randint(0, 120) for i in range(6)]
    given, starts, _ = packed_inputs(lengths, lengths)
    settings: Any = dict(window_size=window, return_aux=AuxRequest(lse=True))
    out, lse = varlen_attn(*given, starts, starts, 120, 120, **settings, **GQA)
    exact = doubles(given)
    wanted, wanted_lse = tk.varlen_attn(*exact, starts, starts, 120, 120, **settings, enable_gqa=True)
    close(out, wanted)
    assert lse.shape == (4, sum(lengths)) and lse.dtype == torch.float32
    torch.testing.assert_close(lse, wanted_lse.float(), atol=1e-3, rtol=1e-3)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, given, grad), torch.autograd.grad(wanted, exact, grad.double())
    for mine, other, x in zip(*grads, given, strict=True):
        close(mine, other)
        assert mine.stride() == x.stride()
    assert active.calls[FLASH] == active.calls["_flash_attention_backward"] == [1, 0]


def test_rows_that_see_no_key_are_as_flash_attention_has_them(active: flash.Activated) -> None:
    given, starts, of_keys = packed_inputs([4, 3], [5, 0])
    out, lse = varlen_attn(*given, starts, of_keys, 4, 5, return_aux=AuxRequest(lse=True), **GQA)
    assert not out[4:].any() and (lse[:, 4:] == torch.inf).all() and lse[:, :4].isfinite().all()
    found = torch.autograd.grad(out.sum(), given)
    assert all(x.isfinite().all() for x in found) and not found[0][4:].any()


def test_out_that_is_given(active: flash.Activated) -> None:
    name = "_flash_attention_forward_no_dropout_inplace"
    if name not in THERE:
        pytest.skip("torch has it from 2.13 on")
    given, starts, _ = packed_inputs([40, 30], [40, 30])
    q, k, v = (x.detach() for x in given)
    rest = (q, k, v, starts, starts, 40, 40, 0.0, True, False)
    out = torch.empty_like(q)
    lse = getattr(aten, name)(out, *rest)
    wanted, wanted_lse, *_ = getattr(aten, FLASH)(*rest)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_parts_of_the_keys_make_the_whole(active: flash.Activated, parts: int) -> None:
    """As the ring of context parallel has it: results of parts are merged by lse, and each part's gradients are of the
    merged result and lse."""
    q, k, v = (x.detach() for x in operands(2, 4, 160, 16))
    whole, whole_lse, *_ = getattr(aten, SDPA)(q, k, v)
    grad = torch.randn_like(whole)
    shares = list(zip(k.chunk(parts, 2), v.chunk(parts, 2), strict=True))
    results = [getattr(aten, SDPA)(q, *share)[:2] for share in shares]
    lse = torch.logsumexp(torch.stack([x for _, x in results]), 0)
    out = sum(torch.exp(x - lse).unsqueeze(-1) * part.float() for part, x in results)
    assert isinstance(out, Tensor)
    torch.testing.assert_close(lse, whole_lse)
    close(out, whole.double())

    def gradients(key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> Any:
        nothing = torch.zeros(0)
        return getattr(aten, f"{SDPA}_backward")(
            grad, q, key, value, out, lse, nothing, nothing, 160, key.shape[2], 0.0, False, *flash._unused(q)[:2]
        )

    wanted = gradients(k, v, whole, whole_lse)
    found = [gradients(*share, out.to(BF16), lse) for share in shares]
    of_parts = (
        sum(g[0].float() for g in found),
        torch.cat([g[1] for g in found], 2),
        torch.cat([g[2] for g in found], 2),
    )
    for mine, other in zip(of_parts, wanted, strict=True):
        assert isinstance(mine, Tensor)
        close(mine, other.double())


def test_compiled(active: flash.Activated) -> None:
    given = operands(2, 4, 64, 16)
    call = torch.compile(lambda q, k, v: getattr(aten, SDPA)(q, k, v, 0.0, True)[0], backend="aot_eager")
    assert torch.equal(call(*given), getattr(aten, SDPA)(*given, 0.0, True)[0])
    assert active.calls[SDPA] == [2, 0]


# --- What it leaves ---


def left(calls: list[tuple[str, dict[str, Any]]], name: str, *args: Any, **settings: Any) -> dict[str, Any]:
    """What the kernel before was given."""
    handle = flash.Activated("CPU")
    try:
        found = getattr(aten, name)(*args, **settings)
    finally:
        handle.remove()
    assert handle.calls[name] == [0, 1] and (found[0] == 7).all()
    ((called, given),) = calls
    assert called == name
    return given


Calls = list[tuple[str, dict[str, Any]]]


@pytest.mark.parametrize(
    ("dtype", "size", "settings"),
    [
        (BF16, 16, dict(dropout_p=0.5)),
        (BF16, 16, dict(return_debug_mask=True)),
        (BF16, 264, {}),
        (torch.float32, 16, {}),
    ],
)  # fmt: skip
def test_the_kernel_before_gets_dense_calls(before: Calls, dtype: Any, size: int, settings: dict[str, Any]) -> None:
    q, k, v = (x.detach().to(dtype) for x in operands(1, 2, 8, size))
    given = left(before, SDPA, q, k, v, scale=0.25, **settings)
    assert given["query"] is q and given["scale"] == 0.25
    assert all(given[name] == value for name, value in settings.items())


@pytest.mark.parametrize(
    "settings",
    [
        dict(seqused_k=torch.tensor([2, 2], dtype=torch.int32)),
        dict(alibi_slopes=torch.ones(4)),
        dict(window_size_left=3, window_size_right=0, cum_seq_k=torch.tensor([0, 3, 7], dtype=torch.int32)),
        dict(cum_seq_k=torch.tensor([0, 7], dtype=torch.int32)),
        dict(num_splits=1),
    ],
)  # fmt: skip
def test_the_kernel_before_gets_packed_calls(before: Calls, settings: dict[str, Any]) -> None:
    names = {a.name for a in THERE[FLASH]._schema.arguments}
    if not names.issuperset(settings):
        pytest.skip("torch has it from 2.13 on")
    given, starts, _ = packed_inputs([4, 3], [4, 3])
    arguments: dict[str, Any] = dict(zip(("query", "key", "value"), (x.detach() for x in given), strict=True))
    arguments |= dict(cum_seq_q=starts, cum_seq_k=starts, max_q=4, max_k=4, dropout_p=0.0, is_causal=False)
    arguments |= dict(return_debug_mask=False, **settings)
    found = left(before, FLASH, **arguments)
    assert all(found[name] is value or found[name] == value for name, value in arguments.items())


def test_more_queries_than_keys_below_a_window(before: Calls) -> None:
    q, k, v = (x.detach().transpose(1, 2) for x in operands(1, 2, 8, 16))
    left(before, FLASH, q, k[:, :5], v[:, :5], None, None, 8, 5, 0.0, True, False)


def test_nothing_to_compute(before: Calls) -> None:
    q, k, v = (x.detach() for x in operands(1, 2, 0, 16))
    left(before, SDPA, q, k, v)


def lacks(*args: Any) -> Any:
    raise errors.VariantNotFoundError("no loaded pack has kernels for these mods")


def test_kernels_that_no_pack_has(before: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are they looked for again."""
    monkeypatch.setattr(flash, "_lacking", {})
    monkeypatch.setattr(ops, "forward_on_cpu", lacks)
    q, k, v = (x.detach() for x in operands(1, 2, 8, 16))
    left(before, SDPA, q, k, v)
    before.clear()
    monkeypatch.setattr(ops, "forward_on_cpu", None)
    left(before, SDPA, q, k, v)


def test_a_gradient_that_no_pack_has(before: Calls, active: flash.Activated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_lacking", {})
    monkeypatch.setattr(ops, "backward_on_cpu", lacks)
    given = operands(1, 2, 8, 16)
    getattr(aten, SDPA)(*given)[0].sum().backward()
    (name, found), *others = before
    assert name == f"{SDPA}_backward" and not others
    assert found["query"].data_ptr() == given[0].data_ptr() and found["dropout_p"] == 0


def test_other_errors_are_not_hidden(active: flash.Activated, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(ops, "forward_on_cpu", fails)
    with pytest.raises(torch.OutOfMemoryError):
        getattr(aten, SDPA)(*operands(1, 2, 8, 16))


def test_no_kernel_before(active: flash.Activated) -> None:
    with pytest.raises(errors.UnsupportedError, match="dropout_p is not 0"):
        getattr(aten, SDPA)(*operands(1, 2, 8, 16), 0.5)
