"""Softmax and its logarithm along the last dimension."""

import torch
import torch.nn.functional as F

from tk.generated import op
from tk.kernels.generated import FLOATS


@op(x="T[..., N]", T=FLOATS, grad=True)
def softmax(x):
    """exp(x - max) / sum(exp(x - max)) along the last dimension."""
    return F.softmax(x, -1)


@op(x="T[..., N]", T=FLOATS, grad=True)
def log_softmax(x):
    """x - logsumexp(x) along the last dimension."""
    return F.log_softmax(x, -1)


@op(x="T[..., N]", T=(*FLOATS, "fp64"), grad=True)
def logsumexp(x):
    """log(sum(exp(x))) along the last dimension."""
    return torch.logsumexp(x, -1)
