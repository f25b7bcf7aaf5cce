"""What the tests of products share: the three ops under one form, operands in every layout, how results are judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import tk
from tk.ops.mm import ACTIVATIONS, reference

ACTIVATION_NAMES = tuple(ACTIVATIONS)
LAYOUTS = ("rows", "columns", "strided", "offset", "expanded")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The values of `x` in another layout (the first row or column only, where it must repeat)."""
    if layout == "columns":
        return x.t().contiguous().t()
    if layout == "strided":
        spread = x.new_empty(x.shape[0], 2, x.shape[1], 3)[:, 1, :, 2]
        return spread.copy_(x)
    if layout == "offset":
        base = x.new_empty(x.numel() + 3)[3:]
        return base.view(x.shape).copy_(x)
    if layout == "expanded":
        return x[:1].expand_as(x)
    return x.contiguous()


@dataclass(frozen=True)
class Form:
    """An op, called with a [M, K], b [K, N] and a bias [N] or None."""

    name: str
    call: Callable[..., Tensor]

    def __str__(self) -> str:
        return self.name


def _mm(a: Tensor, b: Tensor, bias: Tensor | None, **settings: object) -> Tensor:
    return tk.mm(a, b, bias, **settings)  # type: ignore[arg-type]


def _addmm(a: Tensor, b: Tensor, bias: Tensor | None, **settings: object) -> Tensor:
    bias = a.new_zeros(b.shape[1]) if bias is None else bias
    return tk.addmm(bias, a, b, **settings)  # type: ignore[arg-type]


def _linear(a: Tensor, b: Tensor, bias: Tensor | None, **settings: object) -> Tensor:
    return tk.linear(a, b.t(), bias, **settings)  # type: ignore[arg-type]


FORMS = (Form("mm", _mm), Form("addmm", _addmm), Form("linear", _linear))


def exact(a: Tensor, b: Tensor, bias: Tensor | None = None, **how: object) -> Tensor:
    """In float64."""
    return reference(a.double(), b.double(), None if bias is None else bias.double(), **how)  # type: ignore[arg-type]


def assert_close(result: Tensor, expected: Tensor, inner: int) -> None:
    """`expected` in float64; one rounding to the result's dtype, and float32 accumulation of `inner` products."""
    assert result.shape == expected.shape
    eps = torch.finfo(result.dtype).eps + (inner + 8) ** 0.5 * torch.finfo(torch.float32).eps
    if result.dtype == torch.float64:
        eps = (inner + 8) * torch.finfo(torch.float64).eps
    torch.testing.assert_close(result.double(), expected, rtol=eps, atol=4 * eps * max(1.0, inner**0.5))


def overloads() -> Iterator[tuple[str, object]]:
    """Every op of the library, out forms included."""
    for name in ("mm", "addmm", "linear"):
        packet = getattr(torch.ops.tk, name)
        yield name, packet.default
        yield f"{name}.out", packet.out
