"""tk.softmax and its like: torch's own samples, numbers, gradients, fakes, compiled graphs, and what is refused.

On the CPU an op interprets its recorded graph, so what is tested here is that arguments reach the op as they should."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from function_samples import (
    INDICES,
    MIRRORED,
    TOLERANCE,
    agree,
    gradients,
    samples,
    wide,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils._pytree import tree_map_only

import tk
from tk import functional
from tk.functional import _call, reductions
from tk.generated import register
from tk.generated.problem import DTYPES
from tk.heuristics.described import Recording

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")

# --- torch's samples ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MIRRORED)
def test_torchs_samples(name: str, dtype: torch.dtype) -> None:
    ours, torchs = MIRRORED[name]
    for s in samples(name, dtype):
        args, kwargs = (s.input, *s.args), s.kwargs
        expected = torchs(*wide(args), **wide(kwargs))
        agree(ours(*args, **kwargs), expected, kwargs.get("dtype") or dtype)


@pytest.mark.parametrize("name", [n for n in MIRRORED if n not in INDICES])
def test_gradients_of_torchs_samples(name: str) -> None:
    ours, torchs = MIRRORED[name]
    for s in samples(name, torch.float32, requires_grad=True):
        args, kwargs = (s.input, *s.args), s.kwargs
        assert_close(gradients(ours, args, kwargs), gradients(torchs, args, kwargs), rtol=1e-4, atol=1e-4)


# --- Every dtype by one formula ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_of_large_and_infinite_elements(name: str, dtype: torch.dtype) -> None:
    inf = float("inf")
    ours, torchs = MIRRORED[name]
    rows = [(1e17, 1e17), (inf, 0), (-inf, 0), (-inf, -inf), (inf, inf), (inf, -inf), (float("nan"), 0), (1e30, -1e30)]
    x = torch.tensor(rows, dtype=dtype)
    assert_close(ours(x, 1), torchs(x, 1), rtol=0, atol=1e-15, equal_nan=True)
    assert_close(ours(x.mT, 0), torchs(x, 1).mT, rtol=0, atol=1e-15, equal_nan=True)


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6, -1e9])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_of_float64_is_as_exact_at_any_offset(name: str, offset: float) -> None:
    """What an offset takes from the elements is not lost twice; gradients too."""
    ours, torchs = MIRRORED[name]
    x = torch.randn(40, 300, dtype=torch.float64) + offset
    away = x - x.amax(1, keepdim=True)
    assert_close(ours(x, 1), torchs(away, 1), rtol=4e-15, atol=0)
    weight = torch.randn_like(x)
    found, expected = (
        torch.autograd.grad((f(t, 1) * weight).sum(), t)[0]
        for f, t in ((ours, x.requires_grad_()), (torchs, away.requires_grad_()))
    )
    assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), ()])
def test_softmax_of_float64_of_nothing(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    found = tk.softmax(x, -1)
    assert_close(found, torch.softmax(x, -1))
    found.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("order", [0, 0.5, 1, 1.5, 2, 3, float("inf"), -float("inf"), -1])
def test_norms_of_every_order_have_gradients(order: float, dtype: torch.dtype) -> None:
    """As torch's: of order 0 undefined, of a zero element 0."""
    for at in (None, (0, slice(2)), 0):
        x = (torch.randn(4, 5) * 3).to(dtype)
        if at is not None:
            x[at] = 0
        for dim in (None, 0, 1, (0, 1)):
            found, expected = x.clone().requires_grad_(), x.float().clone().requires_grad_()
            result, wanted = tk.norm(found, order, dim), torch.norm(expected, order, dim)
            assert result.requires_grad and result.dtype == dtype
            result.sum().backward()
            wanted.sum().backward()
            assert (found.grad is None) == (expected.grad is None)
            if found.grad is None or expected.grad is None:
                continue
            tolerance = {torch.float32: 1e-4, torch.float64: 1e-4}.get(dtype, 3e-2)
            if wanted.isfinite().all() and expected.grad.abs().max() < 100:
                assert_close(found.grad.float(), expected.grad, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (0, 0, 2), (0,)])
def test_cross_entropy_of_nothing(shape: tuple[int, ...], reduction: str, smoothing: float) -> None:
    x = torch.empty(shape)
    targets = [torch.empty(shape)] if len(shape) > 1 else []
    if len(shape) > 1 and shape[0] == 0:
        targets.append(torch.zeros((*shape[:1], *shape[2:]), dtype=torch.int64))
    for target, weight in itertools.product(targets, (None, torch.ones(shape[min(len(shape) - 1, 1)]))):
        arguments = (x, target, weight)
        found, expected = (f(*arguments, reduction=reduction, label_smoothing=smoothing)
                           for f in (tk.cross_entropy, F.cross_entropy))  # fmt: skip
        assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_log_sums_of_16_bits(dtype: torch.dtype) -> None:
    """No further off than their own rounding: the sums they are made of are not rounded."""
    x, weight = (torch.randn(16, 700).to(dtype) for _ in range(2))

    def gradient(f: Callable[..., Tensor], x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x, -1), x, weight.to(x.dtype))[0]

    found, exact = gradient(tk.logcumsumexp, x), gradient(torch.logcumsumexp, x.double())
    assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps / 2 + 1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "other"), [*itertools.permutations(_call.FLOATS, 2)], ids=str)
def test_rms_norms_with_weights_of_another_dtype(dtype: torch.dtype, other: torch.dtype) -> None:
    x, residual, weight = torch.randn(5, 33).to(dtype), torch.randn(5, 33).to(dtype), torch.randn(33).to(other)
    expected = F.rms_norm(x.double(), (33,), weight.double(), torch.finfo(torch.float32).eps)
    agree(tk.rms_norm(x, (33,), weight), expected, dtype)
    total = x.double() + residual.double()
    found = tk.add_rms_norm(x, residual, weight)
    agree(found[0], F.rms_norm(total, (33,), weight.double(), torch.finfo(torch.float32).eps), dtype)
    agree(found[1], total, dtype)
    given = [t.clone().requires_grad_() for t in (x, weight)]
    tk.rms_norm(given[0], (33,), given[1]).sum().backward()
    assert [t.grad.dtype for t in given if t.grad is not None] == [dtype, other]


# --- NaN of either sign ---


def with_nan_of_both_signs(dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
    """Some rows with few, one with many and one with nothing else; infinities of both signs."""
    x = torch.randn(shape).to(dtype)
    nan = torch.full((), float("nan"), dtype=dtype)
    negative = nan.copysign(-torch.ones((), dtype=dtype))
    assert negative.isnan() and negative.signbit() and not nan.signbit()
    for row, at, value in (
        (0, slice(3, 9, 2), nan), (0, slice(4, 9, 2), negative), (1, slice(5, 7), negative), (1, 1, float("inf")),
        (1, 2, -float("inf")), (2, slice(0, None, 3), negative), (3, slice(None), negative), (4, slice(None), nan),
    ):  # fmt: skip
        x[row, at] = value
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [12, 300, 5000])
def test_every_nan_is_the_largest_whatever_its_sign(dtype: torch.dtype, columns: int) -> None:
    x = with_nan_of_both_signs(dtype, (6, columns))
    for descending in (False, True):
        expected = torch.sort(x, dim=-1, stable=True, descending=descending)
        for found in (tk.sort(x, -1, descending), tk.topk(x, 10, -1, largest=descending)):
            k = found.indices.shape[-1]
            assert torch.equal(found.indices, expected.indices[:, :k])
            assert_close(found.values, expected.values[:, :k], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(tk.argsort(x, -1, descending), expected.indices)
    for ours, torchs in (
        (tk.max, torch.max),
        (tk.min, torch.min),
        (tk.cummax, torch.cummax),
        (tk.cummin, torch.cummin),
    ):
        found, wanted = ours(x, dim=1), torchs(x, dim=1)
        assert torch.equal(found.indices, wanted.indices), ours.__name__
        assert_close(found.values, wanted.values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(tk.argmax(x, 1), x.argmax(1)) and torch.equal(tk.argmin(x, 1), x.argmin(1))
    assert torch.equal(tk.argmax(x), x.argmax())
    for ours, torchs in ((tk.amax, torch.amax), (tk.amin, torch.amin)):
        assert_close(ours(x, 1), torchs(x, 1), rtol=0, atol=0, equal_nan=True)
    edges = torch.tensor([-float("inf"), -1, 0, 0.5, float("inf")], dtype=dtype)
    for right in (False, True):
        assert torch.equal(tk.bucketize(x, edges, right=right), torch.bucketize(x, edges, right=right))
        assert torch.equal(tk.searchsorted(edges, x, right=right), torch.searchsorted(edges, x, right=right))


@pytest.mark.parametrize("dtype", _call.INTEGERS, ids=str)
@pytest.mark.parametrize("name", MIRRORED)
def test_torchs_samples_of_integers(name: str, dtype: torch.dtype) -> None:
    """The same numbers and dtypes, to the bit where they are integers."""
    ours, torchs = MIRRORED[name]
    for s in samples(name, dtype):
        args, kwargs = (s.input, *s.args), s.kwargs
        assert_close(ours(*args, **kwargs), torchs(*args, **kwargs), equal_nan=True)


def extremes(dtype: torch.dtype, shape: tuple[int, ...] = (3, 4, 5)) -> Tensor:
    """The least and the largest number, and few others, so that many are equal."""
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    info = torch.iinfo(dtype)
    values = torch.tensor([info.min, info.min + 1, 0, 1, info.max - 1, info.max], dtype=dtype)
    return values[torch.randint(0, 6, shape)]


OF_INTEGERS = [n for n in MIRRORED if n in (
    "sum", "prod", "amax", "amin", "argmax", "argmin", "max", "min", "any", "all", "cumsum", "cumprod", "cummax",
    "cummin", "sort", "argsort", "logsumexp",
)]  # fmt: skip


@pytest.mark.parametrize("dtype", _call.INTEGERS, ids=str)
@pytest.mark.parametrize("name", OF_INTEGERS)
def test_integers_up_to_the_ends_of_their_range(name: str, dtype: torch.dtype) -> None:
    """Sums wrap around, equal elements are told apart as torch does, and the least one has no opposite."""
    if dtype == torch.bool and name.startswith("arg") and name != "argsort":
        pytest.skip("torch has it not")
    ours, torchs = MIRRORED[name]
    for x in (extremes(dtype), extremes(dtype).mT, extremes(dtype, (2, 3))[:, ::2], extremes(dtype, ())):
        for dim in range(-x.dim(), x.dim()) if x.dim() else (0,):
            found, expected = ours(x, dim), torchs(x, dim)
            assert_close(tuple(found) if isinstance(found, tuple) else found,
                         tuple(expected) if isinstance(expected, tuple) else expected)  # fmt: skip
        if name in ("sum", "prod", "amax", "amin", "argmax", "argmin", "max", "min", "any", "all"):
            assert_close(ours(x), torchs(x))


@pytest.mark.parametrize("dtype", [*_call.INTEGERS, torch.float64], ids=str)
def test_sorts_of_what_has_no_sort_of_its_own(dtype: torch.dtype) -> None:
    """By floats that hold them, or by parts: in order and stable, either way."""
    if dtype == torch.float64:
        values = torch.tensor([0.0, -0.0, 1.0, 1 + 2e-16, -1.0, 1e300, -1e-300, 5e-324, float("inf"), float("nan")])
        x = values.double()[torch.randint(0, 10, (4, 60))]
        x[:, :2] = -float("inf")
    else:
        x = extremes(dtype, (4, 60))
    for descending, dim in itertools.product((False, True), (0, 1)):
        found, expected = (f(x, dim=dim, descending=descending, stable=True) for f in (tk.sort, torch.sort))
        assert torch.equal(found.indices, expected.indices)
        assert_close(found.values, expected.values, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(tk.argsort(x, dim, descending), expected.indices)
        if dtype != torch.bool:
            top = tk.topk(x, 3, dim, largest=descending)
            assert torch.equal(top.indices, expected.indices.narrow(dim, 0, 3))
    if dtype == torch.float64:
        assert torch.equal(tk.sort(x).values.signbit(), torch.sort(x, stable=True).values.signbit())


@pytest.mark.parametrize("dtype", [*_call.INTEGERS, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["sum", "prod", "amax", "amin", "argmax", "argmin", "max", "any", "norm", "std"])
def test_all_of_a_large_tensor(name: str, dtype: torch.dtype) -> None:
    """In parts, with some left over."""
    if name in ("norm", "std") and dtype != torch.float64:
        pytest.skip("of floats")
    ours, torchs = MIRRORED[name]
    n = 3 * reductions.PART + reductions.MANY + 17
    x = torch.rand(n, dtype=dtype) if dtype == torch.float64 else extremes(dtype, (n,))
    if dtype == torch.bool and name.startswith("arg"):
        return
    found, expected = ours(x), torchs(x)
    if name.startswith("arg"):  # torch's may be another of equal ones
        assert x[found] == x[expected] and found == (x == x[found]).nonzero()[0, 0]
    else:
        assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("given", ["rows", "uneven", "expanded", "every other", "transposed", "one column"])
def test_sorts_read_elements_that_lie_beside_each_other(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read a row several times, and have one pitch for all rows. What lies so already is not copied."""
    x = torch.randn(6, 10, 8)
    x = {
        "rows": x[..., 1:5], "uneven": x[:, 1:5], "expanded": x[:1].expand(6, 10, 8), "every other": x[..., ::2],
        "transposed": x.mT, "one column": x[..., :1],
    }[given]  # fmt: skip
    seen: list[Tensor] = []

    def noted(op: str, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(rows)
        return _call.run(op, rows, *args, **kwargs)

    monkeypatch.setattr(functional.sorts, "run", noted)
    for dim in (-1, 0, 1):
        assert torch.equal(tk.sort(x, dim).values, x.sort(dim).values)
        assert torch.equal(tk.topk(x, 1, dim).values, x.topk(1, dim).values)
    assert len(seen) == 6 and all(rows.stride(-1) == 1 or rows.shape[-1] == 1 for rows in seen)
    assert (seen[0].data_ptr() == x.data_ptr()) == (given in ("rows", "one column"))


@pytest.mark.parametrize("name", ["sum", "mean", "norm", "std", "amax", "logsumexp", "softmax", "cummax", "sort"])
def test_gradients_of_float64(name: str) -> None:
    ours, _ = MIRRORED[name]
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    args = {"norm": (2, 1), "sort": (1,)}.get(name, (1,))
    pick = (lambda r: r[0]) if name in ("cummax", "sort") else (lambda r: r)
    assert torch.autograd.gradcheck(lambda t: pick(ours(t, *args)), x)
    if name in ("sum", "mean", "norm", "std"):
        assert torch.autograd.gradcheck(lambda t: ours(t), x)


def test_of_two_tensors() -> None:
    a, b = torch.randn(3, 4), torch.randn(4)
    a[0, 0] = float("nan")
    for ours, torchs in ((tk.max, torch.max), (tk.min, torch.min)):
        assert_close(ours(a, b), torchs(a, b), equal_nan=True)
        assert_close(ours(a, other=b), torchs(a, b), equal_nan=True)
        assert_close(ours(a, b.long()), torchs(a, b.long()), equal_nan=True)
        with pytest.raises(TypeError, match="give other, a tensor, or dim and keepdim, not both"):
            ours(a, 1, other=b)
        with pytest.raises(TypeError, match="other must be a Tensor, is float"):
            ours(a, other=1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norms_of_16_bits_with_weights_of_32(dtype: torch.dtype) -> None:
    x, w, b = torch.randn(2, 3, 6).to(dtype), torch.randn(6), torch.randn(6)
    wide = x.double()
    agree(tk.layer_norm(x, (6,), w, b), F.layer_norm(wide, (6,), w.double(), b.double()), dtype)
    agree(tk.layer_norm(x, (6,), w), F.layer_norm(wide, (6,), w.double()), dtype)
    agree(tk.rms_norm(x, (6,), w, 1e-6), F.rms_norm(wide, (6,), w.double(), 1e-6), dtype)
    agree(tk.group_norm(x.mT, 2, w, b), F.group_norm(wide.mT, 2, w.double(), b.double()), dtype)
    agree(tk.add_rms_norm(x, x, w, 1e-6), normed(wide, wide, w.double()), dtype)
    agree(tk.add_layer_norm(x, x, w, b), layer_normed(wide, wide, w.double(), b.double()), dtype)
    x, w = x.requires_grad_(), w.requires_grad_()
    tk.layer_norm(x, (6,), w).sum().backward()
    assert x.grad is not None and x.grad.dtype == dtype and w.grad is not None and w.grad.dtype == torch.float32


CLASSES: dict[str, dict[str, Any]] = {
    "plain": {}, "weights": {"weight": True}, "smoothed": {"label_smoothing": 0.2},
    "weights smoothed": {"weight": True, "label_smoothing": 0.2},
    "probabilities": {"probabilities": True}, "weighted probabilities": {"probabilities": True, "weight": True},
    "probabilities smoothed": {"probabilities": True, "label_smoothing": 0.3, "weight": True},
}  # fmt: skip


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("shape", [(7,), (5, 7), (3, 7, 2, 4)])
@pytest.mark.parametrize("name", CLASSES)
def test_cross_entropy_of_every_kind(name: str, shape: tuple[int, ...], reduction: str) -> None:
    kind = dict(CLASSES[name])
    classes = 0 if len(shape) == 1 else 1
    of_target = shape[:classes] + shape[classes + 1 :]
    x = torch.randn(shape, requires_grad=True)
    if kind.pop("probabilities", False):
        target: Tensor = torch.rand(shape).softmax(classes).requires_grad_()
    else:
        target = torch.randint(0, 7, of_target)
        if target.dim():
            target.view(-1)[0] = 3
            kind["ignore_index"] = 3
    if kind.pop("weight", False):
        kind["weight"] = torch.rand(7) + 0.1
    found, expected = (f(x, target, reduction=reduction, **kind) for f in (tk.cross_entropy, F.cross_entropy))
    assert_close(found, expected, equal_nan=True)
    sources = [t for t in (x, target) if t.requires_grad]
    grads = [torch.autograd.grad(loss.sum(), sources, retain_graph=True) for loss in (found, expected)]
    assert_close(*grads, equal_nan=True, rtol=1e-4, atol=1e-6)
    half = {k: v.bfloat16() if isinstance(v, Tensor) else v for k, v in kind.items()}
    half_target = target.bfloat16() if target.is_floating_point() else target
    lower = tk.cross_entropy(x.bfloat16(), half_target, reduction=reduction, **half)
    assert lower.dtype == torch.bfloat16 and lower.shape == expected.shape


@pytest.mark.parametrize("kind", ["", "weight", "probabilities"])
def test_cross_entropy_of_few_long_rows_across_memory(kind: str) -> None:
    """They are copied: the kernel has rows that lie in order, and values and gradients are as before."""
    x = torch.randn(1500, 5).t().requires_grad_()
    target = torch.rand(5, 1500).softmax(1) if kind == "probabilities" else torch.tensor([3, 0, 1499, -100, 7])
    kwargs = {"weight": torch.rand(1500)} if kind == "weight" else {}
    found, expected = (f(x, target, **kwargs) for f in (tk.cross_entropy, F.cross_entropy))
    assert_close(found, expected)
    assert_close(*(torch.autograd.grad(loss, x)[0] for loss in (found, expected)))
    strides: set[tuple[int, ...]] = set()
    with Recording(
        lambda op, *args, **_: strides.update(t.stride() for t in args if getattr(t, "shape", ()) == x.shape)
    ):
        tk.cross_entropy(x.detach(), target, **kwargs)
    assert strides == {(1500, 1)}


def faked(x: Any) -> Any:
    """With CUDA tensors that are not there."""
    return tree_map_only(Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda"), x)


@pytest.mark.parametrize("name", MIRRORED)
def test_nothing_of_torchs_samples_is_refused_on_cuda(name: str) -> None:
    """Of every dtype that torch has on CUDA; and all has torch's shapes and dtypes."""
    ours, torchs = MIRRORED[name]
    for dtype in _call.NUMBERS:
        for s in samples(name, dtype, supported_on="cuda"):
            args, kwargs = (s.input, *s.args), s.kwargs
            with FakeTensorMode():
                found = ours(*faked(args), **faked(kwargs))
                expected = torchs(*faked(args), **faked(kwargs))
            pairs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
            assert all((a.shape, a.dtype) == (e.shape, e.dtype) for a, e in pairs), (dtype, kwargs)


# --- Functions of tk's own ---


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """By complex numbers."""
    half = x.shape[-1] // 2
    if cos.shape[-1] != half:
        cos, sin = (t[:, ::2] if interleaved else t[:, :half] for t in (cos, sin))
    turn = torch.complex(cos.double(), sin.double())
    if interleaved:
        return torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (half, 2))) * turn).flatten(-2)
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
    return torch.cat((turned.real, turned.imag), -1)


def normed(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * (1 if weight is None else weight), total


def layer_normed(x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Any:
    return F.layer_norm(x + residual, x.shape[-1:], weight, bias), x + residual


X, Y, W, B = torch.Size((2, 5, 6)), torch.Size((2, 5, 6)), torch.Size((6,)), torch.Size((6,))
TABLE = torch.Size((5, 3))
# name -> (function, what it computes, shapes of the arguments)
OWN: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[torch.Size, ...]]] = {
    "gelu_bias": (tk.gelu, lambda x, b: F.gelu(x + b), (X, B)),
    "gelu_tanh": (
        lambda x, b: tk.gelu(x, b, approximate="tanh"),
        lambda x, b: F.gelu(x + b, approximate="tanh"),
        (X, B),
    ),
    "silu_bias": (tk.silu, lambda x, b: F.silu(x + b), (X, B)),
    "swiglu": (tk.swiglu, lambda g, u: F.silu(g) * u, (X, Y)),
    "swiglu_halves": (tk.swiglu, lambda g: F.silu(g[..., :3]) * g[..., 3:], (X,)),
    "geglu": (tk.geglu, lambda g, u: F.gelu(g) * u, (X, Y)),
    "geglu_halves": (
        lambda g: tk.geglu(g, approximate="tanh"),
        lambda g: F.gelu(g[..., :3], approximate="tanh") * g[..., 3:],
        (X,),
    ),
    "add_rms_norm": (partial(tk.add_rms_norm, eps=1e-6), normed, (X, Y, W)),
    "add_rms_norm_plain": (partial(tk.add_rms_norm, eps=1e-6), normed, (X, Y)),
    "add_layer_norm": (tk.add_layer_norm, layer_normed, (X, Y, W, B)),
    "add_layer_norm_plain": (tk.add_layer_norm, layer_normed, (X, Y)),
    "layer_norm_without_bias": (
        lambda x, w: tk.layer_norm(x, (5, 6), w),
        lambda x, w: F.layer_norm(x, (5, 6), w),
        (X, torch.Size((5, 6))),
    ),
}


def tensors(shapes: Any, dtype: torch.dtype, requires_grad: bool = False) -> list[Tensor]:
    return [torch.randn(shape).to(dtype).requires_grad_(requires_grad) for shape in shapes]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", OWN)
def test_own_functions(name: str, dtype: torch.dtype) -> None:
    ours, expected, shapes = OWN[name]
    args = tensors(shapes, dtype)
    agree(ours(*args), expected(*wide(args)), dtype)
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(ours, tensors(shapes, dtype, True))
    elif dtype == torch.float32:
        args = tensors(shapes, dtype, True)
        assert_close(gradients(ours, args), gradients(expected, args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("interleaved", "full"), list(itertools.product((False, True), repeat=2)))
def test_rope(dtype: torch.dtype, interleaved: bool, full: bool) -> None:
    x = torch.randn(2, 3, 5, 6).to(dtype).requires_grad_()
    cos, sin = torch.randn(5, 3), torch.randn(5, 3)
    if full:
        cos, sin = (t.repeat_interleave(2, -1) if interleaved else t.repeat(1, 2) for t in (cos, sin))
    agree(tk.rope(x, cos, sin, interleaved), rotated(x, cos, sin, interleaved), dtype)
    assert x.grad is None
    grad = torch.randn_like(x)
    tk.rope(x, cos, sin, interleaved).backward(grad)
    (expected,) = torch.autograd.grad(rotated(x, cos, sin, interleaved), x, grad.double())
    agree(x.grad, expected.double(), dtype)
    with torch.no_grad():
        swapped = x.transpose(1, 2).contiguous().transpose(1, 2)
        agree(tk.rope(swapped, cos, sin, interleaved), rotated(swapped, cos, sin, interleaved), dtype)
        if dtype == torch.bfloat16:
            cos, sin = cos.bfloat16(), sin.bfloat16()
            agree(tk.rope(x, cos, sin, interleaved), rotated(x, cos, sin, interleaved), dtype)


def test_rope_has_no_gradient_of_its_tables() -> None:
    cos, sin = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3)
    with pytest.raises(tk.UnsupportedError, match=r"cos requires a gradient.*detach it"):
        tk.rope(torch.randn(5, 6), cos, sin)
    with torch.no_grad():
        tk.rope(torch.randn(5, 6), cos, sin)


@pytest.mark.parametrize("x_dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("per", ["tensor", "row"])
def test_quantize_fp8(per: str, dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    x = (torch.randn(3, 4, 8) * torch.logspace(-2, 2, 4)[:, None]).to(x_dtype)
    x[1, 2] = 0
    q, scale = tk.quantize_fp8(x, per, dtype)
    assert q.shape == x.shape and q.dtype == dtype and scale.dtype == torch.float32
    assert scale.shape == (() if per == "tensor" else (3, 4, 1))
    largest = q.float().abs().amax() if per == "tensor" else q.float().abs().amax(-1)
    assert ((largest == torch.finfo(dtype).max) | (largest == 0)).all()
    assert (scale > 0).all() and scale.isfinite().all()
    step = torch.finfo(dtype).eps / 2
    error = (q.double() * scale.double() - x.double()).abs()
    smallest = torch.finfo(dtype).tiny * scale.double()
    assert (error <= step * 1.01 * x.double().abs() + smallest).all()


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_gradients_of_halves(name: str) -> None:
    """Of any layout and size, in a gradient of the whole."""
    ours = getattr(tk, name)
    activation = F.silu if name == "swiglu" else F.gelu
    for x in (
        torch.randn(3, 8), torch.randn(8, 3, 2).transpose(0, 2), torch.randn(2, 3, 20)[..., ::2], torch.randn(14),
        torch.randn(5, 2), torch.randn(1, 8).expand(4, 8), torch.randn(0, 4), torch.randn(3, 0),
    ):  # fmt: skip
        leaf, exact = x.detach().requires_grad_(), x.double().requires_grad_()
        n = x.shape[-1] // 2
        (found,) = torch.autograd.grad(ours(leaf).sum(), leaf)
        (expected,) = torch.autograd.grad((activation(exact[..., :n]) * exact[..., n:]).sum(), exact)
        assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert ours(torch.empty(2, 3, 8, device="meta")).shape == (2, 3, 4)


# --- Strides, sizes, dimensions ---

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "gaps": lambda x: torch.stack([x, x * 0 + 7], -1).flatten(-2)[..., ::2],
    "offset": lambda x: torch.cat([x.flatten(), x.flatten()])[1 : 1 + x.numel()].view(x.shape),
    "expanded": lambda x: x[:1].expand(x.shape),
}
ALONG = {
    name: MIRRORED[name]
    for name in (
        "softmax", "log_softmax", "sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "max", "min", "any", "all",
        "norm", "var", "std", "var_mean", "std_mean", "logsumexp",
    )
}  # fmt: skip
ALONG["norm"] = (
    lambda x, *args, **kw: tk.norm(x, 2, *args, **kw),
    lambda x, *args, **kw: torch.norm(x, 2, *args, **kw),
)
ONE_DIM = ("softmax", "log_softmax", "argmax", "argmin", "prod", "max", "min")  # those that take one dimension
EXTREMES = ("amax", "amin", "argmax", "argmin", "max", "min")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ALONG)
def test_every_dimension_of_every_layout(name: str, layout: str) -> None:
    ours, torchs = ALONG[name]
    x = LAYOUTS[layout](torch.randn(3, 4, 2, 5))
    for dim in range(-4, 4):
        agree(ours(x, dim), torchs(x.double(), dim), torch.float32)
    if name not in ONE_DIM:
        for dims, keepdim in itertools.product([(0, 1), (2, 0), (1, -1), (0, 1, 2, 3)], (False, True)):
            agree(ours(x, dims, keepdim=keepdim), torchs(x.double(), dims, keepdim=keepdim), torch.float32)


@pytest.mark.parametrize("name", ALONG)
def test_nothing_and_next_to_nothing(name: str) -> None:
    ours, torchs = ALONG[name]
    agree(ours(torch.tensor(1.5), 0), torchs(torch.tensor(1.5).double(), 0), torch.float32)
    agree(ours(torch.empty(0, 3), 1), torchs(torch.empty(0, 3).double(), 1), torch.float32)
    if name not in EXTREMES:
        agree(ours(torch.empty(2, 0), 1), torchs(torch.empty(2, 0).double(), 1), torch.float32)
    else:
        with pytest.raises(ValueError, match="is reduced and must not be 0"):
            ours(torch.empty(2, 0), 1)


OF_INTEGERS = ("sum", "prod", *EXTREMES, "any", "all")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in ALONG if "softmax" not in name] + [(name, torch.int64) for name in OF_INTEGERS],
    ids=str,
)
def test_dimensions_of_more_than_64_are_refused_as_in_torch(name: str, dtype: torch.dtype) -> None:
    """Where some are named: a bit set in ATen has no room for them. All of the tensor may be reduced."""
    ours, torchs = ALONG[name]
    most, more = (torch.full((1,) * n, 3, dtype=dtype) for n in (64, 65))
    for dim in (0, -1, *([] if name in ONE_DIM else [(0, 64), [3]])):
        for function in (ours, torchs):
            with pytest.raises(RuntimeError, match="only tensors with up to 64 dims are supported"):
                function(more, dim)
        with pytest.raises(tk.UnsupportedError, match=rf"tk.{name}: input has 65 dimensions.*flatten"):
            ours(more, dim)
    assert_close(ours(most, 63), torchs(most, 63), equal_nan=True)
    if name not in ("norm", "any", "all", "logsumexp"):
        assert_close(ours(more), torchs(more), equal_nan=True)


@pytest.mark.parametrize("n", [1000, 1024, 999, 16])
@pytest.mark.parametrize("name", ["amax", "amin", "max", "argmax", "argmin", "any", "all"])
def test_all_of_a_tensor_by_parts(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal ones the first part's, of NaN the first; the rest that fills no part counts."""
    monkeypatch.setattr(reductions, "PART", 8)
    monkeypatch.setattr(reductions, "MANY", 16)
    ours, torchs = MIRRORED[name]
    repeated = torch.arange(n, dtype=torch.float32) % 7
    last = torch.zeros(n)
    last[-1] = -1.0
    with_nan = repeated.clone()
    with_nan[[n // 2, n // 2 + 1]] = float("nan")
    for x in (
        repeated,
        -repeated,
        last,
        -last,
        with_nan,
        torch.zeros(n),
        torch.ones(n),
        repeated[: n // 8 * 8].view(8, -1).t(),
    ):
        assert_close(ours(x), torchs(x), rtol=0, atol=0, equal_nan=True)
        if name != "max":  # which takes keepdim with a dimension only
            assert ours(x, keepdim=True).shape == (1,) * x.dim()


WHOLE = ("sum", "mean", "amax", "amin", "norm", "var", "std", "var_mean", "std_mean")


@pytest.mark.parametrize("name", WHOLE)
def test_all_of_a_tensor_in_any_order(name: str) -> None:
    """Rows of 4096, of 256, of 16 and of 1; another order of dimensions; gaps."""
    ours, torchs = ALONG[name]
    shapes = ((4, 4096), (3, 256), (5, 16), (7, 3), (17,))
    given = [torch.randn(shape) for shape in shapes]
    image = torch.randn(2, 3, 4, 5)
    given += [given[1].t(), given[4][::2], given[0][:, :-1], image.to(memory_format=torch.channels_last), image.mT]
    for x in given:
        agree(ours(x), torchs(x.double()), torch.float32)
        (found,), (expected,) = gradients(ours, [x.requires_grad_()]), gradients(torchs, [x])
        assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_sum_of_everything_is_rounded_once() -> None:
    x = torch.full((70_000,), 1.0).bfloat16()
    assert tk.sum(x) == 70144 and tk.mean(x) == 1 and tk.norm(x) == 264  # the nearest of bfloat16


def test_equal_ones_of_everything_share_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "PART", 2)
    monkeypatch.setattr(reductions, "MANY", 4)
    for ours, torchs in ((tk.amax, torch.amax), (tk.max, torch.max), (tk.min, torch.min)):
        x = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.5], requires_grad=True)
        assert_close(gradients(ours, [x]), gradients(torchs, [x]))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_extremes_and_places_of_few_and_of_many(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few elements by one op: the same, to the bit, with the gradient of the first of equal ones."""
    x = torch.randn(5, 6, 7).to(dtype).round()
    x[1, 2, 3] = x[1, 4, 3] = float("nan")
    for few in (reductions.FEW, 0):
        monkeypatch.setattr(reductions, "FEW", few)
        for given, dim, keepdim in itertools.product((x, x.mT, x[:, ::2], x[:, :1]), (0, 1, -1), (False, True)):
            for ours, torchs in ((tk.max, torch.max), (tk.min, torch.min)):
                leaves = [given.detach().clone().requires_grad_() for _ in "ab"]
                found, wanted = (f(y, dim, keepdim) for f, y in zip((ours, torchs), leaves, strict=True))
                assert_close(found.values, wanted.values, rtol=0, atol=0, equal_nan=True)
                assert torch.equal(found.indices, wanted.indices) and not found.indices.requires_grad
                weight = torch.randn_like(wanted.values)
                grads = [torch.autograd.grad(r.values, y, weight) for r, y in zip((found, wanted), leaves, strict=True)]
                assert_close(*grads, rtol=0, atol=0)
    empty = tk.max(torch.empty(0, 3, device="meta"), 1)
    assert empty.values.shape == empty.indices.shape == (0,)
    with pytest.raises(ValueError, match="must not be 0"):
        tk.max(torch.empty(3, 0), 1)


def test_tangents_of_an_extreme_are_of_the_first_of_equal_ones() -> None:
    x, tangent = torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 2.0]]), torch.randn(2, 3)
    for ours, torchs in ((tk.max, torch.max), (tk.min, torch.min)):
        found, expected = (torch.func.jvp(lambda x, f=f: f(x, 1)[0], (x,), (tangent,)) for f in (ours, torchs))
        assert_close(found, expected)
        assert_close(torch.func.vmap(lambda x: ours(x, 0)[0])(x), torchs(x, 1)[0])  # noqa: B023


def test_truth_of_other_dtypes() -> None:
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float64, torch.bfloat16):
        for values in ([[0, 0], [0, 1]], [[1, 1], [1, 1]], [[0, 0], [0, 0]]):
            y = torch.tensor(values, dtype=dtype)
            for ours, torchs in ((tk.any, torch.any), (tk.all, torch.all)):
                assert_close(ours(y), torchs(y))
                assert_close(ours(y, 1, True), torchs(y, 1, True))
    y = torch.tensor([[float("nan"), 0.0], [float("nan"), 1.0]])
    assert tk.any(y, 1).tolist() == [True, True] and tk.all(y, 1).tolist() == [False, True]
    assert tk.any(torch.empty(2, 0), 1).tolist() == [False, False] and tk.all(torch.empty(0)).item() is True


@pytest.mark.parametrize("order", [0.5, 1, 2, 3, -1, 300.0, -(2.0**63), 2.0**63, 1e-300, float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("shape", "dim"), [((), None), ((1,), 0), ((5, 1), 1), ((5, 1), -1), ((1, 1, 1), (0, 2)), ((1, 1), None)]
)
def test_norms_of_one_element_are_its_size(shape: tuple[int, ...], dim: Any, order: float) -> None:
    """At orders whose powers overflow too."""
    for keepdim in (False, True):
        x = torch.randn(shape, requires_grad=True)
        found, wanted = (f(x, order, dim, keepdim) for f in (tk.vector_norm, torch.linalg.vector_norm))
        assert_close(found, wanted, rtol=0, atol=0)
        assert_close(torch.autograd.grad(found.sum(), x)[0], x.sign(), rtol=0, atol=0)


@pytest.mark.parametrize("order", [0, 0.5, 1, 2, 3, -1, -2, float("inf"), float("-inf")])
def test_norms_of_zeros_and_their_gradients(order: float) -> None:
    y = torch.tensor([[0.0, 0.0, 0.0], [0.0, 3.0, -4.0], [1.0, -2.0, 2.0]])
    for dim in (1, None):
        assert_close(tk.vector_norm(y, order, dim), torch.linalg.vector_norm(y, order, dim))
        if order != 0:  # of which torch has no gradient to ask for
            args = [y.requires_grad_(), order, dim]
            assert_close(gradients(tk.vector_norm, args), gradients(torch.linalg.vector_norm, args))
        y = y.detach()


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.0, 60000.0])
def test_gradient_of_a_norm_in_16_bits_is_finite(size: float) -> None:
    """However small the norm is that it is divided by."""
    x = torch.full((3, 5), size, dtype=torch.float16)
    for dim in (None, -1, 0):
        found, expected = (
            gradients(f, (x.clone().requires_grad_(), 2, dim)) for f in (tk.vector_norm, torch.linalg.vector_norm)
        )
        assert_close(found, expected)


def test_nan_is_no_order_of_a_norm() -> None:
    for function in (tk.norm, tk.vector_norm):
        with pytest.raises(ValueError, match=rf"tk\.{function.__name__}: (p|ord) is nan, must be a number"):
            function(torch.empty(0, 4), float("nan"))


def test_group_norm_of_every_layout() -> None:
    y, weight, bias = torch.randn(2, 6, 3, 4), torch.randn(6), torch.randn(6)
    for x in (y, y.to(memory_format=torch.channels_last), y.transpose(2, 3), y[:, :, 0], y[:, :, 0, 0], y[:0]):
        agree(tk.group_norm(x, 3, weight, bias), F.group_norm(x.double(), 3, *wide([weight, bias])), torch.float32)


def test_softmax_without_a_dimension_is_torchs() -> None:
    for x in (torch.randn(4, 5), torch.randn(3, 4, 5)):
        with pytest.warns(UserWarning, match="name dim"):
            found = tk.softmax(x)
        with pytest.warns(UserWarning, match="dim"):
            assert_close(found, F.softmax(x))


def test_cross_entropy_ignores_and_refuses_classes() -> None:
    x, target = torch.randn(4, 7), torch.tensor([0, 6, 3, -100])
    for reduction in ("none", "sum", "mean"):
        found = tk.cross_entropy(x, target, reduction=reduction, label_smoothing=0.2)
        assert_close(found, F.cross_entropy(x, target, reduction=reduction, label_smoothing=0.2))
    for bad in (7, -1):
        with pytest.raises((IndexError, RuntimeError), match=f"{bad} is out of bounds"):
            tk.cross_entropy(x, torch.tensor([0, bad, 1, -100]))
    assert tk.cross_entropy(x, torch.full((4,), -100)).isnan()
    x[0, 0], x[1, 2], x[2, 3] = float("-inf"), float("nan"), float("inf")
    target = torch.tensor([1, 6, 0, 5])
    assert_close(
        tk.cross_entropy(x, target, reduction="none"), F.cross_entropy(x, target, reduction="none"), equal_nan=True
    )


SCANS_AND_SORTS = {name: MIRRORED[name] for name in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort")}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SCANS_AND_SORTS)
def test_scans_and_sorts_along_every_dimension(name: str, layout: str) -> None:
    ours, torchs = SCANS_AND_SORTS[name]
    x = LAYOUTS[layout](torch.randn(3, 4, 2, 5))
    for dim in range(-4, 4):
        agree(ours(x, dim), torchs(x.double(), dim), torch.float32)
    agree(ours(torch.tensor(1.5), 0), torchs(torch.tensor(1.5).double(), 0), torch.float32)
    agree(ours(torch.empty(0, 3), 1), torchs(torch.empty(0, 3).double(), 1), torch.float32)
    with pytest.raises(IndexError, match=rf"tk.{name}: dim is 4, must be -4 to 3"):
        ours(x, 4)


def test_topk_of_equal_ones_and_of_too_many() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, float("nan"), 3.0]])
    values, indices = tk.topk(x, 3)
    assert indices.tolist() == [[3, 1, 2]] and values[0, 1:].tolist() == [3.0, 3.0]
    assert tk.topk(x, 2, largest=False).indices.tolist() == [[0, 1]]
    assert tk.topk(x, 0).values.shape == (1, 0)
    with pytest.raises(ValueError, match=r"tk\.topk: k is 6, must be 0 to 5"):
        tk.topk(x, 6)


# --- Autocast ---


@contextmanager
def autocast(device: str) -> Iterator[None]:
    """As torch.autocast, on machines without the device too."""
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)


OF_INDICES = ("gather", "scatter_add", "index_add", "index_put")  # whose dtype is that of both tensors
UNDER_AUTOCAST: dict[str, tuple[Any, ...]] = {
    "softmax": (-1,), "log_softmax": (-1,), "nn.functional.layer_norm": ((4,),), "nn.functional.rms_norm": ((4,),),
    "nn.functional.group_norm": (2,), "nn.functional.gelu": (), "nn.functional.silu": (), "topk": (2,), "cumsum": (0,),
    "cumprod": (0,), "cummax": (0,), "cummin": (0,), "logcumsumexp": (0,), "logsumexp": (0,), "linalg.vector_norm": (),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "name", [n for n in MIRRORED if not n.endswith(("cross_entropy", "embedding")) and n not in OF_INDICES]
)
def test_autocast_as_aten(name: str, device: str) -> None:
    """On the CPU a few of ATen's are in float32, on CUDA many; a dtype that is asked for is kept."""
    ours, torchs = MIRRORED[name]
    with FakeTensorMode(), autocast(device):
        for dtype in (torch.bfloat16, torch.float32):
            y = torch.empty(4, 4, dtype=dtype, device=device)
            found, expected = (f(y, *UNDER_AUTOCAST.get(name, ())) for f in (ours, torchs))
            found, expected = (t[0] if isinstance(t, tuple) else t for t in (found, expected))
            assert found.dtype == expected.dtype
        if name in ("sum", "prod", "cumsum", "cumprod", "softmax", "log_softmax"):
            asked = torch.bfloat16
            assert ours(y, 0, dtype=asked).dtype == torchs(y, 0, dtype=asked).dtype == asked


def test_autocast_of_several_tensors() -> None:
    """Weights in float32 beside a 16-bit input are usual there."""
    with FakeTensorMode(), autocast("cuda"):
        y, weight = torch.empty(2, 4, dtype=torch.bfloat16, device="cuda"), torch.empty(4, device="cuda")
        target = torch.empty(2, dtype=torch.int64, device="cuda")
        for found in (
            tk.layer_norm(y, (4,), weight, weight), tk.rms_norm(y, (4,), weight), tk.group_norm(y, 2, weight, weight),
            tk.cross_entropy(y, target),
        ):  # fmt: skip
            assert found.dtype == torch.float32


# --- Fakes and graphs ---


def everything(x: Tensor, weight: Tensor, index: Tensor, cos: Tensor, sin: Tensor) -> list[Any]:
    """x [2, 6, 6], weight [6], index [2, 6] below 6, cos and sin [6, 3]."""
    return [
        tk.softmax(x, 1), tk.log_softmax(x, -1), tk.logsumexp(x, (0, 2)), tk.sum(x, 0), tk.sum(x), tk.mean(x, -1, True),
        tk.amax(x, (1, 2)), tk.argmax(x), *tk.var_mean(x, 1), tk.prod(x, 1), tk.amin(x), tk.argmin(x, 0), tk.max(x),
        *tk.max(x, 1), *tk.min(x, 0, True), tk.any(x, 1), tk.all(x), tk.mean(x), tk.norm(x), tk.vector_norm(x, 1, 0),
        tk.vector_norm(x, 3, 2), tk.vector_norm(x, float("inf")), tk.var(x), tk.std(x, -1, correction=0),
        tk.gelu(x, weight), tk.silu(x), tk.swiglu(x),
        tk.geglu(x, x, "tanh"), tk.layer_norm(x, (6,), weight), tk.rms_norm(x, (6, 6)), tk.group_norm(x, 2, weight),
        *tk.add_rms_norm(x, x, weight), *tk.add_layer_norm(x, x), tk.rope(x, cos, sin), tk.rope(x, cos, sin, True),
        *tk.quantize_fp8(x, "row"), tk.embedding(index, x[0], 2), tk.cross_entropy(x, index, label_smoothing=0.1),
        tk.cumsum(x, 1), tk.cumprod(x, -1), *tk.cummax(x, 0), *tk.cummin(x, 2), tk.logcumsumexp(x, 1),
        *tk.sort(x, 1, True), *tk.topk(x, 3, 1), tk.argsort(x), *tk.std_mean(x, 0),
        tk.gather(x, 2, index[..., None]), tk.scatter_add(x, 1, index[:, None], x), tk.index_add(x, 1, index[0], x),
        tk.index_put(x, (None, index[0]), weight), tk.index_put(x, (None, index[0]), x, True),
    ]  # fmt: skip


def arguments() -> list[Tensor]:
    return [torch.randn(2, 6, 6), torch.randn(6), torch.randint(0, 6, (2, 6)), torch.randn(6, 3), torch.randn(6, 3)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph(dynamic: bool) -> None:
    args = arguments()
    args[0].requires_grad_()
    compiled = torch.compile(everything, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    found, expected = compiled(*args), everything(*args)
    for a, e in zip(found, expected, strict=True):
        assert a.stride() == e.stride() and a.dtype == e.dtype
        assert_close(a.float(), e.float())
    (grad,) = torch.autograd.grad(sum(y.float().square().sum() for y in found if y.requires_grad), args[0])
    (wanted,) = torch.autograd.grad(sum(y.float().square().sum() for y in expected if y.requires_grad), args[0])
    assert_close(grad, wanted, rtol=1e-4, atol=1e-4)


def test_one_graph_of_functions_that_were_never_looked_up() -> None:
    code = """if True:
        import torch, tk
        compiled = torch.compile(lambda x: tk.softmax(tk.swiglu(x), -1) + tk.sum(x), fullgraph=True, backend="eager")
        x = torch.randn(3, 8)
        torch.testing.assert_close(compiled(x), tk.softmax(tk.swiglu(x), -1) + tk.sum(x))
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_meta_tensors() -> None:
    """Shapes, strides and dtypes with nothing behind them."""
    args = arguments()
    found, expected = everything(*(x.to("meta") for x in args)), everything(*args)
    for a, e in zip(found, expected, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (e.shape, e.stride(), e.dtype)
        assert a.device.type == "meta"


# --- What is refused ---


def on_cuda(call: Callable[[Callable[..., Tensor]], Any]) -> Any:
    """`call` with a maker of CUDA tensors that are not there: nothing is launched."""
    with FakeTensorMode():
        return call(lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device="cuda"))


REFUSED_CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "fp64": (lambda t: tk.silu(t(3, dtype=torch.float64)), "silu: input is float64.*; on cuda it takes bfloat16"),
    "int": (lambda t: tk.mean(t(3, dtype=torch.int64)), "mean: input is int64"),
    "unsigned": (lambda t: tk.sum(t(3, dtype=torch.uint16)), "sum: input is uint16; on cuda it takes .*, uint8, bool$"),
    "mixed": (
        lambda t: tk.layer_norm(t(2, 3, dtype=torch.float32), (3,), t(3)),
        "layer_norm: input is float32, weight is bfloat16; .* all of one dtype",
    ),
    "table": (lambda t: tk.rope(t(2, 4), *[t(2, 2, dtype=torch.float16)] * 2), "cos is torch.float16, must be float32"),
    "max of two": (lambda t: tk.max(t(3), t(3)), "max: the maximum of two tensors: no kernel has it"),
    "min of two": (lambda t: tk.min(t(3), other=t(3)), "min: the minimum of two tensors: no kernel has it"),
    "no classes": (lambda t: tk.cross_entropy(t(0, 0), t(0, 0)), "cross_entropy: no classes: no kernel has it"),
    "nuclear": (lambda t: tk.norm(t(3, 3, dtype=torch.float32), "nuc"), "norm: the nuclear norm: no kernel has it"),
    "gradient of class weights": (
        lambda t: tk.cross_entropy(t(2, 3), t(2, dtype=torch.int64), t(3).requires_grad_()),
        "the gradient of weight: no kernel has it",
    ),
    "max_norm": (
        lambda t: tk.embedding(t(2, dtype=torch.int64), t(3, 4), max_norm=1.0),
        "max_norm, scale_grad_by_freq or sparse: no kernel has it",
    ),
}


@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_what_no_kernel_takes_is_refused_on_cuda(name: str) -> None:
    call, message = REFUSED_CALLS[name]
    with pytest.raises(tk.UnsupportedError, match=message), tk.config.strict():
        on_cuda(call)


@pytest.mark.parametrize("name", ["fp64", "nuclear", "max_norm", "max of two", "min of two", "no classes"])
def test_what_no_kernel_has_is_atens(name: str) -> None:
    """But for strict mode."""
    call, _ = REFUSED_CALLS[name]
    found = on_cuda(call)
    assert found.device.type == "cuda"


x, i = torch.randn(2, 6), torch.tensor([0, 1])
WRONG: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "no tensor": (TypeError, "softmax: input must be a Tensor, is list", lambda: tk.softmax([1.0], 0)),
    "no tensor inside": (TypeError, "silu: bias must be a Tensor, is bool", lambda: tk.silu(x, True)),
    "dim": (IndexError, r"softmax: dim is 2, must be -2 to 1", lambda: tk.softmax(x, 2)),
    "dim of 0-d": (IndexError, r"sum: dim is 1, must be -1 to 0", lambda: tk.sum(x[0, 0], 1)),
    "dim twice": (ValueError, "mean: dim is .* twice", lambda: tk.mean(x, (0, -2))),
    "approximate": (ValueError, "gelu: approximate is 'erf', must be", lambda: tk.gelu(x, approximate="erf")),
    "odd halves": (ValueError, r"swiglu: without up, gate must be \[..., 2N\]", lambda: tk.swiglu(x[:, :5])),
    "halves": (ValueError, "geglu: gate and up must have one shape", lambda: tk.geglu(x, x[:, :3])),
    "bias": (ValueError, "bias", lambda: tk.gelu(x, x[0, :5])),
    "normalized_shape": (ValueError, "layer_norm: input must end in", lambda: tk.layer_norm(x, (5,))),
    "weight": (ValueError, r"rms_norm: weight must be \[6\], is \[2\]", lambda: tk.rms_norm(x, (6,), x[:, 0])),
    "groups": (ValueError, "group_norm: input must be .* multiple", lambda: tk.group_norm(x, 4)),
    "group weight": (ValueError, r"group_norm: bias must be \[6\]", lambda: tk.group_norm(x, 3, None, x[:, 0])),
    "residual": (ValueError, "add_rms_norm: x and residual", lambda: tk.add_rms_norm(x, x[:1])),
    "target": (ValueError, "cross_entropy: input must be", lambda: tk.cross_entropy(x, i[:1])),
    "reduction": (ValueError, "reduction is 'max', must be one of", lambda: tk.cross_entropy(x, i, reduction="max")),
    "smoothing": (ValueError, "label_smoothing is 2, must be", lambda: tk.cross_entropy(x, i, label_smoothing=2)),
    "odd rope": (ValueError, "rope: x must be .* even D", lambda: tk.rope(x[:, :5], x, x)),
    "table": (ValueError, r"rope: sin must be \[2, 3\] or \[2, 6\]", lambda: tk.rope(x, x, x[:, :4])),
    "per": (ValueError, "per is 'column', must be", lambda: tk.quantize_fp8(x, "column")),
    "fp8 dtype": (ValueError, "dtype is torch.float16, must be", lambda: tk.quantize_fp8(x, dtype=torch.float16)),
    "padding_idx": (ValueError, "padding_idx is 2, must be -2 to 1", lambda: tk.embedding(i, x, 2)),
    "unbiased": (ValueError, "not both", lambda: tk.var_mean(x, 0, True, correction=1)),
    "unbiased of a deviation": (ValueError, "std_mean: .*not both", lambda: tk.std_mean(x, 0, True, correction=1)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    error, message, call = WRONG[name]
    with pytest.raises(error, match=message):
        call()


# --- What tk exports ---


def test_the_functions_are_those_of_the_loaded_packs() -> None:
    assert set(functional.available()) == set(functional.FUNCTIONS) <= set(dir(tk))
    assert set(tk.__all__) <= set(dir(tk))
    with pytest.raises(AttributeError, match="no attribute 'hardmax'"):
        tk.hardmax  # noqa: B018


def test_a_function_whose_op_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_call, "_ops", {})
    monkeypatch.setattr(register, "find", lambda name: None)
    monkeypatch.delitem(vars(tk), "rope", raising=False)
    with pytest.raises(AttributeError, match=r"tk.rope needs rope, rope_interleaved: in no loaded pack"):
        tk.rope  # noqa: B018
    assert functional.available() == []


def test_importing_tk_leaves_the_functions_alone() -> None:
    code = "import sys, tk; assert 'tk.functional' not in sys.modules; tk.softmax; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# Of integers, or of the dtypes that others are converted to.
OTHER_DTYPES = (
    "fill_integers", "row_any", "bucketize", "searchsorted", "embedding_backward", "row_sum_int", "row_extreme_int",
    "flat_index", "row_place_int", "cumsum_int", "cross_entropy_weighted", "cross_entropy_of_probabilities",
)  # fmt: skip


@pytest.mark.parametrize("name", functional.FUNCTIONS)
def test_every_function_takes_a_config_and_is_described(name: str) -> None:
    function = functional.FUNCTIONS[name]
    assert inspect.signature(function).parameters["config"].kind is inspect.Parameter.KEYWORD_ONLY
    assert function.__doc__
    for op in function.ops:  # type: ignore[attr-defined]
        meta = register.find(op).meta  # type: ignore[union-attr]
        if op in OTHER_DTYPES:
            continue
        expected = _call.FLOATS[:2] if op == "adamw_mixed" else _call.FLOATS  # its moments are in float32
        found = tuple(DTYPES[d] for d in meta["variables"]["T"])
        assert found[: len(expected)] == expected, f"{op} takes other dtypes"
        assert set(found[len(expected) :]) <= {torch.float64, torch.int64, torch.int32, torch.int16, torch.int8}


def test_a_config_reaches_the_op() -> None:
    x = torch.randn(3)
    assert_close(tk.softmax(x, 0, config=0), F.softmax(x, 0))
    with pytest.raises(ValueError, match="config is -2"):
        tk.softmax(x, 0, config=-2)


def test_modes_reach_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setitem(_call._ops, "softmax", lambda x, config: seen.append(config) or x)
    tk.softmax(torch.randn(3), 0, config="rows")
    assert seen == ["rows"]


def test_every_op_of_the_package_belongs_to_a_function() -> None:
    import tk.kernels.generated
    from tk.generated import Declared

    modules = [m.name for m in pkgutil.iter_modules(tk.kernels.generated.__path__, "tk.kernels.generated.")]
    declared = {x.name for m in modules for x in vars(importlib.import_module(m)).values() if isinstance(x, Declared)}
    assert declared == {op for f in functional.FUNCTIONS.values() for op in f.ops}  # type: ignore[attr-defined]
