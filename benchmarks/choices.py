"""What the choice of a config costs: drawn calls of generated ops, with every config that takes them.

    python -m benchmarks.choices --seconds 300 [--seed N] --out choices.jsonl

Of every launch that a drawn call (``benchmarks anywhere``) makes, each config's predicted and measured time, in µs, in
a line of JSON. At the end: how much longer the chosen configs take than the best ones, as a geometric mean, and how far
off the predictions are. The constants of codegen/scheduling/cost.py were fitted to such lines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import anywhere, calls
from tk import capi, timing
from tk.heuristics import described
from tk.heuristics.problem import describe

FAR = 12  # a config that is predicted to take so many times as long as the chosen one is not timed
LONG = 1.3  # times the best config's time: the choices that take longer are counted

Line = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    seed = secrets.randbits(31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    end, ops, found = time.monotonic() + options.seconds, calls.table(), list[Line]()
    with options.out.open("w") as out:
        for index in itertools.count():
            if time.monotonic() > end:
                break
            draw = calls.drawn(seed, index, ops)
            try:
                lines = list(measured(ops[draw.op], draw))
            except Exception as error:  # whatever it is: the other draws are worth having
                print(f"{draw}: FAILED {type(error).__name__}: {error}", flush=True)
                anywhere.settle()
                continue
            out.writelines(json.dumps(line) + "\n" for line in lines)
            out.flush()
            found += lines
    print(summary(found))


def measured(op: calls.Op, draw: calls.Draw) -> Iterator[Line]:
    """A line for each op of tk's that the call runs and that has configs, of the last launch that it describes."""
    made: list[tuple[Any, list[Any]]] = []
    with torch.autograd.set_multithreading_enabled(False):
        call = anywhere.prepared(op.ours(), draw, draw.make("cuda"))
        with described.Recording(lambda o, *a, **k: made.append((o, _arguments(o, a, k)))):
            call()
    for o, args in made:
        names = [a.name for a in o._schema.arguments]
        if "config" not in names or (found := describe(o, *args)) is None:
            continue
        chosen, times = capi.choose(found.problem), dict[str, tuple[float, float]]()
        for c in capi.candidates(found.problem):
            if c.fits and c.cost <= FAR * chosen.cost and c.config_name not in times:
                with_config = [c.config if n == "config" else a for n, a in zip(names, args, strict=True)]
                times[c.config_name] = c.cost * 1e-6, _microseconds(o, with_config)
        if chosen.config_name in times:
            yield anywhere.line_of(draw) | {"launch": str(o), "chosen": chosen.config_name, "configs": times}


def _arguments(op: Any, args: Sequence[Any], named: dict[str, Any]) -> list[Any]:
    """All of them, with their defaults."""
    schema = op._schema.arguments
    return [*args, *(named.get(a.name, a.default_value) for a in schema[len(args) :])]


def _microseconds(op: Any, args: Sequence[Any]) -> float:
    capture = timing.capture([lambda: op(*args)], at_least_us=200)
    return timing.device_times({"call": capture}, rounds=3, ms=1.0)["call"].us


def summary(lines: Sequence[Line]) -> str:
    losses, off = list[float](), list[float]()
    for line in lines:
        best = min(us for _, us in line["configs"].values())
        losses.append(line["configs"][line["chosen"]][1] / best)
        off += [abs(math.log(predicted / us)) for predicted, us in line["configs"].values()]
    if not losses:
        return "no launch was timed"
    mean = math.exp(sum(map(math.log, losses)) / len(losses))
    return (
        f"{len(losses)} launches: the chosen config takes {100 * (mean - 1):.1f} % longer than the best one, "
        f"{sum(x > LONG for x in losses)} of them more than {LONG} times as long; "
        f"{100 * sum(x <= math.log(1.5) for x in off) / len(off):.0f} % of {len(off)} predictions within 1.5 times"
    )


if __name__ == "__main__":
    main()
