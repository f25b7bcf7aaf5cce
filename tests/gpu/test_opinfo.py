"""OpInfo's samples of every mapped op in every dtype that torch has on CUDA: none is refused, and the results are
torch's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import tk
from tk.functional._call import INTEGERS, NUMBERS

from .device import DEVICE

pytest.importorskip("expecttest", reason="torch's samples need it: pip install -r requirements/test.txt")
from function_samples import MIRRORED, agree, samples, wide
from torch_samples import op_db

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
OF_ALL = ("sum", "prod", "amax", "amin", "argmax", "argmin", "max", "min", "any", "all")
ALONG = (*OF_ALL, "cumsum", "cumprod", "cummax", "cummin", "sort", "argsort", "logsumexp")


def on_cpu(x: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.cpu(), x)


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("name", MIRRORED)
def test_no_sample_is_refused(name: str, dtype: torch.dtype) -> None:
    """Against the CPU, where ATen's order of equal elements is one of those that tk has too; in float64 if floating."""
    ours, torchs = MIRRORED[name]
    for s in samples(name, dtype, device=DEVICE):
        args, kwargs = (s.input, *s.args), s.kwargs
        found = on_cpu(ours(*args, **kwargs))
        args, kwargs = on_cpu((args, kwargs))
        if dtype.is_floating_point:
            agree(found, torchs(*wide(args), **wide(kwargs)), kwargs.get("dtype") or dtype)
        else:
            expected = torchs(*args, **kwargs)
            assert_close(tuple(found) if isinstance(found, tuple) else found,
                         tuple(expected) if isinstance(expected, tuple) else expected, equal_nan=True)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("name", ["bucketize", "searchsorted"])
def test_searches(name: str, dtype: torch.dtype) -> None:
    (info,) = (o for o in op_db if o.name == name)
    ours, torchs = getattr(tk, name), getattr(torch, name)
    for s in info.sample_inputs(DEVICE, dtype):
        assert torch.equal(ours(s.input, *s.args, **s.kwargs), torchs(s.input, *s.args, **s.kwargs))


def extremes(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The least and the largest number, and few others, so that many are equal; of float64 NaN and infinities too."""
    if dtype == torch.bool:
        values = torch.tensor([False, True])
    elif dtype.is_floating_point:
        values = torch.tensor([0.0, -0.0, 1.0, -1.0, 1.5, -3e300, 5e-324, float("inf"), float("nan")], dtype=dtype)
    else:
        info = torch.iinfo(dtype)
        values = torch.tensor([info.min, info.min + 1, 0, 1, info.max - 1, info.max], dtype=dtype)
    return values[torch.randint(0, len(values), shape)]


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.float64], ids=str)
@pytest.mark.parametrize("name", ALONG)
def test_rows_of_every_length(name: str, dtype: torch.dtype) -> None:
    """One block and many, along every dimension, in and out of order, up to the ends of the range."""
    if dtype == torch.bool and name in ("argmax", "argmin"):
        pytest.skip("torch has it not")
    ours, torchs = MIRRORED[name]
    for shape in ((3, 5), (2, 3000), (4, 70, 33), (3, 20_000), (0, 4), (5, 1)):
        x = extremes(dtype, shape)
        if dtype == torch.float64 and name in ("sum", "prod", "cumsum", "cumprod", "logsumexp"):
            x = torch.randn(shape, dtype=dtype)
        for view, dim in itertools.product((x, x.mT, x[..., ::2], x.flip(0)), (0, -1)):
            if not view.numel() and name not in ("sum", "prod", "any", "all", "cumsum", "cumprod", "sort", "argsort"):
                continue
            expected = torchs(view, dim)
            found = on_cpu(ours(view.to(DEVICE) if view.is_contiguous() else _strided(view), dim))
            if name in ("max", "min"):  # which of several NaN is left open
                found, expected = found.values, expected.values
            is_rounded = name == "logsumexp" and dtype != torch.float64  # of integers torch's is a float32
            bounds = dict(rtol=1e-5, atol=1e-5) if is_rounded else dict(rtol=1e-11, atol=1e-9)
            assert_close(tuple(found) if isinstance(found, tuple) else found,
                         tuple(expected) if isinstance(expected, tuple) else expected,
                         equal_nan=True, **bounds)  # fmt: skip


def _strided(view: Tensor) -> Tensor:
    """With its strides, on the GPU."""
    storage = torch.empty(view.untyped_storage().nbytes() // view.itemsize, dtype=view.dtype, device=DEVICE)
    found = storage.as_strided(view.shape, view.stride(), view.storage_offset())
    return found.copy_(view)


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.float64], ids=str)
@pytest.mark.parametrize("name", OF_ALL)
def test_whole_tensors(name: str, dtype: torch.dtype) -> None:
    if dtype == torch.bool and name in ("argmax", "argmin"):
        pytest.skip("torch has it not")
    ours, torchs = MIRRORED[name]
    for n in (1_000_003, 1 << 20, 65_537, 7):
        x = torch.rand(n, dtype=dtype) if dtype == torch.float64 else extremes(dtype, (n,))
        found, expected = ours(x.to(DEVICE)).cpu(), torchs(x)
        if name.startswith("arg"):  # torch's may be another of equal ones
            assert x[found] == x[expected] and found == (x == x[found]).nonzero()[0, 0]
        else:
            assert_close(found, expected, rtol=1e-10, atol=0)


CLASSES: dict[str, dict[str, Any]] = {
    "plain": {}, "weights": {"weight": True}, "weights smoothed": {"weight": True, "label_smoothing": 0.2},
    "probabilities": {"probabilities": True}, "all": {"probabilities": True, "label_smoothing": 0.3, "weight": True},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("name", CLASSES)
def test_cross_entropy(name: str, reduction: str, dtype: torch.dtype) -> None:
    """Against float64, with the gradients."""
    for shape in ((64, 1000), (5, 7), (3, 19, 8, 9), (7, 40_000)):
        kind = dict(CLASSES[name])
        x = torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()
        if kind.pop("probabilities", False):
            target = torch.rand(shape, device=DEVICE).softmax(1).to(dtype)
        else:
            target = torch.randint(0, shape[1], (shape[0], *shape[2:]), device=DEVICE)
            target.view(-1)[0], kind["ignore_index"] = 3, 3
        if kind.pop("weight", False):
            kind["weight"] = (torch.rand(shape[1], device=DEVICE) + 0.1).to(dtype)
        found = tk.cross_entropy(x, target, reduction=reduction, **kind)
        exact = x.detach().double().requires_grad_()
        expected = F.cross_entropy(exact, wide(target), reduction=reduction, **wide(kind))
        tolerance = dict(rtol=2e-2, atol=2e-2) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-4)
        assert_close(found.double(), expected, **tolerance)
        (grad,) = torch.autograd.grad(found.sum(), x)
        (exact_grad,) = torch.autograd.grad(expected.sum(), exact)
        assert_close(grad.double(), exact_grad, **tolerance)
