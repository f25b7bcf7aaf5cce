"""How kernels are chosen: modes and pinned configs, for a stretch of code or for the whole process.

    with tk.config.batch_invariant():
        y = tk.linear(x, weight)

    with tk.config.override("mm", "128x128x64_s3_w8"):
        y = tk.mm(a, b)

A stretch belongs to its thread (or asyncio task): modes are kept in a context variable. A backward pass uses the modes
of its forward. Code that ``torch.compile`` traces keeps the modes that held when it was traced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from tk import _packs
from tk._arguments import flag
from tk._names import did_you_mean

__all__ = ["batch_invariant", "build_missing", "deterministic", "modes", "override", "set_default_modes"]
__all__ += ["static_weights", "strict"]

# Bits of tk_call.mode, as in tk.h.
MODE_BITS: Mapping[str, int] = {"deterministic": 1, "batch_invariant": 2, "strict": 4, "static_weights": 8}
STATIC_WEIGHTS = MODE_BITS["static_weights"]


@dataclass(frozen=True)
class State:
    """mode: bits of MODE_BITS. overrides: op -> config name or number."""

    mode: int = 0
    overrides: Mapping[str, str | int] = field(default_factory=dict)


_default = State()
_state: ContextVar[State] = ContextVar("tk.config")


def current() -> State:
    """What holds here and now."""
    return _state.get(_default)


def _bits(mode: int, changes: Mapping[str, bool | None]) -> int:
    for name, wanted in changes.items():
        if wanted is not None:
            mode = mode | MODE_BITS[name] if wanted else mode & ~MODE_BITS[name]
    return mode


def _check_modes(function: str, changes: Mapping[str, bool | None]) -> None:
    """A text would turn a mode on, "no" too."""
    for name, wanted in changes.items():
        if not isinstance(wanted, bool | None):
            accepted = "True, False or None, which leaves it as it is"
            raise TypeError(f"tk.config.{function}: {name} is {wanted!r}, must be {accepted}")


@contextmanager
def _holding(state: State) -> Iterator[None]:
    token = _state.set(state)
    try:
        yield
    finally:
        _state.reset(token)


@contextmanager
def modes(
    *,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    strict: bool | None = None,
    static_weights: bool | None = None,
) -> Iterator[None]:
    """Turns modes on or off inside a ``with``; None leaves one as it is.

    deterministic: only kernels that give the same bits on every call (``torch.use_deterministic_algorithms`` asks for
    the same). batch_invariant: a row's result does not depend on how many rows came with it. strict: no general-purpose
    fallback, ``VariantNotFoundError`` instead of a slow kernel. static_weights: nothing queued on the stream writes the
    weights (the second operand), so a kernel may begin to read them before its predecessor has finished.
    """
    changes = dict(
        deterministic=deterministic, batch_invariant=batch_invariant, strict=strict, static_weights=static_weights
    )
    _check_modes("modes", changes)
    state = current()
    with _holding(replace(state, mode=_bits(state.mode, changes))):
        yield


def deterministic(enabled: bool = True) -> AbstractContextManager[None]:
    """``modes(deterministic=enabled)``."""
    flag("config.deterministic", "enabled", enabled)
    return modes(deterministic=enabled)


def batch_invariant(enabled: bool = True) -> AbstractContextManager[None]:
    """``modes(batch_invariant=enabled)``."""
    flag("config.batch_invariant", "enabled", enabled)
    return modes(batch_invariant=enabled)


def strict(enabled: bool = True) -> AbstractContextManager[None]:
    """``modes(strict=enabled)``."""
    flag("config.strict", "enabled", enabled)
    return modes(strict=enabled)


def static_weights(enabled: bool = True) -> AbstractContextManager[None]:
    """``modes(static_weights=enabled)``."""
    flag("config.static_weights", "enabled", enabled)
    return modes(static_weights=enabled)


@contextmanager
def override(op: str, config: str | int | None) -> Iterator[None]:
    """Pins a config of an op inside a ``with``, by its name or number (``tk.coverage()`` lists them); None lifts a pin.

    An op that no loaded pack has raises ``ValueError``, and so does a call that the config cannot serve, with the
    constraint that fails. On the CPU, where there is nothing to choose, it has no effect. It is the Python wrappers
    (``tk.mm``) that look here; ``torch.ops.tk.mm`` takes a config's number as an argument.
    """
    if not isinstance(op, str):
        raise TypeError(f"tk.config.override: op must be a string, is {op!r}")
    _check_op(op)
    if isinstance(config, bool) or not isinstance(config, str | int | None):
        raise TypeError(f"tk.config.override: config must be a config's name or number, or None, is {config!r}")
    state = current()
    overrides = {name: pinned for name, pinned in state.overrides.items() if name != op}
    if config is not None:
        overrides[op] = config
    with _holding(replace(state, overrides=overrides)):
        yield


def _check_op(op: str) -> None:
    """A pin of a name that no kernel looks for would have no effect."""
    known = _packs.op_names()
    if op in known:
        return
    from tk.ops._register import RECORDS  # the ops import this module

    record = RECORDS.get(op)
    if record is not None and record.kernels_of is not None:
        hint = f"tk.{op} runs the kernels of {record.kernels_of!r}"
    else:
        hint = did_you_mean(op, known, 0.5) or "tk.coverage() lists them"
    raise ValueError(f"tk.config.override: op is {op!r}, must be an op of a loaded pack; {hint}")


# --- Building what is missing ---

_builds: bool | None = None  # None: as TK_BUILD_MISSING says


def builds_missing() -> bool:
    return os.environ.get("TK_BUILD_MISSING", "") not in ("", "0") if _builds is None else _builds


class build_missing(AbstractContextManager[None]):
    """Builds what is missing: from now on, in the whole process, attention's mods and functions under ``@tk.op`` that
    no loaded pack has are built when they are called on CUDA: once, by a child process, into a pack under ``tk/packs``
    in ``XDG_CACHE_HOME`` or ``~/.cache`` (``packs`` in ``TK_CACHE_DIR``), where later processes find it. It needs the
    ``build`` extra; without it such a call raises ``tk.VariantNotFoundError`` as before. ``TK_BUILD_MISSING=1`` does
    the same.

    As a context manager until the end of the ``with``. ``build_missing(False)`` turns it off.
    """

    def __init__(self, enabled: bool = True):
        global _builds
        flag("config.build_missing", "enabled", enabled)
        self._before, _builds = _builds, enabled

    def __exit__(self, *_: object) -> None:
        global _builds
        _builds = self._before


def set_default_modes(
    *,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    strict: bool | None = None,
    static_weights: bool | None = None,
) -> None:
    """Turns modes on or off for the whole process, wherever no ``with`` says otherwise. Arguments as of ``modes``."""
    global _default
    changes = dict(
        deterministic=deterministic, batch_invariant=batch_invariant, strict=strict, static_weights=static_weights
    )
    _check_modes("set_default_modes", changes)
    _default = replace(_default, mode=_bits(_default.mode, changes))
