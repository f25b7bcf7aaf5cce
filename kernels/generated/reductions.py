"""Reductions along the last dimension."""

import torch

from tk.generated import op

FLOATS = ("bf16", "fp16", "fp32")


@op(x="T[..., N]", T=FLOATS, grad=True)
def row_sum(x):
    return x.sum(-1)


@op(x="T[..., N]", T=FLOATS, grad=True)
def row_mean(x):
    return x.mean(-1)


@op(x="T[..., N]", T=FLOATS, grad=True)
def row_amax(x):
    return x.amax(-1)


@op(x="T[..., N]", T=FLOATS)
def row_argmax(x):
    """The first index of the largest element, or of the first NaN."""
    return x.argmax(-1)


@op(x="T[..., N]", T=FLOATS)
def row_var_mean(x):
    """(var, mean), the variance unbiased. tk.generated.gradients has its gradient."""
    return torch.var_mean(x, -1)


@op(x="T[M, N]", T=FLOATS, grad=True)
def column_sum(x):
    return x.sum(0)
