"""What a mod reads from its surroundings: captured tensors and numbers, and everything its trace depends on.

:func:`stand_in` makes a copy of a mod whose closure cells, globals, defaults, attributes and items are replaced, as
they are reached, by stand-ins: a tensor or a number by what ``leaf`` returns for it, a function by a copy that sees
stand-ins itself, any other object, class or module by one that notes what is asked of it (watched.py). Every step is
noted in :class:`Reads`, which then compiles one Python function: given another mod of the same code it returns the
tensors and numbers there, or None where anything else is not as it was. So a trace is used again exactly as long as it
holds, and a closure made anew for every step costs a few hundred nanoseconds per read. What can be neither noted nor
guarded, such as a method of an iterator, is refused by name.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import itertools
import math
import numbers
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import Tensor

from tk.flex.tracing import states, watched
from tk.flex.tracing.numbers import SYMBOLS
from tk.flex.tracing.record import Refused, is_number, number_of

_CONSTANTS = (
    bool, type(None), str, bytes, complex, type(Ellipsis), type(NotImplemented), range, torch.dtype, torch.device,
    torch.memory_format, torch.layout,
)  # fmt: skip
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
_OF_PLAIN_CLASSES = frozenset(vars(type("_", (), {"__slots__": (), "__firstlineno__": 0, "__static_attributes__": ()})))
_OF_PLAIN_CLASSES |= {"__dict__", "__weakref__"}
_BUILTINS = frozenset(vars(builtins))
_OF_FUNCTIONS = ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__")

_KEYS = (str, int, tuple)  # what may stand between brackets: equal ones are the same place

Leaf = Callable[[Any, str, str], Any]
"""``leaf(value, name, variable)``: what stands for a captured tensor or number in a trace, or the value itself, which
is then a constant of the trace. Names are for messages and may repeat; variables are unique."""


class Reads:
    """The notes of one trace, in order; each is a line of the function that checks them."""

    def __init__(
        self,
        leaf: Leaf,
        fail: Callable[[Exception], NoReturn] | None = None,
        outside: Callable[[], AbstractContextManager[Any]] = nullcontext,
        known_states: dict[Any, Any] | None = None,
    ):
        self.leaf = leaf
        self._fail = fail
        self.outside = outside  # within it other code than the mod's is run
        self.states = known_states or {}
        self.shares = False  # whether a tensor or a list that is read in several ways has one stand-in
        self.leaves: list[str] = []  # variables that hold tensors and numbers
        self._lines: list[str] = []
        self._known: dict[str, Any] = {
            "Tensor": Tensor, "FunctionType": types.FunctionType, "frozen": frozen, "lacks": _lacks,
            "is_empty": _is_empty, "modules": sys.modules, "default_dtype": torch.get_default_dtype,
            "Parameter": torch.nn.Parameter, "is_number": is_number, "is_infinite": is_infinite,
            "of_class": watched.of_class, "has_global_hook": watched.has_global_hook, "differ": _differ,
            "is_bare": is_bare, "builtins": vars(builtins),
        }  # fmt: skip
        self._constants: dict[Any, str] = {}
        self._variables: dict[str, str] = {}  # expression -> variable
        self._answers: dict[str, Any] = {}  # expression -> stand-in
        self._stand_ins: dict[int, tuple[str, Any, Any]] = {}
        self._given: list[tuple[Any, Any, str]] = []  # what a mod could write to, what it held, and its name
        self._functions: list[tuple[str, types.FunctionType]] = []
        self._things: list[tuple[str, Any]] = []  # variables, and what they hold that may be one with another
        self._owners: dict[Any, dict[str, Any]] = {}  # of methods, by function: variables, and what they hold
        self._enums: list[tuple[str, frozenset[str]]] = []  # of numbers and texts, and what their classes have
        self._open: set[int] = set()  # lists and dicts, while their items are read
        self.shadows: dict[int, type] = {}
        self.builtins = watched.builtins_of(self)

    def refuse(self, message: str) -> NoReturn:
        error = Refused(message)
        if self._fail is not None:
            self._fail(error)
        raise error

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
        if isinstance(value, Enum):
            return self._enum(value, read, name)
        if isinstance(value, _CONSTANTS):
            self._equal(value, read)
            self._bare(value, read, name)
            return value
        if type(value) in (set, frozenset, slice):
            return self._plain(value, read, name)
        if type(value) in (tuple, list, dict):
            return self._items(value, read, name)
        if isinstance(value, types.MethodType):
            return self._method(value, read, name)
        if isinstance(value, functools.partial):
            return self._partial(value, read, name)
        if isinstance(value, functools._lru_cache_wrapper):
            variable = self._check_type(value, read)
            return watched.Cached(self, value, variable, name)
        if isinstance(value, _BOUND) and not isinstance(value.__self__, types.ModuleType | type | None):
            return self._bound(value, read, name)
        if isinstance(value, type) and not watched.is_trusted_name(value.__module__):
            variable = self._check(read, f"is {self._constant(value)}")
            if issubclass(value, BaseException) and _has_no_code(value):  # `except` takes no stand-in
                self.require(f"tuple({variable}.__dict__) == {self._constant(tuple(value.__dict__))}")
                return value
            return self._keep(value, variable, watched.watch(self, value, variable, name))
        if isinstance(value, type) or (callable(value) and _is_trusted(value)):
            variable = self._check(read, f"is {self._constant(value)}")
            return states.stand_in(self, value, variable, name)
        if isinstance(value, types.FunctionType):
            return self._function(value, read, name)
        return self._object(value, read, name)

    def check_unwritten(self) -> None:
        """Refuses a mod that has written to what it reads: eagerly that lasts, and a trace is not run."""
        for held, before, name in self._given:
            now = held.cell_contents if isinstance(held, types.CellType) and not _is_empty(held) else held
            if not _is_same(now, before):
                self.refuse(f"writes to {name}, which it captures; a mod must leave its surroundings as they are")

    def confuses_things(self) -> bool:
        """Whether the mod asks what is one (``a is b``), and one has several stand-ins: then `shares` must be set
        before it is traced. Functions are one where they are equal, too, and methods where their objects are one."""
        of_functions: dict[Any, list[tuple[str, Any]]] = {}
        for variable, function in self._functions:
            of_functions.setdefault(function.__code__, []).append((variable, function))
        groups = [*of_functions.values(), *(list(owners.items()) for owners in self._owners.values())]
        if any(_asks_identity(function.__code__) for _, function in self._functions):
            of_kinds: dict[Any, list[tuple[str, Any]]] = {}
            for variable, thing in self._things:
                kind = Tensor if isinstance(thing, Tensor) else type(thing)
                of_kinds.setdefault(kind, []).append((variable, thing))
            groups += of_kinds.values()
        for group in groups:
            if len(group) > 1:
                if not _differ(*(thing for _, thing in group)):
                    return True
                self.require(f"differ({', '.join(variable for variable, _ in group)})")
        return False

    def compiled(self) -> Callable[[Any], tuple[Any, ...] | None]:
        """``match(fn)``: the leaves in order, or None."""
        body = "\n".join(f"        {line}" for line in self._lines) or "        pass"
        source = (
            f"def match(f):\n    try:\n{body}\n"
            "    except Exception:\n        return None\n"  # what it reads is not there: the next trace says so
            f"    return ({''.join(f'{v}, ' for v in self.leaves)})\n"
        )
        scope = dict(self._known)
        exec(source, scope)
        return scope["match"]

    # --- Kinds of values ---

    def _tensor(self, value: Tensor, read: str, name: str) -> Any:
        variable = self._variable(read)
        self._things.append((variable, value))
        dtype = self._constant(value.dtype)
        self.require(f"isinstance({variable}, Tensor) and {variable}.dtype is {dtype}")
        self.require(f"{variable}.dim() == {value.dim()}")
        if value.dim() == 0:
            self.require(f"is_number({variable}) is {is_number(value)}")
        if is_number(value):
            number_of((value, variable, name, self))  # which is what the kernels are given
        else:
            self.leaves.append(variable)
        made = self.leaf(value, name, variable)
        return self._keep(value, variable, made) if self.shares else made

    def _items(self, value: Any, read: str, name: str) -> Any:
        """A tuple, a list or a dict."""
        if id(value) in self._open:
            self.refuse(f"reads {name}, a {type(value).__name__} that holds itself; capture what it reads of it")
        self._open.add(id(value))
        found: Any
        if type(value) is dict:
            variable = self._check_type(value, read)
            keys = self._check(f"tuple({variable})", f"== {self._constant(tuple(value))}")
            found = {
                self._key(k, f"{keys}[{i}]", name): self.stand_in(
                    x, f"{variable}[{self._constant(k)}]", f"{name}[{k!r}]"
                )
                for i, (k, x) in enumerate(value.items())
            }
        else:
            variable = self._check_type(value, read, f" and len({{}}) == {len(value)}")
            found = [self.stand_in(x, f"{variable}[{i}]", f"{name}[{i}]") for i, x in enumerate(value)]
        self._open.discard(id(value))
        if type(value) is tuple:
            found = tuple(found)
        else:
            self._lent(found, found.copy(), name)
        return self._thing(value, variable, found)

    def _key(self, key: Any, read: str, name: str) -> Any:
        """A dict's key: numbers and texts are structure, and of what has attributes a mod is given the stand-in."""
        if isinstance(key, (*_CONSTANTS, int, float)):
            return key
        if type(key) is tuple:
            return tuple([self._key(k, f"{read}[{i}]", name) for i, k in enumerate(key)])
        if isinstance(key, Tensor):
            self.refuse(f"reads {name}, a dict with a tensor for a key; no two tensors are equal")
        return self.stand_in(key, read, f"a key of {name}")

    def _thing(self, value: Any, variable: str, found: Any) -> Any:
        """What a mod can ask the identity of, and has more than one stand-in."""
        self._things.append((variable, value))
        return self._keep(value, variable, found) if self.shares else found

    def _bare(self, value: Any, read: str, name: str) -> None:
        """Refuses a text or a number of a user's kind that has more to it than its value."""
        if type(value).__module__ == "builtins" or isinstance(value, Enum):
            return
        if not is_bare(value):
            kind = next(k for k in (bool, str, bytes, complex, int, float, object) if isinstance(value, k))
            self.refuse(
                f"reads {name}, a {type(value).__name__}, which is a kind of {kind.__name__} with attributes or "
                f"methods of its own; capture a plain {kind.__name__}"
            )
        self.require(f"is_bare({self._variable(read)})")

    def _number(self, value: Any, read: str, name: str) -> Any:
        variable = self._variable(read)
        self._bare(value, read, name)
        found = self.leaf(value, name, variable)
        if found is value:
            self._equal(value, read)
            return value
        kinds: tuple[type, ...] = (int, torch.SymInt) if is_int(value) else (float, torch.SymFloat)
        if type(value) not in kinds:  # one of numpy's
            kinds = (type(value),)
        self.require(f"type({variable}) in {self._constant(kinds)}")
        if not is_int(value):
            self.require(f"not is_infinite({variable})")
        self.leaves.append(variable)
        return found

    def _module(self, value: types.ModuleType, read: str, name: str) -> Any:
        variable = self._variable(read)
        self.require(f"{variable} is {self._constant(value)}")
        if value.__name__ == "random":
            self.refuse(f"uses {name}, which draws random numbers; capture them")
        if watched.is_trusted_name(value.__name__):
            return states.module(self, value, variable, name)
        return self._keep(value, variable, watched.watch(self, value, variable, name))

    def _function(self, value: types.FunctionType, read: str, name: str) -> Any:
        if (compiled := getattr(value, "_torchdynamo_orig_callable", None)) is not None:
            return self.stand_in(compiled, f"{read}._torchdynamo_orig_callable", name)
        if value.__globals__.get("__name__") == "torch.utils._contextlib":
            self.refuse(f"calls {name}, decorated with a state of torch (no_grad, inference_mode); use .detach()")
        variable = self._variable(read)
        if value.__globals__.get("__name__") == "logging":  # refused where it is called
            self.require(f"{variable} is {self._constant(value)}")
            return lambda *args, **kwargs: self.refuse(f"logs ({name}), {watched.LEFT_OUT}")
        code = self._constant(value.__code__)
        self.require(f"type({variable}) is FunctionType and {variable}.__code__ is {code}")
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        package = value.__globals__.get("__package__")
        scope: dict[str, Any] = {
            "__builtins__": self.builtins, "__name__": value.__globals__.get("__name__"), "__package__": package
        }  # fmt: skip
        copy = types.FunctionType(value.__code__, scope, value.__name__, None, cells)
        copy.__qualname__, copy.__doc__, copy.__module__ = value.__qualname__, value.__doc__, value.__module__
        copy.__annotations__ = value.__annotations__
        self._functions.append((variable, value))
        self._keep(value, variable, copy)  # before its surroundings, in which it may stand itself
        for i, (cell, label) in enumerate(zip(cells, value.__code__.co_freevars, strict=True)):
            try:
                held = value.__closure__[i].cell_contents  # type: ignore[index]
            except ValueError:  # not assigned yet
                self.require(f"is_empty({variable}.__closure__[{i}])")
                continue
            cell.cell_contents = self.stand_in(held, f"{variable}.__closure__[{i}].cell_contents", label)
            self._given.append((cell, cell.cell_contents, label))
        absent = [label for label in _globals_of(value.__code__) if label not in value.__globals__]
        for label in _globals_of(value.__code__):
            if label in value.__globals__:
                scope[label] = self.stand_in(value.__globals__[label], f"{variable}.__globals__[{label!r}]", label)
        if absent:
            self.require(" and ".join(f"{label!r} not in {variable}.__globals__" for label in absent))
        for label in absent:
            if label not in _BUILTINS:  # which a program may add to
                if label in vars(builtins):
                    scope[label] = self.stand_in(getattr(builtins, label), f"builtins[{label!r}]", label)
                else:
                    self.require(f"{label!r} not in builtins")
        if _matches_class(value.__code__):
            self.refuse(f"matches a class in {name}, as which no stand-in of a number or an object counts; write "
                        "isinstance")  # fmt: skip
        self._lent(scope, dict(scope), f"globals of {name}")
        if value.__defaults__:
            copy.__defaults__ = self.stand_in(value.__defaults__, f"{variable}.__defaults__", f"{name}.__defaults__")
        else:
            self.require(f"not {variable}.__defaults__")
        if value.__kwdefaults__:
            copy.__kwdefaults__ = self.stand_in(value.__kwdefaults__, f"{variable}.__kwdefaults__", name)
        else:
            self.require(f"not {variable}.__kwdefaults__")
        if value.__dict__:
            copy.__dict__.update(self.stand_in(value.__dict__, f"{variable}.__dict__", name))
            self._lent(copy.__dict__, dict(copy.__dict__), f"attributes of {name}")
        else:
            self.require(f"not {variable}.__dict__")
            self._lent(copy.__dict__, {}, f"attributes of {name}")
        return copy

    def check_functions(self) -> None:
        """What functions are called and the like, where anything that was traced may have asked."""
        names = {
            name for _, function in self._functions
            for name in (*function.__code__.co_names, *function.__code__.co_consts) if isinstance(name, str)
        }  # fmt: skip
        asked = sorted(names.intersection(_OF_FUNCTIONS))
        for enum, own in self._enums:
            if found := names.intersection(own):
                self.refuse(
                    f"asks for {min(found)}, which {enum} has of its class, an Enum of numbers or texts; capture what "
                    "it gives"
                )
        for variable, function in self._functions:
            for attribute in asked:
                held = self._constant(getattr(function, attribute))
                self.require(f"{variable}.{attribute} == {held}")

    def _enum(self, value: Enum, read: str, name: str) -> Any:
        variable = self._check(read, f"is {self._constant(value)}")
        is_number = isinstance(value, int | float | str)
        own = _of_enum(type(value))
        if own and not is_number:
            return self._keep(value, variable, watched.watch(self, value, variable, name))
        if implied := [n for n in own if n.startswith("__") and n not in _TEXTS]:
            self.refuse(f"reads {name}, a {type(value).__name__} with a {implied[0]} of its own; capture {name}.value")
        for text, function in _TEXTS.items():
            if text in own:  # which the mod may ask for by a format, too
                self.require(f"{function.__name__}({variable}) == {self._constant(function(value))}")
        self._enums.append((name, own))
        try:
            held = frozen({k: x for k, x in vars(value).items() if k != "__objclass__"})
        except TypeError:
            return self._keep(value, variable, watched.watch(self, value, variable, name))
        self.require(f"frozen({{k: x for k, x in {variable}.__dict__.items() if k != '__objclass__'}}) == "
                     f"{self._constant(held)}")  # fmt: skip
        return value

    def _plain(self, value: Any, read: str, name: str) -> Any:
        """A set or a slice of things that do not change."""
        variable = self._check_type(value, read)
        try:
            held = frozen(value)
        except TypeError as error:
            self.refuse(f"reads {name}, a {type(value).__name__} that holds a {error}; capture a tuple or a dict")
        self.require(f"frozen({variable}) == {self._constant(held)}")
        if type(value) is slice:
            return value
        return self._thing(value, variable, self._lent(set(value), set(value), name) if type(value) is set else value)

    def _bound(self, value: Any, read: str, name: str) -> Any:
        """A method of something built in, such as a dict's get."""
        variable = self._check_type(value, read)
        self.require(f"{variable}.__name__ == {value.__name__!r}")
        owner = self.stand_in(value.__self__, f"{variable}.__self__", name)
        if isinstance(owner, watched.Watched) and watched.plain(owner) is None:
            kind = type(value.__self__).__name__
            self.refuse(
                f"calls {name}, a built-in method of a {kind}, of which tk cannot tell what it reads; work it out "
                "before and capture the result"
            )
        return getattr(owner, value.__name__)

    def _method(self, value: types.MethodType, read: str, name: str) -> Any:
        variable = self._check_type(value, read)
        owner = self.stand_in(value.__self__, f"{variable}.__self__", name)
        if (held := self._stand_ins.get(id(value.__self__))) is not None:
            self._owners.setdefault(value.__func__, {})[held[0]] = value.__self__
        return types.MethodType(self.stand_in(value.__func__, f"{variable}.__func__", name), owner)

    def _partial(self, value: functools.partial[Any], read: str, name: str) -> Any:
        variable = self._check_type(value, read)
        function = self.stand_in(value.func, f"{variable}.func", name)
        args = self.stand_in(value.args, f"{variable}.args", f"{name}.args")
        keywords = self.stand_in(value.keywords, f"{variable}.keywords", f"{name}.keywords")
        return functools.partial(function, *args, **keywords)

    def _object(self, value: Any, read: str, name: str) -> Any:
        variable = self._check_type(value, read)
        self._things.append((variable, value))
        return self._keep(value, variable, watched.watch(self, value, variable, name))

    # --- What is read through a stand-in (watched.py) ---

    def lacks(self, variable: str, attribute: str) -> None:
        self.require(f"not hasattr({variable}, {attribute!r})")

    def lacks_item(self, variable: str, key: Any) -> None:
        self.require(f"lacks({variable}, {self._constant(key)})")

    def result(self, function: Callable[..., Any], args: tuple[Any, ...], variable: str, name: str) -> Any:
        """The result of a call whose arguments are plain: it is called again before the trace is used."""
        given = ", ".join(self._constant(a) for a in args)
        read = f"{variable}({given})"
        if read in self._answers:
            return self._answers[read]
        if not args and function in self.states:
            found = self.states[function]
        else:
            with self.outside():
                found = function(*args)
        return self.stand_in(found, read, f"{name}()")

    def constant(self, value: Any) -> str:
        return self._constant(value)

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
        elif isinstance(value, float | complex) and (not value or value != value):
            self._check_type(value, read)
            self._check(read, f"is not None and repr({self._variable(read)}) == {repr(value)!r}")
        else:
            self._check_type(value, read)
            self._check(read, f"== {self._constant(value)}")

    def _constant(self, value: Any) -> str:
        key: Any = id(value)
        if isinstance(value, _KEYS):
            try:
                key = frozen(value)
                hash(key)
            except TypeError:
                key = id(value)
        if key not in self._constants:
            name = f"c{len(self._known)}"
            self._known[name] = value
            self._constants[key] = name
        return self._constants[key]

    def _keep(self, value: Any, variable: str, stand_in: Any) -> Any:
        self._stand_ins[id(value)] = (variable, value, stand_in)  # value too, so that its id stays its own
        return stand_in

    def _lent(self, made: Any, before: Any, name: str) -> Any:
        self._given.append((made, before, name))
        return made


# --- What a check calls ---


def frozen(value: Any) -> Any:
    """Equal for equal values of equal types, now and later. Raises TypeError, with the type of what has no such."""
    kind = type(value)
    if isinstance(value, float | complex):
        return kind, repr(value)
    if kind in (set, frozenset):
        return kind, frozenset([frozen(x) for x in value])
    if kind in (list, tuple):
        return kind, tuple([frozen(x) for x in value])
    if kind is dict:
        return kind, tuple([(frozen(k), frozen(x)) for k, x in value.items()])
    if kind is slice:
        return kind, frozen((value.start, value.stop, value.step))
    if isinstance(value, Tensor) or not isinstance(value, (*_CONSTANTS, int, Enum, type)):
        raise TypeError(kind.__name__)
    return kind, value


def _lacks(value: Any, key: Any) -> bool:
    try:
        value[key]
    except (KeyError, IndexError):
        return True
    return False


def _differ(*things: Any) -> bool:
    return len({id(thing) for thing in things}) == len(things)


def is_bare(value: Any) -> bool:
    """Whether a text or a number of a user's kind is no more than that: numpy's are."""
    if watched.is_trusted_name(type(value).__module__) or isinstance(value, SYMBOLS):
        return True
    return not getattr(value, "__dict__", None) and all(
        _has_no_code(kind) for kind in type(value).__mro__ if not watched.is_trusted_name(kind.__module__)
    )


def _has_no_code(kind: type) -> bool:
    return all(name in _OF_PLAIN_CLASSES or name.startswith("__annot") for name in vars(kind))


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _is_same(now: Any, before: Any) -> bool:
    if isinstance(now, set):
        return now == before
    if isinstance(now, list) and isinstance(before, list):
        return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
    if isinstance(now, dict) and isinstance(before, dict):
        return list(now) == list(before) and all(now[k] is x for k, x in before.items())
    return now is before


# numpy, which torch does without, registers its numbers with Python's classes of them.


def is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral | torch.SymInt)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool | Enum):
        return False
    is_float = isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational)
    return is_float or is_int(value) or isinstance(value, torch.SymFloat)


def is_infinite(value: Any) -> bool:
    """Whether a number is infinite. Such a one says what a mod masks, and is structure."""
    return type(value) not in (int, torch.SymInt, torch.SymFloat) and abs(value) == math.inf


def _is_trusted(value: Any) -> bool:
    """A function of torch's or Python's own; not one that was made inside of a function, as and_masks makes them."""
    if isinstance(value, torch.nn.Module) or _captures(value):
        return False
    if isinstance(value, types.FunctionType):
        module = value.__globals__.get("__name__")
    else:
        module = getattr(value, "__module__", None) or getattr(type(value), "__module__", "")
    return isinstance(module, str) and watched.is_trusted_name(module)


def _captures(value: Any) -> bool:
    """Whether it is of a user's making, although torch or Python has its code: a closure, or a wrapper of another's."""
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return False
    inner = inspect.unwrap(value)
    return inner is value or not _is_trusted(inner)


@functools.lru_cache(maxsize=4096)
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The names that code, and the code inside of it, reads as globals."""
    found = {i.argval: None for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= dict.fromkeys(_globals_of(constant))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _asks_identity(code: types.CodeType) -> bool:
    """Whether it, or code inside of it, has an ``is`` between two things that it does not spell out, as None is."""
    found = list(dis.get_instructions(code))
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return any(map(_asks_identity, inner)) or any(
        i.opname == "IS_OP" and not before.opname.startswith("LOAD_CONST") for before, i in itertools.pairwise(found)
    )


_TEXTS: dict[str, Callable[[Any], Any]] = {"__str__": str, "__repr__": repr, "__format__": format}


def _of_enum(kind: type[Enum]) -> frozenset[str]:
    """What members find in their class besides themselves and what Enum has."""
    found = set()
    for one in kind.__mro__:
        if one.__module__ == "enum" or watched.is_trusted_name(one.__module__):
            continue
        for name, x in vars(one).items():
            function = x.__func__ if isinstance(x, classmethod | staticmethod) else x
            if isinstance(function, types.FunctionType):
                is_own = function.__globals__.get("__name__") != "enum" and name not in _MAKING_ENUMS
            else:
                is_own = not name.startswith("_") and name not in kind.__members__
            if is_own:
                found.add(name)
    return frozenset(found)


_MAKING_ENUMS = ("__new__", "__init__", "__init_subclass__", "_generate_next_value_", "_missing_", "__new_member__")


@functools.lru_cache(maxsize=4096)
def _matches_class(code: types.CodeType) -> bool:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return any(i.opname == "MATCH_CLASS" for i in dis.get_instructions(code)) or any(map(_matches_class, inner))


def anchor(fn: Any) -> Any:
    """What all mods that can share a trace have in common, to look it up by: a code object, or a class."""
    if isinstance(fn, types.FunctionType):
        return fn.__code__
    if isinstance(fn, types.MethodType):
        return anchor(fn.__func__)
    if isinstance(fn, functools.partial):
        return anchor(fn.func)
    return type(fn)
