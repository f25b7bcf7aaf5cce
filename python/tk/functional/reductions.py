"""Reductions over any dimensions. The reduced ones are made the last, and one; where they do not run together in memory
that costs a copy. All of a tensor is reduced by many programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tk import errors, parallel
from tk._arguments import flag, number, optional_flag
from tk.functional._call import (
    FLOATS,
    INTEGERS,
    NUMBERS,
    WIDE_FLOATS,
    Config,
    autocast,
    check_tensor,
    converted,
    have_one,
    needs,
    needs_gradient,
    only_aten_has,
    product,
    run,
    taken,
    wrap,
)
from tk.functional._integers import flip_of, mask_of, signed
from tk.generated.gradients import FORMULAS
from tk.generated.problem import memory_order

__all__ = [
    "all", "amax", "amin", "any", "argmax", "argmin", "logsumexp", "max", "mean", "min", "norm", "prod", "std",
    "std_mean", "sum", "var", "var_mean", "vector_norm",
]  # fmt: skip

Dims = int | list[int] | tuple[int, ...] | None

# --- Sums ---


@needs("row_sum", "column_sum", "total_sum", "row_sum_int")
def sum(
    input: Tensor, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None, *, config: Config = None
) -> Tensor:
    """The sum over ``dim`` (one, several, or all), as ``torch.sum``: of float32, rounded once; of float64 in float64,
    and of integers in int64, modulo 2^64.

    Args:
        input: any shape; a float, an integer or bool.
        keepdim: the reduced dimensions stay, of size 1.
        dtype: input is converted to it first. Without it the result of integers is int64.

    Raises:
        IndexError: a dimension that is none. ValueError: one given twice. tk.UnsupportedError: dimensions are named of
            a tensor that has more than 64, which torch refuses too.
    """
    x = converted("sum", input, dtype)
    if not taken("sum", NUMBERS, input=x):
        return torch.sum(x, dim, keepdim, dtype=dtype)
    dims = _dims("sum", x, dim)
    if config is None and have_one(x, dims):
        return _only("sum", x, dims, keepdim, None if x.is_floating_point() else dtype or torch.int64)
    if not x.is_floating_point():
        return _kept("sum", _sum_of_integers(x, dims, config), dims, keepdim).to(dtype or torch.int64)
    if x.dtype == torch.float64:
        return _kept("sum", _sum_of_float64(x, dims, config), dims, keepdim)
    if _are_all(x, dims):
        return _kept("sum", run("total_sum", _whole(x), 1.0, config=config), dims, keepdim)
    if _are_first(x, dims):
        kept = x.shape[len(dims) :]
        columns = x.reshape(product(x.shape[: len(dims)]), product(kept))
        return _kept("sum", run("column_sum", columns, config=config).reshape(kept), dims, keepdim)
    return _kept("sum", run("row_sum", _rows(x, dims), config=config), dims, keepdim)


@needs("row_mean", "total_sum", "row_sum")
def mean(
    input: Tensor, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None, *, config: Config = None
) -> Tensor:
    """The mean over ``dim``, as ``torch.mean``, of floats or as ``dtype``. Arguments and errors as of :func:`sum`."""
    x = converted("mean", input, dtype)
    if not taken("mean", WIDE_FLOATS, input=x):
        return torch.mean(x, dim, keepdim, dtype=dtype)
    dims = _dims("mean", x, dim)
    if config is None and have_one(x, dims):
        return _only("mean", x, dims, keepdim)
    if x.dtype == torch.float64:
        total = _sum_of_float64(x, dims, config)
        return _kept("mean", total, dims, keepdim) / product([x.shape[d] for d in dims])
    if _are_all(x, dims):
        n = x.numel()
        return _kept("mean", run("total_sum", _whole(x), 1 / n if n else math.nan, config=config), dims, keepdim)
    return _kept("mean", run("row_mean", _rows(x, dims), config=config), dims, keepdim)


@needs("row_prod")
def prod(
    input: Tensor, dim: int | None = None, keepdim: bool = False, dtype: torch.dtype | None = None, *,
    config: Config = None,
) -> Tensor:  # fmt: skip
    """The product over ``dim``, or of all, as ``torch.prod``: of float32, rounded once. Arguments,
    dtypes and errors as of :func:`sum`."""
    x = converted("prod", input, dtype)
    if not taken("prod", NUMBERS, input=x):
        return torch.prod(x, dtype=dtype) if dim is None else torch.prod(x, dim, keepdim, dtype=dtype)
    dims = _dims("prod", x, None if dim is None else wrap("prod", x, dim))
    if config is None and have_one(x, dims):
        return _only("prod", x, dims, keepdim, dtype or torch.int64 if x.dtype in INTEGERS else None)
    if x.dtype in INTEGERS:
        found = _of_parts(lambda rows: run("row_prod", rows, config=config), x.long(), dims)
        return _kept("prod", found, dims, keepdim).to(dtype or torch.int64)
    return _kept("prod", run("row_prod", _rows(x, dims), config=config), dims, keepdim)


@needs("logsumexp")
def logsumexp(
    input: Tensor, dim: int | list[int] | tuple[int, ...], keepdim: bool = False, *, config: Config = None
) -> Tensor:
    """``log(sum(exp(x)))`` over ``dim``, as ``torch.logsumexp``; integers become torch's default dtype. Arguments and
    errors as of :func:`sum`."""
    x = autocast("logsumexp", input)
    if isinstance(x, Tensor) and x.dtype in INTEGERS:
        x = x.to(torch.get_default_dtype())
    if not taken("logsumexp", WIDE_FLOATS, input=x):
        return torch.logsumexp(x, dim, keepdim)
    dims = _dims("logsumexp", x, dim)
    if config is None and have_one(x, dims) and not needs_gradient(x):  # which is no number where x is infinite
        return _only("logsumexp", x, dims, keepdim)
    return _kept("logsumexp", run("logsumexp", _rows(x, dims), config=config), dims, keepdim)


# --- Extremes ---


@needs("row_amax", "row_extreme_int")
def amax(input: Tensor, dim: Dims = (), keepdim: bool = False, *, config: Config = None) -> Tensor:
    """The largest element, NaN where there is one, as ``torch.amax``: equal ones share the gradient. Arguments and
    errors as of :func:`sum`; no reduced dimension may have size 0 (ValueError)."""
    if not taken("amax", NUMBERS, input=input):
        return torch.amax(input, () if dim is None else dim, keepdim)
    return _extreme("amax", input, dim, keepdim, 1.0, 1.0, config)


@needs("row_amax", "row_extreme_int")
def amin(input: Tensor, dim: Dims = (), keepdim: bool = False, *, config: Config = None) -> Tensor:
    """The smallest element, as ``torch.amin``. All else as of :func:`amax`."""
    if not taken("amin", NUMBERS, input=input):
        return torch.amin(input, () if dim is None else dim, keepdim)
    return _extreme("amin", input, dim, keepdim, -1.0, 1.0, config)


@needs("row_argmax", "row_place_int")
def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False, *, config: Config = None) -> Tensor:
    """The index (int64) of the largest element, or of the first NaN, as ``torch.argmax``: among equal ones the first.
    Without ``dim`` of the flattened input. Errors as of :func:`amax`."""
    if not taken("argmax", NUMBERS, input=input):
        return torch.argmax(input, dim, keepdim)
    return _place("argmax", input, dim, keepdim, 1.0, config)


@needs("row_argmax", "row_place_int")
def argmin(input: Tensor, dim: int | None = None, keepdim: bool = False, *, config: Config = None) -> Tensor:
    """The index (int64) of the smallest element, as ``torch.argmin``. All else as of :func:`argmax`."""
    if not taken("argmin", NUMBERS, input=input):
        return torch.argmin(input, dim, keepdim)
    return _place("argmin", input, dim, keepdim, -1.0, config)


@needs(*amax.ops, *argmax.ops, "row_max")  # type: ignore[attr-defined]
def max(
    input: Tensor, dim: int | Tensor | None = None, keepdim: bool = False, *, other: Tensor | None = None,
    config: Config = None,
) -> Any:  # fmt: skip
    """The largest element of all, or (values, indices) along ``dim``, as ``torch.max``: among equal ones the first, to
    which the gradient goes. Errors as of :func:`amax`.

    Args:
        dim: or a tensor, as ``other``: the larger of the two at every place is ATen's ``maximum``, but for strict mode
            on CUDA.
    """
    if (of_two := _second("max", input, dim, keepdim, other)) is not None:
        return torch.maximum(input, of_two)
    assert not isinstance(dim, Tensor)
    return _value_and_place("max", torch.max, input, dim, keepdim, 1.0, config)


@needs(*max.ops)  # type: ignore[attr-defined]
def min(
    input: Tensor, dim: int | Tensor | None = None, keepdim: bool = False, *, other: Tensor | None = None,
    config: Config = None,
) -> Any:  # fmt: skip
    """The smallest element of all, or (values, indices) along ``dim``, as ``torch.min``. All else as of :func:`max`."""
    if (of_two := _second("min", input, dim, keepdim, other)) is not None:
        return torch.minimum(input, of_two)
    assert not isinstance(dim, Tensor)
    return _value_and_place("min", torch.min, input, dim, keepdim, -1.0, config)


def _second(function: str, input: Tensor, dim: Any, keepdim: bool, other: Any) -> Tensor | None:
    """The other tensor, by place or by name, where there is one. The larger ones of two are ATen's to find."""
    if other is None and not isinstance(dim, Tensor):
        return None
    if (other is not None and dim is not None) or keepdim:
        raise TypeError(f"tk.{function}: give other, a tensor, or dim and keepdim, not both")
    found = dim if other is None else other
    check_tensor(function, "other", found)
    check_tensor(function, "input", input)
    only_aten_has(function, input, f"the {function}imum of two tensors")
    return found


# --- Truth ---


@needs("row_any")
def any(input: Tensor, dim: Dims = None, keepdim: bool = False, *, config: Config = None) -> Tensor:
    """Whether any element over ``dim`` is not zero, as ``torch.any``.

    Args:
        input: of any dtype; one other than bool is compared with zero by ATen first.

    Other arguments and errors as of :func:`sum`.
    """
    return _truth("any", input, dim, keepdim, 1, config)


@needs("row_any")
def all(input: Tensor, dim: Dims = None, keepdim: bool = False, *, config: Config = None) -> Tensor:
    """Whether no element over ``dim`` is zero, as ``torch.all``. All else as of :func:`any`."""
    return _truth("all", input, dim, keepdim, 0, config)


# --- Norms ---

# Orders whose powers and their sum are one kernel: its numbers.
_ORDERS = {1.0: (1.0, 1.0, 1.0), 2.0: (0.0, math.inf, 0.5)}


@needs("row_norm", "total_norm", "row_amax")
def vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    config: Config = None,
) -> Tensor:
    """``sum(|x| ** ord) ** (1 / ord)`` over ``dim``, as ``torch.linalg.vector_norm``: of float32, rounded once.

    Args:
        ord: 1, 2, inf and -inf have kernels; nan is no order (ValueError). Other orders are ATen's, but for strict
            mode on CUDA (tk.UnsupportedError).

    Other arguments and errors as of :func:`sum`; of infinite order as of :func:`amax`.
    """
    given = converted("vector_norm", x, dtype)
    if not taken("vector_norm", WIDE_FLOATS, x=given):
        return torch.linalg.vector_norm(given, ord, dim, keepdim)
    return _norm("vector_norm", given, float(number("vector_norm", "ord", ord)), dim, keepdim, config)


@needs(*vector_norm.ops)  # type: ignore[attr-defined]
def norm(
    input: Tensor,
    p: float | str | None = "fro",
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    *,
    config: Config = None,
) -> Tensor:
    """:func:`vector_norm` of order ``p`` with the arguments of ``torch.norm``: "fro" and None are 2; "nuc" is
    ATen's, as the orders are that have no kernel."""
    x = converted("norm", input, dtype)
    is_taken = taken("norm", WIDE_FLOATS, input=x)
    if isinstance(p, str) and p not in ("fro", "nuc"):
        raise ValueError(f"tk.norm: p is {p!r}, must be a number, 'fro' or 'nuc'")
    if not isinstance(p, str | None):
        p = number("norm", "p", p)
    if p == "nuc":
        only_aten_has("norm", x, "the nuclear norm")
    if not is_taken or p == "nuc":
        return torch.norm(x, p, dim, keepdim)
    order = 2.0 if p is None or isinstance(p, str) else float(p)
    return _norm("norm", x, order, dim, keepdim, config)


def _norm(function: str, x: Tensor, order: float, dim: Dims, keepdim: bool, config: Config) -> Tensor:
    """A norm over dimensions. As in ATen a norm of 0 has the gradient 0."""
    if math.isnan(order):
        name = "p" if function == "norm" else "ord"
        raise ValueError(f"tk.{function}: {name} is nan, must be a number: it is the order of the norm")
    dims = _dims(function, x, dim)
    if order != 0 and product([x.shape[d] for d in dims]) == 1:
        # As in ATen: a power and its root would lose bits, and overflow at high orders. Nor is there anything to add.
        return _kept(function, _without(x.abs(), dims), dims, keepdim)
    if math.isinf(order):
        found = _extreme(function, x, dim, keepdim, math.copysign(1.0, order), -1.0, config)
        return torch.where(found == 0, found.detach(), found) if found.requires_grad else found
    if order not in _ORDERS:
        if order < 0 and product([x.shape[d] for d in dims]) == 0:
            name = "input" if function == "norm" else "x"
            raise ValueError(f"tk.{function}: {name} is {list(x.shape)}: no elements have no norm of order {order:g}")
        only_aten_has(function, x, f"order {order:g}")
        return torch.linalg.vector_norm(x, order, dim, keepdim)
    if x.dtype == torch.float64:  # a norm of norms is one of all

        def of_float64(x: Tensor) -> Tensor:
            return _of_parts(lambda rows: run("row_norm", rows, *_ORDERS[order], config=config), x, dims)

        found = _total("total_norm", of_float64, x, dims, *_ORDERS[order])
    elif _are_all(x, dims):
        found = run("total_norm", _whole(x), *_ORDERS[order], config=config)
    else:
        found = run("row_norm", _rows(x, dims), *_ORDERS[order], config=config)
    return _kept(function, found, dims, keepdim)


# --- Moments ---


@needs("row_var_mean", "total_var_mean")
def var_mean(
    input: Tensor,
    dim: Dims | bool = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    config: Config = None,
) -> tuple[Tensor, Tensor]:
    """The variance and the mean over ``dim``, as ``torch.var_mean``, by Welford's method.

    Args:
        input: any shape; of floats. Of 16 bits the results have 16.
        unbiased: False is a correction of 0.
        correction: what is taken off the number of elements; 1 by default.

    Other arguments and errors as of :func:`sum`.
    """
    return _moments("var_mean", torch.var_mean, input, dim, unbiased, keepdim, correction, config)


@needs(*var_mean.ops)  # type: ignore[attr-defined]
def var(
    input: Tensor,
    dim: Dims | bool = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    config: Config = None,
) -> Tensor:
    """The variance over ``dim``, as ``torch.var``. Arguments and errors as of :func:`var_mean`."""
    return _moments("var", torch.var_mean, input, dim, unbiased, keepdim, correction, config)[0]


@needs(*var_mean.ops)  # type: ignore[attr-defined]
def std(
    input: Tensor,
    dim: Dims | bool = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    config: Config = None,
) -> Tensor:
    """The root of the variance over ``dim``, as ``torch.std``. Arguments and errors as of :func:`var_mean`."""
    return _moments("std", torch.std_mean, input, dim, unbiased, keepdim, correction, config)[0]


@needs(*var_mean.ops)  # type: ignore[attr-defined]
def std_mean(
    input: Tensor,
    dim: Dims | bool = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    config: Config = None,
) -> tuple[Tensor, Tensor]:
    """The root of the variance, and the mean, over ``dim``, as ``torch.std_mean``. Arguments and errors as of
    :func:`var_mean`."""
    return _moments("std_mean", torch.std_mean, input, dim, unbiased, keepdim, correction, config)


def _moments(
    function: str,
    of_torch: Callable[..., tuple[Tensor, Tensor]],
    input: Tensor,
    dim: Dims | bool,
    unbiased: bool | None,
    keepdim: bool,
    correction: float | None,
    config: Config,
) -> tuple[Tensor, Tensor]:
    """The variance, or with std_mean its root, and the mean."""
    dim, correction = _correction(function, dim, unbiased, correction)
    if not taken(function, WIDE_FLOATS, input=input):
        return of_torch(input, dim, correction=correction, keepdim=keepdim)
    dims = _dims(function, input, dim)
    n = product([input.shape[d] for d in dims])
    bessel = n / (n - correction) if n > correction else math.inf
    power = 0.5 if of_torch is torch.std_mean else 1.0
    if _are_all(input, dims) and input.dtype == torch.float64:
        spread, found = _total(
            "total_var_mean", lambda x: _moments_of_float64(x, n, bessel, power, config), input, dims, bessel, power
        )
    elif _are_all(input, dims):
        spread, found = run("total_var_mean", _whole(input), bessel, power, config=config)
    else:
        spread, found = run("row_var_mean", _rows(input, dims), bessel, power, config=config)
    return _kept(function, spread, dims, keepdim), _kept(function, found, dims, keepdim)


def _moments_of_float64(x: Tensor, n: int, bessel: float, power: float, config: Config) -> tuple[Tensor, Tensor]:
    """The variance and mean of all elements, in two passes; few of them are a row. As in ATen a standard deviation of 0
    has the gradient 0."""
    if n < MANY:
        spread, found = run("row_var_mean", x.reshape(-1), bessel, power, config=config)
        return spread, found
    dims = range(x.dim())
    found = _sum_of_float64(x, dims, config) / n
    deviations = x - found
    spread = _sum_of_float64(deviations * deviations, dims, config) / n * bessel
    found = torch.where(spread.isnan(), spread.detach(), found)  # as Welford's method has it of an infinity
    if power == 1:
        return spread, found
    is_zero = spread == 0
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, spread) ** power), found


def _correction(function: str, dim: Dims | bool, unbiased: bool | None, correction: float | None) -> tuple[Dims, float]:
    """torch's ways to say it: ``f(input, unbiased)`` is one."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    optional_flag(function, "unbiased", unbiased)
    if unbiased is not None and correction is not None:
        raise ValueError(f"tk.{function}: give unbiased or correction, not both")
    if correction is None:
        correction = 0 if unbiased is False else 1
    return dim, number(function, "correction", correction)


# --- By rows ---


def _only(function: str, x: Tensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None = None) -> Tensor:
    """The result where the dimensions have one element: that element, in a new tensor."""
    return _kept(function, _without(x, dims).to(dtype or x.dtype, copy=True), dims, keepdim)


def _without(x: Tensor, dims: Sequence[int]) -> Tensor:
    """A view without these dimensions of one element, however many there are."""
    return x.squeeze(tuple(dims)) if len(dims) < x.dim() else x.reshape(())


def _extreme(function: str, x: Tensor, dim: Dims, keepdim: bool, sign: float, mirror: float, config: Config) -> Tensor:
    """Equal elements share the gradient, which those of parts would not do: with a gradient there are none."""
    dims = _dims(function, x, dim)
    _check_some(function, x, dims)
    if config is None and have_one(x, dims) and mirror > 0 and not needs_gradient(x):  # which NaN has not, as in ATen
        return _only(function, x, dims, keepdim)
    if not x.is_floating_point():
        flip = flip_of(x, sign < 0)
        found = _of_parts(lambda rows: run("row_extreme_int", rows, flip, config=config), signed(x), dims, once=False)
        return _kept(function, found.view(x.dtype), dims, keepdim)

    def of_rows(x: Tensor) -> Tensor:
        return run("row_amax", x, sign, mirror, config=config)

    if _are_all(x, dims) and not needs_gradient(x):
        return _kept(function, _of_all(of_rows, x, once=False), dims, keepdim)
    return _kept(function, of_rows(_rows(x, dims)), dims, keepdim)


def _check_some(function: str, x: Tensor, dims: Sequence[int]) -> None:
    """Raises ValueError where there is nothing to choose from."""
    shape = x.shape
    for dim in dims if x.dim() else ():
        size = shape[dim]
        if type(size) is int and size == 0:
            raise ValueError(f"tk.{function}: input is {list(x.shape)}, dim {dim} of it is reduced and must not be 0")


def _truth(function: str, x: Tensor, dim: Dims, keepdim: bool, wanted: int, config: Config) -> Tensor:
    check_tensor(function, "input", x)
    dims = _dims(function, x, dim)

    def of_rows(x: Tensor) -> Tensor:
        return run("row_any", x, wanted, config=config)

    truth = x if x.dtype == torch.bool else x != 0
    is_none = isinstance(dim, list | tuple) and not dim  # torch reduces none here, where a sum is of all
    if is_none:
        found = truth.clone()
    elif config is None and have_one(x, dims):
        found = _without(truth, dims) if truth is not x else _without(x, dims).clone()
    else:
        found = _of_parts(of_rows, truth, dims, once=False)
    if x.dtype == torch.uint8:  # as torch has it
        found = found.to(torch.uint8)
    return _kept(function, found, dims if found.dim() < x.dim() else (), keepdim)


def _place(function: str, x: Tensor, dim: int | None, keepdim: bool, sign: float, config: Config) -> Tensor:
    dims = _dims(function, x, dim if dim is None or type(dim) is int else wrap(function, x, dim))
    _check_some(function, x, dims)
    if config is None and have_one(x, dims):
        return _kept(function, torch.zeros_like(_without(x, dims), dtype=torch.int64), dims, keepdim)
    is_integer = not x.is_floating_point()
    flip = flip_of(x, sign < 0) if is_integer else 0
    if is_integer:
        x = signed(x).to(torch.int64 if x.dtype == torch.int64 else torch.int32)

    def of_rows(x: Tensor) -> Tensor:
        if is_integer:
            return run("row_place_int", x, flip, config=config)
        return run("row_argmax", x, sign, config=config)

    found = _place_by_parts(of_rows, x.detach().reshape(-1)) if _are_all(x, dims) else of_rows(_rows(x, dims))
    return _kept(function, found, dims, keepdim)


def _value_and_place(
    function: str, torchs: Callable[..., Any], x: Tensor, dim: int | None, keepdim: bool, sign: float, config: Config
) -> Any:
    if not taken(function, NUMBERS, input=x):
        return torchs(x) if dim is None else torchs(x, dim, keepdim)
    if dim is None:
        return _extreme(function, x, None, False, sign, 1.0, config)
    dim, keepdim = wrap(function, x, dim), flag(function, "keepdim", keepdim)
    if config is None and have_one(x, (dim,)):
        index = _place(function, x, dim, keepdim, sign, config)
        value = x.clone() if keepdim else x.squeeze(dim).clone()
    elif x.dtype in FLOATS and type(n := x.numel()) is int and n <= FEW:
        dims = _dims(function, x, dim)
        _check_some(function, x, dims)
        value, index = run("row_max", _rows(x, dims), sign, config=config)
        value, index = _kept(function, value, dims, keepdim), _kept(function, index, dims, keepdim)
    elif x.dim() == 0 or keepdim:
        index = _place(function, x, dim, x.dim() > 0, sign, config)
        value = x.gather(dim, index)
    else:
        index = _place(function, x, dim, False, sign, config)
        value = x.gather(dim, index.unsqueeze(dim)).squeeze(dim)
    return getattr(torch.return_types, function)((value, index))


# --- All of a tensor ---

PART = 4096  # elements of a row that all of a tensor is cut into
PARTS = (PART, 1024, 256)
FEW = 1 << 21  # elements; of more a launch less gains nothing over a block that fits
MANY = 1 << 16  # elements; a row of fewer is one program's


def _of_all(of_rows: Callable[[Tensor], Tensor], x: Tensor, *, once: bool) -> Tensor:
    """The result over all elements, of a reduction that may be applied to its own results in any order, which are
    exact, or of float64. Elements that are no run in memory come as the rows that there are: there is no copy. once: as
    of a sum, no element may count twice."""
    x = x.permute(memory_order(x, x.dim()))
    if x.is_contiguous():
        return _by_parts(of_rows, x.reshape(-1), once)
    first = x.dim() - 1
    while first > 0 and x.stride(first - 1) == x.stride(first) * x.shape[first]:
        first -= 1
    rows = x.flatten(first)
    if not first:
        return _by_parts(of_rows, rows, once)
    n = rows.shape[-1]
    part = _part_of(n, n) if n >= MANY else n
    return _by_parts(of_rows, of_rows(rows.unflatten(-1, (n // part, part))).reshape(-1), once)


def _by_parts(of_rows: Callable[[Tensor], Tensor], x: Tensor, once: bool) -> Tensor:
    """x: [n]."""
    n = x.shape[0]
    if n < MANY:
        return of_rows(x)
    part = _part_of(n, PART)
    rows = n // part
    if not once and n <= FEW and not parallel.is_distributed(x):
        return _by_parts(of_rows, of_rows(_overlapping(x, part)), once)
    found = of_rows(x[: rows * part].unflatten(0, (rows, part)))
    if n % part:
        found = torch.cat((found, of_rows(x[rows * part :]).reshape(1)))
    return _by_parts(of_rows, found, once)


def _overlapping(x: Tensor, part: int) -> Tensor:
    """A row for every whole part, which begins with it and is longer by what the last one leaves: one launch less."""
    n = x.shape[0]
    return x.unfold(0, part + n % part, part)


def _part_of(n: int, other: int) -> int:
    """Elements of the longest parts that n are made of, `other` where there are none."""
    return next((size for size in PARTS if n % size == 0), other)


def _place_by_parts(of_rows: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The index of an extreme: of the extremes of parts the first that is one of all. x: [n]."""
    n = x.shape[0]
    if n < MANY:
        return of_rows(x)
    rows = n // PART
    first = torch.arange(0, rows * PART, PART, device=x.device)
    if n <= FEW and not parallel.is_distributed(x):
        at = of_rows(_overlapping(x, PART)) + first
    else:
        at = of_rows(x[: rows * PART].view(rows, PART)) + first
        if n % PART:
            at = torch.cat((at, of_rows(x[rows * PART :]).reshape(1) + rows * PART))
    return at.take(_place_by_parts(of_rows, x[at]))  # an index without dimensions would wait for its value


def _of_parts(of_rows: Callable[[Tensor], Tensor], x: Tensor, dims: Sequence[int], *, once: bool = True) -> Tensor:
    """Such a reduction, of all or by rows."""
    return _of_all(of_rows, x, once=once) if _are_all(x, dims) else of_rows(_rows(x, dims))


def _sum_of_integers(x: Tensor, dims: Sequence[int], config: Config) -> Tensor:
    mask = mask_of(x)

    def of_rows(rows: Tensor) -> Tensor:
        return run("row_sum_int", rows, -1 if rows.dtype == torch.int64 else mask, config=config)

    return _of_parts(of_rows, signed(x), dims)


def _sum_of_float64(x: Tensor, dims: Sequence[int], config: Config) -> Tensor:
    def of_float64(x: Tensor) -> Tensor:
        return _of_parts(lambda rows: run("row_sum", rows, config=config), x, dims)

    return _total("total_sum", of_float64, x, dims, 1.0)


class _Total(torch.autograd.Function):
    """What is worked out by parts has the gradient of the op that stands for all of it: autograd would lead it back
    through every part, in a pass over all elements for each."""

    @staticmethod
    def forward(ctx: Any, op: str, of_all: Callable[[Tensor], Any], x: Tensor, *numbers: float) -> Any:
        found = of_all(x)
        keep, ctx.formula = FORMULAS[op]
        keep(ctx, (x, *numbers, -1, 0), found)  # without a config and a mode
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        of_x, *others = ctx.formula(ctx, *grads)
        return (None, None, of_x, *others[:-2])


def _total(op: str, of_all: Callable[[Tensor], Any], x: Tensor, dims: Sequence[int], *numbers: float) -> Any:
    """of_all(x), with the gradient of this op where all of many elements are reduced. In graphs, under transforms and
    in forward mode that is led through the parts, of which torch knows every derivative."""
    if (
        torch.compiler.is_compiling()
        or not needs_gradient(x)
        or not _are_all(x, dims)
        or x.numel() < MANY
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or parallel.is_distributed(x)
    ):
        return of_all(x)
    return _Total.apply(op, of_all, x, *numbers)


def _whole(x: Tensor) -> Tensor:
    """The operand of the ops over all of a tensor: a column of its elements in the order of memory, where they have
    gaps of a copy. A DTensor keeps the dimensions that it is sharded over."""
    if parallel.is_distributed(x):
        return x if x.dim() else x.reshape(1)
    if not x.is_contiguous():
        x = x.permute(memory_order(x, x.dim())).contiguous()
    return x.view(x.numel(), 1)


# --- Dimensions ---

MOST_DIMS = 64  # of a tensor of which torch reduces dimensions that are named


def _dims(function: str, x: Tensor, dim: Dims) -> tuple[int, ...]:
    """The dimensions in order, counted from the front; all where none is named. Raises tk.UnsupportedError, IndexError,
    ValueError."""
    n = x.dim()
    if type(dim) is int and -n <= dim < n <= MOST_DIMS:  # as most calls have it
        return (dim % n,)
    if not isinstance(dim, list | tuple):
        dim = () if dim is None else (dim,)
    if len(dim) == 0:
        return tuple(range(n))
    if n > MOST_DIMS:
        raise errors.UnsupportedError(
            f"tk.{function}: input has {n} dimensions: as in torch, only tensors with up to {MOST_DIMS} dims are "
            "supported where dim names some; leave dim out, or flatten some of them"
        )
    dims = sorted(wrap(function, x, d) for d in dim)
    if len(set(dims)) < len(dims):
        raise ValueError(f"tk.{function}: dim is {dim}: a dimension is there twice")
    return tuple(dims) if n else ()


def _are_all(x: Tensor, dims: Sequence[int]) -> bool:
    return len(dims) == x.dim() > 0


def _are_first(x: Tensor, dims: Sequence[int]) -> bool:
    """The reduced dimensions stand before all that are kept, in memory too."""
    n = len(dims)
    return n > 0 and dims[-1] == n - 1 and n < x.dim() and x.is_contiguous()


def _rows(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The reduced dimensions last, as one."""
    n = x.dim()
    if n == 0:
        return x.reshape(1)
    if len(dims) == 1 and dims[0] == n - 1:
        return x
    kept = [d for d in range(n) if d not in dims]
    x = x.permute(*kept, *dims)
    return x.reshape(*x.shape[: len(kept)], product(x.shape[len(kept) :]))


def _kept(function: str, out: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    if keepdim is not False and flag(function, "keepdim", keepdim):
        for d in dims:
            out = out.unsqueeze(d)
    return out
