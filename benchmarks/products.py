"""A matrix product as a record: its inputs, tk's call, torch's, and the reference; for benchmarks and GPU tests."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks import accuracy

ACTIVATIONS: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("none", lambda x: x),
    ("relu", torch.relu),
    ("gelu", F.gelu),
    ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    ("silu", F.silu),
)
PRECISIONS = {"ieee": 0, "tf32": 1}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHORT = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Product:
    """activation(alpha · a @ b + beta · bias), a [m, k], b [k, n].

    order: of a and b, "n" row-major, "t" column-major. bias: none or a row of n. precision: of fp32."""

    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    order: str = "nn"
    bias: bool = False
    activation: int = 0
    precision: str = "ieee"

    @property
    def label(self) -> str:
        kind = SHORT[self.dtype] if self.dtype != torch.float32 else self.precision
        extra = (" bias" if self.bias else "") + (f" {ACTIVATIONS[self.activation][0]}" if self.activation else "")
        return f"{self.m}x{self.n}x{self.k} {kind} {self.order}{extra}"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def weight_bytes(self) -> int:
        return self.k * self.n * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Each operand read once, the result written once."""
        return (self.m * self.k + self.k * self.n + self.m * self.n) * self.dtype.itemsize

    def make_a(self) -> torch.Tensor:
        return matrix(self.m, self.k, self.dtype, self.order[0])

    def make_b(self) -> torch.Tensor:
        return matrix(self.k, self.n, self.dtype, self.order[1])

    def make_bias(self) -> torch.Tensor | None:
        return torch.randn(self.n, device="cuda", dtype=self.dtype) if self.bias else None

    def make_out(self) -> torch.Tensor:
        """NaN, so that what is not written shows."""
        return torch.full((self.m, self.n), math.nan, device="cuda", dtype=self.dtype)


def matrix(rows: int, cols: int, dtype: torch.dtype, order: str) -> torch.Tensor:
    """Normal random numbers; "n" row-major, "t" column-major."""
    if order == "n":
        return torch.randn(rows, cols, device="cuda", dtype=dtype)
    return torch.randn(cols, rows, device="cuda", dtype=dtype).t()


def run_torch(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """What a torch program calls for it: one op, and the activation as another."""
    result = torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
    return ACTIVATIONS[activation][1](result)


def run_tk(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: int,
    out: torch.Tensor,
    *,
    precision: int = -1,
    config: int = -1,
    mode: int = 0,
) -> torch.Tensor:
    return torch.ops.tk.mm.out(a, b, bias, activation, None, precision, config, mode, out=out)


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: int = 0,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> torch.Tensor:
    """fp64, on the operands' device."""
    result = alpha * (a.double() @ b.double())
    if bias is not None and beta != 0:
        result = result + beta * bias.double()
    return ACTIVATIONS[activation][1](result)


def magnitude(a: torch.Tensor, b: torch.Tensor) -> float:
    """How large an element of a @ b typically is, where their elements are independent."""
    if a.numel() == 0 or b.numel() == 0:
        return 0.0
    rms = torch.stack([a.double().square().mean(), b.double().square().mean()]).sqrt()
    return math.sqrt(a.shape[1]) * rms.prod().item()


@contextlib.contextmanager
def torch_precision(precision: str) -> Iterator[None]:
    """torch's own switch for fp32 products."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def judge(
    p: Product, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, ours: torch.Tensor, torchs: torch.Tensor
) -> accuracy.Verdict:
    """Some whole rows and some whole columns, the first and the last among them: an fp64 product of all of it would
    take longer than all timings."""
    rows, cols = _sample(p.m, a.device), _sample(p.n, a.device)

    def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        part_bias = bias[cols] if bias is not None else None
        by_rows = reference(a[rows], b, bias, p.activation)
        return torch.cat([by_rows.flatten(), reference(a, b[:, cols], part_bias, p.activation).flatten()])

    def sampled(out: torch.Tensor) -> torch.Tensor:
        return torch.cat([out[rows].flatten(), out[:, cols].flatten()])

    tensor_cores = p.dtype != torch.float32 or p.precision == "tf32"
    room = accuracy.slack(p.k, magnitude(a[rows], b), tensor_cores)
    verdict = accuracy.judge(sampled(ours), sampled(torchs), exact(a, b), room)
    if verdict.ok or p.precision != "tf32":
        return verdict
    # For a single row or column torch does not use tf32 at all. What is asked for is tf32's own error.
    rounded = exact(rounded_to_tf32(a), rounded_to_tf32(b))
    return accuracy.judge(sampled(ours), rounded, exact(a, b), room)


def rounded_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """fp32, finite, to the 10 bits of mantissa that tf32 keeps."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


def _sample(size: int, device: torch.device, count: int = 48) -> torch.Tensor:
    if size <= 2 * count:
        return torch.arange(size, device=device)
    inner = torch.randperm(size - 2, device=device)[: count - 2] + 1
    ends = torch.tensor([0, size - 1], device=device)
    return torch.cat([ends, inner])
