"""Softmax and its logarithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk.dropin.replacement import Replacement
from tk.dropin.speed import ALL, Rule, Speed
from tk.dropin.target import DTYPES, Target, is_in_order
from tk.functional import softmaxes


def _softmax(target: Target) -> Callable[..., bool]:
    def softmax(input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> bool:
        """Arguments after dim: those of torch.nn.functional (_stacklevel, dtype) and of torch (dtype). Along another
        dimension than the last the result lies otherwise in memory than torch's."""
        if args or dim is None or not kwargs.keys() <= {"dtype", "_stacklevel"}:
            return False
        dtype = kwargs.get("dtype")
        if not target.takes(input) or not isinstance(dim, int) or (dtype is not None and dtype not in DTYPES):
            return False
        if dim not in (-1, input.dim() - 1) or not input.dim() or not is_in_order(input):
            return False
        return target.is_fast("", input.shape[dim], input)

    return softmax


def _call_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None, _stacklevel: int = 3) -> Tensor:
    return softmaxes.softmax(input, dim, dtype)


def _call_log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None, _stacklevel: int = 3) -> Tensor:
    return softmaxes.log_softmax(input, dim, dtype)


SOFTMAX = Replacement(
    op="softmax",
    originals=("torch.nn.functional.softmax", "torch.softmax"),
    takes=_softmax,
    call=_call_softmax,
    speed=Speed({"sm_90": {"": Rule("columns", ALL, ALL, "2.60, backward 2.02")}}),
)
LOG_SOFTMAX = Replacement(
    op="log_softmax",
    originals=("torch.nn.functional.log_softmax", "torch.log_softmax"),
    takes=_softmax,
    call=_call_log_softmax,
    speed=Speed(
        {"sm_90": {"": Rule("columns", ((384, None),), ((384, None),), "2.22, at 235 columns 0.47, backward 1.03")}}
    ),
)
