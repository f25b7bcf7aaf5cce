"""Rotary position embedding. Its gradient is the rotation back, which tk.generated.gradients has."""

import torch

from tk.generated import op
from tk.kernels.generated import FLOATS


@op(x="T[..., S, 2, H]", cos="fp32[S, H]", sin="fp32[S, H]", T=FLOATS)
def rope(x, cos, sin):
    """Pairs (a, b) become (a·cos - b·sin, b·cos + a·sin). Of the dimension of size 2 the first are the a."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    is_first = (torch.arange(2, device=x.device) == 0).unsqueeze(-1)
    return (x * cos + x.flip(-2) * torch.where(is_first, -sin, sin)).to(x.dtype)


@op(x="T[..., S, D]", cos="fp32[S, D]", sin="fp32[S, D]", T=FLOATS)
def rope_interleaved(x, cos, sin):
    """The same with neighbours as pairs; the tables have each column twice."""
    n = cos.shape[-1]
    swapped = x.unflatten(-1, (n // 2, 2)).flip(-1).flatten(-2)
    is_first = torch.arange(n, device=x.device) % 2 == 0
    return (x * cos + swapped * torch.where(is_first, -sin, sin)).to(x.dtype)
