"""``mm_plus_mm``: two products in one accumulator.

    out = activation(a @ b + c @ d + bias)

The sum is rounded once. Two calls would round twice, and write the first product to memory in between. The kernels are
declared in kernels/mm_plus_mm/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tk.ops import _register, product
from tk.ops._register import Record, Tuning
from tk.ops.product import Activation, Precision

if TYPE_CHECKING:
    from tk.cli._calls import Call, Maker
    from tk.tune.products import Drawn, Draws

__all__ = ["mm_plus_mm"]

_mm, _ = _register.overloads("mm")
_mm_plus_mm, _mm_plus_mm_out = _register.overloads("mm_plus_mm")


def mm_plus_mm(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    bias: Tensor | None = None,
    activation: Activation = "none",
    out_dtype: torch.dtype | None = None,
    precision: Precision | None = None,
    config: str | int | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Computes ``activation(a @ b + c @ d + bias)``, as Inductor's kernel of this name.

    All operands have one dtype and device, and any strides.

    Args:
        a: ``[M, K1]``.
        b: ``[K1, N]``.
        c: ``[M, K2]``.
        d: ``[K2, N]``.
        bias: a tensor that broadcasts to ``[M, N]`` as in torch, or None.

    Returns:
        ``[M, N]``, row-major, or ``out``. The other arguments and the errors are those of :func:`tk.mm`.
    """
    try:
        settings = product.settings("mm_plus_mm", a, activation, out_dtype, precision, config)
        if out is not None:
            return _mm_plus_mm_out(a, b, c, d, bias, *settings, out=out)
        return _mm_plus_mm(a, b, c, d, bias, *settings)
    except (RuntimeError, AttributeError) as error:
        raise product.explained(error, "mm_plus_mm", a=a, b=b, c=c, d=d, bias=bias, out=out) from None


def _fake(a: Tensor, b: Tensor, c: Tensor, d: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    product.check_rank("mm_plus_mm", 2, a=a, b=b, c=c, d=d)
    product.check_product("mm_plus_mm", b.shape[0], a=a, b=b)
    product.check_product("mm_plus_mm", d.shape[0], c=c, d=d)
    product.check_same("mm_plus_mm", a=a, c=c)
    torch._check_value(
        (a.shape[0] == c.shape[0]) & (b.shape[1] == d.shape[1]),
        lambda: f"tk.mm_plus_mm: the products differ in shape: {a.shape} @ {b.shape} and {c.shape} @ {d.shape}",
    )
    return product.empty(a, (a.shape[0], b.shape[1]), *settings)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, c, d, bias, activation, out_dtype, precision, _, mode = inputs
    product.keep_settings(ctx, activation, out_dtype, precision, mode)
    product.save(ctx, (a, b, c, d), product.needs(ctx, 4), bias, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    a, b, c, d, bias, out = ctx.saved_tensors
    needs = product.needs(ctx, 5)

    def recompute() -> Tensor:
        return _mm_plus_mm(a, b, c, d, bias, *product.again(ctx))

    grad_z = product.activation_backward(grad, ctx.activation, out, recompute)
    narrow = grad_z.to(ctx.dtype)
    plain = (None, *product.plain(ctx))
    return (
        _mm(narrow, b.mT, *plain) if needs[0] else None,
        _mm(a.mT, narrow, *plain) if needs[1] else None,
        _mm(narrow, d.mT, *plain) if needs[2] else None,
        _mm(c.mT, narrow, *plain) if needs[3] else None,
        product.bias_grad(ctx, grad_z, 1) if needs[4] else None,
        *(None,) * 5,
    )


product.register("mm_plus_mm", _fake, _setup, _backward)


# --- What else is known of it ---


def _in_aten(a: Tensor, b: Tensor, c: Tensor, d: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    z = product.wide(a) @ product.wide(b) + product.wide(c) @ product.wide(d)
    return product.with_bias(z, bias, a, *settings)


def _calls(t: Maker) -> Iterator[Call]:
    first, second = (t(4 * t.n, 8 * t.n), t(8 * t.n, 5 * t.n)), (t(4 * t.n, 6 * t.n), t(6 * t.n, 5 * t.n))
    yield t.call("mm_plus_mm", *first, *second, torchs=lambda a, b, c, d: a @ b + c @ d)


def _draw(d: Draws) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    m = d.size(32, 8192, d.choice((1, 8, 64)))
    n, k, k2 = (d.size(256, 8192, d.step()) for _ in range(3))
    return (m, n, k, k2), {"order": d.order()}


def _inputs(d: Drawn) -> tuple[Tensor, ...]:
    first = d.matrix(d.m, d.k, d.order[0]), d.matrix(d.k, d.n, d.order[1])
    second = d.matrix(d.m, d.k2, d.order[0]), d.matrix(d.k2, d.n, d.order[1])
    return *first, *second, d.empty(d.m, d.n)


def _timed(drawn: Drawn, a: Tensor, b: Tensor, c: Tensor, d: Tensor, out: Tensor, config: int = -1) -> Tensor:
    return _mm_plus_mm_out(a, b, c, d, None, 0, None, -1, config, 0, out=out)


def _reference(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return torch.addmm(torch.mm(a, b), c, d)


_RECORD = Record(
    "m_,_n,m_,_n->mn",  # no sum over one of the inner sizes: each GPU would add the other product
    _in_aten,
    calls=_calls,
    tuning=Tuning(("m", "n", "k", "k2"), _draw, _inputs, _timed, _reference),
)
_register.record("mm_plus_mm", _RECORD, mm_plus_mm)
