"""Wrong calls get an error that says what to do, and leave the CUDA context usable."""

from collections.abc import Callable, Iterator

import pytest
import torch

import tk
from tk import capi

from .device import DEVICE
from .variants import Bucket, Kind, problems


def matrix(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.fixture(autouse=True)
def _usable_after() -> Iterator[None]:
    yield
    a, b = matrix(40, 50), matrix(50, 60)
    torch.testing.assert_close(tk.mm(a, b).float(), (a.double() @ b.double()).float(), rtol=2e-2, atol=0.1)


WRONG: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
    "mixed devices": (ValueError, "device", lambda: tk.mm(matrix(8, 8), matrix(8, 8).cpu())),
    "bias on the CPU": (ValueError, "device", lambda: tk.mm(matrix(8, 8), matrix(8, 8), matrix(8).cpu())),
    "mixed dtypes": (ValueError, "dtype", lambda: tk.mm(matrix(8, 8), matrix(8, 8, dtype=torch.float16))),
    "inner sizes": (ValueError, "inner sizes", lambda: tk.mm(matrix(8, 9), matrix(8, 8))),
    "inner sizes of linear": (ValueError, "inner sizes", lambda: tk.linear(matrix(8, 9), matrix(8, 8))),
    "rank": (ValueError, "dimensions", lambda: tk.mm(matrix(2, 8, 8), matrix(8, 8))),
    "bias shape": (ValueError, "bias", lambda: tk.mm(matrix(8, 8), matrix(8, 8), matrix(7))),
    "integers": (tk.UnsupportedError, "int32", lambda: tk.mm(*[matrix(8, 8, dtype=torch.int32)] * 2)),
    "float64": (tk.UnsupportedError, "float64", lambda: tk.mm(*[matrix(8, 8, dtype=torch.float64)] * 2)),
    "out dtype": (tk.UnsupportedError, "out_dtype", lambda: tk.mm(matrix(8, 8), matrix(8, 8), out_dtype=torch.int8)),
    "out shape": (ValueError, "out", lambda: tk.mm(matrix(8, 8), matrix(8, 8), out=matrix(8, 9))),
    "out on the CPU": (ValueError, "out", lambda: tk.mm(matrix(8, 8), matrix(8, 8), out=matrix(8, 8).cpu())),
    "activation": (ValueError, "activation", lambda: tk.mm(matrix(8, 8), matrix(8, 8), activation="tanh")),
    "no such config": (ValueError, "config", lambda: tk.mm(matrix(8, 8), matrix(8, 8), config=100_000)),
    "no tensor": (TypeError, "b must be", lambda: tk.mm(matrix(8, 8), [1.0])),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_argument(what: str) -> None:
    error, text, call = WRONG[what]
    with pytest.raises(error, match=text):
        call()


def test_out_that_overlaps() -> None:
    a, b = matrix(64, 64), matrix(64, 64)
    before = a.clone()
    with pytest.raises(ValueError, match="overlap"):
        tk.mm(a, b, out=a)
    with pytest.raises(ValueError, match="share memory"):
        tk.mm(a, b, out=matrix(64, 1).expand(64, 64))
    assert torch.equal(a, before)


def test_config_that_does_not_fit() -> None:
    """A config that needs aligned operands, for misaligned ones: named, with the constraint that fails."""
    *_, operands = problems(Bucket(Kind(torch.bfloat16), "nn", "plain"))
    rows = capi.candidates(operands.problem())
    fitting = {row.config for row in rows if row.fits}
    unfit = next(row for row in rows if row.config not in fitting)
    with pytest.raises(ValueError, match=unfit.config_name) as caught:
        tk.mm(operands.a, operands.b, config=unfit.config)
    reasons = [row.failed_constraint for row in rows if row.config == unfit.config]
    assert any(reason in str(caught.value) for reason in reasons)


def test_strict_mode_refuses_the_general_kernel() -> None:
    a, b = matrix(64, 65)[:, 1:], matrix(64, 64)  # a begins 2 bytes off a boundary
    with tk.config.strict(), pytest.raises(tk.VariantNotFoundError, match="strict"):
        tk.mm(a, b)
    assert tk.mm(a, b).isfinite().all()


def test_nothing_to_multiply() -> None:
    assert tk.mm(matrix(0, 8), matrix(8, 5)).shape == (0, 5)
    assert torch.equal(tk.mm(matrix(4, 0), matrix(0, 5)), torch.zeros(4, 5, device=DEVICE, dtype=torch.bfloat16))
    bias = matrix(5)
    assert torch.equal(tk.mm(matrix(4, 0), matrix(0, 5), bias), bias.expand(4, 5))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_gpu_than_the_current_one() -> None:
    a, b = (torch.randn(128, 128, device="cuda:1", dtype=torch.bfloat16) for _ in range(2))
    with torch.cuda.device(0):
        result = tk.mm(a, b)
    assert result.device == a.device
    torch.testing.assert_close(result.float(), a.float() @ b.float(), rtol=2e-2, atol=0.1)
    with pytest.raises(ValueError, match="device"):
        tk.mm(a, b.to("cuda:0"))
