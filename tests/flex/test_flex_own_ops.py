"""What is handed to a pair's own op of a pack, with an op that stands for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tk
from tk.flex import mods, ops, trace


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
    return (q, k, v, pair.traced.text, *ops.by_kind(pair.traced, pair.values), *lists, *others, scale, 16, 16)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorded]:
    found = {"": Recorded(2), "_backward": Recorded(5)}
    monkeypatch.setattr(ops, "_packed", lambda traced, suffix: found[suffix])
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
    assert numbers == (0.5, 16, 16, everywhere, everywhere, 0, 0, 6, 7, 1, 0)


def test_bands_without_lists_and_a_negative_scale(own: dict[str, Recorded]) -> None:
    args = list(arguments(mods.soft_cap(3.0), None, scale=-0.5))
    args[3] = trace.pair(mods.soft_cap(3.0), mods.causal).traced.text
    ops.cuda(*args)
    assert own[""].calls[0][14:] == (-0.5, 3.0, 16, 16, 1 << 29, 0, 1, 0, 1, 1)


@pytest.mark.parametrize("of_captures", [True, False])
def test_backward(own: dict[str, Recorded], of_captures: bool) -> None:
    args = arguments(mods.per_head_bias(torch.randn(2)), None)
    out, lse = torch.zeros(1, 2, 32, 8), torch.zeros(1, 2, 32)
    found = ops.cuda_backward(out, lse, out, lse, *args, of_captures)
    assert len(found) == 3 + of_captures  # no sinks
    (call,) = own["_backward"].calls
    assert call[0] is out and call[1] is lse and call[16] is out and call[17] is lse
    assert call[-2:] == (int(of_captures), 0)
