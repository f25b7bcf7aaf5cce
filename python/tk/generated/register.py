"""Registers with torch what C++ does not: fakes, CPU kernels, gradients and batching rules of generated ops.

C++ defines an op's schema and its CUDA kernel when a pack is loaded (csrc/ops/generated.cpp); the rest is added, from
what the pack says alone, when ``torch.ops.tk`` is first asked for the op (:func:`packet`). At the Autograd key of an op
that has a gradient stands the gate of csrc/ops/gate.h, in front of a twin ``_name`` without autograd, which returns the
outputs that are saved for the gradient as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction
from torch.library import Library

from tk import errors
from tk.generated import gradients, interpret, lists, records
from tk.generated.problem import Call
from tk.generated.records import GeneratedOp
from tk.heuristics import overrides
from tk.ops import _register

_library = Library("tk", "FRAGMENT")  # keeps what is registered alive
_lock = threading.RLock()
_ops: dict[str, GeneratedOp] = {}
_registered: set[str] = set()
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
    """Of the ops with a recorded graph."""
    _read_new()
    return sorted(name for name in _ops if not name.startswith(_ATTENTION))


def attention_names() -> list[str]:
    """Of attention's pairs of mods (flex_<fingerprint>). They have no recorded graph: torch.ops.tk.flex_attention,
    which calls them, is what has a CPU path and gradients."""
    _read_new()
    return sorted(name for name in _ops if name.startswith(_ATTENTION))


_ATTENTION = ("flex_", "b2b_")  # and b2b_gemm's functions


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
        return made


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
    _register_kernels(op, op.name, _n_returned(op))
    formula = gradients.FORMULAS.get(op.name)
    if op.backward or formula:
        _register.at_autograd(op.name, _autograd_kernel(op, formula), _n_returned(op))
        if op.n_saved:
            _register_kernels(op, f"_{op.name}", op.n_results)


def _register_lists(op: GeneratedOp) -> None:
    """They write in place alone: there is nothing to return, no gradient, and no batching rule."""
    overload = getattr(torch.ops.tk, op.name).default

    def fake(*args: Any, **kwargs: Any) -> None:
        lists.calls(op, _all_arguments(overload, args, kwargs))

    def cpu(*args: Any, **kwargs: Any) -> None:
        args = tuple(_all_arguments(overload, args, kwargs))
        calls = lists.calls(op, args)
        lists.check_memory(op, args)
        with torch._C._AutoDispatchBelowAutograd():
            for call in calls:
                interpret.run(call)

    def elsewhere(*args: Any, **kwargs: Any) -> None:
        """Of lists without a tensor, which belong to no backend, or to one without kernels."""
        calls = lists.calls(op, _all_arguments(overload, args, kwargs))
        if calls:
            raise errors.UnsupportedError(
                f"tk.{op.name}: it is there on CUDA and the CPU, not on {calls[0].tensors[0].device}"
            )

    _register.register_fake(op.name, fake, _library)
    _library.impl(op.name, cpu, "CPU")
    _library.impl(op.name, elsewhere, "CompositeExplicitAutograd")


def _n_returned(op: GeneratedOp) -> int:
    return op.n_results - op.n_saved


def _register_kernels(op: GeneratedOp, name: str, n_results: int) -> None:
    """Of the op or its twin, which differ in how many of the outputs they return."""
    overload = getattr(torch.ops.tk, name).default

    def fake(*args: Any, **kwargs: Any) -> Any:
        return _returned(Call(op, _all_arguments(overload, args, kwargs)).allocate()[:n_results])

    def cpu(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return _returned(interpret.run(Call(op, _all_arguments(overload, args, kwargs)))[:n_results])

    _register.register_fake(name, fake, _library)
    _library.impl(name, cpu, "CPU")
    torch.library.register_vmap(f"tk::{name}", partial(_vmap, op, overload), lib=_library)


def _all_arguments(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """In the order of the schema, with its defaults."""
    found = list(args)
    for argument in overload._schema.arguments[len(args) :]:
        found.append(kwargs.get(argument.name, argument.default_value))
    return found


def _returned(outputs: Sequence[Tensor]) -> Any:
    if not outputs:
        return None
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _listed(returned: Any) -> tuple[Tensor, ...]:
    if returned is None:
        return ()
    return (returned,) if isinstance(returned, Tensor) else tuple(returned)


# --- Gradients ---


def _autograd_kernel(op: GeneratedOp, formula: gradients.Formula | None) -> Callable[..., Any]:
    """As tk.ops._register's: a formula that stands once per level of torch.func's transforms, and nothing at all where
    nothing needs a gradient. formula: of an op whose backward is no op of its own."""
    public = getattr(torch.ops.tk, op.name).default

    @cache
    def function() -> Any:  # at the first call: the twin is defined with the gate
        return _function_of(op, public, formula)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(_all_arguments(public, args, kwargs))
        if _register.has_tangent(args):
            raise NotImplementedError(f"tk.{op.name} has no formula for forward-mode automatic differentiation")
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            with _register.single_level():
                return _returned(_listed(function().apply(keyset, *args))[: _n_returned(op)])
        return _register.below_autograd(public, keyset, *args)

    return kernel


def _function_of(op: GeneratedOp, public: Any, formula: gradients.Formula | None) -> Any:
    """The torch.autograd.Function of an op. What it calls below autograd is the twin where more is saved than
    returned."""
    below = getattr(torch.ops.tk, f"_{op.name}").default if op.n_saved else public

    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        outputs = _listed(_register.below_autograd(below, keyset, *args))
        if formula is None:
            _save(ctx, op, args, outputs)
        else:
            formula[0](ctx, args, _returned(outputs))
        return outputs

    def backward(ctx: Any, *grads: Tensor) -> Any:
        found = _gradients(ctx, op, grads) if formula is None else formula[1](ctx, *grads)
        return (None, *found)

    name = "Tk" + "".join(part.capitalize() for part in op.name.split("_"))
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (_SingleLevelFunction,), methods)  # its metaclass names the graph's node


def _save(ctx: Any, op: GeneratedOp, args: Sequence[Any], outputs: Sequence[Tensor]) -> None:
    backward = op.meta["backward"]
    named = dict(zip((p.name for p in op.params), args, strict=False))
    ctx.numbers = {name: x for name, x in named.items() if not isinstance(x, Tensor)}
    saved = {op.params[i].name: args[i] for i in backward["saved_inputs"] if isinstance(args[i], Tensor)}
    saved |= {f"out{i}": outputs[i] for i in backward["saved_outputs"]}
    ctx.names = tuple(saved)
    ctx.mode = args[-1]
    ctx.n_args = len(args)
    ctx.differentiable = [x.is_floating_point() for x in outputs[: _n_returned(op)]]
    ctx.save_for_backward(*saved.values())
    ctx.mark_non_differentiable(*outputs[_n_returned(op) :], *(x for x in outputs if not x.is_floating_point()))


def _gradients(ctx: Any, op: GeneratedOp, grads: Sequence[Tensor]) -> list[Any]:
    """The names of the backward op's arguments say what they are: a param of the forward op, out<i> for an output that
    was saved, grad_<i> for the gradient of the i-th returned floating-point output."""
    meta = op.meta["backward"]
    backward = find(meta["op"])
    if backward is None:
        raise errors.PackError(f"tk.{op.name}: no loaded pack has {meta['op']}, which works out its gradient")
    results = (x for x, differentiable in zip(grads, ctx.differentiable, strict=False) if differentiable)
    known = {f"grad_{i}": x for i, x in enumerate(results)}
    known |= dict(zip(ctx.names, ctx.saved_tensors, strict=True)) | ctx.numbers
    if missing := [p.name for p in backward.params if p.name not in known]:
        raise errors.PackError(
            f"tk.{op.name}: its backward {backward.name} takes {', '.join(missing)}; there are {', '.join(known)}"
        )
    args = [known[p.name] for p in backward.params]
    found = _listed(getattr(torch.ops.tk, backward.name)(*args, -1, ctx.mode))
    out: list[Any] = [None] * ctx.n_args
    for index, grad in zip(meta["grads"], found, strict=True):
        if ctx.needs_input_grad[1 + index]:
            out[index] = grad
    return out


# --- vmap ---


def _vmap(op: GeneratedOp, overload: Any, info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> Any:
    """A batch is one more leading dimension, where every tensor that is batched has them and so has every output; else
    it is a loop."""
    args = tuple(_all_arguments(overload, args, kwargs))
    dims = (*in_dims, *(None,) * (len(args) - len(in_dims)))
    _check_written(op, dims)
    if all(p.leading or d is None for p, d in zip(op.params, dims, strict=False)) and _keeps_leading(op):
        moved = [_batched(p, x, d, info.batch_size) for p, x, d in zip(op.params, args, dims, strict=False)]
        return _with_dims(overload(*moved, *args[len(moved) :]))
    each = [[_row(x, d, i) for x, d in zip(args, dims, strict=True)] for i in range(info.batch_size)]
    rows = [_listed(overload(*row)) for row in each]
    return _with_dims(_returned([torch.stack(column) for column in zip(*rows, strict=True)]))


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
