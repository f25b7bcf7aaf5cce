"""The command ``tk tune``."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import tk.tune
from tk import errors
from tk.cli._shown import dtype_name
from tk.generated import register
from tk.tune import generated, pins, products, timings
from tk.tune.measure import DTYPES, PRECISIONS, Result, Task, cover, measure_all
from tk.tune.record import record

# Llama-3 8B and 70B, K x N: where tuning starts.
WEIGHTS = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096),
           (8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192))  # fmt: skip
ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384)
SQUARES = (512, 1024, 2048, 4096, 8192)
ORDERS = ("nn", "nt", "tn", "tt")
# Options that generated ops have no use for, and their defaults.
PRODUCTS_ONLY: Mapping[str, Any] = {
    "order": ["nn", "nt"], "precision": ["tf32"], "static_weights": False, "slowdown": 1.02, "random": 0,
}  # fmt: skip


def default_sizes(random_count: int, seed: int) -> list[tuple[int, int, int]]:
    """M, N, K: those of Llama-3, squares, and `random_count` log-uniform neighbours, since what counts is sizes that
    nobody listed."""
    sizes = [(m, n, k) for k, n in WEIGHTS for m in ROWS] + [(s, s, s) for s in SQUARES]
    rng = random.Random(seed)

    def draw(low: int, high: int, step: int) -> int:
        return max(1, round(low * (high / low) ** rng.random() / step)) * step

    for _ in range(random_count):
        n, k = (draw(256, 16384, rng.choice((8, 16, 64, 128))) for _ in range(2))
        sizes.append((draw(1, 16384, 1), n, k))
    return sizes


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """Those with the same weights together, so that these are made once. Raises ValueError."""
    sizes = [sizes_of(text) for text in args.what] or default_sizes(args.random, args.seed)
    if other := set(args.dtype) - set(DTYPES):
        raise ValueError(f"tk tune: products are of {', '.join(DTYPES)}, not {', '.join(sorted(other))}")
    found = [
        Task(m, n, k, dtype, order, precision, args.static_weights)
        for dtype in args.dtype
        for order in args.order
        for precision in (args.precision if dtype == "fp32" else PRECISIONS[:1])
        for m, n, k in sizes
    ]
    # In random order, so that whatever there is time for is a fair sample.
    weights = sorted({(t.dtype, t.precision, t.order, t.n, t.k) for t in found})
    random.Random(args.seed).shuffle(weights)
    return sorted(dict.fromkeys(found), key=lambda t: (weights.index((t.dtype, t.precision, t.order, t.n, t.k)), t.m))


def run(args: argparse.Namespace) -> int:
    """The exit status: 1 when a product, an op or a config failed."""
    if generated.is_meant(args.what):
        refuse_products_options(args, "of matrix products alone, not of generated ops")
        return generated.run(args)
    if products.is_meant(args.what):
        refuse_products_options(args, f"not of {', '.join(products.OPS)}", accepted=("random",))
        return products.run(args)
    if not torch.cuda.is_available():
        raise errors.UnsupportedError("tk tune measures on a CUDA GPU, and torch sees none")
    torch.manual_seed(args.seed)
    tasks = tasks_of(args)
    results = measure_all(tasks, args.seconds)
    times = {r.task: {m.config: m.us for m in r.measured} for r in results}
    choices = cover(times, args.slowdown)
    print(summary(times, choices))
    kept = [r for r in results if r.task in choices]
    if args.write is None:
        path = pins.user_file(torch.cuda.current_device())
        write_user_file(path, kept, choices, record())
    else:
        path = args.write
        timings.write(path, kept, record())
    print("written:", path)
    return int(len(results) < len(tasks) or any(r.failures for r in results))


def refuse_products_options(args: argparse.Namespace, why: str, accepted: Sequence[str] = ()) -> None:
    given = [name for name, default in PRODUCTS_ONLY.items() if name not in accepted and getattr(args, name) != default]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"tk tune: {options}: {why}")


def write_user_file(
    path: Path, results: Sequence[Result], choices: Mapping[Task, str], record: Mapping[str, Any]
) -> None:
    """Pins of the problems measured and of those that cost the same."""
    entries = []
    for r in results:
        config = choices[r.task]
        us = next(m.us for m in r.measured if m.config == config)
        entries += [pins.entry_of(problem, config, us) for problem in timings.twins(r.problem, config)]
    pins.write(path, entries, record)


def summary(times: Mapping[Task, Mapping[str, float]], choices: Mapping[Task, str]) -> str:
    """Which configs are kept, for how many problems, and what they cost at worst."""
    uses = {config: [t for t, c in choices.items() if c == config] for config in choices.values()}
    lines = ["", f"{len(choices)} problems; {len(uses)} configs are enough:"]
    for config, served in sorted(uses.items(), key=lambda item: -len(item[1])):
        worst = max(times[t][config] / min(times[t].values()) for t in served)
        lines.append(f"  {config:28} {len(served):4} problems, at most {100 * (worst - 1):.1f} % over the best")
    unused = sorted({c for row in times.values() for c in row} - set(uses))
    return "\n".join([*lines, f"not needed: {', '.join(unused) or 'none'}"])


# --- Arguments ---


def sizes_of(text: str) -> tuple[int, int, int]:
    """M, N and K of "16x4096x4096". Raises ValueError."""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(p.isdecimal() and int(p) > 0 for p in parts):
        known = ", ".join(register.names()) or "none"
        raise ValueError(f"tk tune: {text!r} is neither MxNxK, a product, nor a generated op; there are {known}")
    m, n, k = map(int, parts)
    return m, n, k


def list_of(accepted: Sequence[str]) -> Callable[[str], list[str]]:
    """Reads "a,b"."""

    def read(text: str) -> list[str]:
        values = text.split(",")
        if wrong := [v for v in values if v not in accepted]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(accepted)}")
        return values

    return read


def list_of_dtypes(text: str) -> list[str]:
    """Reads "bf16,torch.float16"."""
    return [dtype_name(part) for part in text.split(",")]


def slowdown(text: str) -> float:
    """Reads a slowdown, which is at least 1."""
    value = float(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value:g} is below 1: nothing is faster than the best")
    return value


def add_parser(subparsers: Any) -> None:
    """Adds ``tk tune``."""
    parser = subparsers.add_parser(
        "tune",
        description=tk.tune.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "what",
        metavar="MxNxK|OP|SHAPE",
        nargs="*",
        help=f"products (default: those of Llama-3); or {', '.join(products.OPS)}, at random or given sizes; or "
        "generated ops, or all, and shapes of their largest tensor",
    )
    add(
        "--dtype",
        type=list_of_dtypes,
        default=["bf16"],
        help=f"of products {', '.join(DTYPES)} (bf16, pinned for fp16 too); of ops also others of their signatures",
    )
    add(
        "--order",
        type=list_of(ORDERS),
        default=PRODUCTS_ONLY["order"],
        help="of a and b: n row-major, t column-major (nn,nt)",
    )
    add("--precision", type=list_of(PRECISIONS), default=PRODUCTS_ONLY["precision"], help="of fp32: tf32, ieee (tf32)")
    add("--static-weights", action="store_true", help="for that mode, which has pins of its own for few rows")
    add(
        "--slowdown",
        type=slowdown,
        default=PRODUCTS_ONLY["slowdown"],
        help="what a kept config may lose to the best (1.02)",
    )
    add("--random", type=int, default=0, help="so many random sizes, beside the default ones")
    add(
        "--seconds",
        type=float,
        default=math.inf,
        help="begin no product or op after so long (of OP: each)",
    )
    add("--seed", type=int, default=0, help="of the random sizes and inputs")
    add(
        "--write",
        type=Path,
        metavar="FILE",
        help="timings of kernels/tuned/ instead of the user's file; of ops a folder of tables, kernels/tuned/sm90",
    )
    parser.set_defaults(run=run)
