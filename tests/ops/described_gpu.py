"""An H100 that this machine need not have: CUDA kernels of tk are called with tensors on the CPU, as far as the problem
that they describe to the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tk import _library, capi
from tk.heuristics import problem
from tk.heuristics.problem import Described

_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


@cache
def h100() -> int:
    return capi.describe_device(132, 90, 232448, 50 << 20)


@contextmanager
def standing_for(device: int) -> Iterator[None]:
    _library.ops().tk_ops_capture_device(device)
    try:
        yield
    finally:
        _library.ops().tk_ops_capture_device(-1)


class _OnCuda(TorchDispatchMode):
    """tk's ops run their CUDA kernels, whatever the device of their arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "tk":
            return func(*args, **kwargs)
        with self:  # kernels call ops themselves
            return func.redispatch(_CUDA, *args, **kwargs)


def describe_all(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Described]:
    """``tk.heuristics.problem.describe_all`` of a call with tensors on the CPU, as if they were on an H100."""
    properties = SimpleNamespace(multi_processor_count=132)
    with patch.object(torch.cuda, "get_device_properties", lambda _: properties), standing_for(h100()), _OnCuda():
        return problem.describe_all(function, *args, **kwargs)


def describe(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Described | None:
    found = [d for d in describe_all(function, *args, **kwargs) if d.problem.op not in problem._AFTERWARDS]
    return found[-1] if found else None
