"""What the tests of bmm, mm_plus_mm and grouped_mm share: operands in every layout, every config of a call, judging."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch

from benchmarks import accuracy, products
from tk import capi
from tk.heuristics.problem import describe

from .device import DEVICE

LETTERS = "nts"  # row-major, column-major, neither
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def matrices(*shape: int, dtype: torch.dtype = BF16, letter: str = "n", odd: bool = False) -> torch.Tensor:
    """Normal random numbers; `letter` as in LETTERS. odd: nothing a multiple of 16 bytes."""
    *batch, rows, cols = shape
    if letter == "t":
        return matrices(*batch, cols, rows, dtype=dtype, odd=odd).mT
    step = 3 if letter == "s" else 1
    pitch = cols * step + (3 if odd else -cols * step % 16)
    memory = torch.randn(1 + 16 + (torch.Size(batch).numel() * rows * pitch), device=DEVICE).to(dtype)
    start = 1 if odd else 0
    whole = memory[start : start + torch.Size(batch).numel() * rows * pitch].view(*batch, rows, pitch)
    return whole[..., : cols * step : step]


def every_config(call: Callable[[int], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The result by each config that fits, with its name; ``call(-1)`` chooses."""
    yield "chosen", call(-1)
    if DEVICE == "cpu":
        return
    described = describe(call, 0)  # one that is asked for: a choice may be another op's (int4_mm of many rows)
    assert described is not None
    for number, name in sorted({(c.config, c.config_name) for c in capi.candidates(described.problem) if c.fits}):
        yield name, call(number)


def problem(
    result: torch.Tensor, reference: torch.Tensor, inner: int, a: torch.Tensor, b: torch.Tensor, scale: float = 1
) -> str:
    """What is wrong with `result`, "" if nothing: one rounding, and what an fp32 sum of `inner` products may lose."""
    if result.shape != reference.shape:
        return f"is {list(result.shape)}, not {list(reference.shape)}"
    size = scale * max(products.magnitude(a.flatten(0, -2), b.flatten(0, -2)), 1e-3) + 4
    rounding = torch.finfo(result.dtype).eps / 2
    room = 1.02 * rounding * reference.abs() + 16 * accuracy.slack(inner, size, True)
    error = (result.double() - reference).abs()
    bad = ~(error <= room)
    return f"{int(bad.sum())} of {bad.numel()} wrong, the worst by {error[bad].max().item():.3g}" if bad.any() else ""


def as_computed(x: torch.Tensor, precision: str) -> torch.Tensor:
    """In fp64, as tensor cores read it; the CPU has none."""
    if DEVICE == "cpu":
        return x.double()
    return products.rounded_to_tf32(x.float()).double() if precision == "tf32" else x.double()


def activated(z: torch.Tensor, activation: int) -> torch.Tensor:
    return products.ACTIVATIONS[activation][1](z)


def draws(seed: str, count: int) -> Iterator[random.Random]:
    for i in range(count):
        yield random.Random(f"{seed} {i}")


def size(rng: random.Random, most: int) -> int:
    """A third multiples of 64, a third of 8, a third of nothing; from 1 on."""
    n = round(2 ** rng.uniform(0, (most - 1).bit_length()))
    by = rng.choice((1, 8, 64))
    return max(1, min(most, n // by * by or n))
