"""What all products share: their settings, gradients, batching rules and registration.

csrc/ops/product.h is the counterpart in C++. docs/products.md says what each product adds.

    out = activation(alpha * a @ b + beta * bias)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tk import config as _config
from tk import errors
from tk._names import did_you_mean
from tk.heuristics import overrides
from tk.ops import _register

Activation = Literal["none", "relu", "gelu", "gelu_tanh", "silu"]
Precision = Literal["ieee", "tf32"]

ACTIVATIONS: Mapping[str, int] = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
PRECISIONS: Mapping[str | None, int] = {None: -1, "ieee": 0, "tf32": 1}


def reference(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    beta: float = 1,
    alpha: float = 1,
    activation: Activation = "none",
) -> Tensor:
    """Computes a product in plain torch, in the dtype of its arguments. Tests compare with it in float64."""
    z = alpha * (a @ b)
    if bias is not None and beta != 0:
        z = z + beta * bias
    return ACTIVATE[activation](z)


ACTIVATE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}


# --- Calls ---


def settings(
    op: str,
    first: Tensor,
    activation: str,
    out_dtype: torch.dtype | None,
    precision: str | None,
    config: str | int | None,
    function: str = "",
) -> tuple[Any, ...]:
    """The codes that follow an op's operands. function: the caller's name, where it is not the op's.

    There are none when all settings are defaults, since every argument costs time.
    """
    mode, pinned = overrides.find(op, first)
    if config is not None:
        pinned = overrides.number(op, config, first, function)
    if not mode and pinned < 0 and activation == "none" and out_dtype is None and precision is None:
        return ()
    function = function or op
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"tk.{function}: activation is {activation!r}, must be one of {', '.join(ACTIVATIONS)}"
                         f"{_same_activation(activation)}")  # fmt: skip
    if not isinstance(precision, str | None) or precision not in PRECISIONS:
        raise ValueError(f"tk.{function}: precision is {precision!r}, must be 'ieee', 'tf32' or None")
    if not isinstance(out_dtype, torch.dtype | None):
        raise TypeError(f"tk.{function}: out_dtype must be a torch.dtype or None, is {out_dtype!r}")
    return ACTIVATIONS[activation], out_dtype, PRECISIONS[precision], pinned, mode


def allows_tf32() -> bool:
    """Whether torch rounds float32 to tf32 in products on CUDA.

    That is the value of ``torch.backends.cuda.matmul.fp32_precision`` with the settings that it inherits from.
    (``allow_tf32`` sets it as well, but cannot be read once that was set.)
    """
    return torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"


# torch.compile cannot trace the question, so it takes the answer of the moment in which it traces. The switch is part
# of the state that torch.compile guards.
allows_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


def explained(error: Exception, op: str, optional: Sequence[str] = ("bias",), **tensors: Any) -> Exception:
    """The error that the caller should see. `optional` names the tensors that may be None besides out."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor) and not (value is None and name in (*optional, "out")):
            return TypeError(f"tk.{op}: {name} must be a Tensor, is {type(value).__name__}")
        if value is not None and (refused := errors.not_dense(op, name, value)) is not None:
            return refused
        if value is not None and value.is_quantized:
            return errors.UnsupportedError(f"tk.{op}: {name} is quantized, must not be, as x.dequantize() makes one")
    return errors.typed(error)


# --- Shapes ---


def _same_activation(given: Any) -> str:
    """What was meant by a function or module of torch, by None, or by another's name."""
    name = given if isinstance(given, str) else "none" if given is None else _name_of(given)
    ours = {"swish": "silu"}.get(name.lower(), name.lower())
    if ours not in ACTIVATIONS:
        question = did_you_mean(ours, ACTIVATIONS, 0.6)
        return f"; {question}" if question else ""
    return f"; {name if isinstance(given, str) else 'that'} is {ours!r}"


def _name_of(given: Any) -> str:
    return str(getattr(given, "__name__", type(given).__name__))


def empty(like: Tensor, sizes: Sequence[Any], activation: int, out_dtype: torch.dtype | None, *settings: int) -> Tensor:
    """The result that a product's settings ask for."""
    return like.new_empty(sizes, dtype=out_dtype or like.dtype)


def check_rank(op: str, rank: int, **tensors: Tensor) -> None:
    for name, t in tensors.items():
        torch._check_value(t.dim() == rank, lambda: f"tk.{op}: {name} must have {rank} dimensions, is {t.shape}")  # noqa: B023


def check_product(op: str, inner: Any, **operands: Tensor) -> None:
    """Checks two operands, by name. inner: the inner size of the second."""
    (left, a), (right, b) = operands.items()
    torch._check_value(
        a.shape[-1] == inner,
        lambda: f"tk.{op}: the inner sizes differ: {left} is {list(a.shape)}, {right} is {list(b.shape)}",
    )
    check_same(op, **operands)


def check_same(op: str, **operands: Tensor) -> None:
    (left, a), (right, b) = operands.items()
    torch._check_value(
        a.dtype == b.dtype, lambda: f"tk.{op}: dtypes differ: {left} is {_name(a.dtype)}, {right} is {_name(b.dtype)}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- Gradients ---
#
# The derivative of an activation needs z = alpha * a @ b + beta * bias. For relu the sign of z is in the result. For
# the others the backward computes z again. So the forward is the same fused kernel with the same bits, with and
# without gradients, and no [M, N] tensor is kept alive. All formulas consist of differentiable ops, so they have
# second derivatives.


def activation_backward(grad: Tensor, activation: int, out: Tensor, recompute: Callable[[], Tensor]) -> Tensor:
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


def save(
    ctx: Any, factors: Sequence[Tensor], needs: Sequence[bool], bias: Tensor | None, out: Tensor, *more: Tensor | None
) -> None:
    """Keeps what the wanted gradients will read.

    Args:
        factors: pairs of operands. The gradient of one reads the other.
        needs: which factors need a gradient.
        more: tensors that are kept as they are.
    """
    needs_z = ctx.activation > ACTIVATIONS["relu"]
    ctx.bias_meta = None if bias is None else (bias.shape, bias.dtype)
    ctx.dtype = factors[0].dtype
    ctx.save_for_backward(
        *(x if needs_z or needs[i ^ 1] else None for i, x in enumerate(factors)),
        bias if needs_z else None,
        out if ctx.activation == ACTIVATIONS["relu"] else None,
        *more,
    )


def needs(ctx: Any, count: int) -> tuple[bool, ...]:
    """Which of `count` tensors need a gradient.

    The dispatcher drops arguments at the end that equal their defaults, and these need none.
    """
    return (*ctx.needs, *(False,) * count)[:count]


def keep_settings(ctx: Any, activation: int, out_dtype: torch.dtype | None, precision: int, mode: int) -> None:
    # The gradient is an operand that other kernels are still writing, so it does not count as static weights.
    ctx.activation, ctx.out_dtype, ctx.precision = activation, out_dtype, precision
    ctx.mode = mode & ~_config.STATIC_WEIGHTS


def plain(ctx: Any) -> tuple[Any, ...]:
    """The settings of a product in the backward."""
    return 0, None, ctx.precision, -1, ctx.mode


def again(ctx: Any) -> tuple[Any, ...]:
    """The settings of z, which is computed again."""
    return 0, ctx.out_dtype, ctx.precision, -1, ctx.mode


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def bias_grad(ctx: Any, grad_z: Tensor, beta: float) -> Tensor:
    shape, dtype = ctx.bias_meta
    return scaled(grad_z.sum_to_size(shape), beta).to(dtype)


@dataclass(frozen=True)
class Formula:
    """The gradients of ``multiply(a, b, bias, *settings)`` and ``add(bias, a, b, beta, alpha, *settings)``.

    The operands are matrices or batches of matrices.
    """

    multiply: Any
    add: Any

    def setup_multiply(self, ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, bias, activation, out_dtype, precision, _, mode = inputs
        ctx.beta = ctx.alpha = 1
        keep_settings(ctx, activation, out_dtype, precision, mode)
        save(ctx, (a, b), needs(ctx, 2), bias, output)

    def setup_add(self, ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        bias, a, b, ctx.beta, ctx.alpha, activation, out_dtype, precision, _, mode = inputs
        keep_settings(ctx, activation, out_dtype, precision, mode)
        save(ctx, (a, b), needs(ctx, 3)[1:], bias, output)

    def backward_multiply(self, ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *self._gradients(ctx, grad, needs(ctx, 3)), *(None,) * 5

    def backward_add(self, ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        needs_bias, needs_a, needs_b = needs(ctx, 3)
        grad_a, grad_b, grad_bias = self._gradients(ctx, grad, (needs_a, needs_b, needs_bias))
        return grad_bias, grad_a, grad_b, *(None,) * 7

    def _gradients(self, ctx: Any, grad: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """The gradients of a, b and bias."""
        a, b, bias, out = ctx.saved_tensors

        def recompute() -> Tensor:
            if bias is None:
                return self.multiply(a, b, None, *again(ctx))
            return self.add(bias, a, b, ctx.beta, ctx.alpha, *again(ctx))

        grad_z = activation_backward(grad, ctx.activation, out, recompute)
        narrow = grad_z.to(ctx.dtype)
        return (
            scaled(self.multiply(narrow, b.mT, None, *plain(ctx)), ctx.alpha) if needs[0] else None,
            scaled(self.multiply(a.mT, narrow, None, *plain(ctx)), ctx.alpha) if needs[1] else None,
            bias_grad(ctx, grad_z, ctx.beta) if needs[2] else None,
        )


# --- In ATen's ops, which forward mode differentiates ---


def wide(x: Tensor) -> Tensor:
    """Makes x float32 where it has 16 bits, so that nothing is rounded to 16 bits in between."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def activated(z: Tensor, activation: int, out_dtype: torch.dtype) -> Tensor:
    return _BY_NUMBER[activation](z).to(out_dtype)


_BY_NUMBER = tuple(ACTIVATE[name] for name in ACTIVATIONS)


def with_bias(
    z: Tensor, bias: Tensor | None, like: Tensor, activation: int, out_dtype: torch.dtype | None, *_: Any
) -> Tensor:
    """like: an operand, whose dtype the result has unless `out_dtype` names one."""
    return activated(z if bias is None else z + wide(bias), activation, out_dtype or like.dtype)


def multiply_in_aten(a: Tensor, b: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    return with_bias(wide(a) @ wide(b), bias, a, *settings)


def add_in_aten(bias: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float, *settings: Any) -> Tensor:
    z = alpha * (wide(a) @ wide(b))
    return with_bias(z, beta * wide(bias) if beta else None, a, *settings)


# --- vmap ---


def unbatched(x: Tensor | None, dim: int | None, i: int) -> Tensor | None:
    return x if x is None or dim is None else x.select(dim, i)


def one_by_one(op: Any, info: Any, in_dims: Sequence[int | None], *args: Any) -> list[Any]:
    """What the op makes of each element of the batch."""

    def pick(i: int) -> list[Any]:
        return [unbatched(x, d, i) if isinstance(x, Tensor) else x for x, d in zip(args, in_dims, strict=True)]

    return [op(*pick(i)) for i in range(info.batch_size)]


def loop(op: Any, info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Tensor, int]:
    """The batching rule that serves every op of one result: one call for each element of the batch."""
    return torch.stack(one_by_one(op, info, in_dims, *args)), 0


def rows(x: Tensor) -> Tensor:
    """Views ``[..., K]`` as ``[rows, K]``. reshape(-1, K) could not, because K may be 0, and flatten has no rule for
    the batches of ``torch.autograd.grad(..., is_grads_batched=True)``."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def register(name: str, allocate: Any, setup: Any, backward: Any, vmap: Any = loop) -> None:
    """Registers an op of the family: its fake, gradients, batching rule, autocast and ``out`` form."""
    _register.autograd(name, setup, backward)
    _register_rest(name, allocate, vmap)


def register_for_inference(name: str, allocate: Any) -> None:
    """Registers an op of the family that has no gradient."""
    _register.at_autograd(name, _register.inference_only(_register.overloads(name)[0]))
    _register_rest(name, allocate, loop)


def _register_rest(name: str, allocate: Any, vmap: Any) -> None:
    _register.fake(name, allocate)
    _register.vmap(name, vmap)
    _register.autocast(name)
    _register.out_form(name)
