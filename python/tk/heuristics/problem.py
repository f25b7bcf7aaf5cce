"""The problem that a call describes to the engine."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tk import _library, _packs, capi

_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
# Ops of ATen's that launch nothing, beside those whose result is a view.
_ALLOCATING = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_",
    "_unsafe_view",
})  # fmt: skip
_DTYPES = {number: dtype for dtype, number in capi.DTYPES.items()}
_Callback = ctypes.CFUNCTYPE(None, ctypes.POINTER(capi._Call), ctypes.c_void_p)


@dataclass(frozen=True)
class Described:
    """config: the number given with the call, -1 to choose."""

    problem: capi.Problem
    config: int


@dataclass(frozen=True)
class AtenCall:
    """A call of an op of ATen's that launches a kernel. name: "aten.copy_"."""

    name: str


def describe(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Described | None:
    """What ``function(*args, **kwargs)``, a tk op or wrapper, would launch, without launching it.

    All of the op's checks are made, and its result is allocated. The last call, where copies of operands come first,
    but for one that only looks at its result. None when it would launch nothing: on the CPU, or with an empty result or
    inner size. Raises what the op raises.
    """
    return last(describe_all(function, *args, **kwargs))


# What an op is for that no caller names.
PURPOSES: Mapping[str, str] = {
    "conv_layout": "puts the channels of an operand beside each other",
    "conv_unfold": "puts taps beside each other as channels, for tensor cores",
    "conv_blocks": "makes one weight of several groups, with zeros between them",
    "conv_contained": "computes again what NaN or infinity of another group has reached",
    "int4_dequantize": "writes the weight in the dtype of a, for a plain product",
    "store_table": "writes the addresses of the lists' tensors",
    "aten._to_copy": "casts to another dtype",
    "aten.clone": "copies to other strides",
    "aten.copy_": "copies to other strides or another dtype",
    "aten.full": "fills memory",
    "aten.zero_": "fills memory",
    "aten.zeros": "fills memory",
}
_AFTERWARDS = ("conv_contained",)  # what only looks at a result


def last(calls: Sequence[Described | AtenCall]) -> Described | None:
    """The call that computes the result."""
    found = [d for d in calls if isinstance(d, Described) and d.problem.op not in _AFTERWARDS]
    return found[-1] if found else None


def describe_all(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Described]:
    """All calls of ``describe``, those that copy operands included. The addresses of copies are those of memory that is
    free again."""
    found: list[Described] = []
    with describing_to(found.append), torch.no_grad():
        function(*args, **kwargs)
    return found


def steps(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Described | AtenCall]:
    """What ``describe_all`` finds together with ATen's calls on CUDA before, between and behind, in order."""
    found: list[Described | AtenCall] = []
    with describing_to(found.append), torch.no_grad(), Inside(found.append, is_on_cuda):
        function(*args, **kwargs)
    return found


@contextmanager
def describing_to(take: Callable[[Described], None]) -> Iterator[None]:
    """This thread's calls of the core are handed to `take`, and launch nothing."""
    callback = _Callback(lambda call, _: take(_described(call.contents)))
    outer = getattr(_held, "callback", None)
    _held.callback = callback
    _capture()(callback, None)
    try:
        yield
    finally:
        _held.callback = outer
        _capture()(outer or _Callback(), None)


class Inside(TorchDispatchMode):
    """Hands the calls of ATen's that launch a kernel to `take`, those that tk's ops make included.

    Args:
        is_on_gpu: whether a call with these tensors is one on the GPU. tk's ops then run their CUDA kernels.
    """

    def __init__(self, take: Callable[[AtenCall], None], is_on_gpu: Callable[[list[Any]], bool]):
        super().__init__()
        self.take = take
        self.is_on_gpu = is_on_gpu
        self._op = ""  # tk's that is running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "tk":
            out = func(*args, **kwargs)
            if (call := aten_call(func)) and self.is_on_gpu(tree_leaves((args, kwargs, out))) and not self._fills(func):
                self.take(call)
            return out
        if types or not self.is_on_gpu(tree_leaves((args, kwargs))):  # a DTensor calls the op with its own part
            return func(*args, **kwargs)
        outer, self._op = self._op, func.overloadpacket.__name__
        try:
            with self:  # kernels call ops themselves
                return func.redispatch(_CUDA, *args, **kwargs)
        finally:
            self._op = outer

    def _fills(self, func: Any) -> bool:
        """Whether a call is made only since no kernel writes what is described: a generated op then fills its results,
        also where attention or b2b_gemm calls it."""
        if func is not torch.ops.aten.zero_.default:
            return False
        return self._op.startswith(_packs.OF_FUNCTIONS) or _packs.is_generated(self._op.removeprefix("_"))


def aten_call(func: Any) -> AtenCall | None:
    """The call of an op of ATen's; None where it is not ATen's or launches nothing."""
    name = func.overloadpacket.__name__
    is_launched = func.namespace == "aten" and not func.is_view and name not in _ALLOCATING
    return AtenCall(f"aten.{name}") if is_launched else None


def is_on_cuda(leaves: list[Any]) -> bool:
    return any(isinstance(x, Tensor) and x.is_cuda for x in leaves)


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
