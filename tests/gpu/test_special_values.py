"""NaN and infinities end where torch's do, and nowhere else."""

import math

import pytest
import torch

import tk
from benchmarks import products

from .cases import KINDS, Kind
from .device import DEVICE

SIZES = ((150, 264, 520), (4, 256, 4096), (33, 77, 95))


def classes(x: torch.Tensor) -> torch.Tensor:
    """0 finite, 1 NaN, 2 inf, 3 -inf."""
    return x.isnan() + 2 * x.isposinf() + 3 * x.isneginf()


@pytest.mark.parametrize("activation", range(len(products.ACTIVATIONS)), ids=[n for n, _ in products.ACTIVATIONS])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_nan_and_inf(kind: Kind, activation: int) -> None:
    name, activate = products.ACTIVATIONS[activation]
    precision = kind.precision if kind.dtype == torch.float32 else None
    for m, n, k in SIZES:
        a, b = torch.randn(m, k, device=DEVICE).to(kind.dtype), torch.randn(k, n, device=DEVICE).to(kind.dtype)
        bias = torch.randn(n, device=DEVICE).to(kind.dtype)
        a[1, 3], a[2, k - 1] = math.nan, math.inf
        b[5, 7], b[k - 1, n - 1] = -math.inf, math.nan
        bias[2], bias[3], bias[4] = math.nan, math.inf, -math.inf
        result = tk.mm(a, b, bias, activation=name, out_dtype=kind.out_dtype, precision=precision)
        with products.torch_precision(kind.precision):
            before = torch.addmm(bias, a, b)
        expected = activate(before)
        if name == "gelu":  # of minus infinity it is 0; ATen multiplies infinity by 0
            expected = torch.where(before == -math.inf, 0, expected)
        assert torch.equal(classes(result), classes(expected)), (m, n, k)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_beta_zero_does_not_read_the_bias(kind: Kind) -> None:
    a, b = torch.randn(40, 50, device=DEVICE).to(kind.dtype), torch.randn(50, 60, device=DEVICE).to(kind.dtype)
    bias = torch.full((60,), math.nan, device=DEVICE, dtype=kind.dtype)
    result = tk.addmm(bias, a, b, beta=0, out_dtype=kind.out_dtype)
    assert torch.equal(result, tk.mm(a, b, out_dtype=kind.out_dtype))


def test_overflow_of_the_result_is_infinite() -> None:
    a = torch.full((64, 512), 200.0, device=DEVICE, dtype=torch.float16)
    assert tk.mm(a, a.t()).isposinf().all()
    assert tk.mm(a, a.t(), out_dtype=torch.float32).eq(512 * 200.0**2).all()
