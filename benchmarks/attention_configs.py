"""Every config of attention's own ops that fits a call, each checked and timed.

    python -m benchmarks.attention_configs backward --seconds 200 --out timings.json
    python -m benchmarks.attention_configs decode --pack build/candidates.tkpack --out timings.json

Of a row: the configs, the fastest first, in TFLOP/s (masked scores not counted) or GB/s, and which would be chosen; the
backward rows beside cuDNN. `pinned` and `config_of` are for tests, too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tk
from benchmarks import attention
from benchmarks.attention import Inputs, Task
from tk import capi, timing
from tk.flex import own_ops
from tk.flex.tracing.trace import Traced
from tk.heuristics.problem import describe


def candidate_name(traced: Traced, suffix: str = "") -> str:
    """Of the ops of tools/attention_candidates.py, which do what those of the package do."""
    return f"flex_try{traced.fingerprint[:13]}{suffix}"


# --- Which kernel an op takes ---


def fitting(own: Any, args: tuple[Any, ...]) -> list[capi.Candidate]:
    """What may run a call of an attention op, the one that is predicted to be the fastest first."""
    described = describe(own, *args)
    if described is None:
        return []
    rows = [c for c in capi.candidates(described.problem) if c.fits]
    return sorted((c for c in rows if capi.choose(described.problem, c.config).variant == c.variant),
                  key=lambda c: c.cost)  # fmt: skip


@contextmanager
def _wrapped(suffix: str, call: Callable[..., Any]) -> Iterator[None]:
    """Ops whose name ends in `suffix` ("": forward) are called by ``call(op, *args)``."""
    original = own_ops.find

    def found(traced: Traced, tensors: Any, floats: Any, ints: Any, of: str = "", without: Any = ()) -> Any:
        own = original(traced, tensors, floats, ints, of, without)
        return own._replace(op=partial(call, own.op)) if of == suffix else own

    own_ops.find = found
    try:
        yield
    finally:
        own_ops.find = original


@contextmanager
def pinned(suffix: str, which: str) -> Iterator[None]:
    """In the block: kernels whose name ends in `which`, or the config of that name. A call that none of these takes is
    a ValueError."""

    def call(op: Any, *args: Any) -> Any:
        for c in fitting(op, args):
            if c.kernel_name.endswith(which) or c.config_name == which:
                return op(*args, config=c.config)
        raise ValueError(f"{op} has no {which} for this call")

    with _wrapped(suffix, call):
        yield


@contextmanager
def config_of(suffix: str) -> Iterator[list[str]]:
    """The names of the configs that the block's calls take."""
    found: list[str] = []

    def call(op: Any, *args: Any) -> Any:
        if (described := describe(op, *args)) is not None:
            found.append(capi.choose(described.problem).config_name)
        return op(*args)

    with _wrapped(suffix, call):
        yield found


# --- Rows ---


def tasks(kind: str) -> Iterator[Task]:
    """What is worth most first: time may be short."""
    if kind == "backward":
        for length in (4096, 8192, 16384, 2048, 1024, 512):
            for d in (128, 64):
                for mask in ("causal", "full"):
                    yield Task(kind, 16384 // length, 2048 // d, 2048 // d, length, d, mask)
        for mask, score in (("window", ""), ("document", ""), ("causal", "alibi"), ("causal", "soft_cap")):
            for d in (128, 64):
                yield Task(kind, 2, 2048 // d, 2048 // d, 8192, d, mask, score)
        for heads, kv_heads in ((16, 4), (32, 8)):
            yield Task(kind, 4, heads, kv_heads, 4096, 128, "causal")
    elif kind == "decode":
        yield from (t for t in attention.listed() if t.kind == "decode")
    else:
        yield from (t for t in attention.listed() if t.kind == "forward" and t.head_dim <= 128)


def configs_of(task: Task, x: Inputs, way: Callable[[Inputs], Tensor]) -> tuple[list[str], str]:
    """Of the op that the task times: what fits, and what would be chosen."""
    found: list[capi.Candidate] = []
    suffix = "_backward" if task.kind == "backward" else ""

    def call(op: Any, *args: Any) -> Any:
        found[:] = fitting(op, args)
        return op(*args)

    with _wrapped(suffix, call):
        out = way(x)
        if suffix:
            torch.autograd.grad(out, (x.q, x.k, x.v), x.grad)
    return list(dict.fromkeys(c.config_name for c in found)), found[0].config_name if found else ""


def measure(task: Task) -> dict[str, Any]:
    way = partial(attention.ours, task)
    copies = timing.copies_to_rotate(3 * task.kv_bytes, most=8)
    sets = [Inputs.random(task) for _ in range(copies)]
    names, chosen = configs_of(task, sets[0], way)
    suffix = "_backward" if task.kind == "backward" else ""
    first: list[Tensor] = []
    captures, calls, failures = {}, {}, {}
    for name in names:
        try:
            with pinned(suffix, name):
                calls[name] = [_call(task, way, x) for x in sets]
                found = calls[name][0]()
                found = [found] if isinstance(found, Tensor) else list(found)
                if trouble := _differ(found, first):
                    raise RuntimeError(trouble)
                first = first or found
                captures[name] = timing.capture(calls[name])
        except (RuntimeError, ValueError) as error:
            failures[name] = str(error)[:200]
    if task.is_plain and task.kind != "decode":
        calls["cudnn"] = [_call(task, attention.backends(task)["cudnn"], x) for x in sets]
        captures["cudnn"] = timing.capture(calls["cudnn"])
    times = {name: t.us for name, t in timing.device_times(captures, rounds=3, ms=4, warm_ms=4).items()}
    rate = task.kv_bytes * 1e-3 if task.kind == "decode" else task.flops * 1e-6
    best = dict(sorted(times.items(), key=lambda item: item[1]))
    return {"task": task.label, "chosen": chosen, "us": best, "rate": {n: round(rate / t, 1) for n, t in best.items()},
            "failures": failures}  # fmt: skip


def _call(task: Task, way: Callable[[Inputs], Tensor], x: Inputs) -> Callable[[], Any]:
    return attention.with_backward(way, x) if task.kind == "backward" else partial(way, x)


def _differ(found: list[Tensor], first: list[Tensor]) -> str:
    """Of two configs' results: more than rounding makes them differ."""
    for i, (a, b) in enumerate(zip(found, first, strict=False)):
        away, largest = (a.float() - b.float()).abs().max().item(), b.float().abs().max().item()
        if not away <= 0.03 * largest + 1e-3:
            return f"result {i} is {away:.3g} away from the first config's, of {largest:.3g}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("backward", "decode", "forward"))
    parser.add_argument("--pack", type=Path, help="of tools/attention_candidates.py, whose ops are timed instead")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.pack:
        tk.load_pack(args.pack)
        own_ops.op_name = candidate_name
    start, rows = time.monotonic(), []
    for task in tasks(args.kind):
        if args.pack and (task.score or task.mask not in ("full", "causal")):
            continue
        if time.monotonic() - start > args.seconds:
            print(f"out of time before {task.label}")
            break
        rows.append(measure(task))
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
        if args.out:
            args.out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}))


if __name__ == "__main__":
    main()
