"""grouped_mm on the CPU: torch's conventions, float64, gradients, transforms, what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import tk

from .products import assert_close, exact

T, G, M, K, N = 24, 3, 4, 16, 8
ENDS = (5, 5, 23)
OFFS = torch.tensor(ENDS, dtype=torch.int32)
SHAPES = {"rows": ((T, K), (G, K, N)), "columns": ((G, M, K), (K, T)), "inner": ((M, T), (T, N)),
          "batch": ((G, M, K), (G, K, N))}  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def operands(kind: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (torch.randn(s).to(dtype) for s in SHAPES[kind])
    return a, b


def offs_of(kind: str) -> torch.Tensor | None:
    return None if kind == "batch" else OFFS


def parts(kind: str, a: torch.Tensor, b: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The products, one for each group."""
    groups = [slice(begin, end) for begin, end in zip((0, *ENDS), ENDS, strict=False)]
    pick: dict[str, Callable[[int, slice], tuple[torch.Tensor, torch.Tensor]]] = {
        "rows": lambda i, g: (a[g], b[i]),
        "columns": lambda i, g: (a[i], b[:, g]),
        "inner": lambda i, g: (a[:, g], b[g]),
        "batch": lambda i, g: (a[i], b[i]),
    }
    return [pick[kind](i, g) for i, g in enumerate(groups)]


def written(kind: str, result: torch.Tensor) -> torch.Tensor:
    return result[: ENDS[-1]] if kind == "rows" else result[:, : ENDS[-1]] if kind == "columns" else result


def reference(kind: str, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "none"):  # type: ignore[no-untyped-def]
    """What is written, differentiable, in the dtype of the arguments."""
    done = []
    for i, (x, y) in enumerate(parts(kind, a, b)):
        z = x @ y if bias is None else x @ y + (bias if bias.dim() == 1 else bias[i])
        done.append(tk.ops.product.ACTIVATE[activation](z))  # type: ignore[attr-defined]
    return {"rows": torch.cat, "columns": lambda z: torch.cat(z, 1)}.get(kind, torch.stack)(done)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", SHAPES)
def test_against_fp64(kind: str, dtype: torch.dtype) -> None:
    a, b = operands(kind, dtype)
    result = tk.grouped_mm(a, b, offs=offs_of(kind))
    assert result.dtype == dtype and result.is_contiguous()
    assert_close(written(kind, result), reference(kind, a.double(), b.double()), K)
    wide = tk.grouped_mm(a, b, offs=offs_of(kind), out_dtype=None if dtype == torch.float64 else torch.float32)
    assert_close(written(kind, wide), reference(kind, a.double(), b.double()), K)


@pytest.mark.parametrize("kind", SHAPES)
def test_as_torchs(kind: str) -> None:
    a, b = operands(kind, torch.bfloat16)
    ours, theirs = (f(a, b, offs=offs_of(kind)) for f in (tk.grouped_mm, F.grouped_mm))
    assert ours.shape == theirs.shape
    torch.testing.assert_close(written(kind, ours), written(kind, theirs))


@pytest.mark.parametrize("shape", ((N,), (G, N)), ids=str)
@pytest.mark.parametrize("kind", ("rows", "inner", "batch"))
def test_bias_and_activation(kind: str, shape: tuple[int, ...]) -> None:
    a, b = operands(kind)
    bias = torch.randn(shape)
    result = tk.grouped_mm(a, b, offs=offs_of(kind), bias=bias, activation="silu")
    assert_close(written(kind, result), reference(kind, a.double(), b.double(), bias.double(), "silu"), K)


@pytest.mark.parametrize("layout", ("contiguous", "transposed", "strided", "middle"))
@pytest.mark.parametrize("kind", SHAPES)
def test_layouts(kind: str, layout: str) -> None:
    def laid(x: torch.Tensor) -> torch.Tensor:
        if layout == "transposed":
            return x.mT.contiguous().mT
        if layout == "strided":
            return x.new_empty(*x.shape, 2)[..., 1].copy_(x)
        return x.movedim(0, 1).contiguous().movedim(1, 0) if layout == "middle" else x

    a, b = map(laid, operands(kind))
    offs = None if kind == "batch" else torch.stack((OFFS, OFFS), 1)[:, 1]
    assert_close(written(kind, tk.grouped_mm(a, b, offs=offs)), reference(kind, a.double(), b.double()), K)


def test_rows_after_the_last_end_are_left_unwritten() -> None:
    a, b = operands("rows")
    out = torch.full((T, N), 7.0)
    assert tk.grouped_mm(a, b, offs=OFFS, out=out) is out
    assert (out[ENDS[-1] :] == 7).all()
    assert_close(out[: ENDS[-1]], reference("rows", a.double(), b.double()), K)


@pytest.mark.parametrize("ends", ((0, 0, 0), (T, T, T), (99, 99, 99), (-5, 3, T), (15, 4, 90)), ids=str)
def test_ends_within_and_without(ends: tuple[int, ...]) -> None:
    a, b = operands("rows")
    memory = torch.full((3 * T, N), 7.0)
    tk.grouped_mm(a, b, offs=torch.tensor(ends, dtype=torch.int32), out=memory[T : 2 * T])
    assert (memory[:T] == 7).all() and (memory[2 * T :] == 7).all()
    clamped = [min(max(end, 0), T) for end in ends]
    begin, end = clamped[1], clamped[2]
    assert_close(memory[T + begin : T + end], exact(a[begin:end], b[2]), K)


@pytest.mark.parametrize("kind", SHAPES)
def test_sizes_of_0(kind: str) -> None:
    nothing = torch.zeros(G, dtype=torch.int32) if kind != "batch" else None
    for sizes in ({"T": 0}, {"K": 0}, {"M": 0}, {"N": 0}):
        size = dict(T=T, G=G, M=M, K=K, N=N) | sizes
        shapes = {"rows": ("TK", "GKN"), "columns": ("GMK", "KT"), "inner": ("MT", "TN"), "batch": ("GMK", "GKN")}
        a, b = (torch.randn([size[letter] for letter in s], requires_grad=True) for s in shapes[kind])
        result = tk.grouped_mm(a, b, offs=nothing)
        if kind == "inner":
            assert torch.equal(result, torch.zeros(result.shape)), "a group of no length"
        elif kind == "batch":
            torch.testing.assert_close(result, a @ b)
        result.sum().backward()
        assert a.grad is not None and a.grad.shape == a.shape


def test_no_groups_and_no_inner_size() -> None:
    none = torch.empty(0, dtype=torch.int32)
    assert tk.grouped_mm(torch.randn(4, 5), torch.randn(0, 5, 6), offs=none).shape == (4, 6)
    bias = torch.randn(G, N)
    result = tk.grouped_mm(torch.randn(T, 0), torch.randn(G, 0, N), offs=OFFS, bias=bias)
    assert torch.equal(result[:5], bias[:1].expand(5, N)) and torch.equal(result[5:23], bias[2:].expand(18, N))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_comes_after_the_last_end_is_not_read(dtype: torch.dtype) -> None:
    a, b = torch.randn(72, 128).to(dtype), torch.randn(128, 136).to(dtype)
    a[:, 111:], b[111:] = math.nan, math.nan
    result = tk.grouped_mm(a, b, offs=torch.tensor((40, 40, 111), dtype=torch.int32))
    assert_close(result[2], exact(a[:, 40:111], b[40:111]), 71)


# --- Gradients ---


@pytest.mark.parametrize("activation", ("none", "relu", "gelu"))
@pytest.mark.parametrize("kind", SHAPES)
def test_gradients(kind: str, activation: str) -> None:
    a, b = (x.requires_grad_() for x in operands(kind, torch.float64))
    biases = () if kind == "columns" else (torch.randn(G, N, dtype=torch.float64, requires_grad=True),)

    def call(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return written(kind, tk.grouped_mm(a, b, offs=offs_of(kind), bias=bias, activation=activation))  # type: ignore[arg-type]

    assert gradcheck(call, (a, b, *biases), fast_mode=True)
    assert gradgradcheck(call, (a, b, *biases), fast_mode=True)
    if biases:
        assert gradcheck(call, (a, b, biases[0].detach()[0].clone().requires_grad_()), fast_mode=True)


@pytest.mark.parametrize("kind", ("rows", "columns", "inner"))
def test_the_gradient_of_what_is_not_read_is_0(kind: str) -> None:
    a, b = (x.requires_grad_() for x in operands(kind))
    result = tk.grouped_mm(a, b, offs=OFFS)
    grad = torch.full_like(result, math.nan)
    written(kind, grad).fill_(1)
    result.backward(grad)
    assert a.grad is not None and b.grad is not None and a.grad.isfinite().all() and b.grad.isfinite().all()
    rest = {"rows": (a.grad[ENDS[-1] :],), "columns": (b.grad[:, ENDS[-1] :],),
            "inner": (a.grad[:, ENDS[-1] :], b.grad[ENDS[-1] :])}  # fmt: skip
    assert not any(x.any() for x in rest[kind])


# --- Transforms ---


@pytest.mark.parametrize("overload", ("default", "out"))
@pytest.mark.parametrize("kind", ("rows", "inner", "batch"))
def test_opcheck(kind: str, overload: str) -> None:
    a, b = (x.requires_grad_(overload == "default") for x in operands(kind))
    offs = torch.tensor((5, 5, T), dtype=torch.int32) if kind != "batch" else None  # all of it is written
    bias = torch.randn(G, N, requires_grad=overload == "default")
    kwargs = {"out": torch.zeros(tk.grouped_mm(a, b, offs=offs).shape)} if overload == "out" else {}
    opcheck(getattr(torch.ops.tk.grouped_mm, overload), (a, b, offs, bias, False, 2), kwargs)


def test_vmap() -> None:
    a, b = torch.randn(2, T, K), torch.randn(G, K, N)
    result = torch.vmap(lambda a: tk.grouped_mm(a, b, offs=OFFS))(a)
    for i in range(2):
        torch.testing.assert_close(result[i, : ENDS[-1]], reference("rows", a[i], b))


def test_autocast() -> None:
    a, b = operands("rows")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = tk.grouped_mm(a, b, offs=OFFS)
    assert torch.equal(result[:23], tk.grouped_mm(a.bfloat16(), b.bfloat16(), offs=OFFS)[:23])


def test_compile_with_dynamic_sizes() -> None:
    compiled = torch.compile(lambda a, b, offs: tk.grouped_mm(a, b, offs=offs)[:5] * 2, fullgraph=True, dynamic=True,
                             backend="aot_eager")  # fmt: skip
    for total in (T, T + 9):
        a, b = torch.randn(total, K, requires_grad=True), torch.randn(G, K, N, requires_grad=True)
        result = compiled(a, b, OFFS)
        torch.testing.assert_close(result, 2 * a[:5] @ b[0])
        result.sum().backward()
        assert a.grad is not None and not a.grad[5:].any()
    torch._dynamo.reset()


# --- What is refused ---

A, B = operands("rows")


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda: tk.grouped_mm(A, B), "offs, the groups' ends, are needed"),
        (lambda: tk.grouped_mm(B, B.mT, offs=OFFS), "offs are of 2-dimensional operands"),
        (lambda: tk.grouped_mm(A, B, offs=OFFS.long()), "offs are int64, must be int32"),
        (lambda: tk.grouped_mm(A, B, offs=OFFS[None]), "offs must have 1 dimensions"),
        (lambda: tk.grouped_mm(A, B, offs=OFFS[:2]), "b has 3 groups, offs has 2"),
        (lambda: tk.grouped_mm(A, B.mT, offs=OFFS), r"the inner sizes differ: a is \[24, 16\], b is \[3, 8, 16\]"),
        (lambda: tk.grouped_mm(A[0], B, offs=OFFS), "a must have 2 or 3 dimensions"),
        (lambda: tk.grouped_mm(A, B.double(), offs=OFFS), "a is float32, b is float64"),
        (lambda: tk.grouped_mm(A, B, offs=OFFS, bias=torch.randn(N + 1)), r"bias is \[9\], must be \[8\] or \[3, 8\]"),
        (lambda: tk.grouped_mm(A, B, offs=OFFS, bias=torch.randn(2, N)), "bias is"),
        (lambda: tk.grouped_mm(*operands("columns"), offs=OFFS, bias=torch.randn(T)), "columns, which are ragged"),
        (lambda: tk.grouped_mm(A, B, offs=OFFS, out=torch.empty(T, N + 1)), r"out is \[24, 9\], must be \[24, 8\]"),
        (lambda: tk.grouped_mm(A, torch.randn(G, K, K), offs=OFFS, out=A), "out overlaps a"),
        (lambda: tk.grouped_mm(A, B, offs=OFFS, activation="tanh"), "activation is 'tanh'"),  # type: ignore[arg-type]
        (lambda: tk.grouped_mm(A.to("meta"), B.to("meta")), "offs are needed"),
    ),
)
def test_wrong_arguments(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()


def test_other_errors() -> None:
    with pytest.raises(tk.UnsupportedError, match="a is int32"):
        tk.grouped_mm(A.int(), B.int(), offs=OFFS)
    with pytest.raises(TypeError, match="offs must be a Tensor, is list"):
        tk.grouped_mm(A, B, offs=[5])  # type: ignore[arg-type]
