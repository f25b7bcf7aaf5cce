"""Registers with torch what C++ does not: fakes, CPU kernels, gradients and batching rules of generated ops.

C++ defines an op's schema and its CUDA kernel when a pack is loaded (csrc/ops/generated.cpp); the rest is added, from
what the pack says alone, when ``torch.ops.tk`` is first asked for the op (:func:`packet`). At the Autograd key of an op
whose results may have a gradient stands the gate of csrc/ops/gate.h, in front of a twin ``_name`` without autograd,
which returns the outputs that are saved for the gradient as well. Behind the gate: tk.generated.autograd.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from tk import errors
from tk._packs import OF_FUNCTIONS
from tk.generated import autograd, interpret, lists, records
from tk.generated.autograd import listed, n_returned, returned
from tk.generated.problem import Call
from tk.generated.records import GeneratedOp
from tk.heuristics import overrides
from tk.ops import _register

_library = Library("tk", "FRAGMENT")  # keeps what is registered alive
_lock = threading.RLock()
_ops: dict[str, GeneratedOp] = {}
_registered: set[str] = set()
_followers: list[Callable[[str], None]] = []  # called with the name of each op that is registered
_unfinished: dict[str, Any] = {}  # packets of ops that are being registered


def find(name: str) -> GeneratedOp | None:
    """An op of a loaded pack."""
    _read_new()
    return _ops.get(name)


def count() -> int:
    """How many ops the loaded packs have."""
    _read_new()
    return len(_ops)


def names() -> list[str]:
    """The names of the ops with a recorded graph."""
    _read_new()
    return sorted(name for name in _ops if not name.startswith(OF_FUNCTIONS))


def attention_names() -> list[str]:
    """The names of the ops of attention's pairs of mods (flex_<fingerprint>). They have no recorded graph:
    torch.ops.tk.flex_attention, which calls them, is what has a CPU path and gradients."""
    _read_new()
    return sorted(name for name in _ops if name.startswith(OF_FUNCTIONS))


def _read_new() -> None:
    with _lock:
        for op in records.read(len(_ops)):
            _ops[op.name] = op


def packet(namespace: Any, name: str, make: Callable[[str], Any]) -> Any:
    """``torch.ops.tk.<name>``, its op registered. make: what torch's own namespace does, which remembers the packet."""
    with _lock:
        if (known := vars(namespace).get(name) or _unfinished.get(name)) is not None:
            return known  # another thread was faster, or it is being registered
        made = make(name)
        op = find(name) or find(name.removeprefix("_").removesuffix("_autograd"))
        if op is None or op.name in _registered:
            return made
        vars(namespace).pop(name)  # until it is complete, only this thread may see it
        _unfinished[name] = made
        _registered.add(op.name)
        try:
            _register_op(op)
        finally:
            vars(namespace)[name] = _unfinished.pop(name)
        for follow in _followers:
            follow(op.name)
        return made


def each_registered(follow: Callable[[str], None]) -> None:
    """Calls `follow` with the name of each op that somebody has asked for, and of those that somebody will ask for."""
    with _lock:
        _followers.append(follow)
        for name in sorted(_registered):
            follow(name)


def plain(name: str) -> Callable[..., Any]:
    """``torch.ops.tk.<name>`` without the frame of Python around what calls the dispatcher. Not for Dynamo, which knows
    the packet."""
    packet = getattr(torch.ops.tk, name)
    return getattr(packet, "_op", packet)


def wrapper(name: str) -> Callable[..., Any]:
    """``torch.ops.tk.<name>`` with the modes and configs of ``tk.config``, and with typed errors. Its ``config`` is a
    config's name or number."""
    op = getattr(torch.ops.tk, name)
    mode_name = op.default._schema.arguments[-1].name

    def call(*args: Any, config: str | int | None = None, **kwargs: Any) -> Any:
        first = next(lists.tensors_of((*args, *kwargs.values())), None)
        if first is not None:  # without one the op says what is missing
            mode, number = overrides.find(name, first)
            number = number if config is None else overrides.number(name, config, first)
            if mode or number != overrides.CHOOSE:  # defaults that are given cost time as well
                kwargs = {"config": number, mode_name: mode} | kwargs
        try:
            return op(*args, **kwargs)
        except RuntimeError as error:
            raise errors.typed(error) from None

    call.__name__ = call.__qualname__ = name
    return call


def _register_op(op: GeneratedOp) -> None:
    if op.takes_lists:
        return _register_lists(op)
    _register_kernels(op, op.name, n_returned(op))
    is_inner = op.name.startswith(OF_FUNCTIONS)  # what calls it has the gradient
    if not is_inner and (kernel := autograd.kernel_of(op, find)):
        _register.at_autograd(op.name, kernel, n_returned(op))
        if any(p.kind == "int" for p in op.params):
            _register.at_autograd_of_tracers(op.name, kernel)
        if op.n_saved:
            _register_kernels(op, f"_{op.name}", op.n_results)


def _register_lists(op: GeneratedOp) -> None:
    """They have no gradient and no batching rule: torch.func refuses what it transforms."""
    overload = getattr(torch.ops.tk, op.name).default

    def fake(*args: Any, **kwargs: Any) -> Any:
        args = _register.with_defaults(overload, args, kwargs)
        return returned(lists.results(op, args, lists.calls(op, args)))

    def cpu(*args: Any, **kwargs: Any) -> Any:
        args = _register.with_defaults(overload, args, kwargs)
        autograd.refuse_lists(op, args)
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            return returned(lists.run(op, args))

    def elsewhere(*args: Any, **kwargs: Any) -> Any:
        """The kernel for lists without a tensor, which belong to no backend, or to one without kernels."""
        args = _register.with_defaults(overload, args, kwargs)
        calls = lists.calls(op, args)
        if calls:
            raise errors.UnsupportedError(f"tk.{op.name}: it is there on CUDA and the CPU, not on {calls[0].device}")
        return returned(lists.results(op, args, calls))

    def under_transforms(*args: Any, **kwargs: Any) -> Any:
        """The kernel for every transform of torch.func. Without it torch's fallback would hand the kernels what lies in
        its wrappers, whose levels then know nothing of the call."""
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # it is there with the transform

        autograd.refuse_transformed(op, (*args, *kwargs.values()))
        with temporarily_clear_interpreter_stack():
            return overload(*args, **kwargs)

    _register.register_fake(op.name, fake, _library)
    _library.impl(op.name, cpu, "CPU")
    _library.impl(op.name, under_transforms, "FuncTorchDynamicLayerFrontMode")
    _library.impl(op.name, elsewhere, "CompositeExplicitAutograd")


def _register_kernels(op: GeneratedOp, name: str, n_results: int) -> None:
    """Registers the kernels of the op or its twin, which differ in how many of the outputs they return."""
    overload = getattr(torch.ops.tk, name).default

    def fake(*args: Any, **kwargs: Any) -> Any:
        return returned(Call(op, _register.with_defaults(overload, args, kwargs)).allocate()[:n_results])

    def cpu(*args: Any, **kwargs: Any) -> Any:
        return returned(interpret.run(Call(op, _register.with_defaults(overload, args, kwargs)))[:n_results])

    _register.register_fake(name, fake, _library)
    _library.impl(name, cpu, "CPU")
    torch.library.register_vmap(f"tk::{name}", partial(_vmap, op, overload), lib=_library)


# --- vmap ---


def _vmap(op: GeneratedOp, overload: Any, info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> Any:
    """A batch is one more leading dimension, where every tensor that is batched has them and so has every output; else
    it is a loop. So it is for random numbers: each of the batch draws from its own first element on."""
    args = _register.with_defaults(overload, args, kwargs)
    dims = (*in_dims, *(None,) * (len(args) - len(in_dims)))
    _check_written(op, dims)
    has_leading = all(p.leading or d is None for p, d in zip(op.params, dims, strict=False))
    if has_leading and _keeps_leading(op) and not op.draws:
        moved = [_batched(p, x, d, info.batch_size) for p, x, d in zip(op.params, args, dims, strict=False)]
        return _with_dims(overload(*moved, *args[len(moved) :]))
    each = [[_row(x, d, i) for x, d in zip(args, dims, strict=True)] for i in range(info.batch_size)]
    rows = [listed(overload(*row)) for row in each]
    return _with_dims(returned([torch.stack(column) for column in zip(*rows, strict=True)]))


def _check_written(op: GeneratedOp, dims: Sequence[Any]) -> None:
    for p, d in zip(op.params, dims, strict=False):
        if p.mutated and d is None:
            raise RuntimeError(
                f"vmap: tk.{op.name} writes {p.name}, which has no batch dimension, while another argument has one; "
                "give it one (.expand and .clone)"
            )


def _batched(param: records.Param, x: Any, dim: int | None, size: int) -> Any:
    if not param.leading:
        return x
    return x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _row(x: Any, dim: int | None, i: int) -> Any:
    return x if dim is None else x.select(dim, i)


def _keeps_leading(op: GeneratedOp) -> bool:
    """Nothing is reduced over the leading dimensions."""
    return all(result.leading is not None for result in op.results)


def _with_dims(returned: Any) -> Any:
    if returned is None or isinstance(returned, Tensor):
        return returned, None if returned is None else 0
    return returned, (0,) * len(returned)
