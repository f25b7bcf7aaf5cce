"""What a function reads that no call brings: the machine, the process, torch's state, how a tensor lies. A trace would
keep the build's answer for every call, so it is refused.

Tensors are asked while the function is traced (:data:`OF_TENSORS`). Everything else is seen in a run of the function on
small tensors of the CPU (:func:`refused`), by whatever name and from whatever helper of the user's it is called.
"""

from __future__ import annotations

import builtins
import datetime
import dis
import gc
import io
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType
from typing import Any

import sympy
import torch
from torch import Tensor

from tk.codegen.errors import SideEffect, where

_FOLDERS = (*(Path(m.__file__).parent for m in (torch, sympy) if m.__file__), Path(__file__).parents[2])
NOT_THE_USERS = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)
PYTHONS = str(Path(os.__file__).parent) + os.sep
_TORCHS = str(_FOLDERS[0]) + os.sep
_OF_MACHINES = (f"{_TORCHS}cuda{os.sep}__init__.py", f"{_TORCHS}backends{os.sep}")


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
    return text if text is not None and not frame.f_code.co_filename.startswith(NOT_THE_USERS) else None


# --- Of all else ---

_EVERY = "which would be the build's in every call: give it as a parameter"
_TIME = f"asks for the time, {_EVERY}"
_SYSTEM = f"asks the operating system, {_EVERY}"
_FILE = "reads or writes a file, which no kernel does: leave it to the caller"
_PRINTS = "prints, which no kernel does: leave it to the caller"
_DRAWS = "draws from {}: the number would be the same in every call; draw with torch.rand_like and the like"
_PURE = ("fspath", "mktime", "strptime", "get_clock_info")

_SYSTEMS = sys.modules[os.name if os.name != "posix" else "posix"]
_BY_FUNCTION: Mapping[Any, str] = {
    **{f: _TIME for n, f in vars(time).items() if isinstance(f, BuiltinFunctionType) and n not in _PURE},
    **{f: _SYSTEM for n, f in vars(_SYSTEMS).items() if isinstance(f, BuiltinFunctionType) and n not in _PURE},
    builtins.print: _PRINTS, builtins.open: _FILE, builtins.input: _FILE,
}  # fmt: skip
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
_BY_CODE: Mapping[CodeType, str] = {
    **{getattr(type(os.environ), name).__code__: f"reads the environment, {_EVERY}"
       for name in ("__getitem__", "__iter__", "__len__")},
    **{getattr(type(os.environ), name).__code__: "changes the environment, which no kernel does"
       for name in ("__setitem__", "__delitem__")},
}  # fmt: skip
_OF_TORCHS_CODE: Mapping[CodeType, str] = {
    torch.are_deterministic_algorithms_enabled.__code__: "whether algorithms are deterministic",
    torch.get_float32_matmul_precision.__code__: "for the precision of products",
    torch.initial_seed.__code__: "for torch's seed",
    torch.seed.__code__: "for a seed",
    **{getattr(Tensor, name).__code__: _LIES for name in ("dim_order", "is_shared", "storage")},
}


@contextmanager
def refused(fn: Callable[..., Any]) -> Iterator[None]:
    """Raises SideEffect, with the line, for what the function reads or does in this run of it. It sees calls of C
    functions too, by sys.setprofile."""
    watch, profile = _Watch(fn), sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(profile)
    if watch.found:
        raise watch.found


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


class _Watch:
    """A profile function. found: the first of what it refuses."""

    def __init__(self, fn: Callable[..., Any]):
        self.fn = fn
        self.found: SideEffect | None = None
        self.seen: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        if self.found is not None:
            return
        if event == "c_call":
            self._of_c(frame, called)
        elif event == "call":
            self._of_python(frame)

    def _of_c(self, frame: FrameType, called: Any) -> None:
        if (text := _of_function(called)) is not None and (user := _user(frame)) is not None:
            self._refuse(user, text)
        elif called in _OF_TORCH and _is_the_users(frame):
            self._refuse(frame, f"asks {_OF_TORCH[called]}, {_EVERY}")

    def _of_python(self, frame: FrameType) -> None:
        code, caller = frame.f_code, frame.f_back
        if caller is None:
            return
        if (text := _BY_CODE.get(code)) is not None and (user := _user(caller)) is not None:
            self._refuse(user, text)
        elif (text := _OF_TORCHS_CODE.get(code)) is not None and _is_the_users(caller):
            self._refuse(caller, f"asks {text}" if text == _LIES else f"asks {text}, {_EVERY}")
        elif code.co_filename.startswith(_OF_MACHINES) and _is_the_users(caller):
            what = f"torch.cuda.{code.co_name}" if code.co_filename == _OF_MACHINES[0] else "what torch.backends has"
            self._refuse(caller, f"asks for {what}, {_EVERY}")
        elif code not in self.seen and _is_the_users(frame):
            self.seen.add(code)
            if (line := _asks_of_a_device(code)) is not None:
                self.found = SideEffect(f"{where(self.fn, line, code)}: it asks {_DEVICE}")

    def _refuse(self, frame: FrameType, text: str) -> None:
        if is_of_a_collection(frame):
            return
        self.found = SideEffect(f"{where(self.fn, frame.f_lineno, frame.f_code)}: a side effect: it {text}")


def is_of_a_collection(frame: FrameType | None) -> bool:
    """Whether a collection of garbage called it, by what others have in gc.callbacks. The function did not."""
    codes = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


def _is_the_users(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return not name.startswith((*NOT_THE_USERS, "<frozen")) and not (
        name.startswith(PYTHONS) and "site-packages" not in name
    )


def _user(frame: FrameType | None) -> FrameType | None:
    """The user's frame that called this one by way of Python's own library alone; None where an import did."""
    while frame is not None and not _is_the_users(frame):
        name = frame.f_code.co_filename
        if name.startswith((*NOT_THE_USERS, "<frozen importlib")):
            return None
        frame = frame.f_back
    return frame


def _of_function(called: Any) -> str | None:
    if not isinstance(called, BuiltinFunctionType):
        return None
    owner = called.__self__
    if isinstance(owner, random.Random.__base__):  # type: ignore[arg-type]
        return _DRAWS.format("a generator of Python's") if called.__name__ in ("random", "getrandbits") else None
    if isinstance(owner, type) and issubclass(owner, datetime.date):
        return _TIME if called.__name__ in ("now", "today", "utcnow") else None
    if isinstance(owner, io.IOBase) and not isinstance(owner, io.StringIO | io.BytesIO):
        return _PRINTS if owner in (sys.stdout, sys.stderr) else _FILE
    return _BY_FUNCTION.get(called)


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
