"""kernels/bmm/pointer.py: every combination of its axes and every config, in fp32 and fp16 (as test_mm.py says)."""

from __future__ import annotations

import math

import pytest
import torch

from tk.aot.grid import Variant, enumerate_grid
from tk.kernels.bmm.family import FAMILY
from tk.kernels.bmm.op import OP
from tk.kernels.epilogue import ACTIVATIONS
from tk.kernels.gemm.problem import PRECISION_AXIS

from .launcher import run
from .test_mm import ACTIVATE, DTYPES, ROUNDING, name, rounded_to_tf32

VARIANTS = [
    v for v in enumerate_grid(FAMILY, 80).variants if v.kernel.name == "bmm_pointer" and v.point.dtype in DTYPES
]
BATCH = 3


def batch(rows: int, cols: int, dtype: torch.dtype, letter: str, aligned: bool) -> torch.Tensor:
    """Normal random numbers; NaN in all memory around them. letter: n row-major, t column-major, s neither."""
    if letter == "t":
        return batch(cols, rows, dtype, "n", aligned).mT
    step = 3 if letter == "s" else 1
    pitch = -(-cols * step // 16) * 16 + 16 if aligned else cols * step + 3
    offset = 0 if aligned else 1
    of_matrix = rows * pitch + (16 if aligned else 5)
    memory = torch.full((offset + BATCH * of_matrix,), math.nan, dtype=dtype)
    view = memory.as_strided((BATCH, rows, cols), (of_matrix, pitch, step), offset)
    view.copy_(torch.randn(BATCH, rows, cols))
    return view


def sizes(v: Variant) -> tuple[int, int, int]:
    """A little more than a tile both ways."""
    c, step = v.point.config, 16 if v.point.aligned else 5
    return c.block_m + step, c.block_n + step, c.block_k + step


def check(v: Variant, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """alpha 0.5, beta -2, relu."""
    expanded = None if bias is None else bias.expand(out.shape)
    ints = (ACTIVATIONS.index("relu"), PRECISION_AXIS.index(v.point.precision))
    run(OP, v.plan, (a, b, expanded, out), ints, (0.5, -2.0))
    x, y = (rounded_to_tf32(t.double()) if v.point.precision == "tf32" else t.double() for t in (a, b))
    z = 0.5 * (x @ y) + (0 if bias is None else -2 * bias.double())
    summed = 8 * math.sqrt(a.shape[2]) * 2.0**-24 * math.sqrt(a.shape[2])
    torch.testing.assert_close(out.double(), ACTIVATE["relu"](z), rtol=2 * ROUNDING[out.dtype], atol=4 * summed)


@pytest.mark.drawn
@pytest.mark.parametrize("v", VARIANTS, ids=name)
def test_every_variant(v: Variant) -> None:
    p = v.point
    m, n, k = sizes(v)
    dtype = DTYPES[p.dtype]
    a, b = batch(m, k, dtype, p.order[0], p.aligned), batch(k, n, dtype, p.order[1], p.aligned)
    out_dtype = torch.float32 if p.out == "fp32" else dtype
    out = batch(m, n, out_dtype, "s" if p.order == "ss" else "n", p.aligned).fill_(math.nan)
    bias = torch.randn(BATCH, m, n).to(dtype)
    check(v, a, b, bias, out)
    assert out.untyped_storage().size() // out.itemsize > out.numel(), "there is memory around the result"
    left = torch.as_strided(out, (out.untyped_storage().size() // out.itemsize,), (1,), 0)
    assert left.isnan().sum() == left.numel() - out.numel(), "what lies between the matrices stays"


GENERAL = next(v for v in VARIANTS if not v.point.aligned and v.point.config.fma and v.point.order == "ss")


@pytest.mark.parametrize("shared", ("a", "b", "both"))
def test_a_matrix_that_all_share(shared: str) -> None:
    a, b = torch.randn(BATCH, 20, 33), torch.randn(BATCH, 33, 17)
    a = a[:1].expand_as(a) if shared != "b" else a
    b = b[:1].expand_as(b) if shared != "a" else b
    check(GENERAL, a, b, None, torch.full((BATCH, 20, 17), math.nan))


@pytest.mark.parametrize("shape", ((), (1, 17), (20, 1), (BATCH, 1, 1), (1, 20, 17), (BATCH, 20, 1)), ids=str)
def test_biases(shape: tuple[int, ...]) -> None:
    out = torch.full((BATCH, 20, 17), math.nan)
    check(GENERAL, torch.randn(BATCH, 20, 33), torch.randn(BATCH, 33, 17), torch.randn(shape), out)


def test_a_batch_in_the_middle() -> None:
    """[tokens, heads, size], as attention has it."""
    x, y = torch.randn(20, BATCH, 33).transpose(0, 1), torch.randn(17, BATCH, 33).transpose(0, 1).mT
    check(GENERAL, x, y, None, torch.full((20, BATCH, 17), math.nan).transpose(0, 1))
