"""b2b_gemm on the CPU: both orders against float64, functions of one's own, what is refused, which way is taken."""

from __future__ import annotations

import math

import pytest
import torch
from torch.library import opcheck

import tk
from tk.b2b import function
from tk.ops import b2b, product

from .products import ACTIVATION_NAMES, LAYOUTS, laid_out

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
A, B, C = torch.randn(5, 7), torch.randn(7, 9), torch.randn(9, 4)


def exact(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, order: str, f) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """In float64, but that what f gives is rounded to the operands' dtype."""

    def between(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return f(x.double() @ y.double()).to(a.dtype).double()

    return between(a, b) @ c.double() if order == "left" else a.double() @ between(b, c)


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Within a few neighbours of the largest: sums cancel, and the CPU's library orders them as its processor likes."""
    eps = torch.finfo(result.dtype).eps
    largest = max((1.0, *expected.abs().flatten().tolist()))
    torch.testing.assert_close(result.double(), expected, rtol=4 * eps, atol=16 * eps * largest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ("left", "right"))
@pytest.mark.parametrize("f", ACTIVATION_NAMES)
def test_against_fp64(f: str, order: str, dtype: torch.dtype) -> None:
    a, b, c = (x.to(dtype) for x in (A, B, C))
    result = tk.b2b_gemm(a, b, c, order=order, f=f)  # type: ignore[arg-type]
    assert result.dtype == dtype and result.is_contiguous()
    close(result, exact(a, b, c, order, product.ACTIVATE[f]))


def shifted_cosine(shift: float):  # type: ignore[no-untyped-def]
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x + shift) * 2

    return f


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ("left", "right"))
def test_a_function(order: str, dtype: torch.dtype) -> None:
    a, b, c = (x.to(dtype) for x in (A, B, C))
    for shift in (0.0, 1.25):
        f = shifted_cosine(shift)
        close(tk.b2b_gemm(a, b, c, order=order, f=f), exact(a, b, c, order, f))  # type: ignore[arg-type]


def test_functions_of_one_another() -> None:
    def power(n: int):  # type: ignore[no-untyped-def]
        return lambda x: torch.where(x > n, x * n, x * x)  # without a step, which a rounding could take

    for f in (lambda x: x, lambda x: torch.ones_like(x), torch.sigmoid, power(2), power(3)):
        close(tk.b2b_gemm(A, B, C, f=f), exact(A, B, C, "left", f))


@pytest.mark.parametrize(
    "f",
    (
        lambda x: x - x.mean(),
        lambda x: x - x.sum(-1, keepdim=True),
        lambda x: x.softmax(-1),
        lambda x: x - x.max(),
        lambda x: x / x.norm(),
        lambda x: x.var(),
        lambda x: x.flip(0) if x.dim() else x,
        lambda x: x.cumsum(0),
        lambda x: x.t(),
        lambda x: x * x.numel(),
        lambda x: x * x.ndim,
        lambda x: x * 2 if x.dim() == 2 else x * 3,
        lambda x: x * x.shape[0] if x.dim() else x * 3,
        lambda x: x * 2 if x.stride() else x * 3,
    ),
)
def test_what_is_not_done_number_by_number_is_refused(f) -> None:  # type: ignore[no-untyped-def]
    for _ in range(2):
        with pytest.raises(
            tk.UnsupportedError, match=r"tk\.b2b_gemm: f is <lambda>, which (does to|fails on) a matrix"
        ):
            tk.b2b_gemm(A, B, C, f=f)
    with pytest.raises(tk.UnsupportedError, match=r"tk\.b2b\.register: f is <lambda>, which"):
        tk.b2b.register(f)


def test_numbers_are_arguments_and_code_is_not() -> None:
    one, other = (function.traced_function(shifted_cosine(s), "")[0] for s in (0.5, 0.75))
    assert function.op_name(one) == function.op_name(other) and one.captures[0].kind == "float"
    assert function.traced_function(torch.sin, "")[0].fingerprint != one.fingerprint
    assert function.traced_function(torch.cos, "")[0].fingerprint != one.fingerprint


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    for i in range(3):
        operands = [laid_out(x, layout) if i == j else x for j, x in enumerate((A, B, C))]
        for order in ("left", "right"):
            result = tk.b2b_gemm(*operands, order=order, f="silu")  # type: ignore[misc, arg-type]
            close(result, exact(*operands, order, torch.nn.functional.silu))


@pytest.mark.parametrize("sizes", ((0, 7, 9, 4), (5, 0, 9, 4), (5, 7, 0, 4), (5, 7, 9, 0)), ids=str)
@pytest.mark.parametrize("order", ("left", "right"))
def test_sizes_of_0(sizes: tuple[int, ...], order: str) -> None:
    m, k, p, n = sizes
    a, b, c = torch.randn(m, k), torch.randn(k, p), torch.randn(p, n)
    close(tk.b2b_gemm(a, b, c, order=order, f=torch.cos), exact(a, b, c, order, torch.cos))  # type: ignore[arg-type]


def test_opcheck_autocast_and_compile() -> None:
    opcheck(torch.ops.tk.b2b_gemm.default, (A, B, C, True, 2))
    traced, values = function.traced_function(shifted_cosine(0.5), "")
    opcheck(torch.ops.tk.b2b_gemm.default, (A, B, C, False, 0, traced.text, list(values)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(tk.b2b_gemm(A, B, C), tk.b2b_gemm(*(x.bfloat16() for x in (A, B, C))))

    def call(a: torch.Tensor) -> torch.Tensor:
        return tk.b2b_gemm(a, B, C, order="right", f="gelu") + 1

    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(A), call(A))


def test_there_are_no_gradients() -> None:
    with pytest.raises(NotImplementedError, match=r"tk\.b2b_gemm has no gradient: it is for inference"):
        tk.b2b_gemm(A, B.clone().requires_grad_(), C)
    with torch.no_grad():
        tk.b2b_gemm(A, B.clone().requires_grad_(), C)


TABLE = torch.randn(3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    (
        (lambda: tk.b2b_gemm(A, A, C), ValueError, "the inner sizes differ"),
        (lambda: tk.b2b_gemm(A, B, B), ValueError, "the inner sizes differ"),
        (lambda: tk.b2b_gemm(A[0], B, C), ValueError, "a must have 2 dimensions"),
        (lambda: tk.b2b_gemm(A, B.half(), C), ValueError, "dtypes differ"),
        (lambda: tk.b2b_gemm(A, B, C, order="up"), ValueError, "order is 'up', must be 'left' or 'right'"),
        (lambda: tk.b2b_gemm(A, B, C, f="tanh"), ValueError, "f is 'tanh', must be a function or one of none, relu"),
        (lambda: tk.b2b_gemm(A, B, C, way="best"), ValueError, "way is 'best'"),
        (lambda: tk.b2b_gemm(A, B, C, f=3), TypeError, "f must be the name of an activation or a function, is int"),
        (lambda: tk.b2b_gemm(A, None, C), TypeError, "b must be a Tensor, is NoneType"),
        (lambda: tk.b2b_gemm(A, B, C, f=lambda x: x.sum(0) if x.sum() > 0 else x), tk.UnsupportedError, "f is"),
        (lambda: tk.b2b_gemm(A, B, C, f=lambda x: 3), TypeError, "it must return a tensor"),
        (lambda: tk.b2b_gemm(A, B, C, f=lambda x: x * TABLE[0]), tk.UnsupportedError, "captures the tensor TABLE"),
        (lambda: tk.b2b_gemm(A.int(), B.int(), C.int()), tk.UnsupportedError, "a is torch.int32"),
        (lambda: tk.b2b.register(torch.cos, dtypes=(torch.float32,)), ValueError, "torch.float32 in dtypes"),
    ),
)
def test_wrong_arguments(call, error: type[Exception], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        call()


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function, "_registered", [])
    tk.b2b.register(shifted_cosine(1.0), dtypes=(torch.float16,))
    tk.b2b.register(shifted_cosine(2.0), dtypes=(torch.float16,))  # no other
    (found,) = tk.b2b.registered(__file__)
    assert found.name == "f" and found.dtypes == (torch.float16,)
    assert tk.b2b.registered(function.__file__) == []


def test_which_way() -> None:
    """A long inner dimension between narrow matrices is fused; wide ones, and a few rows, are two products."""

    def fused(m: int, n: int, k: int, p: int) -> bool:
        return b2b.fused_time(m, n, k, p, 132) < b2b.two_products_time(m, n, k, p, 2, False)

    assert fused(16384, 64, 64, 16384) and fused(132 * 128, 64, 64, 4096)
    assert not fused(4096, 4096, 256, 4096) and not fused(16, 64, 64, 65536)
    assert math.isfinite(b2b.fused_time(1, 1, 1, 1, 132))
