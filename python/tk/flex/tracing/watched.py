"""Stand-ins of objects, classes and modules: what a mod asks of them is noted, and answered with stand-ins."""

from __future__ import annotations

import builtins
import operator
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook as has_global_hook

if TYPE_CHECKING:
    from tk.flex.tracing.reads import Reads

# Packages whose modules, functions and classes are taken as they are.
_TRUSTED = frozenset({
    "torch", "math", "operator", "_operator", "functools", "_functools", "itertools", "numpy", "builtins", "typing",
    "cmath",
})  # fmt: skip
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
_MISSING = object()
_SEQUENCE, _MAPPING = 1 << 5, 1 << 6  # Py_TPFLAGS_SEQUENCE and Py_TPFLAGS_MAPPING


def is_trusted_name(module: str) -> bool:
    return module.partition(".")[0] in _TRUSTED


def _held(x: Any) -> tuple[Reads, Any, str, str]:
    found: tuple[Reads, Any, str, str] = object.__getattribute__(x, "_tk")
    return found


def _is_watched(x: Any) -> bool:
    return type(x) in _KINDS


def _plain_of(x: Any) -> Any:
    """What a stand-in stands for, which is structure then, as a number's value is."""
    if _is_watched(x):
        _same(x)
        return _held(x)[1]
    if isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool):
        return x.node.known() if hasattr(x.node, "known") else x
    return tuple(map(_plain_of, x)) if type(x) is tuple else x


def plain(x: Any) -> Any:
    """The content of an object that is a dict, a list or the like of a kind of its own; None of another."""
    reads, value, variable, name = _held(x)
    for kind, made in (
        (dict, dict),
        (types.MappingProxyType, dict),
        (deque, list),
        (list, list),
        (tuple, tuple),
        (set, set),
        (frozenset, frozenset),
    ):
        if isinstance(value, kind):
            return reads.stand_in(made(value), f"{made.__name__}({variable})", name)
    return None


class Watched:
    """Stands for an object, a class or a module."""

    __slots__ = ("_tk",)

    def __init__(self, reads: Reads, value: Any, variable: str, name: str):
        object.__setattr__(self, "_tk", (reads, value, variable, name))

    def __getattribute__(self, attribute: str) -> Any:
        reads, value, variable, name = _held(self)
        if attribute == "__class__" and sys._getframe(1).f_builtins is not reads.builtins:
            return value.__class__  # so that isinstance of code that is not the mod's answers as the object does
        read, called = f"{variable}.{attribute}", f"{name}.{attribute}"
        if attribute == "__class__":
            return reads.stand_in(type(value), f"type({variable})", called)
        own = of_class(type(value), attribute)
        if isinstance(own, property) and isinstance(own.fget, types.FunctionType):
            return reads.stand_in(own.fget, f"type({variable}).{attribute}.fget", called)(self)
        try:
            with reads.outside():
                found = getattr(value, attribute)
        except AttributeError:
            reads.lacks(variable, attribute)
            raise
        if isinstance(found, _BOUND) and type(value) is ContextVar and attribute == "get":
            return lambda *default: reads.result(found, tuple(map(_plain_of, default)), f"{variable}.get", called)
        if isinstance(found, _BOUND) and found.__self__ is value and isinstance(value, types.ModuleType):
            return reads.stand_in(found, read, called)  # which says so where it is called
        if isinstance(found, _BOUND) and found.__self__ is value:
            if (held := plain(self)) is not None and hasattr(held, attribute):
                return getattr(held, attribute)
            reads.refuse(
                f"asks for {called}, a built-in method of a {type(value).__name__}, of which tk cannot tell what it "
                "reads; work it out before and capture the result"
            )
        return reads.stand_in(found, read, called)

    def __setattr__(self, attribute: str, to: Any) -> None:
        _written(self, f".{attribute}")

    def __delattr__(self, attribute: str) -> None:
        _written(self, f".{attribute}")

    def __setitem__(self, key: Any, to: Any) -> None:
        _written(self, "'s items")

    def __delitem__(self, key: Any) -> None:
        _written(self, "'s items")

    def __dir__(self) -> Any:
        reads, *_, name = _held(self)
        reads.refuse(f"asks which attributes {name} has; ask for one by hasattr")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reads, value, variable, name = _held(self)
        if isinstance(value, type):
            method = of_class(type(value), "__call__")
            if isinstance(method, types.FunctionType) and method.__globals__.get("__name__") not in _STANDARD:
                return reads.stand_in(method, f"of_class(type({variable}), '__call__')", name)(self, *args, **kwargs)
            return _made(self, args, kwargs)
        if value is warnings.warn:
            reads.refuse(f"calls {name}, {LEFT_OUT}")
        if isinstance(value, torch.nn.Module):
            if value._forward_hooks or value._forward_pre_hooks or has_global_hook():
                reads.refuse(f"calls {name}, a module with hooks")
            reads.require(f"not ({variable}._forward_hooks or {variable}._forward_pre_hooks or has_global_hook())")
            return reads.stand_in(value.forward, f"{variable}.forward", name)(*args, **kwargs)
        method = of_class(type(value), "__call__")
        if not isinstance(method, types.FunctionType):
            reads.refuse(
                f"calls {name}, of which tk cannot tell what it reads; work it out before and capture the result"
            )
        return reads.stand_in(method, f"type({variable}).__call__", name)(self, *args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        reads, value, variable, name = _held(self)
        method = of_class(type(value), "__getitem__")
        if isinstance(key, Tensor) and isinstance(method, types.FunctionType):
            return reads.stand_in(method, f"type({variable}).__getitem__", name)(self, key)
        key = _plain_of(key)
        try:
            with reads.outside():
                found = value[key]
        except (KeyError, IndexError):
            reads.lacks_item(variable, key)
            raise
        return reads.stand_in(found, f"{variable}[{reads.constant(key)}]", f"{name}[{key!r}]")

    def __len__(self) -> int:
        reads, value, variable, _ = _held(self)
        n = len(value)
        reads.require(f"len({variable}) == {n}")
        return n

    def __iter__(self) -> Iterator[Any]:
        reads, value, variable, name = _held(self)
        if (method := of_class(type(value), "__iter__")) and isinstance(method, types.FunctionType):
            if isinstance(value, type):  # of an Enum
                members: Any = value
                return iter(reads.stand_in(tuple(members), f"tuple({variable})", name))
            return iter(reads.stand_in(method, f"type({variable}).__iter__", name)(self))
        if (held := plain(self)) is not None:
            return iter(held)
        if not hasattr(type(value), "__getitem__") or not hasattr(type(value), "__len__"):
            reads.refuse(f"iterates over {name}, a {type(value).__name__}; capture a tuple")
        if isinstance(value, Mapping):
            return iter(reads.stand_in(tuple(value), f"tuple({variable})", name))
        return (self[i] for i in range(len(self)))

    def __next__(self) -> Any:
        reads, value, variable, name = _held(self)
        method = of_class(type(value), "__next__")
        if isinstance(method, types.FunctionType):
            return reads.stand_in(method, f"type({variable}).__next__", name)(self)
        reads.refuse(f"takes the next of {name}, a {type(value).__name__}; capture a tuple")

    def __contains__(self, x: Any) -> bool:
        reads, value, variable, name = _held(self)
        method = of_class(type(value), "__contains__")
        if isinstance(method, types.FunctionType) and not isinstance(value, type):
            return bool(reads.stand_in(method, f"type({variable}).__contains__", name)(self, x))
        if (held := plain(self)) is not None:
            return x in held
        return any(x is y or x == y for y in self)

    def __bool__(self) -> bool:
        reads, value, variable, _ = _held(self)
        with reads.outside():
            found = bool(value)
        reads.require(f"bool({variable}) is {found}")
        return found

    def __hash__(self) -> int:
        reads, value, variable, _ = _held(self)
        with reads.outside():
            found = hash(value)
        if of_class(type(value), "__hash__") is object.__hash__:  # by which a key is found
            _same(self)
        else:
            reads.require(f"hash({variable}) == {found}")
        return found

    def __eq__(self, other: object) -> Any:
        found = _operated(self, "__eq__", other)
        if found is not NotImplemented:
            return found
        reads, value, variable, name = _held(self)
        theirs, their_name = _held(other)[1:3] if _is_watched(other) else (other, reads.constant(other))
        is_one = value is theirs
        own = of_class(type(value), "__eq__")
        if is_one or own is object.__eq__:
            reads.require(f"({variable} is {their_name}) is {is_one}")
        if is_one:
            return True
        if own is object.__eq__ or isinstance(value, type | types.ModuleType | Enum):
            return NotImplemented
        return NotImplemented if isinstance(own, types.FunctionType) else reads.refuse(f"compares {name}")

    def __ne__(self, other: object) -> Any:
        found = _operated(self, "__ne__", other)
        if found is not NotImplemented:
            return found
        found = self.__class__ and Watched.__eq__(self, other)
        return found if found is NotImplemented else not found

    def __str__(self) -> str:
        return _text(self, str)

    def __repr__(self) -> str:
        return _text(self, repr)

    def __format__(self, spec: str) -> str:
        reads, value, variable, name = _held(self)
        own = of_class(type(value), "__format__")
        if isinstance(own, types.FunctionType):
            return str(reads.stand_in(own, f"type({variable}).__format__", name)(self, spec))
        return format(_text(self, str), spec)

    def __enter__(self) -> Any:
        return _special(self, "__enter__")

    def __exit__(self, *error: Any) -> Any:
        return _special(self, "__exit__", *error)

    def __index__(self) -> int:
        return _special_number(self, "__index__", operator.index)

    def __int__(self) -> int:
        return _special_number(self, "__int__", int)

    def __float__(self) -> float:
        return _special_number(self, "__float__", float)

    def __length_hint__(self) -> Any:
        _, value, _, _ = _held(self)
        has_own = of_class(type(value), "__length_hint__") is not None
        return _special_number(self, "__length_hint__", operator.length_hint) if has_own else NotImplemented

    def __instancecheck__(self, x: Any) -> bool:
        return _isinstance(x, self)

    def __subclasscheck__(self, x: Any) -> bool:
        return _issubclass(x, self)


def _operator(method: str) -> Callable[..., Any]:
    return lambda self, *args: _operated(self, method, *args)


def _unary(method: str) -> Callable[..., Any]:
    return lambda self, *args: _special(self, method, *args)


for _method in (
    "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv",
    "mod", "rmod", "pow", "rpow", "and", "rand", "or", "ror", "xor", "rxor", "matmul", "rmatmul", "lshift", "rshift",
):  # fmt: skip
    setattr(Watched, f"__{_method}__", _operator(f"__{_method}__"))
for _method in ("neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil"):
    setattr(Watched, f"__{_method}__", _unary(f"__{_method}__"))


# A match statement asks a flag of the class whether an object is a sequence or a mapping.
class WatchedSequence(Watched):
    __slots__ = ()


class WatchedMapping(Watched):
    __slots__ = ()


Sequence.register(WatchedSequence)
Mapping.register(WatchedMapping)
_KINDS = (Watched, WatchedSequence, WatchedMapping)
_STANDARD = ("enum", "abc", "typing")  # whose metaclasses make objects as `type` does


def watch(reads: Reads, value: Any, variable: str, name: str) -> Watched:
    """What stands for an object, a class or a module."""
    flags = type(value).__flags__
    kind = WatchedSequence if flags & _SEQUENCE else WatchedMapping if flags & _MAPPING else Watched
    return kind(reads, value, variable, name)


def _same(x: Watched) -> None:
    """Requires the object itself: who asked would have told it from another like it."""
    reads, value, variable, _ = _held(x)
    reads.require(f"{variable} is {reads.constant(value)}")


def _special(x: Watched, method: str, *args: Any) -> Any:
    """A method that Python itself looks for, in the object's class."""
    reads, value, variable, name = _held(x)
    own = of_class(type(value), method)
    if isinstance(own, types.FunctionType):
        return reads.stand_in(own, f"of_class(type({variable}), {method!r})", f"{name}.{method}")(x, *args)
    if own is None:
        raise TypeError(f"{name}, a {type(value).__name__}, has no {method}")
    reads.refuse(
        f"asks for {name}.{method}, a built-in method of a {type(value).__name__}, of which tk cannot tell what it "
        "reads; work it out before and capture the result"
    )


def _special_number(x: Watched, method: str, function: Callable[[Any], Any]) -> Any:
    """What Python wants a number of its own for, which is structure then."""
    reads, value, variable, _ = _held(x)
    own = of_class(type(value), method)
    if own is None or isinstance(own, types.FunctionType):
        return _plain_of(_special(x, method))
    with reads.outside():
        found = function(value)
    reads.require(f"repr({reads.constant(function)}({variable})) == {repr(found)!r}")
    return found


def _operated(x: Any, method: str, *args: Any) -> Any:
    """Applies an operator by the object's own function, or to what it holds."""
    reads, value, variable, name = _held(x)
    if isinstance(value, type | types.ModuleType):
        return NotImplemented
    own = of_class(type(value), method)
    if isinstance(own, types.FunctionType):
        return reads.stand_in(own, f"type({variable}).{method}", f"{name}.{method}")(x, *args)
    if isinstance(value, _CONTAINERS) and own is not None and own is not of_class(object, method):
        others = [plain(a) if _is_watched(a) else a for a in args]
        return getattr(plain(x), method)(*others)
    reads.require(f"of_class(type({variable}), {method!r}) is {reads.constant(own)}")  # none that came later
    return NotImplemented


def of_class(kind: type, attribute: str) -> Any:
    for base in kind.__mro__:
        if attribute in base.__dict__:
            return base.__dict__[attribute]
    return None


def _text(x: Any, function: Callable[[Any], str]) -> str:
    reads, value, variable, _ = _held(x)
    found = function(value)
    reads.require(f"{function.__name__}({variable}) == {reads.constant(found)}")
    return found


def _written(x: Any, what: str) -> None:
    reads, *_, name = _held(x)
    reads.refuse(f"a mod must not write {what.removeprefix('.')} of {name}")


# --- Objects that a mod makes ---


def _made(x: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """An object of a user's class."""
    reads, value, variable, name = _held(x)
    if issubclass(value, Enum):
        return reads.result(value, tuple(map(_plain_of, args)), variable, name)
    if issubclass(value, BaseException):
        return value(*args, **kwargs)
    try:
        made = _shadow(reads, value, variable)
    except (TypeError, ValueError, AttributeError) as error:
        reads.refuse(f"makes a {name} ({error}); make it before and capture it")
    return made(*args, **kwargs)


_NOT_COPIED = (
    "__dict__",
    "__weakref__",
    "__doc__",
    "__module__",
    "__annotations__",
    "__orig_bases__",
    "__parameters__",
)


def _shadow(reads: Reads, value: type, variable: str) -> type:
    """A class whose functions and attributes are stand-ins."""
    if is_trusted_name(value.__module__):
        return value
    if id(value) in reads.shadows:
        return reads.shadows[id(value)]
    reads.require(f"tuple({variable}.__dict__) == {reads.constant(tuple(value.__dict__))}")
    names: dict[str, Any] = {}
    for key, x in value.__dict__.items():
        read, called = f"{variable}.__dict__[{key!r}]", f"{value.__name__}.{key}"
        if key in _NOT_COPIED or key.startswith("__dataclass"):
            continue
        if isinstance(x, types.MemberDescriptorType):  # of __slots__, which makes them anew
            continue
        if isinstance(x, staticmethod | classmethod):
            names[key] = type(x)(reads.stand_in(x.__func__, f"{read}.__func__", called))
        elif isinstance(x, property):
            parts = ((f, f"{read}.{n}") for n, f in (("fget", x.fget), ("fset", x.fset), ("fdel", x.fdel)))
            names[key] = property(*[f and reads.stand_in(f, r, called) for f, r in parts])
        else:
            names[key] = x if hasattr(type(x), "__get__") and not callable(x) else reads.stand_in(x, read, called)
    bases = tuple(_shadow(reads, b, f"{variable}.__bases__[{i}]") for i, b in enumerate(value.__bases__))
    made = type(value)(value.__name__, bases, names)
    reads.shadows[id(value)] = made
    reads.shadows[id(made)] = value  # and back
    return made


class Cached:
    """Stands for a function under functools.lru_cache: of plain arguments it is what the cache holds."""

    def __init__(self, reads: Reads, value: Any, variable: str, name: str):
        self._tk = (reads, value, variable, name)

    def __getattr__(self, attribute: str) -> Any:
        reads, *_, name = self._tk
        reads.refuse(f"asks for {name}.{attribute}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reads, value, variable, name = self._tk
        if kwargs or any(isinstance(a, Tensor) for a in args):
            return reads.stand_in(value.__wrapped__, f"{variable}.__wrapped__", name)(*args, **kwargs)
        return reads.result(value, tuple(map(_plain_of, args)), variable, name)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)


# --- Built-in functions, as a mod sees them ---


def _class_of(x: Any) -> Any:
    """The class that a class or its stand-in is, or several, as isinstance takes them."""
    if isinstance(x, tuple):
        return tuple(map(_class_of, x))
    if isinstance(x, _Type):
        return type
    return _held(x)[1] if _is_watched(x) else x


def _asks_kind(kind: Any, method: str) -> None:
    if _is_watched(kind):
        reads, value, _, name = _held(kind)
        own = of_class(type(value), method)
        if isinstance(own, types.FunctionType) and own.__globals__.get("__name__") not in _STANDARD:
            reads.refuse(
                f"asks what is a {name}, which its class tells by a {method} of its own; capture what it tells"
            )


def _isinstance(x: Any, kind: Any) -> bool:
    real = _class_of(kind)
    for one in kind if isinstance(kind, tuple) else (kind,):
        _asks_kind(one, "__instancecheck__")
    if _is_watched(x):
        reads, value, variable, _ = _held(x)
        found = isinstance(value, real)
        reads.require(f"isinstance({variable}, {reads.constant(real)}) is {found}")  # an ABC's classes are registered
        return found
    if isinstance(x, torch.SymInt) and isinstance(1, real):
        return True
    if isinstance(x, torch.SymFloat) and isinstance(1.0, real):
        return True
    if _is_watched(kind) and (made := _held(kind)[0].shadows.get(id(real))) is not None and isinstance(x, made):
        return True
    return isinstance(x, real)


def _issubclass(x: Any, kind: Any) -> bool:
    real, of = _plain_of(x), _class_of(kind)
    for one in kind if isinstance(kind, tuple) else (kind,):
        _asks_kind(one, "__subclasscheck__")
    found = issubclass(real, of)
    for one in (x, *(kind if isinstance(kind, tuple) else (kind,))):
        if _is_watched(one):
            reads = _held(one)[0]
            reads.require(f"issubclass({reads.constant(real)}, {reads.constant(of)}) is {found}")
            break
    return found


class _Type:
    """Stands for `type`."""

    def __init__(self, reads: Reads):
        self.reads = reads

    def __call__(self, x: Any, *more: Any, **kwargs: Any) -> Any:
        if more:
            return type(x, *map(_plain_of, more), **kwargs)
        if _is_watched(x):
            reads, value, variable, name = _held(x)
            return reads.stand_in(type(value), f"type({variable})", f"type({name})")
        if isinstance(x, torch.SymInt):
            return int
        if isinstance(x, torch.SymFloat):
            return float
        if isinstance(x, Tensor):
            source = getattr(x, "source", None)
            return Tensor if source is None else self.reads.stand_in(type(source[0]), f"type({source[1]})", "type")
        real = self.reads.shadows.get(id(type(x)))
        return type(x) if real is None else self.reads._stand_ins[id(real)][2]

    def __eq__(self, other: object) -> bool:
        return other is type or isinstance(other, _Type)

    def __hash__(self) -> int:
        return hash(type)


class _Super:
    """Stands for super(kind, x)."""

    def __init__(self, kind: Any, x: Any):
        self._tk = (kind, x)

    def __getattribute__(self, attribute: str) -> Any:
        kind, x = object.__getattribute__(self, "_tk")
        reads, real, of_kind, _ = _held(kind)
        _, value, variable, name = _held(x)
        found = getattr(super(real, value), attribute)
        return reads.stand_in(found, f"super({of_kind}, {variable}).{attribute}", f"{name}.{attribute}")


# A mod runs when it is traced and never again, as what @tk.op declares (tk.codegen.tracing.effects).
LEFT_OUT = "which no kernel does, and tracing would do once: leave it to the caller"


def builtins_of(reads: Reads) -> dict[str, Any]:
    def super_(*args: Any) -> Any:
        if not args:
            frame = sys._getframe(1)
            code = frame.f_code
            args = (frame.f_locals["__class__"], frame.f_locals[code.co_varnames[0] if code.co_varnames else "self"])
        if all(map(_is_watched, args)):
            return _Super(*args)
        return super(*map(_plain_of, args))

    def import_(name: str, scope: Any = None, names: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        found = builtins.__import__(name, scope, names, fromlist, level)
        return reads.stand_in(found, f"modules[{found.__name__!r}]", found.__name__)

    def refusing(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: reads.refuse(f"calls {name}(), of which tk cannot tell what it reads")

    made: dict[str, Any] = {
        "type": _Type(reads), "isinstance": _isinstance, "super": super_, "__import__": import_,
        "issubclass": _issubclass,
        "callable": lambda x: callable(_held(x)[1] if _is_watched(x) else x),
    }  # fmt: skip
    made["print"] = lambda *args, **kwargs: reads.refuse(f"prints, {LEFT_OUT}")
    made |= {name: refusing(name) for name in ("eval", "exec", "globals", "open", "input", "id", "compile")}
    return {**vars(builtins), **made}
