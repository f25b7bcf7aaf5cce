"""b2b_gemm: both orders and ways, random problems in every layout, against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tk
from tk.ops import product

from .device import DEVICE
from .other_products import BF16, FP16, FP32, LETTERS, draws, matrices, size

FUNCTIONS = tuple(product.ACTIVATE)


def operands(m: int, n: int, k: int, p: int, dtype: torch.dtype, letters: str = "nnn", odd: bool = False):  # type: ignore[no-untyped-def]
    """Of the left form; scaled so that what stands between the products is of about 1."""
    shapes, found = ((m, k), (k, p), (p, n)), []
    for shape, letter in zip(shapes, letters, strict=True):
        found.append(matrices(*shape, dtype=dtype, letter=letter, odd=odd).div_(max(1, shape[1]) ** 0.5))
    found[0].mul_(2)
    return found


def wrong_in(result: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, order: str, f: str) -> str:
    """What stands between may be rounded to the neighbour, as its sum of float32 falls; the sum of such errors."""
    eps = torch.finfo(a.dtype).eps / 2

    def between(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return product.ACTIVATE[f](x.double() @ y.double())

    s = between(a, b) if order == "left" else between(b, c)
    x, y = (s, c.double()) if order == "left" else (a.double(), s)
    reference = x @ y
    if not result.numel():
        return "" if result.shape == reference.shape else f"is {list(result.shape)}"
    norm = (x.square() @ y.square()).sqrt()
    room = 1.02 * eps * reference.abs() + 8 * eps * norm + 1e-3 * eps + 2e-5 * norm.max() + 1e-6
    error = (result.double() - reference).abs()
    bad = ~(error <= room)
    return f"{int(bad.sum())} of {bad.numel()} wrong, the worst by {error[bad].max().item():.3g}" if bad.any() else ""


def transposed(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of the left form those of the right one."""
    a, b, c = tensors
    return [c.t(), b.t(), a.t()]


@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
@pytest.mark.parametrize("order", ("left", "right"))
def test_every_size_of_tile(order: str, dtype: torch.dtype) -> None:
    wrong = []
    for k in (16, 64, 80, 128, 144, 256):
        for n in (16, 64, 96, 128, 176, 256, 400):
            for m, p in ((16, 16), (144, 208), (272, 1040)):
                tensors = operands(m, n, k, p, dtype)
                if order == "right":
                    tensors = [x.contiguous() for x in transposed(tensors)]
                result = tk.b2b_gemm(*tensors, order=order, f="gelu", way="fused")  # type: ignore[misc, arg-type]
                if said := wrong_in(result, *tensors, order, "gelu"):  # type: ignore[misc]
                    wrong.append(f"{m}x{n}x{k}x{p}: {said}")
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("chunk", range(4))
def test_random_problems(chunk: int) -> None:
    torch.manual_seed(chunk)
    wrong = []
    for rng in draws(f"b2b {chunk}", 300):
        dtype = rng.choice((BF16, FP16, FP16, BF16, FP32))
        way = rng.choice(("fused", "fused", "two_products", None)) if dtype != FP32 else None
        k = size(rng, 256) if way == "fused" else size(rng, 512)
        m, n, p = size(rng, 512), size(rng, 300), size(rng, 700)
        letters = "".join(rng.choice(LETTERS) if rng.random() < 0.4 else "n" for _ in range(3))
        tensors = operands(m, n, k, p, dtype, letters, rng.random() < 0.2)
        order, f = rng.choice(("left", "right")), rng.choice(FUNCTIONS)
        if order == "right":
            tensors = transposed(tensors)
        result = tk.b2b_gemm(*tensors, order=order, f=f, way=way)  # type: ignore[misc, arg-type]
        if said := wrong_in(result, *tensors, order, f):  # type: ignore[misc]
            wrong.append(f"{dtype} {m}x{n}x{k}x{p} {letters} {order} {f} {way}: {said}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:10])


def test_both_ways_are_close_and_rounded_as_often() -> None:
    """Whole numbers: no sum is rounded, and both give the same bits."""
    a, b, c = (torch.randint(-2, 3, s, device=DEVICE).to(BF16) for s in ((300, 64), (64, 128), (128, 48)))
    for order in ("left", "right"):
        ways = [tk.b2b_gemm(a, b, c, order=order, f="relu", way=way) for way in ("fused", "two_products")]  # type: ignore[arg-type]
        assert torch.equal(*ways) and ways[0].is_contiguous()


@pytest.mark.parametrize("sizes", ((0, 16, 16, 16), (16, 0, 16, 16), (16, 16, 0, 16), (16, 16, 16, 0)), ids=str)
@pytest.mark.parametrize("order", ("left", "right"))
def test_sizes_of_0(sizes: tuple[int, ...], order: str) -> None:
    m, k, p, n = sizes
    tensors = [torch.ones(s, device=DEVICE, dtype=BF16) for s in ((m, k), (k, p), (p, n))]
    for f in ("none", "gelu"):
        result = tk.b2b_gemm(*tensors, order=order, f=f)  # type: ignore[misc, arg-type]
        assert not wrong_in(result, *tensors, order, f)  # type: ignore[misc]


@pytest.mark.skipif(DEVICE == "cpu", reason="the CPU has one way")
def test_what_the_kernel_does_not_take_is_refused() -> None:
    a, b, c = operands(64, 64, 272, 64, BF16)
    with pytest.raises(tk.VariantNotFoundError):
        tk.b2b_gemm(a, b, c, way="fused")
    with pytest.raises(tk.VariantNotFoundError, match="tk build"):
        tk.b2b_gemm(a, b, c, f=lambda x: x * 3 - 1)


@pytest.mark.skipif(DEVICE == "cpu", reason="no graphs")
def test_in_a_graph() -> None:
    tensors = operands(256, 64, 64, 2048, BF16)
    expected = tk.b2b_gemm(*tensors, f="silu", way="fused")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tk.b2b_gemm(*tensors, f="silu", way="fused")
    graph.replay()
    assert torch.equal(out, expected)


def test_a_function_that_no_pack_has_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the build extra, and no pack of the user's that has it from before."""
    pytest.importorskip("triton")
    pytest.importorskip("zstandard")
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path))
    sharpness = 1.75

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * sharpness) - x / 3

    for dtype in (BF16, FP16):
        a, b, c = operands(500, 64, 64, 777, dtype)
        if dtype is BF16:
            with pytest.raises(tk.VariantNotFoundError, match="build_missing"):
                tk.b2b_gemm(a, b, c, f=f, way="fused")
        with tk.config.build_missing():
            found = tk.b2b_gemm(a, b, c, f=f, way="fused")
        exact = f(a.double() @ b.double()) @ c.double()
        torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2 * float(exact.abs().max()))
    assert len(list(tmp_path.glob("packs/b2b_*.tkpack"))) == 2
