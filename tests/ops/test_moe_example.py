"""examples/moe.py: a layer of experts as torch has it, and as one expert after the other computes it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from examples import example


@pytest.fixture(scope="module")
def moe() -> ModuleType:
    return example("moe")


@pytest.mark.parametrize(("tokens", "experts", "top_k"), ((64, 8, 2), (5, 16, 1)))
def test_as_torchs(moe: ModuleType, tokens: int, experts: int, top_k: int) -> None:
    assert moe.compare(tokens, experts, 32, 24, top_k) < 1e-2


def test_as_one_expert_after_the_other(moe: ModuleType) -> None:
    torch.manual_seed(0)
    layer = moe.MixtureOfExperts(16, 24, 4, 2)
    x = torch.randn(40, 16)
    weights, chosen = layer.router(x).softmax(-1).topk(2)
    expected = torch.zeros_like(x)
    for e in range(4):
        gate, up = (x @ layer.gate_up[e].t()).chunk(2, -1)
        of_expert = (F.silu(gate) * up) @ layer.down[e].t()
        expected = expected + of_expert * (weights * (chosen == e)).sum(1, keepdim=True)
    torch.testing.assert_close(layer(x), expected)


def test_the_script_says_how_far_it_is_from_torch(
    moe: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["moe.py", "--device", "cpu", "--tokens", "32", "--experts", "4"])
    moe.main()
    assert "32 tokens, 4 experts: results and gradients differ" in capsys.readouterr().out
