"""What a function does beside returning tensors and writing its arguments: refused, since a kernel would not do it.

A function runs when it is traced and never again. What it prints, logs, appends to a list or counts in a global would
happen at build time alone; a random number of Python's, or the time, would be the same in every call.
"""

from __future__ import annotations

import builtins
import datetime
import dis
import inspect
import io
import logging
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch

from tk.codegen.errors import SideEffect, TraceError
from tk.codegen.tracing.reads import NOT_THE_USERS

_CONTAINERS = (list, dict, set, bytearray)
_OF_TENSORS = ("data", "grad")  # attributes whose assignment changes a tensor behind autograd's back
_OF_DATES = ("now", "today", "utcnow")


@contextmanager
def refused(fn: Callable[..., Any]) -> Iterator[None]:
    """Raises TraceError, with the line of `fn`, for an effect of what runs inside."""
    fn = inspect.unwrap(fn)
    if not isinstance(fn, FunctionType):  # a callable object: there is no code of its own to look at
        yield
        return
    _refuse_by_name(fn)
    printed = _Printed(fn.__code__.co_filename)
    noted: list[_Noted] = []
    before, drawn = _state(fn), _random_state()
    try:
        with redirect_stdout(printed), _calls_noted(fn, noted):
            yield
    except Exception:  # it may be traced again, and would find what it changed
        _check(fn, printed, noted, before, drawn)
        raise
    _check(fn, printed, noted, before, drawn)


def changed(fn: Callable[..., Any], x: torch.Tensor, line: int | None) -> TraceError:
    """The error of a call at this line that writes into a tensor which is not among the function's arguments."""
    fn = inspect.unwrap(fn)
    names = [name for name, reached in _reached(fn).items() if reached is x] if isinstance(fn, FunctionType) else []
    return _error(fn, line, f"changes {(*names, 'a tensor')[0]}, which is not its own: return what should change")


def _check(
    fn: Callable[..., Any],
    printed: _Printed,
    noted: Sequence[_Noted],
    before: Mapping[str, Any],
    drawn: Mapping[str, Any],
) -> None:
    if noted:
        raise _error(fn, noted[0].line, noted[0].text)
    if printed.line:
        raise _error(fn, printed.line, "prints, which no kernel does: leave it to the caller")
    for name, was in before.items():
        if _state(fn).get(name) != was:
            raise _error(fn, _line_of(fn, name), f"changes {name}, which is not its own: return what should change")
    for what, was in drawn.items():
        if _random_state()[what] != was:
            raise _error(
                fn, None, f"draws from {what}, or seeds it: the number would be the same in every call; draw with "
                "torch.rand_like and the like, or give the number as a parameter",
            )  # fmt: skip


def _error(fn: Callable[..., Any], line: int | None, text: str) -> TraceError:
    code = fn.__code__
    return SideEffect(f"{fn.__name__} ({code.co_filename}:{line or code.co_firstlineno}): a side effect: it {text}")


class _Printed(io.TextIOBase):
    """line: where the function first wrote."""

    def __init__(self, file: str):
        self.file = file
        self.line = 0

    def write(self, text: str) -> int:
        frame = sys._getframe(1)
        while frame is not None and not self.line:
            if frame.f_code.co_filename == self.file:
                self.line = frame.f_lineno
            frame = frame.f_back  # type: ignore[assignment]
        return len(text)


# --- What it calls ---


@dataclass(frozen=True)
class _Noted:
    """A call of the user's code. line: of the function's file, None in another."""

    line: int | None
    text: str


_TIME = "asks for the time, which would be that of the build in every call: give it as a parameter"
_LEFT = "which no kernel does: leave it to the caller"
_CALLS: Sequence[tuple[Any, tuple[str, ...], str]] = (
    (logging.Logger, ("debug", "info", "warning", "error", "critical", "exception", "log"), f"logs, {_LEFT}"),
    (builtins, ("open",), f"opens a file, {_LEFT}"),
    (warnings, ("warn", "warn_explicit"), f"warns, {_LEFT}"),
    (
        time,
        ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "sleep"),
        _TIME,
    ),
)


@contextmanager
def _calls_noted(fn: Callable[..., Any], noted: list[_Noted]) -> Iterator[None]:
    """Notes such calls of the user's code as long as the block runs; they still do what they do."""
    file, scope = fn.__code__.co_filename, fn.__globals__
    undo = []
    imported = []  # by `from time import time`
    for owner, names, text in _CALLS:
        for name in names:
            undo.append((owner, name, original := getattr(owner, name)))
            noting = _noting(original, text, file, noted)
            setattr(owner, name, noting)
            for own in [own for own, value in scope.items() if value is original]:
                imported.append((own, original))
                scope[own] = noting
    try:
        yield
    finally:
        for owner, name, original in undo:
            setattr(owner, name, original)
        scope.update(imported)


def _noting(original: Callable[..., Any], text: str, file: str, noted: list[_Noted]) -> Callable[..., Any]:
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == logging.__file__:
            frame = frame.f_back  # type: ignore[assignment]
        if threading.get_ident() == thread and frame is not None:
            where = frame.f_code.co_filename
            if not where.startswith(NOT_THE_USERS):
                noted.append(_Noted(frame.f_lineno if where == file else None, text))
        return original(*args, **kwargs)

    return call


# --- What the function can reach ---


def _reached(fn: Callable[..., Any]) -> Mapping[str, Any]:
    """The globals, closed-over variables and attributes of modules' own that it names."""
    found = inspect.getclosurevars(fn)
    return {**found.globals, **found.nonlocals}


def _state(fn: Callable[..., Any]) -> dict[str, Any]:
    return {name: _shallow(x) for name, x in _reached(fn).items()}


def _shallow(x: Any) -> Any:
    """Equal to what it was as long as nothing was put into it or taken out."""
    if isinstance(x, dict):
        return id(x), [(id(k), id(v)) for k, v in x.items()]
    if isinstance(x, _CONTAINERS):
        return id(x), [id(v) for v in x]
    if isinstance(x, torch.Tensor):
        return id(x), x._version
    if isinstance(x, type | ModuleType) or not hasattr(x, "__dict__"):
        return id(x)
    return id(x), [(k, id(v)) for k, v in vars(x).items()]


def _random_state() -> dict[str, Any]:
    found: dict[str, Any] = {"Python's random": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        found["NumPy's random"] = numpy.random.get_state()[1].tobytes(), numpy.random.get_state()[2]
    found["torch's generator"] = torch.get_rng_state().tolist()
    return found


# --- Where ---


def _refuse_by_name(fn: Callable[..., Any]) -> None:
    dates = (datetime, datetime.datetime, datetime.date)
    has_dates = any(x in dates for x in _reached(fn).values() if isinstance(x, type | ModuleType))
    for instruction, line in _instructions(fn):
        has_dates |= instruction.opname == "IMPORT_NAME" and instruction.argval == "datetime"
        # Nothing can be put in the place of a method of a class written in C.
        if has_dates and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval in _OF_DATES:
            raise _error(fn, line, _TIME)
        if instruction.opname == "STORE_ATTR" and instruction.argval in _OF_TENSORS:
            text = f"assigns .{instruction.argval} of a tensor: write it with copy_, or return it"
            raise _error(fn, line, text)


def _line_of(fn: Callable[..., Any], name: str) -> int | None:
    """The line where a name is stored, or else first read."""
    uses = [(i.opname, line) for i, line in _instructions(fn) if i.argval == name]
    return next((line for opname, line in sorted(uses, key=lambda use: not use[0].startswith("STORE"))), None)


def _instructions(fn: Callable[..., Any]) -> Iterator[tuple[dis.Instruction, int | None]]:
    lines = dict(dis.findlinestarts(fn.__code__))
    line = None
    for instruction in dis.get_instructions(fn):
        line = lines.get(instruction.offset, line)
        yield instruction, line
