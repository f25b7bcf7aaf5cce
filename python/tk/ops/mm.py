"""Matrix products: ``mm``, ``addmm`` and ``linear``, with bias and activation in the epilogue.

    out = activation(alpha * a @ b + beta * bias)

Sums are float32 (float64 for float64 operands), and the result is rounded once. The kernels are declared in
kernels/mm/. On the CPU ATen ops compute the same formula (csrc/ops/reference.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tk.ops import _register, product
from tk.ops._register import Record
from tk.ops.product import ACTIVATIONS, Activation, Precision, reference

if TYPE_CHECKING:
    from tk.cli._calls import Call, Maker

__all__ = ["ACTIVATIONS", "Activation", "Precision", "addmm", "linear", "mm", "reference"]

_mm, _mm_out = _register.overloads("mm")
_addmm, _addmm_out = _register.overloads("addmm")
_linear, _linear_out = _register.overloads("linear")
_FORMULA = product.Formula(_mm, _addmm)


# --- The wrappers ---


def mm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    activation: Activation = "none",
    out_dtype: torch.dtype | None = None,
    precision: Precision | None = None,
    config: str | int | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Computes ``activation(a @ b + bias)``, as ``torch.mm`` with an epilogue.

    Args:
        a: ``[M, K]``, bfloat16, float16 or float32 (on the CPU also float64), with any strides.
        b: ``[K, N]``, of the same dtype and device, with any strides.
        bias: a tensor of the same dtype that broadcasts to ``[M, N]`` as in torch, or None.
        activation: "none", "relu", "gelu", "gelu_tanh" or "silu". It is applied before the result is rounded.
        out_dtype: the result's dtype: that of the operands (the default) or float32.
        precision: "ieee" or "tf32" for float32 operands. By default it is what
            ``torch.backends.cuda.matmul.fp32_precision`` (or the older ``allow_tf32``) says.
        config: the name or number of a config for this call. By default it is the one that is predicted to be fastest.
        out: a tensor for the result, ``[M, N]`` and of the result's dtype. It must share no memory with the operands.

    Returns:
        ``[M, N]``, row-major, or ``out``.

    Raises:
        TypeError: an argument is not a tensor where one is needed.
        ValueError: shapes, dtypes or devices do not match, or the config does not fit the call.
        tk.UnsupportedError: tk has no kernels for the dtype.
        tk.VariantNotFoundError: no loaded pack has a kernel for this call.
    """
    try:
        settings = product.settings("mm", a, activation, out_dtype, precision, config)
        if out is not None:
            return _mm_out(a, b, bias, *settings, out=out)
        return _mm(a, b, bias, *settings)
    except (RuntimeError, AttributeError) as error:
        raise product.explained(error, "mm", a=a, b=b, bias=bias, out=out) from None


def addmm(
    bias: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    activation: Activation = "none",
    out_dtype: torch.dtype | None = None,
    precision: Precision | None = None,
    config: str | int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes ``activation(beta * bias + alpha * a @ b)``, as ``torch.addmm`` with an activation.

    The bias broadcasts to ``[M, N]``. With ``beta=0`` it is not read, so NaN and inf in it do not spread. ``out`` may
    be ``bias`` itself. The other arguments, the result and the errors are those of :func:`mm`.
    """
    try:
        settings = product.settings("mm", a, activation, out_dtype, precision, config, "addmm")
        if out is not None:
            return _addmm_out(bias, a, b, beta, alpha, *settings, out=out)
        return _addmm(bias, a, b, beta, alpha, *settings)
    except (RuntimeError, AttributeError) as error:
        raise product.explained(error, "addmm", optional=(), bias=bias, a=a, b=b, out=out) from None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation = "none",
    out_dtype: torch.dtype | None = None,
    precision: Precision | None = None,
    config: str | int | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Computes ``activation(x @ weight.T + bias)``, as ``torch.nn.functional.linear`` with an activation.

    Args:
        x: ``[..., K]``. It is copied if its leading dimensions cannot be viewed as one.
        weight: ``[N, K]``, or ``[K]`` for a result without its last dimension.
        bias: ``[N]``, or None. With a vector as weight: one number, or None.

    Returns:
        ``[..., N]``, contiguous, or ``out``. The other arguments and the errors are those of :func:`mm`.
    """
    try:
        if weight.dim() == 1:
            return _linear_of_vector(x, weight, bias, activation, out_dtype, precision, config, out)
        settings = product.settings("mm", x, activation, out_dtype, precision, config, "linear")
        if out is not None:
            return _linear_out(x, weight, bias, *settings, out=out)
        return _linear(x, weight, bias, *settings)
    except (RuntimeError, AttributeError) as error:
        raise product.explained(error, "linear", x=x, weight=weight, bias=bias, out=out) from None


def _linear_of_vector(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    """Does it as torch does: with a weight of one row, whose column of results is dropped."""
    *settings, out = settings  # type: ignore[assignment]
    if bias is not None and bias.numel() != 1:
        raise ValueError(f"tk.linear: bias is {list(bias.shape)}, must be one number, since weight is a vector")
    row = None if bias is None else bias.reshape(1)
    if out is None:
        return linear(x, weight.unsqueeze(0), row, *settings).squeeze(-1)
    if out.numel() == 0:
        out.resize_(x.shape[:-1])
    linear(x, weight.unsqueeze(0), row, *settings, out=out.unsqueeze(-1))
    return out


# --- Shapes ---


def _fake_mm(a: Tensor, b: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    product.check_rank("mm", 2, a=a, b=b)
    product.check_product("mm", b.shape[0], a=a, b=b)
    return product.empty(a, (a.shape[0], b.shape[1]), *settings)


def _fake_addmm(bias: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float, *settings: Any) -> Tensor:
    return _fake_mm(a, b, bias, *settings)


def _fake_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    torch._check_value(x.dim() >= 1, lambda: "tk.linear: x must have at least 1 dimension")
    product.check_rank("linear", 2, weight=weight)
    product.check_product("linear", weight.shape[1], x=x, weight=weight)
    return product.empty(x, (*x.shape[:-1], weight.shape[0]), *settings)


# --- Gradients ---


def _backward_linear(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, bias, out = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = product.needs(ctx, 3)

    def recompute() -> Tensor:
        return _linear(x, weight, bias, *product.again(ctx))

    grad_z = product.activation_backward(grad, ctx.activation, out, recompute)
    rows = product.rows(grad_z)
    narrow = rows.to(ctx.dtype)
    grad_x = grad_weight = None
    if needs_x:
        grad_x = _mm(narrow, weight, None, *product.plain(ctx)).reshape(*grad.shape[:-1], weight.shape[1])
    if needs_weight:
        grad_weight = _mm(narrow.t(), product.rows(x), None, *product.plain(ctx))
    return grad_x, grad_weight, product.bias_grad(ctx, rows, 1) if needs_bias else None, *(None,) * 5


# --- vmap ---


def _is_one_row(bias: Tensor | None, dim: int | None) -> bool:
    """The same for every row of every batch."""
    return bias is None or (dim is None and (bias.dim() < 2 or bias.shape[0] == 1))


def _vmap_mm(op: Any, info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
    a, b, bias, *settings = args
    a_dim, b_dim, bias_dim = in_dims[:3]
    if b_dim is None and _is_one_row(bias, bias_dim):
        a = a.movedim(a_dim, 0)
        return op(product.rows(a), b, bias, *settings).reshape(*a.shape[:-1], b.shape[-1]), 0
    return product.loop(op, info, in_dims, *args)


def _vmap_addmm(op: Any, info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
    bias, a, b, *settings = args
    bias_dim, a_dim, b_dim = in_dims[:3]
    if a_dim is not None and b_dim is None and _is_one_row(bias, bias_dim):
        a = a.movedim(a_dim, 0)
        return op(bias, product.rows(a), b, *settings).reshape(*a.shape[:-1], b.shape[-1]), 0
    return product.loop(op, info, in_dims, *args)


def _vmap_linear(op: Any, info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
    x, weight, bias, *settings = args
    x_dim, weight_dim, bias_dim = in_dims[:3]
    if weight_dim is None and bias_dim is None:
        return op(x.movedim(x_dim, 0), weight, bias, *settings), 0
    return product.loop(op, info, in_dims, *args)


product.register("mm", _fake_mm, _FORMULA.setup_multiply, _FORMULA.backward_multiply, _vmap_mm)
product.register("addmm", _fake_addmm, _FORMULA.setup_add, _FORMULA.backward_add, _vmap_addmm)
product.register("linear", _fake_linear, _FORMULA.setup_multiply, _backward_linear, _vmap_linear)


# --- What else is known of them ---


def _linear_in_aten(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    return product.multiply_in_aten(x, weight.mT, bias, *settings)


def _calls_of_mm(t: Maker) -> Iterator[Call]:
    yield t.call("mm", t(4 * t.n, 8 * t.n), t(8 * t.n, 5 * t.n), torchs=torch.mm)


def _calls_of_addmm(t: Maker) -> Iterator[Call]:
    yield t.call("addmm", t(5 * t.n), t(4 * t.n, 8 * t.n), t(8 * t.n, 5 * t.n), torchs=torch.addmm)


def _calls_of_linear(t: Maker) -> Iterator[Call]:
    yield t.call("linear", t(2, 4 * t.n, 8 * t.n), t(5 * t.n, 8 * t.n), t(5 * t.n), torchs=F.linear)


_register.record("mm", Record("mk,kn->mn", product.multiply_in_aten, calls=_calls_of_mm), mm)
_register.record("addmm", Record(",mk,kn->mn", product.add_in_aten, "mm", _calls_of_addmm), addmm)
_register.record("linear", Record("...k,nk->...n", _linear_in_aten, "mm", _calls_of_linear), linear)
