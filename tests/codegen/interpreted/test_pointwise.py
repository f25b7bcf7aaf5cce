"""Each pointwise op against torch's own on the same arguments: dtype, values, NaN and infinities."""

from __future__ import annotations

import math

import host
import pointwise
import pytest
import torch

from tk.codegen.family import generate
from tk.generated import op
from tk.generated.signature import DTYPES

SIZE = 32
EDGES = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5]
# Against torch in the same dtype: what it rounds itself, and an approximation of the last places.
# fp8: Triton's interpreter rounds to it in its own way.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2,
             torch.float8_e4m3fn: 0.125, torch.float8_e5m2: 0.25}  # fmt: skip


def arguments(case: pointwise.Case, dtype: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(case.name))
    found = []
    for n in range(case.arity):
        x = torch.rand(SIZE, generator=generator, dtype=torch.float64) * (case.high - case.low) + case.low
        if DTYPES[dtype].is_floating_point and case.special:
            edges = torch.tensor(EDGES, dtype=torch.float64)
            x[:8], x[8:16] = (edges, edges.roll(1)) if n else (edges, edges)
        if dtype == "u8":
            x = x.abs()
        found.append((x > 0 if dtype == "bool" else x).to(DTYPES[dtype]))
    return found


CASES = [pytest.param(case, dtype, id=f"{case.name}-{dtype}") for case in pointwise.CASES for dtype in case.dtypes]


@pytest.mark.drawn
@pytest.mark.parametrize(("case", "dtype"), CASES)
def test_pointwise(case: pointwise.Case, dtype: str) -> None:
    names = case.fn.__code__.co_varnames[: case.arity]
    declared = op(**dict.fromkeys(names, f"{dtype}[{SIZE}]"))(case.fn)
    args = arguments(case, dtype)
    expected = case.fn(*args)
    # fp64 says which of two roundings is the nearer one, and what the CPU's vector code gets wrong at infinities.
    exact = case.fn(*(a.double() for a in args)) if DTYPES[dtype].is_floating_point else expected
    generated = generate(case.fn, declared.signature, "f")
    for variant, (actual,) in host.run_all(generated, *args, only="1x1024"):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape, variant
        if not expected.dtype.is_floating_point:
            assert torch.equal(actual, expected), f"{variant}\n{args}\n{actual}\n{expected}"
            continue
        tolerance = TOLERANCE[expected.dtype]
        near = torch.isclose(actual.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
        nearer = (actual.double() - exact.double()).abs() <= (expected.double() - exact.double()).abs()
        right = torch.isclose(actual.double(), exact.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
        wrong = ~(near | nearer | right)
        assert not wrong.any(), f"{variant}\n{[a[wrong] for a in args]}\n{actual[wrong]}\n{expected[wrong]}"
