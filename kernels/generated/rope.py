"""Rotary position embedding."""

import torch

from tk.generated import op

FLOATS = ("bf16", "fp16", "fp32")


@op(x="T[..., S, D]", cos="T[S, H]", sin="T[S, H]", interleaved="bool", T=FLOATS, grad=True)
def rope(x, cos, sin, interleaved):
    """Pairs of x, (a, b), become (a·cos - b·sin, b·cos + a·sin): neighbours, or one from each half. Of cos and sin the
    first D/2 columns are read."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, :half], sin[:, :half]
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)
