"""Scans along the last dimension. tk.generated.gradients has the gradients of all but the sum."""

import torch

from tk.generated import op

FLOATS = ("bf16", "fp16", "fp32")


@op(x="T[..., N]", T=FLOATS, grad=True)
def cumsum(x):
    return x.cumsum(-1)


@op(x="T[..., N]", T=FLOATS)
def cumprod(x):
    return x.cumprod(-1)


@op(x="T[..., N]", T=FLOATS)
def cummax(x):
    """(values, indices): among equal ones the last index, NaN from the first one on."""
    return torch.cummax(x, -1)


@op(x="T[..., N]", T=FLOATS)
def cummin(x):
    """(values, indices): as cummax."""
    return torch.cummin(x, -1)


@op(x="T[..., N]", T=FLOATS)
def logcumsumexp(x):
    return torch.logcumsumexp(x, -1)
