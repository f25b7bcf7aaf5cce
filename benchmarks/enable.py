"""What ``tk.enable`` costs the host: microseconds of a call that tk serves, and of one that is left to ATen, beside
ATen's own, forward and backward.

    python -m benchmarks.enable [--device cpu] [--rounds 7]

The three take turns, round by round, on tensors so small that the host's time is all there is; the medians of the
rounds are printed. On the CPU tk computes with ATen, so a served call costs one call of ATen's more than on CUDA, and
of the ops that come from packs Python as well.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F

import tk
from tk._table import table
from tk.dropin import beneath

Call = Callable[[], object]


def calls_on(device: str) -> dict[str, Call]:
    dtype = torch.bfloat16
    a, x = torch.randn(64, 64, device=device, dtype=dtype), torch.randn(16, 64, device=device, dtype=dtype)
    batch = torch.randn(2, 64, 64, device=device, dtype=dtype)
    leaf, x_leaf = a.clone().requires_grad_(), x.clone().requires_grad_()
    return {
        "mm": lambda: torch.mm(x, a),
        "mm, forward and backward": lambda: torch.mm(x_leaf, leaf).backward(x),
        "bmm": lambda: torch.bmm(batch, batch),
        "gelu": lambda: F.gelu(x),
        "gelu, forward and backward": lambda: F.gelu(x_leaf).backward(x),
        "silu": lambda: F.silu(x),
        "silu, forward and backward": lambda: F.silu(x_leaf).backward(x),
        "softmax": lambda: F.softmax(x, -1),
        "log_softmax": lambda: F.log_softmax(x, -1),
        "log_softmax, forward and backward": lambda: F.log_softmax(x_leaf, -1).backward(x),
    }


@contextmanager
def _left(device: str) -> Iterator[tk.dropin.Enabled]:
    """As if every rule said so."""
    rule = beneath._is_served
    beneath._is_served = lambda *_: False
    try:
        with tk.enable(device=device) as handle:
            yield handle
    finally:
        beneath._is_served = rule


def microseconds(call: Call, device: str, count: int) -> float:
    """The shortest of five turns."""
    turns = []
    for _ in range(5):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        turns.append((time.perf_counter() - begin) / count * 1e6)
    return min(turns)


def measure(call: Call, device: str, rounds: int, count: int) -> dict[str, float]:
    found: dict[str, list[float]] = {"ATen": [], "served": [], "left": []}
    states = {
        "ATen": nullcontext,
        "served": lambda: tk.enable(device=device, only_faster=False),
        "left": lambda: _left(device),
    }
    for _ in range(rounds):
        for name, state in states.items():
            with state() as handle:
                call()
                if handle is not None and not any(x[name == "left"] for x in handle.calls.values()):
                    raise RuntimeError(f"no call was {name}: {handle}")
                found[name].append(microseconds(call, device, count))
    return {name: statistics.median(times) for name, times in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.enable", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", type=int, default=1000, help="calls in a row")
    args = parser.parse_args(argv)
    if args.device == "cpu":
        torch.set_num_threads(1)
    rows = []
    for name, call in calls_on(args.device).items():
        us = measure(call, args.device, args.rounds, args.count)
        rows.append((name, us["ATen"], us["served"], us["served"] - us["ATen"], us["left"], us["left"] - us["ATen"]))
    print(f"host time, µs a call; torch {torch.__version__}, {args.device}")
    print(table(("call", "ATen's own", "served", "more", "left", "more"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
