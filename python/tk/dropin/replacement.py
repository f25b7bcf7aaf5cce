"""The record of a function that :func:`tk.use` replaces."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

import tk
from tk import capi, errors
from tk.dropin.decisions import State, remembered
from tk.dropin.speed import IF_LARGE, Speed
from tk.dropin.target import Target, dtype_name, needs_gradient
from tk.functional import FUNCTIONS
from tk.functional import find as find_function
from tk.generated import register
from tk.heuristics.problem import describe
from tk.parallel import is_distributed

__all__ = ["Function", "Replacement", "StandIn", "is_served"]

Function = Callable[..., Any]
_PASSES = 3  # a backward pass takes about two forward ones


def _no_example(module: nn.Module, dtype: torch.dtype) -> None:
    return None


@dataclass(frozen=True, eq=False)
class Replacement:
    """A function of torch, and what tk calls instead.

    op: the function of tk, by its name there. originals: where torch has the function, by its names; none for what is
    known only by what it computes (``recognise.py``). takes: for a target, the predicate of the calls that tk serves,
    with torch's arguments: where tk takes them and is not slower. call: the call of tk, with torch's arguments.
    refusals: by the type of device, the errors with which `call` refuses arguments before anything is launched; then
    torch has a kernel, or says what is wrong. example: arguments of a small call of the function of tk with a module's
    parameters, which shows whether a pack has kernels for it; None where a module does not say enough. speed: where tk
    is not slower. takes_distributed: whether `call` takes DTensors. state: what else of the process `takes` depends on,
    beside arguments, modes and autocast.
    """

    op: str
    originals: tuple[str, ...]
    takes: Callable[[Target], Callable[..., bool]]
    call: Function
    speed: Speed = field(default_factory=Speed)
    example: Callable[[nn.Module, torch.dtype], tuple[Any, ...] | None] = _no_example
    refusals: Mapping[str, tuple[type[Exception], ...]] = field(default_factory=dict)
    takes_distributed: bool = True
    state: State = lambda: True

    def is_there(self) -> bool:
        """Whether a loaded pack has its ops, which can be called from now on."""
        return self.op not in FUNCTIONS or find_function(self.op) is not None

    def taken_on(self, target: Target, in_pieces: bool = False) -> Callable[..., bool]:
        """The predicate: by what was measured on this machine, else by rules. in_pieces: the call is in the place of
        several of torch's, whose host takes longer."""
        target = replace(target, takes_distributed=self.takes_distributed)
        is_fast = self.takes(target.of(self.speed))
        waits = not target.serves_all and not in_pieces

        def by_rules(is_captured: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            return is_fast(*args, **kwargs) and (is_captured or not waits or self._hides_the_host(args, kwargs))

        remember = partial(remembered, state=self.state, root=target.root)
        measured = target.measured_of(self.op)
        if measured is None:
            return remember(by_rules)
        return measured.predicate(self.op, self.takes(target.of_all()), by_rules, remember)

    def _hides_the_host(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the GPU is busy with a call longer than the host is. Else the host may be what a model waits for, and
        torch's call takes less of it."""
        has_gradient = needs_gradient(*args, *kwargs.values())
        on_device = self.speed.device_us(*args, **kwargs) * (_PASSES if has_gradient else 1)
        return on_device >= self.speed.least_us[has_gradient]

    def stand_ins(self, target: Target) -> list[StandIn]:
        """One for each of its names where torch's own function stands at this time."""
        found = (_own_of_torch(*name.rsplit(".", 1)) for name in self.originals)
        return [self._stand_in(target, original) for original in found if original is not None]

    def _stand_in(self, target: Target, original: Function) -> StandIn:
        takes, call, refusals = self.taken_on(target), self.call, self.refusals.get(target.device_type)

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs) if takes(*args, **kwargs) else original(*args, **kwargs)

        if not refusals:
            return StandIn(self, target.site(stand_in, original), original)

        def attempt(*args: Any, **kwargs: Any) -> Any:
            if takes(*args, **kwargs):
                try:
                    return call(*args, **kwargs)
                except refusals:
                    pass
            return original(*args, **kwargs)

        return StandIn(self, target.site(attempt, original), original)

    def why_left(self, target: Target, module: nn.Module, dtype: torch.dtype) -> str | None:
        """Why every call that a module makes would be left to torch; None where one may be served."""
        is_open = target.serves_all or target.measured_of(self.op) is not None
        if not is_open and self.speed.find(target.arch, module, dtype)[0] is None:
            return f"{self.op}: nothing measured says that it is as fast ({dtype_name(dtype)}, {target.arch})"
        is_whole = not any(is_distributed(p) for p in module.parameters(recurse=False))
        example = self.example(module, dtype) if target.device_type == "cuda" and is_whole else None
        if example is not None and not is_served(getattr(tk, self.op), *example):
            return f"{self.op}: no loaded pack has a kernel for it"
        return None

    def when(self, target: Target, module: nn.Module, dtype: torch.dtype) -> str:
        """Which of a module's calls are served; "" for all."""
        if (measured := target.measured_of(self.op)) is not None:
            return measured.when(self.op)
        if target.serves_all:
            return ""
        rule, condition = self.speed.find(target.arch, module, dtype)
        return "left to torch" if rule is None else "; ".join(filter(None, [condition, rule.describe(), IF_LARGE]))


class StandIn(NamedTuple):
    """``function`` calls a replacement in the place of ``original``."""

    replacement: Replacement
    function: Function
    original: Function


def _own_of_torch(module_name: str, name: str) -> Function | None:
    """A function of torch's under its name; None where something else stands in its place, or where nobody has imported
    its module, so that no model calls it."""
    module = sys.modules.get(module_name)
    function = getattr(module, name, None)
    if isinstance(function, BuiltinFunctionType):
        own = (getattr(torch._C._nn, name, None), getattr(torch._C._VariableFunctions, name, None))
        return function if any(function is f for f in own) else None
    is_own = isinstance(function, FunctionType) and function.__code__.co_filename == getattr(module, "__file__", None)
    return function if is_own else None


def is_served(function: Function, *args: Any, needs_gradient: bool = False) -> bool:
    """Whether a call on CUDA would find a kernel. Nothing is launched. needs_gradient: of attention, whose gradients
    are an op of their own; all other ops have theirs wherever they have the forward."""
    try:
        described = describe(function, *args)
        if described is None:
            return True
        capi.choose(described.problem, described.config)
    except (errors.Error, ValueError, TypeError):
        return False
    return not needs_gradient or _has_backward(described.problem.op)


def _has_backward(op: str) -> bool:
    return register.find(f"{op}_backward") is not None
