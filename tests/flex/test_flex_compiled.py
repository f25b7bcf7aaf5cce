"""A model that calls tk.flex_attention stays one graph, and gives the same as it does eagerly."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import tk
from tk.flex import mods, ops
from tk.flex.tracing import trace
from tk.heuristics import described
from tk.ops import flex
from tk.ops.flex import Request

from . import dense

B, H, M, D = 2, 4, 40, 8


class Model(nn.Module):
    """A mask made in the call, a table with a gradient, sinks and lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(H, 11))
        self.sinks = nn.Parameter(torch.randn(H))
        self.window = 9

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, lengths: Tensor) -> Any:
        mask_mod = mods.and_masks(mods.sliding_window(self.window), mods.document(ids))
        mask = tk.flex.create_block_mask(mask_mod, B, None, M, M, "cpu", 16)
        bias = mods.relative_bias(self.table, 5)
        return tk.flex_attention(
            q, k, v, bias, mask, enable_gqa=True, return_lse=True, sinks=self.sinks, kv_lengths=lengths
        )


@pytest.fixture
def inputs() -> tuple[Tensor, ...]:
    q = torch.randn(B, H, M, D, requires_grad=True)
    k, v = (torch.randn(B, H // 2, M, D, requires_grad=True) for _ in range(2))
    return q, k, v, dense.ids(B, M), torch.tensor([33, 40], dtype=torch.int32)


def gradients(model: Any, module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    out, lse = model(*inputs)
    wanted = [*inputs[:3], *module.parameters()]
    return [out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), wanted)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile(backend: str, inputs: tuple[Tensor, ...]) -> None:
    torch._dynamo.reset()
    module = Model()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for found, expected in zip(gradients(compiled, module, inputs), gradients(module, module, inputs), strict=True):
        torch.testing.assert_close(found, expected)


def test_compile_refuses_masks_that_are_not_bool() -> None:
    torch._dynamo.reset()
    make = torch.compile(lambda: tk.flex.create_block_mask(lambda b, h, q, k: q - k, 1, 1, M, M, "cpu", 16))
    with pytest.raises(TypeError, match=r"returns int32; a mask must be bool"):
        make()


def test_compile_takes_masks_made_before(inputs: tuple[Tensor, ...]) -> None:
    """As an argument, and as a torch BlockMask."""
    from torch.nn.attention.flex_attention import create_block_mask

    torch._dynamo.reset()
    q, k, v, ids, _ = inputs
    ours = tk.flex.create_block_mask(mods.document(ids), B, None, M, M, "cpu", 16)
    theirs = create_block_mask(mods.document(ids), B, None, M, M, "cpu", 16)

    def run(q: Tensor, mask: Any, cap: float) -> Any:
        return tk.flex_attention(q, k, v, mods.soft_cap(cap), mask, enable_gqa=True)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for mask in (ours, theirs):
        torch.testing.assert_close(compiled(q, mask, 2.0), run(q, mask, 2.0))


def test_compile_takes_sizes_of_captured_tensors() -> None:
    def run(q: Tensor, table: Tensor) -> Tensor:
        def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + table[h, kv_idx.clamp(0, table.shape[1] - 1)] * table.shape[1]

        return tk.flex_attention(q, q, q, biased)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="eager", dynamic=True)
    q = torch.randn(1, H, M, D)
    for n in (9, 13, 17):
        table = torch.randn(H, n)
        torch.testing.assert_close(compiled(q, table), run(q, table))


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool, inputs: tuple[Tensor, ...]) -> None:
    module = Model()
    program = torch.export.export(module, inputs, strict=strict)
    calls = [n for n in program.graph.nodes if n.target is flex.forward]
    assert len(calls) == 1
    for found, expected in zip(program.module()(*inputs), module(*inputs), strict=True):
        torch.testing.assert_close(found, expected)
    # The mods are in the program as text: another process knows no function of them.
    trace._by_text.pop(next(a for a in calls[0].args if isinstance(a, str)))
    torch.testing.assert_close(program.module()(*inputs)[0], module(*inputs)[0])


def test_an_exported_program_runs_elsewhere(inputs: tuple[Tensor, ...], tmp_path: Path) -> None:
    """In a process that imports tk, and knows no mod."""
    module = Model()
    torch.export.save(torch.export.export(module, inputs), tmp_path / "program.pt2")
    torch.save((inputs, module(*inputs)[0]), tmp_path / "expected.pt")
    code = f"""
import sys, torch, tk
assert "tk.flex" not in sys.modules
program = torch.export.load({str(tmp_path / "program.pt2")!r}).module()
inputs, expected = torch.load({str(tmp_path / "expected.pt")!r})
torch.testing.assert_close(program(*inputs)[0], expected)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_checkpoint(inputs: tuple[Tensor, ...]) -> None:
    module = Model()

    def recomputed(*args: Tensor) -> Any:
        return checkpoint(module, *args, use_reentrant=False)

    for found, expected in zip(gradients(recomputed, module, inputs), gradients(module, module, inputs), strict=True):
        torch.testing.assert_close(found, expected)


def test_opcheck(inputs: tuple[Tensor, ...]) -> None:
    q, k, v, ids, lengths = inputs
    mask = tk.flex.create_block_mask(mods.document(ids), B, None, M, M, "cpu", 16)
    bias = torch.randn(H, requires_grad=True)
    pair = trace.pair(mods.per_head_bias(bias), mask.mask_mod)
    tensors, floats, ints = pair.traced.by_kind(pair.values)
    lists = mask.as_tuple()[2:10]
    arguments = (q, k, v, pair.traced.text, tensors, floats, ints, *lists, lengths, None, bias, 0.3, 16, 16)
    torch.library.opcheck(
        flex.forward, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static")
    )


LAYOUTS: dict[str, Callable[[int, int, int, int], Tensor]] = {
    "contiguous": lambda B, H, M, D: torch.randn(B, H, M, D),
    "heads beside each other": lambda B, H, M, D: torch.randn(B, M, H, D).transpose(1, 2),
    "a batch of any stride": lambda B, H, M, D: torch.randn(M * H * D).as_strided((1, H, M, D), (7, D, H * D, 1)),
    "expanded heads": lambda B, H, M, D: torch.randn(B, 1, M, D).expand(B, H, M, D),
    "expanded rows": lambda B, H, M, D: torch.randn(B, H, 1, D).expand(B, H, M, D),
    "transposed rows": lambda B, H, M, D: torch.randn(B, H, D, M).mT,
    "heads last": lambda B, H, M, D: torch.randn(B, M, D, H).permute(0, 3, 1, 2),
}


def layouts(results: Sequence[Tensor]) -> list[Any]:
    return [(x.shape, x.stride(), x.dtype) for x in results]


def fake_layouts(device: str, forward: tuple[Any, ...], backward: tuple[Any, ...]) -> list[Any]:
    def fake(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    with FakeTensorMode():
        forward, backward = tree_map_only(Tensor, fake, (forward, backward))
        return [layouts(flex.forward(*forward)), layouts(flex.backward(*backward))]


@pytest.mark.parametrize("rows", [40, 1])
@pytest.mark.parametrize("heads", [(4, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fakes_lay_results_out_as_the_ops_do(layout: str, heads: tuple[int, int], rows: int) -> None:
    """On CUDA as the pair's own op allocates them, on the CPU as the reference does."""
    q, k, v = (LAYOUTS[layout](B, n, rows, 64) for n in (heads[0], *[heads[1]] * 2))
    pair = trace.pair(None, mods.causal)
    given = (q, k, v, pair.traced.text, [], [], [], *[None] * 10, torch.randn(heads[0]), 0.3, 16, 16)
    results = flex.forward(*given)
    saved = (*map(torch.randn_like, results), *results)
    backward = (*saved, *given, "flex_attention", False)
    assert fake_layouts("cpu", given, backward) == [layouts(results), layouts(flex.backward(*backward))]
    on_cuda: list[Any] = []

    def allocate() -> None:
        request = Request(*given)
        on_cuda.append(layouts(ops.on_cuda(request)))
        on_cuda.append(layouts(ops.on_cuda_backward(*saved, request, False)))

    described.launches(described.gpu(90), allocate)
    assert fake_layouts("cuda", given, backward) == on_cuda


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gradients_of_captures_are_row_major(device: str) -> None:
    q = LAYOUTS["heads beside each other"](B, H, M, D)
    pair = trace.pair(mods.relative_bias(torch.randn(11, H).mT, 5), mods.causal)
    tensors, floats, ints = pair.traced.by_kind(pair.values)
    given = (q, q, q, pair.traced.text, tensors, floats, ints, *[None] * 11, 0.3, 16, 16)
    results = flex.forward(*given)
    backward = (*map(torch.randn_like, results), *results, *given, "flex_attention", True)
    found = fake_layouts(device, given, backward)[1][-1]
    assert found == layouts(flex.backward(*backward))[-1] == ((H, 11), (11, 1), torch.float32)


def test_autocast(inputs: tuple[Tensor, ...]) -> None:
    q, k, v = inputs[:3]
    with torch.autocast("cpu", torch.bfloat16):
        out = tk.flex_attention(q, k, v, enable_gqa=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, tk.flex_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), enable_gqa=True))


def test_a_copy_of_a_model_has_its_own_captures(inputs: tuple[Tensor, ...]) -> None:
    module = Model()
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.table.add_(torch.randn(H, 11))
    assert not torch.equal(module(*inputs)[0], other(*inputs)[0])


@pytest.mark.parametrize("kind", ["full", "causal", "bool", "bias"])
def test_sdpa_in_one_graph(kind: str) -> None:
    """Without an operator that records mods, which other traced code may not survive: they are tk's own."""
    q, k, v = (torch.randn(2, 4, 12, 16, requires_grad=True) for _ in range(3))
    mask = {"bool": torch.rand(12, 12) > 0.2, "bias": torch.randn(4, 12, 12, requires_grad=True)}.get(kind)
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph

    def attend(*args: Any) -> Tensor:
        return tk.sdpa(*args, attn_mask=mask, is_causal=kind == "causal")

    torch._dynamo.reset()
    wanted = [q, k, v, *([mask] if kind == "bias" else [])]
    found = torch.compile(attend, fullgraph=True, backend=backend)(q, k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=kind == "causal")
    torch.testing.assert_close(found, expected)
    assert "tk.flex_attention.default" in seen and "tk_flex_attention" not in seen
    weights = torch.randn_like(found)
    grads = (torch.autograd.grad((out * weights).sum(), wanted) for out in (found, expected))
    for ours, torchs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)
