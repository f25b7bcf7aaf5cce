"""Searches of sorted rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tk._arguments import flag, number
from tk.functional._call import Config, check_plain, needs, one_device, run, taken
from tk.functional._integers import key_of, row_key_of

__all__ = ["bucketize", "searchsorted"]

# What the kernels compare in: every number of the other dtype is one of these too, or is put into the same order.
_COMPARED = {
    torch.float32: torch.float32, torch.bfloat16: torch.float32, torch.float16: torch.float32,
    torch.int64: torch.int64, torch.int32: torch.int64, torch.int16: torch.int64, torch.int8: torch.int64,
    torch.uint8: torch.int64, torch.float64: torch.int64,
}  # fmt: skip
_TAKEN = tuple(_COMPARED)
Scalar = bool | int | float


@needs("bucketize")
def bucketize(
    input: Tensor | Scalar, boundaries: Tensor, *, out_int32: bool = False, right: bool = False, config: Config = None
) -> Tensor:
    """The bucket of every element, as ``torch.bucketize``: how many boundaries are smaller, or with ``right``
    not larger.

    Args:
        input: any shape, or a number; NaN comes after all boundaries.
        boundaries: ``[K]``, sorted: floats (16 bits are compared in float32) or integers; of two dtypes torch's common
            one.
        out_int32: int32 instead of int64.

    Returns:
        The shape of input, 0 to K; int64 or int32.

    Raises:
        ValueError: boundaries of other dimensions. TypeError: an argument of another kind.
    """
    _check_flags("bucketize", out_int32, right)
    input, boundaries = _common("bucketize", input, boundaries)
    if not taken("bucketize", _TAKEN, input=input):
        return torch.bucketize(input, boundaries, out_int32=out_int32, right=right)
    if boundaries.dim() != 1:
        raise ValueError(f"tk.bucketize: boundaries must be [K], is {list(boundaries.shape)}")
    return _in_one_row(input, boundaries, out_int32, right, config)


def _in_one_row(input: Tensor, boundaries: Tensor, out_int32: bool, right: bool, config: Config) -> Tensor:
    """boundaries: [K], of input's dtype."""
    row, x = _compared(boundaries, input)
    found = run("bucketize", x, row, right, config=config)
    return _as_asked(found, "bucketize", boundaries, out_int32)


@needs("bucketize", "searchsorted")
def searchsorted(
    sorted_sequence: Tensor,
    input: Tensor | Scalar,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
    config: Config = None,
) -> Tensor:
    """Finds where every element would be put into a sorted row, as ``torch.searchsorted``.

    Args:
        sorted_sequence: ``[K]``, or ``[..., K]`` with a row for each of input's. Dtypes as of :func:`bucketize`.
        input: any shape, or a number; ``[..., N]`` where there are several rows.
        right, side: "right" puts it after equal ones.
        sorter: int64, the shape of sorted_sequence: the order in which that is sorted, which is gathered first.

    Returns:
        int64, or with ``out_int32`` int32; the shape of input.

    Raises:
        ValueError: sorted_sequence has no row for each of input's, side and right disagree, or sorter has another
            shape. TypeError: an argument of another kind.
    """
    _check_flags("searchsorted", out_int32, right)
    input, sorted_sequence = _common("searchsorted", input, sorted_sequence)
    if not taken("searchsorted", _TAKEN, input=input):
        return torch.searchsorted(sorted_sequence, input, out_int32=out_int32, right=right, side=side, sorter=sorter)
    if side not in (None, "left", "right") or (right and side == "left"):
        raise ValueError(f"tk.searchsorted: side is {side!r} and right {right}; side must be 'left' or 'right'")
    if sorter is not None:
        if sorter.dtype != torch.int64 or sorter.shape != sorted_sequence.shape:
            raise ValueError(
                f"tk.searchsorted: sorter must be int64 and of the shape {list(sorted_sequence.shape)} of "
                f"sorted_sequence, is {sorter.dtype} and {list(sorter.shape)}"
            )
        sorted_sequence = sorted_sequence.gather(-1, sorter)
    is_right = right or side == "right"
    if sorted_sequence.dim() == 1:
        return _in_one_row(input, sorted_sequence, out_int32, is_right, config)
    if sorted_sequence.dim() == 0 or sorted_sequence.shape[:-1] != input.shape[:-1]:
        raise ValueError(
            "tk.searchsorted: sorted_sequence must be [K], or have a row for each of input's; they are "
            f"{list(sorted_sequence.shape)} and {list(input.shape)}"
        )
    found = run("searchsorted", *_compared(sorted_sequence, input), is_right, config=config)
    return _as_asked(found, "searchsorted", sorted_sequence, out_int32)


def _check_flags(function: str, out_int32: bool, right: bool) -> None:
    flag(function, "out_int32", out_int32)
    flag(function, "right", right)


def _common(function: str, input: Tensor | Scalar, row: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the dtype that torch promotes them to; a number as a 0-d tensor."""
    name = "boundaries" if function == "bucketize" else "sorted_sequence"
    check_plain(function, name, row)
    if not isinstance(input, Tensor):
        value = number(function, "input", input)
        dtype = torch.result_type(value, row)
        return torch.full((), value, dtype=dtype, device=row.device), row.to(dtype)
    check_plain(function, "input", input)
    if input.device != row.device:
        one_device(function, **{"input": input, name: row})
    if input.dtype == row.dtype:
        return input, row
    dtype = torch.result_type(input, row)
    return input.to(dtype), row.to(dtype)


def _compared(row: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.float64:
        return row_key_of(row), key_of(x)
    dtype = _COMPARED[x.dtype]
    return (row, x) if dtype == x.dtype else (row.to(dtype), x.to(dtype))


def _as_asked(found: Tensor, function: str, row: Tensor, out_int32: bool) -> Tensor:
    if out_int32 and row.shape[-1] >= 2**31:
        raise ValueError(f"tk.{function}: a row of {row.shape[-1]} elements has places that are no int32")
    return found.to(torch.int32) if out_int32 else found
