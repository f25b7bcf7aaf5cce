"""Reductions along the last dimension, over the rows of a matrix, and over all of a tensor.

Numbers make one op serve several functions of tk.functional: an op for each would cost the wheel a set of kernels. The
ops over all of a tensor are split over programs; where partial results are exact, rows are used twice instead."""

import torch

from tk.generated import op
from tk.kernels.generated import FLOATS, WIDE


@op(x="T[..., N]", T=WIDE)
def row_sum(x):
    """tk.generated.gradients has the gradient of sums and means."""
    return x.sum(-1)


@op(x="T[..., N]", T=FLOATS)
def row_mean(x):
    return x.mean(-1)


@op(x="T[..., N]", sign="float", mirror="float", T=WIDE, grad=True)
def row_amax(x, sign, mirror):
    """The largest element; with sign -1 the smallest; with mirror -1, instead of 1, of the magnitudes."""
    return (torch.where(x < 0, x * mirror, x) * sign).amax(-1) * sign


@op(x="T[..., N]", sign="float", T=WIDE)
def row_argmax(x, sign):
    """The first index of the largest element, or of the first NaN; with sign -1 of the smallest."""
    return (x * sign).argmax(-1)


@op(x="T[..., N]", sign="float", T=FLOATS)
def row_max(x, sign):
    """(value, index) of the largest element, the index as of row_argmax; with sign -1 of the smallest.
    tk.generated.gradients has its gradient."""
    signed = x * sign
    return signed.amax(-1) * sign, signed.argmax(-1)


@op(x="T[..., N]", T=(*WIDE, "i64"))
def row_prod(x):
    """The product; of integers modulo 2^64. tk.generated.gradients has its gradient."""
    return x.prod(-1)


@op(x="bool[..., N]", wanted="int")
def row_any(x, wanted):
    """Whether any element is true, with wanted 1; with 0 whether all are: whether not any is false."""
    return (x.to(torch.int32) == wanted).any(-1).to(torch.int32) == wanted


def _wide(x):
    return x if x.dtype == torch.float64 else x.float()


def _root(x, exponent):
    """x to the power of 1 or 0.5. A power of any exponent takes ten times as long, once for every row."""
    return torch.where(torch.full_like(x, exponent) == 1, x, x.sqrt())


def _norm(total, root, dtype):
    return _root(total, root).to(dtype)


def _term(x, low, high):
    size = _wide(x).abs()
    return size * size.clamp(low, high)


@op(x="T[..., N]", low="float", high="float", root="float", T=WIDE)
def row_norm(x, low, high, root):
    """sum(|x| · clamp(|x|, low, high)) ** root: with (1, 1, 1) the 1-norm, with (0, inf, 0.5) the 2-norm. root is 1 or
    0.5.
    tk.generated.gradients has its gradient."""
    return _norm(_term(x, low, high).sum(-1), root, x.dtype)


@op(x="T[..., N]", bessel="float", power="float", T=WIDE)
def row_var_mean(x, bessel, power):
    """((bessel · var) ** power, mean), of the biased variance: bessel is n / (n - 1) for
    the unbiased one, power 1 or 0.5. tk.generated.gradients has its gradient."""
    variance, mean = torch.var_mean(_wide(x), -1, correction=0)
    return _root(variance * bessel, power).to(x.dtype), mean.to(x.dtype)


@op(x="T[M, N]", T=FLOATS)
def column_sum(x):
    return x.sum(0)


@op(x="T[..., N]", scale="float", T=FLOATS)
def total_sum(x, scale):
    """The sum of all elements, scaled before it is rounded. tk.generated.gradients has its gradient."""
    return (x.float().sum() * scale).to(x.dtype)


@op(x="T[..., N]", low="float", high="float", root="float", T=FLOATS)
def total_norm(x, low, high, root):
    """row_norm of all elements."""
    return _norm(_term(x, low, high).sum(), root, x.dtype)


@op(x="T[..., N]", bessel="float", power="float", T=FLOATS)
def total_var_mean(x, bessel, power):
    """row_var_mean of all elements."""
    variance, mean = torch.var_mean(x.float(), correction=0)
    return _root(variance * bessel, power).to(x.dtype), mean.to(x.dtype)
