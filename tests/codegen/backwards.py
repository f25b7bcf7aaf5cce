"""What a backward is called with."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def arguments(grads: Sequence[Tensor], results: Sequence[Tensor]) -> dict[str, Tensor]:
    """By name: the gradients of the floating-point results, and all results."""
    named = {f"grad_{i}": g for i, g in enumerate(grads)}
    return named | {f"result_{i}": r.detach() for i, r in enumerate(results)}
