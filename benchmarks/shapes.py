"""Sizes of products: those drawn at random, which are what is judged, and the bands of rows that tables are split into.

Everything here is pure: a seed goes in, sizes come out; nothing imports torch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

Size = tuple[int, int, int]  # M, N, K

KERNELS = Path(__file__).resolve().parent.parent / "kernels"


@dataclass(frozen=True)
class Band:
    """Products of `low` to `high` rows, both included. high None: no limit, except that 8192 is the most drawn."""

    name: str
    title: str
    low: int
    high: int | None

    def __contains__(self, rows: int) -> bool:
        return self.low <= rows and (self.high is None or rows <= self.high)


BANDS = (
    Band("16", "M ≤ 16", 1, 16),
    Band("256", "M 17 to 256", 17, 256),
    Band("1024", "M 257 to 1024", 257, 1024),
    Band("above", "M > 1024", 1025, None),
)
MOST_ROWS = 8192


@dataclass(frozen=True)
class Model:
    """Widths of a language model's linear layers. attention: heads x head size. gate_up: what goes into the activation,
    twice as wide where a gate comes with it. down: the width that comes out of the activation."""

    name: str
    hidden: int
    qkv: int
    attention: int
    gate_up: int
    down: int
    vocabulary: int

    def linears(self) -> tuple[tuple[int, int], ...]:
        """(K, N) of the layers."""
        return (
            (self.hidden, self.qkv),
            (self.attention, self.hidden),
            (self.hidden, self.gate_up),
            (self.down, self.hidden),
            (self.hidden, self.vocabulary),
        )


MODELS = (
    Model("BERT base", 768, 2304, 768, 3072, 3072, 30522),
    Model("GPT-2", 768, 2304, 768, 3072, 3072, 50257),
    Model("Qwen 2.5 0.5B", 896, 1152, 896, 9728, 4864, 151936),
    Model("BERT large", 1024, 3072, 1024, 4096, 4096, 30522),
    Model("Qwen 2.5 1.5B", 1536, 2048, 1536, 17920, 8960, 151936),
    Model("Llama 3.2 1B", 2048, 3072, 2048, 16384, 8192, 128256),
    Model("Gemma 2 2B", 2304, 4096, 2048, 18432, 9216, 256000),
    Model("Phi-2", 2560, 7680, 2560, 10240, 10240, 51200),
    Model("Llama 3.2 3B", 3072, 5120, 3072, 16384, 8192, 128256),
    Model("Phi-3 mini", 3072, 9216, 3072, 16384, 8192, 32064),
    Model("Qwen 2.5 7B", 3584, 4608, 3584, 37888, 18944, 152064),
    Model("Gemma 2 9B", 3584, 8192, 4096, 28672, 14336, 256000),
    Model("Llama 2 7B", 4096, 12288, 4096, 22016, 11008, 32000),
    Model("Mistral 7B", 4096, 6144, 4096, 28672, 14336, 32768),
    Model("Llama 3 8B", 4096, 6144, 4096, 28672, 14336, 128256),
    Model("Llama 2 13B", 5120, 15360, 5120, 27648, 13824, 32000),
    Model("Qwen 2.5 32B", 5120, 7168, 5120, 55296, 27648, 152064),
    Model("Yi 34B", 7168, 9216, 7168, 40960, 20480, 64000),
    Model("Llama 3 70B", 8192, 10240, 8192, 57344, 28672, 128256),
    Model("Qwen 2.5 72B", 8192, 10240, 8192, 59136, 29568, 152064),
)
LINEARS = tuple(sorted({linear for model in MODELS for linear in model.linears()}))


# --- Drawn at random ---


def drawn(seed: int, count: int, low: int, high: int, exclude: Collection[Size], weights: int = 1) -> list[Size]:
    """`count` products of `low` to `high` rows, log-uniform, none of them in `exclude`, none twice.

    K and N are those of a real model's linear layer; of every third product they are near those, multiples of 8 and of
    no more. Every other product has a number of rows that is a multiple of nothing (odd), the others one that is.
    weights: the least K x N."""
    rng = random.Random(seed)
    linears = [linear for linear in LINEARS if linear[0] * linear[1] >= weights]
    found: list[Size] = []
    while len(found) < count:
        i = len(found)
        k, n = rng.choice(linears)
        if i % 3 == 2:
            k, n = _odd_eights(rng, k), _odd_eights(rng, n)
        m = _rows(rng, low, high, ragged=i % 2 == 0)
        if k * n >= weights and (m, n, k) not in exclude and (m, n, k) not in found:
            found.append((m, n, k))
    return found


def _odd_eights(rng: random.Random, size: int) -> int:
    """Within an eighth of `size`: a multiple of 8 that is not one of 16."""
    return round(size * rng.uniform(7 / 8, 9 / 8)) // 16 * 16 + 8


def _rows(rng: random.Random, low: int, high: int, ragged: bool) -> int:
    """Log-uniform in low to high. ragged: odd; otherwise a multiple of 2, or of the largest power of two up to 64 that
    is at most a quarter of it. Where the band holds none such, any."""
    m = round(low * (high / low) ** rng.random())
    if ragged:
        return next((r for r in (m, m + 1, m - 1) if r % 2 and low <= r <= high), m)
    step = 2
    while step < 64 and step * 8 <= m:  # twice the step is still a quarter
        step *= 2
    least, most = -(-low // step) * step, high // step * step
    return min(max(round(m / step) * step, least), most) if least <= most else m


def neighbours(seed: int, count: int, rows: tuple[int, int]) -> list[Size]:
    """M log-uniform in `rows`, N and K in 512 to 16384, most of them multiples of 8: no model's sizes."""
    rng = random.Random(seed)

    def size(low: int, high: int) -> int:
        return round(low * (high / low) ** rng.random())

    found = []
    for _ in range(count):
        step = rng.choice((1, 8, 8, 64, 128))
        n, k = (max(step, size(512, 16384) // step * step) for _ in range(2))
        found.append((size(*rows), n, k))
    return found


# --- What is known ---


def tuned(kernels: Path = KERNELS) -> frozenset[Size]:
    """Sizes of all products that a table was made from, on any architecture. Raises FileNotFoundError without any."""
    files = sorted(kernels.rglob("mm_timings.json"))
    if not files:
        raise FileNotFoundError(f"no mm_timings.json below {kernels}: which sizes are pinned cannot be told")
    return frozenset(size for file in files for size in _timed(json.loads(file.read_text())["timings"]))


def _timed(timings: list[dict[str, object]]) -> Iterator[Size]:
    for t in timings:
        yield int(t["m"]), int(t["n"]), int(t["k"])  # type: ignore[call-overload]
