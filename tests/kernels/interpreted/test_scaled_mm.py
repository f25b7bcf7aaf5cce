"""kernels/scaled_mm/pointer.py and scaled_grouped_mm_pointer: every variant, and every number of float8.

Results of fp16 and fp32, as test_mm.py says; bf16 differs in the rounding of the store alone.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from tk.aot.grid import Variant, enumerate_grid
from tk.kernels.epilogue import ACTIVATIONS
from tk.kernels.scaled_grouped_mm.family import FAMILY as GROUPED
from tk.kernels.scaled_mm.family import FAMILY
from tk.kernels.scaled_mm.pointer import widen

from .launcher import H200, describe, failed_constraint, run
from .test_mm import ACTIVATE, ROUNDING, name

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OUT = {"fp16": torch.float16, "fp32": torch.float32}
VARIANTS, GROUP_VARIANTS = (
    [v for v in enumerate_grid(f, 80).variants if v.point.out in OUT] for f in (FAMILY, GROUPED)
)
GROUPS = 3


@triton.jit
def _widen_all(x, out, is_e5m2, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, widen(tl.load(x + i), is_e5m2))


@pytest.mark.parametrize("dtype", (E4M3, E5M2), ids=str)
def test_every_number_is_itself(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(256, dtype=torch.float16)
    _widen_all[(1,)](codes, out, int(dtype == E5M2), 256)
    torch.testing.assert_close(out.double(), codes.view(dtype).double(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out.signbit(), codes >= 128), "-0 too"


def float8(*shape: int, dtype: torch.dtype, letter: str, aligned: bool) -> torch.Tensor:
    """Normal random numbers; NaN in all memory around them. letter: n row-major, t column-major, s neither."""
    *lead, rows, cols = shape
    if letter == "t":
        return float8(*lead, cols, rows, dtype=dtype, letter="n", aligned=aligned).mT
    step = 3 if letter == "s" else 1
    pitch = -(-cols * step // 16) * 16 + 16 if aligned else cols * step + 3
    offset, of_matrix = (0, rows * pitch + 16) if aligned else (1, rows * pitch + 5)
    memory = torch.full((offset + math.prod(lead) * of_matrix,), math.nan).to(dtype)
    strides = (of_matrix, pitch, step)[-len(shape) :]
    view = memory.as_strided(shape, strides, offset)
    view.copy_(torch.randn(shape))
    return view


def result(v: Variant, rows: int, cols: int) -> torch.Tensor:
    dtype, p = OUT[v.point.out], v.point
    whole = torch.full((rows, cols * 2 if p.order == "ss" else cols), math.nan, dtype=dtype)
    return whole[:, ::2] if p.order == "ss" else whole


def agree(out: torch.Tensor, z: torch.Tensor, bias: torch.Tensor | None, inner: int) -> None:
    expected = ACTIVATE["silu"](z if bias is None else z + bias.double())
    atol = 8 * math.sqrt(inner) * 2.0**-24 * (math.sqrt(inner) + 1)
    torch.testing.assert_close(out.double(), expected, rtol=2 * ROUNDING[out.dtype], atol=4 * atol)


def exact(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double() * scale_a.double() * scale_b.double()


PAIRS = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))


@pytest.mark.drawn
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("v", VARIANTS, ids=name)
def test_every_variant(v: Variant, pair: tuple[torch.dtype, torch.dtype]) -> None:
    p, c, step = v.point, v.point.config, 16 if v.point.aligned else 5
    m, n, k = c.block_m + step, c.block_n + step, c.block_k + step
    letters = "nt" if p.order == "nt" else "ts"
    a, b = (
        float8(*s, dtype=d, letter=x, aligned=p.aligned)
        for s, d, x in zip(((m, k), (k, n)), pair, letters, strict=True)
    )
    rows, cols = torch.rand(m, 2)[:, :1], torch.rand(n, 1).t()
    one = torch.tensor([[0.7]])
    bias = torch.randn(1, n).to(OUT[p.out])
    for scale_a, scale_b, z in ((rows, cols, bias), (one.expand(m, 1), one.expand(1, n), None)):
        out = result(v, m, n)
        run(v.kernel.op, v.plan, (a, b, scale_a, scale_b, z, out), (ACTIVATIONS.index("silu"), 0), ())
        agree(out, exact(a, b, scale_a, scale_b), z, k)


@pytest.mark.parametrize("v", GROUP_VARIANTS, ids=name)
def test_every_variant_of_groups(v: Variant) -> None:
    p, c, step = v.point, v.point.config, 16 if v.point.aligned else 5
    total, n, k = 2 * c.block_m + 16, c.block_n + step, c.block_k + step
    letters = "nt" if p.order == "nt" else "ss"
    a = float8(total, k, dtype=E4M3, letter=letters[0], aligned=p.aligned)
    b = float8(GROUPS, k, n, dtype=E5M2, letter=letters[1], aligned=p.aligned)
    scale_a, scale_b = torch.rand(total, 1), torch.rand(GROUPS, 1, n)
    bias = torch.randn(GROUPS, 1, n).to(OUT[p.out])
    ends = [c.block_m + 3, c.block_m + 3, total - 1]
    out = result(v, total, n)
    offs = torch.tensor([ends], dtype=torch.int32)
    run(v.kernel.op, v.plan, (a, b, scale_a, scale_b, offs, bias, out), (ACTIVATIONS.index("silu"), 0), ())
    for g, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        part = slice(begin, end)
        agree(out[part], exact(a[part], b[g], scale_a[part], scale_b[g]), bias[g], k)
    assert out[ends[-1] :].isnan().all(), "what comes after the last end stays"


@pytest.mark.parametrize(("arch", "is_refused"), ((80, True), (86, True), (89, False), (120, False)))
def test_a_gpu_without_float8_is_refused(arch: int, is_refused: bool) -> None:
    a, b = torch.randn(16, 16).to(E4M3), torch.randn(16, 16).to(E4M3).t()
    problem = describe(FAMILY.op, (a, b, torch.ones(16, 1), torch.ones(1, 16), None, torch.empty(16, 16)), (0, 0))
    problem = replace(problem, device=H200 | {"arch": arch})
    for v in VARIANTS:
        assert ("8.9" in (failed_constraint(v.plan, problem) or "")) == is_refused
