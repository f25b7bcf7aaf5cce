"""mm_plus_mm on the CPU: against float64, gradients, transforms, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import tk

from .products import ACTIVATION_NAMES, LAYOUTS, assert_close, laid_out

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SHAPES = ((4, 5), (5, 6), (4, 3), (3, 6))
OPERANDS = tuple(torch.randn(s) for s in SHAPES)
A, B, C, D = OPERANDS


def exact(*tensors: torch.Tensor, activation: str = "none") -> torch.Tensor:
    a, b, c, d, *bias = (x.double() for x in tensors)
    z = a @ b + c @ d
    return tk.ops.product.ACTIVATE[activation](z + bias[0] if bias else z)  # type: ignore[attr-defined]


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_against_fp64(dtype: torch.dtype, activation: str) -> None:
    tensors = tuple(x.to(dtype) for x in (*OPERANDS, torch.randn(6)))
    result = tk.mm_plus_mm(*tensors, activation=activation)  # type: ignore[arg-type]
    assert result.dtype == dtype and result.is_contiguous()
    assert_close(result, exact(*tensors, activation=activation), 8)


def test_it_rounds_once() -> None:
    """1 and 2**-9: bfloat16 has no 1 + 2**-9, and two products of it would lose each."""
    one, small = torch.ones(1, 1), torch.full((1, 1), 2.0**-9)
    a, b, c, d = (x.bfloat16() for x in (one, one, small, one))
    tiny = -torch.ones(1, dtype=torch.bfloat16)
    assert tk.mm_plus_mm(a, b, c, d, tiny).item() == 2.0**-9


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    for i in range(4):
        operands = [laid_out(x, layout) if i == j else x for j, x in enumerate(OPERANDS)]
        assert_close(tk.mm_plus_mm(*operands), exact(*operands), 8)  # type: ignore[call-arg]


@pytest.mark.parametrize("size", ((0, 6, 5, 3), (4, 0, 5, 3), (4, 6, 0, 3), (4, 6, 5, 0), (4, 6, 0, 0)), ids=str)
def test_sizes_of_0(size: tuple[int, int, int, int]) -> None:
    m, n, k, k2 = size
    operands = [torch.randn(s, requires_grad=True) for s in ((m, k), (k, n), (m, k2), (k2, n))]
    result = tk.mm_plus_mm(*operands, torch.ones(n), "relu")  # type: ignore[misc]
    assert_close(result.detach(), exact(*(x.detach() for x in operands), torch.ones(n), activation="relu"), 8)
    result.sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in operands)


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_gradients(activation: str) -> None:
    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return tk.mm_plus_mm(*tensors, activation=activation)  # type: ignore[arg-type]

    inputs = (leaf(2, 3), leaf(3, 4), leaf(2, 2), leaf(2, 4), leaf(4))
    assert gradcheck(call, inputs)
    assert gradgradcheck(call, inputs)


@pytest.mark.parametrize("needed", range(5))
@pytest.mark.parametrize("activation", ("none", "relu", "silu"))
def test_gradients_of_one_input(needed: int, activation: str) -> None:
    inputs = tuple(leaf(*s).detach().requires_grad_(i == needed) for i, s in enumerate((*SHAPES, (4, 1))))
    assert gradcheck(lambda *x: tk.mm_plus_mm(*x, activation=activation), inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("overload", ("default", "out"))
def test_opcheck(overload: str) -> None:
    args = tuple(x.clone().requires_grad_(overload == "default") for x in (*OPERANDS, torch.randn(6)))
    kwargs = {"out": torch.empty(4, 6)} if overload == "out" else {}
    opcheck(getattr(torch.ops.tk.mm_plus_mm, overload), (*args, 4), kwargs)
    opcheck(getattr(torch.ops.tk.mm_plus_mm, overload), args[:4], kwargs)


def test_vmap() -> None:
    a, c = torch.randn(3, 4, 5), torch.randn(4, 3, 3)
    result = torch.vmap(tk.mm_plus_mm, (0, None, 1, None))(a, B, c, D)
    torch.testing.assert_close(result, a @ B + c.transpose(0, 1) @ D)


def test_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(tk.mm_plus_mm(*OPERANDS), tk.mm_plus_mm(*(x.bfloat16() for x in OPERANDS)))  # type: ignore[call-arg]


def test_out() -> None:
    out = torch.empty(6, 4).t()
    assert tk.mm_plus_mm(*OPERANDS, out=out) is out  # type: ignore[misc]
    assert_close(out, exact(*OPERANDS), 8)
    whole = torch.randn(4, 9)
    with pytest.raises(ValueError, match="out overlaps c"):
        tk.mm_plus_mm(A, B, whole[:, :3], D, out=whole[:, 2:8])


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda: tk.mm_plus_mm(A, B, C, B), r"the inner sizes differ: c is \[4, 3\], d is \[5, 6\]"),
        (lambda: tk.mm_plus_mm(A, A, C, D), "the inner sizes differ: a is"),
        (lambda: tk.mm_plus_mm(A, B, C[:3], D), r"c @ d is \[3, 6\], a @ b is \[4, 6\]; they must have one shape"),
        (lambda: tk.mm_plus_mm(A, B, C, D[:, :5]), r"c @ d is \[4, 5\], a @ b is \[4, 6\]"),
        (lambda: tk.mm_plus_mm(A, B, C[0], D), r"c must have 2 dimensions, is \[3\]"),
        (lambda: tk.mm_plus_mm(A, B, C.half(), D), "a is float32, c is float16"),
        (lambda: tk.mm_plus_mm(A, B, C, D.double()), "a is float32, d is float64"),
        (lambda: tk.mm_plus_mm(A, B, C, D, torch.randn(5)), "bias is"),
        (lambda: tk.mm_plus_mm(*(x.to("meta") for x in (A, B, C[:3], D))), "the products differ in shape"),
        (lambda: tk.mm_plus_mm(A, B, C, D, precision="fp8"), "precision is 'fp8'"),  # type: ignore[arg-type]
    ),
)
def test_wrong_arguments(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()


def test_what_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="d must be a Tensor, is NoneType"):
        tk.mm_plus_mm(A, B, C, None)  # type: ignore[arg-type]
