"""Copies of functions that call something else by the names that they use.

A copy has the defaults, the closure and the globals of the original, and its code, but that the names that lead to a
redirected function are others: ``silu``, ``F.silu``, ``torch.nn.functional.silu``, or a helper that calls one of them,
which is copied as well. The other names are added to the module's globals, and are gone with the copies. What the
module has otherwise is not changed, and neither is what anyone else sees: so the copies see what is patched there, a
call costs no more than before, and torch.compile and torch.export see plain Python.
"""

from __future__ import annotations

import copy
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from tk.dropin.bytecode import Path, codes, paths, renamed
from tk.dropin.decisions import count
from tk.dropin.replacement import Function, Replacement, StandIn

__all__ = ["Redirector", "is_redirected", "mark", "own_method"]

_MARK = "__tk_redirected__"
_NOT_FOLLOWED = ("torch", "tk", "typing", "collections", "functools", "math", "logging", "warnings")


def is_redirected(function: Any) -> bool:
    return hasattr(function, _MARK)


def mark(function: FunctionType) -> FunctionType:
    """Marks a function as one that :func:`tk.use` has put in the place of another."""
    setattr(function, _MARK, True)
    return function


class Redirector:
    """stand_ins: by the functions that they stand for."""

    def __init__(self, stand_ins: Mapping[Function, StandIn]):
        self._stand_ins = dict(stand_ins)
        self._copies: dict[FunctionType, FunctionType | None] = {}
        self._replaced: dict[FunctionType, tuple[Replacement, ...]] = {}
        self._names = _Names()

    def add(self, stand_in: StandIn) -> None:
        """One more, before anything is copied."""
        self._stand_ins[stand_in.original] = stand_in

    def methods(self, module: nn.Module) -> dict[str, FunctionType]:
        """The functions of its class that ``forward`` leads to by name, itself included."""
        found: dict[str, FunctionType] = {}
        waiting = ["forward"]
        while waiting:
            name = waiting.pop()
            function = own_method(type(module), name)
            if name in found or function is None:
                continue
            found[name] = function
            waiting += [n for code in codes(function) for n in code.co_names]
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

    def replaced(self, function: FunctionType) -> tuple[Replacement, ...]:
        """What is replaced in a copy, in the order of the code; nothing where it would be the same."""
        if function not in self._replaced:
            self._replaced[function] = ()  # of a function that calls itself
            found = [stand_in.replacement for _, stand_in in self._hits(function)]
            found += [r for _, helper in self._helpers(function) for r in self.replaced(helper)]
            found += [r for _, table in self._tables(function) for f in table.values() for r in self.replaced(f)]
            self._replaced[function] = tuple(dict.fromkeys(found))
        return self._replaced[function]

    def copy(self, function: FunctionType) -> FunctionType:
        """A method of a model. Raises ValueError for what cannot be copied."""
        made = self._copy(function)
        made.__dict__[_NAMES] = self._names  # which live as long as one of these does
        return made

    def _copy(self, function: FunctionType) -> FunctionType:
        made = self._copies.get(function)
        if made is None:
            made = FunctionType(
                function.__code__,
                function.__globals__,
                function.__name__,
                function.__defaults__,
                self._closure(function),
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
            made.__code__ = renamed(function.__code__, self._other_names(function))
            mark(made)
        return made

    def _other_names(self, function: FunctionType) -> dict[Path, str]:
        """For each path that leads to what is redirected, the name that stands for the path's first."""
        found: dict[Path, str] = {}
        for path, stand_in in self._hits(function):
            place = _place(function, path, stand_in.original)
            name = self._names.of(function.__globals__, path[0])
            if len(path) == 1:
                self._names.put(function.__globals__, name, place.guarded(stand_in.function))
            else:
                self._put_below(function, path, name, place.guarded(stand_in.function))
            found[path] = name
        for name, helper in self._helpers(function):
            if name in function.__globals__ and self.replaced(helper):
                place = _place(function, (name,), helper)
                found[name,] = self._names.of(function.__globals__, name)
                self._names.put(function.__globals__, found[name,], place.guarded(self._copy(helper)))
        for name, entries in self._tables(function):
            found[name,] = self._names.of(function.__globals__, name)
            table = self._redirected_table(function.__globals__[name], entries)
            self._names.put(function.__globals__, found[name,], table)
        return found

    def _put_below(self, function: FunctionType, path: Path, name: str, stand_in: Callable[..., Any]) -> None:
        """Puts a stand-in into a module that has nothing but stand-ins, and modules like it."""
        module = function.__globals__.get(name)
        if module is None:
            module = ModuleType(path[0])
            self._names.put(function.__globals__, name, module)
        for part in path[1:-1]:
            if part not in vars(module):
                vars(module)[part] = ModuleType(part)
            module = vars(module)[part]
        vars(module)[path[-1]] = stand_in

    def _closure(self, function: FunctionType) -> tuple[CellType, ...] | None:
        """A decorator holds the function that it wraps in a cell."""
        if function.__closure__ is None:
            return None
        cells = []
        for cell in function.__closure__:
            content = _content(cell)
            is_changed = isinstance(content, FunctionType) and _is_followed(content) and self.replaced(content)
            cells.append(CellType(self._copy(content)) if is_changed else cell)
        return tuple(cells)

    # --- What a function calls by name ---

    def _hits(self, function: FunctionType) -> Iterator[tuple[tuple[str, ...], StandIn]]:
        for path in paths(function):
            if (stand_in := self._stand_in(_resolved(function, path))) is not None:
                yield path, stand_in

    def _stand_in(self, value: Any) -> StandIn | None:
        return self._stand_ins.get(value) if callable(value) and getattr(type(value), "__hash__", None) else None

    def _helpers(self, function: FunctionType) -> Iterator[tuple[str, FunctionType]]:
        """Functions of the model's own: global ones, and what a decorator holds."""
        for path in paths(function):
            value = _resolved(function, path[:1])
            if isinstance(value, FunctionType) and _is_followed(value) and value not in self._stand_ins:
                yield path[0], value
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            content = _content(cell)
            if isinstance(content, FunctionType) and _is_followed(content):
                yield f"<{name}>", content

    def _tables(self, function: FunctionType) -> Iterator[tuple[str, dict[str, FunctionType]]]:
        """transformers' table of attention functions, of which a model asks for one by name."""
        for path in paths(function):
            value = _resolved(function, path[:1])
            if type(value).__name__ == "AttentionInterface" and hasattr(value, "get_interface"):
                entries = {name: value[name] for name in value}
                found = {n: f for n, f in entries.items() if isinstance(f, FunctionType) and self.replaced(f)}
                if found:
                    yield path[0], found

    def _redirected_table(self, table: Any, entries: dict[str, FunctionType]) -> Any:
        """A table of this model's own: its local entries go before those that all share."""
        made = copy.copy(table)
        made._local_mapping = dict(table._local_mapping)
        for name, function in entries.items():
            made[name] = _guarded_entry(table, name, function, self._copy(function))
        return made


# --- What is called while nothing is patched ---


@dataclass(frozen=True)
class Place:
    """The place in which a model's code looks a function up: ``F.gelu`` is the name "F" in the model's module, which
    leads to the module torch.nn.functional, and there the name "gelu".

    root: the model's module, or what stands for it. first: what its name led to. owner: the module that has the
    function under ``name``, the root itself for a name alone.
    """

    root: Any
    root_name: str
    first: Any
    owner: Any
    name: str
    original: Function

    def guarded(self, ours: Function) -> Function:
        """ours, as long as the original stands there: both names are looked at in every call, for either may be
        patched. Then that is called, as the model wrote it."""
        root, root_name, first, owner, name, original = (
            self.root, self.root_name, self.first, self.owner, self.name, self.original,
        )  # fmt: skip

        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(owner, name, None) is original and getattr(root, root_name, None) is first:
                return ours(*args, **kwargs)
            count()  # as long as it is patched
            found = getattr(root, root_name)
            if owner is not root:
                found = getattr(owner if found is first else found, name)
            return found(*args, **kwargs)

        return call


def _place(function: FunctionType, path: Path, original: Callable[..., Any]) -> Place:
    root: Any = sys.modules.get(function.__module__ or "")
    if root is None or vars(root) is not function.__globals__:
        root = _Namespace(function.__globals__)
    first = owner = function.__globals__[path[0]]
    for name in path[1:-1]:
        owner = vars(owner)[name]
    return Place(root, path[0], first, root if len(path) == 1 else owner, path[-1], original)


class _Namespace:
    """Globals of code that is in no module."""

    def __init__(self, names: dict[str, Any]):
        self._of = names

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_of"][name]
        except KeyError:
            raise AttributeError(name) from None


def _guarded_entry(table: Any, name: str, original: FunctionType, copied: FunctionType) -> Callable[..., Any]:
    """Guards an entry of a table as ``Place.guarded`` guards a name."""

    def call(*args: Any, **kwargs: Any) -> Any:
        current = table[name]
        if current is original:
            return copied(*args, **kwargs)
        count()  # as long as it is another
        return current(*args, **kwargs)

    return call


# --- The other names ---

_NAMES = "__tk_names__"
_numbers = itertools.count()


class _Names:
    """Names in the globals of modules that are a model's own, and go when it does."""

    def __init__(self) -> None:
        self._given: dict[tuple[int, str], str] = {}
        self._put: list[tuple[dict[str, Any], str]] = []
        self._number = next(_numbers)
        weakref.finalize(self, _take_back, self._put).atexit = False

    def of(self, names: dict[str, Any], original: str) -> str:
        return self._given.setdefault((id(names), original), f"__tk_{self._number}_{original}")

    def put(self, names: dict[str, Any], name: str, value: Any) -> None:
        if name not in names:
            self._put.append((names, name))
        names[name] = value


def _take_back(put: list[tuple[dict[str, Any], str]]) -> None:
    for names, name in put:
        names.pop(name, None)


_LEADING = (torch, nn, nn.functional)


def own_method(cls: type, name: str) -> FunctionType | None:
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


def _resolved(function: FunctionType, path: tuple[str, ...]) -> Any:
    """What it leads to, through torch's modules alone; None for nothing."""
    value = function.__globals__.get(path[0])
    for name in path[1:]:
        if not any(value is m for m in _LEADING):
            return None
        value = vars(value).get(name)
    return value
