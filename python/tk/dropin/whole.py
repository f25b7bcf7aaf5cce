"""A used model against the same model as it is written: the last word of ``tk.use(model, sample=…)``.

Calls are timed one by one, and in their times is nothing of what a model does between them: each of its modules looks
at its input, and where the device waits for the host, all of that shows. So the model is timed as a whole, too, and
where it is slower than it was, it runs as it is written.
"""

from __future__ import annotations

import hashlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves

from tk import timing
from tk.dropin.decisions import input_kind
from tk.dropin.measured import Whole, described
from tk.dropin.report import Swap

__all__ = ["Batch", "measure", "name_of"]

_log = logging.getLogger("tk")

ROUNDS, MOST_ROUNDS, WAY_S = 5, 25, 0.5  # of one way: at least, at most, and as many as fit
WARM_UPS = 2  # calls are decided in the first; the second shows whether anything is asked again
Batch = tuple[tuple[Any, ...], dict[str, Any]]
Run = Callable[[], object]
Way = tuple[Run, Callable[[], AbstractContextManager[None]]]  # what runs, and what holds while it does


def name_of(model: nn.Module) -> str:
    """The name by which measurements of a whole model are kept: it follows from its modules' classes, and its
    parameters' sizes."""
    modules = [(path, type(m).__module__, type(m).__qualname__) for path, m in model.named_modules()]
    parameters = [
        (path, None if isinstance(p, UninitializedParameter) else tuple(p.shape), str(p.dtype))
        for path, p in model.named_parameters()
    ]
    return hashlib.sha256(repr((modules, parameters)).encode()).hexdigest()[:16]


def measure(model: nn.Module, swaps: Sequence[Swap], batches: Sequence[Batch]) -> list[Whole]:
    """Times each kind of input both ways: without gradients, and in grad mode forward and backward. Nothing where
    several processes run the model, which would not decide alike, or where parts of it are compiled."""
    if not _is_one(model):
        return []
    found: dict[str, Whole] = {}  # by the kind, which has whether there are gradients
    for has_gradient in _modes(model):
        with torch.set_grad_enabled(has_gradient):
            for args, kwargs in batches:
                kind = str(input_kind(model.training, args, kwargs))
                if kind in found:
                    continue
                name = "forward and backward" if has_gradient else "forward"
                run = _run(model, args, kwargs, has_gradient)
                try:
                    ours, torchs = _times((run, nullcontext), (run, lambda: _as_written(swaps)))
                except Exception as error:  # a cache is full, no memory, no gradient: the sample itself did run
                    _log.info("tk.use: the whole model is not measured, %s: %s", name, error)
                    continue
                found[kind] = Whole(kind, name, described(args, kwargs), ours, torchs)
    return list(found.values())


def _is_one(model: nn.Module) -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    return not any(isinstance(m, torch._dynamo.OptimizedModule) or m._compiled_call_impl for m in model.modules())


def _modes(model: nn.Module) -> list[bool]:
    """Whether with gradients, as far as can be told how the model will be called."""
    if torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
        return [True] if model.training else [False, True]
    return [False]


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], has_gradient: bool) -> Run:
    """Gradients are returned, and none is added to a parameter's."""
    parameters = [p for p in model.parameters() if p.requires_grad]

    def run() -> object:
        result = model(*args, **kwargs)
        if not has_gradient:
            return result
        leaves = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
        if not leaves:
            raise ValueError("no result needs a gradient")
        return torch.autograd.grad(leaves, parameters, [torch.ones_like(x) for x in leaves], allow_unused=True)

    return run


@contextmanager
def _as_written(swaps: Sequence[Swap]) -> Iterator[None]:
    there = [swap for swap in swaps if swap.undo()]
    try:
        yield
    finally:
        for swap in there:
            swap.do()


def _times(ours: Way, torchs: Way) -> tuple[float, float]:
    """Milliseconds of both, from a call until the device is done, as medians of calls in turns."""
    taken: dict[Way, list[float]] = {way: [_timed(way) for _ in range(WARM_UPS)] for way in (ours, torchs)}
    once = max(values[-1] for values in taken.values())
    rounds = max(ROUNDS, min(MOST_ROUNDS, int(WAY_S / once)))
    for values in taken.values():
        values.clear()
    for turn in range(rounds):
        for way in (ours, torchs)[:: 1 if turn % 2 == 0 else -1]:
            taken[way].append(_timed(way))
    return statistics.median(taken[ours]) * 1e3, statistics.median(taken[torchs]) * 1e3


def _timed(way: Way) -> float:
    """Seconds."""
    run, holding = way
    with holding():
        timing.synchronize()
        begin = time.perf_counter()
        result = run()
        timing.synchronize()
        taken = time.perf_counter() - begin
    del result  # after the clock was read
    return taken
