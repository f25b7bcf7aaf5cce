"""Quantisation."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tk.functional._call import Config, needs, run, taken

__all__ = ["quantize_fp8"]

_SMALLEST = 2.0**-126


@needs("quantize_fp8_tensor", "quantize_fp8_rows")
def quantize_fp8(
    x: Tensor,
    per: Literal["tensor", "row"] = "tensor",
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    config: Config = None,
) -> tuple[Tensor, Tensor]:
    """``(q, scale)`` with ``x ≈ q · scale``; the largest ``|q|`` is the format's largest number. It has no gradient.

    Args:
        x: any shape with elements; per row ``[..., N]``. bfloat16, float16 or float32 (float64 on the CPU).
        per: "tensor": one scale; "row": one for each row of the last dimension.
        dtype: torch.float8_e4m3fn (on CUDA from sm_89 on) or torch.float8_e5m2.

    Returns:
        q: the shape of x. scale: float32, 0-d or ``[..., 1]``, at least 2⁻¹²⁶, so that zeros have one too.

    Raises:
        TypeError: x is not floating-point. ValueError: x has no elements, ``per`` or ``dtype`` is none of these.
    """
    is_taken = taken("quantize_fp8", x=x)
    if not x.is_floating_point():
        raise TypeError(f"tk.quantize_fp8: x is {x.dtype}, must be floating-point")
    if per not in ("tensor", "row"):
        raise ValueError(f"tk.quantize_fp8: per is {per!r}, must be 'tensor' or 'row'")
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(f"tk.quantize_fp8: dtype is {dtype}, must be torch.float8_e4m3fn or torch.float8_e5m2")
    if (x.numel() if per == "tensor" or not x.dim() else x.shape[-1]) == 0:
        raise ValueError(f"tk.quantize_fp8: x is {list(x.shape)}: there is no largest of no elements")
    x = x.detach()
    if not is_taken:
        return _quantized(x, per, dtype)
    return run(f"quantize_fp8_{'rows' if per == 'row' else 'tensor'}", x, dtype == torch.float8_e5m2, config=config)


def _quantized(x: Tensor, per: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    amax = x.abs().amax(-1, keepdim=True) if per == "row" else x.abs().amax()
    scale = (amax.float() / torch.finfo(dtype).max).clamp_min(_SMALLEST)
    return (x / scale).float().to(dtype), scale
