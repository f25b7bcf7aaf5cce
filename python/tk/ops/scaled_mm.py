"""``scaled_mm``: the product of two float8 matrices with scales.

    out = activation(scale_a * scale_b * (a @ b) + bias)

It is for inference and has no gradient. The kernels are declared in kernels/scaled_mm/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tk._arguments import flag
from tk.ops import _register, product, scaled
from tk.ops._register import Record, Tuning
from tk.ops.product import Activation

if TYPE_CHECKING:
    from tk.cli._calls import Call, Maker
    from tk.tune.products import Drawn, Draws

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
    """Computes ``activation(scale_a * scale_b * (a @ b) + bias)``, with the conventions of ``torch._scaled_mm``.

    The operands are torch.float8_e4m3fn, and one of them may be torch.float8_e5m2. They have any sizes and strides. The
    fast kernels need K contiguous in both, as ``b = weight.t()`` has it, and rows that are multiples of 16 bytes.

    Args:
        a: ``[M, K]``.
        b: ``[K, N]``.
        scale_a: float32, either one number (a tensor of any rank with one element), or ``[M, 1]``: one for each row of
            a.
        scale_b: float32, either one number, or ``[1, N]``: one for each column of b.
        bias: ``[N]`` of the result's dtype, or None. A float32 result also takes a bfloat16 or float16 bias.
        out_dtype: torch.bfloat16 (the default), float16 or float32. (torch's default is a's own dtype.)
        use_fast_accum: whether sums stay in the tensor cores, which keep about 14 bits of them. Otherwise every 128
            products are added up in float32. On the CPU, and in kernels that widen their operands, sums are always
            float32.
        activation: as in :func:`tk.mm`.
        config: as in :func:`tk.mm`.
        out: as in :func:`tk.mm`.

    Returns:
        ``[M, N]``, row-major, or ``out``.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
        NotImplementedError: in a backward through the result.
        tk.UnsupportedError: tk has no kernels for the dtype, both operands are e5m2, or the GPU has no float8 (it is
            older than compute capability 8.9).
    """
    try:
        flag("scaled_mm", "use_fast_accum", use_fast_accum)
        settings = product.settings("scaled_mm", a, activation, out_dtype, None, config)
        if out is not None:
            return _scaled_mm_out(a, b, scale_a, scale_b, bias, use_fast_accum, *settings, out=out)
        if not settings and not use_fast_accum:
            return _scaled_mm(a, b, scale_a, scale_b, bias)
        return _scaled_mm(a, b, scale_a, scale_b, bias, use_fast_accum, *settings)
    except (RuntimeError, AttributeError) as error:
        raise product.explained(
            error, "scaled_mm", a=a, b=b, scale_a=scale_a, scale_b=scale_b, bias=bias, out=out
        ) from None


def _fake(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, use_fast_accum: bool, *settings: Any
) -> Tensor:
    product.check_rank("scaled_mm", 2, a=a, b=b)
    return scaled.allocate("scaled_mm", a, b, bias, *settings)


scaled.register("scaled_mm", _fake)


# --- What else is known of it ---


def _calls(t: Maker) -> Iterator[Call]:
    n, fp8, bf16 = t.n, torch.float8_e4m3fn, torch.bfloat16
    a, b = t(16 * n, 32 * n, dtype=fp8), t(16 * n, 32 * n, dtype=fp8).t()
    one, row, column = (torch.ones(s, device=t.device) for s in ((), (16 * n, 1), (1, 16 * n)))
    yield t.call("scaled_mm", a, b, one, one, out_dtype=bf16)
    yield t.call("scaled_mm", a, b, row, column, out_dtype=bf16)


def _draw(d: Draws) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    m = d.size(1, 8192, d.choice((1, 8, 64)))
    n, k = (d.size(512, 16384, max(16, d.step())) for _ in range(2))
    return (m, n, k), {"fast": d.random() < 0.5}


def _inputs(d: Drawn) -> tuple[Tensor, ...]:
    a, b = (x.to(torch.float8_e4m3fn) for x in (d.matrix(d.m, d.k), d.matrix(d.k, d.n, "t")))
    scales = torch.rand(d.m, 1, device=d.device) + 0.5, torch.rand(1, d.n, device=d.device) + 0.5
    return a, b, *scales, d.empty(d.m, d.n)


def _timed(d: Drawn, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor, config: int = -1) -> Tensor:
    return _scaled_mm_out(a, b, scale_a, scale_b, None, d.fast, 0, None, -1, config, 0, out=out)


def _reference(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return (a.bfloat16() @ b.bfloat16()).float() * scale_a * scale_b


_TUNING = Tuning(("m", "n", "k"), _draw, _inputs, _timed, _reference, ({"fast": False}, {"fast": True}))
_register.record("scaled_mm", Record("mk,kn,m_,_n->mn", calls=_calls, tuning=_TUNING), scaled_mm)
