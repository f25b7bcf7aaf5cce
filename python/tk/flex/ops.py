"""What ``torch.ops.tk.flex_attention`` and its gradient do (tk.ops.flex defines them). One op is for all pairs of mods,
so that a model that calls it stays one graph under torch.compile and torch.export. The pair is an argument, as text
(Traced.text), and what it captures are others.

On the CPU the op is reference.py; on CUDA it calls the pair's own op (own_ops.py). Its formula is in autograd.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tk.flex import callers, own_ops, reference
from tk.flex.tracing import trace
from tk.flex.tracing.trace import Traced
from tk.ops import flex
from tk.ops.flex import N_OPERANDS, OPTIONAL, Request

# --- CPU ---

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)  # sums are in float32 whatever it says


def cpu(*args: Any) -> tuple[Tensor, Tensor]:
    return forward_on_cpu(Request(*args))


def forward_on_cpu(request: Request) -> tuple[Tensor, Tensor]:
    with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        out, lse, largest = reference.forward(reference.Problem(request))
        return out, torch.cat([lse, largest], -1) if request.max_scores else lse


def cpu_backward(grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *args: Any) -> list[Tensor]:
    return backward_on_cpu(grad_out, grad_lse, out, lse, Request(*args[:-1]), args[-1])


def backward_on_cpu(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, request: Request, of_captures: bool
) -> list[Tensor]:
    problem = reference.Problem(request)
    with _autograd_at_work(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        found = reference.backward(problem, out, lse, grad_out, grad_lse, of_captures)
    sinks = [] if found.sinks is None else [found.sinks]
    return [found.query, found.key, found.value, *sinks, *found.captures.values()]


class _autograd_at_work:
    """Lets autograd work below autograd: a tile's derivative is taken with it."""

    _keys = (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView)

    def __enter__(self) -> None:
        self.excluded = [k for k in self._keys if torch._C._dispatch_tls_is_dispatch_key_excluded(k)]
        for key in self.excluded:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)

    def __exit__(self, *_: object) -> None:
        for key in self.excluded:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)


# --- Fake ---


def fake(*args: Any) -> tuple[Tensor, Tensor]:
    request = Request(*args)
    query = request.query
    B, H, M, _ = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = query.new_empty(B, H, 2 * M if request.max_scores else M, dtype=dtype)
    return _rows_like(query, request.value.shape[3]), lse


def fake_backward(grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *args: Any) -> list[Tensor]:
    request, of_captures = Request(*args[:-1]), args[-1]
    sinks = [] if request.sinks is None else [request.sinks]
    places = trace.parse(request.pair).differentiable_tensors if of_captures else ()
    dense = (*sinks, *(request.tensors[i] for i in places))
    return [*(_rows_like(x, x.shape[3]) for x in request.operands), *(x.new_empty(x.shape) for x in dense)]


def _rows_like(x: Tensor, columns: Any) -> Tensor:
    """Lays a result out as tk.kernels.attention.problem._rows_like does: heads inside of rows where `x` has them so, in
    which the stride of a single row counts as 0. The reference, which serves the CPU, keeps the order of dimensions."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # it takes a while to import

    B, H, M, _ = x.shape
    if x.device.type == "cuda" and H > 1 and x.stride(1) < x.stride(2) and not statically_known_true(M == 1):
        return x.new_empty(B, M, H, columns).transpose(1, 2)
    return x.new_empty(B, H, M, columns)


# --- CUDA ---


def cuda(*args: Any) -> tuple[Tensor, Tensor]:
    return on_cuda(Request(*args))


def on_cuda(request: Request) -> tuple[Tensor, Tensor]:
    try:
        found: tuple[Tensor, Tensor] = own_ops.or_built(_call, trace.parse(request.pair), request)
    except callers.NAMED as error:
        if (named := callers.named(error, request)) is not None:
            raise named from error
        raise
    return found


def _call(traced: Traced, request: Request) -> Any:
    without = own_ops.set_aside(traced, request)
    own = own_ops.find(traced, request.tensors, request.floats, request.ints, "", without)
    tensors, numbers = own_ops.arguments(own, traced, request, max_scores=request.max_scores)
    given = (*tensors, *own.captured(request.tensors, request.query), *numbers)
    if request.tile:
        given = (*given, own_ops.config_with(request.tile, own.op, given))
    return own.op(*given)


def cuda_backward(grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *args: Any) -> list[Tensor]:
    return on_cuda_backward(grad_out, grad_lse, out, lse, Request(*args[:-1]), args[-1])


def on_cuda_backward(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, request: Request, of_captures: bool
) -> list[Tensor]:
    traced = trace.parse(request.pair)
    grads = grad_out, grad_lse
    given = (traced, request, grads, (out, lse), of_captures)
    try:
        own, found = own_ops.or_built(_call_backward, *given, suffix="_backward")
    except callers.NAMED as error:
        if (named := callers.named(error, request)) is not None:
            raise named from error
        raise
    query, key, value, sinks, *captured = found
    captured = own.gradients(traced, request.tensors, captured) if of_captures else []
    return [query, key, value, *([] if request.sinks is None else [sinks]), *captured]


def _call_backward(
    traced: Traced, request: Request, grads: Sequence[Tensor], results: Sequence[Tensor], of_captures: bool
) -> Any:
    without = own_ops.set_aside(traced, request, "_backward")
    own = own_ops.find(traced, request.tensors, request.floats, request.ints, "_backward", without)
    tensors, numbers = own_ops.arguments(own, traced, request, of_captures=of_captures)
    return own, own.op(*grads, *tensors, *results, *own.captured(request.tensors, request.query), *numbers)


# --- vmap ---


def vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    """More batch entries where that changes nothing that the mods see, else one call after the other."""
    request = Request(*args)
    if not _is_of_batch(in_dims, request):
        return _one_by_one(flex.forward, request.caller, info, in_dims, args)
    n = info.batch_size
    operands = list(zip(args[:N_OPERANDS], in_dims[:N_OPERANDS], strict=True))
    sizes = [x.shape[0] if d is None else x.movedim(d, 0).shape[1] for x, d in operands]
    size = max(sizes) if 0 not in sizes else 0
    out, lse = flex.forward(*(_joined(x, d, n, size) for x, d in operands), *args[N_OPERANDS:])
    return tuple(x.unflatten(0, (n, size)) for x in (out, lse)), (0, 0)


def vmap_backward(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    return _one_by_one(flex.backward, Request(*args[4:-1]).caller, info, in_dims, args)


def _is_of_batch(in_dims: Sequence[Any], request: Request) -> bool:
    """Whether only query, key and value have the dimension, nothing else differs by batch entry, and no mod asks for
    it."""
    traced = trace.parse(request.pair)
    graphs = [g for g in (traced.score, traced.mask) if g is not None]
    asked = any(n.name == "b" and n.users for g in graphs for n in g.arguments)
    others = [x for name, x in zip(OPTIONAL, request.optional, strict=True) if x is not None and name != "sinks"]
    return not asked and not others and not any(_flat_dims(in_dims[N_OPERANDS:]))


def _flat_dims(dims: Sequence[Any]) -> list[bool]:
    return [y for x in dims for y in (_flat_dims(x) if isinstance(x, list | tuple) else [x is not None])]


def _joined(x: Tensor, d: int | None, n: int, size: int) -> Tensor:
    """``[n * size, ...]``"""
    x = x.expand(n, *x.shape) if d is None else x.movedim(d, 0)
    return x.expand(n, size, *x.shape[2:]).flatten(0, 1)


def _one_by_one(op: Callable[..., Any], caller: str, info: Any, in_dims: Sequence[Any], args: Sequence[Any]) -> Any:
    if not info.batch_size:
        raise NotImplementedError(f"tk.{caller} has no vmap over a dimension of size 0")
    calls = [op(*[_selected(x, d, i) for x, d in zip(args, in_dims, strict=True)]) for i in range(info.batch_size)]
    found = [torch.stack(parts) for parts in zip(*calls, strict=True)]
    return type(calls[0])(found), type(calls[0])([0] * len(found))


def _selected(x: Any, d: Any, i: int) -> Any:
    if isinstance(x, list | tuple):
        return [_selected(y, e, i) for y, e in zip(x, d, strict=True)] if d is not None else x
    return x if d is None else x.select(d, i)
