"""Functions that are taken apart in arithmetic, against torch's in float64."""

from __future__ import annotations

import pytest
import torch

from tk.codegen.tracing.special import digamma, polygamma


def near_poles(dtype: torch.dtype) -> torch.Tensor:
    """From a few last places away to half way to the next."""
    poles = -torch.arange(0, 40, dtype=dtype)
    away = torch.tensor([1e-6, 1e-5, 1e-3, 0.01, 0.1, 0.3, 0.5], dtype=dtype)
    x = poles[:, None] + torch.cat((away, -away))
    return torch.cat((x[x != x.round()], torch.rand(500, dtype=dtype) * 30))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-9)], ids=str)
def test_digamma_close_to_its_poles(dtype: torch.dtype, tolerance: float) -> None:
    """In float64 torch itself, which does not round to the pole, is no closer to it."""
    x = near_poles(dtype)
    expected = torch.digamma(x.double())
    away = (digamma(x).double() - expected).abs() / (1 + expected.abs())
    assert away.max() < tolerance, x[away.argmax()]


def test_digamma_at_its_poles() -> None:
    x = torch.tensor([-3.0, -1.0, -0.0, 0.0, float("inf"), -float("inf"), float("nan")])
    torch.testing.assert_close(digamma(x), torch.digamma(x), equal_nan=True)


def test_trigamma_close_to_its_poles() -> None:
    x = near_poles(torch.float32)
    x = x[(x - x.round()).abs() > 1e-4]  # there torch's own loses digits in float64 too
    expected = torch.polygamma(1, x.double())
    away = (polygamma(1, x).double() - expected).abs() / (1 + expected.abs())
    assert away.max() < 2e-6, x[away.argmax()]
