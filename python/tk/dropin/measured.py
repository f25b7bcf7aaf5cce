"""What was measured on this machine: the calls that ``tk.use(model, sample=…)`` timed both ways, by classes of calls,
and whole models; and the file in the user's cache that keeps them."""

from __future__ import annotations

import json
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tk import _cache
from tk._table import Records, bar, table
from tk._version import __version__
from tk.dropin.decisions import Decide, Remember, autocast_dtype
from tk.dropin.target import dtype_name, needs_gradient
from tk.generated.problem import memory_order
from tk.parallel import is_distributed

__all__ = ["Kept", "Measurement", "Measurements", "Pass", "Table", "Times", "Whole", "Wholes"]
__all__ += ["class_of", "described", "key_of", "load", "path_of", "save"]

Class = tuple[Any, ...]
FORMAT = 1


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: of the host, and of the device."""

    host: float
    device: float

    def cost(self, is_captured: bool) -> float:
        """What a call adds to a model's time. The host does not show in a CUDA graph or a compiled model; otherwise the
        slower of the two does."""
        return self.device if is_captured else max(self.host, self.device)


@dataclass(frozen=True)
class Pass:
    """The same work by tk and by torch."""

    tk: Times
    torch: Times

    def wins(self, is_captured: bool) -> bool:
        return self.tk.cost(is_captured) <= self.torch.cost(is_captured)

    @property
    def wins_ever(self) -> bool:
        return self.wins(False) or self.wins(True)

    @property
    def ratio(self) -> float:
        """torch's time over tk's, where Python calls one after the other."""
        return self.torch.cost(False) / self.tk.cost(False)


@dataclass(frozen=True)
class Measurement:
    """Both times of the calls of a class. call: the class. example: one of them, to be read. forward: without
    gradients; training: forward and backward, None where no argument needed a gradient."""

    op: str
    call: Class
    example: str
    forward: Pass
    training: Pass | None

    @property
    def passes(self) -> list[tuple[str, Pass]]:
        found = [("forward", self.forward), ("forward and backward", self.training)]
        return [(name, one) for name, one in found if one is not None]


class Measurements(Records[Measurement]):
    """Prints as a table with both times of every class, in microseconds, and how much faster tk is. A bar beside that
    shows it: the mark in it is where both are as fast."""

    header = ("op", "call", "passes", "tk host", "torch host", "tk device", "torch device", "speedup", "",
              "runs through")  # fmt: skip

    def __str__(self) -> str:
        rows = []
        for one in self:
            for name, times in one.passes:
                us = (times.tk.host, times.torch.host, times.tk.device, times.torch.device)
                figures = (*(f"{x:.1f}" for x in us), times.ratio, bar(times.ratio))
                rows.append((one.op, one.example, name, *figures, _served(times)))
        return table(self.header, rows)

    __repr__ = __str__


def _served(times: Pass) -> str:
    eagerly, captured = times.wins(False), times.wins(True)
    if eagerly == captured:
        return "tk" if eagerly else "torch"
    return "tk in CUDA graphs" if captured else "torch in CUDA graphs"


@dataclass(frozen=True)
class Whole:
    """Both times of the whole model, in milliseconds, called by Python. kind: of its input, as decisions.Root tells
    kinds apart. name: of the pass. example: the input, to be read."""

    kind: str
    name: str
    example: str
    tk: float
    torch: float

    @property
    def is_slower(self) -> bool:
        return self.tk > self.torch

    @property
    def ratio(self) -> float:
        return self.torch / self.tk


class Wholes(Records[Whole]):
    """Prints as a table with both times of every kind of input, in milliseconds, and how much faster tk is."""

    header = ("input", "passes", "tk", "torch", "speedup", "", "runs through")

    @staticmethod
    def cells(row: Whole) -> tuple[object, ...]:
        through = "torch, but in graphs" if row.is_slower else "tk"
        return row.example, row.name, f"{row.tk:.3f}", f"{row.torch:.3f}", row.ratio, bar(row.ratio), through


# --- Classes of calls ---

# Sizes up to 16 stand for themselves, larger ones for their half of an octave, and for what divides them.
_BOUNDS = [*range(17), *(n for k in range(4, 48) for n in (3 << (k - 1), 2 << k))]


def class_of(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Class | None:
    """The class of a call: dtypes, classes of sizes and the order of dimensions in memory of its tensors; all else as
    it is, but floats. None for a call with other arguments, as functions. torch.compile traces this, and guards the
    class."""
    found: list[Any] = []
    for value in (*args, *(item for name in sorted(kwargs) for item in (name, kwargs[name]))):
        part = _part(value)
        if part is None:
            return None
        found.append(part)
    return tuple(found)


def _part(value: Any) -> Any:
    if isinstance(value, Tensor):
        if is_distributed(value):
            return None  # the ranks would not measure the same
        return (dtype_name(value.dtype), tuple([_size(n) for n in value.shape]), _layout(value))
    if value is None or isinstance(value, float):
        return "None" if value is None else "float"
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, tuple | list):
        parts = [_part(x) for x in value]
        return None if None in parts else ("list", *parts)
    return None


def _size(n: Any) -> Any:
    low, high = 0, len(_BOUNDS)
    while high - low > 1:
        middle = (low + high) // 2
        if n >= _BOUNDS[middle]:
            low = middle
        else:
            high = middle
    if low <= 16:
        return low
    return (_BOUNDS[low], 64 if n % 64 == 0 else 8 if n % 8 == 0 else 1)


def _layout(x: Tensor) -> Any:
    """Empty for a contiguous tensor."""
    if x.is_contiguous():
        return ()
    is_repeated = any(x.stride(d) == 0 and x.shape[d] != 1 for d in range(x.dim()))
    return (*memory_order(x, x.dim()), "repeated" if is_repeated else "rows" if x.stride(-1) == 1 else "steps")


def described(args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """A call, to be read: its tensors' dtypes and sizes, and what else it is given."""
    parts = [_described(x) for x in args] + [f"{name}={_described(x)}" for name, x in kwargs.items()]
    return ", ".join(parts)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)}[{', '.join(map(str, value.shape))}]"
    return str(tuple(value)) if isinstance(value, tuple | list) else str(value)


# --- Decisions ---


class Table:
    """Measurements of one device."""

    def __init__(self, measurements: Iterable[Measurement]):
        self._found = {(m.op, m.call): m for m in measurements}
        self._ops = {m.op for m in self._found.values()}

    def knows(self, op: str) -> bool:
        return op in self._ops

    def predicate(
        self, op: str, legal: Callable[..., bool], by_rules: Decide, remember: Remember
    ) -> Callable[..., bool]:
        """Whether a call is served. legal: whether tk takes it at all; by_rules: the answer where its class was not
        measured."""
        # By class, whether a gradient is needed, and whether a graph records the call: whether tk is faster.
        faster: dict[tuple[Class, bool, bool], bool] = {}
        for m in (m for (of, _), m in self._found.items() if of == op):
            for has_gradient, one in ((False, m.forward), (True, m.training)):
                if one is not None:
                    faster |= {(m.call, has_gradient, captured): one.wins(captured) for captured in (False, True)}

        def find(*key: Any) -> bool | None:
            return faster.get(key)

        find._dynamo_marked_constant = True  # type: ignore[attr-defined]  # run while tracing, not traced

        def decide(is_captured: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            if not legal(*args, **kwargs):  # first: what is no plain tensor has no strides
                return False
            # An exported program has no guards, which a class needs.
            call = None if torch.compiler.is_exporting() else key_of(args, kwargs)
            found = None if call is None else find(call, needs_gradient(*args, *kwargs.values()), is_captured)
            return by_rules(is_captured, args, kwargs) if found is None else found

        return remember(decide)

    def is_faster_on_device(self, op: str, call: Class, has_gradient: bool) -> bool | None:
        """Whether tk wins a class of calls by the device's time alone; None where it was not measured."""
        found = self._found.get((op, ("", *call)))
        times = None if found is None else found.training if has_gradient else found.forward
        return None if times is None else times.wins(is_captured=True)

    def when(self, op: str) -> str:
        """Says for which calls tk is taken."""
        passes = [p for m in self._found.values() if m.op == op for _, p in m.passes]
        won = sum(p.wins_ever for p in passes)
        return f"as measured: tk is faster in {won} of {len(passes)} classes of calls"

    def site(self, ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
        return ours


def key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Class | None:
    """The class under which a call is found."""
    call = class_of(args, kwargs)
    return None if call is None else (autocast_dtype((*args, *kwargs.values())), *call)


# --- The file ---


def machine(device: torch.device) -> str:
    """What times are of: a GPU by its name, or this processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} threads"


def path_of(device: torch.device) -> Path:
    return _cache.directory() / f"use-{_cache.slug(machine(device))}.json"


def _header(device: torch.device) -> dict[str, Any]:
    return {"format": FORMAT, "tk": __version__, "torch": torch.__version__, "device": machine(device)}


@dataclass(frozen=True)
class Kept:
    """What the file has of a device: calls by op and class, and whole models by their name, by the kind of input."""

    calls: dict[tuple[str, Class], Measurement] = field(default_factory=dict)
    models: dict[str, dict[str, Whole]] = field(default_factory=dict)


def load(device: torch.device) -> Kept:
    """What is kept of this device; nothing where there is no file. One that cannot be used is warned of once."""
    try:
        path = path_of(device)
        content = json.loads(path.read_text())
        header = _header(device)
        if other := [name for name, now in header.items() if content[name] != now]:
            _warn_once(path, "; ".join(f"it is of {n} {content[n]}, this is {header[n]}" for n in other))
            return Kept()
        calls = [_loaded(entry) for entry in content["measured"]]
        models = {name: [Whole(**entry) for entry in found] for name, found in content.get("models", {}).items()}
        return _added(Kept(), calls, models)
    except (FileNotFoundError, NotADirectoryError):
        return Kept()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        _warn_once(path, f"it cannot be read ({type(error).__name__}: {error})")
        return Kept()


def save(
    device: torch.device,
    calls: Iterable[Measurement] = (),
    models: Mapping[str, Iterable[Whole]] = MappingProxyType({}),
) -> Kept:
    """Adds them, and returns all; those of a class, and of a kind of input, that was there replace it. A file of
    another version is replaced. Where the cache cannot be written, that is warned of, and nothing is kept."""
    try:
        path = path_of(device)
        with _cache.locked(path):
            kept = _added(load(device), calls, models)
            content = {
                "measured": [_saved(m) for m in kept.calls.values()],
                "models": {name: [asdict(w) for w in found.values()] for name, found in kept.models.items()},
            }
            _cache.write_json(path, {**_header(device), **content})
            return kept
    except OSError as error:
        warnings.warn(f"tk.use: what was measured is not kept: {error}", stacklevel=3)
        return _added(load(device), calls, models)


def _added(kept: Kept, calls: Iterable[Measurement], models: Mapping[str, Iterable[Whole]]) -> Kept:
    kept.calls.update({(m.op, m.call): m for m in calls})
    for name, found in models.items():
        kept.models.setdefault(name, {}).update({w.kind: w for w in found})
    return kept


def _saved(m: Measurement) -> dict[str, Any]:
    training = None if m.training is None else _numbers(m.training)
    return {"op": m.op, "call": m.call, "example": m.example, "forward": _numbers(m.forward), "training": training}


def _numbers(one: Pass) -> list[float]:
    return [round(x, 2) for x in (one.tk.host, one.tk.device, one.torch.host, one.torch.device)]


def _loaded(entry: Mapping[str, Any]) -> Measurement:
    forward, training = entry["forward"], entry["training"]
    return Measurement(entry["op"], _tuples(entry["call"]), str(entry["example"]), _pass(forward),
                       None if training is None else _pass(training))  # fmt: skip


def _pass(numbers: Iterable[float]) -> Pass:
    a, b, c, d = map(float, numbers)
    return Pass(Times(a, b), Times(c, d))


def _tuples(value: Any) -> Any:
    """JSON has lists alone."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


_warned: set[Path] = set()


def _warn_once(path: Path, why: str) -> None:
    if path not in _warned:
        _warned.add(path)
        warnings.warn(f"tk.use: {path} is not used: {why}. tk.use(model, sample=…) makes it anew", stacklevel=4)
