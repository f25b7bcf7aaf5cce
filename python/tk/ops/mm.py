"""Matrix products: ``mm``, ``addmm`` and ``linear``, with bias and activation in the store.

    out = activation(alpha * a @ b + beta * bias)

Accumulated in float32 (float64 for float64) and rounded once. The kernels are declared in kernels/mm/; on the CPU the
same formula is computed with ATen ops (csrc/ops/reference.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tk import config as _config
from tk import errors
from tk.heuristics import overrides
from tk.ops import _register

__all__ = ["Activation", "Precision", "addmm", "linear", "mm", "reference"]

Activation = Literal["none", "relu", "gelu", "gelu_tanh", "silu"]
Precision = Literal["ieee", "tf32"]

ACTIVATIONS: Mapping[str, int] = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
PRECISIONS: Mapping[str | None, int] = {None: -1, "ieee": 0, "tf32": 1}

_mm, _mm_out = _register.overloads("mm")
_addmm, _addmm_out = _register.overloads("addmm")
_linear, _linear_out = _register.overloads("linear")


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
    """``activation(a @ b + bias)``.

    Args:
        a: ``[M, K]``, bfloat16, float16 or float32 (float64 on the CPU), any strides.
        b: ``[K, N]``, of the same dtype and device, any strides.
        bias: broadcast to ``[M, N]`` as torch does, of the same dtype.
        activation: "none", "relu", "gelu", "gelu_tanh" or "silu", applied before the result is rounded.
        out_dtype: that of the operands (the default) or float32.
        precision: of float32 products, "ieee" or "tf32"; by default as
            ``torch.backends.cuda.matmul.allow_tf32`` says.
        config: a config's name or number, for this call; by default the predicted fastest.
        out: where the result goes, ``[M, N]`` of the result's dtype, sharing no memory with the operands.

    Returns:
        ``[M, N]``, row-major (or ``out``).

    Raises:
        ValueError: shapes, dtypes or devices that do not go together; a config that does not fit.
        tk.UnsupportedError: a dtype that tk has no kernels for.
        tk.VariantNotFoundError: no loaded pack has a kernel for this problem.
    """
    try:
        settings = _settings("mm", a, activation, out_dtype, precision, config)
        if out is not None:
            return _mm_out(a, b, bias, *settings, out=out)
        return _mm(a, b, bias, *settings)
    except (RuntimeError, AttributeError) as error:
        raise _explained(error, "mm", a=a, b=b, bias=bias) from None


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
    """``activation(beta * bias + alpha * a @ b)``, as ``torch.addmm``.

    With ``beta=0`` the bias is not read: NaN and inf in it do not spread. ``out`` may be ``bias`` itself. Other
    arguments, result and errors as of :func:`mm`.
    """
    try:
        settings = _settings("mm", a, activation, out_dtype, precision, config)
        if out is not None:
            return _addmm_out(bias, a, b, beta, alpha, *settings, out=out)
        return _addmm(bias, a, b, beta, alpha, *settings)
    except (RuntimeError, AttributeError) as error:
        raise _explained(error, "addmm", bias=bias, a=a, b=b) from None


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
    """``activation(x @ weight.T + bias)``, as ``torch.nn.functional.linear``.

    Args:
        x: ``[..., K]``. Leading dimensions that do not run together in memory cost a copy.
        weight: ``[N, K]``.
        bias: ``[N]``.

    Returns:
        ``[..., N]``, contiguous (or ``out``). Other arguments and errors as of :func:`mm`.
    """
    try:
        settings = _settings("mm", x, activation, out_dtype, precision, config)
        if out is not None:
            return _linear_out(x, weight, bias, *settings, out=out)
        return _linear(x, weight, bias, *settings)
    except (RuntimeError, AttributeError) as error:
        raise _explained(error, "linear", x=x, weight=weight, bias=bias) from None


def reference(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    beta: float = 1,
    alpha: float = 1,
    activation: Activation = "none",
) -> Tensor:
    """What all of the above compute, in plain torch and in the dtype of the arguments: give it float64 to judge by."""
    z = alpha * (a @ b)
    if bias is not None and beta != 0:
        z = z + beta * bias
    return _ACTIVATE[activation](z)


_ACTIVATE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}


def _settings(
    op: str,
    first: Tensor,
    activation: str,
    out_dtype: torch.dtype | None,
    precision: str | None,
    config: str | int | None,
) -> tuple[Any, ...]:
    """The integer codes that follow an op's operands; none when all are defaults, since every argument costs time."""
    mode, pinned = overrides.find(op, first)
    if config is not None:
        pinned = overrides.number(op, config, first)
    if not mode and pinned < 0 and activation == "none" and out_dtype is None and precision is None:
        return ()
    if activation not in ACTIVATIONS:
        raise ValueError(f"tk.{op}: activation is {activation!r}, must be one of {', '.join(ACTIVATIONS)}")
    if precision not in PRECISIONS:
        raise ValueError(f"tk.{op}: precision is {precision!r}, must be 'ieee', 'tf32' or None")
    return ACTIVATIONS[activation], out_dtype, PRECISIONS[precision], pinned, mode


def _explained(error: Exception, op: str, **tensors: Any) -> Exception:
    """The error that the caller should see."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor) and not (value is None and name == "bias"):
            return TypeError(f"tk.{op}: {name} must be a Tensor, is {type(value).__name__}")
    return errors.typed(error)


# --- Shapes ---


def _result_dtype(a: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    return a.dtype if out_dtype is None else out_dtype


def _check_product(op: str, a: Tensor, b: Tensor, inner_b: Any) -> None:
    torch._check_value(a.shape[-1] == inner_b, lambda: f"tk.{op}: the inner sizes differ: {a.shape} and {b.shape}")
    torch._check_value(a.dtype == b.dtype, lambda: f"tk.{op}: dtypes differ: {a.dtype} and {b.dtype}")
    torch._check_value(a.device == b.device, lambda: f"tk.{op}: devices differ: {a.device} and {b.device}")


def _fake_mm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    activation: int = 0,
    out_dtype: torch.dtype | None = None,
    *settings: int,
    **other: int,
) -> Tensor:
    for name, t in (("a", a), ("b", b)):
        torch._check_value(t.dim() == 2, lambda: f"tk.mm: {name} must have 2 dimensions, is {t.shape}")  # noqa: B023
    _check_product("mm", a, b, b.shape[0])
    return a.new_empty((a.shape[0], b.shape[1]), dtype=_result_dtype(a, out_dtype))


def _fake_addmm(
    bias: Tensor,
    a: Tensor,
    b: Tensor,
    beta: float = 1,
    alpha: float = 1,
    activation: int = 0,
    out_dtype: torch.dtype | None = None,
    *settings: int,
    **other: int,
) -> Tensor:
    return _fake_mm(a, b, bias, activation, out_dtype)


def _fake_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: int = 0,
    out_dtype: torch.dtype | None = None,
    *settings: int,
    **other: int,
) -> Tensor:
    torch._check_value(x.dim() >= 1, lambda: "tk.linear: x must have at least 1 dimension")
    torch._check_value(weight.dim() == 2, lambda: f"tk.linear: weight must have 2 dimensions, is {weight.shape}")
    _check_product("linear", x, weight, weight.shape[1])
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=_result_dtype(x, out_dtype))


# --- Gradients ---
#
# What an activation's derivative needs is z = alpha * a @ b + beta * bias. relu's sign is in the result. The others
# compute z again: so the forward is the same fused kernel, the same bits, with and without gradients, and no [M, N]
# tensor is kept alive. All formulas are made of differentiable ops: they have second derivatives.


def _activation_backward(grad: Tensor, activation: int, out: Tensor, recompute: Callable[[], Tensor]) -> Tensor:
    aten = torch.ops.aten
    if activation == ACTIVATIONS["relu"]:
        return aten.threshold_backward(grad, out, 0)
    if activation == ACTIVATIONS["gelu"]:
        return aten.gelu_backward(grad, recompute())
    if activation == ACTIVATIONS["gelu_tanh"]:
        return aten.gelu_backward(grad, recompute(), approximate="tanh")
    if activation == ACTIVATIONS["silu"]:
        return _silu_backward(grad, recompute())
    return grad


def _silu_backward(grad: Tensor, z: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return torch.ops.aten.silu_backward(grad, z)
    sigmoid = torch.sigmoid(z)  # ATen's own has no derivative
    return grad * sigmoid * (1 + z * (1 - sigmoid))


def _save(ctx: Any, needs: Sequence[bool], a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Keeps what the gradients that are asked for will read. needs: of a, b and bias."""
    needs_z = ctx.activation > ACTIVATIONS["relu"]
    ctx.bias_meta = None if bias is None else (bias.shape, bias.dtype)
    ctx.save_for_backward(
        a if needs[1] or needs_z else None,
        b if needs[0] or needs_z else None,
        bias if needs_z else None,
        out if ctx.activation == ACTIVATIONS["relu"] else None,
    )


def _needs(ctx: Any) -> tuple[bool, ...]:
    """Which of the three tensors need a gradient: the dispatcher drops arguments at the end that are their defaults."""
    return (*ctx.needs, False)[:3]


def _keep_settings(ctx: Any, activation: int, out_dtype: torch.dtype | None, precision: int, mode: int) -> None:
    # The gradient is a second operand that is being written: what holds of weights does not hold of it.
    ctx.activation, ctx.out_dtype, ctx.precision = activation, out_dtype, precision
    ctx.mode = mode & ~_config.STATIC_WEIGHTS


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def _bias_grad(ctx: Any, grad_z: Tensor, beta: float) -> Tensor:
    shape, dtype = ctx.bias_meta
    return _scaled(grad_z.sum_to_size(shape), beta).to(dtype)


def _product(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
    return _mm(a, b, None, 0, None, ctx.precision, -1, ctx.mode)


def _setup_addmm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    bias, a, b, ctx.beta, ctx.alpha, activation, out_dtype, precision, _, mode = inputs
    _keep_settings(ctx, activation, out_dtype, precision, mode)
    needs_bias, needs_a, needs_b = _needs(ctx)
    ctx.dtype = a.dtype
    _save(ctx, (needs_a, needs_b, needs_bias), a, b, bias, output)


def _addmm_grads(ctx: Any, grad: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of a, b and bias."""
    a, b, bias, out = ctx.saved_tensors
    z_settings = (0, ctx.out_dtype, ctx.precision, -1, ctx.mode)

    def recompute() -> Tensor:
        if bias is None:
            return _mm(a, b, None, *z_settings)
        return _addmm(bias, a, b, ctx.beta, ctx.alpha, *z_settings)

    grad_z = _activation_backward(grad, ctx.activation, out, recompute)
    narrow = grad_z.to(ctx.dtype)
    return (
        _scaled(_product(ctx, narrow, b.t()), ctx.alpha) if needs[0] else None,
        _scaled(_product(ctx, a.t(), narrow), ctx.alpha) if needs[1] else None,
        _bias_grad(ctx, grad_z, ctx.beta) if needs[2] else None,
    )


def _backward_addmm(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    needs_bias, needs_a, needs_b = _needs(ctx)
    grad_a, grad_b, grad_bias = _addmm_grads(ctx, grad, (needs_a, needs_b, needs_bias))
    return grad_bias, grad_a, grad_b, *(None,) * 7


def _setup_mm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias, activation, out_dtype, precision, _, mode = inputs
    ctx.beta = ctx.alpha = 1
    _keep_settings(ctx, activation, out_dtype, precision, mode)
    ctx.dtype = a.dtype
    _save(ctx, _needs(ctx), a, b, bias, output)


def _backward_mm(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *_addmm_grads(ctx, grad, _needs(ctx)), *(None,) * 5


def _rows(x: Tensor) -> Tensor:
    """``[..., K]`` as ``[rows, K]``; K may be 0, from which no reshape(-1, K) finds the rows."""
    return torch.atleast_2d(x).flatten(0, -2)


def _backward_linear(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, bias, out = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = _needs(ctx)

    def recompute() -> Tensor:
        return _linear(x, weight, bias, 0, ctx.out_dtype, ctx.precision, -1, ctx.mode)

    grad_z = _activation_backward(grad, ctx.activation, out, recompute)
    rows = _rows(grad_z)
    narrow = rows.to(ctx.dtype)
    grad_x = grad_weight = None
    if needs_x:
        grad_x = _product(ctx, narrow, weight).reshape(*grad.shape[:-1], weight.shape[1])
    if needs_weight:
        grad_weight = _product(ctx, narrow.t(), _rows(x))
    return grad_x, grad_weight, _bias_grad(ctx, rows, 1) if needs_bias else None, *(None,) * 5


# --- vmap ---


def _unbatched(x: Tensor | None, dim: int | None, i: int) -> Tensor | None:
    return x if x is None or dim is None else x.select(dim, i)


def _loop(op: Any, size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> tuple[Tensor, int]:
    """One call for each element of the batch."""

    def pick(i: int) -> list[Any]:
        return [_unbatched(x, d, i) if isinstance(x, Tensor) else x for x, d in zip(args, in_dims, strict=True)]

    return torch.stack([op(*pick(i)) for i in range(size)]), 0


def _is_one_row(bias: Tensor | None, dim: int | None) -> bool:
    """The same for every row of every batch."""
    return bias is None or (dim is None and (bias.dim() < 2 or bias.shape[0] == 1))


def _vmap_mm(op: Any, info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
    a, b, bias, *settings = args
    a_dim, b_dim, bias_dim = in_dims[:3]
    if b_dim is None and _is_one_row(bias, bias_dim):
        a = a.movedim(a_dim, 0)
        return op(_rows(a), b, bias, *settings).reshape(*a.shape[:-1], b.shape[-1]), 0
    return _loop(op, info.batch_size, in_dims, args)


def _vmap_addmm(op: Any, info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
    bias, a, b, *settings = args
    bias_dim, a_dim, b_dim = in_dims[:3]
    if a_dim is not None and b_dim is None and _is_one_row(bias, bias_dim):
        a = a.movedim(a_dim, 0)
        return op(bias, _rows(a), b, *settings).reshape(*a.shape[:-1], b.shape[-1]), 0
    return _loop(op, info.batch_size, in_dims, args)


def _vmap_linear(op: Any, info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
    x, weight, bias, *settings = args
    x_dim, weight_dim, bias_dim = in_dims[:3]
    if weight_dim is None and bias_dim is None:
        return op(x.movedim(x_dim, 0), weight, bias, *settings), 0
    return _loop(op, info.batch_size, in_dims, args)


def _register_all() -> None:
    formulas: dict[str, tuple[Callable[..., Any], ...]] = {
        "mm": (_fake_mm, _backward_mm, _setup_mm, _vmap_mm),
        "addmm": (_fake_addmm, _backward_addmm, _setup_addmm, _vmap_addmm),
        "linear": (_fake_linear, _backward_linear, _setup_mm, _vmap_linear),
    }
    for name, (allocate, backward, setup, vmap_rule) in formulas.items():
        _register.fake(name, allocate)
        _register.autograd(name, setup, backward)
        _register.vmap(name, vmap_rule)
        _register.autocast(name)
        _register.out_form(name)


_register_all()
