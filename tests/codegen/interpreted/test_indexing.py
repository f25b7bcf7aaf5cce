"""The package's own ops at indices, by every variant, against torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import host
import pytest
import torch
from torch import Tensor

from tk.codegen.family import Generated, generate_any
from tk.codegen.tile import LAYOUTS
from tk.kernels.generated import indexing

NUMBERS = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
)
SUMS = NUMBERS[:5]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5}


@cache
def generated(name: str) -> Generated:
    op = getattr(indexing, name)
    found = generate_any(op.fn, op.signature, name, op.grad)
    assert isinstance(found, Generated)
    return found


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    x = torch.randn(shape) * 40
    return x.to(dtype)


def check(name: str, expected: Tensor, *args: Any) -> None:
    ways = set()
    for variant, (found,) in host.run_all(generated(name), *args):
        ways.add("deterministic" in variant)
        tolerance = TOLERANCE.get(expected.dtype, 0 if expected.dtype != torch.float64 else 1e-12)
        least = tolerance * (40 if "rounded" in variant else 1)  # of what cancels, each addition has been rounded
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=least, msg=lambda m, v=variant: f"{v}: {m}")
    assert False in ways


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_gather(dtype: torch.dtype) -> None:
    x = numbers(dtype, 2, 7, 35)
    rows, columns = torch.randint(0, 35, (2, 7, 20)), torch.randint(0, 7, (2, 9, 35))
    check("gather", x.gather(-1, rows), x, rows)
    check("gather_columns", x.gather(-2, columns), x, columns)
    turned = x.transpose(0, 2).contiguous().transpose(0, 2)
    check("gather_columns", x.gather(-2, columns), turned, columns)


@pytest.mark.parametrize("dtype", SUMS, ids=str)
def test_sums(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype.is_floating_point else dtype
    x, source = numbers(dtype, 2, 5, 33), numbers(dtype, 2, 5, 48)
    index = torch.randint(0, 33, (2, 5, 48))
    check("scatter_add", x.to(wide).scatter_add(-1, index, source.to(wide)).to(dtype), x, index, source)
    source, index = numbers(dtype, 2, 9, 33), torch.randint(0, 5, (2, 9, 33))
    check("scatter_add_columns", x.to(wide).scatter_add(-2, index, source.to(wide)).to(dtype), x, index, source)
    index = torch.randint(0, 5, (9,))
    check("index_add", x.to(wide).index_add(-2, index, source.to(wide)).to(dtype), x, index, source)


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_put(dtype: torch.dtype) -> None:
    x, index = numbers(dtype, 2, 5, 33), torch.tensor([3, 0, -2, 3, -4])
    rows, elements = numbers(dtype, 2, 5, 33), numbers(dtype, 2, 33, 5)
    wanted = x.clone()
    wanted[:, [0, 1, 3]] = rows[:, [1, 4, 3]]
    check("put_rows", wanted, x, index, rows)
    columns = x.mT.contiguous()
    wanted = columns.mT.clone()
    wanted[:, [0, 1, 3]] = elements.mT[:, [1, 4, 3]]
    check("put", wanted.mT.contiguous(), columns, index, elements)


def test_put_has_no_regard_to_the_order_of_programs() -> None:
    for name in ("put", "put_rows"):
        found = generated(name)
        assert not any(graph.kernels_of("deterministic") for graph in found.graphs)
        plans = [found.plan(g, layout, s) for g in found.graphs for layout in LAYOUTS for s in found.settings()]
        assert all(plan.deterministic for plan in plans if plan is not None)


def test_one_index_of_two() -> None:
    at, index = torch.tensor([0, 1, 2, -1, 1, 2, 3, -4]), torch.tensor([4, -1, -5, 0, 5, -6, 2, 1])
    for variant, (found,) in host.run_all(generated("flat_index"), at, index, 3, 5):
        assert found.tolist() == [4, 9, 10, 10, 15, 15, 15, 15], variant
