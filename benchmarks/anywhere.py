"""Generated ops at any size and layout: calls drawn from a fresh seed, against eager torch.

    python -m benchmarks anywhere --seconds 480 [--draws 3000] [--seed N] [--only REGEX] --out DIR
    python -m benchmarks --report DIR/anywhere.jsonl

Every draw is printed before it runs. Its result is compared with torch's, then both are timed: on the device from CUDA
graphs, and on the host. A line for each goes to ``anywhere.jsonl`` at once, so that nothing is lost when one ends the
process; the report is made of that file. A draw is found again by the seed and its number: ``--seed N --only '^#17 '``.

Lines are {"seed", "environment"} first, then of every draw {"index", "op", "dtype", "layout", "given", …}, with
"us" and "host_us" of {"torch", "tk"}, "predicted_us" and "kernels" as tk.explain has them, or with "error".
"""

from __future__ import annotations

import json
import math
import secrets
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks import accuracy, calls
from benchmarks.calls import Draw, Op
from benchmarks.report import Figure, Goal, Report, Row, append_line
from benchmarks.runner import Options
from tk import capi, timing
from tk.heuristics import described

GOAL = Goal(1.9, 0.6)
SLOW, BAD, LEAST_US = 0.8, 0.6, 20.0  # ratios below; BAD counts where torch takes LEAST_US
MOST_ROTATED = 8

# Of a result's root mean square: what two right ways to work it out may differ by.
TOLERANCE = {
    torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float8_e4m3fn: 3e-2,
}  # fmt: skip


class WrongResult(Exception):
    """Says which result is wrong, and by how much."""


class BrokenDevice(Exception):
    """A draw after which CUDA cannot be used: an illegal access, say."""


# --- A call ---


Arguments = tuple[list[Any], dict[str, Any], list[Tensor]]


def prepared(function: Callable[..., Any], draw: Draw, given: Arguments) -> Callable[[], Any]:
    """The call, or of a forward pass that is done its gradients. On CUDA that pass runs where it can be recorded."""
    args, kwargs, gradients = given
    if not draw.is_backward:
        return partial(function, *args, **kwargs)
    with _on_capture_stream():
        results = calls.differentiable(function(*args, **kwargs))
    return partial(torch.autograd.grad, results, calls.sources(args, kwargs), gradients, True)


@contextmanager
def _on_capture_stream() -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    stream = timing.capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def results_of(function: Callable[..., Any], op: Op, draw: Draw, given: Arguments) -> list[Tensor]:
    """What comes back, then what was written."""
    found = prepared(function, draw, given)()
    written = [given[0][i] for i in op.writes]
    return [x.detach() for x in tree_leaves((found, written)) if isinstance(x, Tensor)]


# --- Checking ---


def wide(x: Any) -> Any:
    """In float64, with the same strides; whether a gradient is wanted stays."""
    return tree_map_only(Tensor, _wide, x)


def _wide(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x


def check(op: Op, draw: Draw, device: str) -> None:
    """Raises WrongResult. Choices must be torch's, exactly; numbers may be off as torch's own are off from float64."""
    ours = results_of(op.ours(), op, draw, draw.make(device))
    theirs = results_of(op.exact or op.torchs, op, draw, draw.make(device))
    if len(ours) != len(theirs):
        raise WrongResult(f"{len(ours)} results, torch has {len(theirs)}")
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise WrongResult(f"result {i} is {a.dtype} {list(a.shape)}, torch's {b.dtype} {list(b.shape)}")
    if op.is_random:
        _check_moments(ours, theirs)
        return
    exact = theirs
    if any(x.is_floating_point() and x.dtype != torch.float64 for x in theirs):
        exact = results_of(op.exact or op.torchs, op, draw, wide(draw.make(device)))
    for i, (a, b, e) in enumerate(zip(ours, theirs, exact, strict=True)):
        _check_one(i, a, b, e)


def _check_one(i: int, ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
    if not ours.is_floating_point():
        if not torch.equal(ours, theirs):
            raise WrongResult(f"result {i}: {int((ours != theirs).sum())} of {ours.numel()} elements differ")
        return
    exact = exact.double()
    finite = exact[exact.isfinite()]
    size = finite.square().mean().sqrt().item() if finite.numel() else 0.0
    verdict = accuracy.judge(ours, theirs, exact, TOLERANCE[ours.dtype] * size)
    # Wider than accuracy's own: of a single drawn call torch may be lucky, most of all where results cancel.
    a, b = verdict.ours, verdict.torch
    is_near = a.mean <= 4 * b.mean + verdict.slack and a.max <= 8 * b.max + 16 * verdict.slack
    if not (is_near and math.isfinite(a.max)):
        raise WrongResult(f"result {i}: {verdict}")


def _check_moments(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Random numbers have torch's mean and deviation, as near as so many can."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.numel() < 2:
            continue
        (mean, spread), (other, deviation) = ((x.double().mean().item(), x.double().std().item()) for x in (a, b))
        room = 8 * max(spread, deviation, 1e-6) / math.sqrt(a.numel()) + 1e-2 * max(abs(other), deviation)
        if not (abs(mean - other) <= room and abs(spread - deviation) <= 4 * room):
            raise WrongResult(
                f"result {i}: mean {mean:.4g}, deviation {spread:.4g}; torch's {other:.4g}, {deviation:.4g}"
            )


# --- What would run ---


def launches(op: Op, draw: Draw, device: str, arch: str) -> tuple[list[str], float]:
    """The variants of the call, and their predicted µs in all. The call runs once."""
    call = prepared(op.ours(), draw, draw.make(device))
    found: list[Any] = []
    gpu = described.gpu(arch)
    recording = described.Recording(lambda o, *a, **k: found.extend(described.launches(gpu, o, *a, **k)))
    with torch.autograd.set_multithreading_enabled(False), recording:
        call()
    chosen = [capi.choose(d.problem, d.config) for d in found]
    return [f"{c.kernel_name} {c.config_name}" for c in chosen], sum(c.cost for c in chosen) * 1e-6


def _explained(op: Op, draw: Draw, device: str) -> tuple[list[str], float | None]:
    """What the call runs on this GPU. The call has run and is right: where it cannot be explained, that is said in the
    kernels' place, and it is timed all the same. After a CUDA error the next call of all raises it again."""
    try:
        return launches(op, draw, device, "90" if torch.cuda.get_device_capability()[0] >= 9 else "80")
    except Exception as error:
        return [f"not explained: {type(error).__name__}: {error}"], None


# --- Measuring ---


def measure(op: Op, draw: Draw, device: str = "cuda") -> dict[str, Any]:
    """Of a result that is right. Inputs that fit into L2 rotate; tk and torch take turns."""
    check(op, draw, device)
    torch.cuda.synchronize()
    kernels, predicted = _explained(op, draw, device)
    copies = timing.copies_to_rotate(draw.bytes, most=MOST_ROTATED)
    functions = {"tk": op.ours(), "torch": op.torchs}
    turns = {name: [prepared(f, draw, draw.make(device)) for _ in range(copies)] for name, f in functions.items()}
    with torch.set_grad_enabled(draw.is_backward):
        captures = {name: timing.capture(turn) for name, turn in turns.items()}
        us = {name: t.us for name, t in timing.device_times(captures, rounds=3, ms=2, warm_ms=1).items()}
        del captures
        many = max(2, min(50, int(1e4 / max(us.values()))))
        first = {name: turn[0] for name, turn in turns.items()}
        host = {name: t.us for name, t in timing.host_times(first, rounds=3, calls=many).items()}
    return {"us": us, "host_us": host, "ratio": us["torch"] / us["tk"], "predicted_us": predicted, "kernels": kernels}


def line_of(draw: Draw) -> dict[str, Any]:
    return {
        "index": draw.index,
        "op": draw.name,
        "dtype": draw.dtype,
        "layout": draw.layout,
        "given": draw.given(),
        "bytes": draw.bytes,
    }


def attempt(op: Op, draw: Draw) -> dict[str, Any]:
    """The draw's line, with what was measured or with an error. Raises BrokenDevice where CUDA has none to give."""
    print(draw, flush=True)
    try:
        return line_of(draw) | measure(op, draw)
    except Exception as error:  # whatever it is: the other draws are worth having
        text = f"{type(error).__name__}: {str(error)[:500]}"
        where = traceback.format_exc()
    try:
        settle()
    except RuntimeError:
        print(where, flush=True)
        raise BrokenDevice(f"{draw}: {text}") from None
    return line_of(draw) | {"error": text}


def settle() -> None:
    """Waits for the GPU, and sees whether it can go on. A capture that fails may leave torch's generator in it: then no
    later one takes random numbers."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.rand(1, device="cuda")


def run(options: Options, report: Report) -> None:
    seed = secrets.randbits(31) if options.seed is None else options.seed
    report.environment["seed"] = seed
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "anywhere.jsonl"
    path.write_text("")
    append_line(path, {"seed": seed, "environment": report.environment})
    print(f"seed {seed}", flush=True)
    ops, lines = calls.table(), list[dict[str, Any]]()
    for i in range(options.draws // 6 if options.quick else options.draws):
        draw = calls.drawn(seed, i, ops)
        if not options.wants(str(draw)):
            continue
        if not options.has_time():
            break
        try:
            line = attempt(ops[draw.op], draw)
        except BrokenDevice as error:
            append_line(path, line_of(draw) | {"error": str(error)})
            report.failures.append({"label": str(draw), "error": str(error)})
            print(f"CUDA is unusable after this draw, seed {seed}: {error}", flush=True)
            break
        append_line(path, line)
        lines.append(line)
        print(f"    {_said(line)}", flush=True)
        torch.cuda.empty_cache()
    add_to(report, lines)
    print(markdown(lines, report.environment), flush=True)


def _said(line: dict[str, Any]) -> str:
    if "error" in line:
        return f"FAILED {line['error']}"
    us, host, predicted = line["us"], line["host_us"], line["predicted_us"] or math.nan
    return (
        f"{line['ratio']:.3f}  torch {us['torch']:.1f} tk {us['tk']:.1f} µs (predicted {predicted:.1f}), "
        f"host {host['torch']:.1f} and {host['tk']:.1f}  {'; '.join(line['kernels'])}"
    )


# --- The report ---


def add_to(report: Report, lines: Sequence[dict[str, Any]]) -> None:
    """A group for each layout, and how many calls are slow."""
    for line in lines:
        label = label_of(line)
        if "error" in line:
            report.failures.append({"label": label, "error": line["error"]})
            continue
        group = report.group(line["layout"], f"drawn calls, {line['layout']}", "eager torch", GOAL)
        group.rows.append(Row(label, line["ratio"], line["us"]))
    timed = [line for line in lines if "error" not in line]
    if timed:
        all_of_them = Summary(timed)
        share = 100 * all_of_them.slow / len(timed)
        report.figures.append(Figure("slow", f"drawn calls below {SLOW} of torch", share, "%", 1.0))
        title = f"drawn calls below {BAD} of torch where that takes {LEAST_US:g} µs"
        report.figures.append(Figure("bad", title, all_of_them.bad, "calls", 0.0))


def label_of(line: dict[str, Any]) -> str:
    return f"#{line['index']} {line['op']} {line['layout']}: {'; '.join(line['given'])}"


class Summary:
    """Of timed calls. worst_tenth: the geometric mean of the slowest tenth, which is one call at least."""

    def __init__(self, lines: Sequence[dict[str, Any]]):
        ratios = sorted(line["ratio"] for line in lines)
        self.calls = len(ratios)
        self.geomean = _geomean(ratios)
        self.worst_tenth = _geomean(ratios[: -(-len(ratios) // 10)])
        self.worst = ratios[0]
        self.slow = sum(r < SLOW for r in ratios)
        self.bad = sum(line["ratio"] < BAD and line["us"]["torch"] >= LEAST_US for line in lines)
        self.host = _geomean([line["host_us"]["torch"] / line["host_us"]["tk"] for line in lines])
        off = [_off(line["predicted_us"], line["us"]["tk"]) for line in lines if line["predicted_us"]]
        self.predicted = 100 * sum(x <= 1.5 for x in off) / len(off) if off else math.nan

    def row(self, name: str) -> str:
        return (
            f"| {name} | {self.calls} | {self.geomean:.2f} | {self.worst_tenth:.2f} | {self.worst:.2f} | {self.slow} "
            f"| {self.bad} | {self.host:.2f} | {self.predicted:.0f} % |"
        )


def _geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def _off(predicted: float, measured: float) -> float:
    return max(predicted / measured, measured / predicted)


def markdown(lines: Sequence[dict[str, Any]], environment: dict[str, Any]) -> str:
    """All calls, by layout, by dtype and by op, the slowest op first; where they are slow; those that failed."""
    timed = [line for line in lines if "error" not in line]
    failed = [line for line in lines if "error" in line]
    names = ("gpu", "driver", "torch", "compiler", "commit", "date", "seed")
    out = [", ".join(f"{name} {environment[name]}" for name in names if name in environment)]
    out += [f"{len(timed)} calls timed, {len(failed)} failed."]
    if timed:
        for title, key in KEYS.items():
            out += _table(title, _by(timed, key), timed)
        out += ["", "host: torch's time of a call on the host over tk's. predicted: within 1.5 × of what is measured."]
        out += _table("op and layout, the slowest", _by(timed, _op_and_layout)[:MOST_CLASSES], timed)
        out += _table("last kernel, the slowest", _by(timed, _kernel)[:MOST_CLASSES], timed)
        out += ["", "The worst calls:", *_calls(_worst(timed))]
        out += ["", f"Of every op the worst, below {SLOW}:"]
        slow = [line for line in timed if line["ratio"] < SLOW]
        out += _calls([line for name, _ in _by(slow, KEYS["op"]) for line in _worst(slow, name)])
    if failed:
        out += ["", "Failed:", ""] + [f"- {label_of(line)}: {line['error']}" for line in failed]
    return "\n".join(out)


KEYS: dict[str, Callable[[dict[str, Any]], str]] = {
    "layout": itemgetter("layout"),
    "dtype": itemgetter("dtype"),
    "op": itemgetter("op"),
}
MOST_CLASSES, MOST_CALLS = 20, 10


def _op_and_layout(line: dict[str, Any]) -> str:
    return f"{line['op']}, {line['layout']}"


def _kernel(line: dict[str, Any]) -> str:
    return line["kernels"][-1] if line["kernels"] else "none of tk's"


def _table(title: str, rows: Sequence[tuple[str, Summary]], timed: Sequence[dict[str, Any]]) -> list[str]:
    slow = f"below {SLOW} | below {BAD}, torch ≥ {LEAST_US:g} µs"
    out = ["", f"| {title} | calls | geomean | worst tenth | worst | {slow} | host | predicted |", "|---" * 9 + "|"]
    return [*out, *(summary.row(name) for name, summary in rows), Summary(timed).row("all")]


def _by(timed: Sequence[dict[str, Any]], key: Callable[[dict[str, Any]], str]) -> list[tuple[str, Summary]]:
    """The slowest first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in timed:
        groups.setdefault(key(line), []).append(line)
    found = [(name, Summary(group)) for name, group in groups.items()]
    return sorted(found, key=lambda one: one[1].geomean)


def _worst(timed: Sequence[dict[str, Any]], op: str | None = None) -> list[dict[str, Any]]:
    of_op = [line for line in timed if op in (None, line["op"])]
    return sorted(of_op, key=itemgetter("ratio"))[:MOST_CALLS]


def _calls(lines: Sequence[dict[str, Any]]) -> list[str]:
    head = ["", "| ratio | torch µs | tk µs | predicted | call | kernels |", "|---" * 6 + "|"]
    return head + [_call_row(line) for line in lines]


def _call_row(line: dict[str, Any]) -> str:
    us, kernels = line["us"], "; ".join(line["kernels"])
    predicted = "" if line["predicted_us"] is None else f"{line['predicted_us']:.1f}"
    return f"| {line['ratio']:.2f} | {us['torch']:.1f} | {us['tk']:.1f} | {predicted} | {label_of(line)} | {kernels} |"


def reprinted(path: Path) -> str:
    """The report of a file of lines."""
    head, *lines = [json.loads(text) for text in path.read_text().splitlines()]
    return markdown(lines, head["environment"] | {"seed": head["seed"]})
