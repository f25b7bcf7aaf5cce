"""Matrix products against torch.mm, torch.compile and the copy ceiling.

Everything small is replayed from CUDA graphs with weights that rotate through 300 MB, so that they come from memory;
variants take turns. What is called "eager" is timed as a Python program calls it, host included.

Each peer is met twice: by the shapes listed here, for comparison over time, and by shapes drawn at random that no table
was made from (benchmarks/shapes.py). The latter are what is judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, partial

import torch

from benchmarks import shapes
from benchmarks.products import ACTIVATIONS, SHORT, Product, judge, run_tk, run_torch, torch_precision
from benchmarks.report import Goal, Group, Report, Row
from benchmarks.runner import Options
from benchmarks.shapes import BANDS, MOST_ROWS, Band
from tk import capi, timing
from tk.config import STATIC_WEIGHTS
from tk.heuristics.problem import describe

# --- Shapes ---

LLAMA = (  # K, N of the projections: 8B, then 70B
    (4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096),
    (8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192),
)  # fmt: skip
MANY_ROWS = (1024, 4096, 16384)
FEW_ROWS = (1, 4, 16, 64, 256)
SQUARES = (1024, 2048, 4096, 8192)
INNER = (512, 1024, 2048, 4096, 8192, 16384)  # K of 8192 x 8192
UNALIGNED = ((1000, 1000, 1000), (1023, 1025, 1027), (2048, 50257, 768), (4095, 4097, 4099), (1111, 3336, 2224))
UNALIGNED_FEW = ((1, 50257, 4096), (7, 4097, 4095), (33, 1000, 2056), (100, 11008, 4096), (200, 5120, 13824))
TF32 = ((16, 4096, 4096), (256, 4096, 4096), (1024, 4096, 4096), (2048, 2048, 2048), (4096, 4096, 4096),
        (4096, 4096, 14336), (8192, 8192, 8192), (1000, 1000, 1000))  # fmt: skip
FUSED = ((16, 14336, 4096, "silu"), (256, 14336, 4096, "gelu_tanh"), (1024, 4096, 4096, "gelu"),
         (2048, 8192, 2048, "relu"), (4096, 14336, 4096, "silu"), (4096, 16384, 4096, "gelu"),
         (8192, 4096, 4096, "gelu_tanh"), (16384, 4096, 1024, "relu"))  # fmt: skip
AUTOTUNED = tuple((m, n, k) for k, n in LLAMA[:4] for m in FEW_ROWS)[::2]

CEILING_BYTES = 32e6  # weights that a copy's speed says something of
RANDOM = 30  # shapes of each line that is drawn at random
# Seeds of those lines. None is used by `tk tune` or by the choice's regret; a new one is as good.
SEEDS = {"16": 4101, "256": 4102, "1024": 4103, "above": 4104, "ceiling": 4105, "tf32": 4106, "fused": 4107,
         "autotuned": 4108}  # fmt: skip


@cache
def _tuned() -> frozenset[shapes.Size]:
    return shapes.tuned()


def random_shapes(line: str, quick: bool, low: int = 1, high: int = MOST_ROWS, weights: int = 1) -> list[shapes.Size]:
    """The shapes of a random line: the name of a band, "ceiling", "tf32", "fused" or "autotuned"."""
    return shapes.drawn(SEEDS[line], RANDOM // 6 if quick else RANDOM, low, high, _tuned(), weights)


def random_products(line: str, quick: bool, low: int = 1, high: int = MOST_ROWS, weights: int = 1) -> Iterator[Product]:
    """Products in bf16, half of them with b column-major, as weights are that a linear layer stores."""
    for i, shape in enumerate(random_shapes(line, quick, low, high, weights)):
        yield Product(*shape, order=("nn", "nt")[i // 2 % 2])


def of_band(band: Band, quick: bool) -> Iterator[Product]:
    return random_products(band.name, quick, band.low, band.high or MOST_ROWS)


FEW_BANDS, MANY_BANDS = BANDS[:2], BANDS[2:]


def large_products(quick: bool) -> Iterator[Product]:
    llama = [(m, n, k) for k, n in LLAMA for m in MANY_ROWS]
    listed = [*llama, *((s, s, s) for s in SQUARES), *((8192, 8192, k) for k in INNER), *UNALIGNED]
    yield from _both_orders(listed, quick)
    for shape in ((4096, 4096, 4096), (1024, 28672, 4096)):
        yield from (Product(*shape, dtype=torch.float16, order=order) for order in ("nn", "nt"))
        yield from (Product(*shape, order=order) for order in ("tn", "tt"))


def few_products(quick: bool) -> Iterator[Product]:
    """Those with the same weights follow one another."""
    listed = [*((m, n, k) for k, n in LLAMA for m in FEW_ROWS), *UNALIGNED_FEW]
    weights: dict[tuple[int, int], list[int]] = {}
    for m, n, k in listed:
        weights.setdefault((n, k), []).append(m)
    for order in ("nn", "nt"):
        for i, ((n, k), rows) in enumerate(weights.items()):
            if not quick or i % 4 == (order == "nt"):
                yield from (Product(m, n, k, order=order) for m in rows)


def _both_orders(listed: Iterable[shapes.Size], quick: bool) -> Iterator[Product]:
    for i, shape in enumerate(listed):
        for order in ("nn", "nt"):
            if not quick or i % 6 == 3 * (order == "nt"):
                yield Product(*shape, order=order)


# --- Measuring one product ---


class WrongResult(Exception):
    """A row that is not worth a timing."""


class Inputs:
    """Rotating inputs of a product; the last weights are kept, since making them takes longer than timing them."""

    def __init__(self) -> None:
        self._key: object = None
        self._weights: list[torch.Tensor] = []

    def sets(self, p: Product, count: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(a, b, out), b different in each."""
        key = (p.k, p.n, p.dtype, p.order[1], count)
        if key != self._key:
            self._weights = []
            self._weights = [p.make_b() for _ in range(count)]
            self._key = key
        return [(p.make_a(), b, p.make_out()) for b in self._weights]


def check(p: Product, inputs: tuple[torch.Tensor, ...], bias: torch.Tensor | None = None, mode: int = 0) -> float:
    """Our mean error over torch's. Raises WrongResult."""
    a, b, out = inputs
    ours = run_tk(a, b, bias, p.activation, out.fill_(torch.nan), mode=mode)
    verdict = judge(p, a, b, bias, ours, run_torch(a, b, bias, p.activation))
    if not verdict.ok:
        raise WrongResult(str(verdict))
    return verdict.ratio


def chosen(p: Product, inputs: tuple[torch.Tensor, ...], mode: int = 0, bias: torch.Tensor | None = None) -> str:
    """The config that a call runs."""
    a, b, out = inputs
    described = describe(run_tk, a, b, bias, p.activation, out, mode=mode)
    return capi.choose(described.problem).config_name


def add_row(group: Group, p: Product, times: dict[str, timing.Timing], ours: str, peer: str, **more: object) -> None:
    us = {label: t.us for label, t in times.items()}
    speed = {"tflops": p.flops / us[ours] * 1e-6, "gbps": p.bytes / us[ours] * 1e-3}
    speed |= {"spread": _spread(times[ours]), "peer_spread": _spread(times[peer])}
    shape = {"m": p.m, "n": p.n, "k": p.k, "order": p.order, "dtype": SHORT[p.dtype], "ours": ours}
    ratio = us[peer] / us[ours]
    group.rows.append(Row(p.label, ratio, us, shape | speed | more))
    rest = "  ".join(f"{label} {t:.2f}" for label, t in us.items())
    print(f"{group.name:8} {p.label:38} {ratio:6.3f}  us: {rest}  {more.get('config', '')}", flush=True)


def _spread(t: timing.Timing) -> float:
    return (t.high - t.low) / t.us


# --- The groups of rows ---


GOAL_FEW, GOAL_LARGE, GOAL_EAGER, GOAL_COPY = Goal(1.12, 0.97), Goal(1.05, 0.97), Goal(1.3, 1.0), Goal(0.85, 0.75)
GOAL_TF32, GOAL_FUSED = Goal(0.97, 0.90), Goal(1.05, 0.95)
GOALS = {"16": GOAL_FEW, "256": GOAL_FEW, "above": GOAL_LARGE}  # of bands; no goal was set for 257 to 1024 rows


def band_group(report: Report, band: Band) -> Group:
    return report.group(f"random_{band.name}", f"{band.title}, random", "torch.mm", GOALS.get(band.name))


def large(options: Options, report: Report, inputs: Inputs) -> None:
    group = report.group("large", "M ≥ 1024", "torch.mm", GOAL_LARGE)
    for p in large_products(options.quick):
        _attempt(options, report, group, p, partial(_large, group, p, inputs))


def large_random(options: Options, report: Report, inputs: Inputs) -> None:
    for band in MANY_BANDS:
        group = band_group(report, band)
        for p in of_band(band, options.quick):
            _attempt(options, report, group, p, partial(_large, group, p, inputs))


def _large(group: Group, p: Product, inputs: Inputs) -> None:
    fits_l2 = p.bytes < 120e6
    sets = inputs.sets(p, 4 if fits_l2 else 1)
    error = check(p, sets[0])
    captures = {
        "tk": timing.capture([partial(run_tk, a, b, None, 0, out) for a, b, out in sets]),
        "torch.mm": timing.capture([partial(torch.mm, a, b, out=out) for a, b, out in sets]),
    }
    times = timing.device_times(captures, rounds=5, ms=15, warm_ms=15)
    add_row(group, p, times, "tk", "torch.mm", config=chosen(p, sets[0]), error_ratio=error)


def few(options: Options, report: Report, inputs: Inputs) -> None:
    group = report.group("few", "M ≤ 256, graph replay", "torch.mm", GOAL_FEW)
    static = report.group("few_static", "M ≤ 256, graph replay, static weights", "torch.mm", GOAL_FEW)
    ceiling = report.group("ceiling", "M ≤ 16, weights ≥ 32 MB", "copy", GOAL_COPY)
    for p in few_products(options.quick):
        groups = (group, static, ceiling if p.m <= 16 and p.weight_bytes >= CEILING_BYTES else None)
        _attempt(options, report, group, p, partial(_few, groups, p, inputs, report.environment["copy_gbps"]))


def few_random(options: Options, report: Report, inputs: Inputs) -> None:
    """By bands; with static weights and against a copy, each in one line."""
    copy_gbps = report.environment["copy_gbps"]
    groups = {band: band_group(report, band) for band in FEW_BANDS}
    static = report.group("few_static_random", "M ≤ 256, static weights, random", "torch.mm", GOAL_FEW)
    ceiling = report.group("ceiling_random", "M ≤ 16, weights ≥ 32 MB, random", "copy", GOAL_COPY)
    for band, group in groups.items():
        for p in of_band(band, options.quick):
            _attempt(options, report, group, p, partial(_few, (group, static, None), p, inputs, copy_gbps))
    heavy = int(CEILING_BYTES // torch.bfloat16.itemsize)
    for p in random_products("ceiling", options.quick, 1, 16, heavy):
        _attempt(options, report, ceiling, p, partial(_few, (None, None, ceiling), p, inputs, copy_gbps))


def _few(groups: tuple[Group | None, Group | None, Group | None], p: Product, inputs: Inputs, copy_gbps: float) -> None:
    """One measurement, a row in each group given: against torch.mm, the same with static weights, against a copy."""
    group, static, ceiling = groups
    sets = inputs.sets(p, timing.copies_to_rotate(p.weight_bytes, most=48))
    error = max(check(p, sets[0], mode=mode) for mode in (0, STATIC_WEIGHTS))
    captures = {
        "tk": timing.capture([partial(run_tk, a, b, None, 0, out) for a, b, out in sets]),
        "tk static": timing.capture([partial(run_tk, a, b, None, 0, out, mode=STATIC_WEIGHTS) for a, b, out in sets]),
        "torch.mm": timing.capture([partial(torch.mm, a, b, out=out) for a, b, out in sets]),
    }
    times = timing.device_times(captures, rounds=7, ms=4)
    if group is not None:
        add_row(group, p, times, "tk", "torch.mm", config=chosen(p, sets[0]), error_ratio=error)
    if static is not None:
        add_row(static, p, times, "tk static", "torch.mm", config=chosen(p, sets[0], STATIC_WEIGHTS))
    if ceiling is not None:
        at_ceiling = timing.Timing(*(p.bytes / copy_gbps * 1e-3,) * 3)
        add_row(ceiling, p, times | {"copy": at_ceiling}, "tk", "copy")


def autotuned(options: Options, report: Report, inputs: Inputs) -> None:
    """The few rows once more, against what torch.compile finds by trying: 5 seconds for each, so only some."""
    peer = "better of torch.mm, max-autotune"
    group = report.group("autotuned", "M ≤ 256, graph replay", peer, GOAL_FEW)
    drawn = report.group("autotuned_random", "M ≤ 256, graph replay, random", peer, GOAL_FEW)
    for i, shape in enumerate(AUTOTUNED[:2] if options.quick else AUTOTUNED):
        p = Product(*shape, order=("nn", "nt")[i % 2])
        _attempt(options, report, group, p, partial(_autotuned, group, p, inputs))
    for p in random_products("autotuned", options.quick, 1, 256):
        _attempt(options, report, drawn, p, partial(_autotuned, drawn, p, inputs))


def _autotuned(group: Group, p: Product, inputs: Inputs) -> None:
    sets = inputs.sets(p, timing.copies_to_rotate(p.weight_bytes, most=48))
    error = check(p, sets[0])
    compiled = _compile(lambda a, b: torch.mm(a, b), mode="max-autotune-no-cudagraphs")
    captures = {
        "tk": timing.capture([partial(run_tk, a, b, None, 0, out) for a, b, out in sets]),
        "torch.mm": timing.capture([partial(torch.mm, a, b, out=out) for a, b, out in sets]),
        "max-autotune": timing.capture([partial(compiled, a, b) for a, b, _ in sets]),
    }
    times = timing.device_times(captures, rounds=7, ms=4)
    peer = min(("torch.mm", "max-autotune"), key=lambda label: times[label].us)
    add_row(group, p, times, "tk", peer, config=chosen(p, sets[0]), error_ratio=error)


def eager(options: Options, report: Report, inputs: Inputs) -> None:
    group = report.group("eager", "M ≤ 256, called eagerly", "torch.mm", GOAL_EAGER)
    drawn = report.group("eager_random", "M ≤ 256, called eagerly, random", "torch.mm", GOAL_EAGER)
    for p in few_products(options.quick):
        _attempt(options, report, group, p, partial(_eager, group, p, inputs))
    for band in FEW_BANDS:
        for p in of_band(band, options.quick):
            _attempt(options, report, drawn, p, partial(_eager, drawn, p, inputs))


def _eager(group: Group, p: Product, inputs: Inputs) -> None:
    import tk

    sets = inputs.sets(p, timing.copies_to_rotate(p.weight_bytes, most=48))
    variants = {
        "tk": [partial(tk.mm, a, b) for a, b, _ in sets],
        "torch.mm": [partial(torch.mm, a, b) for a, b, _ in sets],
    }
    with torch.inference_mode():
        times = timing.eager_times(variants, rounds=7, calls=100)
    add_row(group, p, times, "tk", "torch.mm", config=chosen(p, sets[0]))


def tf32(options: Options, report: Report, inputs: Inputs) -> None:
    group = report.group("tf32", "fp32 as tf32", "torch.mm tf32", GOAL_TF32)
    drawn = report.group("tf32_random", "fp32 as tf32, random", "torch.mm tf32", GOAL_TF32)
    tf32 = {"dtype": torch.float32, "precision": "tf32"}
    with torch_precision("tf32"):
        for i, shape in enumerate(TF32):
            for order in ("nn", "nt"):
                p = Product(*shape, order=order, **tf32)
                if not options.quick or i % 3 == 1:
                    _attempt(options, report, group, p, partial(_large, group, p, inputs))
        for p in random_products("tf32", options.quick):
            p = replace(p, **tf32)
            _attempt(options, report, drawn, p, partial(_large, drawn, p, inputs))


def fused(options: Options, report: Report, inputs: Inputs) -> None:
    group = report.group("fused", "with bias and activation", "torch.compile", GOAL_FUSED)
    drawn = report.group("fused_random", "with bias and activation, random", "torch.compile", GOAL_FUSED)
    names = [name for name, _ in ACTIVATIONS]
    for m, n, k, activation in FUSED[::3] if options.quick else FUSED:
        p = Product(m, n, k, order="nt", bias=True, activation=names.index(activation))
        _attempt(options, report, group, p, partial(_fused, group, p, inputs))
    for i, shape in enumerate(random_shapes("fused", options.quick)):
        p = Product(*shape, order="nt", bias=True, activation=1 + i % (len(names) - 1))
        _attempt(options, report, drawn, p, partial(_fused, drawn, p, inputs))


def _fused(group: Group, p: Product, inputs: Inputs) -> None:
    bias = p.make_bias()
    sets = inputs.sets(p, timing.copies_to_rotate(p.weight_bytes, most=16))
    error = check(p, sets[0], bias)
    compiled = _compile(lambda a, b: run_torch(a, b, bias, p.activation))
    captures = {
        "tk": timing.capture([partial(run_tk, a, b, bias, p.activation, out) for a, b, out in sets]),
        "torch": timing.capture([partial(run_torch, a, b, bias, p.activation) for a, b, _ in sets]),
        "torch.compile": timing.capture([partial(compiled, a, b) for a, b, _ in sets]),
    }
    times = timing.device_times(captures, rounds=5, ms=10, warm_ms=10)
    add_row(group, p, times, "tk", "torch.compile", config=chosen(p, sets[0], bias=bias), error_ratio=error)


def _compile(function, **options):
    """Fresh: nothing of the shapes before makes this one dynamic or reaches the recompile limit."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, fullgraph=True, **options)


def _attempt(options: Options, report: Report, group: Group, p: Product, measure) -> None:
    label = f"{group.name} {p.label}"
    if options.wants(label) and options.has_time():
        report.attempt(label, measure)


def run(options: Options, report: Report) -> None:
    report.environment["copy_gbps"] = timing.copy_bandwidth()
    print(f"copy {report.environment['copy_gbps']:.0f} GB/s", flush=True)
    inputs = Inputs()
    groups = [few, few_random, large, large_random, tf32, eager, fused] + ([autotuned] if options.compiled else [])
    for measure in groups:
        report.attempt_part(measure.__name__, partial(measure, options, report, inputs))
        report.write(options.out)
