"""``tk tune bmm mm_plus_mm scaled_mm int4_mm``: every config of these ops at sizes drawn at random, or at given ones.

Their choice goes by predicted times alone, since nobody calls them with sizes that can be listed. What counts here is
therefore that all configs are timed for many different problems, from which tools/fit_cost.py fits the weights of those
times: ``--write kernels/tuned/sm90`` adds to a file of timings for each op. Without it the fastest are pinned for this
machine.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import tk.tune
from tk import errors, timing
from tk.heuristics.problem import describe
from tk.tune import pins, timings
from tk.tune.measure import Result, time_configs
from tk.tune.record import record

DEVICE = "cuda"
DRAWN = 200  # problems of an op, when none are asked for
MOST_FLOPS = 1.5e12  # of a problem: 2 ms
MOST_BYTES = 2 << 30

Inputs = tuple[Tensor, ...]  # of a call, its result last
Call = Callable[..., Tensor]  # of inputs and the number of a config


@dataclass(frozen=True)
class Drawn:
    """One problem. sizes: by name. order: of both operands of a product, "n" row-major, "t" column-major. fast: the
    accumulation of float8. group: of int4_mm's scales."""

    op: str
    sizes: tuple[tuple[str, int], ...]
    order: str = "nt"
    fast: bool = False
    group: int = 0

    def __getattr__(self, name: str) -> int:
        try:
            return dict(vars(self)["sizes"])[name]
        except KeyError:
            raise AttributeError(name) from None

    def __str__(self) -> str:
        sizes = "x".join(str(n) for _, n in self.sizes)
        how = {"scaled_mm": "fast" if self.fast else "slow", "int4_mm": f"group {self.group}"}.get(self.op, self.order)
        return f"{self.op} {sizes} {how}"

    @property
    def inner(self) -> int:
        """What is multiplied for an element of the result."""
        return self.k + (self.k2 if self.op == "mm_plus_mm" else 0)

    @property
    def flops(self) -> int:
        return 2 * self._batch * self.m * self.n * self.inner

    @property
    def bytes(self) -> int:
        """At 2 an element."""
        return 2 * self._batch * (self.m * self.n + (self.m + self.n) * self.inner)

    @property
    def _batch(self) -> int:
        return self.batch if self.op == "bmm" else 1


# --- Which are drawn ---


def _log_uniform(rng: random.Random, low: int, high: int, step: int) -> int:
    return max(step, round(low * (high / low) ** rng.random() / step) * step)


def _step(rng: random.Random) -> int:
    """What sizes are multiples of: of 8 TMA takes all, and from 64 on pitches are whole cache lines."""
    return rng.choice((8, 16, 64, 64, 128))


def _bmm(rng: random.Random) -> Drawn:
    m, n, k = (_log_uniform(rng, 16, 4096, _step(rng)) for _ in range(3))
    sizes = (("batch", _log_uniform(rng, 2, 1024, 1)), ("m", m), ("n", n), ("k", k))
    return Drawn("bmm", sizes, rng.choice(("nn", "nt")))


def _mm_plus_mm(rng: random.Random) -> Drawn:
    m = _log_uniform(rng, 32, 8192, rng.choice((1, 8, 64)))
    n, k, k2 = (_log_uniform(rng, 256, 8192, _step(rng)) for _ in range(3))
    return Drawn("mm_plus_mm", (("m", m), ("n", n), ("k", k), ("k2", k2)), rng.choice(("nn", "nt")))


def _scaled_mm(rng: random.Random) -> Drawn:
    m = _log_uniform(rng, 1, 8192, rng.choice((1, 8, 64)))
    n, k = (_log_uniform(rng, 512, 16384, max(16, _step(rng))) for _ in range(2))
    return Drawn("scaled_mm", (("m", m), ("n", n), ("k", k)), fast=rng.random() < 0.5)


def _int4_mm(rng: random.Random) -> Drawn:
    m = _log_uniform(rng, 1, 127, 1)
    n, k = (_log_uniform(rng, 1024, 16384, rng.choice((128, 256, 512))) for _ in range(2))
    return Drawn("int4_mm", (("m", m), ("n", n), ("k", k)), "nn", group=rng.choice((32, 64, 128, 128, k)))


def draw(op: str, count: int, seed: int) -> list[Drawn]:
    """Log-uniform sizes, none too large to be timed often; they depend on op and seed alone."""
    rng = random.Random(f"{op} {seed}")
    found: dict[Drawn, None] = {}
    while len(found) < count:
        one = OPS[op].draw(rng)
        if one.flops <= MOST_FLOPS and one.bytes <= MOST_BYTES:
            found[one] = None
    return list(found)


def given(op: str, text: str) -> list[Drawn]:
    """The problems of sizes like "64x512x512x512", in every way that is drawn. Raises ValueError."""
    names = OPS[op].sizes
    parts = text.lower().split("x")
    if len(parts) != len(names) or not all(p.isdecimal() and int(p) > 0 for p in parts):
        raise ValueError(f"tk tune: {text!r} is no size of {op}, which is {'x'.join(names)}")
    one = Drawn(op, tuple(zip(names, map(int, parts), strict=True)))
    if op == "scaled_mm":
        return [replace(one, fast=fast) for fast in (False, True)]
    if op == "int4_mm":
        return [replace(one, order="nn", group=128)]
    return [replace(one, order=order) for order in ("nn", "nt")]


# --- How they are called ---


def _matrix(rows: int, cols: int, order: str, *batch: int) -> Tensor:
    shape = (rows, cols) if order == "n" else (cols, rows)
    x = torch.randn(*batch, *shape, device=DEVICE, dtype=torch.bfloat16)
    return x if order == "n" else x.mT


def _bmm_inputs(d: Drawn) -> Inputs:
    out = torch.empty(d.batch, d.m, d.n, device=DEVICE, dtype=torch.bfloat16)
    return _matrix(d.m, d.k, d.order[0], d.batch), _matrix(d.k, d.n, d.order[1], d.batch), out


def _call_bmm(d: Drawn, a: Tensor, b: Tensor, out: Tensor, config: int = -1) -> Tensor:
    return torch.ops.tk.bmm.out(a, b, None, 0, None, -1, config, 0, out=out)


def _mm_plus_mm_inputs(d: Drawn) -> Inputs:
    first = _matrix(d.m, d.k, d.order[0]), _matrix(d.k, d.n, d.order[1])
    second = _matrix(d.m, d.k2, d.order[0]), _matrix(d.k2, d.n, d.order[1])
    return *first, *second, torch.empty(d.m, d.n, device=DEVICE, dtype=torch.bfloat16)


def _call_mm_plus_mm(d: Drawn, a: Tensor, b: Tensor, c: Tensor, e: Tensor, out: Tensor, config: int = -1) -> Tensor:
    return torch.ops.tk.mm_plus_mm.out(a, b, c, e, None, 0, None, -1, config, 0, out=out)


def _scaled_mm_inputs(d: Drawn) -> Inputs:
    a, b = (x.to(torch.float8_e4m3fn) for x in (_matrix(d.m, d.k, "n"), _matrix(d.k, d.n, "t")))
    scales = torch.rand(d.m, 1, device=DEVICE) + 0.5, torch.rand(1, d.n, device=DEVICE) + 0.5
    return a, b, *scales, torch.empty(d.m, d.n, device=DEVICE, dtype=torch.bfloat16)


def _call_scaled_mm(d: Drawn, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor,
                    config: int = -1) -> Tensor:  # fmt: skip
    return torch.ops.tk.scaled_mm.out(a, b, scale_a, scale_b, None, d.fast, 0, None, -1, config, 0, out=out)


def _scaled_reference(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return (a.bfloat16() @ b.bfloat16()).float() * scale_a * scale_b


def _int4_inputs(d: Drawn) -> Inputs:
    b = torch.randint(256, (d.k // 2, d.n), device=DEVICE, dtype=torch.uint8)
    scales = (torch.rand(d.k // d.group, d.n, device=DEVICE) / 8 + 0.05).bfloat16()
    zeros = torch.randint(4, 12, scales.shape, device=DEVICE).bfloat16()
    return _matrix(d.m, d.k, "n"), b, scales, zeros, torch.empty(d.m, d.n, device=DEVICE, dtype=torch.bfloat16)


def _call_int4(d: Drawn, a: Tensor, b: Tensor, scales: Tensor, zeros: Tensor, out: Tensor, config: int = -1) -> Tensor:
    return torch.ops.tk.int4_mm.out(a, b, scales, zeros, d.group, None, 0, None, -1, config, 0, out=out)


def _int4_reference(a: Tensor, b: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    group = 2 * b.shape[0] // scales.shape[0]
    values = torch.stack((b & 15, b >> 4), 1).reshape(-1, b.shape[1]).float()
    weight = (values - zeros.float().repeat_interleave(group, 0)) * scales.float().repeat_interleave(group, 0)
    return a @ weight.bfloat16()


@dataclass(frozen=True)
class Op:
    """The names of a problem's sizes; how problems are drawn, made and called; what torch makes of the same inputs."""

    sizes: tuple[str, ...]
    draw: Callable[[random.Random], Drawn]
    inputs: Callable[[Drawn], Inputs]
    call: Callable[..., Tensor]
    reference: Callable[..., Tensor]


_MNK = ("m", "n", "k")
OPS: Mapping[str, Op] = {
    "bmm": Op(("batch", *_MNK), _bmm, _bmm_inputs, _call_bmm, torch.bmm),
    "mm_plus_mm": Op(
        (*_MNK, "k2"),
        _mm_plus_mm,
        _mm_plus_mm_inputs,
        _call_mm_plus_mm,
        lambda a, b, c, d: torch.addmm(torch.mm(a, b), c, d),
    ),
    "scaled_mm": Op(_MNK, _scaled_mm, _scaled_mm_inputs, _call_scaled_mm, _scaled_reference),
    "int4_mm": Op(_MNK, _int4_mm, _int4_inputs, _call_int4, _int4_reference),
}


# --- Measuring ---


def measure(drawn: Drawn) -> Result:
    """Times every config that fits."""
    op = OPS[drawn.op]
    first = op.inputs(drawn)
    moved = sum(x.numel() * x.element_size() for x in first)
    sets = [first, *(op.inputs(drawn) for _ in range(timing.copies_to_rotate(moved, most=8) - 1))]
    call = partial(op.call, drawn)
    described = describe(call, *first)
    if described is None:
        raise ValueError(f"{drawn}: nothing is launched for it")
    return time_configs(Result(drawn, described.problem), sets, call, op.reference(*first[:-1]))


def is_meant(what: Sequence[str]) -> bool:
    """Whether these arguments of ``tk tune`` name ops that are measured here."""
    return any(text in OPS for text in what)


def run(args: argparse.Namespace) -> int:
    """The exit status: 1 when a problem or a config failed. Raises ValueError for what is no size of each op."""
    from tk.tune.command import measure_all

    ops, sizes = ([text for text in args.what if (text in OPS) == is_op] for is_op in (True, False))
    tasks = {op: [d for text in sizes for d in given(op, text)] for op in ops}
    if args.dtype != ["bf16"]:
        raise ValueError(f"tk tune: --dtype: {', '.join(OPS)} are tuned in bf16, or float8, alone")
    if not torch.cuda.is_available():
        raise errors.UnsupportedError("tk tune measures on a CUDA GPU, and torch sees none")
    torch.manual_seed(args.seed)
    complete = True
    for op, wanted in tasks.items():
        wanted += draw(op, args.random or (0 if sizes else DRAWN), args.seed)
        results = measure_all(wanted, args.seconds, measure)
        complete = complete and len(results) == len(wanted) and not any(r.failures for r in results)
        kept = [r for r in results if r.measured]
        print(summary(op, kept))
        if kept:
            print("written:", write(args.write, op, kept))
    return int(not complete)


def summary(op: str, results: Sequence[Result]) -> str:
    """What today's choice costs against the best config."""
    ratios = [chosen_us(r) / r.measured[0].us for r in results]
    mean = math.exp(sum(map(math.log, ratios)) / max(len(ratios), 1))
    return f"{op}: {len(ratios)} problems; the config that is predicted to be the fastest takes {mean:.3f} of the best"


def chosen_us(result: Result) -> float:
    """Of the config that is predicted to be the fastest."""
    return min(result.measured, key=lambda m: m.predicted_us).us


def write(folder: Path | None, op: str, results: Sequence[Result]) -> Path:
    """Timings of an op into a folder of tables, or pins into the user's file."""
    made = record(results[0].problem)
    if folder is not None:
        path = folder / f"{op}_timings.json"
        timings.write(path, results, made)
        return path
    path = tk.tune.user_file(torch.cuda.current_device())
    pins.write(path, [pins.entry_of(r.problem, r.measured[0].config, r.measured[0].us) for r in results], made)
    return path
