"""Binary searches, against torch."""

from __future__ import annotations

import host
import pytest
import torch

from tk.codegen.family import generate
from tk.generated import op


def check(fn, texts, *args) -> int:
    found = generate(fn, op(**texts)(fn).signature, "f")
    expected, count = fn(*args), 0
    for name, (result,) in host.run_all(found, *args):
        assert result.dtype == expected.dtype and torch.equal(result, expected), name
        count += 1
    return count


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "i32"])
def test_bucketize(dtype: str, count: int, right: bool) -> None:
    of = {"fp32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32}[dtype]
    boundaries = torch.arange(count).sub(3).to(of)
    x = torch.randint(-6, 20, (5, 32)).to(of)
    if of.is_floating_point:
        x[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])

    def fn(x, b):
        return torch.bucketize(x, b, right=right)

    assert check(fn, {"x": f"{dtype}[M, N]", "b": f"{dtype}[K]"}, x, boundaries) >= 3


def test_rows_of_their_own() -> None:
    rows, x = torch.randn(4, 21).sort().values, torch.randn(4, 48)
    texts = {"rows": "fp32[M, K]", "x": "fp32[M, N]"}
    assert check(lambda rows, x: torch.searchsorted(rows, x, side="right", out_int32=True), texts, rows, x) >= 3
    stepped = torch.stack([rows, rows], -1).flatten(-2)[:, ::2]
    assert check(lambda rows, x: torch.searchsorted(rows, x), texts, stepped, x) >= 3
    leading = {"rows": "fp32[..., K]", "x": "fp32[..., N]"}
    shaped = rows.reshape(2, 2, 21), x.reshape(2, 2, 48)
    assert check(lambda rows, x: torch.searchsorted(rows, x), leading, *shaped) >= 2
    assert check(lambda rows, x: torch.searchsorted(rows, x), leading, *(t.transpose(0, 1) for t in shaped)) >= 1


def test_a_row_that_is_worked_out_first() -> None:
    fn = lambda w, x: torch.searchsorted(w.cumsum(-1), x)  # noqa: E731
    assert check(fn, {"w": "fp32[K]", "x": "fp32[M]"}, torch.rand(30), torch.rand(64) * 16) >= 2


def test_duplicates() -> None:
    row, x = torch.tensor([1, 1, 1, 2, 2, 5]), torch.arange(8)
    for right in (False, True):
        fn = (lambda b, x: torch.searchsorted(b, x, right=True)) if right else (lambda b, x: torch.searchsorted(b, x))
        check(fn, {"b": "i64[K]", "x": "i64[M]"}, row, x)
