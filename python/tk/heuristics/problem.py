"""The problem that a call describes to the engine."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tk import _library, capi

_DTYPES = {number: dtype for dtype, number in capi.DTYPES.items()}
_Callback = ctypes.CFUNCTYPE(None, ctypes.POINTER(capi._Call), ctypes.c_void_p)


@dataclass(frozen=True)
class Described:
    """config: the number given with the call, -1 to choose."""

    problem: capi.Problem
    config: int


def describe(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Described | None:
    """What ``function(*args, **kwargs)``, a tk op or wrapper, would launch, without launching it.

    All of the op's checks are made, and its result is allocated. The last call, where copies of operands come first,
    but for one that only looks at its result. None when it would launch nothing: on the CPU, or with an empty result or
    inner size. Raises what the op raises.
    """
    return last(describe_all(function, *args, **kwargs))


def last(calls: Sequence[Described]) -> Described | None:
    """The call that computes the result."""
    found = [d for d in calls if d.problem.op not in _AFTERWARDS]
    return found[-1] if found else None


_AFTERWARDS = ("conv_contained",)  # what only looks at a result


def describe_all(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Described]:
    """All calls of ``describe``, those that copy operands included. The addresses of copies are those of memory that is
    free again."""
    found: list[Described] = []
    callback = _Callback(lambda call, _: found.append(_described(call.contents)))
    outer = getattr(_held, "callback", None)
    _held.callback = callback
    _capture()(callback, None)
    try:
        with torch.no_grad():
            function(*args, **kwargs)
    finally:
        _held.callback = outer
        _capture()(outer or _Callback(), None)
    return found


def is_describing() -> bool:
    """Whether this thread's calls are described, and launch nothing."""
    return getattr(_held, "callback", None) is not None


_held = threading.local()  # by each thread: the one that is at work, since a function that is described may describe


@cache
def _capture() -> Callable[..., None]:
    return ctypes.CDLL(str(_library.directory() / "libtk_ops.so")).tk_ops_capture


def _described(call: capi._Call) -> Described:
    problem = capi.Problem(
        _library.core().tk_op_name(call.op).decode(),
        tuple(_matrix(call.tensors[i]) for i in range(call.n_tensors)),
        tuple(call.ints[: call.n_ints]),
        tuple(call.floats[: call.n_floats]),
        call.mode,
        call.device,
    )
    return Described(problem, call.config)


def _matrix(t: capi._Tensor) -> capi.Matrix | None:
    if t.ndim < 0:
        return None
    address = t.data or 0  # ctypes reads a null pointer, as a tensor without elements has it, as None
    return capi.Matrix(_DTYPES[t.dtype], tuple(t.sizes[: t.ndim]), tuple(t.strides[: t.ndim]), address)
