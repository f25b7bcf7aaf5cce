"""Quantisation to fp8: x ≈ q · scale, the largest |q| of a scale the largest number of the format."""

import torch

from tk.generated import op
from tk.kernels.generated import FLOATS

SMALLEST = 2.0**-126  # of the normal fp32 numbers: a scale never vanishes


def _quantized(x, amax, e5m2):
    dtype = torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn
    scale = (amax.float() / torch.finfo(dtype).max).clamp_min(SMALLEST)
    return (x.float() / scale).to(dtype), scale


@op(x="T[..., N]", e5m2="bool", T=FLOATS)
def quantize_fp8_rows(x, e5m2):
    """(q, scale), a scale for each row."""
    return _quantized(x, x.abs().amax(-1, keepdim=True), e5m2)


@op(x="T[...]", e5m2="bool", T=FLOATS)
def quantize_fp8_tensor(x, e5m2):
    """(q, scale), one scale for all."""
    return _quantized(x, x.abs().amax(), e5m2)
