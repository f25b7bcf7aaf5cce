"""Times every config that fits a product, and says which few are enough."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from tk import capi, timing
from tk.config import STATIC_WEIGHTS
from tk.heuristics.problem import describe

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PRECISIONS = ("ieee", "tf32")
MANY_ROWS = 1024  # from here on weights are a part of the traffic only, and rotating many of them is a waste

# A config whose first look is so much slower than the best so far gets no graph, and one within FINALIST of the fastest
# gets a long timing.
HOPELESS = 4.0
HOST_US = 50.0  # more than a call costs the host: a first look below that says nothing of the kernel
FINALIST = 1.2
LONG_KERNEL_US = 100.0  # such kernels reach the power limit: each timing follows some of the same work

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # a, b, out
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Task:
    """A product to tune: a [m, k], b [k, n]. order: of a and b, "n" row-major, "t" column-major. precision: of fp32.
    static_weights: in that mode."""

    m: int
    n: int
    k: int
    dtype: str = "bf16"
    order: str = "nn"
    precision: str = "ieee"
    static_weights: bool = False

    def __str__(self) -> str:
        precision = f" {self.precision}" if self.dtype == "fp32" else ""
        static = " static" if self.static_weights else ""
        return f"{self.m}x{self.n}x{self.k} {self.dtype}{precision} {self.order}{static}"

    @property
    def mode(self) -> int:
        return STATIC_WEIGHTS if self.static_weights else 0

    @property
    def weight_bytes(self) -> int:
        return self.k * self.n * DTYPES[self.dtype].itemsize

    @property
    def bytes(self) -> int:
        return (self.m * self.k + self.k * self.n + self.m * self.n) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Measured:
    """us: median of one call. predicted_us: what the cost model says."""

    config: str
    number: int
    kernel: str
    us: float
    predicted_us: float


@dataclass
class Result:
    """task: a Task, or another description of the problem. measured: the fastest first. failures: config -> what went
    wrong."""

    task: Any
    problem: capi.Problem
    measured: list[Measured] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


class Operands:
    """Random inputs, enough of them that each comes from memory. The last weights are kept for the next task."""

    def __init__(self) -> None:
        self._key: object = None
        self._weights: list[torch.Tensor] = []

    def sets(self, task: Task) -> list[Inputs]:
        """The same a, different b and out."""
        many_rows = task.m >= MANY_ROWS
        size = task.bytes if many_rows else task.weight_bytes
        count = timing.copies_to_rotate(size, most=4 if many_rows else 48)
        dtype = DTYPES[task.dtype]
        key = (task.k, task.n, dtype, task.order[1], count)
        if key != self._key:
            self._weights = []  # let go of the last ones first
            self._weights = [_matrix(task.k, task.n, dtype, task.order[1]) for _ in range(count)]
            self._key = key
        a = _matrix(task.m, task.k, dtype, task.order[0])
        return [(a, b, torch.empty(task.m, task.n, device="cuda", dtype=dtype)) for b in self._weights]


def _matrix(rows: int, cols: int, dtype: torch.dtype, order: str) -> torch.Tensor:
    if order == "n":
        return torch.randn(rows, cols, device="cuda", dtype=dtype)
    return torch.randn(cols, rows, device="cuda", dtype=dtype).t()


def product(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, precision: int, config: int = -1, mode: int = 0
) -> torch.Tensor:
    """The call that is timed. precision: an index of PRECISIONS."""
    return torch.ops.tk.mm.out(a, b, None, 0, None, precision, config, mode, out=out)


def measure(task: Task, operands: Operands) -> Result:
    """Times every config that fits."""
    sets = operands.sets(task)
    precision = PRECISIONS.index(task.precision)
    described = describe(product, *sets[0], precision, mode=task.mode)
    if described is None:
        raise ValueError(f"{task}: nothing is launched for it")

    def call(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, config: int) -> torch.Tensor:
        return product(a, b, out, precision, config, task.mode)

    return time_configs(Result(task, described.problem), sets, call, torch.mm(sets[0][0], sets[0][1]))


def measure_all(
    tasks: Sequence[Any], seconds: float = math.inf, measure_one: Callable[[Any], Result] | None = None
) -> list[Result]:
    """One after the other, printed as they come. What fails (no memory, no variant) costs no other; what does not begin
    within `seconds` is left out, and said. measure_one: of what is no Task."""
    measure_one = measure_one or partial(measure, operands=Operands())
    results = []
    end = time.monotonic() + seconds
    for i, task in enumerate(tasks):
        if time.monotonic() > end:
            print(f"out of time: {len(tasks) - i} of {len(tasks)} products not measured", flush=True)
            break
        try:
            results.append(measure_one(task))
        except (RuntimeError, ValueError) as e:
            print(f"{task}: {type(e).__name__}: {e}", flush=True)
            continue
        best = "  ".join(f"{m.config} {m.us:.2f} us" for m in results[-1].measured[:3])
        print(f"{task!s:36} {best}", flush=True)
        for config, error in results[-1].failures.items():
            print(f"  FAILED {config}: {error}", flush=True)
    return results


def time_configs(
    result: Result, sets: Sequence[tuple[torch.Tensor, ...]], call: Callable[..., object], expected: torch.Tensor
) -> Result:
    """Times every config that fits the result's problem. A config that gives an error or a wrong result is a failure,
    and not among the measured.

    Args:
        result: is filled, and returned.
        sets: inputs, the memory of their result last; they take turns.
        call: of a set and a ``config``.
        expected: of the first set."""
    rows = {c.config_name: c for c in capi.candidates(result.problem) if c.fits}
    captures: dict[str, timing.Capture] = {}
    best = math.inf
    for name, row in sorted(rows.items(), key=lambda item: item[1].cost):  # the likely best first: it sets the bar
        calls = [partial(call, *inputs, config=row.config) for inputs in sets]
        try:
            _check(calls[0], sets[0][-1], expected)
            once = _glance(calls)
            if once > max(HOPELESS * best, HOST_US):
                result.measured.append(_measured(row, once))
                continue
            captures[name] = timing.capture(calls, at_least_us=200)
            best = min(best, captures[name].us / captures[name].calls)
        except (RuntimeError, ValueError) as e:
            result.failures[name] = f"{type(e).__name__}: {e}"
    result.measured += [_measured(rows[name], us) for name, us in _times(captures).items()]
    result.measured.sort(key=lambda x: x.us)
    return result


def _times(captures: Mapping[str, timing.Capture]) -> dict[str, float]:
    """A short timing of all, a long one of the finalists."""
    short = timing.device_times(captures, rounds=2, ms=0.5)
    fastest = min((t.low for t in short.values()), default=0.0)
    finalists = {name: captures[name] for name, t in short.items() if t.low <= FINALIST * fastest}
    ms, warm_ms = (8.0, 8.0) if fastest > LONG_KERNEL_US else (3.0, 0.0)
    long = timing.device_times(finalists, rounds=5, ms=ms, warm_ms=warm_ms)
    return {name: t.us for name, t in (short | long).items()}


def _measured(row: capi.Candidate, us: float) -> Measured:
    return Measured(row.config_name, row.config, row.kernel_name, us, row.cost * 1e-6)


def _glance(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of a call when all are made once; the host's, where that is slower."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / len(calls)


def _check(call: Callable[[], object], out: torch.Tensor, expected: torch.Tensor) -> None:
    """A fast wrong kernel must not win. The tests are stricter."""
    out.fill_(torch.nan)
    call()
    difference = ((out.float() - expected.float()).norm() / expected.float().norm()).item()
    if not difference < 0.02:
        raise RuntimeError(f"wrong result: it differs from torch's by {difference:.2g} of its norm")


def cover(times: Mapping[Key, Mapping[str, float]], slowdown: float) -> dict[Key, str]:
    """Problem -> config, with few configs: greedily that which serves most of the problems left within `slowdown`
    (1.02: two percent) of their best, until all are served; then each problem gets the fastest of those kept."""
    good = {p: {c for c, t in row.items() if t <= slowdown * min(row.values())} for p, row in times.items() if row}
    configs = sorted(set().union(*good.values()))
    left = set(good)
    kept: list[str] = []
    while left:
        kept.append(max(configs, key=lambda c: sum(c in good[p] for p in left)))
        left = {p for p in left if kept[-1] not in good[p]}
    return {p: min((c for c in kept if c in times[p]), key=times[p].__getitem__) for p in good}
