"""kernels/grouped_mm/pointer.py: every variant, in fp16 (as test_mm.py says), and groups of every kind."""

from __future__ import annotations

import math

import pytest
import torch

from tk.aot.grid import Variant, enumerate_grid
from tk.kernels.epilogue import ACTIVATIONS
from tk.kernels.grouped_mm.family import FAMILIES

from .launcher import run
from .test_bmm import batch
from .test_mm import ACTIVATE, ROUNDING, matrix, name

ROWS, INNER = ([v for v in enumerate_grid(f, 80).variants if v.point.dtype == "fp16"] for f in FAMILIES)
GROUPS = 3  # of tests/kernels/interpreted/test_bmm.py's batches


def launch(v: Variant, *tensors: torch.Tensor | None) -> None:
    """alpha 0.5, beta -2, silu."""
    run(v.kernel.op, v.plan, tensors, (ACTIVATIONS.index("silu"), 0), (0.5, -2.0))


def agree(result: torch.Tensor, z: torch.Tensor, bias: torch.Tensor, inner: int) -> None:
    expected = ACTIVATE["silu"](0.5 * z - 2 * bias.double())
    atol = 4 * (8 + math.sqrt(inner)) * 2.0**-24 * (math.sqrt(inner) + 1)
    torch.testing.assert_close(result.double(), expected, rtol=2 * ROUNDING[result.dtype], atol=atol)


def check_rows(v: Variant, ends: list[int], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    bias = torch.randn(len(ends), b.shape[2]).half()
    offs = torch.tensor([ends], dtype=torch.int32)
    launch(v, a, b, offs, bias[:, None], out)
    clamped = [min(max(end, 0), len(a)) for end in ends]
    for g, (begin, end) in enumerate(zip([0, *clamped], clamped, strict=False)):
        agree(out[begin:end], a[begin:end].double() @ b[g].double(), bias[g], a.shape[1])
    assert out[clamped[-1] :].isnan().all(), "what comes after the last end stays"


@pytest.mark.drawn
@pytest.mark.parametrize("v", ROWS, ids=name)
def test_every_variant_of_ragged_rows(v: Variant) -> None:
    p, c, step = v.point, v.point.config, 16 if v.point.aligned else 5
    rows, n, k = 2 * c.block_m + 16, c.block_n + step, c.block_k + step
    a, b = matrix(rows, k, torch.float16, p.order[0], p.aligned), batch(k, n, torch.float16, p.order[1], p.aligned)
    dtype = torch.float32 if p.out == "fp32" else torch.float16
    out = matrix(rows, n, dtype, "s" if p.order == "ss" else "n", p.aligned).fill_(math.nan)
    check_rows(v, [c.block_m + 3, c.block_m + 3, rows - 1], a, b, out)


GENERAL = next(v for v in ROWS if not v.point.aligned and v.point.order == "ss" and v.point.out == "same")
GENERAL_INNER = next(v for v in INNER if not v.point.aligned and v.point.order == "ss" and v.point.out == "same")


@pytest.mark.parametrize(
    "ends",
    ([0, 0, 0], [5, 5, 5], [0, 0, 130], [130, 130, 130], [1, 2, 3], [64, 128, 130], [1000, 1000, 1000], [-4, 7, 130]),
    ids=str,
)
def test_groups_of_rows(ends: list[int]) -> None:
    out = torch.full((130, 9), math.nan).half()
    check_rows(GENERAL, ends, torch.randn(130, 20).half(), torch.randn(3, 20, 9).half(), out)


def test_more_groups_than_are_searched_together() -> None:
    ends = torch.randint(0, 2, (300,)).cumsum(0)
    rows = int(ends[-1]) + 1
    out = torch.full((rows, 9), math.nan).half()
    check_rows(GENERAL, ends.tolist(), torch.randn(rows, 4).half(), torch.randn(300, 4, 9).half(), out)


def test_ends_that_fall_touch_nothing_outside() -> None:
    memory = torch.full((40, 9), math.nan).half()
    out = memory[10:30]
    bias = torch.zeros(3, 1, 9).half()
    offs = torch.tensor([[15, 4, 90]], dtype=torch.int32)
    launch(GENERAL, torch.randn(20, 4).half(), torch.randn(3, 4, 9).half(), offs, bias, out)
    assert memory[:10].isnan().all() and memory[30:].isnan().all()


def check_inner(v: Variant, ends: list[int], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    bias = torch.randn(len(ends), b.shape[1]).half()
    launch(v, a, b, torch.tensor([ends], dtype=torch.int32), bias[:, None], out)
    clamped = [min(max(end, 0), len(b)) for end in ends]
    for g, (begin, end) in enumerate(zip([0, *clamped], clamped, strict=False)):
        agree(out[g], a[:, begin:end].double() @ b[begin:end].double(), bias[g], max(end - begin, 1))


@pytest.mark.parametrize("v", INNER, ids=name)
def test_every_variant_of_a_ragged_inner_size(v: Variant) -> None:
    p, c, step = v.point, v.point.config, 16 if v.point.aligned else 5
    m, n, k = c.block_m + step, c.block_n + step, 2 * c.block_k + step
    a, b = matrix(m, k, torch.float16, p.order[0], p.aligned), matrix(k, n, torch.float16, p.order[1], p.aligned)
    dtype = torch.float32 if p.out == "fp32" else torch.float16
    out = batch(m, n, dtype, "s" if p.order == "ss" else "n", p.aligned).fill_(math.nan)
    a[:, k - 1], b[k - 1] = math.nan, math.nan  # after the last end: not read, not even to be multiplied by 0
    check_inner(v, [c.block_k + 3, c.block_k + 3, k - 1], a, b, out)


@pytest.mark.parametrize("ends", ([0, 0, 0], [0, 0, 70], [70, 70, 70], [1, 2, 3], [64, 65, 70], [99, 99, 99]), ids=str)
def test_groups_of_the_inner_size(ends: list[int]) -> None:
    out = torch.full((3, 8, 9), math.nan).half()
    check_inner(GENERAL_INNER, ends, torch.randn(8, 70).half(), torch.randn(70, 9).half(), out)
