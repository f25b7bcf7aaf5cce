"""What a function leaves changed, beside its arguments: refused, since a kernel would not do it.

A function runs when it is traced and never again. What it appends to a list or counts in a global, and how far it moves
an iterator on, would happen at build time alone. What it calls is watched in reads.py.
"""

from __future__ import annotations

import ctypes
import dis
import gc
import inspect
import io
import sys
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)  # fmt: skip
from typing import Any

import torch

from tk.codegen.errors import SideEffect, TraceError, where
from tk.codegen.tracing.owners import Owner, of_file, package_of

_OF_TENSORS = ("data", "grad")  # attributes whose assignment changes a tensor behind autograd's back


@contextmanager
def refused(fn: Callable[..., Any]) -> Iterator[None]:
    """Raises SideEffect, with the line of `fn`, for what is changed by what runs inside."""
    fn = inspect.unwrap(fn)
    if not isinstance(fn, FunctionType):  # a callable object: there is no code of its own to look at
        yield
        return
    _refuse_assignments(fn)
    before, drawn = _state(fn), _random_state()
    try:
        yield
    except SideEffect:
        raise
    except Exception:  # it may be traced again, and would find what it changed
        _check(fn, before, drawn)
        raise
    _check(fn, before, drawn)


def changed(fn: Callable[..., Any], x: torch.Tensor, line: int | None) -> TraceError:
    """The error of a call at this line that writes into a tensor which is not among the function's arguments."""
    fn = inspect.unwrap(fn)
    names = [name for name, value in _reached(fn).items() if value is x] if isinstance(fn, FunctionType) else []
    return _error(fn, line, f"changes {(*names, 'a tensor')[0]}, which is not its own: return what should change")


def _check(fn: Callable[..., Any], before: Sequence[_Reached], drawn: Mapping[str, Any]) -> None:
    for x in before:
        if x.state() != x.was:
            text = f"changes {x.name}, which is not its own: return what should change"
            if x.is_moved:
                text = f"moves {x.name} on, which is not its own: every call would have what the build had of it"
            raise _error(fn, _line_of(fn, x.name), text)
    for what, was in drawn.items():
        if _random_state()[what] != was:
            raise _error(
                fn, None, f"draws from {what}, or seeds it: the number would be the same in every call; draw with "
                "torch.rand_like and the like, or give the number as a parameter",
            )  # fmt: skip


def _error(fn: Callable[..., Any], line: int | None, text: str) -> TraceError:
    return SideEffect(f"{where(fn, line)}: a side effect: it {text}")


# --- What the function can reach ---

_MOST = 2000  # objects: a function may hold a whole model


@dataclass(frozen=True)
class _Reached:
    """Something that outlives the call. name: of the variable by which it is reached. is_moved: whether it is an
    iterator or a file, which moves on where it is read."""

    name: str
    state: Callable[[], Any]
    was: Any
    is_moved: bool = False


def _reached(fn: Callable[..., Any]) -> Mapping[str, Any]:
    """The globals and closed-over variables that it names, in functions inside of it too."""
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    found = {name: fn.__globals__[name] for name in _names(fn.__code__) if name in fn.__globals__}
    for name, cell in cells.items():
        with suppress(ValueError):  # a variable without a value yet
            found[name] = cell.cell_contents
    return {name: x for name, x in found.items() if type(x) not in weakref.ProxyTypes}  # what it is of may be gone


def _names(code: CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return {*code.co_names}.union(*map(_names, inner))


def _state(fn: Callable[..., Any]) -> list[_Reached]:
    """All that the function reaches by its variables, by those of the user's functions that it calls, and by what is
    in them, as it is now."""
    package = package_of(fn)
    found: list[_Reached] = []
    pending: deque[tuple[str, Any]] = deque([(fn.__name__, fn)])
    seen: dict[int, Any] = {}  # which keeps them alive
    while pending and len(found) < _MOST:
        name, x = pending.popleft()
        if id(x) in seen or type(x) in weakref.ProxyTypes or isinstance(x, _PLAIN):
            continue
        seen[id(x)] = x
        is_moved = _is_moved(x)
        state = partial(_position, x) if is_moved else partial(_shallow, x, package)
        found.append(_Reached(name, state, state(), is_moved))
        pending += ((name, part) for part in (_sources(x) if is_moved else _parts(x, package)))
        if isinstance(x, FunctionType) and _is_the_users(x, package):
            for variable, value in _reached(x).items():
                state = partial(_value, x, variable)
                found.append(_Reached(variable, state, state()))
                pending.append((variable, value))
                if isinstance(value, ModuleType) and _is_the_users(value, package):
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


def _is_the_users(x: Any, package: str) -> bool:
    """Whether the user wrote a function, a class or a module."""
    if isinstance(x, FunctionType):
        return of_file(x.__code__.co_filename, package) is Owner.USER
    module = x if isinstance(x, ModuleType) else sys.modules.get(x.__module__)
    return of_file(getattr(module, "__file__", None) or "", package) is Owner.USER


def _has_attributes(x: Any) -> bool:
    """Whether the user's code may assign its attributes: what traces and logs are made of changes by itself."""
    file = getattr(sys.modules.get(type(x).__module__), "__file__", None) or ""
    has_any = hasattr(x, "__dict__") or any("__slots__" in vars(c) for c in type(x).__mro__)
    return has_any and (isinstance(x, torch.nn.Module) or of_file(file, "") is not Owner.TORCH)


_Bound = BuiltinMethodType | MethodWrapperType  # a method of what C has made, such as a list's append


def _parts(x: Any, package: str) -> Sequence[Any]:
    """What is inside of it."""
    if isinstance(x, dict):
        return list(x.values())
    if isinstance(x, list | tuple | set | frozenset | deque):
        return list(x)
    if isinstance(x, partial):
        return [x.func, x.args, x.keywords]
    if isinstance(x, MethodType):
        return [x.__self__, x.__func__]
    if isinstance(x, _Bound):
        return [x.__self__]
    if isinstance(x, FunctionType):
        return [x.__defaults__, x.__kwdefaults__]
    if isinstance(x, property):
        return [x.fget]
    if isinstance(x, staticmethod | classmethod):
        return [x.__func__]
    if isinstance(x, type):
        return list(vars(x).values()) if _is_the_users(x, package) else []
    if isinstance(x, torch.Tensor | ModuleType) or not _has_attributes(x):
        return []
    return [*_fields(x).values(), type(x)]


def _fields(x: Any) -> dict[str, Any]:
    """The attributes of an object, of its slots too."""
    slots: list[str] = []
    for c in type(x).__mro__:
        names = vars(c).get("__slots__", ())
        slots += [names] if isinstance(names, str) else names
    found = {n: inspect.getattr_static(x, n, None) for n in slots}
    held = {n: d.__get__(x) for n, d in found.items() if isinstance(d, MemberDescriptorType) and hasattr(x, n)}
    return {**getattr(x, "__dict__", {}), **held}


def _shallow(x: Any, package: str) -> Any:
    """Equal to what it was as long as nothing was put into it or taken out."""
    if isinstance(x, dict):
        return [(id(k), id(v)) for k, v in x.items()]
    if isinstance(x, list | set | deque):
        return [id(v) for v in x]
    if isinstance(x, torch.Tensor):
        return None if x.is_inference() else x._version
    if isinstance(x, io.StringIO | io.BytesIO):
        return None if x.closed else (x.getvalue(), x.tell())
    if isinstance(x, ContextVar):
        return id(x.get(None))
    if isinstance(x, type) and _is_the_users(x, package):
        return [(k, id(v)) for k, v in vars(x).items()]
    if isinstance(x, type | ModuleType):
        return None
    if isinstance(x, bytearray | array) or type(x).__module__ == "numpy":
        return bytes(x) if getattr(x, "nbytes", 0) <= _MOST_BYTES else None
    return [(k, id(v)) for k, v in _fields(x).items()] if _has_attributes(x) else None


_MOST_BYTES = 1 << 16


def _is_moved(x: Any) -> bool:
    """Whether it is an iterator, or a file, whose place no attribute has."""
    if isinstance(x, io.IOBase):
        return not isinstance(x, io.StringIO | io.BytesIO)
    return isinstance(x, Iterator) and not _has_attributes(x)


def _position(x: Iterator[Any]) -> Any:
    """Equal to what it was as long as nothing was taken of an iterator, or read of a file."""
    if isinstance(x, GeneratorType):
        frame = x.gi_frame
        return frame and (frame.f_lasti, [id(v) for v in gc.get_referents(x, frame) if not isinstance(v, dict)])
    if isinstance(x, io.IOBase):
        return _position_of_file(x)
    own = [id(v) for v in vars(x).values()] if hasattr(x, "__dict__") else []
    return own or _memory(x)


def _position_of_file(x: io.IOBase) -> Any:
    if x.closed or not x.readable():  # what is written is seen where it is called
        return None
    if isinstance(x, io.TextIOWrapper):  # it does not tell where it is while it is iterated over
        vars(x)  # made when first asked for, in its memory
        return _memory(x)
    return x.tell() if x.seekable() else None


def _memory(x: Any) -> bytes:
    """The fields of an object that is made in C. Where an iterator is, Python has no other way to ask for."""
    header = object.__basicsize__
    return ctypes.string_at(id(x) + header, type(x).__basicsize__ - header)


def _sources(x: Iterator[Any]) -> Sequence[Any]:
    """What an iterator takes its elements of, or by."""
    held = gc.get_referents(x, *([x.gi_frame] if isinstance(x, GeneratorType) and x.gi_frame else []))
    return [v for v in held if isinstance(v, Iterator | tuple | FunctionType | MethodType | _Bound)]


def _random_state() -> dict[str, Any]:
    found: dict[str, Any] = {}
    if (numpy := sys.modules.get("numpy")) is not None:
        found["NumPy's random"] = numpy.random.get_state()[1].tobytes(), numpy.random.get_state()[2]
    found["torch's generator"] = torch.get_rng_state().tolist()
    return found


# --- Where ---


def _refuse_assignments(fn: Callable[..., Any]) -> None:
    for instruction, line in _instructions(fn):
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
