"""The functions of tk.functional on CUDA: torch's own samples, their gradients, and whole tensors of many elements."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import tk

from .device import DEVICE

pytest.importorskip("expecttest", reason="torch's samples need it: pip install -r requirements/test.txt")
from function_samples import INDICES, MIRRORED, agree, gradients, samples, wide

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")


def called(name: str, dtype: torch.dtype, requires_grad: bool = False) -> Iterator[tuple[Any, Any, Any]]:
    """(arguments, keywords, result) of torch's samples. None is refused."""
    ours, _ = MIRRORED[name]
    for s in samples(name, dtype, requires_grad, DEVICE):
        args, kwargs = (s.input, *s.args), s.kwargs
        yield args, kwargs, ours(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MIRRORED)
def test_torchs_samples(name: str, dtype: torch.dtype) -> None:
    torchs = MIRRORED[name][1]
    for args, kwargs, found in called(name, dtype):
        agree(found, torchs(*wide(args), **wide(kwargs)), kwargs.get("dtype") or dtype)


@pytest.mark.parametrize("name", [n for n in MIRRORED if n not in INDICES])
def test_gradients_of_torchs_samples(name: str) -> None:
    """No further from float64 than torch's own by much: of some, torch's formula itself loses digits."""
    ours, torchs = MIRRORED[name]
    for args, kwargs, _ in called(name, torch.float32, requires_grad=True):
        found, theirs = gradients(ours, args, kwargs), gradients(torchs, args, kwargs)
        exact = gradients(torchs, wide(args), wide(kwargs))
        for mine, other, reference in zip(found, theirs, exact, strict=True):
            if reference is None or not reference.numel():
                assert (mine is None) == (reference is None)
                continue
            torchs_error = (other - reference).abs().nan_to_num(0, 0, 0).max().item()
            assert_close(mine.double(), reference, rtol=1e-4, atol=1e-4 + 2 * torchs_error, equal_nan=True)


WHOLE = ("sum", "mean", "amax", "amin", "argmax", "argmin", "max", "min", "any", "all", "norm", "linalg.vector_norm",
         "var", "std", "var_mean", "std_mean")  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_whole_tensors(name: str, dtype: torch.dtype) -> None:
    """Many elements and few, of odd and of round numbers, in and out of order; the same bits when called again."""
    ours, torchs = MIRRORED[name]
    for shape in ((1 << 22,), (1_000_003,), (3000, 1000), (65_537,), (4096, 16), (5, 7), (1,)):
        x = torch.randn(shape, device=DEVICE).to(dtype)
        for view in (x, x.mT if x.dim() > 1 else x.flip(0), x[::2], x[1:]):
            if not view.numel() and name not in ("sum", "any", "all"):
                continue
            found = ours(view)
            assert_close(found, ours(view), rtol=0, atol=0, equal_nan=True)
            if name.startswith("arg"):
                assert view.flatten()[found] == view.flatten()[torchs(view)]  # torch's own may be another of equal ones
                assert found == (view.flatten() == view.flatten()[found]).nonzero()[0, 0]
            else:
                expected = torchs(view.double())
                if name == "sum":  # they lose what their size is worth, though the sum be near 0
                    found, expected = (x / view.numel() ** 0.5 for x in (found, expected))
                agree(found, expected, dtype)


@pytest.mark.parametrize(("name", "dim"), itertools.product(("amax", "amin", "argmax", "argmin", "max", "min", "prod",
                                                             "any", "all", "norm", "std"), (0, 1, 2)))  # fmt: skip
def test_every_dimension(name: str, dim: int) -> None:
    """Of the numbers that choose among what an op does, all; with NaN and infinities."""
    ours, torchs = MIRRORED[name]
    x = torch.randn(37, 300, 65, device=DEVICE).clamp(-1.5, 1.5)  # equal ones, too
    if name == "prod":  # of near +-1: no product of some is 0 or infinite in fp32 where it is neither in fp64
        x = x.sign() * (1 + x / 100)
    x[3, 4, 5], x[7, 8, 9], x[10, 11, 12] = float("nan"), float("inf"), -float("inf")
    x[:, :, 1] = 0
    args = (2, dim) if name == "norm" else (dim,)
    found, expected = ours(x, *args), torchs(x.double(), *args)
    if name in ("max", "min"):
        assert torch.equal(found.indices, getattr(tk, f"arg{name}")(x, dim))
        found, expected = found.values, expected.values
    if name.startswith("arg"):
        at = found.unsqueeze(dim)
        assert_close(x.gather(dim, at).squeeze(dim), getattr(torch, f"a{name[3:]}")(x, dim), equal_nan=True)
    else:
        agree(found, expected, torch.float32)
