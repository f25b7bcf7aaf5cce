"""What the tests of float8 products share: operands whose products any sum has exactly, in every layout, and judging.

Whole numbers from -2 to 2 and scales that are powers of two: sums below 2**13 are exact in the 14 bits that tensor
cores keep of float8 sums, however they are accumulated. What differs by more than the result's one rounding is wrong.
"""

from __future__ import annotations

import random

import torch

from .device import DEVICE

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PAIRS = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))
MAX_K = 2**11  # 4 * K is what a sum may reach


def whole(*shape: int, dtype: torch.dtype = E4M3, letter: str = "n", odd: bool = False) -> torch.Tensor:
    """Whole numbers; `letter` as in other_products.LETTERS. odd: nothing a multiple of 16 bytes. NaN lies around."""
    *batch, rows, cols = shape
    if letter == "t":
        return whole(*batch, cols, rows, dtype=dtype, odd=odd).mT
    step = 3 if letter == "s" else 1
    pitch = cols * step + (3 if odd else -cols * step % 16)
    count = torch.Size(batch).numel()
    memory = torch.full((17 + count * rows * pitch,), float("nan"), device=DEVICE).to(dtype)
    start = 1 if odd else 0
    found = memory[start : start + count * rows * pitch].view(*batch, rows, pitch)[..., : cols * step : step]
    return found.copy_(torch.randint(-2, 3, shape, device=DEVICE).to(dtype))


def powers(*shape: int) -> torch.Tensor:
    """1/8 to 4, float32."""
    return torch.randint(-3, 3, shape, device=DEVICE).float().exp2()


def scales(rng: random.Random, m: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For the whole, or for rows and columns, in several shapes and strides."""
    kind = rng.choice(("one", "rows", "strided"))
    if kind == "one":
        shape = rng.choice(((), (1,), (1, 1)))
        return powers(*shape), powers(*shape)
    step = 1 if kind == "rows" else 3
    return powers(m, step)[:, :1], powers(n, step)[:, :1].t()


def problem(result: torch.Tensor, exact: torch.Tensor) -> str:
    """What is wrong with `result`, "" if nothing."""
    if result.shape != exact.shape:
        return f"is {list(result.shape)}, not {list(exact.shape)}"
    room = 1.02 * torch.finfo(result.dtype).eps / 2 * exact.abs() + 1e-6
    error = (result.double() - exact).abs()
    bad = ~(error <= room)
    if not bad.any():
        return ""
    where = bad.nonzero()[0].tolist()
    return f"{int(bad.sum())} of {bad.numel()} wrong, first at {where}, the worst by {error[bad].max().item():.3g}"
