"""``tk.use(model, sample=…)``: a model is run, and each call that tk could serve is timed both ways."""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tk import errors, timing
from tk.dropin.decisions import Decide, Remember
from tk.dropin.measured import Class, Measurement, Pass, Times, described, key_of
from tk.dropin.whole import Batch

__all__ = ["Recording", "batches_of", "unchanged"]

_log = logging.getLogger("tk")

BATCHES = 3  # of a function that makes them
SHORT_US, LONG_US = 2_000.0, 20_000.0  # how long one timing lasts at least; a call that is measured fewer times
Call = Callable[[], object]


def batches_of(sample: Any) -> Iterator[Batch]:
    """What a model is run on. Raises TypeError, before anything is made, for what is no sample."""
    if callable(sample) and not isinstance(sample, Tensor):
        return (_arguments(sample()) for _ in range(BATCHES))
    return iter([_arguments(sample)])


def _arguments(batch: Any) -> Batch:
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, tuple):
        return batch, {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    raise TypeError(
        "tk.use: sample must be a tensor, a tuple of arguments, a dict of keywords, or a function that returns one of "
        f"these, is {type(batch).__name__}"
    )


# --- The model is as it was ---


@contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Gives the model back the attributes, buffers and mode that it had; random numbers go on from where they
    were."""
    modules = [(m, dict(vars(m)), {n: dict(vars(m)[n]) for n in _TABLES if n in vars(m)}) for m in model.modules()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for module, attributes, tables in modules:
                vars(module).clear()
                vars(module).update(attributes)
                for name, entries in tables.items():
                    vars(module)[name].clear()
                    vars(module)[name].update(entries)
            with torch.no_grad():
                for buffer, content in buffers:
                    buffer.copy_(content)
            random.setstate(states[0])
            if numpy:
                numpy.random.set_state(states[1])


_TABLES = ("_parameters", "_buffers", "_modules")


# --- What is measured ---


class Recording:
    """Stands where a Table does while the sample runs: calls are torch's, and those of a class that was not seen yet
    are timed both ways before they return.

    found: what was measured. calls: the classes of the calls that a module made, by its path."""

    def __init__(self, device: torch.device):
        self.found: dict[tuple[str, Class], Measurement] = {}
        self.calls: dict[str, set[tuple[str, Class]]] = {}
        self._refused: set[tuple[str, Class]] = set()
        self._device = device
        self._path: str | None = None
        self._noted: list[tuple[str, Class, str]] = []  # by the innermost site
        self._is_timing = self._serves = False

    def knows(self, op: str) -> bool:
        return True

    def predicate(
        self, op: str, legal: Callable[..., bool], by_rules: Decide, remember: Remember
    ) -> Callable[..., bool]:
        """Whether tk serves a call now. legal: whether tk takes it at all."""
        remembered_legal = remember(lambda _, args, kwargs: legal(*args, **kwargs))

        def takes(*args: Any, **kwargs: Any) -> bool:
            # While it is timed as a decision will be, which is remembered.
            is_legal = remembered_legal if self._is_timing else legal
            if torch.compiler.is_compiling() or not is_legal(*args, **kwargs):
                return False
            if self._is_timing:
                return self._serves
            if (key := key_of(args, kwargs)) is not None:
                self._noted.append((op, key, described(args, kwargs)))
            return self._serves

        return takes

    def when(self, op: str) -> str:
        return ""  # a report of this time is not seen

    def site(self, ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
        """A function that calls `ours`, which decides by `predicate`, and measures it against `theirs`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._is_timing:
                return ours(*args, **kwargs)
            noted: list[tuple[str, Class, str]] = []
            outside, self._noted = self._noted, noted
            try:
                result = ours(*args, **kwargs)
            finally:
                self._noted = outside
            for op, key, example in noted:
                if (op, key) not in self.found and (op, key) not in self._refused:
                    self._measure(op, key, example, ours, theirs, args, kwargs)
                if self._path is not None and (op, key) in self.found:
                    self.calls.setdefault(self._path, set()).add((op, key))
            return result

        return call

    def at(self, path: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method of a module, whose calls are noted as its own."""

        def call(*args: Any, **kwargs: Any) -> Any:
            outside, self._path = self._path, path
            try:
                return method(*args, **kwargs)
            finally:
                self._path = outside

        return call

    def _measure(self, op: str, key: Class, example: str, ours: Callable[..., Any], theirs: Callable[..., Any],
                 args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # fmt: skip
        both = {"tk": self._served(ours), "torch": theirs}
        args, kwargs = tree_map(_apart, (args, kwargs))
        self._is_timing = True
        try:
            forward = _times({name: _forward(f, args, kwargs) for name, f in both.items()}, self._device)
            leaves = _leaves(args, kwargs) if torch.is_grad_enabled() else []
            training = None
            if leaves:
                calls = {name: _with_gradients(f, args, kwargs, leaves) for name, f in both.items()}
                training = _times(calls, self._device)
        except (errors.Error, ValueError, RuntimeError) as error:  # no kernel, no gradient, or no memory for both
            _log.info("tk.use: %s of %s is not measured: %s", op, example, error)
            self._refused.add((op, key))
            return
        finally:
            self._is_timing = False
        self.found[op, key] = Measurement(op, key, example, forward, training)

    def _served(self, ours: Callable[..., Any]) -> Callable[..., Any]:
        """Runs a call so that tk serves it; what torch's side leads to, as the activation of a gated layer, stays
        torch's."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._serves = True
            try:
                return ours(*args, **kwargs)
            finally:
                self._serves = False

        return call


def _apart(x: Any) -> Any:
    """The same memory, and a gradient of its own."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What needs a gradient: arguments, and the parameters of a module among them."""
    given = tree_leaves((args, kwargs))
    owned = [p for m in given if isinstance(m, nn.Module) for p in m.parameters(recurse=False)]
    return [x for x in (*given, *owned) if isinstance(x, Tensor) and x.requires_grad]


def _forward(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    def call() -> object:
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


def _with_gradients(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
                    leaves: list[Tensor]) -> Call:  # fmt: skip
    """Gradients are returned, and none is added to a parameter's."""
    made: list[Tensor] = []

    def call() -> object:
        results = [x for x in tree_leaves(function(*args, **kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        if not made:
            made.extend(torch.randn_like(x) for x in results)
        return torch.autograd.grad(results, leaves, made, allow_unused=True)

    return call


def _times(calls: Mapping[str, Call], device: torch.device) -> Pass:
    """Times calls in turns."""
    once = max(_once_us(call) for call in calls.values())
    times, rounds = max(1, min(100, int(SHORT_US / once))), 3 if once > LONG_US else 7
    host = timing.host_times(calls, rounds=rounds, calls=times)
    if device.type == "cpu":
        found = {name: Times(t.us, t.us) for name, t in host.items()}
    else:
        on_device = _device_times(calls, rounds, times)
        found = {name: Times(host[name].us, on_device[name].us) for name in calls}
    return Pass(found["tk"], found["torch"])


def _once_us(call: Call) -> float:
    """The host's and the device's time of a second call."""
    for _ in range(2):
        begin = time.perf_counter()
        call()
        timing.synchronize()
    return (time.perf_counter() - begin) * 1e6


def _device_times(calls: Mapping[str, Call], rounds: int, times: int) -> Mapping[str, timing.Timing]:
    """The device's times of calls, from graphs; what cannot be recorded is called from Python."""
    try:
        captures = {name: timing.capture([call], at_least_us=200) for name, call in calls.items()}
    except RuntimeError:
        return timing.eager_times({name: [call] for name, call in calls.items()}, rounds=rounds, calls=times)
    return timing.device_times(captures, rounds=rounds, ms=1.0)
