"""States of torch that a mod can ask for, such as ``torch.is_grad_enabled()``: they are guarded by value.

What changes a state, such as ``torch.no_grad``, is refused by name: a trace would not do it.
"""

from __future__ import annotations

import builtins
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tk.flex.tracing.reads import Reads

_ASKS = ("is_", "are_", "get_", "device_count", "current_", "initial_seed")  # of functions' names
_CHANGES = ("set_", "use_deterministic", "manual_seed", "seed", "no_grad", "enable_grad", "inference_mode", "autocast")
_DRAWS = ("random", "rand")  # of numpy


def snapshot() -> dict[Any, Any]:
    """The states that tracing itself changes."""
    asked = (torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.get_default_device)
    return {f: f() for f in asked}


def module(reads: Reads, value: types.ModuleType, variable: str, name: str) -> Any:
    """What stands for a module of torch's or Python's own."""
    return _Module(reads, value, variable, name)


def stand_in(reads: Reads, value: Any, variable: str, name: str) -> Any:
    """What stands for a function or class of theirs."""
    own = getattr(value, "__name__", "")
    home = str(getattr(value, "__module__", None) or getattr(getattr(value, "__self__", None), "__module__", ""))
    if isinstance(value, types.BuiltinFunctionType | types.FunctionType) and own.startswith(_ASKS):
        return _Asking(reads, value, variable, name)
    is_torchs = home.startswith("torch") or value in _OF_C
    if is_torchs and own.startswith(_CHANGES) and not (isinstance(value, type) and issubclass(value, Tensor)):
        return _Refusing(reads, value, name)
    return value


_OF_C = frozenset(f for f in (getattr(torch, n) for n in dir(torch) if n.startswith(("set_", "seed", "manual_")))
                  if callable(f))  # fmt: skip


class _Module:
    """torch, numpy or one of Python's own: what is asked of it is its own, but for states, and is guarded, since a
    program may put something else in its place."""

    __slots__ = ("_tk",)

    def __init__(self, reads: Reads, value: types.ModuleType, variable: str, name: str):
        object.__setattr__(self, "_tk", (reads, value, variable, name))

    def __getattr__(self, attribute: str) -> Any:
        reads, value, variable, name = object.__getattribute__(self, "_tk")
        found = getattr(value, attribute)
        read, called = f"{variable}.{attribute}", f"{name}.{attribute}"
        if isinstance(found, types.ModuleType):
            if found.__name__.startswith("numpy.random"):
                reads.refuse(f"uses {called}, which draws random numbers; capture them")
            is_own = type(found) is types.ModuleType and found.__name__.partition(".")[0] in ("torch", "numpy")
            return _Module(reads, found, read, called) if is_own else reads.stand_in(found, read, called)
        if value is builtins and attribute in reads.builtins:
            return reads.builtins[attribute]
        if isinstance(found, torch.dtype | torch.layout | torch.memory_format):
            return found
        if isinstance(found, int | float):  # such as torch.inf, which is no argument of a kernel
            reads.require(f"repr({read}) == {repr(found)!r}")
            return found
        return reads.stand_in(found, read, called)

    def __setattr__(self, attribute: str, to: Any) -> None:
        reads, _, _, name = object.__getattribute__(self, "_tk")
        reads.refuse(f"writes {name}.{attribute}; a mod must leave its surroundings as they are")


class _Asking:
    """A function that tells a state where it is given no tensor."""

    def __init__(self, reads: Reads, value: Any, variable: str, name: str):
        self._tk = (reads, value, variable, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reads, value, variable, name = self._tk
        if kwargs or not all(isinstance(a, str | int | None | torch.device | torch.dtype) for a in args):
            return value(*args, **kwargs)
        return reads.result(value, args, variable, name)


class _Refusing:
    def __init__(self, reads: Reads, value: Any, name: str):
        self._tk = (reads, value, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reads, _, name = self._tk
        reads.refuse(f"calls {name}, which changes a state of torch; a mod must leave it (.detach() takes no gradient)")
