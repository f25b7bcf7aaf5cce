"""What is handed to a pair's own op of a pack, with an op that stands for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import tk
from tk.flex import autograd, mods, ops, own_ops
from tk.flex.tracing import trace
from tk.ops import flex


class Recorded:
    def __init__(self, n_results: int):
        self.n_results = n_results
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        self.calls.append(args)
        return tuple(torch.zeros(1) for _ in range(self.n_results))


def arguments(score_mod: Any, mask: Any, scale: float = 0.5, **optional: Tensor) -> tuple[Any, ...]:
    q, k, v = (torch.randn(1, 2, 32, 8) for _ in range(3))
    pair = trace.pair(score_mod, mask and mask.mask_mod)
    lists = mask.as_tuple()[2:10] if mask else (None,) * 8
    others = [optional.get(name) for name in ("kv_lengths", "page_table", "sinks")]
    return (q, k, v, pair.traced.text, *pair.traced.by_kind(pair.values), *lists, *others, scale, 16, 16)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorded]:
    found = {"": Recorded(2), "_backward": Recorded(5)}
    monkeypatch.setattr(own_ops, "_packed", lambda traced, suffix: found[suffix])
    monkeypatch.setattr(own_ops, "_matched", {})
    return found


def test_forward(own: dict[str, Recorded]) -> None:
    table, sinks = torch.randn(2, 13), torch.randn(2)
    mask = tk.flex.create_block_mask(mods.sliding_window(7), 1, 1, 32, 32, "cpu", 16)
    args = arguments(mods.relative_bias(table, 6), mask, sinks=sinks)
    ops.cuda(*args)
    (call,) = own[""].calls
    tensors, numbers = call[:15], call[15:]
    assert tensors[3:11] == mask.as_tuple()[2:10] and tensors[13] is sinks and tensors[14] is table
    assert [tuple(x.shape) for x in tensors[11:13]] == [(0,), (0, 0)] and tensors[11].dtype == torch.int32
    everywhere = 1 << 29
    assert numbers == (0.5, 16, 16, everywhere, everywhere, 0, 0, -6, 6, 6, 1, 0, 0)


@pytest.mark.parametrize("suffix", ["", "_backward"])
def test_each_argument_stands_where_the_packs_op_has_its_name(suffix: str, own: dict[str, Recorded]) -> None:
    """The kernels' records say the order once more (tk.kernels.attention.problem), from which a pack is made."""
    sinks = torch.randn(2)
    mask = tk.flex.create_block_mask(mods.causal, 1, 1, 32, 32, "cpu", 16)
    request = flex.Request(*arguments(mods.soft_cap(3.0), mask, scale=-0.5, sinks=sinks), max_scores=True)
    request = request._replace(kv_block=32)
    saved = {name: torch.zeros(1) for name in ("grad_0", "grad_1", "result_0", "result_1")} if suffix else {}
    if suffix:
        first, second = list(saved.values())[:2], list(saved.values())[2:]
        ops.cuda_backward(*first, *second, *request.for_gradient, False)
    else:
        ops.cuda(*request)
    (call,) = own[suffix].calls
    op = getattr(torch.ops.tk, own_ops.op_name(trace.parse(request.pair), suffix)).default
    found = dict(zip([x.name for x in op._schema.arguments], call, strict=False))  # without config and mode
    given = {name: x for name, x in request._asdict().items() if isinstance(x, Tensor)}
    assert all(found[name] is x for name, x in {**given, **saved}.items())
    assert {name: x for name, x in found.items() if not isinstance(x, Tensor)} == {
        "scale": -0.5, "c0": 3.0, "q_block": 16, "kv_block": 32, "band_left": 1 << 29, "band_right": 1 << 29,
        "band_exact": 0, "precision": 0, "grad_captures": int(not suffix), "negative_scale": 1,
        "max_scores": int(not suffix),
    }  # fmt: skip


def test_bands_without_lists_and_a_negative_scale(own: dict[str, Recorded]) -> None:
    args = list(arguments(mods.soft_cap(3.0), None, scale=-0.5))
    args[3] = trace.pair(mods.soft_cap(3.0), mods.causal).traced.text
    ops.cuda(*args)
    assert own[""].calls[0][14:] == (-0.5, 3.0, 16, 16, 1 << 29, 0, 1, 0, 1, 1, 0)


@pytest.mark.parametrize("of_captures", [True, False])
def test_backward(own: dict[str, Recorded], of_captures: bool) -> None:
    args = arguments(mods.per_head_bias(torch.randn(2)), None)
    out, lse = torch.zeros(1, 2, 32, 8), torch.zeros(1, 2, 32)
    found = ops.cuda_backward(out, lse, out, lse, *args, of_captures)
    assert len(found) == 3 + of_captures  # no sinks
    (call,) = own["_backward"].calls
    assert call[0] is out and call[1] is lse and call[16] is out and call[17] is lse
    assert call[-3:] == (int(of_captures), 0, 0)


# --- A pair without kernels for the call's operands ---


class Lacking(Recorded):
    """A pair's op without kernels for fp32, which says so as a kernel does."""

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        super().__call__(*args)
        raise ValueError("tk.flex_x: query must be of dtype bf16; query is float32[1, 2, 32, 8]")


def window_of_seven(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 7)


BF16 = own_ops._Kernels(torch.bfloat16, (64, 64), False)
FP32 = own_ops._Kernels(torch.float32, (16, 16), False)
FP32_WIDE = own_ops._Kernels(torch.float32, (32, 32), True)


@pytest.fixture
def two_pairs(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Recorded], dict[str, list[own_ops._Kernels]]]:
    """A pack has the window of seven for bf16, and another one windows of every size. By fingerprint their ops, and by
    op what they have kernels for."""
    exact, general = (trace.pair(None, m).traced for m in (window_of_seven, mods.sliding_window(3)))
    found: dict[str, Recorded] = {exact.fingerprint: Lacking(2), general.fingerprint: Recorded(2)}
    held = {own_ops.op_name(exact): [BF16], own_ops.op_name(general): [FP32]}
    monkeypatch.setattr(own_ops, "_known", lambda: [exact, general])
    monkeypatch.setattr(own_ops, "_packed", lambda traced, suffix: found.get(traced.fingerprint))
    monkeypatch.setattr(own_ops, "_held", lambda op: held[op])
    for name in ("_matched", "_found", "_aside"):
        monkeypatch.setattr(own_ops, name, {})
    return found, held


def test_a_more_general_pair_serves_what_the_pair_lacks(two_pairs: Any) -> None:
    (exact, general), _ = two_pairs[0].values(), two_pairs[1]
    args = arguments(None, None)
    args = (*args[:3], trace.pair(None, window_of_seven).traced.text, *args[4:])
    for n in (1, 2):
        ops.cuda(*args)
        assert len(exact.calls) == 1 and len(general.calls) == n  # it is asked once
    assert 6 in general.calls[0][14:]


def test_what_no_pair_has_is_said_of_all_that_serve(two_pairs: Any) -> None:
    (exact, general), held = two_pairs[0].values(), two_pairs[1]
    for op in held:
        held[op] = [BF16] if held[op] == [BF16] else [FP32_WIDE]
    args = arguments(None, None)
    args = (*args[:3], trace.pair(None, window_of_seven).traced.text, *args[4:])
    with pytest.raises(tk.VariantNotFoundError) as caught:
        ops.cuda(*args)
    said = str(caught.value)
    assert "for bfloat16 with head sizes up to 64; float32 with head size 32, and the call is of float32 with" in said
    assert "tk build mods.py -o mods.tkpack" in said and "head_dims=(8,)" in said and "dtypes=(torch.float32,)" in said
    assert len(exact.calls) == 1 and not general.calls


# --- Without the dispatcher ---


class Subclass(Tensor):
    pass


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def plain(q: Tensor, bias: Tensor) -> Any:
    mask = tk.flex.create_block_mask(mods.sliding_window(7), 1, 1, 32, 32, "cpu", 16)
    return tk.flex_attention(q, q, q, mods.per_head_bias(bias), mask, sinks=torch.ones(2))


def under_a_mode(q: Tensor, bias: Tensor) -> Any:
    with Mode():
        return plain(q, bias)


def with_a_tangent(q: Tensor, bias: Tensor) -> Any:
    with forward_ad.dual_level():
        return plain(q, bias)


def profiled(q: Tensor, bias: Tensor) -> Any:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        return plain(q, bias)


CALLS = {
    "plain": (plain, True), "mode": (under_a_mode, False), "tangents": (with_a_tangent, False),
    "profiler": (profiled, False),
    "subclass": (lambda q, bias: plain(q.as_subclass(Subclass), bias), False),
    "captured subclass": (lambda q, bias: plain(q, bias.as_subclass(Subclass)), False),
    "gradient": (lambda q, bias: plain(q.requires_grad_(), bias), True),
    "captured gradient": (lambda q, bias: plain(q, bias.requires_grad_()), True),
    "no_grad": (lambda q, bias: torch.no_grad()(plain)(q.requires_grad_(), bias), True),
    "vmap": (lambda q, bias: torch.vmap(lambda x: (plain(q, bias), x)[1])(torch.ones(2)), False),
    "parameter": (lambda q, bias: plain(torch.nn.Parameter(q, requires_grad=False), bias), True),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_dispatcher_is_passed_where_nothing_is_in_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, is_direct = CALLS[name]
    seen: list[str] = []

    def kernel(request: flex.Request) -> Any:
        seen.append("kernel")
        return ops.cpu(*request)

    def op(*args: Any) -> Any:
        seen.append("op")
        return torch.zeros(1, 2, 32, 8), torch.zeros(1, 2, 32)

    monkeypatch.setattr(autograd, "_has_kernels", lambda query: True)
    monkeypatch.setattr(ops, "on_cuda", kernel)
    monkeypatch.setattr(flex, "forward", op)
    q, bias = torch.randn(1, 2, 32, 8), torch.randn(2)
    found = call(q, bias)
    assert seen == ["kernel" if is_direct else "op"]
    monkeypatch.undo()
    if is_direct:
        expected = plain(q, bias) if name != "no_grad" else plain(q.detach(), bias)
        torch.testing.assert_close(found, expected)
        assert found.requires_grad == expected.requires_grad
    if is_direct and found.requires_grad:
        wanted = [x for x in (q, bias) if x.requires_grad]
        grads = [torch.autograd.grad(out.square().sum(), wanted) for out in (found, expected)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("way", ["plain", "mode", "profiler", "create_graph", "subclass"])
def test_gradients_pass_the_dispatcher_likewise(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, bias = torch.randn(1, 2, 32, 8, requires_grad=True), torch.randn(2, requires_grad=True)
    out = plain(q, bias)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, bias), grad, retain_graph=True)
    seen: list[str] = []
    monkeypatch.setattr(autograd, "_has_kernels", lambda query: True)

    def kernel(*args: Any) -> list[Tensor]:
        *grads, request, of_captures = args
        seen.append("kernel")
        return ops.cpu_backward(*grads, *request.for_gradient, of_captures)

    monkeypatch.setattr(ops, "on_cuda_backward", kernel)
    monkeypatch.setattr(flex, "backward", lambda *args: seen.append("op") or ops.cpu_backward(*args))
    if way == "mode":
        with Mode():
            found = torch.autograd.grad(out, (q, bias), grad)
    elif way == "profiler":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            found = torch.autograd.grad(out, (q, bias), grad)
    else:
        grad = grad.as_subclass(Subclass) if way == "subclass" else grad
        found = torch.autograd.grad(out, (q, bias), grad, create_graph=way == "create_graph")
    assert seen == ["kernel" if way == "plain" else "op"]
    torch.testing.assert_close([x.as_subclass(torch.Tensor) for x in found], list(expected))


def test_the_op_calls_the_kernel_below_autograd(own: dict[str, Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a gradient is at stake, which then goes through the op of the gradient."""
    monkeypatch.setattr(autograd, "_has_kernels", lambda query: True)
    args = arguments(mods.per_head_bias(torch.randn(2)), None)
    assert not flex.forward(*args)[0].requires_grad
    args[0].requires_grad_()
    out, _ = flex.forward(*args)
    assert len(own[""].calls) == 2 and out.requires_grad
    one, other = own[""].calls
    assert all(x is y or x == y for x, y in zip(one, other, strict=True))


# --- Numbers spelled out ---


def test_a_matched_pair_is_sought_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given = trace.pair(None, lambda b, h, q, kv: (q >= kv) & (q - kv < 23)).traced
    general = trace.pair(None, mods.sliding_window(3)).traced
    sought: list[Any] = []
    op = object()
    monkeypatch.setattr(own_ops, "_known", lambda: sought.append(1) or [general])
    monkeypatch.setattr(own_ops, "_packed", lambda traced, suffix: op if traced is general else None)
    found = [own_ops.find(given, [], [], []) for _ in range(3)]
    assert [(f.op, f.ints) for f in found] == [(op, [22])] * 3
    assert len(sought) == 1
    n_loaded = own_ops.register.count()
    monkeypatch.setattr(own_ops.register, "count", lambda: n_loaded + 1)  # a pack was loaded, which may have the pair
    monkeypatch.setattr(own_ops, "_packed", lambda traced, suffix: "exact" if traced is given else None)
    assert own_ops.find(given, [], [], []) == own_ops.OwnOp("exact", [], [])
