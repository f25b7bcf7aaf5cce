"""What a mod reads from its surroundings: captured tensors and numbers, and everything its trace depends on.

:func:`stand_in` makes a copy of a mod whose closure cells, globals, defaults, attributes and items are replaced, as
they are reached, by stand-ins: a tensor or a number by what ``leaf`` returns for it, a function by a copy that sees
stand-ins itself, any other object by one that notes which attributes are asked for. Every step is noted in
:class:`Reads`, which then compiles one Python function: given another mod of the same code it returns the tensors and
numbers there, or None where anything else is not as it was. So a trace is used again exactly as long as it holds, and
a closure made anew for every step costs a few hundred nanoseconds per read.
"""

from __future__ import annotations

import builtins
import dis
import functools
import numbers
import types
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor

# Packages whose modules, functions and classes are taken as they are.
_TRUSTED = frozenset({"torch", "math", "operator", "functools", "itertools", "numpy", "builtins", "typing", "cmath"})
_CONSTANTS = (
    bool, type(None), str, bytes, complex, type(Ellipsis), slice, range, Enum, torch.dtype, torch.device,
    torch.memory_format, torch.layout, set, frozenset,
)  # fmt: skip

_KEYS = (str, int, tuple)  # what may stand between brackets: equal ones are the same place

Leaf = Callable[[Any, str, str], Any]
"""``leaf(value, name, variable)``: what stands for a captured tensor or number in a trace, or the value itself, which
is then a constant of the trace. Names are for messages and may repeat; variables are unique."""


class Reads:
    """The notes of one trace, in order; each is a line of the function that checks them."""

    def __init__(self, leaf: Leaf):
        self.leaf = leaf
        self.leaves: list[str] = []  # variables that hold tensors and numbers
        self._lines: list[str] = []
        self._known: dict[str, Any] = {"Tensor": Tensor, "FunctionType": types.FunctionType}
        self._constants: dict[Any, str] = {}
        self._variables: dict[str, str] = {}  # expression -> variable
        self._answers: dict[str, Any] = {}  # expression -> stand-in
        self._stand_ins: dict[int, tuple[str, Any, Any]] = {}

    def stand_in(self, value: Any, read: str, name: str) -> Any:
        """What stands for `value`, which the expression `read` gives."""
        if read in self._answers:
            return self._answers[read]
        if (held := self._stand_ins.get(id(value))) is not None:
            self._check(read, f"is {held[0]}")
            found = held[2]
        else:
            found = self._made(value, read, name)
        self._answers[read] = found
        return found

    def _made(self, value: Any, read: str, name: str) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, read, name)
        if _is_number(value):
            return self._number(value, read, name)
        if isinstance(value, types.ModuleType):
            return self._module(value, read, name)
        if isinstance(value, _CONSTANTS):
            self._equal(value, read)
            return value
        if type(value) in (tuple, list):
            variable = self._check_type(value, read, f" and len({{}}) == {len(value)}")
            return type(value)(self.stand_in(x, f"{variable}[{i}]", f"{name}[{i}]") for i, x in enumerate(value))
        if type(value) is dict:
            variable = self._check_type(value, read)
            self._check(f"tuple({variable})", f"== {self._constant(tuple(value))}")
            return {k: self.stand_in(x, f"{variable}[{self._constant(k)}]", f"{name}[{k!r}]") for k, x in value.items()}
        if isinstance(value, types.MethodType):
            return self._method(value, read, name)
        if isinstance(value, functools.partial):
            return self._partial(value, read, name)
        if isinstance(value, functools._lru_cache_wrapper):
            variable = self._check_type(value, read)
            return self.stand_in(value.__wrapped__, f"{variable}.__wrapped__", name)
        if isinstance(value, type) or (callable(value) and _is_trusted(value)):
            self._check(read, f"is {self._constant(value)}")
            return value
        if isinstance(value, types.FunctionType):
            return self._function(value, read, name)
        return self._object(value, read, name)

    def compiled(self) -> Callable[[Any], tuple[Any, ...] | None]:
        """``match(fn)``: the leaves in order, or None."""
        body = "\n".join(f"        {line}" for line in self._lines) or "        pass"
        source = (
            f"def match(f):\n    try:\n{body}\n"
            "    except (AttributeError, KeyError, IndexError, TypeError, ValueError):\n        return None\n"
            f"    return ({''.join(f'{v}, ' for v in self.leaves)})\n"
        )
        scope = dict(self._known)
        exec(source, scope)
        return scope["match"]

    # --- Kinds of values ---

    def _tensor(self, value: Tensor, read: str, name: str) -> Any:
        variable = self._variable(read)
        dtype = self._constant(value.dtype)
        self.require(f"isinstance({variable}, Tensor) and {variable}.dtype is {dtype}")
        self.require(f"{variable}.dim() == {value.dim()}")
        self.leaves.append(variable)
        return self.leaf(value, name, variable)

    def _number(self, value: Any, read: str, name: str) -> Any:
        variable = self._variable(read)
        found = self.leaf(value, name, variable)
        if found is value:
            self._equal(value, read)
            return value
        kinds: tuple[type, ...] = (int, torch.SymInt) if is_int(value) else (float, torch.SymFloat)
        if type(value) not in kinds:  # one of numpy's
            kinds = (type(value),)
        self.require(f"type({variable}) in {self._constant(kinds)}")
        self.leaves.append(variable)
        return found

    def _module(self, value: types.ModuleType, read: str, name: str) -> Any:
        variable = self._variable(read)
        self.require(f"{variable} is {self._constant(value)}")
        if _is_trusted_name(value.__name__):
            return value
        return self._keep(value, variable, _Watched(self, value, variable, name))

    def _function(self, value: types.FunctionType, read: str, name: str) -> Any:
        variable = self._variable(read)
        code = self._constant(value.__code__)
        self.require(f"type({variable}) is FunctionType and {variable}.__code__ is {code}")
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        scope: dict[str, Any] = {"__builtins__": builtins, "__name__": value.__module__}
        copy = types.FunctionType(value.__code__, scope, value.__name__, None, cells)
        self._keep(value, variable, copy)  # before its surroundings, in which it may stand itself
        for i, (cell, label) in enumerate(zip(cells, value.__code__.co_freevars, strict=True)):
            content = f"{variable}.__closure__[{i}].cell_contents"
            try:
                held = value.__closure__[i].cell_contents  # type: ignore[index]
            except ValueError:
                continue  # not assigned yet: the mod says so itself if it reads it
            cell.cell_contents = self.stand_in(held, content, label)
        for label in _globals_of(value.__code__):
            if label in value.__globals__:
                scope[label] = self.stand_in(value.__globals__[label], f"{variable}.__globals__[{label!r}]", label)
        if value.__defaults__:
            copy.__defaults__ = self.stand_in(value.__defaults__, f"{variable}.__defaults__", f"{name}.__defaults__")
        if value.__kwdefaults__:
            copy.__kwdefaults__ = self.stand_in(value.__kwdefaults__, f"{variable}.__kwdefaults__", name)
        return copy

    def _method(self, value: types.MethodType, read: str, name: str) -> Any:
        variable = self._check_type(value, read)
        owner = self.stand_in(value.__self__, f"{variable}.__self__", name)
        return types.MethodType(self.stand_in(value.__func__, f"{variable}.__func__", name), owner)

    def _partial(self, value: functools.partial[Any], read: str, name: str) -> Any:
        variable = self._check_type(value, read)
        function = self.stand_in(value.func, f"{variable}.func", name)
        args = self.stand_in(value.args, f"{variable}.args", f"{name}.args")
        keywords = self.stand_in(value.keywords, f"{variable}.keywords", f"{name}.keywords")
        return functools.partial(function, *args, **keywords)

    def _object(self, value: Any, read: str, name: str) -> Any:
        variable = self._check_type(value, read)
        return self._keep(value, variable, _Watched(self, value, variable, name))

    # --- Lines ---

    def _variable(self, read: str) -> str:
        if read.isidentifier():
            return read
        if read not in self._variables:
            self._variables[read] = f"v{len(self._variables)}"
            self._lines.append(f"{self._variables[read]} = {read}")
        return self._variables[read]

    def require(self, condition: str) -> None:
        self._lines.append(f"if not ({condition}): return None")

    def _check(self, read: str, is_so: str) -> str:
        variable = self._variable(read)
        self.require(f"{variable} {is_so}")
        return variable

    def _check_type(self, value: Any, read: str, more: str = "") -> str:
        variable = self._variable(read)
        self.require(f"type({variable}) is {self._constant(type(value))}{more.format(variable)}")
        return variable

    def _equal(self, value: Any, read: str) -> None:
        if value is None or value is True or value is False or value is Ellipsis:
            self._check(read, f"is {self._constant(value)}")
        else:
            self._check_type(value, read)
            self._check(read, f"== {self._constant(value)}")

    def _constant(self, value: Any) -> str:
        key = (type(value), value) if isinstance(value, _KEYS) else id(value)
        if key not in self._constants:
            name = f"c{len(self._known)}"
            self._known[name] = value
            self._constants[key] = name
        return self._constants[key]

    def _keep(self, value: Any, variable: str, stand_in: Any) -> Any:
        self._stand_ins[id(value)] = (variable, value, stand_in)  # value too, so that its id stays its own
        return stand_in


class _Watched:
    """Stands for an object or module: what is asked of it is noted and answered with stand-ins."""

    def __init__(self, reads: Reads, value: Any, variable: str, name: str):
        object.__setattr__(self, "_tk", (reads, value, variable, name))

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # so that isinstance answers as the object does
        return object.__getattribute__(self, "_tk")[1].__class__

    def __getattribute__(self, attribute: str) -> Any:
        if attribute == "__class__":
            return object.__getattribute__(self, "_tk")[1].__class__
        reads, value, variable, name = object.__getattribute__(self, "_tk")
        found = getattr(value, attribute)
        return reads.stand_in(found, f"{variable}.{attribute}", f"{name}.{attribute}")

    def __setattr__(self, attribute: str, to: Any) -> None:
        raise TypeError(f"a mod must not write {attribute} of {object.__getattribute__(self, '_tk')[3]}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reads, value, variable, name = object.__getattribute__(self, "_tk")
        if isinstance(value, torch.nn.Module):
            method, read = type(value).forward, f"type({variable}).forward"
        else:
            method, read = type(value).__call__, f"type({variable}).__call__"
        return reads.stand_in(method, read, name)(self, *args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        reads, value, variable, name = object.__getattribute__(self, "_tk")
        return reads.stand_in(value[key], f"{variable}[{reads._constant(key)}]", f"{name}[{key!r}]")

    def __len__(self) -> int:
        reads, value, variable, _ = object.__getattribute__(self, "_tk")
        reads.require(f"len({variable}) == {len(value)}")
        return len(value)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        reads, value, variable, _ = object.__getattribute__(self, "_tk")
        reads.require(f"bool({variable}) is {bool(value)}")
        return bool(value)


# numpy, which torch does without, registers its numbers with Python's classes of them.


def is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral | torch.SymInt)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool | Enum):
        return False
    is_float = isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational)
    return is_float or is_int(value) or isinstance(value, torch.SymFloat)


def _is_trusted(value: Any) -> bool:
    """A function of torch's or Python's own; not one that was made inside of a function, as and_masks makes them."""
    if isinstance(value, torch.nn.Module) or _captures(value):
        return False
    if isinstance(value, types.FunctionType):
        module = value.__globals__.get("__name__")
    else:
        module = getattr(value, "__module__", None) or getattr(type(value), "__module__", "")
    return isinstance(module, str) and _is_trusted_name(module)


def _captures(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and bool(value.__closure__) and not hasattr(value, "__wrapped__")


def _is_trusted_name(module: str) -> bool:
    return module.partition(".")[0] in _TRUSTED


@functools.lru_cache(maxsize=4096)
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The names that code, and the code inside of it, reads as globals."""
    found = {i.argval: None for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= dict.fromkeys(_globals_of(constant))
    return tuple(found)


def anchor(fn: Any) -> Any:
    """What all mods that can share a trace have in common, to look it up by: a code object, or a class."""
    if isinstance(fn, types.FunctionType):
        return fn.__code__
    if isinstance(fn, types.MethodType):
        return anchor(fn.__func__)
    if isinstance(fn, functools.partial):
        return anchor(fn.func)
    return type(fn)
