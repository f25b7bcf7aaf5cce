"""Searches of sorted rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tk import errors
from tk.functional._call import Config, needs, one_device, only_aten_has, run

__all__ = ["bucketize", "searchsorted"]

# What the kernels compare in: every number of the other dtype is one of these too.
_COMPARED = {
    torch.float32: torch.float32, torch.bfloat16: torch.float32, torch.float16: torch.float32,
    torch.int64: torch.int64, torch.int32: torch.int64, torch.int16: torch.int64, torch.int8: torch.int64,
    torch.uint8: torch.int64,
}  # fmt: skip


@needs("bucketize")
def bucketize(
    input: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False, config: Config = None
) -> Tensor:
    """The bucket of every element, as ``torch.bucketize``: how many boundaries are smaller, or with ``right``
    not larger.

    Args:
        input: any shape; NaN comes after all boundaries.
        boundaries: ``[K]``, sorted, of the dtype of input: float32, 16 bits (compared in float32) or integers. One of
            another dtype, and float64, are taken on the CPU only.
        out_int32: int32 instead of int64.

    Returns:
        The shape of input, 0 to K.
    """
    if not _taken("bucketize", input, boundaries):
        return torch.bucketize(input, boundaries, out_int32=out_int32, right=right)
    if boundaries.dim() != 1:
        raise ValueError(f"tk.bucketize: boundaries must be [K], is {list(boundaries.shape)}")
    dtype = _COMPARED[input.dtype]
    found = run("bucketize", input.to(dtype), boundaries.to(dtype), right, config=config)
    return found.to(torch.int32) if out_int32 else found


@needs("bucketize", "searchsorted")
def searchsorted(
    sorted_sequence: Tensor,
    input: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
    config: Config = None,
) -> Tensor:
    """Where every element would be put into a sorted row, as ``torch.searchsorted``.

    Args:
        sorted_sequence: ``[K]``, or ``[..., K]`` with a row for each of input's. Dtypes as of :func:`bucketize`.
        input: any shape; ``[..., N]`` where there are several rows.
        right, side: "right" puts it after equal ones.
        sorter: on the CPU only.

    Returns:
        int64, or with ``out_int32`` int32; the shape of input.
    """
    arguments: dict[str, Any] = dict(out_int32=out_int32, right=right, side=side, sorter=sorter)
    if sorter is not None and isinstance(input, Tensor):
        only_aten_has("searchsorted", input, "sorter")
    if not _taken("searchsorted", input, sorted_sequence) or sorter is not None:
        return torch.searchsorted(sorted_sequence, input, **arguments)
    if side not in (None, "left", "right") or (right and side == "left"):
        raise ValueError(f"tk.searchsorted: side is {side!r} and right {right}; side must be 'left' or 'right'")
    is_right = right or side == "right"
    if sorted_sequence.dim() == 1:
        return bucketize(input, sorted_sequence, out_int32=out_int32, right=is_right, config=config)
    if sorted_sequence.shape[:-1] != input.shape[:-1] or sorted_sequence.dim() == 0:
        raise ValueError(
            "tk.searchsorted: sorted_sequence must be [K], or have a row for each of input's; they are "
            f"{list(sorted_sequence.shape)} and {list(input.shape)}"
        )
    dtype = _COMPARED[input.dtype]
    found = run("searchsorted", sorted_sequence.to(dtype), input.to(dtype), is_right, config=config)
    return found.to(torch.int32) if out_int32 else found


def _taken(function: str, input: Tensor, row: Tensor) -> bool:
    for name, x in (("input", input), ("the sorted row", row)):
        if not isinstance(x, Tensor):
            raise TypeError(f"tk.{function}: {name} must be a Tensor, is {type(x).__name__}")
    if input.dtype in _COMPARED and input.dtype == row.dtype:
        return True
    one_device(function, input=input, the_sorted_row=row)
    if input.device.type != "cpu":
        raise errors.UnsupportedError(
            f"tk.{function}: input is {input.dtype} and the sorted row {row.dtype}; on {input.device.type} both must "
            "be of one dtype: float32, bfloat16, float16 or an integer"
        )
    return False
