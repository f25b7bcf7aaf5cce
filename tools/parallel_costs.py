"""Prints the tables of docs/parallel.md: what collectives cost a tensor parallel layer, what fusing them would save.

    python tools/parallel_costs.py

A model on paper. Each number that goes into it stands in INPUTS, with where it comes from. Products are held against
what was measured on one GPU (benchmarks/results/mm.json); nothing here was measured on several.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "mm.json"


class Input(NamedTuple):
    value: float
    unit: str
    what: str
    source: str


INPUTS = {
    "peak": Input(989, "TFLOP/s", "dense bf16 of an H100 or H200", "data sheet"),
    "product": Input(660, "TFLOP/s", "large bf16 products (0.67 of the peak)", "measured: mm.json"),
    "memory": Input(4245, "GB/s", "a copy, read and written", "measured on an H200"),
    "l2": Input(63, "MB", "L2 cache", "measured on an H200"),
    "launch": Input(3, "µs", "a kernel with nothing to do", "measured: 2.2 to 3.8"),
    "attention": Input(550, "TFLOP/s", "cuDNN, causal, head size 128, 8k rows", "measured on an H200"),
    "link": Input(450, "GB/s", "NVLink of a GPU, one direction", "data sheet"),
    "network": Input(50, "GB/s", "InfiniBand of a GPU, one direction (400 Gbit/s)", "data sheet"),
    "reached": Input(0.8, "", "share of a link that large messages reach", "assumed"),
    "collective": Input(10, "µs", "an NCCL collective with nothing to move", "assumed"),
    "step": Input(1, "µs", "each further step of its ring", "assumed"),
    "signal": Input(2, "µs", "a barrier of the ranks within a kernel", "assumed"),
    "copy": Input(3, "µs", "the copy engine's start of each copy", "assumed"),
    "fused": Input(0.95, "", "speed of a product beside which data travels", "assumed"),
}


def of(name: str) -> float:
    """A measured constant, in TFLOP/s = FLOP/µs / 1e6, GB/s = bytes/µs / 1e3, bytes or µs."""
    return INPUTS[name].value


def moved(n_bytes: float, link: str = "link") -> float:
    return n_bytes / (1e3 * of(link) * of("reached"))


# --- One GPU ---

TILE = 64  # rows


class Product(NamedTuple):
    m: float
    n: float
    k: float

    @property
    def weights(self) -> float:
        return 2 * self.n * self.k

    def time(self) -> float:
        n_bytes = self.weights + 2 * self.m * (self.n + self.k)
        return of("launch") + max(self.flops(), n_bytes / (1e3 * of("memory")))

    def flops(self) -> float:
        """The tensor cores' time."""
        return 2 * self.m * self.n * self.k / (1e6 * of("product"))

    def in_parts(self, parts: int) -> list[float]:
        """The times of equal parts of the rows, one after the other, in whole tiles: each reads the weights again,
        unless L2 holds them."""
        part = Product(max(TILE, self.m / parts), self.n, self.k)
        read = (part.time() - of("launch")) / of("fused")
        again = part.flops() / of("fused") if self.weights < 1e6 * of("l2") else read
        return [read, *[again] * (parts - 1)]


def norm(n_bytes: float) -> float:
    """tk.add_rms_norm: two tensors read, two written."""
    return of("launch") + 4 * n_bytes / (1e3 * of("memory"))


# --- NCCL ---


def gathered(n_bytes: float, ranks: int, link: str = "link") -> float:
    """all_gather or reduce_scatter of a tensor that has n_bytes when it is whole."""
    return of("collective") + (ranks - 1) * of("step") + moved(n_bytes * (ranks - 1) / ranks, link)


def reduced(n_bytes: float, ranks: int, link: str = "link") -> float:
    """all_reduce."""
    return of("collective") + 2 * (ranks - 1) * of("step") + moved(2 * n_bytes * (ranks - 1) / ranks, link)


# --- Fused ---


def all_gather_linear(product: Product, ranks: int) -> float:
    """The copy engine brings a part of the rows of each peer; the product begins with its own."""
    part = moved(2 * product.m * product.k / ranks)
    done = of("launch")
    for i, cost in enumerate(product.in_parts(ranks)):
        arrived = of("signal") + i * (of("copy") + part) if i else 0.0
        done = max(done, arrived) + cost
    return done


def linear_reduce_scatter(product: Product, ranks: int) -> float:
    """Finished tiles go to their owner; the own rows come last, and then the parts of all ranks are added up."""
    part = moved(2 * product.m * product.n / ranks)
    done, sent = of("launch"), 0.0
    for i, cost in enumerate(product.in_parts(ranks)):
        done += cost
        if i < ranks - 1:
            sent = max(done, sent) + part
    added = 2 * product.m * product.n * (1 + 1 / ranks) / (1e3 * of("memory"))
    return max(done, sent) + of("signal") + added


def all_reduce_add_rms_norm(n_bytes: float, ranks: int) -> float:
    """One-shot: each rank reads all of its peers. Two-shot: a part of the rows, then the sums of the others' parts."""
    one = 2 * of("signal") + moved(n_bytes * (ranks - 1))
    two = 3 * of("signal") + moved(2 * n_bytes * (ranks - 1) / ranks)
    return of("launch") + min(one, two) + 3 * n_bytes / (1e3 * of("memory"))


# --- Layers of Llama-3 ---


class Model(NamedTuple):
    name: str
    hidden: int
    kv_heads: int
    qkv: int
    gate_up: int
    down: int


MODELS = (Model("8B", 4096, 8, 6144, 28672, 14336), Model("70B", 8192, 8, 10240, 57344, 28672))
RANKS = (2, 4, 8)
ROWS = (16, 256, 2048, 8192)
WORTH = 1.1
NORM_GOAL = 0.6
HEAD_SIZE = 128


class Call(NamedTuple):
    """plain: NCCL and the product, or the norm. fused: in one."""

    name: str
    plain: float
    fused: float
    collective: float  # a part of plain

    @property
    def gain(self) -> float:
        return self.plain / self.fused

    @property
    def limit(self) -> float:
        """The most that may be gained: the shorter of both is hidden behind the other, and nothing costs more."""
        return self.plain / max(self.collective, self.plain - self.collective)


def calls(model: Model, ranks: int, rows: int) -> list[Call]:
    """The calls of a tensor and sequence parallel layer; the last is for one that keeps whole rows on each rank."""
    found = []
    for name, width in (("qkv", model.qkv), ("gate, up", model.gate_up)):
        product, travels = Product(rows, width / ranks, model.hidden), gathered(2 * rows * model.hidden, ranks)
        found.append(Call(name, travels + product.time(), all_gather_linear(product, ranks), travels))
    for name, width in (("out", model.hidden), ("down", model.down)):
        product, travels = Product(rows, model.hidden, width / ranks), gathered(2 * rows * model.hidden, ranks)
        found.append(Call(name, travels + product.time(), linear_reduce_scatter(product, ranks), travels))
    n_bytes = 2 * rows * model.hidden
    travels = reduced(n_bytes, ranks)
    found.append(Call("norm", travels + norm(n_bytes), all_reduce_add_rms_norm(n_bytes, ranks), travels))
    return found


def layers(model: Model) -> Iterator[Sequence[object]]:
    for ranks in RANKS:
        for rows in ROWS:
            *products, last = calls(model, ranks, rows)
            plain, travels = sum(c.plain for c in products), sum(c.collective for c in products)
            best = sum(min(c.plain, c.fused) for c in products)
            yield (
                ranks, f"{rows:,}", f"{plain - travels:,.0f}", f"{travels:,.0f}", f"{travels / plain:.0%}",
                *(f"{c.gain:.2f}" for c in products), f"{plain / best:.2f}",
                f"{last.plain:,.0f}", f"{last.fused:,.0f}", f"{last.fused / last.plain:.2f}",
            )  # fmt: skip


def worth() -> Iterator[Sequence[object]]:
    """The number of rows at which a call gains a tenth, and what it gains at 2,048, of what it could. For the norm: up
    to how many bytes it takes at most 0.6."""
    sizes = [2**i for i in range(4, 15)]
    for model in MODELS:
        for i, name in enumerate(("qkv", "gate, up", "out", "down")):
            found = []
            for ranks in RANKS:
                fits = [rows for rows in sizes if calls(model, ranks, rows)[i].gain >= WORTH]
                at = calls(model, ranks, 2048)[i]
                found.append(f"{_ranges(fits, sizes)}; {at.gain:.2f} of {at.limit:.2f}")
            yield (model.name, name, *found)
    found = []
    for ranks in RANKS:
        ratio = {kib: all_reduce_add_rms_norm(1024 * kib, ranks) / (reduced(1024 * kib, ranks) + norm(1024 * kib))
                 for kib in (2**i for i in range(4, 15))}  # fmt: skip
        fits = [kib for kib, r in ratio.items() if r <= NORM_GOAL]
        found.append(f"up to {max(fits):,} KiB; {ratio[1024]:.2f} at 1 MiB")
    yield ("both", "norm", *found)


def _ranges(chosen: Sequence[int], of_all: Sequence[int]) -> str:
    """Ranges in words, as "16 to 64, 2,048 to 16,384"."""
    runs: list[list[int]] = []
    for x in of_all:
        if x in chosen:
            if runs and of_all.index(x) == of_all.index(runs[-1][-1]) + 1:
                runs[-1].append(x)
            else:
                runs.append([x])
    return ", ".join(f"{run[0]:,} to {run[-1]:,}" if len(run) > 1 else f"{run[0]:,}" for run in runs) or "never"


CHANGES = (("collective", 5), ("collective", 20), ("reached", 0.7), ("reached", 0.9), ("fused", 0.9), ("fused", 1.0))


def sensitivity() -> Iterator[Sequence[object]]:
    """How many of the product calls of the tables gain a tenth, should one of the inputs be another."""

    def found() -> tuple[list[float], float]:
        gains = [c.gain for m in MODELS for r in RANKS for rows in ROWS for c in calls(m, r, rows)[:-1]]
        last = calls(MODELS[0], 2, 16)[-1]
        return gains, last.fused / last.plain

    before, ratio = found()
    yield "as above", sum(g >= WORTH for g in before), "", "", f"{ratio:.2f}"
    for name, value in CHANGES:
        was = INPUTS[name]
        INPUTS[name] = was._replace(value=value)
        now, ratio = found()
        INPUTS[name] = was
        pairs = [(a >= WORTH, b >= WORTH) for a, b in zip(before, now, strict=True)]
        yield (
            f"{was.what}: {value:g} {was.unit}".rstrip(), sum(b for _, b in pairs),
            sum(b and not a for a, b in pairs), sum(a and not b for a, b in pairs), f"{ratio:.2f}",
        )  # fmt: skip


# --- 64 GPUs: 8 hosts of 8 ---


def hosts() -> Iterator[tuple[str, float, float]]:
    """What goes over the network in a layer of the 70B model, and what may hide it. 8,192 rows for each host."""
    model, rows, inner, outer = MODELS[1], 8192, 8, 8
    sizes = ((model.qkv, model.hidden), (model.hidden, model.hidden), (model.gate_up, model.hidden),
             (model.hidden, model.down))  # fmt: skip
    weights = sum(2 * n * k for n, k in sizes)
    compute = sum(Product(rows, n / inner, k).time() for n, k in sizes)
    gather = gathered(weights / inner, outer, "network")
    yield "FSDP over the hosts: weights gathered, forward", gather, compute
    yield "the same, backward: gathered again, and gradients scattered", 2 * gather, 2 * compute
    twice = sum(Product(2 * rows, n / inner, k).time() for n, k in sizes)
    yield f"the forward pass at {2 * rows:,} rows", gather, twice
    whole = sum(Product(rows, n / inner / outer, k).time() for n, k in sizes)
    yield (
        "tensor parallel over all 64: four collectives of the rows",
        4 * gathered(2 * rows * model.hidden, inner * outer, "network"),
        whole,
    )
    for heads, what, local in ((64, "over all 64", 2048), (64 // inner, "over the hosts, heads within", 16384)):
        kv = 2 * 2 * local * HEAD_SIZE * max(1, model.kv_heads * heads // 64)
        step = 4 * local * local * HEAD_SIZE * heads / (1e6 * of("attention")) / 2
        yield (
            f"context parallel {what}, 131,072 rows: a step of the ring, causal",
            of("collective") + moved(kv, "network"),
            step,
        )
    sent = 2 * rows * model.hidden / inner
    yield (
        "a pipeline over the hosts: a stage's rows, ten layers",
        of("collective") + moved(sent, "network"),
        10 * compute,
    )


# --- Tables ---


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(map(str, line)) + " |" for line in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def fit() -> str:
    """How the model's products compare with those that were measured."""
    groups = json.loads(RESULTS.read_text())["groups"]
    rows = [r for g in groups if g["name"] in ("few", "large") for r in g["rows"]]
    rows = [r for r in rows if r["dtype"] == "bf16" and r["order"] == "nt" and not any(r[x] % 64 for x in "nk")]
    ratios = sorted(Product(r["m"], r["n"], r["k"]).time() / r["us"]["tk"] for r in rows)
    return (
        f"For {len(ratios)} products that were measured this is {statistics.median(ratios):.2f} of the time in the "
        f"median, {ratios[0]:.2f} to {ratios[-1]:.2f} at the extremes."
    )


def texts() -> dict[str, str]:
    """Each table of the page."""
    found = {
        "inputs": table(
            ["number", "value", "from"], [(i.what, f"{i.value:g} {i.unit}".strip(), i.source) for i in INPUTS.values()]
        ),
        "fit": fit(),
    }
    for model in MODELS:
        header = ["GPUs", "rows", "products, µs", "NCCL, µs", "share", "qkv", "gate, up", "out", "down", "layer"]
        header += ["NCCL, norm, µs", "fused, µs", "ratio"]
        found[f"layers of {model.name}"] = table(header, layers(model))
    found["worth"] = table(["model", "call", *(f"{r} GPUs" for r in RANKS)], worth())
    header = ["number", "calls that gain a tenth, of 96", "more", "fewer", "norm, 8B, 16 rows, 2 GPUs"]
    found["sensitivity"] = table(header, sensitivity())
    found["hosts"] = table(
        ["what travels", "network, ms", "compute, ms", "hidden"],
        ((what, f"{t / 1e3:.2f}", f"{c / 1e3:.2f}", "yes" if t < c else "no") for what, t, c in hosts()),
    )
    return found


if __name__ == "__main__":
    for name, text in texts().items():
        print(f"{name}:\n\n{text}\n")
