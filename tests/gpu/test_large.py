"""Tensors of more than 2^31 elements: offsets that do not fit in 32 bits."""

import random

import pytest
import torch

import tk
from benchmarks import products
from tk import capi
from tk.heuristics.problem import describe

from .device import DEVICE

HUGE = 33_000 * 65_600  # elements; 2^31 is 2,147,483,648
pytestmark = pytest.mark.skipif(
    DEVICE != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 40e9,
    reason="needs a GPU with 40 GB",
)


@pytest.fixture(autouse=True, scope="module")
def _give_back():
    yield
    torch.cuda.empty_cache()


def huge(rows: int, cols: int, offset: int = 0) -> torch.Tensor:
    """Row-major; its last elements lie past 2^31."""
    assert rows * cols > 2**31
    flat = torch.empty(rows * cols + offset, device=DEVICE, dtype=torch.bfloat16).normal_()
    return flat[offset:].view(rows, cols)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def assert_sampled(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Rows and columns from all over, the last among them."""
    rng = random.Random(0)
    rows = [0, a.shape[0] - 1, *(rng.randrange(a.shape[0]) for _ in range(6))]
    cols = [0, b.shape[1] - 1, *(rng.randrange(b.shape[1]) for _ in range(62))]
    reference = products.reference(a[rows], b[:, cols])
    torch.testing.assert_close(out[rows][:, cols].double(), reference, rtol=1e-2, atol=1e-3 * a.shape[1] ** 0.5)


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "misaligned"])
def test_huge_a(offset: int) -> None:
    a, b = huge(65_600, 33_000, offset), randn(33_000, 48)
    assert_sampled(a, b, tk.mm(a, b))


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("transposed", [False, True], ids=["row-major", "column-major"])
def test_huge_b(transposed: bool, offset: int) -> None:
    b = huge(65_600, 33_000, offset)
    b = b.t() if transposed else b
    a = randn(5, b.shape[0])
    assert_sampled(a, b, tk.mm(a, b))


@pytest.mark.parametrize("cols", [33_000, 33_001], ids=["aligned", "misaligned"])
def test_huge_result(cols: int) -> None:
    a, b = randn(65_600, 64), randn(64, cols)
    assert_sampled(a, b, tk.mm(a, b, activation="none"))


def test_huge_transposed_a() -> None:
    a, b = huge(33_000, 65_600).t(), randn(33_000, 40)
    assert_sampled(a, b, tk.mm(a, b))


@pytest.mark.parametrize("which", ["M", "N", "K"])
def test_a_dimension_past_32_bits_is_refused(which: str) -> None:
    """No kernel counts rows, columns or K in 64 bits: an error, and nothing is launched. (Strides of 0: no memory.)"""
    sizes = {"M": 1, "N": 1, "K": 1, which: 2**31 + 16}
    one = torch.ones(1, 1, device=DEVICE, dtype=torch.bfloat16)
    a, b = one.expand(sizes["M"], sizes["K"]), one.expand(sizes["K"], sizes["N"])
    with pytest.raises((tk.VariantNotFoundError, ValueError), match=rf"{which}\b.* < 2\*\*31"):
        tk.mm(a, b)


@pytest.mark.parametrize("transposed", [False, True], ids=["row-major", "column-major"])
def test_longest_k(transposed: bool) -> None:
    """By every config that cuts K: where the last part ends may lie past 2^31."""
    k = 2**31 - 2**16 - 1
    a = torch.zeros(1, k, device=DEVICE, dtype=torch.bfloat16)
    b = torch.zeros(2, k, device=DEVICE, dtype=torch.bfloat16).t()
    b = b if transposed else b.contiguous()
    for at in (0, k // 2, k - 1):
        a[0, at] = b[at, 1] = 1

    def run(config: int = -1) -> torch.Tensor:
        return torch.ops.tk.mm(a, b, None, 0, None, 0, config)

    described = describe(run)
    assert described is not None
    cut = [
        c for c in capi.candidates(described.problem) if c.fits and c.kernel_name in ("mm_split_k", "mm_gemv_split_k")
    ]
    assert len({c.kernel_name for c in cut}) == (1 if transposed else 2)
    for c in cut:
        assert run(c.config).tolist() == [[0, 3]], c.config_name
