"""bmm, mm_plus_mm, grouped_mm and float8 products against torch: listed shapes, and random ones (cases.py)."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F

import tk
from benchmarks import cases
from benchmarks.cases import RANDOM, Case, Kind, randn
from benchmarks.report import Goal, Report
from benchmarks.runner import Options

GOALS = {
    "bmm": Goal(1.05, 0.97),
    "mm_plus_mm": Goal(1.10, 1.00),
    "grouped_mm": Goal(1.05, 0.95),
    "scaled_mm": Goal(1.00, 0.93),
    "scaled_mm_few_rows": Goal(1.30, 0.93),
    "scaled_grouped_mm": Goal(1.05, 0.95),
}
BMM = ((64, 512, 512, 512), (10_000, 32, 32, 32), (16, 2048, 2048, 128), (16, 2048, 128, 2048), (256, 128, 128, 64),
       (8, 4096, 4096, 1024), (512, 64, 64, 64), (32, 1000, 1000, 200))  # fmt: skip
MM_PLUS_MM = ((4096, 4096, 4096, 4096), (1024, 4096, 4096, 1024), (8192, 8192, 1024, 1024), (2048, 2048, 8192, 64),
              (512, 4096, 4096, 4096))  # fmt: skip
# Groups, rows of each, N, K.
GROUPED = ((8, 512, 14336, 4096), (8, 4096, 4096, 4096), (64, 64, 1408, 2048), (128, 16, 1536, 2048),
           (128, 256, 2048, 768), (16, 1024, 2048, 7168))  # fmt: skip
# M, N, K. Up to 64 rows are judged by themselves.
SCALED = ((4096, 4096, 4096), (8192, 8192, 8192), (1024, 4096, 4096), (1024, 28672, 4096), (256, 4096, 14336),
          (4096, 6144, 4096), (512, 8192, 28672), (2048, 2048, 2048))  # fmt: skip
SCALED_FEW_ROWS = ((16, 4096, 4096), (1, 4096, 4096), (64, 28672, 4096), (16, 4096, 14336), (32, 8192, 8192))
HOW = ((True, True), (True, False), (False, True), (False, False))  # scales of rows, fast accumulation


def bmm(batch: int, m: int, n: int, k: int, order: str) -> Case:
    def make() -> tuple[torch.Tensor, ...]:
        b = randn(batch, k, n) if order == "nn" else randn(batch, n, k).mT
        return randn(batch, m, k), b

    return Case(f"{batch}x{m}x{n}x{k} {order}", make, tk.bmm, {"torch.bmm": torch.bmm}, 2 * batch * m * n * k)


def mm_plus_mm(m: int, n: int, k: int, k2: int, order: str) -> Case:
    def make() -> tuple[torch.Tensor, ...]:
        b, d = (randn(i, n) if order == "nn" else randn(n, i).t() for i in (k, k2))
        return randn(m, k), b, randn(m, k2), d

    def of_torch(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return torch.addmm(torch.mm(a, b), c, d)

    peers = {"mm then addmm": of_torch}
    return Case(f"{m}x{n}x{k}+{k2} {order}", make, tk.mm_plus_mm, peers, 2 * m * n * (k + k2))


def grouped_mm(ends: list[int], n: int, k: int, what: str) -> Case:
    total, count = ends[-1], len(ends)

    def make() -> tuple[torch.Tensor, ...]:
        offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
        return randn(total, k), randn(count, n, k).mT, offs

    def ours(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return tk.grouped_mm(a, b, offs=offs)

    def of_torch(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(a, b, offs=offs)

    def loop(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        out = a.new_empty(total, n)
        for i, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            torch.mm(a[begin:end], b[i], out=out[begin:end])
        return out

    label = f"{count} groups, {total} rows {what}, {n}x{k}"
    return Case(label, make, ours, {"F.grouped_mm": of_torch, "loop of mm": loop}, 2 * total * n * k)


def float8(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)


def scaled_mm(m: int, n: int, k: int, rowwise: bool, fast: bool) -> Case:
    def make() -> tuple[torch.Tensor, ...]:
        shapes = ((m, 1), (1, n)) if rowwise else ((), ())
        return float8(m, k), float8(n, k).t(), *(torch.rand(s, device="cuda") + 0.5 for s in shapes)

    def ours(*arguments: torch.Tensor) -> torch.Tensor:
        return tk.scaled_mm(*arguments, use_fast_accum=fast)

    def of_torch(*arguments: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(*arguments, out_dtype=torch.bfloat16, use_fast_accum=fast)

    label = f"{m}x{n}x{k} {'rows' if rowwise else 'tensor'} {'fast' if fast else 'slow'}"
    return Case(label, make, ours, {"torch._scaled_mm": of_torch}, 2 * m * n * k)


def scaled_grouped_mm(ends: list[int], n: int, k: int, what: str, fast: bool) -> Case:
    total, count = ends[-1], len(ends)

    def make() -> tuple[torch.Tensor, ...]:
        offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
        scales = torch.rand(total, device="cuda") + 0.5, torch.rand(count, n, device="cuda") + 0.5
        return float8(total, k), float8(count, n, k).mT, *scales, offs

    def ours(*arguments: torch.Tensor) -> torch.Tensor:
        return tk.scaled_grouped_mm(*arguments[:4], offs=arguments[4], use_fast_accum=fast)

    def of_torch(*arguments: torch.Tensor) -> torch.Tensor:
        return torch._scaled_grouped_mm(*arguments, out_dtype=torch.bfloat16, use_fast_accum=fast)

    label = f"{count} groups, {total} rows {what}, {n}x{k} {'fast' if fast else 'slow'}"
    return Case(label, make, ours, {"torch._scaled_grouped_mm": of_torch}, 2 * total * n * k)


# --- Which are measured ---


def balanced(count: int, rows: int) -> list[int]:
    return [rows * (i + 1) for i in range(count)]


def skewed(count: int, total: int, rng: random.Random) -> list[int]:
    weights = [rng.expovariate(1.0) ** 2 for _ in range(count)]
    ends = [round(total * sum(weights[: i + 1]) / sum(weights)) for i in range(count)]
    return [*ends[:-1], total]


def listed() -> dict[str, list[Case]]:
    rng = random.Random(5201)
    orders = ("nn", "nt")
    return {
        "bmm": [bmm(*shape, orders[i % 2]) for i, shape in enumerate(BMM)],
        "mm_plus_mm": [mm_plus_mm(*shape, orders[i % 2]) for i, shape in enumerate(MM_PLUS_MM)],
        "grouped_mm": [
            grouped_mm(balanced(g, rows) if even else skewed(g, g * rows, rng), n, k, "even" if even else "skewed")
            for g, rows, n, k in GROUPED
            for even in (True, False)
        ],
        "scaled_mm": [scaled_mm(*shape, rowwise, fast) for shape in SCALED for rowwise, fast in HOW],
        "scaled_mm_few_rows": [scaled_mm(*shape, rowwise, fast) for shape in SCALED_FEW_ROWS for rowwise, fast in HOW],
        "scaled_grouped_mm": [
            scaled_grouped_mm(balanced(g, rows) if even else skewed(g, g * rows, rng), n, k,
                              "even" if even else "skewed", fast)
            for g, rows, n, k in GROUPED
            for even, fast in ((True, False), (False, True))
        ],
    }  # fmt: skip


def drawn() -> dict[str, list[Case]]:
    """Log-uniform sizes, multiples of 8."""
    rng = random.Random(5202)

    def size(low: int, high: int) -> int:
        return max(8, round(low * (high / low) ** rng.random()) // 8 * 8)

    def batch_case() -> Case:
        m, n, k = size(32, 2048), size(32, 2048), size(32, 2048)
        return bmm(min(size(8, 512), max(8, 2**28 // (m * n + m * k + n * k))), m, n, k, rng.choice(("nn", "nt")))

    def grouped_case() -> Case:
        count = rng.choice((8, 16, 32, 64, 128))
        total = min(count * size(16, 4096), 65536)
        even = rng.random() < 0.5
        ends = balanced(count, total // count) if even else skewed(count, total, rng)
        return grouped_mm(ends, size(768, 8192), size(768, 8192) // 2 // 8 * 8, "even" if even else "skewed")

    def scaled_case(low: int, high: int) -> Case:
        m = round(low * (high / low) ** rng.random())
        n, k = (max(16, size(768, 14336) // 16 * 16) for _ in range(2))  # torch takes nothing else
        return scaled_mm(m, n, k, *rng.choice(HOW))

    def scaled_grouped_case() -> Case:
        count = rng.choice((8, 16, 32, 64, 128))
        total = min(count * size(16, 4096), 65536)
        even = rng.random() < 0.5
        ends = balanced(count, total // count) if even else skewed(count, total, rng)
        n, k = (size(768, 4096) // 16 * 16 for _ in range(2))
        return scaled_grouped_mm(ends, n, k, "even" if even else "skewed", rng.random() < 0.5)

    return {
        "bmm": [batch_case() for _ in range(RANDOM)],
        "mm_plus_mm": [
            mm_plus_mm(size(512, 8192), size(768, 8192), size(256, 8192), size(256, 8192), rng.choice(("nn", "nt")))
            for _ in range(RANDOM)
        ],
        "grouped_mm": [grouped_case() for _ in range(RANDOM)],
        "scaled_mm": [scaled_case(65, 8192) for _ in range(RANDOM)],
        "scaled_mm_few_rows": [scaled_case(1, 64) for _ in range(RANDOM)],
        "scaled_grouped_mm": [scaled_grouped_case() for _ in range(RANDOM)],
    }


def run(options: Options, report: Report) -> None:
    of_list, at_random = listed(), drawn()
    kinds = {
        name: Kind(goal, " or ".join(of_list[name][0].peers), of_list[name], at_random[name])
        for name, goal in GOALS.items()
    }
    cases.run(options, report, kinds)
