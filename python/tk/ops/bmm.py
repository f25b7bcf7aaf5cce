"""Products of batches: ``bmm`` and ``baddbmm``.

    out[i] = activation(alpha * a[i] @ b[i] + beta * bias[i])

The kernels are declared in kernels/bmm/. A matrix that the whole batch shares is ``x.expand(batch, -1, -1)``. It is
read without a copy.
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

__all__ = ["baddbmm", "bmm"]

_bmm, _bmm_out = _register.overloads("bmm")
_baddbmm, _baddbmm_out = _register.overloads("baddbmm")
_FORMULA = product.Formula(_bmm, _baddbmm)


# --- The wrappers ---


def bmm(
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
    """Computes ``activation(a[i] @ b[i] + bias[i])`` for each i, as ``torch.bmm`` with an epilogue.

    Args:
        a: ``[B, M, K]``, with any strides. The batch's stride is 0 where all products share one matrix.
        b: ``[B, K, N]``, likewise.
        bias: a tensor that broadcasts to ``[B, M, N]`` as in torch, or None.

    Returns:
        ``[B, M, N]``, contiguous, or ``out``. The other arguments and the errors are those of :func:`tk.mm`.
    """
    try:
        settings = product.settings("bmm", a, activation, out_dtype, precision, config)
        if out is not None:
            return _bmm_out(a, b, bias, *settings, out=out)
        return _bmm(a, b, bias, *settings)
    except (RuntimeError, AttributeError) as error:
        raise product.explained(error, "bmm", a=a, b=b, bias=bias, out=out) from None


def baddbmm(
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
    """Computes ``activation(beta * bias[i] + alpha * a[i] @ b[i])`` for each i, as ``torch.baddbmm``.

    The bias broadcasts to ``[B, M, N]``. With ``beta=0`` it is not read, so NaN and inf in it do not spread. ``out``
    may be ``bias`` itself. The other arguments, the result and the errors are those of :func:`bmm`.
    """
    try:
        settings = product.settings("bmm", a, activation, out_dtype, precision, config, "baddbmm")
        if out is not None:
            return _baddbmm_out(bias, a, b, beta, alpha, *settings, out=out)
        return _baddbmm(bias, a, b, beta, alpha, *settings)
    except (RuntimeError, AttributeError) as error:
        raise product.explained(error, "baddbmm", optional=(), bias=bias, a=a, b=b, out=out) from None


# --- Shapes ---


def _fake_bmm(a: Tensor, b: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    product.check_rank("bmm", 3, a=a, b=b)
    torch._check_value(a.shape[0] == b.shape[0], lambda: f"tk.bmm: the batch sizes differ: {a.shape} and {b.shape}")
    product.check_product("bmm", b.shape[1], a=a, b=b)
    return product.empty(a, (a.shape[0], a.shape[1], b.shape[2]), *settings)


def _fake_baddbmm(bias: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float, *settings: Any) -> Tensor:
    return _fake_bmm(a, b, bias, *settings)


# --- vmap: the new batch goes in front of the one that is there ---


def _joined(x: Tensor, dim: int | None, size: int) -> Tensor:
    """``[B, M, N]``, with or without the new batch, as ``[size * B, M, N]``."""
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _joined_bias(bias: Tensor | None, dim: int | None, size: int, batch: int) -> Tensor | None:
    if bias is None:
        return None
    bias = bias.expand(size, *bias.shape) if dim is None else bias.movedim(dim, 0)
    bias = bias.reshape(size, *(1,) * (4 - bias.dim()), *bias.shape[1:])
    return bias.expand(size, batch, *bias.shape[2:]).flatten(0, 1)


def _vmap_bmm(op: Any, info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
    a, b, bias, *settings = args
    size = info.batch_size
    if bias is None and in_dims[1] is None:  # more rows of the same matrices
        rows = a.movedim(in_dims[0], 1)
        out = op(rows.flatten(1, 2), b, None, *settings)
        return out.unflatten(1, (size, rows.shape[2])), 1
    a, b = _joined(a, in_dims[0], size), _joined(b, in_dims[1], size)
    batch = a.shape[0] // size
    return op(a, b, _joined_bias(bias, in_dims[2], size, batch), *settings).unflatten(0, (size, batch)), 0


def _vmap_baddbmm(op: Any, info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
    bias, a, b, *settings = args
    size = info.batch_size
    a, b = _joined(a, in_dims[1], size), _joined(b, in_dims[2], size)
    batch = a.shape[0] // size
    return op(_joined_bias(bias, in_dims[0], size, batch), a, b, *settings).unflatten(0, (size, batch)), 0


product.register("bmm", _fake_bmm, _FORMULA.setup_multiply, _FORMULA.backward_multiply, _vmap_bmm)
product.register("baddbmm", _fake_baddbmm, _FORMULA.setup_add, _FORMULA.backward_add, _vmap_baddbmm)


# --- What else is known of them ---


def _calls_of_bmm(t: Maker) -> Iterator[Call]:
    yield t.call("bmm", t(3, 4 * t.n, 8 * t.n), t(3, 8 * t.n, 5 * t.n), torchs=torch.bmm)


def _calls_of_baddbmm(t: Maker) -> Iterator[Call]:
    args = t(3, 4 * t.n, 5 * t.n), t(3, 4 * t.n, 8 * t.n), t(3, 8 * t.n, 5 * t.n)
    yield t.call("baddbmm", *args, torchs=torch.baddbmm)


def _draw(d: Draws) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    m, n, k = (d.size(16, 4096, d.step()) for _ in range(3))
    return (d.size(2, 1024, 1), m, n, k), {"order": d.order()}


def _inputs(d: Drawn) -> tuple[Tensor, ...]:
    a, b = d.matrix(d.m, d.k, d.order[0], d.batch), d.matrix(d.k, d.n, d.order[1], d.batch)
    return a, b, d.empty(d.batch, d.m, d.n)


def _timed(d: Drawn, a: Tensor, b: Tensor, out: Tensor, config: int = -1) -> Tensor:
    return _bmm_out(a, b, None, 0, None, -1, config, 0, out=out)


_TUNING = Tuning(("batch", "m", "n", "k"), _draw, _inputs, _timed, torch.bmm)
_register.record("bmm", Record("bmk,bkn->bmn", product.multiply_in_aten, calls=_calls_of_bmm, tuning=_TUNING), bmm)
_register.record("baddbmm", Record(",bmk,bkn->bmn", product.add_in_aten, "bmm", _calls_of_baddbmm), baddbmm)
