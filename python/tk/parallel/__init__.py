"""tk's ops on tensors that are distributed over a device mesh: docs/parallel.md.

This module is what the ops ask of their arguments, and imports nothing of tk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_distributed(t: Any) -> TypeGuard[DTensor]:
    """A DTensor. By its name, since nobody may have imported its class."""
    cls = type(t)
    if cls is Tensor or cls is Parameter or cls.__name__ != "DTensor":
        return False
    return isinstance(t, Tensor) and cls.__module__.startswith("torch.distributed.")


def full(like: Tensor, shape: Sequence[int], value: float, dtype: torch.dtype | None = None) -> Tensor:
    """A new tensor for a call together with `like`: a DTensor beside one. (``like.new_full`` would make one for each
    element of a vmap's batch.)"""
    if is_distributed(like):
        return like.new_full(shape, value, dtype=dtype)
    return torch.full(shape, value, dtype=like.dtype if dtype is None else dtype, device=like.device)
