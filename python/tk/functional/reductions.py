"""Reductions over any dimensions. The reduced ones are made the last, and one; where they do not run together in memory
that costs a copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tk.functional._call import Config, needs, only_aten_has, product, run, taken, wrap

__all__ = ["amax", "argmax", "logsumexp", "mean", "sum", "var_mean"]

Dims = int | list[int] | tuple[int, ...] | None


@needs("row_sum", "column_sum")
def sum(
    input: Tensor, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None, *, config: Config = None
) -> Tensor:
    """The sum over ``dim`` (one, several, or all), as ``torch.sum``: of float32, rounded once.

    Args:
        input: any shape.
        keepdim: the reduced dimensions stay, of size 1.
        dtype: input is converted to it first.

    Raises:
        IndexError: a dimension that is none. ValueError: one given twice.
    """
    x = input if dtype is None else input.to(dtype)
    if not taken("sum", input=x):
        return torch.sum(x, dim, keepdim)
    dims = _dims("sum", x, dim)
    if _are_first(x, dims):
        kept = x.shape[len(dims) :]
        columns = x.reshape(product(x.shape[: len(dims)]), product(kept))
        return _kept(run("column_sum", columns, config=config).reshape(kept), dims, keepdim)
    return _kept(run("row_sum", _rows(x, dims), config=config), dims, keepdim)


@needs("row_mean")
def mean(
    input: Tensor, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None, *, config: Config = None
) -> Tensor:
    """The mean over ``dim``, as ``torch.mean``. Arguments and errors as of :func:`sum`."""
    x = input if dtype is None else input.to(dtype)
    if not taken("mean", input=x):
        return torch.mean(x, dim, keepdim)
    return _reduced("mean", x, dim, keepdim, config)


@needs("row_amax")
def amax(input: Tensor, dim: Dims = (), keepdim: bool = False, *, config: Config = None) -> Tensor:
    """The largest element, NaN where there is one, as ``torch.amax``: equal ones share the gradient. Arguments and
    errors as of :func:`sum`; no reduced dimension may have size 0 (ValueError)."""
    if not taken("amax", input=input):
        return torch.amax(input, () if dim is None else dim, keepdim)
    return _reduced("amax", input, dim, keepdim, config)


@needs("row_argmax")
def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False, *, config: Config = None) -> Tensor:
    """The index (int64) of the largest element, or of the first NaN, as ``torch.argmax``: among equal ones the first.
    Without ``dim`` of the flattened input. Errors as of :func:`amax`."""
    if not taken("argmax", input=input):
        return torch.argmax(input, dim, keepdim)
    return _reduced("argmax", input, dim, keepdim, config)


@needs("logsumexp")
def logsumexp(
    input: Tensor, dim: int | list[int] | tuple[int, ...], keepdim: bool = False, *, config: Config = None
) -> Tensor:
    """``log(sum(exp(x)))`` over ``dim``, as ``torch.logsumexp``. Arguments and errors as of :func:`sum`."""
    if not taken("logsumexp", input=input):
        return torch.logsumexp(input, dim, keepdim)
    return _reduced("logsumexp", input, dim, keepdim, config)


@needs("row_var_mean")
def var_mean(
    input: Tensor,
    dim: Dims = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    config: Config = None,
) -> tuple[Tensor, Tensor]:
    """The variance and the mean over ``dim``, as ``torch.var_mean``, by Welford's method.

    Args:
        unbiased: False is a correction of 0.
        correction: what is taken off the number of elements; 1 by default, another one on the CPU only.

    Other arguments and errors as of :func:`sum`.
    """
    if isinstance(dim, bool):  # torch.var_mean(input, unbiased)
        dim, unbiased = None, dim
    if unbiased is not None and correction is not None:
        raise ValueError("tk.var_mean: give unbiased or correction, not both")
    correction = (1 if unbiased is not False else 0) if correction is None else correction
    is_taken = taken("var_mean", input=input)
    if correction != 1:
        only_aten_has("var_mean", input, f"a correction of {correction}")
    if not is_taken or correction != 1:
        return torch.var_mean(input, dim, correction=correction, keepdim=keepdim)
    dims = _dims("var_mean", input, dim)
    variance, found = run("row_var_mean", _rows(input, dims), config=config)
    return _kept(variance, dims, keepdim), _kept(found, dims, keepdim)


_OPS = {"mean": "row_mean", "amax": "row_amax", "argmax": "row_argmax", "logsumexp": "logsumexp"}


def _reduced(function: str, x: Tensor, dim: Dims, keepdim: bool, config: Config) -> Tensor:
    dims = _dims(function, x, dim)
    return _kept(run(_OPS[function], _rows(x, dims), config=config), dims, keepdim)


def _dims(function: str, x: Tensor, dim: Dims) -> tuple[int, ...]:
    """In order, counted from the front; all where none is named."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.dim()))
    if x.dim() == 0:
        wrap(function, x, dim if isinstance(dim, int) else dim[0])
        return ()
    dims = sorted(wrap(function, x, d) for d in ([dim] if isinstance(dim, int) else dim))
    if len(set(dims)) < len(dims):
        raise ValueError(f"tk.{function}: dim is {dim}: a dimension is there twice")
    return tuple(dims)


def _are_first(x: Tensor, dims: Sequence[int]) -> bool:
    """The reduced dimensions stand before all that are kept, in memory too."""
    return 0 < len(dims) < x.dim() and dims[-1] == len(dims) - 1 and x.is_contiguous()


def _rows(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The reduced dimensions last, as one."""
    if x.dim() == 0:
        return x.reshape(1)
    kept = [d for d in range(x.dim()) if d not in dims]
    if tuple(dims) == (x.dim() - 1,):
        return x
    x = x.permute(*kept, *dims)
    return x.reshape(*x.shape[: len(kept)], product(x.shape[len(kept) :]))


def _kept(out: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    if keepdim:
        for d in dims:
            out = out.unsqueeze(d)
    return out
