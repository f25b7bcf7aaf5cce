"""tk.bucketize and tk.searchsorted against torch's."""

from __future__ import annotations

import pytest
import torch

import tk

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("out_int32", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bucketize(dtype: torch.dtype, out_int32: bool, right: bool) -> None:
    x, boundaries = torch.randint(0, 20, (3, 4, 5)).to(dtype), torch.arange(2, 17, 2).to(dtype)
    found = tk.bucketize(x, boundaries, out_int32=out_int32, right=right)
    expected = torch.bucketize(x, boundaries, out_int32=out_int32, right=right)
    assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(), (3,), (2, 3)])
def test_searchsorted(rows: tuple[int, ...], dtype: torch.dtype) -> None:
    sequence = torch.randint(0, 20, (*rows, 9)).sort().values.to(dtype)
    x = torch.randint(0, 20, (*(rows or (4,)), 7)).to(dtype)
    for side in ("left", "right"):
        assert torch.equal(tk.searchsorted(sequence, x, side=side), torch.searchsorted(sequence, x, side=side))
    assert tk.searchsorted(sequence, x, out_int32=True).dtype == torch.int32


def test_torchs_samples() -> None:
    from torch_samples import op_db

    for name, ours, torchs in (("bucketize", tk.bucketize, torch.bucketize),
                               ("searchsorted", tk.searchsorted, torch.searchsorted)):  # fmt: skip
        (info,) = (o for o in op_db if o.name == name)
        count = 0
        for s in info.sample_inputs("cpu", torch.float32):
            assert torch.equal(ours(s.input, *s.args, **s.kwargs), torchs(s.input, *s.args, **s.kwargs))
            count += 1
        assert count > 5


def test_wrong_arguments() -> None:
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match=r"boundaries must be \[K\], is \[2, 3\]"):
        tk.bucketize(x, x)
    with pytest.raises(ValueError, match="must be \\[K\\], or have a row for each of input's"):
        tk.searchsorted(x[:1], x)
    with pytest.raises(ValueError, match="side is 'left' and right True"):
        tk.searchsorted(x, x, side="left", right=True)
    with pytest.raises(TypeError, match=r"(boundaries|sorted_sequence) must be a Tensor"):
        tk.bucketize(x, [1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32], ids=str)
def test_a_sorter(dtype: torch.dtype) -> None:
    row = torch.tensor([3.0, 1.0, 2.0]).to(dtype)
    assert torch.equal(tk.searchsorted(row, row, sorter=row.argsort()), torch.tensor([2, 0, 1]))
    rows = torch.randint(0, 9, (2, 3, 8)).to(dtype)
    found, expected = (
        f(rows, rows, sorter=rows.argsort(), side="right") for f in (tk.searchsorted, torch.searchsorted)
    )
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match=r"sorter must be int64 and of the shape \[3\]"):
        tk.searchsorted(row, row, sorter=torch.tensor([0, 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("number", [2, 2.5, -1, 7.0, True, float("nan")])
def test_a_number(number: float, dtype: torch.dtype) -> None:
    row = torch.tensor([1, 2, 3, 5], dtype=dtype)
    for right in (False, True):
        assert torch.equal(tk.searchsorted(row, number, right=right), torch.searchsorted(row, number, right=right))
        assert torch.equal(tk.bucketize(number, row, right=right), torch.bucketize(number, row, right=right))


def test_two_dtypes_are_compared_in_torchs_common_one() -> None:
    row, x = torch.tensor([1, 3, 5]), torch.tensor([2.5, 3.0, 9.0], dtype=torch.float64)
    for a, b in ((row, x), (row.float(), x), (row.bfloat16(), x.half()), (row.to(torch.int8), x.long())):
        assert torch.equal(tk.searchsorted(a, b), torch.searchsorted(a, b))


def test_special_float64() -> None:
    inf, nan = float("inf"), float("nan")
    row = torch.tensor([-inf, -1.0, -0.0, 0.0, 5e-324, 1.0, inf, nan, nan], dtype=torch.float64)
    x = torch.tensor([-inf, -2.0, -1.0, -0.0, 0.0, 5e-324, 0.5, inf, nan, -nan], dtype=torch.float64)
    for right in (False, True):
        assert torch.equal(tk.searchsorted(row, x, right=right), torch.searchsorted(row, x, right=right))
