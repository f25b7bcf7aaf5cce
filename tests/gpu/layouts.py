"""Matrices in memory as callers bring them: any strides, any offset, with NaN wherever the view does not reach.

A kernel that reads outside its operand meets NaN, and one that writes outside its result is caught by ``untouched``.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from .device import DEVICE

OPERAND_LAYOUTS = (
    "row", "column", "row_pitch", "column_pitch", "row_odd_pitch", "column_odd_pitch", "row_offset", "column_offset",
    "row_aligned_offset", "strided", "expanded_rows", "expanded_cols", "expanded", "window",
)  # fmt: skip
# A result needs one place for each element.
OUT_LAYOUTS = tuple(n for n in OPERAND_LAYOUTS if not n.startswith("expanded") and n != "window")


@dataclass(frozen=True)
class Placed:
    """A view and the one-dimensional memory it lies in."""

    view: torch.Tensor
    storage: torch.Tensor

    def untouched(self) -> bool:
        """Whether all memory outside the view is still NaN."""
        outside = torch.ones(self.storage.numel(), dtype=torch.bool, device=self.storage.device)
        outside[_positions(self.view)] = False
        return bool(self.storage[outside].isnan().all())


def strides(layout: str, rows: int, cols: int, rng: random.Random) -> tuple[int, int, int]:
    """(offset, row stride, column stride)."""
    odd = 2 * rng.randint(0, 6) + 1
    wide = 16 * rng.randint(1, 4)
    known = {
        "row": (0, cols, 1),
        "column": (0, 1, rows),
        "row_pitch": (0, -(-cols // 16) * 16 + wide, 1),
        "column_pitch": (0, 1, -(-rows // 16) * 16 + wide),
        "row_odd_pitch": (0, cols // 2 * 2 + odd + 2, 1),
        "column_odd_pitch": (0, 1, rows // 2 * 2 + odd + 2),
        "row_offset": (odd, cols, 1),
        "column_offset": (odd, 1, rows),
        "row_aligned_offset": (16 * odd, cols, 1),
        "strided": (odd, 3 * cols + odd, 3),
        "expanded_rows": (0, 0, 1),
        "expanded_cols": (0, 1, 0),
        "expanded": (odd, 0, 0),
        "window": (0, 1, 1),
    }
    offset, row_stride, col_stride = known[layout]
    # What a dimension of size 1 says its stride is must not matter.
    if rows == 1:
        row_stride = rng.choice((row_stride, 1, 7, 64))
    if cols == 1:
        col_stride = rng.choice((col_stride, 1, 5, 64))
    return offset, row_stride, col_stride


def place(
    rows: int, cols: int, dtype: torch.dtype, layout: str, rng: random.Random, fill: float | None = None
) -> Placed:
    """A matrix of normal random numbers, or of `fill`, in `layout`."""
    offset, row_stride, col_stride = strides(layout, rows, cols, rng)
    reach = (rows - 1) * row_stride + (cols - 1) * col_stride + 1 if rows and cols else 0
    storage = torch.full((offset + reach + 64,), math.nan, dtype=dtype, device=DEVICE)
    view = storage.as_strided((rows, cols), (row_stride, col_stride), offset)
    if fill is None:
        storage[_positions(view)] = torch.randn(rows, cols, device=DEVICE).to(dtype)
    else:
        storage[_positions(view)] = fill
    return Placed(view, storage)


def _positions(view: torch.Tensor) -> torch.Tensor:
    rows, cols = (torch.arange(size, device=view.device) for size in view.shape)
    return view.storage_offset() + rows[:, None] * view.stride(0) + cols[None, :] * view.stride(1)
