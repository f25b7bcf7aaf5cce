"""``scaled_grouped_mm``: the products of groups of rows of float8 operands with scales.

    out[rows of g] = activation(scale_a[rows of g] * scale_b[g] * (a[rows of g] @ b[g]) + bias[g])

It is for inference and has no gradient. The kernels are declared in kernels/scaled_grouped_mm/.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tk._arguments import flag
from tk.ops import _register, product, scaled
from tk.ops._register import Record
from tk.ops.product import Activation

if TYPE_CHECKING:
    from tk.cli._calls import Call, Maker

__all__ = ["scaled_grouped_mm"]

_scaled_grouped_mm, _scaled_grouped_mm_out = _register.overloads("scaled_grouped_mm")


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    activation: Activation = "none",
    config: str | int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiplies groups of rows by a matrix each, as ``torch._scaled_grouped_mm``.

    Dtypes and strides of the operands are those of :func:`tk.scaled_mm`.

    Args:
        a: ``[T, K]``.
        b: ``[G, K, N]``.
        scale_a: float32 ``[T]``, one for each row of a.
        scale_b: float32 ``[G, N]``, one for each column of each matrix of b.
        offs: int32 ``[G]``: the row at which each group ends, in rising order. Rows after the last end are not read,
            and the result's rows there are not written. Ends that fall or pass T give wrong rows, but nothing outside
            of the tensors is read or written.
        bias: ``[N]`` or ``[G, N]`` of the result's dtype, or None. A float32 result also takes a bfloat16 or float16
            bias.
        out_dtype: as in :func:`tk.scaled_mm`.
        use_fast_accum: as in :func:`tk.scaled_mm`.
        activation: as in :func:`tk.mm`.
        config: as in :func:`tk.mm`.
        out: as in :func:`tk.mm`.

    Returns:
        ``[T, N]``, or ``out``. The errors are those of :func:`tk.scaled_mm`.
    """
    try:
        flag("scaled_grouped_mm", "use_fast_accum", use_fast_accum)
        wanted = None if out_dtype is torch.bfloat16 else out_dtype
        settings = product.settings("scaled_grouped_mm", a, activation, wanted, None, config)
        operands = (a, b, scale_a, scale_b, offs, bias, use_fast_accum)
        if out is not None:
            return _scaled_grouped_mm_out(*operands, *settings, out=out)
        return _scaled_grouped_mm(*operands, *settings)
    except (RuntimeError, AttributeError) as error:
        raise product.explained(
            error, "scaled_grouped_mm", a=a, b=b, scale_a=scale_a, scale_b=scale_b, offs=offs, bias=bias, out=out
        ) from None


def _fake(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    use_fast_accum: bool,
    *settings: Any,
) -> Tensor:
    torch._check_value(
        a.dim() == 2 and b.dim() == 3 and offs.dim() == 1,
        lambda: f"tk.scaled_grouped_mm: a {a.shape}, b {b.shape}, offs {offs.shape} must be [T, K], [G, K, N] and [G]",
    )
    torch._check_value(
        b.shape[0] == offs.shape[0],
        lambda: f"tk.scaled_grouped_mm: b has {b.shape[0]} groups, offs has {offs.shape[0]}",
    )
    return scaled.allocate("scaled_grouped_mm", a, b, bias, *settings)


scaled.register("scaled_grouped_mm", _fake)


# --- What else is known of it ---


def _calls(t: Maker) -> Iterator[Call]:
    n, fp8 = t.n, torch.float8_e4m3fn
    ends = torch.tensor([3 * n, 8 * n], dtype=torch.int32, device=t.device)
    weights = t(2, 16 * n, 16 * n, dtype=fp8).mT
    scales = torch.ones(8 * n, device=t.device), torch.ones(2, 16 * n, device=t.device)
    yield t.call("scaled_grouped_mm", t(8 * n, 16 * n, dtype=fp8), weights, *scales, offs=ends)


_register.record("scaled_grouped_mm", Record("_k,_kn,_,_n,_->_n", calls=_calls), scaled_grouped_mm)
