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
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from tk.codegen.errors import SideEffect, TraceError
from tk.codegen.tracing.reads import NOT_THE_USERS, PYTHONS, is_of_a_collection

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
    names = [name for name, value in _reached(fn).items() if value is x] if isinstance(fn, FunctionType) else []
    return _error(fn, line, f"changes {(*names, 'a tensor')[0]}, which is not its own: return what should change")


def _check(
    fn: Callable[..., Any],
    printed: _Printed,
    noted: Sequence[_Noted],
    before: Sequence[_Reached],
    drawn: Mapping[str, Any],
) -> None:
    if noted:
        raise _error(fn, noted[0].line, noted[0].text)
    if printed.line:
        raise _error(fn, printed.line, "prints, which no kernel does: leave it to the caller")
    for x in before:
        if x.state() != x.was:
            text = f"changes {x.name}, which is not its own: return what should change"
            raise _error(fn, _line_of(fn, x.name), text)
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
            if not where.startswith(NOT_THE_USERS) and not is_of_a_collection(frame):
                noted.append(_Noted(frame.f_lineno if where == file else None, text))
        return original(*args, **kwargs)

    return call


# --- What the function can reach ---

_SITE = str(Path(torch.__file__).parents[1])  # where other packages are
_MOST = 2000  # objects: a function may hold a whole model


@dataclass(frozen=True)
class _Reached:
    """Something that outlives the call. name: of the variable by which it is reached."""

    name: str
    state: Callable[[], Any]
    was: Any


def _reached(fn: Callable[..., Any]) -> Mapping[str, Any]:
    """The globals and closed-over variables that it names, in functions inside of it too."""
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    found = {name: fn.__globals__[name] for name in _names(fn.__code__) if name in fn.__globals__}
    for name, cell in cells.items():
        with suppress(ValueError):  # a variable without a value yet
            found[name] = cell.cell_contents
    return found


def _names(code: CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return {*code.co_names}.union(*map(_names, inner))


def _state(fn: Callable[..., Any]) -> list[_Reached]:
    """All that the function reaches by its variables, by those of the user's functions that it calls, and by what is
    in them, as it is now."""
    found: list[_Reached] = []
    pending: deque[tuple[str, Any]] = deque([(fn.__name__, fn)])
    seen: dict[int, Any] = {}  # which keeps them alive
    while pending and len(found) < _MOST:
        name, x = pending.popleft()
        if id(x) in seen or isinstance(x, _PLAIN):
            continue
        seen[id(x)] = x
        state = partial(_shallow, x)
        found.append(_Reached(name, state, state()))
        pending += ((name, part) for part in _parts(x))
        if isinstance(x, FunctionType) and _is_the_users(x.__module__):
            for variable, value in _reached(x).items():
                state = partial(_value, x, variable)
                found.append(_Reached(variable, state, state()))
                pending.append((variable, value))
                if isinstance(value, ModuleType) and _is_the_users(value.__name__):
                    of_module = {n: v for n, v in vars(value).items() if n in _names(x.__code__)}
                    state = partial(_attributes, value, list(of_module))
                    found.append(_Reached(variable, state, state()))
                    pending += ((variable, v) for v in of_module.values())
    return found


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _value(fn: FunctionType, name: str) -> int:
    return id(_reached(fn).get(name))


def _attributes(x: Any, names: Sequence[str]) -> list[int]:
    return [id(vars(x).get(name)) for name in names]


def _is_the_users(module: str | None) -> bool:
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return module == "__main__" or file is None or not file.startswith((*NOT_THE_USERS, PYTHONS, _SITE))


def _has_attributes(x: Any) -> bool:
    """Whether the user's code may assign its attributes: what traces and logs are made of changes by itself."""
    file = getattr(sys.modules.get(type(x).__module__), "__file__", None) or ""
    return hasattr(x, "__dict__") and (isinstance(x, torch.nn.Module) or not file.startswith(NOT_THE_USERS))


def _parts(x: Any) -> Sequence[Any]:
    """What is inside of it."""
    if isinstance(x, dict):
        return list(x.values())
    if isinstance(x, list | tuple | set | frozenset | deque):
        return list(x)
    if isinstance(x, partial):
        return [x.func, x.args, x.keywords]
    if isinstance(x, MethodType):
        return [x.__self__, x.__func__]
    if isinstance(x, FunctionType):
        return [x.__defaults__, x.__kwdefaults__]
    if isinstance(x, property):
        return [x.fget]
    if isinstance(x, staticmethod | classmethod):
        return [x.__func__]
    if isinstance(x, type):
        return list(vars(x).values()) if _is_the_users(x.__module__) else []
    if isinstance(x, torch.Tensor | ModuleType) or not _has_attributes(x):
        return []
    return [*vars(x).values(), type(x)]


def _shallow(x: Any) -> Any:
    """Equal to what it was as long as nothing was put into it or taken out."""
    if isinstance(x, dict):
        return [(id(k), id(v)) for k, v in x.items()]
    if isinstance(x, list | set | deque):
        return [id(v) for v in x]
    if isinstance(x, torch.Tensor):
        return None if x.is_inference() else x._version
    if isinstance(x, ContextVar):
        return id(x.get(None))
    if isinstance(x, io.StringIO | io.BytesIO):
        return x.getvalue()
    if isinstance(x, type) and _is_the_users(x.__module__):
        return [(k, id(v)) for k, v in vars(x).items()]
    if isinstance(x, type | ModuleType):
        return None
    if isinstance(x, bytearray | array) or type(x).__module__ == "numpy":
        return bytes(x) if getattr(x, "nbytes", 0) <= _MOST_BYTES else None
    return [(k, id(v)) for k, v in vars(x).items()] if _has_attributes(x) else None


_MOST_BYTES = 1 << 16


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
