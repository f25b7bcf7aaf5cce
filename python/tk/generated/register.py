"""Registers with torch what C++ does not: fakes, CPU kernels, gradients and batching rules of generated ops.

C++ defines an op's schema and its CUDA kernel when a pack is loaded (csrc/ops/generated.cpp); :func:`register_new`
adds the rest, from what the pack says alone. An op that has a gradient has a twin ``_name``, which returns the outputs
that are saved for it as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction
from torch.library import Library

from tk import errors
from tk.generated import gradients, interpret, records
from tk.generated.problem import Call
from tk.generated.records import GeneratedOp
from tk.heuristics import overrides
from tk.ops import _register

_library = Library("tk", "FRAGMENT")  # keeps what is registered alive
_lock = threading.Lock()
_ops: dict[str, GeneratedOp] = {}


def register_new() -> None:
    """Registers the ops of packs that were loaded since it was last called."""
    with _lock:
        for op in records.read(len(_ops)):
            _ops[op.name] = op
            _register_op(op)


def find(name: str) -> GeneratedOp | None:
    return _ops.get(name)


def names() -> list[str]:
    """Of the ops with a recorded graph."""
    return sorted(name for name in _ops if not name.startswith(_ATTENTION))


def attention_names() -> list[str]:
    """Of attention's pairs of mods (flex_<fingerprint>). They have no recorded graph: torch.ops.tk.flex_attention,
    which calls them, is what has a CPU path and gradients."""
    return sorted(name for name in _ops if name.startswith(_ATTENTION))


_ATTENTION = "flex_"


def wrapper(name: str) -> Callable[..., Any]:
    """``torch.ops.tk.<name>`` with the modes and configs of ``tk.config``, and with typed errors. Its ``config`` is a
    config's name or number."""
    op = getattr(torch.ops.tk, name)
    mode_name = op.default._schema.arguments[-1].name

    def call(*args: Any, config: str | int | None = None, **kwargs: Any) -> Any:
        first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
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
    _register_kernels(op, op.name, op.n_results - op.n_saved)
    if op.backward:
        _register_kernels(op, f"_{op.name}", op.n_results)
        _library.impl(op.name, _autograd_kernel(op), "Autograd", with_keyset=True)
    else:
        gradients.register(op.name, _library)


def _register_kernels(op: GeneratedOp, name: str, n_results: int) -> None:
    """Of the op or its twin, which differ in how many of the outputs they return."""
    overload = getattr(torch.ops.tk, name).default

    def call_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        return Call(op, _all_arguments(overload, args, kwargs))

    def fake(*args: Any, **kwargs: Any) -> Any:
        return _returned(call_of(args, kwargs).allocate()[:n_results])

    def cpu(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return _returned(interpret.run(call_of(args, kwargs))[:n_results])

    torch.library.register_fake(f"tk::{name}", fake, lib=_library)
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


def _autograd_kernel(op: GeneratedOp) -> Callable[..., Any]:
    """As tk.ops._register's: a formula that stands once per level of torch.func's transforms, and nothing at all where
    nothing needs a gradient."""
    public = getattr(torch.ops.tk, op.name).default
    twin = getattr(torch.ops.tk, f"_{op.name}").default
    formula = _formula(op, twin)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(_all_arguments(public, args, kwargs))
        if _register._has_tangent(args):
            raise NotImplementedError(f"tk.{op.name} has no formula for forward-mode automatic differentiation")
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            with _register._single_level():
                return _returned(formula.apply(keyset, *args)[: op.n_results - op.n_saved])
        return _below(public, keyset, args)

    return kernel


def _below(overload: Any, keyset: Any, args: Sequence[Any]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _formula(op: GeneratedOp, twin: Any) -> Any:
    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        outputs = _listed(_below(twin, keyset, args))
        _save(ctx, op, args, outputs)
        return outputs

    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None, *_gradients(ctx, op, grads))

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
    ctx.differentiable = [x.is_floating_point() for x in outputs[: op.n_results - op.n_saved]]
    ctx.save_for_backward(*saved.values())
    ctx.mark_non_differentiable(
        *outputs[op.n_results - op.n_saved :], *(x for x in outputs if not x.is_floating_point())
    )


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
