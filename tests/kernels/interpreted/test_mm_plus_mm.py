"""mm_plus_mm_pointer: every combination of its axes, every config, in fp32 and fp16 (as test_mm.py says)."""

from __future__ import annotations

import math

import pytest
import torch

from tk.aot.grid import Variant, enumerate_grid
from tk.kernels.epilogue import ACTIVATIONS
from tk.kernels.gemm.problem import PRECISION_AXIS
from tk.kernels.mm_plus_mm.family import FAMILY
from tk.kernels.mm_plus_mm.op import OP

from .launcher import describe, run
from .test_mm import ACTIVATE, DTYPES, ROUNDING, matrix, name, rounded_to_tf32

ORDERS = ("nn", "nt", "tn", "tt", "ss")
VARIANTS = [
    v for v in enumerate_grid(FAMILY, 80).variants if v.kernel.name == "mm_plus_mm_pointer" and v.point.dtype in DTYPES
]


def check(v: Variant, operands: tuple[torch.Tensor, ...], bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """alpha 0.5, beta -2, gelu."""
    expanded = None if bias is None else bias.expand(out.shape)
    ints = (ACTIVATIONS.index("gelu"), PRECISION_AXIS.index(v.point.precision))
    run(OP, v.plan, (*operands, expanded, out), ints, (0.5, -2.0))
    a, b, c, d = (rounded_to_tf32(t.double()) if v.point.precision == "tf32" else t.double() for t in operands)
    z = 0.5 * (a @ b + c @ d) + (0 if bias is None else -2 * bias.double())
    k = a.shape[1] + c.shape[1]
    atol = 4 * (8 + math.sqrt(k)) * 2.0**-24 * (math.sqrt(k) + 1)
    torch.testing.assert_close(out.double(), ACTIVATE["gelu"](z), rtol=2 * ROUNDING[out.dtype], atol=atol)


@pytest.mark.drawn
@pytest.mark.parametrize("v", VARIANTS, ids=name)
def test_every_variant(v: Variant) -> None:
    p, c, step = v.point, v.point.config, 16 if v.point.aligned else 5
    m, n, k, k2 = c.block_m + step, c.block_n + step, c.block_k + step, 2 * c.block_k - (0 if p.aligned else 3)
    dtype = DTYPES[p.dtype]
    first, second = ((matrix(m, x, dtype, p.order[0], p.aligned), matrix(x, n, dtype, p.order[1], p.aligned))
                     for x in (k, k2))  # fmt: skip
    out_dtype = torch.float32 if p.out == "fp32" else dtype
    out = matrix(m, n, out_dtype, "s" if p.order == "ss" else "n", p.aligned).fill_(math.nan)
    check(v, (*first, *second), torch.randn(m, n).to(dtype), out)


GENERAL = next(v for v in VARIANTS if not v.point.aligned and v.point.config.fma and v.point.order == "ss")


@pytest.mark.parametrize("shape", ((1, 1, 1, 1), (1, 40, 70, 3), (40, 1, 2, 33), (70, 33, 31, 64)), ids=str)
def test_sizes(shape: tuple[int, int, int, int]) -> None:
    m, n, k, k2 = shape
    operands = (torch.randn(m, k), torch.randn(k, n), torch.randn(m, k2), torch.randn(k2, n))
    check(GENERAL, operands, None, torch.full((m, n), math.nan))


@pytest.mark.drawn
@pytest.mark.parametrize("second", ORDERS)
@pytest.mark.parametrize("first", ORDERS)
def test_products_of_two_orders_are_taken_for_strided(first: str, second: str) -> None:
    operands = tuple(
        matrix(*size, torch.float32, letter, False)
        for size, letter in (((9, 7), first[0]), ((7, 8), first[1]), ((9, 6), second[0]), ((6, 8), second[1]))
    )
    out = torch.full((9, 8), math.nan)
    problem = describe(OP, (*operands, None, out), (0, 0))
    assert ORDERS[OP.selectors["order"].value.evaluate(problem)] == (first if first == second else "ss")
    check(GENERAL, operands, None, out)
