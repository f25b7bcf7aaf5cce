"""A convolution as a record: its inputs, tk's call, torch's, and the reference; for benchmarks and GPU tests."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import accuracy
from benchmarks.products import ACTIVATIONS, SHORT

_TORCH: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class Convolution:
    """Of [n, c, *size] by [o, c / groups, *kernel]. layout: "channels_last", "contiguous" or "strided", of the input
    and the weight (contiguous where strided). precision: of fp32."""

    n: int
    c: int
    o: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int = 1
    dtype: torch.dtype = torch.bfloat16
    layout: str = "channels_last"
    bias: bool = False
    activation: int = 0
    precision: str = "ieee"

    @property
    def spatial(self) -> int:
        return len(self.size)

    @property
    def label(self) -> str:
        kind = SHORT[self.dtype] if self.dtype != torch.float32 else self.precision

        def by(x: tuple[int, ...] | str) -> str:
            return x if isinstance(x, str) else "x".join(map(str, x))

        groups = f" g{self.groups}" if self.groups > 1 else ""
        extra = (" bias" if self.bias else "") + (f" {ACTIVATIONS[self.activation][0]}" if self.activation else "")
        return (
            f"{self.n}x{self.c}x{by(self.size)} -> {self.o} k{by(self.kernel)} s{by(self.stride)} p{by(self.padding)} "
            f"d{by(self.dilation)}{groups} {kind} {self.layout}{extra}"
        )

    @property
    def inner(self) -> int:
        """Products in an element of the result."""
        return self.c // self.groups * math.prod(self.kernel)

    def flops(self, out: Tensor) -> int:
        return 2 * out.numel() * self.inner

    def make(self, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor | None]:
        """Input, weight and bias."""
        x = torch.randn(self.n, self.c, *self.size, device=device, dtype=self.dtype)
        weight = torch.randn(self.o, self.c // self.groups, *self.kernel, device=device, dtype=self.dtype)
        weight /= max(self.inner, 1) ** 0.5
        bias = torch.randn(self.o, device=device, dtype=self.dtype) if self.bias else None
        if self.layout == "strided":
            x = x.new_empty(*x.shape, 2)[..., 1].copy_(x)
        elif self.layout == "channels_last":
            x, weight = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, weight))
        return x, weight, bias

    def arguments(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.groups

    def run_tk(self, x: Tensor, weight: Tensor, bias: Tensor | None, config: str | None = None) -> Tensor:
        import tk

        conv = {1: tk.conv1d, 2: tk.conv2d, 3: tk.conv3d}[self.spatial]
        activation: Any = ACTIVATIONS[self.activation][0]
        precision: Any = self.precision if self.dtype == torch.float32 else None
        return conv(x, weight, bias, *self.arguments(), activation=activation, precision=precision, config=config)

    def run_torch(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        with allow_tf32(self.precision == "tf32"):
            out = _TORCH[self.spatial](x, weight, bias, *self.arguments())
        return ACTIVATIONS[self.activation][1](out)

    def exact(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wide = None if bias is None else bias.double()
        out = _TORCH[self.spatial](x.double(), weight.double(), wide, *self.arguments())
        return ACTIVATIONS[self.activation][1](out)


@contextlib.contextmanager
def allow_tf32(allowed: bool) -> Iterator[None]:
    """In cuDNN's convolutions."""
    cudnn = torch.backends.cudnn
    with cudnn.flags(enabled=True, benchmark=cudnn.benchmark, deterministic=cudnn.deterministic, allow_tf32=allowed):
        yield


TF32_ROUNDING = 0.75 * 2.0**-11  # of a product of two factors that were rounded to tf32, with some room


def judge(
    ours: Tensor, torchs: Tensor, exact: Tensor, inner: int, tensor_cores: bool, tf32: bool = False
) -> accuracy.Verdict:
    """inner: products that were added up for one element. tf32: whether that was asked for; cuDNN's choice of an
    algorithm may be one without."""
    magnitude = exact.square().mean().sqrt().item() if exact.numel() else 0.0
    rounding = TF32_ROUNDING * magnitude if tf32 else 0.0
    return accuracy.judge(ours, torchs, exact, accuracy.slack(inner, magnitude, tensor_cores) + rounding)
