"""Arguments that are no tensors, by their kind. Each check returns the value, or Python's number for one of
numpy's. For all else it raises TypeError, with the function's and the argument's name and what is taken."""

from __future__ import annotations

import numbers
import operator
from typing import Any

import torch
from torch import Tensor

__all__ = ["flag", "number", "optional_flag", "shape_of", "whole"]


def flag(function: str, name: str, value: Any) -> bool:
    """True or False. A text would be true, "no" too."""
    if value is True or value is False:
        return value
    raise TypeError(f"tk.{function}: {name} must be a bool, is {value!r}")


def optional_flag(function: str, name: str, value: Any) -> bool | None:
    """True, False or None."""
    if value is None or value is True or value is False:
        return value
    raise TypeError(f"tk.{function}: {name} must be a bool or None, is {value!r}")


def whole(function: str, name: str, value: Any) -> Any:
    """An int, or what stands for one. No bool, as in torch."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    if not isinstance(value, bool) and not isinstance(value, Tensor):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"tk.{function}: {name} must be an int, is {value!r}")


def number(function: str, name: str, value: Any) -> Any:
    """An int or a float, also one of numpy's, which comes back as Python's. Also a bool, as in torch."""
    if isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        return value
    if isinstance(value, numbers.Integral):
        return operator.index(value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        return float(value)
    raise TypeError(f"tk.{function}: {name} must be a number, is {value!r}")


def shape_of(function: str, name: str, value: Any) -> tuple[Any, ...]:
    """Sizes, as a list or tuple of ints."""
    if not isinstance(value, list | tuple):
        raise TypeError(f"tk.{function}: {name} must be a tuple of ints, is {value!r}")
    for size in value:
        if type(size) is not int:
            return tuple(whole(function, name, size) for size in value)
    return tuple(value)
