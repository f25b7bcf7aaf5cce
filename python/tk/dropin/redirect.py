"""Copies of functions that call something else by the names that they use.

A copy has the code, the defaults and the closure of the original, and other globals: those of its module as they are
now, with the names that lead to a redirected function bound to its stand-in — ``silu``, ``F.silu``,
``torch.nn.functional.silu``, or a helper that calls one of them, which is copied as well. Nothing that others see is
changed, a call costs no more than before, and torch.compile and torch.export see plain Python.
"""

from __future__ import annotations

import copy
import dis
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from tk.dropin.functions import StandIn

__all__ = ["Redirector", "is_redirected", "mark"]

_MARK = "__tk_redirected__"
_NOT_FOLLOWED = ("torch", "tk", "typing", "collections", "functools", "math", "logging", "warnings")


def is_redirected(function: Any) -> bool:
    return hasattr(function, _MARK)


def mark(function: FunctionType) -> FunctionType:
    """As one that :func:`tk.use` has put in the place of another."""
    setattr(function, _MARK, True)
    return function


class Redirector:
    """replacements: what stands for which function."""

    def __init__(self, replacements: Mapping[Callable[..., Any], StandIn]):
        self._replacements = dict(replacements)
        self._copies: dict[FunctionType, FunctionType | None] = {}
        self._ops: dict[FunctionType, tuple[str, ...]] = {}
        self._shims: dict[int, ModuleType] = {}

    def add(self, original: Callable[..., Any], stand_in: StandIn) -> None:
        """One more, before anything is copied."""
        self._replacements[original] = stand_in

    def methods(self, module: nn.Module) -> dict[str, FunctionType]:
        """The functions of its class that ``forward`` leads to by name, itself included."""
        found: dict[str, FunctionType] = {}
        waiting = ["forward"]
        while waiting:
            name = waiting.pop()
            function = _method(type(module), name)
            if name in found or function is None:
                continue
            found[name] = function
            waiting += [n for code in _codes(function) for n in code.co_names]
        return found

    def helpers(self, functions: Iterable[FunctionType]) -> list[FunctionType]:
        """The functions of the model's own that these call, and those that they call."""
        found: dict[FunctionType, None] = {}
        waiting = list(functions)
        while waiting:
            for _, helper in self._helpers(waiting.pop()):
                if helper not in found:
                    found[helper] = None
                    waiting.append(helper)
        return list(found)

    def ops(self, function: FunctionType) -> tuple[str, ...]:
        """The ops of tk that a copy calls, in the order of the code; none where it would be the same."""
        if function not in self._ops:
            self._ops[function] = ()  # of a function that calls itself
            found = [stand_in.op for _, stand_in in self._hits(function)]
            found += [op for _, helper in self._helpers(function) for op in self.ops(helper)]
            found += [op for _, table in self._tables(function) for f in table.values() for op in self.ops(f)]
            self._ops[function] = tuple(dict.fromkeys(found))
        return self._ops[function]

    def copy(self, function: FunctionType) -> FunctionType:
        """Raises ValueError for what cannot be copied: it writes its module's globals, or asks for ``__name__``, which
        a copy has not (torch.compile would look its globals up in the module of that name)."""
        made = self._copies.get(function)
        if made is None:
            _check(function)
            own_globals = {k: v for k, v in function.__globals__.items() if k != "__name__"}
            made = FunctionType(
                function.__code__, own_globals, function.__name__, function.__defaults__, self._closure(function)
            )
            self._copies[function] = made  # first, for a function that calls itself
            made.__kwdefaults__ = function.__kwdefaults__
            made.__dict__.update(function.__dict__)
            made.__qualname__, made.__doc__, made.__module__ = (
                function.__qualname__,
                function.__doc__,
                function.__module__,
            )
            made.__annotations__ = function.__annotations__
            own_globals.update(self._bindings(function))
            mark(made)
        return made

    def _bindings(self, function: FunctionType) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path, stand_in in self._hits(function):
            found[path[0]] = stand_in.function if len(path) == 1 else self._shim(function.__globals__[path[0]])
        for name, helper in self._helpers(function):
            if name in function.__globals__ and self.ops(helper):
                found[name] = self.copy(helper)
        for name, table in self._tables(function):
            found[name] = self._redirected_table(function.__globals__[name], table)
        return found

    def _closure(self, function: FunctionType) -> tuple[CellType, ...] | None:
        """A decorator holds the function that it wraps in a cell."""
        if function.__closure__ is None:
            return None
        cells = []
        for cell in function.__closure__:
            content = _content(cell)
            is_changed = isinstance(content, FunctionType) and _is_followed(content) and self.ops(content)
            cells.append(CellType(self.copy(content)) if is_changed else cell)
        return tuple(cells)

    # --- What a function calls by name ---

    def _hits(self, function: FunctionType) -> Iterator[tuple[tuple[str, ...], StandIn]]:
        for path in _paths(function):
            if (stand_in := self._stand_in(_resolved(function, path))) is not None:
                yield path, stand_in

    def _stand_in(self, value: Any) -> StandIn | None:
        return self._replacements.get(value) if callable(value) and getattr(type(value), "__hash__", None) else None

    def _helpers(self, function: FunctionType) -> Iterator[tuple[str, FunctionType]]:
        """Functions of the model's own: global ones, and what a decorator holds."""
        for path in _paths(function):
            value = _resolved(function, path[:1])
            if isinstance(value, FunctionType) and _is_followed(value) and value not in self._replacements:
                yield path[0], value
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            content = _content(cell)
            if isinstance(content, FunctionType) and _is_followed(content):
                yield f"<{name}>", content

    def _tables(self, function: FunctionType) -> Iterator[tuple[str, dict[str, FunctionType]]]:
        """transformers' table of attention functions, of which a model asks for one by name."""
        for path in _paths(function):
            value = _resolved(function, path[:1])
            if type(value).__name__ == "AttentionInterface" and hasattr(value, "get_interface"):
                entries = {name: value[name] for name in value}
                found = {n: f for n, f in entries.items() if isinstance(f, FunctionType) and self.ops(f)}
                if found:
                    yield path[0], found

    def _redirected_table(self, table: Any, entries: dict[str, FunctionType]) -> Any:
        """A table of this model's own: its local entries go before those that all share."""
        made = copy.copy(table)
        made._local_mapping = dict(table._local_mapping)
        for name, function in entries.items():
            made[name] = self.copy(function)
        return made

    # --- Modules in which functions are looked up ---

    def _shim(self, module: ModuleType) -> ModuleType:
        """torch, torch.nn or torch.nn.functional with stand-ins."""
        if id(module) not in self._shims:
            made = self._shims[id(module)] = ModuleType(module.__name__, module.__doc__)
            made.__dict__.update(module.__dict__)
            for name, value in list(vars(module).items()):
                if any(value is m for m in _LEADING) and value is not module:
                    made.__dict__[name] = self._shim(value)
                elif (stand_in := self._stand_in(value)) is not None:
                    made.__dict__[name] = stand_in.function
        return self._shims[id(module)]


_LEADING = (torch, nn, nn.functional)


def _method(cls: type, name: str) -> FunctionType | None:
    """A function of a class that is not nn.Module's own."""
    for base in cls.__mro__:
        if base is nn.Module:
            return None
        if name in vars(base):
            value = vars(base)[name]
            return value if isinstance(value, FunctionType) else None
    return None


def _is_followed(function: FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] not in _NOT_FOLLOWED


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _codes(function: FunctionType) -> Iterator[CodeType]:
    """Its code and that of the functions in it."""
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [c for c in code.co_consts if isinstance(c, CodeType)]


def _paths(function: FunctionType) -> list[tuple[str, ...]]:
    """What is read of globals: ("F", "silu") for F.silu."""
    found: dict[tuple[str, ...], None] = {}
    for code in _codes(function):
        path: tuple[str, ...] = ()
        for instruction in dis.get_instructions(code):
            if instruction.opname == "LOAD_GLOBAL":
                path = (instruction.argval,)
            elif path and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                path = (*path, instruction.argval)
            elif instruction.opname not in ("CACHE", "PUSH_NULL", "EXTENDED_ARG"):
                path = ()
            if path:
                found[path] = None
    return list(found)


def _resolved(function: FunctionType, path: tuple[str, ...]) -> Any:
    """What it leads to, through torch's modules alone; None for nothing."""
    value = function.__globals__.get(path[0])
    for name in path[1:]:
        if not any(value is m for m in _LEADING):
            return None
        value = vars(value).get(name)
    return value


def _check(function: FunctionType) -> None:
    for code in _codes(function):
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                raise ValueError(f"{function.__qualname__} writes the global {instruction.argval}")
            if instruction.opname == "LOAD_GLOBAL" and instruction.argval in ("__name__", "globals"):
                raise ValueError(f"{function.__qualname__} asks for {instruction.argval}")
