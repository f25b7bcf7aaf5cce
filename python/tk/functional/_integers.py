"""How integers and 64-bit floats come to the few ops that they have (kernels/generated/integers.py)."""

from __future__ import annotations

import torch
from torch import Tensor


def signed(x: Tensor) -> Tensor:
    """The bits of a bool or uint8 as an int8; others as they are."""
    return x.view(torch.int8) if x.dtype in (torch.bool, torch.uint8) else x


def mask_of(x: Tensor) -> int:
    """The mask of the bits that make the number of an element of :func:`signed`."""
    return 255 if x.dtype == torch.uint8 else -1


def flip_of(x: Tensor, is_least: bool) -> int:
    """The number by which an exclusive or puts the elements of :func:`signed` in order; is_least: in the opposite
    one."""
    return (-128 if x.dtype == torch.uint8 else 0) ^ -int(is_least)


_LARGEST, _LEAST = torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min


def key_of(x: Tensor, is_least: bool = False, nan: int = _LARGEST) -> Tensor:
    """float64 as int64 in the same order, or with is_least in the opposite one: the zeros are equal, and NaN is larger
    than every number, either way."""
    bits = (x.detach() + 0.0).view(torch.int64)  # -0.0 + 0.0 is 0.0
    ordered = bits ^ ((bits >> 63) & _LARGEST)
    return torch.where(x.isnan(), nan, ordered ^ -int(is_least))


def row_key_of(x: Tensor) -> Tensor:
    """The keys of a sorted row that is searched: ATen finds that no NaN in it comes after anything."""
    return key_of(x, nan=_LEAST)


# A float that holds every number of an integer dtype.
FLOAT_OF = {
    torch.int8: torch.bfloat16, torch.uint8: torch.bfloat16, torch.bool: torch.bfloat16, torch.int16: torch.float32,
}  # fmt: skip
