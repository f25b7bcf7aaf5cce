"""Attention as it is written in a book, with a score for each pair, and the mods that the tests run through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from tk.flex import mods

INF = float("inf")


def mask_of(mask_mod: Any, B: int, H: int, M: int, N: int) -> Tensor:
    """bool [B, H, M, N]"""
    return torch_flex.create_mask(mask_mod, B, H, M, N, device="cpu")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse; key and value with a head for each group."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    B, H, M, D = query.shape
    N = key.shape[2]
    key, value = (x.repeat_interleave(H // key.shape[1], 1) for x in (key, value))
    s = query @ key.mT * (D**-0.5 if scale is None else scale)
    if mask is not None and s.requires_grad:  # autograd would multiply a mod's infinite derivative with 0
        s.register_hook(lambda grad: grad.masked_fill(~mask, 0))
    if score_mod is not None:
        positions = [torch.arange(n, dtype=torch.int32) for n in (B, H, M, N)]
        with TransformGetItemToIndex():
            s = torch_flex._vmap_for_bhqkv(score_mod, prefix=(0,))(s, *positions)
    if mask is not None:
        s = s.masked_fill(~mask, -INF)
    if sinks is not None:
        s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(B, H, M, 1)], -1)
    lse = torch.logsumexp(s, -1)
    weights = torch.exp(s - lse.where(lse > -INF, 0).unsqueeze(-1))[..., :N]
    return weights @ value, lse


def ids(B: int, S: int) -> Tensor:
    """Documents of lengths that differ from one batch entry to the next."""
    return torch.stack([torch.arange(S) // (7 + 5 * b) for b in range(B)]).int()


# By name: (B, H, M, N) -> a mod for these sizes.
MASKS: dict[str, Callable[[int, int, int, int], Any]] = {
    "none": lambda B, H, M, N: None,
    "causal": lambda B, H, M, N: mods.causal,
    "sliding_window": lambda B, H, M, N: mods.sliding_window(9),
    "dilated_window": lambda B, H, M, N: mods.dilated_window(4, 3),
    "prefix_lm": lambda B, H, M, N: mods.prefix_lm(11),
    "prefix_lm_by_entry": lambda B, H, M, N: mods.prefix_lm(torch.arange(B) * 5),
    "document": lambda B, H, M, N: mods.document(ids(B, max(M, N))),
    "document_of_all": lambda B, H, M, N: mods.document(ids(1, max(M, N))[0]),
    "natten_2d": lambda B, H, M, N: mods.natten_2d(-(-max(M, N) // 8), 8, 3),
    "causal_document": lambda B, H, M, N: mods.and_masks(mods.causal, mods.document(ids(B, max(M, N)))),
    "window_or_prefix": lambda B, H, M, N: mods.or_masks(mods.sliding_window(5), mods.prefix_lm(3)),
    "by_head": lambda B, H, M, N: lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % (h + 2) == 0,
}


def _table(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


SCORES: dict[str, Callable[[int, int, int, int], tuple[Any, list[Tensor]]]] = {
    "none": lambda B, H, M, N: (None, []),
    "alibi": lambda B, H, M, N: (mods.alibi(H), []),
    "alibi_slopes": lambda B, H, M, N: (mods.alibi(t := _table(H)), [t]),
    "relative_bias": lambda B, H, M, N: (mods.relative_bias(t := _table(H, 13), 6), [t]),
    "per_head_bias": lambda B, H, M, N: (mods.per_head_bias(t := _table(H)), [t]),
    "soft_cap": lambda B, H, M, N: (mods.soft_cap(2.0), []),
    "learned_bias_2": lambda B, H, M, N: (mods.learned_bias(t := _table(M, N)), [t]),
    "learned_bias_3": lambda B, H, M, N: (mods.learned_bias(t := _table(H, M, N)), [t]),
    "learned_bias_4": lambda B, H, M, N: (mods.learned_bias(t := _table(B, H, M, N)), [t]),
    "read_twice": lambda B, H, M, N: (_twice(t := _table(max(M, N))), [t]),
    "temperature": lambda B, H, M, N: (
        _temperature(t := torch.tensor(1.5, dtype=torch.float64, requires_grad=True)),
        [t],
    ),
}


def _twice(table: Tensor) -> Any:
    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * table[q_idx] + table[kv_idx]

    return mod


def _temperature(t: Tensor) -> Any:
    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score / t

    return mod
