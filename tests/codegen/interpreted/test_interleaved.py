"""Columns in interleaved parts: rows of every width without gaps, whole vectors together."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import host
import pytest
import torch
from test_ops import agree

from tk.codegen.family import Generated, generate
from tk.generated import op
from tk.kernels.generated import activations

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
WIDTHS = (1, 3, 7, 12, 17, 24, 33, 65)
FEWEST = 16  # parts
COLUMNS, ROWS = "aligned interleaved_", "aligned long_interleaved_"


def of_columns(x):
    return x.sum(0), x.abs().amax(0), (x > 2).any(0), (x * 0.01 + 1).prod(0)


def of_rows(x):
    return x.sum(-1), x.abs().amax(-1), (x > 2).any(-1), (x * 0.01 + 1).prod(-1)


def moments_of_columns(x):
    return torch.var_mean(x, 0)


def moments_of_rows(x):
    return torch.var_mean(x, -1)


def beside_a_column(x, y):
    return ((x - y) * y).sum(0)


def with_a_number_of_each_row(x, y):
    return (x * y.unsqueeze(-1)).sum(0)


@cache
def made_of(fn: Callable[..., Any], **more: str) -> Generated:
    return generate(fn, op(x="T[M, N]", **more, T=tuple(DTYPES))(fn).signature, fn.__name__)


def check(fn: Callable[..., Any], x: torch.Tensor) -> None:
    """The one variant, on columns or on what they are the rows of."""
    is_of_rows = fn in (of_rows, moments_of_rows)
    given = x.T if is_of_rows else x
    wanted, like = fn(given.double()), fn(given)
    found = list(host.run_all(made_of(fn), given, only=ROWS if is_of_rows else COLUMNS))
    assert len(found) == 1
    for mine, exact, its in zip(found[0][1], wanted, like, strict=True):
        agree(mine, exact.to(its.dtype), f"{fn.__name__} of {tuple(x.shape)}")


@pytest.mark.parametrize("fn", [of_columns, of_rows, moments_of_columns, moments_of_rows], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_every_width(fn: Callable[..., Any], width: int) -> None:
    """The last step has some of the parts, in a row that vectors cross."""
    generator = torch.Generator().manual_seed(width)
    for dtype, rows in (("fp32", 64 * FEWEST + 5), ("bf16", 128 * FEWEST * 3 - 1), ("fp64", 50)):
        check(fn, torch.randn(rows, width, generator=generator).to(DTYPES[dtype]))


@pytest.mark.parametrize("fn", [of_columns, of_rows], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("rows", [2, FEWEST - 1, FEWEST, FEWEST + 1, 64 * FEWEST])
def test_few_rows(fn: Callable[..., Any], rows: int) -> None:
    """Fewer than there are parts, and as many in each of them."""
    check(fn, torch.randn(rows, 17, generator=torch.Generator().manual_seed(rows)))


def test_no_rows() -> None:
    for name, (total, any_of_them) in host.run_all(made_of(sums), torch.empty(0, 17), only=COLUMNS):
        assert total.eq(0).all() and not any_of_them.any(), name


def sums(x):
    return x.sum(0), (x > 0).any(0)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("width", [1, 17, 24, 65])
def test_a_gradient_is_stored_beside_its_sum_over_columns(width: int, dtype: str) -> None:
    declared, generator = activations.bias_gelu, torch.Generator().manual_seed(width)
    made = generate(declared.fn, declared.signature, declared.name, grad=True).backward
    assert made is not None
    grad, x = (torch.randn(16 * FEWEST + 3, width, generator=generator).to(DTYPES[dtype]) for _ in range(2))
    bias = torch.randn(width, generator=generator).to(DTYPES[dtype])
    leaves = [t.double().requires_grad_() for t in (x, bias)]
    wanted = torch.autograd.grad(declared.fn(*leaves, False), leaves, grad.double())
    found = list(host.run_all(made, grad, x, bias, False, only=COLUMNS))
    assert len(found) == 1
    for mine, exact in zip(found[0][1], wanted, strict=True):
        agree(mine, exact.to(DTYPES[dtype]), f"{width} {dtype}")


def test_a_column_has_a_number_of_its_own_wherever_it_lies() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(400, 17, generator=generator), torch.randn(17, 2, generator=generator)[:, 1]
    wanted = beside_a_column(x.double(), y.double()).float()
    ((_, (found,)),) = host.run_all(made_of(beside_a_column, y="T[N]"), x, y, only=COLUMNS)
    agree(found, wanted, "beside a column")


# --- What is refused ---


def test_rows_must_run_together_from_16_bytes_on() -> None:
    made, whole = made_of(sums), torch.randn(200, 18)
    for x in (whole[:, :17], whole[:, 1:], whole.T[:17].T, whole.flatten()[1 : 1 + 17 * 200].view(200, 17)):
        assert not [name for name in host.variants(made, x) if "interleaved" in name]
    assert [name for name in host.variants(made, whole) if "interleaved" in name]


def test_wide_rows_of_whole_vectors_need_no_parts_of_this_kind() -> None:
    for width, is_served in (
        (24, True),
        (60, True),
        (64, False),
        (65, True),
        (96, False),
        (1_024, False),
        (1_001, True),
    ):
        names = host.variants(made_of(sums), torch.zeros(200, width))
        assert any("interleaved" in name for name in names) is is_served, width


def test_a_number_of_each_row_is_not_read_in_vectors() -> None:
    made = made_of(with_a_number_of_each_row, y="T[M]")
    assert not made.graphs[0].kernels_of("interleaved") and made.graphs[0].kernels_of("split")
