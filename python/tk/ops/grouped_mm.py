"""``grouped_mm``: a product for each group of a ragged dimension, for mixtures of experts.

    out[rows of g] = activation(a[rows of g] @ b[g] + bias[g])

The kernels read on the device where the groups end. So the host does not wait for it, and empty groups cost nothing.
The kernels are declared in kernels/grouped_mm/.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tk.ops import _register, product
from tk.ops._register import Record
from tk.ops.product import Activation

if TYPE_CHECKING:
    from tk.cli._calls import Call, Maker

__all__ = ["grouped_mm"]

_grouped_mm, _grouped_mm_out = _register.overloads("grouped_mm")


def grouped_mm(
    a: Tensor,
    b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: Activation = "none",
    config: str | int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes one product for each group, as ``torch.nn.functional.grouped_mm``.

    T is a ragged dimension: it is divided into G groups of different lengths.

    =====================  ===============  ===========
    a                      b                result
    =====================  ===============  ===========
    ``[T, K]``             ``[G, K, N]``    ``[T, N]``     ragged rows: those of group g by ``b[g]``
    ``[G, M, K]``          ``[K, T]``       ``[M, T]``     ragged columns
    ``[M, T]``             ``[T, N]``       ``[G, M, N]``  ragged inner size: the gradient of weights
    ``[G, M, K]``          ``[G, K, N]``    ``[G, M, N]``  no ragged dimension: :func:`tk.bmm`
    =====================  ===============  ===========

    Args:
        a: bfloat16 or float16 (on the CPU also float32 and float64), with any strides.
        b: of the same dtype and device, with any strides.
        offs: int32 ``[G]``: where in T each group ends, in rising order. An empty group gives nothing, or zeros where
            the inner size is ragged. What comes after the last end is not read. The result is not written there, and
            its gradient is 0. Ends that fall or pass T give wrong results, but nothing outside of the tensors is read
            or written. None where there is no ragged dimension.
        bias: ``[N]`` or ``[G, N]``, or None. Ragged columns take no bias.
        out_dtype: the result's dtype: that of the operands (the default) or float32.
        activation: as in :func:`tk.mm`.
        config: as in :func:`tk.mm`.
        out: as in :func:`tk.mm`.

    Raises:
        ValueError: shapes, dtypes or devices do not match, or offs are missing or superfluous.
        tk.UnsupportedError: tk has no kernels for the dtype.
    """
    try:
        settings = product.settings("grouped_mm", a, activation, out_dtype, None, config)
        if out is not None:
            return _grouped_mm_out(a, b, offs, bias, False, *settings, out=out)
        if not settings:
            return _grouped_mm(a, b, offs, bias)
        return _grouped_mm(a, b, offs, bias, False, *settings)
    except (RuntimeError, AttributeError) as error:
        raise product.explained(
            error, "grouped_mm", optional=("offs", "bias"), a=a, b=b, offs=offs, bias=bias, out=out
        ) from None


# --- Shapes ---


def _fake(a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None, zero_rest: bool, *settings: Any) -> Tensor:
    for name, t in (("a", a), ("b", b)):
        torch._check_value(
            t.dim() in (2, 3),
            lambda: f"tk.grouped_mm: {name} must have 2 or 3 dimensions, is {t.shape}",  # noqa: B023
        )
    product.check_product("grouped_mm", b.shape[-2], a=a, b=b)
    is_ragged = a.dim() == 2 or b.dim() == 2
    torch._check_value(
        (offs is not None) == is_ragged,
        lambda: "tk.grouped_mm: offs are needed where a or b has 2 dimensions, and only there",
    )
    groups = [t.shape[0] for t in (offs, *(t for t in (a, b) if t.dim() == 3)) if t is not None]
    for n in groups[1:]:
        torch._check_value(n == groups[0], lambda: f"tk.grouped_mm: the numbers of groups differ: {groups}")
    batch = (groups[0],) if a.dim() == b.dim() else ()
    return product.empty(a, (*batch, a.shape[-2], b.shape[-1]), *settings)


# --- Gradients: of all kinds, they are grouped products too ---


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, offs, bias, _, activation, out_dtype, precision, _, mode = inputs
    product.keep_settings(ctx, activation, out_dtype, precision, mode)
    needs_a, needs_b = product.needs(ctx, 2)
    product.save(ctx, (a, b), (needs_a, needs_b), bias, output, offs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    a, b, bias, out, offs = ctx.saved_tensors
    needs_a, needs_b, _, needs_bias = product.needs(ctx, 4)

    def recompute() -> Tensor:
        return _grouped_mm(a, b, offs, bias, False, *product.again(ctx))

    grad_z = product.activation_backward(grad, ctx.activation, out, recompute)
    narrow = grad_z.to(ctx.dtype)
    rest = (None, True, *product.plain(ctx))
    return (
        _grouped_mm(narrow, b.mT, offs, *rest) if needs_a else None,
        _grouped_mm(a.mT, narrow, offs, *rest) if needs_b else None,
        None,
        _bias_grad(ctx, narrow, offs) if needs_bias else None,
        *(None,) * 6,
    )


def _bias_grad(ctx: Any, grad_z: Tensor, offs: Tensor | None) -> Tensor:
    """Sums of rows, of each group or of all."""
    shape, dtype = ctx.bias_meta
    if grad_z.dim() == 3:
        of_groups = grad_z.sum(1, dtype=torch.promote_types(grad_z.dtype, torch.float32))
    else:
        ones = grad_z.new_ones(()).expand(1, grad_z.shape[0])
        wide = None if grad_z.dtype == torch.float64 else torch.float32
        of_groups = _grouped_mm(ones, grad_z, offs, None, False, 0, wide, ctx.precision, -1, ctx.mode)[:, 0]
    return (of_groups.sum(0) if len(shape) == 1 else of_groups).to(dtype)


product.register("grouped_mm", _fake, _setup, _backward)


# --- What else is known of it ---


def _dims(a: Tensor, b: Tensor, bias: Tensor | None, **_: Any) -> str:
    """A ragged dimension is not sharded, and groups are where none is ragged."""
    is_ragged = a.ndim == 2 or b.ndim == 2
    g = "_" if is_ragged else "g"
    of_bias = f"{g}n" if bias is not None and bias.ndim == 2 else "n"
    if a.ndim == b.ndim:
        return f"m_,_n,_,{of_bias}->_mn" if is_ragged else f"gmk,gkn,,{of_bias}->gmn"
    return f"_k,_kn,_,{of_bias}->_n" if a.ndim == 2 else "_mk,k_,_->m_"


def _calls(t: Maker) -> Iterator[Call]:
    n, bf16 = t.n, torch.bfloat16
    ends = torch.tensor([3 * n, 8 * n], dtype=torch.int32, device=t.device)
    yield t.call("grouped_mm", t(8 * n, 16 * n, dtype=bf16), t(2, 16 * n, 8 * n, dtype=bf16), offs=ends)


_register.record("grouped_mm", Record(_dims, calls=_calls), grouped_mm)
