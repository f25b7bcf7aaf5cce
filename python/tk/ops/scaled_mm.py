"""``scaled_mm``: the product of two float8 matrices with scales.

    out = activation(scale_a * scale_b * (a @ b) + bias)

Inference alone. The kernels are declared in kernels/scaled_mm/.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tk.ops import _register, product, scaled
from tk.ops.product import Activation

__all__ = ["scaled_mm"]

_scaled_mm, _scaled_mm_out = _register.overloads("scaled_mm")


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    activation: Activation = "none",
    config: str | int | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``activation(scale_a * scale_b * (a @ b) + bias)``, with the conventions of ``torch._scaled_mm``.

    Args:
        a: ``[M, K]``. b: ``[K, N]``. torch.float8_e4m3fn, or one of them torch.float8_e5m2. Any sizes and strides; the
            fast kernels want K contiguous in both, as ``b = weight.t()`` has it, and multiples of 16 bytes.
        scale_a, scale_b: float32, one number each (0-d, or of any rank), or ``[M, 1]`` and ``[1, N]``: one for each row
            of a and each column of b.
        bias: ``[N]``, of the result's dtype; for a float32 result bfloat16 or float16 as well.
        out_dtype: torch.bfloat16 (the default), float16 or float32. (torch's default is a's own dtype.)
        use_fast_accum: sums stay in the tensor cores, which keep some 14 bits of them. Otherwise every 128 products
            are added up in float32. On the CPU, and where kernels widen their operands, sums are float32 anyway.
        activation, config, out: as of :func:`tk.mm`.

    Returns:
        ``[M, N]``, row-major (or ``out``). It has no gradient: a backward through it raises NotImplementedError.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
        tk.UnsupportedError: a dtype that tk has no kernels for, two e5m2 operands, or a GPU without float8 (older than
            compute capability 8.9).
    """
    try:
        settings = product.settings("scaled_mm", a, activation, out_dtype, None, config)
        if out is not None:
            return _scaled_mm_out(a, b, scale_a, scale_b, bias, use_fast_accum, *settings, out=out)
        if not settings and not use_fast_accum:
            return _scaled_mm(a, b, scale_a, scale_b, bias)
        return _scaled_mm(a, b, scale_a, scale_b, bias, use_fast_accum, *settings)
    except (RuntimeError, AttributeError) as error:
        raise product.explained(error, "scaled_mm", a=a, b=b, scale_a=scale_a, scale_b=scale_b, bias=bias) from None


def _fake(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, use_fast_accum: bool, *settings: Any
) -> Tensor:
    product.check_rank("scaled_mm", 2, a=a, b=b)
    return scaled.allocate("scaled_mm", a, b, bias, *settings)


scaled.register("scaled_mm", _fake)
