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
    from torch.testing._internal.common_methods_invocations import op_db

    for name, ours, torchs in (("bucketize", tk.bucketize, torch.bucketize),
                               ("searchsorted", tk.searchsorted, torch.searchsorted)):  # fmt: skip
        (info,) = (o for o in op_db if o.name == name)
        count = 0
        for s in info.sample_inputs("cpu", torch.float32):
            if isinstance(s.args[0], torch.Tensor) and "sorter" not in s.kwargs:
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
    with pytest.raises(TypeError, match="the sorted row must be a Tensor"):
        tk.bucketize(x, [1.0])


def test_a_sorter() -> None:
    row = torch.tensor([3.0, 1.0, 2.0])
    assert torch.equal(tk.searchsorted(row, row, sorter=row.argsort()), torch.tensor([2, 0, 1]))
