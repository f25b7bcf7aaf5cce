"""What a function does and reads that no kernel can: it prints, draws, asks the machine, the process, torch's state or
how a tensor lies. It runs when it is traced and never again; a trace would keep the build's answer for every call.

Tensors are asked by :data:`OF_TENSORS`. Everything else is seen by a profile function (:class:`Watch`) while the
function is traced, by whatever name and from whatever helper of the user's it is called. Nothing is put in the place of
what is called: it does what it does, and other threads are not watched.
"""

from __future__ import annotations

import builtins
import datetime
import dis
import gc
import inspect
import io
import logging
import os
import random
import sys
import threading
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from tk.codegen.errors import SideEffect, where
from tk.codegen.tracing import sources
from tk.codegen.tracing.owners import PYTHONS, TORCHS, Owner, of_file, package_of

_OF_MACHINES = (f"{TORCHS}cuda{os.sep}__init__.py", f"{TORCHS}backends{os.sep}")


# --- Of tensors ---

_LIES = "how a tensor lies in memory: one kernel serves every layout"
_AUTOGRAD = "what autograd knows of a tensor: one kernel serves calls with gradients and without"
_DEVICE = "which device a tensor is on: an op does the same on all"


def _getters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)]


def _methods(*names: str) -> list[Any]:
    return [getattr(Tensor, name) for name in names if hasattr(Tensor, name)]


OF_TENSORS: Mapping[Any, str] = {
    **dict.fromkeys(
        _methods("is_contiguous", "stride", "storage_offset", "untyped_storage", "is_pinned", "is_inference"), _LIES
    ),
    **dict.fromkeys(_getters("requires_grad", "is_leaf", "grad_fn", "grad", "retains_grad", "output_nr", "_version"),
                    _AUTOGRAD),
    **dict.fromkeys([*_getters("is_cuda", "is_cpu", "is_meta", "is_xpu", "is_mps"), *_methods("get_device")], _DEVICE),
}  # fmt: skip
"""What a tensor is asked -> what that is, as the function that a TorchFunctionMode is given."""


def of_tensor(func: Any, args: tuple[Any, ...], frame: FrameType) -> str | None:
    """What the user's code asks a tensor in this frame, if a kernel cannot know it."""
    text = _LIES if func is Tensor.type and len(args) == 1 else OF_TENSORS.get(func)
    return text if text is not None and of_file(frame.f_code.co_filename, "") is not Owner.TORCH else None


# --- Of all else ---

_EVERY = "which would be that of the build in every call: give it as a parameter"
_LEFT = "which no kernel does: leave it to the caller"
_TIME = f"asks for the time, {_EVERY}"
_SYSTEM = f"asks the operating system, {_EVERY}"
_MACHINE = f"asks what machine and Python these are, {_EVERY}"
_INTERPRETER = f"asks the interpreter for its state, {_EVERY}"
_LOCALE = f"asks for the locale, {_EVERY}"
_THREAD = f"asks in which thread it runs, {_EVERY}"
_ALIVE = "asks by a weak reference whether an object is there, which is not so in every call: hold the object itself"
_GARBAGE = f"asks or tells the collector of garbage, {_LEFT}"
_FILE = f"reads or writes a file, {_LEFT}"
_OPENS = f"opens a file, {_LEFT}"
_PRINTS = f"prints, {_LEFT}"
_LOGS = f"logs, {_LEFT}"
_WARNS = f"warns, {_LEFT}"
_DRAWS = (
    "draws from {}, or seeds it: the number would be the same in every call; draw with torch.rand_like and the like"
)
_HASH = "takes the hash of what need not be numbers: that of a text or an object is another in every process"
_ID = "asks for the id of an object, which is another in every process: compare objects with `is`"
_ADDRESS = "makes a text of an object, which may have its address: that is another in every process"

# What is called by whatever way: by the user's own code, or for it by Python's library or another package.
_BY_MODULE: Mapping[str, str] = {
    "time": _TIME, "posix": _SYSTEM, "nt": _SYSTEM, "_socket": _SYSTEM, "_uuid": _SYSTEM, "gc": _GARBAGE,
}  # fmt: skip
_PURE: Mapping[str, tuple[str, ...]] = {
    "time": ("mktime", "strptime", "get_clock_info"),
    "posix": ("fspath",),
    "nt": ("fspath",),
    "sys": ("intern", "exc_info", "exception", "exit", "getdefaultencoding"),
}
_OF_FILES = ("read", "readv", "pread", "write", "writev", "pwrite", "sendfile", "open")  # of os
_LOGGING = ("debug", "info", "warning", "error", "critical", "exception", "log")


def _of_calls(texts: Mapping[Any, str]) -> dict[Any, str]:
    """The texts by what a profile function is given: a built-in function, or the code of one that is not."""
    return {getattr(f, "__code__", f): text for f, text in texts.items()}


_BY_CALL = _of_calls({
    builtins.print: _PRINTS, builtins.open: _FILE, builtins.input: _FILE,
    warnings.warn: _WARNS, warnings.warn_explicit: _WARNS,
    **dict.fromkeys([getattr(c, n) for c in (logging.Logger, logging.LoggerAdapter) for n in _LOGGING], _LOGS),
    **dict.fromkeys([f for f in (getattr(os, name, None) for name in _OF_FILES) if f], _FILE),
    **{getattr(type(os.environ), name): f"reads the environment, {_EVERY}"
       for name in ("__getitem__", "__iter__", "__len__")},
    **{getattr(type(os.environ), name): "changes the environment, which no kernel does"
       for name in ("__setitem__", "__delitem__")},
})  # fmt: skip

# What the user's own code calls. Libraries do so too, for answers that are the same in every call.
_BY_MODULE_OF_USERS: Mapping[str, str] = {"sys": _INTERPRETER, "_locale": _LOCALE, "_weakref": _ALIVE}
_BY_FILE_OF_USERS: Mapping[str, str] = {
    f"{PYTHONS}{name}.py": text
    for name, text in {
        "platform": _MACHINE, "locale": _LOCALE, "tempfile": _SYSTEM, "socket": _SYSTEM, "weakref": _ALIVE,
        "_weakrefset": _ALIVE,
    }.items()
}  # fmt: skip
_BY_CALL_OF_USERS = _of_calls({
    builtins.id: _ID, torch.load: _FILE, torch.save: _FILE,
    **dict.fromkeys((uuid.getnode, uuid.uuid1, uuid.uuid4), _SYSTEM),
    **dict.fromkeys((threading.get_ident, threading.get_native_id, threading.current_thread, threading.active_count,
                     threading.enumerate, threading.main_thread), _THREAD),
})  # fmt: skip
# Of some values: whether they are plain -> what is said of the others.
_BY_VALUE: Mapping[Any, tuple[Callable[[Any], bool], str]] = {
    builtins.hash: (sources.is_a_number, _HASH),
    builtins.repr: (sources.has_no_address, _ADDRESS),
    builtins.ascii: (sources.has_no_address, _ADDRESS),
}
_FOR_PYTHON = ("__hash__", "__eq__", "__repr__", "__str__")  # methods of the user's that look at objects and texts
# What the user's own code calls, not what torch calls in turn.
_OF_TORCH: Mapping[Any, str] = {
    torch.is_grad_enabled: "whether gradients are on",
    torch.is_inference_mode_enabled: "whether inference mode is on",
    torch.is_autocast_enabled: "whether autocast is on",
    torch.is_autocast_cpu_enabled: "whether autocast is on",
    torch.get_autocast_dtype: "for autocast's dtype",
    torch.get_default_dtype: "for the default dtype",
    torch.get_num_threads: "how many threads there are",
    torch.is_anomaly_enabled: "for anomaly mode",
}
_OF_TORCHS_CODE: Mapping[CodeType, str] = {
    torch.are_deterministic_algorithms_enabled.__code__: "whether algorithms are deterministic",
    torch.get_float32_matmul_precision.__code__: "for the precision of products",
    torch.initial_seed.__code__: "for torch's seed",
    torch.seed.__code__: "for a seed",
    **{getattr(Tensor, name).__code__: _LIES for name in ("dim_order", "is_shared", "storage")},
}


@contextmanager
def refused(fn: Callable[..., Any]) -> Iterator[None]:
    """Raises SideEffect, with the line, for the first that the function does or reads in this run of it, whatever else
    it raises."""
    watch, profile = Watch(fn, sys._getframe(2)), sys.getprofile()  # whose frame has the with statement
    sys.setprofile(watch)
    try:
        yield
    except Exception:
        sys.setprofile(profile)
        if watch.found:
            raise watch.found from None
        raise
    finally:
        sys.setprofile(profile)
    if watch.found:
        raise watch.found


@contextmanager
def unwatched(*given: Any) -> Iterator[None]:
    """Does not watch what torch does with what it is given, which would double the time of a trace, unless it may call
    the user's code: a function, or a method of an object."""
    watch = sys.getprofile()
    if not isinstance(watch, Watch) or not _calls_nothing(given):
        yield
        return
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(watch)


def _calls_nothing(x: Any) -> bool:
    if type(x) in (tuple, list):
        return all(map(_calls_nothing, x))
    if type(x) is dict:
        return all(map(_calls_nothing, x.values()))
    return isinstance(x, Tensor) or type(x) in _OF_VALUES


_OF_VALUES = (
    bool, int, float, complex, str, type(None), type(...), slice, torch.Size, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Generator,
)  # fmt: skip


@contextmanager
def unchanged(fn: Callable[..., Any]) -> Iterator[None]:
    """Raises SideEffect for a state of torch's that the function leaves changed, and puts it back."""
    before = _torchs_state()
    try:
        yield
    finally:
        after = _torchs_state()
        torch.set_grad_enabled(before["whether gradients are on"])
        torch.set_default_dtype(before["the default dtype"])
        torch.use_deterministic_algorithms(before["whether algorithms are deterministic"])
    for name, was in before.items():
        if after[name] != was:
            raise SideEffect(f"{where(fn)}: a side effect: it changes {name}, which no kernel does")


def _torchs_state() -> dict[str, Any]:
    return {
        "whether gradients are on": torch.is_grad_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "whether algorithms are deterministic": torch.are_deterministic_algorithms_enabled(),
    }


class Watch:
    """A profile function, which Python tells of every call, of C functions too. root: below whose frame the function
    runs. found: the first of what it refuses."""

    def __init__(self, fn: Callable[..., Any], root: FrameType):
        self.fn, self.root = fn, root
        self.package = package_of(fn)
        self.found: SideEffect | None = None
        self.seen: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        if self.found is not None:
            return
        if event == "c_call":
            owner = of_file(frame.f_code.co_filename, self.package)
            if owner is not Owner.TORCH:
                self._of_c(frame, called, owner is Owner.USER)
        elif event == "call":
            self._of_python(frame)

    def _of_c(self, frame: FrameType, called: Any, is_the_users: bool) -> None:
        if not isinstance(called, BuiltinFunctionType):
            return
        if (text := _of_builtin(called)) is not None:
            self._refuse(frame, _OPENS if is_the_users and called is builtins.open else text)
        elif is_the_users and (text := _of_users_builtin(called, frame)) is not None:
            self._refuse(frame, text)

    def _of_python(self, frame: FrameType) -> None:
        code, caller = frame.f_code, frame.f_back
        if caller is None:
            return
        if of_file(code.co_filename, self.package) is Owner.USER and code not in self.seen:
            self.seen.add(code)
            for line, read in _of_text(frame):
                if read == _DEVICE:
                    self.found = SideEffect(f"{where(self.fn, line, code)}: it asks {_DEVICE}")
                else:
                    self._refuse(frame, read, line)
                return
        by = of_file(caller.f_code.co_filename, self.package)
        if by is Owner.TORCH:
            return
        if (text := _BY_CALL.get(code)) is not None:
            self._refuse(caller, text)
        elif code.co_name in ("write", "writelines") and _is_of_the_standard_output(frame):
            self._refuse(caller, _PRINTS)
        elif by is Owner.USER:
            self._of_users_python(code, caller)

    def _of_users_python(self, code: CodeType, caller: FrameType) -> None:
        if (text := _OF_TORCHS_CODE.get(code)) is not None:
            self._refuse(caller, f"asks {text}" if text == _LIES else f"asks {text}, {_EVERY}")
        elif code.co_filename.startswith(_OF_MACHINES):
            what = f"torch.cuda.{code.co_name}" if code.co_filename == _OF_MACHINES[0] else "what torch.backends has"
            self._refuse(caller, f"asks for {what}, {_EVERY}")
        elif (text := _BY_CALL_OF_USERS.get(code)) is not None:
            self._refuse(caller, text)
        elif (text := _BY_FILE_OF_USERS.get(code.co_filename)) and not code.co_flags & inspect.CO_NESTED:
            self._refuse(caller, text)  # a nested one is what a weak reference calls, whoever lets its object go

    def _refuse(self, frame: FrameType, text: str, line: int | None = None) -> None:
        user = self._user(frame)
        if user is not None and not is_of_a_collection(frame):
            line = line or user.f_lineno
            self.found = SideEffect(f"{where(self.fn, line, user.f_code)}: a side effect: it {text}")

    def _user(self, frame: FrameType) -> FrameType | None:
        """The user's frame that called this one, by way of libraries alone; None where torch or an import did."""
        found: FrameType | None = None
        above: FrameType | None = frame
        while above is not None and above is not self.root:
            owner = of_file(above.f_code.co_filename, self.package)
            if owner is Owner.IMPORT or (owner is Owner.TORCH and found is None):
                return None
            if owner is Owner.USER:
                found = found or above
            above = above.f_back
        return found


def is_of_a_collection(frame: FrameType | None) -> bool:
    """Whether a collection of garbage called it, by what others have in gc.callbacks. The function did not."""
    codes = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


def _of_builtin(called: BuiltinFunctionType) -> str | None:
    """What a built-in function, or a method of what C has made, does for whoever calls it."""
    owner, name = called.__self__, called.__name__
    if isinstance(owner, ModuleType):
        if (text := _BY_CALL.get(called)) is None and name not in _PURE.get(owner.__name__, ()):
            text = _BY_MODULE.get(owner.__name__)
        return text
    if isinstance(owner, random.Random.__base__):  # type: ignore[arg-type]
        whose = "Python's random" if owner is random._inst else "a generator of Python's"
        return _DRAWS.format(whose) if name in ("random", "getrandbits", "seed", "setstate") else None
    if isinstance(owner, type) and issubclass(owner, datetime.date):
        return _TIME if name in ("now", "today", "utcnow") else None
    if owner is not None and (owner is sys.stdout or owner is sys.stderr) and name in ("write", "writelines", "flush"):
        return _PRINTS
    kind: Any = type(owner)
    return _FILE if _is_a_file(kind) else None


@cache
def _is_a_file(kind: type) -> bool:
    return issubclass(kind, io.IOBase) and not issubclass(kind, io.StringIO | io.BytesIO)


def _of_users_builtin(called: BuiltinFunctionType, frame: FrameType | None = None) -> str | None:
    """What it does for the user's own code, in this frame; whatever it is given, without one."""
    if frame is not None and frame.f_code.co_name in _FOR_PYTHON:
        return None
    if called in _OF_TORCH:
        return f"asks {_OF_TORCH[called]}, {_EVERY}"
    if (of_values := _BY_VALUE.get(called)) is not None:
        is_plain, text = of_values
        return None if frame is not None and sources.is_given(frame, called, is_plain) else text
    module = called.__self__.__name__ if isinstance(called.__self__, ModuleType) else ""
    if called.__name__ in _PURE.get(module, ()):
        return None
    return _BY_CALL_OF_USERS.get(called) or _BY_MODULE_OF_USERS.get(module)


def _is_of_the_standard_output(frame: FrameType) -> bool:
    """Whether the method of this frame is one of what stands for it, such as a notebook's."""
    own = frame.f_locals.get((*frame.f_code.co_varnames, "")[0])
    return own is not None and (own is sys.stdout or own is sys.stderr)


# --- What is seen in the text of a function alone, since nothing is called ---

_OF_SYS = (
    "flags", "argv", "orig_argv", "path", "modules", "executable", "prefix", "exec_prefix", "base_prefix", "platform",
    "version", "version_info", "hexversion", "implementation", "warnoptions", "_xoptions", "thread_info", "hash_info",
)  # fmt: skip


_OBJECTS_OF_SYS = [getattr(sys, n) for n in ("flags", "argv", "path", "modules", "version_info", "implementation")]


def _of_text(frame: FrameType) -> Iterator[tuple[int, str]]:
    """What the code of this frame reads or passes on -> the line. frame: at its beginning."""
    code = frame.f_code
    if (line := _asks_of_a_device(code)) is not None:
        yield line, _DEVICE
    if (line := sources.line_of_name(code, "__debug__")) is not None:
        yield line, f"asks whether assertions are on, {_EVERY}"
    own = {name: x for name, x in frame.f_locals.items() if name in code.co_freevars}
    value: Any = None
    line = code.co_firstlineno
    lines = dict(dis.findlinestarts(code))
    for instruction in dis.get_instructions(code):
        line = lines.get(instruction.offset) or line
        name, opname = instruction.argval, instruction.opname
        if opname in ("PUSH_NULL", "EXTENDED_ARG"):
            continue
        if opname in ("STORE_FAST", "STORE_DEREF", "STORE_GLOBAL", "STORE_NAME"):
            own[name], value = value, None
        elif opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = own.get(name, frame.f_globals.get(name, frame.f_builtins.get(name)))
        elif opname in ("LOAD_DEREF", "LOAD_CLASSDEREF") or opname.startswith("LOAD_FAST"):
            value = own.get(name) if isinstance(name, str) else None
        elif opname == "IMPORT_NAME":
            value = sys.modules.get(name.partition(".")[0])
        elif opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            if value is sys and name in _OF_SYS:
                yield line, _INTERPRETER
            if name == "__hash__" and code.co_name not in _FOR_PYTHON:
                yield line, _HASH
            try:
                value = sources.attribute(value, name)
            except LookupError:
                value = None
        else:
            value = None
        if issubclass(type(value), (weakref.ReferenceType, *weakref.ProxyTypes)):
            yield line, _ALIVE
        elif value is not None and any(value is x for x in _OBJECTS_OF_SYS):
            yield line, _INTERPRETER
        elif (text := _of_passed(value)) and (type(value) is partial or sources.is_passed(code, line, name)):
            yield line, text


def _of_passed(value: Any) -> str | None:
    """What a function does that is given to another, as to map, or is in a partial: a call by C is not watched."""
    if type(value) is partial:
        return _of_passed(value.func)
    if isinstance(value, BuiltinFunctionType):
        return _of_builtin(value) or _of_users_builtin(value)
    return _BY_CALL.get(value.__code__) if isinstance(value, FunctionType) else None


def _asks_of_a_device(code: CodeType) -> int | None:
    """The line where a device's type or index is read, in code that reads a device."""
    line, found, has_device = None, None, False
    lines = dict(dis.findlinestarts(code))
    for instruction in dis.get_instructions(code):
        line = lines.get(instruction.offset, line)
        if instruction.opname == "LOAD_ATTR" and "NULL" not in instruction.argrepr:
            has_device |= instruction.argval == "device"
            if has_device and instruction.argval in ("type", "index") and found is None:
                found = line
    return found
