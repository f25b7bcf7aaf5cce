"""Rows of which most of the time is a peer's compilation: several processes compile, each the peer of another row, and
what runs on the GPU takes turns."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

from benchmarks.runner import Options

T = TypeVar("T")
R = TypeVar("R")

_gpu: AbstractContextManager[Any] = nullcontext()


def gpu() -> AbstractContextManager[Any]:
    """Held by whoever uses the GPU."""
    return _gpu


def _begin_worker(lock: Any) -> None:
    """Of the peers' autotuners each timing takes the lock: between them they compile."""
    from torch._inductor import config
    from torch._inductor.runtime import benchmarking
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    global _gpu
    _gpu = lock
    config.compile_threads = 1  # the processes are as many as the cores
    for owner, name in ((CachingAutotuner, "bench"), (type(benchmarking.benchmarker), "benchmark_gpu")):
        setattr(owner, name, _locked(getattr(owner, name), lock))


def _locked(call: Callable[..., Any], lock: Any) -> Callable[..., Any]:
    def locked(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return call(*args, **kwargs)

    return locked


def rows(tasks: Iterable[T], options: Options, measure: Callable[[T, bool], R]) -> Iterator[tuple[T, Callable[[], R]]]:
    """Each task with what gives `measure(task, options.compiled)` or raises what went wrong, in the order in which they
    end. measure: a function of a module."""
    if options.jobs == 1:
        for task in tasks:
            if options.has_time():
                yield task, partial(measure, task, options.compiled)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context, _begin_worker, (context.RLock(),)) as pool:
        running: dict[Future[R], T] = {}
        for task in tasks:
            if not options.has_time():
                continue
            running[pool.submit(measure, task, options.compiled)] = task
            while len(running) > options.jobs:
                yield from _ended(running)
        while running:
            yield from _ended(running)


def _ended(running: dict[Future[R], T]) -> Iterator[tuple[T, Callable[[], R]]]:
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        yield running.pop(future), future.result
