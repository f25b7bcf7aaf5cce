"""The call inside of a graph of torch.compile.

There the mods are functions that the compiler sees through, and not objects whose closures can be looked into. So it is
asked to record them, with what they capture as inputs, in the way it does for torch's own flex_attention. The operator
that stands for this lives only until the graph is run or traced further: it then traces the recorded mods as usual and
calls ``torch.ops.tk.flex_attention``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

from tk.flex.checks import moved
from tk.flex.tracing import trace
from tk.ops import flex
from tk.ops.flex import Request

_NAME = "tk_flex_attention"


class _Recorded(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__(_NAME)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Callable[..., Tensor],
        block_mask: tuple[Any, ...],
        scale: float,
        kernel_options: dict[str, Any],
        score_captures: tuple[Any, ...] = (),
        mask_captures: tuple[Any, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        *others, q_block, kv_block, mask_mod = block_mask
        mods = _bound(score_mod, score_captures), _bound(mask_mod, mask_captures)
        pair = trace.pair(*mods, others[0] is not None)
        tensors, floats, ints = pair.traced.by_kind(pair.values)
        given: list[Any] = [moved(tensors, query), floats, ints, *others, scale, q_block, kv_block]
        return flex.forward(*Request(query, key, value, pair.traced.text, *given, **kernel_options))


_recorded = _Recorded()


def call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    mask_mod: Callable[..., Tensor] | None,
    others: tuple[Any, ...],
    scale: float,
    block: tuple[int, int],
    max_scores: bool,
    tile: str,
) -> tuple[Tensor, Tensor]:
    """others: the block lists, kv_lengths, page_table and sinks."""
    _register()
    score_mod = _same_score if score_mod is None else score_mod
    mask_mod = _everything if mask_mod is None else mask_mod
    options = {"max_scores": max_scores, "tile": tile} if max_scores or tile else {}
    return _recorded(query, key, value, score_mod, (*others, *block, mask_mod), scale, options)


def _same_score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score


def _everything(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.ones_like(b, dtype=torch.bool)


def _bound(mod: Callable[..., Tensor], captures: tuple[Any, ...]) -> Callable[..., Tensor]:
    def bound(*args: Tensor) -> Tensor:
        return mod(*args, *captures)

    return bound


def _register() -> None:
    """Tells the compiler, which is running, how to record the operator."""
    from torch._dynamo.variables import higher_order_ops as known

    known._hop_name_to_variable_class.setdefault(_NAME, known.FlexAttentionHigherOrderVariable)


_register._dynamo_marked_constant = True  # type: ignore[attr-defined]  # run, not traced
