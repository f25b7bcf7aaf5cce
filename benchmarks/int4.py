"""int4_mm and uint4x2_mixed_mm against torch's own int4 product (tinygemm) and the bfloat16 product of the unpacked
weight: K = N = 4096 and projections of Llama 8B and 70B, at row counts from decoding to prefill.

So many weights take turns that those of four bits come from memory (cases.py).
"""

from __future__ import annotations

import random
from functools import partial

import torch

import tk
from benchmarks import cases
from benchmarks.cases import RANDOM, Case, Kind
from benchmarks.report import Goal, Report
from benchmarks.runner import Options

GOALS = {"int4_mm_few_rows": Goal(1.8, 1.2), "int4_mm": None, "int4_mm_many_rows": Goal(0.90, 0.80)}
WEIGHTS = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192))  # N, K
ROWS = (1, 2, 4, 8, 16, 64, 128, 256, 512, 1024, 2048, 4096)
GROUP = 128


def operands(m: int, n: int, k: int, group: int) -> tuple[torch.Tensor, ...]:
    """a, ours (b, scales, zeros), torch's (packed, scales and zeros), and the weight in bfloat16."""
    q = torch.randint(16, (k, n), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(k // group, n, device="cuda") / 8 + 0.05).bfloat16()
    zeros = torch.randint(4, 12, (k // group, n), device="cuda").bfloat16()
    of_torch = torch.stack((scales, (8 - zeros) * scales), -1).contiguous()
    rows = q.t().contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack(rows[:, ::2] << 4 | rows[:, 1::2], 8)
    weight = (q.float() - zeros.float().repeat_interleave(group, 0)) * scales.float().repeat_interleave(group, 0)
    a = torch.randn(m, k, device="cuda").bfloat16()
    return a, tk.pack_int4(q), scales, zeros, packed, of_torch, weight.bfloat16()


def int4_mm(m: int, n: int, k: int, group: int = GROUP) -> Case:
    def ours(a, b, scales, zeros, packed, of_torch, weight):  # type: ignore[no-untyped-def]
        return tk.int4_mm(a, b, scales, zeros, group)

    def mm(a, b, scales, zeros, packed, of_torch, weight):  # type: ignore[no-untyped-def]
        return torch.mm(a, weight)

    def tinygemm(a, b, scales, zeros, packed, of_torch, weight):  # type: ignore[no-untyped-def]
        return torch.ops.aten._weight_int4pack_mm(a, packed, group, of_torch)

    # Its time grows with the rows; past a few hundred it is no peer, and takes long.
    peers = {"torch.mm": mm} | ({"tinygemm": tinygemm} if m <= 256 else {})
    label = f"{m}x{n}x{k}" + (f" group {group}" if group != GROUP else "")
    return Case(label, partial(operands, m, n, k, group), ours, peers, 2 * m * n * k, read=4)


def group_of(m: int) -> str:
    return "int4_mm_few_rows" if m <= 16 else "int4_mm_many_rows" if m >= 1024 else "int4_mm"


def listed() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {name: [] for name in GOALS}
    for n, k in WEIGHTS:
        for m in ROWS:
            found[group_of(m)].append(int4_mm(m, n, k))
    found["int4_mm_few_rows"] += [int4_mm(m, 4096, 4096, group) for m in (1, 16) for group in (32, 64)]
    return found


def drawn() -> dict[str, list[Case]]:
    """Log-uniform sizes; N a multiple of 64, K of 256: what torch's own takes."""
    rng = random.Random(5203)

    def size(low: int, high: int, by: int) -> int:
        return max(by, round(low * (high / low) ** rng.random()) // by * by)

    found: dict[str, list[Case]] = {name: [] for name in GOALS}
    for low, high in ((1, 16), (17, 1023), (1024, 8192)):
        for _ in range(RANDOM):
            m = size(low, high, 1)
            found[group_of(m)].append(int4_mm(m, size(1024, 16384, 64), size(1024, 16384, 256), rng.choice((64, 128))))
    return found


def run(options: Options, report: Report) -> None:
    of_list, at_random = listed(), drawn()
    kinds = {
        name: Kind(goal, "the better of torch.mm and, up to 256 rows, tinygemm", of_list[name], at_random[name])
        for name, goal in GOALS.items()
    }
    cases.run(options, report, kinds)
