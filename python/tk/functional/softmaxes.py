"""Softmax and its logarithm, along any dimension; the last is the fastest."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from tk.functional._call import WIDE_FLOATS, Config, converted, from_end, needs, run, taken, to_end, wrap
from tk.functional.reductions import amax, sum

__all__ = ["log_softmax", "softmax"]


@needs("softmax", *amax.ops, *sum.ops)  # type: ignore[attr-defined]
def softmax(
    input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, *, config: Config = None
) -> Tensor:
    """``exp(x - max) / sum(exp(x - max))`` along ``dim``, as ``torch.nn.functional.softmax``.

    Args:
        input: any shape, bfloat16, float16, float32 or float64.
        dim: without it torch's old choice holds, with its warning: 0 for 0, 1 and 3 dimensions, else 1.
        dtype: input is converted to it first.

    Returns:
        The shape of input, of its dtype or ``dtype``.

    Raises:
        IndexError: a ``dim`` that is none. TypeError: input is not floating-point, and ``dtype`` does not make it so.
    """
    return _along("softmax", input, dim, dtype, config)


@needs("log_softmax", *amax.ops, *sum.ops)  # type: ignore[attr-defined]
def log_softmax(
    input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, *, config: Config = None
) -> Tensor:
    """``x - logsumexp(x)`` along ``dim``, as ``torch.nn.functional.log_softmax``. Arguments and errors as of
    :func:`softmax`."""
    return _along("log_softmax", input, dim, dtype, config)


def _along(op: str, input: Tensor, dim: int | None, dtype: torch.dtype | None, config: Config) -> Tensor:
    x = converted(op, input, dtype)
    is_taken = taken(op, WIDE_FLOATS, input=x)
    if dim is None:
        dim = _old_choice(op, x)
    at = wrap(op, x, dim)
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"tk.{op}: input is {x.dtype}, must be floating-point: give dtype=torch.float32")
    if not is_taken:
        return F.softmax(x, at) if op == "softmax" else F.log_softmax(x, at)
    if x.dtype == torch.float64:
        return _of_float64(op, x, at, config)
    return from_end(run(op, to_end(x, at), config=config), x, at)


def _of_float64(op: str, x: Tensor, dim: int, config: Config) -> Tensor:
    """float64 by the formula of the other dtypes, made of the kernels that float64 has: those of its maxima and its
    sums. What is subtracted first is the maximum, exactly: from logsumexp, which is rounded, large elements differ by
    too much."""
    if x.numel() == 0:  # no maximum
        return x.clone()
    away = x - amax(x.detach(), dim, True, config=config)
    total = sum(away.exp(), dim, True, config=config)
    return away.exp() / total if op == "softmax" else away - total.log()


def _old_choice(op: str, x: Tensor) -> int:
    warnings.warn(f"tk.{op}: name dim; the choice without it is a deprecated one of torch's", stacklevel=4)
    return 0 if x.dim() in (0, 1, 3) else 1
