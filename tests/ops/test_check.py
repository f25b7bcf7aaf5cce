"""tk.check and tk.explain(arch=…): what would run on a GPU that this machine need not have."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

import tk
from tk.cli import _calls
from tk.heuristics import described

LOOK_INSIDE = ("pack_int4", "int4_from_torch")


def meta(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(meta(1024, 1024))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = tk.linear(tk.softmax(x, -1), self.weight)
        return x


def test_every_call_of_a_model_is_listed_once() -> None:
    with tk.check(90) as found:
        out = Block()(meta(2, 64, 1024))
    assert out.shape == (2, 64, 1024)
    assert [(call.op, call.count, call.kernel != "") for call in found.calls] == [
        ("softmax", 3, True),
        ("linear", 3, True),
    ]
    assert not found.missing and all(call.us > 0 for call in found.calls)
    text = str(found)
    assert text.startswith("On an H100 (sm_90):") and "2x64x1024 1024x1024" in text


def test_backward_is_seen() -> None:
    with tk.check() as found:
        Block()(meta(2, 64, 1024)).sum().backward()
    assert {"softmax_backward", "mm"} <= {call.op for call in found.calls}


def test_mods_that_no_pack_has_come_with_what_builds_them() -> None:
    q = meta(1, 2, 128, 64)
    with tk.check() as found:
        tk.flex_attention(q, q, q, lambda score, b, h, i, j: score * 0.125 + i)
    (call,) = found.missing
    assert "tk build mods.py" in call.problem and "tk.flex.register(" in call.problem
    assert call.problem in str(found)


def test_what_several_calls_lack_is_told_once() -> None:
    def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score * 0.25 + i

    with tk.check() as found:
        for rows in (128, 256):
            q = meta(1, 2, rows, 64)
            tk.flex_attention(q, q, q, mod)
    assert len(found.missing) == 2 and str(found).count("tk.flex.register(") == 1
    assert f"{found.missing[0].tensors} and 1 more: " in str(found)


def test_dtypes_are_told() -> None:
    with tk.check() as found:
        tk.softmax(meta(4, 64), -1)
        tk.softmax(meta(4, 64, dtype=torch.float32), -1)
    assert [call.dtype for call in found.calls] == ["bf16", "fp32"]
    assert " bf16 " in str(found) and " fp32 " in str(found)


def test_nothing_of_tks() -> None:
    with tk.check() as found:
        torch.ones(3) + 1
    assert not found.calls and str(found) == "no op of tk's"


def test_other_architectures_are_refused() -> None:
    for arch in (75, "sm_91", "hopper"):
        with pytest.raises(ValueError, match=r"GPUs are described of 80 \(A100\), 90 \(H100\)"), tk.check(arch):
            pass
        with pytest.raises(ValueError, match="GPUs are described of"):
            tk.explain("mm", meta(8, 8), meta(8, 8), arch=arch)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_explain_of_a_described_gpu(device: str) -> None:
    x = torch.zeros(512, 4096, dtype=torch.bfloat16, device=device)
    for arch, path in ((90, "sm90"), ("sm_80", "sm80")):
        found = tk.explain("softmax", x, -1, arch=arch)
        assert found.runs and found.choice is not None and path in found.choice.pack_path
    assert tk.explain("softmax", x, -1).choice is None  # as it is called


def test_alignment_is_that_of_the_tensor() -> None:
    x = torch.zeros(512 * 4096 + 1, dtype=torch.bfloat16, device="meta")
    aligned, shifted = (x[at : at + 512 * 4096].view(512, 4096) for at in (0, 1))
    assert (
        tk.explain("softmax", aligned, -1, arch=90).candidates != tk.explain("softmax", shifted, -1, arch=90).candidates
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_function_can_be_asked_about(dtype: torch.dtype) -> None:
    """The sample has no kernel for most of them; what is said is about kernels, and nothing is computed."""
    for call in _calls.calls("cpu", dtype):
        if call.name in LOOK_INSIDE:
            with pytest.raises(tk.UnsupportedError, match="looks into its arguments"):
                tk.explain(call.name, *call.args, arch=90, **call.kwargs)
            continue
        found = tk.explain(call.name, *call.args, arch=90, **call.kwargs)
        assert found.choice is not None or found.reason, call.name


def test_each_thread_describes_to_its_own() -> None:
    """A check is of the thread that asks, and over when it ends."""
    with tk.check(80) as outer:
        with tk.check(90) as inner:
            tk.mm(meta(64, 64), meta(64, 64))
        tk.mm(meta(64, 64), meta(64, 64))
    assert (len(inner.calls), len(outer.calls)) == (1, 1) and outer.calls[0].count == 2
    assert inspect.getattr_static(described._at_work, "gpu", None) is None
