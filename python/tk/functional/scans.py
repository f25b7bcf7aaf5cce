"""Scans along any dimension, which is made the last by its strides: nothing is copied."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tk.functional._call import Config, converted, from_end, needs, run, taken, to_end, wrap

__all__ = ["cummax", "cummin", "cumprod", "cumsum", "logcumsumexp"]


@needs("cumsum")
def cumsum(input: Tensor, dim: int, *, dtype: torch.dtype | None = None, config: Config = None) -> Tensor:
    """The running sum along ``dim``, as ``torch.cumsum``: of float32, rounded once.

    Args:
        input: any shape.
        dtype: input is converted to it first.

    Raises:
        IndexError: a dimension that is none.
    """
    x = converted("cumsum", input, dtype)
    return _scanned("cumsum", partial(torch.cumsum, dtype=dtype), x, dim, config)


@needs("cumprod")
def cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None, config: Config = None) -> Tensor:
    """The running product along ``dim``, as ``torch.cumprod``; its gradient is ATen's. Arguments and errors as of
    :func:`cumsum`."""
    x = converted("cumprod", input, dtype)
    return _scanned("cumprod", partial(torch.cumprod, dtype=dtype), x, dim, config)


@needs("logcumsumexp")
def logcumsumexp(input: Tensor, dim: int, *, config: Config = None) -> Tensor:
    """``log(cumsum(exp(x)))`` along ``dim``, as ``torch.logcumsumexp``: nothing overflows on the way. Its gradient is
    made of ATen's ops. Errors as of :func:`cumsum`."""
    return _scanned("logcumsumexp", torch.logcumsumexp, input, dim, config)


@needs("cummax")
def cummax(input: Tensor, dim: int, *, config: Config = None) -> Any:
    """(values, indices) of the running maximum along ``dim``, as ``torch.cummax``: NaN from the first one on; indices
    (int64) of the last of equal ones. Its gradient is ATen's scatter. Errors as of :func:`cumsum`."""
    return torch.return_types.cummax(_scanned("cummax", torch.cummax, input, dim, config))


@needs("cummin")
def cummin(input: Tensor, dim: int, *, config: Config = None) -> Any:
    """(values, indices) of the running minimum along ``dim``: as :func:`cummax`."""
    return torch.return_types.cummin(_scanned("cummin", torch.cummin, input, dim, config))


def _scanned(name: str, torchs: Any, x: Tensor, dim: int, config: Config) -> Any:
    if not taken(name, input=x):
        return torchs(x, dim)
    dim = wrap(name, x, dim)
    found = run(name, to_end(x, dim), config=config)
    if isinstance(found, Tensor):
        return from_end(found, x, dim)
    return tuple(from_end(t, x, dim) for t in found)
