"""How long things take on a GPU: what ``tk tune``, ``tk demo`` and the benchmarks measure with.

Device time is taken from CUDA graphs of at least 0.6 ms, so that neither the host nor an event's resolution shows, and
in turns, so that a drifting clock meets every variant alike. At the power limit a kernel that follows idle time or a
slower kernel looks too fast: for long kernels each timing therefore follows some milliseconds of the same kernel.

All figures are medians, in microseconds.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

__all__ = [
    "Capture",
    "Timing",
    "capture",
    "capture_stream",
    "copy_bandwidth",
    "device_times",
    "eager_times",
    "host_times",
    "median_time",
    "synchronize",
]

Call = Callable[[], object]
GRAPH_US = 600.0
L2_FLUSH_BYTES = 300_000_000  # what buffers must add up to so that none is still in an L2 of 60 MB when its turn comes


@dataclass(frozen=True)
class Timing:
    """us: the median of one call; low, high: the fastest and slowest of the rounds."""

    us: float
    low: float
    high: float

    @staticmethod
    def of(samples: Sequence[float]) -> Timing:
        return Timing(statistics.median(samples), min(samples), max(samples))


@dataclass(frozen=True)
class Capture:
    """A CUDA graph of `calls` calls, which takes about `us`."""

    graph: torch.cuda.CUDAGraph
    calls: int
    us: float


def copies_to_rotate(size: int, most: int = 64) -> int:
    """How many buffers of `size` bytes to rotate so that each comes from memory, at least 2 and at most `most`."""
    return max(2, min(most, -(-L2_FLUSH_BYTES // max(size, 1))))


@cache
def capture_stream() -> torch.cuda.Stream:
    """The stream on which graphs are recorded. A backward pass runs on the stream of its forward pass: this one, to be
    recorded."""
    return torch.cuda.Stream()


def _record(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=capture_stream()):
        for call in calls:
            call()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph, times: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def capture(calls: Sequence[Call], at_least_us: float = GRAPH_US) -> Capture:
    """The calls in turn, all of them as often as fills `at_least_us`. Each is called once before: modules load then."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = _record(calls)
    _replay_us(graph, 1)
    us = _replay_us(graph, 1)
    passes = max(1, round(at_least_us / us))
    if passes > 1:
        graph = _record(list(calls) * passes)
        us = _replay_us(graph, 1)
    return Capture(graph, len(calls) * passes, us)


def device_times(
    captures: Mapping[str, Capture], *, rounds: int = 7, ms: float = 5.0, warm_ms: float = 0.0
) -> dict[str, Timing]:
    """The device's time for one call of each, in turns.

    ms: how long one timing lasts; warm_ms: how long the same work runs before it."""
    samples: dict[str, list[float]] = {label: [] for label in captures}
    for _ in range(rounds):
        for label, c in captures.items():
            times = max(1, round(ms * 1e3 / c.us))
            if warm_ms:
                for _ in range(max(1, round(warm_ms * 1e3 / c.us))):
                    c.graph.replay()
            samples[label].append(_replay_us(c.graph, times) / (times * c.calls))
    return {label: Timing.of(values) for label, values in samples.items()}


def median_time(calls: Sequence[Call], **options: float) -> Timing:
    """``device_times`` of one thing."""
    return device_times({"": capture(calls)}, **options)[""]  # type: ignore[arg-type]


def eager_times(variants: Mapping[str, Sequence[Call]], *, rounds: int = 9, calls: int = 200) -> dict[str, Timing]:
    """The time of one call where Python calls one after the other: the host's or the device's, whichever is longer.

    Each variant is a sequence of calls that are made in turn."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples: dict[str, list[float]] = {label: [] for label in variants}
    with _no_garbage_collection():
        for r in range(rounds + 1):  # round 0 warms up
            for label, turn in variants.items():
                work = list(itertools.islice(itertools.cycle(turn), calls))
                torch.cuda.synchronize()
                begin.record()
                for call in work:
                    call()
                end.record()
                end.synchronize()
                if r:
                    samples[label].append(begin.elapsed_time(end) * 1e3 / calls)
    return {label: Timing.of(values) for label, values in samples.items()}


def host_times(variants: Mapping[str, Call], *, rounds: int = 21, calls: int = 200) -> dict[str, Timing]:
    """The host's time of one call, while the device does not hold it up: at most `calls` are queued, and a launch queue
    takes about a thousand. The loop itself is taken off."""
    samples: dict[str, list[float]] = {label: [] for label in variants}
    with _no_garbage_collection():
        for r in range(rounds + 1):
            for label, call in variants.items():
                synchronize()
                us = loop_us(call, calls) - loop_us(_nothing, calls)
                if r:
                    samples[label].append(us / calls)
        synchronize()
    return {label: Timing.of(values) for label, values in samples.items()}


def _nothing() -> None:
    pass


def loop_us(call: Call, times: int) -> float:
    """The host's time of so many calls, and of the loop around them."""
    begin = time.perf_counter_ns()
    for _ in itertools.repeat(None, times):
        call()
    return (time.perf_counter_ns() - begin) * 1e-3


def synchronize() -> None:
    """Waits for the current device, where CUDA is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class _no_garbage_collection:
    def __enter__(self) -> None:
        self.was_enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self.was_enabled:
            gc.enable()


def copy_bandwidth(size: int = 1 << 30) -> float:
    """GB/s of a copy of `size` bytes on the device, reading and writing counted: the ceiling of what moves memory."""
    source = torch.randn(size // 4, device="cuda")
    target = torch.empty_like(source)
    captures = {
        "copy": capture([lambda: target.copy_(source)]),
        "multiply": capture([lambda: torch.mul(source, 1.0, out=target)]),
    }
    best = min(t.us for t in device_times(captures, rounds=7, ms=10).values())
    return 2 * size / best * 1e-3
