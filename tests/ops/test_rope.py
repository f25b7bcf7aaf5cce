"""Rotary positions: the tables' two forms, with pairs as halves and as neighbours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tk

S, D = 7, 8


def tables() -> tuple[Tensor, Tensor]:
    """[S, D/2]: all values different."""
    angles = torch.randn(S, D // 2)
    return angles.cos(), angles.sin()


def rotate_half(x: Tensor) -> Tensor:
    """Llama's."""
    return torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1)


def rotate_neighbours(x: Tensor) -> Tensor:
    """GLM's and Cohere's."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def twice(table: Tensor, interleaved: bool) -> Tensor:
    return table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
def test_both_forms_of_tables(interleaved: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, (cos, sin) = torch.randn(2, 3, S, D).to(dtype), tables()
    wide_cos, wide_sin = twice(cos, interleaved), twice(sin, interleaved)
    rotate = rotate_neighbours if interleaved else rotate_half
    expected = x.double() * wide_cos + rotate(x.double()) * wide_sin
    for given in ((cos, sin), (wide_cos, wide_sin), (cos, wide_sin)):
        found = tk.rope(x, *given, interleaved)
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("interleaved", [True, False])
def test_gradients_with_both_forms(interleaved: bool) -> None:
    torch.manual_seed(0)
    x, (cos, sin) = torch.randn(2, S, D, dtype=torch.float64, requires_grad=True), tables()
    cos, sin = cos.double(), sin.double()
    wide = twice(cos, interleaved), twice(sin, interleaved)
    assert torch.autograd.gradcheck(lambda x: tk.rope(x, *wide, interleaved), x)
    weights = torch.randn(2, S, D, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((tk.rope(x, *given, interleaved) * weights).sum(), x)[0] for given in ((cos, sin), wide)
    ]
    torch.testing.assert_close(*gradients)


def test_what_the_tables_must_be() -> None:
    with pytest.raises(ValueError, match=r"cos must be \[7, 4\] or \[7, 8\]"):
        tk.rope(torch.randn(S, D), torch.randn(S, 5), torch.randn(S, 4), True)
