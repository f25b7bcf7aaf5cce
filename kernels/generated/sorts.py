"""Sorts along the last dimension, always stable. tk.generated.gradients has their gradients."""

import torch

from tk.generated import op
from tk.kernels.generated import FLOATS


@op(x="T[..., N]", descending="bool", T=FLOATS)
def sort(x, descending):
    """(values, indices): NaN is the largest."""
    return torch.sort(x, stable=True, dim=-1, descending=descending)


@op(x="T[..., N]", k="int", largest="bool", T=FLOATS)
def topk(x, k, largest):
    """(values, indices) of the k first of the sorted."""
    return torch.topk(x, k, -1, largest)
