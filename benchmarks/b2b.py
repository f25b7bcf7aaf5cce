"""b2b_gemm against two products of torch's and a pointwise op, where it is one kernel and where it is routed to two
products; rows `fused` and `two products` force a way, which is what the choice is judged by (cases.py).
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F

import tk
from benchmarks import cases
from benchmarks.cases import RANDOM, Case, Kind, randn
from benchmarks.report import Goal, Report
from benchmarks.runner import Options
from tk.ops import b2b

GOALS = {"b2b_gemm": Goal(1.3, 1.0), "b2b_gemm_two_products": Goal(1.0, 0.9), "b2b_gemm_ways": None}
# Rows, columns of the result, inner size of the product that f is of, and the long size between.
SHAPES = ((16384, 64, 64, 4096), (16384, 64, 64, 16384), (65536, 64, 64, 2048), (16384, 128, 128, 4096),
          (32768, 128, 128, 2048), (8192, 32, 32, 8192), (65536, 64, 32, 1024), (16384, 256, 256, 1024),
          (4096, 4096, 128, 4096), (128, 64, 64, 16384), (2048, 1024, 1024, 4096))  # fmt: skip
ACTIVATIONS = {"none": lambda x: x, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}


def case(m: int, n: int, k: int, p: int, order: str, f: str, way: str | None = None) -> Case:
    def make() -> tuple[torch.Tensor, ...]:
        a, b, c = randn(m, k) / k**0.5, randn(k, p), randn(p, n)
        return (a, b, c) if order == "left" else (c.t().contiguous(), b.t().contiguous(), a.t().contiguous())

    def ours(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return tk.b2b_gemm(a, b, c, order=order, f=f, way=way)  # type: ignore[arg-type]

    def of_torch(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        between = ACTIVATIONS[f]
        return between(a @ b) @ c if order == "left" else a @ between(b @ c)

    label = f"{m}x{n}x{k}x{p} {order} {f}" + (f" {way.replace('_', ' ')}" if way else "")
    return Case(label, make, ours, {"two products and f": of_torch}, 2 * m * p * (k + n))


def is_fused(m: int, n: int, k: int, p: int) -> bool:
    count = torch.cuda.get_device_properties(0).multi_processor_count
    fits = k <= b2b.MOST_INNER
    return fits and b2b.fused_time(m, n, k, p, count) < b2b.two_products_time(m, n, k, p, 2, False)


def listed() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {name: [] for name in GOALS}
    for i, shape in enumerate(SHAPES):
        order, f = ("left", "right")[i % 2], ("gelu", "none", "relu", "silu")[i % 4]
        found["b2b_gemm" if is_fused(*shape) else "b2b_gemm_two_products"].append(case(*shape, order, f))
        if shape[2] <= b2b.MOST_INNER:
            found["b2b_gemm_ways"] += [case(*shape, order, f, way) for way in ("fused", "two_products")]
    return found


def drawn() -> dict[str, list[Case]]:
    rng = random.Random(5204)

    def size(low: int, high: int) -> int:
        return max(16, round(low * (high / low) ** rng.random()) // 16 * 16)

    found: dict[str, list[Case]] = {name: [] for name in GOALS}
    for _ in range(RANDOM):
        shape = size(1024, 65536), size(16, 512), size(16, 512), size(512, 16384)
        name = "b2b_gemm" if is_fused(*shape) else "b2b_gemm_two_products"
        found[name].append(case(*shape, rng.choice(("left", "right")), rng.choice(tuple(ACTIVATIONS))))
    return found


def run(options: Options, report: Report) -> None:
    of_list, at_random = listed(), drawn()
    kinds = {name: Kind(goal, "two products and f", of_list[name], at_random[name]) for name, goal in GOALS.items()}
    cases.run(options, report, kinds)
