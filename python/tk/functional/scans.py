"""Scans along any dimension, which is made the last; where elements of long rows lie apart that costs a copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tk.functional._call import (
    FLOATS,
    INTEGERS,
    NUMBERS,
    WIDE_FLOATS,
    Config,
    check_plain,
    converted,
    dense_rows,
    from_end,
    have_one,
    needs,
    needs_gradient,
    run,
    taken,
    wrap,
)
from tk.functional._integers import flip_of, key_of, signed

__all__ = ["cummax", "cummin", "cumprod", "cumsum", "logcumsumexp"]

LONG = 128  # elements of a row; of fewer one program has several rows, however they lie


@needs("cumsum", "cumsum_int")
def cumsum(input: Tensor, dim: int, *, dtype: torch.dtype | None = None, config: Config = None) -> Tensor:
    """The running sum along ``dim``, as ``torch.cumsum``: of float32, rounded once; of float64 in float64, and of
    integers in int64, modulo 2^64.

    Args:
        input: any shape; a float, an integer or bool.
        dtype: input is converted to it first. Without it the result of integers is int64.

    Raises:
        IndexError: a dimension that is none.
    """
    return _accumulated("cumsum", torch.cumsum, converted("cumsum", input, dtype), dim, dtype, config)


@needs("cumprod")
def cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None, config: Config = None) -> Tensor:
    """The running product along ``dim``, as ``torch.cumprod``; its gradient is ATen's. Arguments, dtypes and errors as
    of :func:`cumsum`."""
    return _accumulated("cumprod", torch.cumprod, converted("cumprod", input, dtype), dim, dtype, config)


@needs("logcumsumexp")
def logcumsumexp(input: Tensor, dim: int, *, config: Config = None) -> Tensor:
    """``log(cumsum(exp(x)))`` along ``dim``, as ``torch.logcumsumexp``: nothing overflows on the way. Its gradient is
    made of ATen's ops. Errors as of :func:`cumsum`."""
    return _scanned("logcumsumexp", torch.logcumsumexp, input, dim, config)


@needs("cummax")
def cummax(input: Tensor, dim: int, *, config: Config = None) -> Any:
    """(values, indices) of the running maximum along ``dim``, as ``torch.cummax``: NaN from the first one on; indices
    (int64) of the last of equal ones. Its gradient is ATen's scatter. Errors as of :func:`cumsum`."""
    check_plain("cummax", "input", input)
    if input.dtype in (*INTEGERS, torch.float64):
        return torch.return_types.cummax(_extreme_of_integers("cummax", input, dim, False, config))
    return torch.return_types.cummax(_scanned("cummax", torch.cummax, input, dim, config))


@needs("cummin", "cummax")
def cummin(input: Tensor, dim: int, *, config: Config = None) -> Any:
    """(values, indices) of the running minimum along ``dim``: as :func:`cummax`."""
    check_plain("cummin", "input", input)
    if input.dtype in (*INTEGERS, torch.float64):
        return torch.return_types.cummin(_extreme_of_integers("cummin", input, dim, True, config))
    return torch.return_types.cummin(_scanned("cummin", torch.cummin, input, dim, config))


def _accumulated(name: str, torchs: Any, x: Tensor, dim: int, dtype: torch.dtype | None, config: Config) -> Tensor:
    if not taken(name, NUMBERS, input=x):
        return torchs(x, dim, dtype=dtype)
    if x.dtype not in INTEGERS:
        return _scanned(name, torchs, x, dim, config, WIDE_FLOATS)
    dim = wrap(name, x, dim)
    if config is None and have_one(x, (dim,)):
        return x.to(dtype or torch.int64, copy=True)
    found = run("cumsum_int" if name == "cumsum" else name, dense_rows(x.long(), dim, LONG), config=config)
    return from_end(found, x, dim).to(dtype or torch.int64)


def _extreme_of_integers(name: str, x: Tensor, dim: int, is_least: bool, config: Config) -> tuple[Tensor, Tensor]:
    """The running maximum of integers that are ordered as the elements are, or, of the least, the other way round."""
    dim = wrap(name, x, dim)
    if config is None and have_one(x, (dim,)):
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    keys = key_of(x, is_least) if x.dtype == torch.float64 else signed(x).long() ^ flip_of(x, is_least)
    indices = from_end(run("cummax", dense_rows(keys, dim, LONG), config=config)[1], x, dim)
    return x.gather(dim, indices), indices


def _scanned(name: str, torchs: Any, x: Tensor, dim: int, config: Config, takes: Any = FLOATS) -> Any:
    if not taken(name, takes, input=x):
        return torchs(x, dim)
    dim = wrap(name, x, dim)
    # Of one element the log of an exponential is the element too, but its gradient is no number where that is infinite.
    if config is None and have_one(x, (dim,)) and not (name == "logcumsumexp" and needs_gradient(x)):
        only = x.clone()
        return (only, torch.zeros_like(x, dtype=torch.int64)) if name in ("cummax", "cummin") else only
    found = run(name, dense_rows(x, dim, LONG), config=config)
    if isinstance(found, Tensor):
        return from_end(found, x, dim)
    return tuple(from_end(t, x, dim) for t in found)
