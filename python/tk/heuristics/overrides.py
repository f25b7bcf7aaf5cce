"""What the user lays over the engine's choice, as the wrappers look it up on every call."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from tk import _packs, config

CHOOSE = -1


def _traced_mode() -> int:
    return config.current().mode


# What torch.compiler.assume_constant_result does: a graph keeps the modes it was traced with. The decorator itself
# imports the whole of torch.compile, and with it Triton, which `import tk` must not.
_traced_mode._dynamo_marked_constant = True  # type: ignore[attr-defined]


def are_on() -> bool:
    """Whether a call may have a mode or a pin. A call that Dynamo traces may: its graph keeps the mode."""
    if torch.compiler.is_dynamo_compiling():
        return True
    state = config.current()
    return state.mode != 0 or len(state.overrides) > 0


def find(op: str, first: Tensor) -> tuple[int, int]:
    """(mode bits, pinned config or CHOOSE) for a call of `op` whose first operand is `first`."""
    if torch.compiler.is_compiling():
        return _traced_mode(), CHOOSE
    state = config.current()
    if op not in state.overrides or not first.is_cuda:
        return state.mode, CHOOSE
    return state.mode, number(op, state.overrides[op], first)


def number(op: str, wanted: str | int, first: Tensor, function: str | None = None) -> int:
    """The number of a config; CHOOSE on the CPU, where nothing is chosen. function: the caller's name, where it is not
    the op's."""
    if isinstance(wanted, bool) or not isinstance(wanted, str | int):
        raise TypeError(f"tk.{function or op}: config must be a config's name or number, or None, is {wanted!r}")
    if isinstance(wanted, int):
        return wanted
    return _number_of(op, wanted) if first.is_cuda else CHOOSE


@lru_cache(maxsize=256)
def _number_of(op: str, name: str) -> int:
    numbers = _packs.config_numbers(op)
    if name not in numbers:
        raise ValueError(f"tk.{op}: there is no config {name!r}; there are {', '.join(sorted(numbers)) or 'none'}")
    return numbers[name]
