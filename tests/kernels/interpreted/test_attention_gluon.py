"""Hopper's kernels for attention in the emulator of Gluon, against float64: plans, coordinates, barriers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from triton.experimental.gluon._runtime import GluonJITFunction

from tk.aot.expr import Problem, as_expr
from tk.aot.grid import enumerate_grid
from tk.aot.spec import Const, Family, Float, Int, Plan, Pointer, Scratch, TensorMap
from tk.flex.codegen import family
from tk.flex.tracing import trace
from tk.kernels.attention.problem import MAX_LENGTH

from . import attention_host, gluon_emulator
from .attention_host import Call, as_seen, block_lists, describe, reference
from .test_attention import Pair, alibi, causal, document, heads_differ, learned, qkv, soft_cap, window

WANTED = family.Wanted(("fp16",), ((64, 64), (128, 64)), ((128, 128),))
_families: dict[str, list[Family]] = {}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def families_of(pair: Pair) -> list[Family]:
    found = trace.pair(pair.score, pair.mask)
    if found.fingerprint not in _families:
        _families[found.fingerprint] = family.families(found.traced, WANTED)
    return _families[found.fingerprint]


# --- Running a plan ---


def memory(t: torch.Tensor) -> np.ndarray:
    """All elements from a tensor's address on."""
    size = t.untyped_storage().nbytes() // t.itemsize - t.storage_offset()
    return torch.as_strided(t, (size,), (1,)).numpy() if t.numel() else np.zeros(1, t.numpy().dtype)


def run(plan: Plan, problem: Problem, tensors: list[torch.Tensor], floats: list[float]) -> None:
    """As the engine does: Triton's kernels by Triton's interpreter, Gluon's by the emulator."""
    assert not plan.locals

    def number(x: object) -> int:
        return as_expr(x).evaluate(problem)  # type: ignore[arg-type]

    buffers = [torch.full((number(b.bytes),), 0 if b.zeroed else 255, dtype=torch.uint8) for b in plan.buffers]

    def value(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return type(arg)(*map(value, arg))
        match arg:
            case Const() if callable(arg.value):
                return gluon_emulator.function(arg.value)
            case Const():
                return arg.value
            case Int():
                return gluon_emulator.T(number(arg.value))
            case Float():
                return gluon_emulator.T(np.float32(floats[arg.index]))
            case Pointer():
                return gluon_emulator.Pointer(memory(attention_host.as_words(tensors[arg.tensor.index], arg.dtype)))
            case Scratch():
                x = buffers[arg.buffer][number(arg.offset) :]
                return gluon_emulator.Pointer(x.view(attention_host.TORCH[arg.dtype]).numpy())
            case TensorMap():
                t = tensors[arg.tensor.index]
                sizes, strides = ([number(s) for s in x] for x in (arg.sizes, arg.strides))
                assert all(s > 0 and s * t.itemsize % 16 == 0 for s in strides[:-1])
                flat = memory(t)
                view = np.lib.stride_tricks.as_strided(flat, sizes, [s * t.itemsize for s in strides])
                return gluon_emulator.Descriptor(view, arg.block)
        raise NotImplementedError(arg)

    for one in plan.launches:
        grid = tuple(number(g) for g in one.grid)
        if not number(one.when) or not all(grid):
            continue
        if isinstance(one.fn, GluonJITFunction):
            gluon_emulator.run(one.fn, {n: value(a) for n, a in one.args.items()}, grid[0])
        else:
            attention_host.launch_one(one, problem, tensors, floats, buffers)
    assert all(not b.any() for b, spec in zip(buffers, plan.buffers, strict=True) if spec.zeroed), "counters at 0"


def run_hopper(
    f: Family, named: dict[str, torch.Tensor], ints: list[int], floats: list[float]
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """(name, outputs) of every variant for Hopper that fits."""
    op = f.op
    inputs = [as_seen(named[p.name]) for p in op.params if p.kind == "tensor"]
    before = describe(op, [*inputs, *([None] * len(op.outputs))], ints)
    assert all(c.holds.evaluate(before) for c in op.checks)
    axes = {name: s.value.evaluate(before) for name, s in op.selectors.items()}
    for variant in enumerate_grid(f, 90).variants:
        plan = variant.plan
        if "hopper" not in variant.kernel.name or any(axes[n] not in v for n, v in plan.serves.items()):
            continue
        outputs = [attention_host._allocate(o, before) for o in op.outputs]
        tensors = [*inputs, *map(as_seen, outputs)]
        seen = describe(op, tensors, ints)
        if all(c.holds.evaluate(seen) for c in plan.constraints):
            assert plan.cost.evaluate(seen) > 0
            run(plan, seen, tensors, floats)
            yield variant.name, outputs


# --- Forward ---


SHAPES = {  # B, H, H_kv, M, N, D, DV
    "square": (1, 2, 2, 256, 256, 64, 64),
    "grouped": (2, 4, 2, 200, 330, 64, 64),
    "odd": (1, 2, 1, 129, 70, 48, 64),
    "other_values": (1, 1, 1, 100, 300, 128, 64),
}


def check_forward(pair: Pair, call: Call) -> None:
    call.captured = pair.captured
    expected, expected_lse = reference(call, pair.score, pair.mask)
    f = families_of(pair)[0]
    names = []
    for name, (out, lse) in run_hopper(f, call.tensors(), call.ints(f.op), call.floats(f.op)):
        torch.testing.assert_close(out.double(), expected, atol=3e-3, rtol=3e-3, msg=lambda m: f"{name}: {m}")  # noqa: B023
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=1e-3, msg=lambda m: f"{name}: {m}")  # noqa: B023
        names.append(name)
    assert names


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_forward(shape: tuple[int, ...]) -> None:
    check_forward(Pair(), Call(*qkv(*shape, torch.float16)))
    check_forward(Pair(mask=causal), Call(*qkv(*shape, torch.float16), band=(MAX_LENGTH, 0, 1)))


def test_forward_with_lists_lengths_sinks_and_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one program, which uses every buffer again and again."""
    monkeypatch.setitem(attention_host.SMALL_GPU, "sm_count", 1)
    ids = torch.tensor([[0] * 100 + [1] * 80 + [2] * 120, [3] * 250 + [4] * 50])
    pair = Pair(alibi(torch.rand(2)), document(ids))
    call = Call(*qkv(2, 2, 1, 300, 300, 64, 64, torch.float16), q_block=384, kv_block=128)
    call.lists = block_lists(pair.dense(2, 2, 300, 300), 384, 128)
    check_forward(pair, call)
    call = Call(*qkv(2, 2, 1, 300, 300, 64, 64, torch.float16), sinks=torch.randn(2))
    call.kv_lengths = torch.tensor([0, 170], dtype=torch.int32)
    call.max_scores = 1
    check_forward(Pair(mask=causal), call)


@pytest.mark.parametrize("full", [[1, 0], [2, 0, 1]], ids=["inside", "past_the_end"])
def test_full_blocks(full: list[int]) -> None:
    """What the mask says of them does not count, also where keys do not fill the last, so that bounds are checked."""
    pair = Pair(mask=lambda b, h, q, kv: kv >= 256)
    call = Call(*qkv(1, 2, 1, 200, 300, 64, 64, torch.float16), q_block=384, kv_block=128)
    call.lists = block_lists(pair.dense(1, 1, 200, 300), 384, 128)
    for name, blocks in (("kv", [x for x in range(3) if x not in full]), ("full_kv", full)):
        by_key = torch.tensor([[[int(x in blocks) for x in range(3)]]], dtype=torch.int32)
        call.lists[name.replace("kv", "q") + "_num_blocks"] = by_key
        call.lists[name.replace("kv", "q") + "_indices"] = torch.zeros(1, 1, 3, 1, dtype=torch.int32)
        call.lists[f"{name}_num_blocks"] = torch.full((1, 1, 1), len(blocks), dtype=torch.int32)
        rest = [x for x in range(3) if x not in blocks]
        call.lists[f"{name}_indices"] = torch.tensor([[[blocks + rest]]], dtype=torch.int32)
    exact = Call(**{**vars(call), **{n: x.double().requires_grad_() for n, x in qkv_of(call).items()}})
    out, lse = reference(exact, None, None)
    grad = torch.randn(out.shape).half()
    grads = torch.autograd.grad(out, list(qkv_of(exact).values()), grad.double())
    named = call.tensors() | dict(grad_0=grad, grad_1=torch.zeros(lse.shape), result_0=out.half(), result_1=lse.float())
    for f, expected in zip(families_of(pair), ((out,), grads), strict=True):
        results = list(run_hopper(f, named, call.ints(f.op), call.floats(f.op)))
        assert results
        for name, found in results:
            for x, e in zip(found, expected, strict=False):
                torch.testing.assert_close(x.double(), e.detach(), atol=6e-3, rtol=6e-3, msg=lambda m: f"{name}: {m}")  # noqa: B023


@pytest.mark.parametrize("mask", [None, causal])
def test_keys_past_a_length_may_be_no_numbers(mask: Any) -> None:
    """Of recycled memory. A weight of 0 does not hide them."""
    lengths = torch.tensor([0, 61, 128, 299], dtype=torch.int32)
    for score in (None, soft_cap(2.0)):
        call = Call(*qkv(4, 2, 1, 130, 300, 64, 64, torch.float16), kv_lengths=lengths)
        pair = Pair(score, mask)
        f, call.captured = families_of(pair)[0], pair.captured
        if mask is not None:
            call.q_block, call.kv_block = 384, 128
            call.lists = block_lists(pair.dense(4, 2, 130, 300), 384, 128)
        expected, expected_lse = reference(call, score, mask)
        for b, length in enumerate(lengths):
            call.key[b, :, length:] = float("nan")
            call.value[b, :, length:] = float("inf")
        count = 0
        for name, (out, lse) in run_hopper(f, call.tensors(), call.ints(f.op), call.floats(f.op)):
            torch.testing.assert_close(out.double(), expected, atol=3e-3, rtol=3e-3, msg=lambda m: f"{name}: {m}")  # noqa: B023
            torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=1e-3)
            count += 1
        assert count


# --- Gradients ---


def qkv_of(call: Call) -> dict[str, torch.Tensor]:
    return dict(query=call.query, key=call.key, value=call.value)


def check_backward(make: Any, captured: list[torch.Tensor], call: Call, at_least: int = 1) -> None:
    """make: the pair of mods from captured tensors, whose own gradients are not wanted."""
    pair = make(*captured)
    call.captured = pair.captured
    given = dict(query=call.query, key=call.key, value=call.value)
    given |= {} if call.sinks is None else {"sinks": call.sinks}
    wide = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    exact_call = Call(**{**vars(call), **wide})
    out, lse = reference(exact_call, pair.score, pair.mask)
    grad_out = torch.randn(out.shape).to(call.query.dtype)
    grad_lse = torch.where(lse.detach() == float("-inf"), 0.0, torch.randn(lse.shape)).float()
    seen = torch.where(lse == float("-inf"), 0.0, lse)
    expected = torch.autograd.grad([out, seen], list(wide.values()), [grad_out.double(), grad_lse.double()])
    f = families_of(pair)[1]
    named = call.tensors() | dict(grad_0=grad_out, grad_1=grad_lse, result_0=out.detach().to(call.query.dtype),
                                  result_1=lse.detach().float())  # fmt: skip
    count = 0
    for name, grads in run_hopper(f, named, call.ints(f.op), call.floats(f.op)):
        for what, g, e in zip(wide, grads, expected, strict=False):
            scale = max(1.0, e.abs().max().item())
            torch.testing.assert_close(g.double(), e, atol=6e-3 * scale, rtol=6e-3,
                                       msg=lambda m: f"{name}, gradient of {what}: {m}")  # noqa: B023  # fmt: skip
        count += 1
    assert count >= at_least


@pytest.mark.drawn
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("how", ["none", "band", "lists"])
def test_backward(shape: tuple[int, ...], how: str) -> None:
    call = Call(*qkv(*shape, torch.float16))
    pair = Pair(mask=None if how == "none" else causal)
    if how == "band":
        call.band = (MAX_LENGTH, 0, 1)
    elif how == "lists":
        B, H, _, M, N = shape[:5]
        call.q_block, call.kv_block = 256, 128
        call.lists = block_lists(pair.dense(B, H, M, N), call.q_block, call.kv_block)
    check_backward(lambda: pair, [], call)


MASKS = {
    "window": window(40),
    "document": document(torch.tensor([[0] * 100 + [1] * 80 + [2] * 120, [3] * 250 + [4] * 50])),
    "document_of_32_bits": document(torch.tensor([[0] * 100 + [-1] * 80 + [2] * 120, [3] * 250 + [4] * 50]).int()),
    "heads_differ": heads_differ,
    "nothing": lambda b, h, q, kv: (q < 20) & (kv < 130) & (kv >= 128),
}


@pytest.mark.drawn
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("lists", [False, True])
def test_masks(mask: Any, lists: bool) -> None:
    pair = Pair(mask=mask)
    call = Call(*qkv(2, 2, 1, 200, 300, 64, 64, torch.float16))
    if lists:
        call.lists = block_lists(pair.dense(2, 2, 200, 300), 128, 128)
    check_backward(lambda: pair, [], call)


@pytest.mark.parametrize("mask", [None, causal])
def test_scores(mask: Any) -> None:
    call = Call(*qkv(1, 4, 2, 130, 150, 64, 64, torch.float16))
    call.sinks = torch.randn(4)
    check_backward(lambda slopes: Pair(alibi(slopes), mask), [torch.rand(4)], call)
    check_backward(lambda: Pair(soft_cap(3.0), mask), [], call)
    # No number outside of its bounds, where the last tile reads it.
    check_backward(lambda table: Pair(learned(table), mask), [torch.randn(4, 130, 150).half()], call)


def test_layouts() -> None:
    """Heads inside of rows, and K and V of one batch entry for all."""
    q, k, v = (torch.randn(2, 150, 3, 64).transpose(1, 2).half() for _ in range(3))
    check_backward(lambda: Pair(mask=causal), [], Call(q, k, v))
    check_backward(lambda: Pair(), [], Call(*qkv(3, 2, 1, 140, 130, 64, 64, torch.float16, B_kv=1)))


def test_one_program_for_all_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer is used again and again."""
    monkeypatch.setitem(attention_host.SMALL_GPU, "sm_count", 1)
    for pair, band in ((Pair(), (MAX_LENGTH, MAX_LENGTH, 1)), (Pair(mask=causal), (MAX_LENGTH, 0, 1))):
        call = Call(*qkv(1, 4, 2, 400, 420, 64, 64, torch.float16), band=band)
        check_forward(pair, call)
        check_backward(lambda: pair, [], call)  # noqa: B023


def test_whole_tiles_past_the_end() -> None:
    """Of a block that is listed as full and larger than the sequence, where lse is so low that weights of nothing would
    not be finite."""
    q, k, v = qkv(1, 2, 2, 100, 140, 128, 64, torch.float16)
    call = Call(q / 16 + 4, k / 16 - 4, v)
    call.q_block, call.kv_block = 256, 128
    pair = Pair(mask=lambda b, h, q, kv: q + kv >= 0)
    call.lists = block_lists(pair.dense(1, 2, 100, 140), call.q_block, call.kv_block)
    check_backward(lambda: pair, [], call)
