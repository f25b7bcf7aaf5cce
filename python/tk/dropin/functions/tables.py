"""What is read from tables: embeddings and rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tk.dropin.replacement import Replacement
from tk.dropin.target import Target, is_plain
from tk.functional import tables
from tk.parallel import is_distributed


def _embedding(target: Target) -> Callable[..., bool]:
    def embedding(
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> bool:
        return (
            max_norm is None
            and not scale_grad_by_freq
            and not sparse
            and (is_plain(input) or is_distributed(input))
            and input.dtype in (torch.int64, torch.int32)
            and target.takes(weight)
            and is_distributed(input) == is_distributed(weight)
            and not _is_sharded_by_rows(weight)
            and weight.dim() == 2
            and input.device == weight.device
            and target.is_fast("", weight.shape[1], weight)
        )

    return embedding


def _is_sharded_by_rows(weight: Tensor) -> bool:
    """Whether each GPU has some of the rows. torch's op looks up those alone and marks the others; tk's asks for
    all."""
    return is_distributed(weight) and any(p.is_shard(0) for p in weight.placements)


def _embedding_example(module: nn.Module, dtype: torch.dtype) -> tuple[Any, ...] | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    return torch.zeros(16, dtype=torch.int64, device=weight.device), weight


EMBEDDING = Replacement(
    op="embedding",
    originals=("torch.nn.functional.embedding",),
    takes=_embedding,
    call=tables.embedding,
    example=_embedding_example,
)


def _rope(target: Target) -> Callable[..., bool]:
    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> bool:
        """One table for the whole batch, of the dtype of q and k or of float32's precision with it."""
        if not target.takes(q, k) or not target.takes(q, cos, sin):
            return False
        if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
            return False
        is_one = cos.shape[0] == 1 and cos.shape[1:] == q.shape[2:] == k.shape[2:]
        is_alike = q.dtype is k.dtype and cos.dtype is q.dtype and sin.dtype is q.dtype
        if not is_one or not is_alike or cos.requires_grad or sin.requires_grad:
            return False
        return target.is_fast("", q.shape[-2], q, k)

    return rope


def _call_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    return tables.rope(q, cos[0], sin[0], interleaved), tables.rope(k, cos[0], sin[0], interleaved)


ROPE = Replacement(
    op="rope",
    originals=(),
    takes=_rope,
    call=_call_rope,
)
