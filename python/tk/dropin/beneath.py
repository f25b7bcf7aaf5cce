"""``tk.enable``: kernels of tk beneath ATen's own ops, in the whole process. The kernels are csrc/ops/beneath.cpp; here
is who decides which calls they serve."""

from __future__ import annotations

import _thread
import atexit
import ctypes
import re
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.library import Library

from tk import _library, capi, errors
from tk._arguments import flag
from tk._names import did_you_mean
from tk._table import table
from tk.dropin.functions import activations, products, softmaxes
from tk.dropin.measured import Table, class_of, load
from tk.dropin.replacement import Replacement
from tk.dropin.target import Target, needs_gradient
from tk.generated import register

__all__ = ["Enabled", "enable"]


# --- The ops ---


@dataclass(frozen=True)
class _Op:
    """An op of ATen. replacement: the record of the function that it computes, or whose gradient, which says what tk
    takes and where it is not slower. arguments: of that function, from the op's tensors and its other arguments, as
    numbers; None where tk has no such op. A gradient's have one tensor that needs a gradient: then forward and backward
    together decide. needs: further ops of tk. is_of_rows: tk's result lies in memory as ATen's only for contiguous
    tensors."""

    replacement: Replacement
    arguments: Callable[..., tuple[Any, ...] | None] = lambda *tensors: tensors
    needs: str = ""
    is_of_rows: bool = True


def _product_out(a: Tensor, b: Tensor, out: Tensor) -> tuple[Any, ...] | None:
    fits = a.dim() == b.dim() and out.shape == (*a.shape[:-1], *b.shape[-1:])
    return (a, b) if fits else None  # which ATen resizes


_FORMS = ("none", "tanh", "")  # of gelu


def _softmax(x: Tensor, dim: int, to_float: int) -> tuple[Any, ...] | None:
    return None if to_float else (x, dim)


def _softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: int) -> tuple[Any, ...] | None:
    return (y.requires_grad_(), dim) if _DTYPES.get(dtype) is y.dtype and grad.shape == y.shape else None


def _activation_backward(grad: Tensor, x: Tensor, *form: int) -> tuple[Any, ...] | None:
    return (x.requires_grad_(), *(_FORMS[f] for f in form)) if grad.shape == x.shape else None


# By the names of ATen, as csrc/ops/beneath.cpp has them.
_OPS = {
    "mm": _Op(products.MM, is_of_rows=False),
    "mm.out": _Op(products.MM, _product_out, is_of_rows=False),
    "bmm": _Op(products.BMM, is_of_rows=False),
    "bmm.out": _Op(products.BMM, _product_out, is_of_rows=False),
    "gelu": _Op(activations.GELU, lambda x, form: (x, _FORMS[form])),
    "gelu_backward": _Op(activations.GELU, _activation_backward, "gelu_backward"),
    "silu": _Op(activations.SILU),
    "silu_backward": _Op(activations.SILU, _activation_backward, "silu_backward"),
    "_softmax": _Op(softmaxes.SOFTMAX, _softmax),
    "_softmax_backward_data": _Op(softmaxes.SOFTMAX, _softmax_backward, "softmax_backward"),
    "_log_softmax": _Op(softmaxes.LOG_SOFTMAX, _softmax),
    "_log_softmax_backward_data": _Op(softmaxes.LOG_SOFTMAX, _softmax_backward, "log_softmax_backward"),
}


def enable(ops: Iterable[str] | None = None, *, only_faster: bool = True, device: str = "cuda") -> Enabled:
    """Serves ATen's own ops by tk's kernels in the whole process, where tk was measured to be no slower, until
    ``undo()``. The kernels stand beneath autograd, autocast, ``torch.func`` and ``torch.compile``, which stay torch's.

        handle = tk.enable()
        train(model)
        print(handle)            # how many calls of each op tk served
        handle.undo()

        with tk.enable(["mm"]):  # or for a while
            y = model(x)

    Args:
        ops: names of ATen's ops, as "mm"; by default all of docs/use.md that this torch and the loaded packs have.
        only_faster: False serves all calls that there are kernels for.
        device: "cuda", or "cpu", where tk computes with ATen and nothing is gained: to try it out.

    Returns:
        A handle, which prints as a table. The end of its ``with`` undoes it.

    Raises:
        TypeError: ops is a text, or has something else than texts.
        ValueError: a name that tk does not serve; the message lists those that there are. Or another device.
        tk.UnsupportedError: this torch has no CUDA, does not tell what tk must know, or has another library's kernel
            where a named op's would stand.
        tk.Error: tk.enable holds already; undo it first.
    """
    flag("enable", "only_faster", only_faster)
    if device not in ("cuda", "cpu"):
        raise ValueError(f"tk.enable: device must be 'cuda' or 'cpu', is {device!r}")
    if device == "cuda" and not torch.backends.cuda.is_built():
        raise errors.UnsupportedError("tk.enable: this torch was built without CUDA; device='cpu' tries it out")
    reasons = {name: _why_not(name, device) for name in _OPS}
    if ops is None:
        names = [name for name, reason in reasons.items() if reason is None]
        if not names:
            raise errors.UnsupportedError(f"tk.enable: there is no op to serve: {next(iter(reasons.values()))}")
    else:
        names = _checked(ops)
        for name in names:
            if (reason := reasons[name]) is not None:
                raise errors.UnsupportedError(f"tk.enable: {name} cannot be served: {reason}")
    return _install(names, only_faster, device)


def _checked(ops: Iterable[str]) -> list[str]:
    if isinstance(ops, str) or not isinstance(ops, Iterable):
        raise TypeError(f"tk.enable: ops must be a list of names, is {ops!r}")
    names = list(dict.fromkeys(ops))
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"tk.enable: ops must be a list of names, has {name!r}")
        if name not in _OPS:
            hint = did_you_mean(name, _OPS, 0.6)
            raise ValueError(f"tk.enable: {name!r} is not served; {hint + ' ' if hint else ''}there are {_listed()}")
    if not names:
        raise ValueError(f"tk.enable: ops is empty; there are {_listed()}")
    return names


def _listed() -> str:
    return ", ".join(_OPS)


def _why_not(name: str, device: str) -> str | None:
    """Why an op cannot be served on a device; None where it can."""
    op = _OPS[name]
    if not op.replacement.is_there() or (op.needs and register.find(op.needs) is None):
        return f"no loaded pack has tk.{op.needs or op.replacement.op}"
    if op.needs and device == "cpu":
        return f"tk.{op.needs} has no kernel for the CPU"
    if not _cxx().tk_ops_beneath_is_known(_places()[name], device == "cuda"):
        return f"torch {torch.__version__} does not have ATen's kernel where tk looks for it"
    # What is left goes to ATen's kernel, not to one that somebody else has put in its place.
    dump = torch._C._dispatch_dump(f"aten::{name}")
    stands = re.search(rf"^{device.upper()}: registered at (.*?) ::", dump, re.MULTILINE)
    if Enabled._now is None and (stands is None or not re.search(r"/aten/src/ATen/Register\w+\.cpp", stands[1])):
        return f"another library's kernel stands there ({stands[1] if stands else 'none of ATen'})"
    return None


# --- The switch ---


class Enabled:
    """What :func:`tk.enable` returns. Prints as a table of its ops, with how many calls of each were served and left.

    ops: their names. device: "cuda" or "cpu".
    """

    _now: ClassVar[Enabled | None] = None

    def __init__(self, ops: tuple[str, ...], device: str):
        self.ops, self.device = ops, device
        self._last: dict[str, tuple[int, int]] | None = None

    @property
    def is_on(self) -> bool:
        """Whether it holds: until ``undo()``."""
        return Enabled._now is self

    @property
    def calls(self) -> dict[str, tuple[int, int]]:
        """For each op, how many calls tk served and how many it left to ATen, in all threads, while this holds."""
        return _counted(self.ops) if self._last is None else dict(self._last)

    def undo(self) -> None:
        """ATen's kernels are there again. Call it while no other thread computes. A second time it does nothing."""
        if self.is_on:
            self._last = _counted(self.ops)
            _cxx().tk_ops_beneath_remove()
            _cxx().tk_ops_beneath_ask(_Decide(0))
            Enabled._now = None

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        rows = [(f"aten::{name}", served, left) for name, (served, left) in self.calls.items()]
        state = f"tk serves ATen's ops on {self.device}" if self.is_on else "undone: tk served ATen's ops"
        return f"{state}\n{table(('op', 'served', 'left to ATen'), rows)}"

    __repr__ = __str__


def _install(names: list[str], only_faster: bool, device: str) -> Enabled:
    if Enabled._now is not None:
        raise errors.Error(f"tk.enable holds already, for {', '.join(Enabled._now.ops)}: undo() that first")
    places = [_places()[name] for name in names]
    use_up_warning()
    _cxx().tk_ops_beneath_ask(_decider(only_faster, device))
    if not _cxx().tk_ops_beneath_install((ctypes.c_int32 * len(places))(*places), len(places), device == "cuda"):
        _cxx().tk_ops_beneath_ask(_Decide(0))
        raise errors.UnsupportedError(f"tk.enable: torch {torch.__version__} does not take kernels for its own ops")
    Enabled._now = Enabled(tuple(names), device)
    return Enabled._now


@cache
def use_up_warning() -> None:
    """torch warns of the first kernel in a process that takes another's place, of whatever op. Nobody has to be told of
    one that tk was asked for; and a later one of somebody else's is theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = Library("aten", "IMPL")
        library.impl("mm", lambda a, b: NotImplemented, "CPU")
        library._destroy()


# --- Deciding ---

_Decide = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_int64), ctypes.c_int32)
_DTYPES = {number: dtype for dtype, number in capi.DTYPES.items()}


@cache
def _cxx() -> ctypes.PyDLL:
    """libtk_ops, called under the GIL: between what it does and what is noted of it here no other thread comes."""
    library = ctypes.PyDLL(str(_library.directory() / "libtk_ops.so"))
    library.tk_ops_beneath_name.argtypes = [ctypes.c_int32]
    library.tk_ops_beneath_name.restype = ctypes.c_char_p
    library.tk_ops_beneath_is_known.argtypes = [ctypes.c_int32, ctypes.c_int32]
    library.tk_ops_beneath_install.argtypes = [ctypes.POINTER(ctypes.c_int32), ctypes.c_int32, ctypes.c_int32]
    library.tk_ops_beneath_remove.restype = None
    library.tk_ops_beneath_ask.argtypes = [_Decide]
    library.tk_ops_beneath_ask.restype = None
    library.tk_ops_beneath_count.argtypes = [ctypes.c_int32, *[ctypes.POINTER(ctypes.c_int64)] * 2]
    library.tk_ops_beneath_count.restype = None
    atexit.register(library.tk_ops_beneath_ask, _Decide(0))  # a thread of autograd's may outlive Python
    return library


@cache
def _places() -> dict[str, int]:
    """The ops' places in the table of the library."""
    places: dict[str, int] = {}
    while (name := _cxx().tk_ops_beneath_name(len(places))) is not None:
        places[name.decode()] = len(places)
    return places


def _counted(names: Iterable[str]) -> dict[str, tuple[int, int]]:
    served, left = ctypes.c_int64(), ctypes.c_int64()
    found = {}
    for name in names:
        _cxx().tk_ops_beneath_count(_places()[name], served, left)
        found[name] = (served.value, left.value)
    return found


_held: list[Any] = []  # what C++ may still call in another thread


def _decider(only_faster: bool, device: str) -> Any:
    """The function that C++ asks once for each class of calls."""
    names = list(_places())
    targets: dict[int, Target] = {}

    def answer(place: int, words: list[int]) -> bool:
        index = words[1]
        if index not in targets:
            targets[index] = _target(device, index, only_faster)
        op, target = _OPS[names[place]], targets[index]
        with torch._C.DisableTorchFunction(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            given = _arguments(words)
            if op.is_of_rows and not all(x.is_contiguous() for x in given if isinstance(x, Tensor)):
                return False
            args = op.arguments(*given)
            return args is not None and _is_served(op.replacement, target, args)

    def decide(place: int, words: Any, count: int) -> int:
        try:
            return int(answer(place, words[:count]))
        except KeyboardInterrupt:
            _thread.interrupt_main()  # where nothing catches it; it is raised once the call has returned
        except BaseException as error:
            _warn_once(names[place], error)
        return 0

    _held.append(_Decide(decide))
    return _held[-1]


def _arguments(words: list[int]) -> tuple[Any, ...]:
    """The tensors that the words of a class stand for, without memory; and the numbers after them."""
    found: list[Any] = []
    at = 3
    for _ in range(words[2]):
        dtype, rank = words[at], words[at + 1]
        sizes, strides = words[at + 2 : at + 2 + rank], words[at + 2 + rank : at + 2 + 2 * rank]
        found.append(torch.empty_strided(sizes, strides, dtype=_DTYPES[dtype], device="meta"))
        at += 2 + 2 * rank
    return (*found, *words[at:])


def _target(device: str, index: int, only_faster: bool) -> Target:
    """Tensors of a GPU are described by others on meta, which this takes for those of a CPU."""
    if device == "cpu":
        return Target("cpu", "cpu", only_faster, is_beneath=True)
    major, minor = torch.cuda.get_device_capability(index)
    measured = Table(load(torch.device("cuda", index)).calls.values()) if only_faster else None
    return Target("cpu", f"sm_{major}{minor}", only_faster, measured=measured, is_beneath=True)


def _is_served(replacement: Replacement, target: Target, args: tuple[Any, ...]) -> bool:
    if not replacement.takes(target.of_all())(*args):
        return False
    if target.serves_all:
        return True
    call = class_of(args, {})
    if isinstance(target.measured, Table) and call is not None:
        # The host's time is the same, since no Python comes in between.
        is_faster = target.measured.is_faster_on_device(replacement.op, call, needs_gradient(*args))
        if is_faster is not None:
            return is_faster
    return replacement.takes(target.of(replacement.speed))(*args)


_warned: set[str] = set()


def _warn_once(name: str, error: BaseException) -> None:
    if name in _warned:
        return
    _warned.add(name)
    with suppress(Warning):  # which the user made an error; it cannot be raised from here
        warnings.warn(f"tk.enable: aten::{name} is left to ATen: {type(error).__name__}: {error}", stacklevel=2)
