"""``tk tune OP``: every config of an op that says how problems of it are drawn, at such sizes or at given ones.

The choice of these ops goes by predicted times alone, since nobody calls them with sizes that can be listed. What
counts here is therefore that all configs are timed for many different problems, from which tools/fit_cost.py fits the
weights of those times: ``--write kernels/tuned/sm90`` adds to a file of timings for each op. Without it the fastest are
pinned for this machine.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tk import errors, timing
from tk.heuristics.problem import describe
from tk.ops._register import RECORDS, Tuning
from tk.tune import pins, timings
from tk.tune.measure import Result, measure_all, time_configs
from tk.tune.record import record

DEVICE = "cuda"
DRAWN = 200  # problems of an op, when none are asked for
MOST_FLOPS = 1.5e12  # of a problem: 2 ms
MOST_BYTES = 2 << 30

OPS: Mapping[str, Tuning] = {name: record.tuning for name, record in RECORDS.items() if record.tuning is not None}


@dataclass(frozen=True)
class Drawn:
    """One problem. sizes: by name. order: of both operands of a product, "n" row-major, "t" column-major. fast: the
    accumulation of float8. group: of the scales of four-bit values."""

    op: str
    sizes: tuple[tuple[str, int], ...]
    order: str = "nt"
    fast: bool | None = None
    group: int = 0

    def __getattr__(self, name: str) -> int:
        try:
            return dict(vars(self)["sizes"])[name]
        except KeyError:
            raise AttributeError(name) from None

    def __str__(self) -> str:
        sizes = "x".join(str(n) for _, n in self.sizes)
        how = f"group {self.group}" if self.group else self.order
        return f"{self.op} {sizes} {how if self.fast is None else 'fast' if self.fast else 'slow'}"

    @property
    def inner(self) -> int:
        """What is multiplied for an element of the result."""
        return self.k + dict(self.sizes).get("k2", 0)

    @property
    def flops(self) -> int:
        return 2 * self._batch * self.m * self.n * self.inner

    @property
    def bytes(self) -> int:
        """The bytes of its operands and result, at 2 an element."""
        return 2 * self._batch * (self.m * self.n + (self.m + self.n) * self.inner)

    @property
    def _batch(self) -> int:
        return dict(self.sizes).get("batch", 1)

    # --- What its inputs are made of ---

    @property
    def device(self) -> str:
        return DEVICE

    def matrix(self, rows: int, cols: int, order: str = "n", *batch: int) -> Tensor:
        x = torch.randn(*batch, *((rows, cols) if order == "n" else (cols, rows)), device=DEVICE, dtype=torch.bfloat16)
        return x if order == "n" else x.mT

    def empty(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, device=DEVICE, dtype=torch.bfloat16)


# --- Which are drawn ---


class Draws(random.Random):
    """What an op draws the sizes of a problem with."""

    def size(self, low: int, high: int, step: int) -> int:
        """Log-uniform."""
        return max(step, round(low * (high / low) ** self.random() / step) * step)

    def step(self) -> int:
        """What sizes are multiples of: of 8 TMA takes all, and from 64 on pitches are whole cache lines."""
        return self.choice((8, 16, 64, 64, 128))

    def order(self) -> str:
        return self.choice(("nn", "nt"))


def draw(op: str, count: int, seed: int) -> list[Drawn]:
    """Log-uniform sizes, none too large to be timed often; they depend on op and seed alone."""
    draws = Draws(f"{op} {seed}")
    found: dict[Drawn, None] = {}
    while len(found) < count:
        sizes, fields = OPS[op].draw(draws)
        one = Drawn(op, tuple(zip(OPS[op].sizes, sizes, strict=True)), **fields)
        if one.flops <= MOST_FLOPS and one.bytes <= MOST_BYTES:
            found[one] = None
    return list(found)


def given(op: str, text: str) -> list[Drawn]:
    """The problems of sizes like "64x512x512x512", in every way that is drawn. Raises ValueError."""
    names = OPS[op].sizes
    parts = text.lower().split("x")
    if len(parts) != len(names) or not all(p.isdecimal() and int(p) > 0 for p in parts):
        raise ValueError(f"tk tune: {text!r} is no size of {op}, which is {'x'.join(names)}")
    sizes = tuple(zip(names, map(int, parts), strict=True))
    return [Drawn(op, sizes, **fields) for fields in OPS[op].ways]


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
    """The time of the config that is predicted to be the fastest."""
    return min(result.measured, key=lambda m: m.predicted_us).us


def write(folder: Path | None, op: str, results: Sequence[Result]) -> Path:
    """Timings of an op into a folder of tables, or pins into the user's file."""
    made = record(results[0].problem)
    if folder is not None:
        path = folder / f"{op}_timings.json"
        timings.write(path, results, made)
        return path
    path = pins.user_file(torch.cuda.current_device())
    pins.write(path, [pins.entry_of(r.problem, r.measured[0].config, r.measured[0].us) for r in results], made)
    return path
