"""bmm and baddbmm on the CPU: against ATen's own samples and float64, gradients, transforms, what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck
from torch_samples import op_db

import tk

from .products import ACTIVATION_NAMES, assert_close, exact

A, B = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def samples(name: str, dtype: torch.dtype) -> Iterator[tuple[tuple[torch.Tensor, ...], dict[str, Any]]]:
    """ATen's, whose numbers go up to 9, as numbers up to 1."""
    info = next(info for info in op_db if info.name == name and not info.variant_test_name)
    for s in info.sample_inputs("cpu", dtype):
        yield tuple((x / 9).requires_grad_() for x in (s.input, *s.args)), s.kwargs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ("bmm", "baddbmm"))
def test_atens_samples(name: str, dtype: torch.dtype) -> None:
    count = 0
    for args, kwargs in samples(name, dtype):
        result = getattr(tk, name)(*args, **kwargs)
        wide = tuple(x.detach().double().requires_grad_() for x in args)
        expected = getattr(torch, name)(*wide, **kwargs)
        assert_close(result.detach(), expected.detach(), args[-1].shape[1])
        grad = torch.randn_like(expected)
        rtol, atol = (0.05, 0.05) if dtype.itemsize == 2 else (1e-4, 1e-4)
        gradients = torch.autograd.grad(result, args, grad.to(dtype)), torch.autograd.grad(expected, wide, grad)
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=rtol, atol=atol)
        count += 1
    assert count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_against_fp64(dtype: torch.dtype, activation: str) -> None:
    a, b, bias = A.to(dtype), B.to(dtype), torch.randn(6).to(dtype)
    result = tk.bmm(a, b, bias, activation)  # type: ignore[arg-type]
    assert result.dtype == dtype and result.is_contiguous()
    assert_close(result, exact(a, b, bias, activation=activation), 5)


@pytest.mark.parametrize("batch", (1, 3))
def test_layouts(batch: int) -> None:
    for m, n, k in ((4, 6, 5), (1, 6, 5), (4, 1, 5), (4, 6, 1)):
        x, y = torch.randn(batch, m, k), torch.randn(batch, k, n)
        lefts = (x, x.mT.contiguous().mT, x.transpose(0, 1).contiguous().transpose(0, 1), x[:1].expand_as(x))
        rights = (y, y.mT.contiguous().mT, y.permute(1, 2, 0).contiguous().permute(2, 0, 1), y[:1].expand_as(y))
        for a in lefts:
            for b in rights:
                assert_close(tk.bmm(a, b), exact(a, b), k)


@pytest.mark.parametrize("shape", ((), (6,), (4, 1), (4, 6), (3, 1, 1), (1, 4, 6), (3, 1, 6), (3, 4, 6)), ids=str)
def test_bias_broadcasts_as_in_torch(shape: tuple[int, ...]) -> None:
    bias = torch.randn(shape)
    expected = torch.baddbmm(bias.double(), A.double(), B.double(), beta=0.5, alpha=-2)
    assert_close(tk.baddbmm(bias, A, B, beta=0.5, alpha=-2), expected, 5)
    assert gradcheck(lambda *x: tk.baddbmm(*x, beta=0.5, alpha=-2), (leaf(*shape), leaf(3, 4, 5), leaf(3, 5, 6)))


@pytest.mark.parametrize("size", ((0, 4, 6, 5), (3, 0, 6, 5), (3, 4, 0, 5), (3, 4, 6, 0), (0, 0, 0, 0)), ids=str)
def test_sizes_of_0(size: tuple[int, int, int, int]) -> None:
    batch, m, n, k = size
    a, b = torch.randn(batch, m, k, requires_grad=True), torch.randn(batch, k, n, requires_grad=True)
    result = tk.bmm(a, b)
    assert torch.equal(result, torch.zeros(batch, m, n))
    result.sum().backward()
    assert a.grad is not None and not a.grad.any()
    assert_close(tk.bmm(a.detach(), b.detach(), torch.ones(n)), torch.ones(batch, m, n).double(), 1)


def test_beta_of_zero_does_not_read_the_bias() -> None:
    assert_close(tk.baddbmm(torch.full((6,), math.nan), A, B, beta=0), exact(A, B), 5)


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_gradients(activation: str) -> None:
    def call(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return tk.bmm(a, b, bias, activation)  # type: ignore[arg-type]

    inputs = (leaf(2, 3, 4), leaf(2, 4, 2), leaf(2))
    assert gradcheck(call, inputs)
    assert gradgradcheck(call, inputs)


def test_gradients_of_a_shared_matrix() -> None:
    """What all of the batch share gets the sum of what they say."""
    assert gradcheck(lambda a, b: tk.bmm(a, b.expand(3, -1, -1), activation="silu"), (leaf(3, 4, 5), leaf(5, 2)))


@pytest.mark.parametrize("op", ("bmm", "bmm.out", "baddbmm", "baddbmm.out"))
def test_opcheck(op: str) -> None:
    name, _, overload = op.partition(".")
    a, b, bias = (x.clone().requires_grad_(not overload) for x in (A, B, torch.randn(3, 1, 6)))
    args = (bias, a, b, 0.5, 2.0, 4) if name == "baddbmm" else (a, b, bias, 2)
    kwargs = {"out": torch.empty(3, 4, 6)} if overload else {}
    opcheck(getattr(getattr(torch.ops.tk, name), overload or "default"), args, kwargs)


@pytest.mark.parametrize(
    "in_dims", ((0, None, None), (None, 0, None), (1, 2, None), (0, 0, 0), (0, None, 0), (3, 1, 0))
)
@pytest.mark.parametrize("bias_shape", (None, (6,), (4, 1), (3, 4, 6)), ids=str)
def test_vmap(in_dims: tuple[int | None, ...], bias_shape: tuple[int, ...] | None) -> None:
    shapes = ((3, 4, 5), (3, 5, 6), bias_shape)
    inputs = [None if s is None else torch.randn(s if d is None else (*s[:d], 2, *s[d:]))
              for s, d in zip(shapes, in_dims, strict=True)]  # fmt: skip
    if bias_shape is None:
        in_dims = (*in_dims[:2], None)
    result = torch.vmap(tk.bmm, in_dims)(*inputs)
    wide = (None if x is None else x.double() for x in inputs)
    expected = torch.vmap(lambda a, b, c: a @ b + (0 if c is None else c), in_dims)(*wide)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    if bias_shape is not None:
        added = torch.vmap(lambda a, b, c: tk.baddbmm(c, a, b), in_dims)(*inputs)
        torch.testing.assert_close(added, result)


def test_vmap_of_an_empty_batch() -> None:
    assert torch.vmap(tk.bmm, (0, 0))(torch.randn(2, 0, 4, 5), torch.randn(2, 0, 5, 6)).shape == (2, 0, 4, 6)


def test_compile_with_dynamic_sizes() -> None:
    compiled = torch.compile(lambda a, b: tk.bmm(a, b, activation="gelu") * 2, fullgraph=True, dynamic=True,
                             backend="aot_eager")  # fmt: skip
    for batch, m, n, k in ((2, 4, 5, 3), (3, 7, 2, 9)):
        a, b = torch.randn(batch, m, k, requires_grad=True), torch.randn(batch, k, n)
        result = compiled(a, b)
        assert_close(result.detach() / 2, exact(a, b, activation="gelu").detach(), k)
        result.sum().backward()
    torch._dynamo.reset()


def test_fake_tensors() -> None:
    a, b = A.half(), B.half()
    with FakeTensorMode() as mode:
        fake = tk.bmm(mode.from_tensor(a), mode.from_tensor(b), out_dtype=torch.float32)
    assert (fake.shape, fake.stride(), fake.dtype) == ((3, 4, 6), (24, 6, 1), torch.float32)


def test_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(tk.bmm(A, B), tk.bmm(A.bfloat16(), B.bfloat16()))


# --- Out ---


def test_out_in_any_layout() -> None:
    for out in (torch.empty(3, 6, 4).mT, torch.empty(6, 4, 3).permute(2, 1, 0), torch.empty(3, 2, 4, 9)[:, 1, :, 2:8]):
        assert tk.bmm(A, B, out=out) is out
        assert_close(out, exact(A, B), 5)
    bias = torch.randn(3, 4, 6)
    expected = exact(A, B, bias)
    assert_close(tk.baddbmm(bias, A, B, out=bias), expected, 5)


def test_heads_of_one_tensor_are_no_overlap() -> None:
    """[tokens, 3, heads, size], each head a matrix of the batch: the result in place of values."""
    qkv = torch.randn(5, 3, 2, 5)
    q, k, out = (qkv[:, i].transpose(0, 1) for i in range(3))
    expected = exact(q, k.mT)
    tk.bmm(q, k.mT, out=out)
    assert_close(out, expected, 5)


@pytest.mark.parametrize(
    ("a", "out"),
    (
        (lambda x: x[:, :, :5], lambda x: x[:, :, 4:9]),  # a column in common
        (lambda x: x[:, :, :5], lambda x: x[:, :, :5]),
        (lambda x: x[:2, :, :5], lambda x: x[1:3, :, :5]),  # a matrix in common
    ),
)
def test_overlapping_memory_is_refused(a, out) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(4, 5, 10)
    before = x.clone()
    with pytest.raises(ValueError, match="overlaps a"):
        tk.bmm(a(x), torch.randn(a(x).shape[0], 5, 5), out=out(x))
    assert torch.equal(x, before)


@pytest.mark.parametrize("out", (torch.empty(4, 6).expand(3, 4, 6), torch.empty(100).as_strided((3, 4, 6), (10, 6, 1))))
def test_out_that_overlaps_itself_is_refused(out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="share memory"):
        tk.bmm(A, B, out=out)


# --- What is refused ---


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda: tk.bmm(A, A), r"tk.bmm: the inner sizes differ: a is \[3, 4, 5\], b is \[3, 4, 5\]"),
        (lambda: tk.bmm(A[:2], B), r"the batch sizes differ: a is \[2, 4, 5\], b is \[3, 5, 6\]"),
        (lambda: tk.bmm(A[:1], B), "the batch sizes differ"),
        (lambda: tk.bmm(A[0], B), r"a must have 3 dimensions, is \[4, 5\]"),
        (lambda: tk.bmm(A, B[0]), r"b must have 3 dimensions, is \[5, 6\]"),
        (lambda: tk.bmm(A, B.double()), "a is float32, b is float64"),
        (lambda: tk.baddbmm(torch.randn(4), A, B), r"bias is \[4\], which does not broadcast to \[3, 4, 6\]"),
        (lambda: tk.baddbmm(torch.randn(2, 1, 1), A, B), "does not broadcast"),
        (lambda: tk.baddbmm(torch.randn(1, 1, 1, 1), A, B), "does not broadcast"),
        (lambda: tk.bmm(A, B, out=torch.empty(3, 4, 5)), r"out is \[3, 4, 5\], must be \[3, 4, 6\]"),
        (lambda: tk.bmm(A, B, activation="tanh"), "activation is 'tanh'"),  # type: ignore[arg-type]
        (lambda: torch.ops.tk.baddbmm(torch.randn(6), A, B, mode=16), "mode is 16"),
        (lambda: tk.bmm(A.to("meta"), B[:2].to("meta")), "the batch sizes differ"),
    ),
)
def test_wrong_arguments(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()


def test_integers_are_unsupported() -> None:
    with pytest.raises(tk.UnsupportedError, match="a is int32"):
        tk.bmm(A.int(), B.int())


def test_what_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="b must be a Tensor, is list"):
        tk.bmm(A, [1])  # type: ignore[arg-type]
