"""Scans along the last dimension. tk.generated.gradients has the gradients of all but the sum."""

import torch

from tk.generated import op
from tk.kernels.generated import FLOATS, WIDE


@op(x="T[..., N]", T=WIDE, grad=True)
def cumsum(x):
    return x.cumsum(-1)


@op(x="T[..., N]", T=(*WIDE, "i64"))
def cumprod(x):
    """The running product; of integers modulo 2^64."""
    return x.cumprod(-1)


@op(x="T[..., N]", T=(*FLOATS, "i64"))
def cummax(x):
    """(values, indices): among equal ones the last index, NaN from the first one on."""
    return torch.cummax(x, -1)


@op(x="T[..., N]", T=FLOATS)
def cummin(x):
    """(values, indices): as cummax. Of integers it is a cummax of what is turned over."""
    return torch.cummin(x, -1)


@op(x="T[..., N]", T=FLOATS)
def logcumsumexp(x):
    return torch.logcumsumexp(x, -1)
