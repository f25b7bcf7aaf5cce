"""``tk tune softmax 32768x4096``: the configs of generated ops, by coordinate descent.

From the config that is predicted to be the fastest (or that was measured before) one parameter at a time is walked
(``tk.tune.descent``), for every choice of dtypes and flags that the op has kernels for. What was fastest is pinned to
exactly these sizes, in the user's file, which tk reads when a GPU is first used and when a pack is loaded; or with
``--write kernels/tuned/sm90`` in a table for each of the package's ops, which its builds read.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tk import _cache, _packs, capi, errors, timing
from tk._table import table
from tk.generated import inputs, register
from tk.generated.inputs import Example
from tk.tune import files, pins
from tk.tune.descent import Descent, descend
from tk.tune.ops import Prepared, prepare
from tk.tune.record import record

# Rows and columns: long rows and short, few and many, and odd ones.
SHAPES = ((32768, 4096), (131072, 1024), (4096, 32768), (16, 8192), (71224, 2593), (512, 262144))
LEADING = 3  # dimensions in front of the declared ones, as the core sees them
HEADER = ("op", "chosen", "us", "best", "us", "gain", "timed")

Compare = Callable[[Sequence[str]], dict[str, float]]


@dataclass
class Tuned:
    """A call, tuned. start: the config that ran before. failures: config -> what went wrong."""

    example: Example
    problem: capi.Problem
    start: str
    found: Descent
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def us(self) -> float:
        return self.found.times[self.found.config]

    @property
    def gain(self) -> float:
        """How many times as fast as what ran before."""
        return self.found.times[self.start] / self.us


def is_meant(what: Sequence[str]) -> bool:
    """Whether these arguments of ``tk tune`` name generated ops."""
    return any(text == "all" or register.find(text) is not None for text in what)


def run(args: argparse.Namespace) -> int:
    """The exit status: 1 when a call or a config failed."""
    wanted = list(examples(args.what, args.dtype))
    if not torch.cuda.is_available():
        raise errors.UnsupportedError("tk tune measures on a CUDA GPU, and torch sees none")
    torch.manual_seed(args.seed)
    tuned, complete = tune_all(wanted, args.seconds)
    print(report(tuned))
    if tuned:
        print("written:", *(write_tables(args.write, tuned) if args.write else write_user_file(tuned)))
    return int(not complete or any(t.failures for t in tuned))


def examples(what: Sequence[str], dtypes: Sequence[str]) -> Iterator[Example]:
    """Every op at every shape, in all dtypes and flags. Of ``all``, those that have the shape and dtype.

    Raises ValueError for an op, shape or dtype that there is not."""
    for example in inputs.asked_for(what, dtypes, SHAPES):
        for kind, flags in inputs.kinds(example.op):
            if kind == example.dtypes:
                yield replace(example, flags=flags)


def tune_all(wanted: Sequence[Example], seconds: float = math.inf) -> tuple[list[Tuned], bool]:
    """One after the other, printed as they come, and whether that was all. What fails costs no other; what does not
    begin within `seconds` is left out, and said."""
    tuned: list[Tuned] = []
    end = time.monotonic() + seconds
    for i, example in enumerate(wanted):
        if time.monotonic() > end:
            print(f"out of time: {len(wanted) - i} of {len(wanted)} calls not measured", flush=True)
            return tuned, False
        try:
            found = tune(prepare(example))
        except (RuntimeError, ValueError) as error:
            print(f"FAILED {example}: {type(error).__name__}: {error}", flush=True)
            continue
        tuned.append(found)
        print(f"{example}: {' -> '.join(found.found.steps)}, {found.us:.2f} us, {found.gain:.2f} times", flush=True)
        for config, text in found.failures.items():
            print(f"FAILED {example} {config}: {text}", flush=True)
        torch.cuda.empty_cache()
    return tuned, len(tuned) == len(wanted)


def tune(prepared: Prepared) -> Tuned:
    """The fastest config that a walk from the chosen one finds. Raises ValueError where that cannot be timed."""
    op = prepared.example.op.name
    fitting = prepared.fitting()
    params = {name: p for name, p in _packs.config_params(op).items() if name in fitting}
    start = capi.choose(prepared.problem).config_name
    found = Tuned(prepared.example, prepared.problem, start, Descent(start, [start]))
    found.found = descend(start, params, timer(prepared, fitting, found.failures))
    return found


def timer(prepared: Prepared, fitting: dict[str, capi.Candidate], failures: dict[str, str]) -> Compare:
    """Times configs in turns, each checked before. failures: gets those that are wrong or cannot run."""
    captures: dict[str, timing.Capture] = {}

    def compare(names: Sequence[str]) -> dict[str, float]:
        for name in names:
            if name in captures or name in failures:
                continue
            try:
                captures[name] = prepared.capture(fitting[name])
            except (RuntimeError, ValueError) as error:
                failures[name] = f"{type(error).__name__}: {error}"
        at_hand = {name: captures[name] for name in names if name in captures}
        return {name: t.us for name, t in timing.device_times(at_hand, rounds=5, ms=3.0, warm_ms=2.0).items()}

    return compare


def report(tuned: Sequence[Tuned]) -> str:
    def cells(t: Tuned) -> tuple[object, ...]:
        before, after = t.found.times[t.start], t.us
        return (str(t.example), t.start, before, t.found.config, after, t.gain, len(t.found.times))

    return table(HEADER, map(cells, tuned))


def write_user_file(tuned: Sequence[Tuned]) -> list[Path]:
    """Pins of the calls measured, beside what the user's file holds of others; the files written."""
    path = pins.user_file(torch.cuda.current_device())
    entries = [pins.entry_of(t.problem, t.found.config, t.us) for t in tuned]
    pins.write(path, entries, record(tuned[0].problem))
    return [path]


def write_tables(folder: Path, tuned: Sequence[Tuned]) -> list[Path]:
    """The same as tables that a build puts into its packs (kernels/tuned_tables.py), one file for each op; returns
    the files."""
    found = []
    for name in dict.fromkeys(t.example.op.name for t in tuned):
        mine = [t for t in tuned if t.example.op.name == name]
        path = folder / f"{name}.json"
        old = json.loads(path.read_text())["pins"] if path.is_file() else []
        new = [{**bucket(t.example, t.problem), "config": t.found.config} for t in mine]
        _cache.write_json(path, {**record(mine[0].problem), "pins": files.merge(old, new)})
        found.append(path)
    return found


def bucket(example: Example, problem: capi.Problem) -> dict[str, Any]:
    """What names a call in such a table: the op's graph, and its first four sizes (``Op.dims``)."""
    graphs = list(inputs.kinds(example.op))
    sizes: dict[str, int] = {}
    for spec, t in zip(example.signature.tensors.values(), problem.tensors, strict=False):
        assert t is not None
        if spec.leading:
            sizes.setdefault("...", math.prod(t.sizes[:LEADING]))
        declared = t.sizes[LEADING:] if spec.leading else t.sizes
        sizes |= {s: n for s, n in zip(spec.sizes, declared, strict=True) if isinstance(s, str) and s not in sizes}
    graph = graphs.index((dict(example.dtypes), dict(example.flags)))
    return {"key": {"graph": graph}, "dims": list(sizes.values())[:4]}
