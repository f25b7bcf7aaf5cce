"""``x[:, n // 2]`` where the place is worked out from sizes: Python's indexing would make it the number that the size
happens to be while the function is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def getitem(x: Tensor, index: Any) -> Any:
    """Tensor.__getitem__."""
    x, rest = _selected(x, index)
    return Tensor.__getitem__(x, rest)


def setitem(x: Tensor, index: Any, value: Any) -> None:
    """Tensor.__setitem__."""
    x, rest = _selected(x, index)
    Tensor.__setitem__(x, rest, value)


def _selected(x: Tensor, index: Any) -> tuple[Tensor, Any]:
    """(the view at all places that are symbols, what is left of the index)."""
    items = list(index) if isinstance(index, tuple) else [index]
    symbolic = [n for n, item in enumerate(items) if isinstance(item, torch.SymInt)]
    for n in reversed(symbolic):  # from the last on, so that the dimensions before stay where they are
        x = torch.select(x, _dimension(x, items, n), items.pop(n))
    return x, tuple(items) if symbolic else index


def _dimension(x: Tensor, items: Sequence[Any], n: int) -> int:
    """Which dimension of x the n-th item is of."""
    if any(item is Ellipsis for item in items[:n]):
        return x.dim() - sum(map(_consumed, items[n:]))
    return sum(map(_consumed, items[:n]))


def _consumed(item: Any) -> int:
    """How many dimensions an item of an index takes."""
    if item is None or isinstance(item, bool):
        return 0
    is_mask = isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)
    return item.dim() if is_mask else 1


ALWAYS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    Tensor.__getitem__: getitem, Tensor.__setitem__: setitem,
}  # fmt: skip
