"""Attention of DTensors: each rank computes the batches and heads that it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

from tk import errors

__all__ = ["sdpa"]


def sdpa(
    of_rank: Callable[..., Tensor],
    query: DTensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    *settings: Any,
) -> Tensor:
    """``tk.sdpa`` of DTensors on one mesh. of_rank: that of each rank's part. Where query is sharded by a batch
    dimension or by heads, so are key, value and mask; they are redistributed where they are not. What is sharded by
    another dimension is gathered first, and so is what the ranks cannot share evenly. settings: the arguments behind
    attn_mask.

    Raises tk.UnsupportedError for a tensor beside them that is none, or is on another mesh."""
    mesh = query.device_mesh
    for name, x in (("key", key), ("value", value), ("attn_mask", attn_mask)):
        if x is not None and (not isinstance(x, DTensor) or x.device_mesh != mesh):
            raise errors.UnsupportedError(f"tk.sdpa: query is a DTensor on {mesh}, and {name} is not on it")
    operands: tuple[Tensor, ...] = (query, key, value)
    shards: list[Placement] = []
    parts = dict.fromkeys(range(query.dim()), 1)
    for size, placement in zip(mesh.shape, query.placements, strict=True):
        dim = placement.dim if isinstance(placement, Shard) else query.dim()
        is_shared = dim < query.dim() - 2 and all(x.dim() == query.dim() for x in operands)
        if is_shared and all(x.shape[dim] % (parts[dim] * size) == 0 for x in operands):
            parts[dim] *= size
            shards.append(Shard(dim))
        else:
            shards.append(Replicate())
    of_mask = None if attn_mask is None else [_of_mask(p, attn_mask, query) for p in shards]
    # A mask that all ranks have whole has the sum of their gradients.
    grads = of_mask and [Partial() if s.is_shard() and m.is_replicate() else m
                         for s, m in zip(shards, of_mask, strict=True)]  # fmt: skip
    run = local_map(
        lambda q, k, v, mask: of_rank(q, k, v, mask, *settings),
        out_placements=(shards,),
        in_placements=(shards, shards, shards, of_mask),
        in_grad_placements=(shards, shards, shards, grads),
        device_mesh=mesh,
        redistribute_inputs=True,
    )
    out: Tensor = run(query, key, value, attn_mask)
    return out


def _of_mask(placement: Placement, mask: Tensor, query: Tensor) -> Placement:
    """Its dimensions are query's last."""
    if not isinstance(placement, Shard):
        return placement
    dim = placement.dim + mask.dim() - query.dim()
    return Shard(dim) if dim >= 0 and mask.shape[dim] != 1 else Replicate()
