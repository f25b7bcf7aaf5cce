"""Quantization to fp8."""

import torch

from tk.generated import op


@op(x="T[..., N]", T=("bf16", "fp16", "fp32"))
def quantize_fp8_rows(x):
    """(q, scale) with x ≈ q · scale: each row's largest |q| is the format's largest number; an all-zero row has
    scale 1."""
    largest = x.abs().amax(-1, keepdim=True).float()
    scale = torch.where(largest == 0, 1.0, largest / 448.0)
    return (x / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale
