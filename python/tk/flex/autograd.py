"""The formula of ``torch.ops.tk.flex_attention``, and Python's way to its kernels past the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from tk.flex import ops
from tk.flex.tracing import trace
from tk.ops import _register, flex
from tk.ops.flex import N_OPERANDS, Request

# --- Python's way in ---


def attend(request: Request) -> tuple[Tensor, Tensor]:
    """``flex.forward``. Where nothing would come between the op and its CUDA kernel, that is called at once: the
    dispatcher takes twice as long as the kernel to pass on so many arguments."""
    if not _is_direct(request):
        return flex.forward(*request)
    return _tracked(ops.on_cuda, request) if _is_at_stake(request) else ops.on_cuda(request)


def _has_kernels(query: Tensor) -> bool:
    return query.is_cuda


def _is_at_stake(request: Request) -> bool:
    """Whether a gradient is."""
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*request.operands, request.sinks, *request.tensors)


def _is_direct(request: Request) -> bool:
    """Whether a call's CUDA kernel may be called at once: no dispatch mode, tensor subclass, transform, tracer or
    profiler is to see the call."""
    return (
        _has_kernels(request.query)
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
        and not torch._C._autograd._profiler_enabled()
        and _PLAIN.issuperset(map(type, request.all_tensors))
    )


_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})


# --- Gradients ---


class _Attention(_SingleLevelFunction):
    """The formula. below: the op without it, of a request; after this stand once more what autograd is to see, which
    does not look into tuples: query, key, value, sinks and the captured tensors."""

    @staticmethod
    def forward(ctx: Any, below: Callable[..., Any], request: Request, *_: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = below(request)
        ctx.set_materialize_grads(False)
        ctx.request = request.without_tensors()
        ctx.save_for_backward(out, lse, *request.all_tensors)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        out, lse, *tensors = ctx.saved_tensors
        request: Request = ctx.request.with_tensors(tensors)
        if lse.shape[2] != out.shape[2]:  # the largest scores, which have no gradient, are behind
            lse = lse[:, :, : out.shape[2]]
            grad_lse = None if grad_lse is None else grad_lse[:, :, : out.shape[2]]
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
        needed = ctx.needs_input_grad[2:]
        sinks, first_captured = N_OPERANDS, N_OPERANDS + 1
        captured = [first_captured + place for place in trace.parse(request.pair).differentiable_tensors]
        of_captures = any(needed[i] for i in captured)
        found = _gradients(grad_out, grad_lse, out, lse, request, of_captures)
        order = [*range(N_OPERANDS), *([] if request.sinks is None else [sinks]), *(captured if of_captures else [])]
        grads: list[Any] = [None] * len(needed)
        for i, grad in zip(order, found, strict=True):
            grads[i] = grad if needed[i] else None
        return None, None, *grads


def _gradients(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, request: Request, of_captures: bool
) -> list[Tensor]:
    """``flex.backward``; as in :func:`attend`, its kernel where nothing would come between."""
    is_plain = _PLAIN.issuperset(map(type, (grad_out, grad_lse, out, lse)))
    if is_plain and not torch.is_grad_enabled() and _is_direct(request):
        return ops.on_cuda_backward(grad_out, grad_lse, out, lse, request, of_captures)
    return flex.backward(grad_out, grad_lse, out, lse, *request.for_gradient, of_captures)


def autograd(keyset: Any, *args: Any) -> tuple[Tensor, Tensor]:
    request = Request(*args)
    if forward_ad._current_level >= 0 and _register.has_tangent(_given(request.all_tensors)):
        _refuse_forward_mode(request)
    below = partial(_below, keyset)
    if _is_at_stake(request):
        _refuse_forward_mode(request)
        with _register.single_level():
            return _tracked(below, request)
    return below(request)


def _given(tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(x for x in tensors if x is not None)


def _refuse_forward_mode(request: Request) -> None:
    """Refuses forward mode, that of a transform outside of another one too: within a formula its tangents are not seen,
    and would be lost."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError(f"tk.{request.caller} has no formula for forward-mode automatic differentiation")


def _tracked(below: Callable[..., Any], request: Request) -> tuple[Tensor, Tensor]:
    seen = (*request.operands, request.sinks, *request.tensors)
    return _Attention.apply(below, request, *seen)  # type: ignore[attr-defined]


def _below(keyset: Any, request: Request) -> tuple[Tensor, Tensor]:
    """The op without its gradient."""
    with torch._C._AutoDispatchBelowAutograd():
        if _is_direct(request):
            return ops.on_cuda(request)
        return flex.forward.redispatch(keyset & torch._C._after_autograd_keyset, *request)


class _Gradients(_SingleLevelFunction):
    """The gradients, which have none of their own: they say so when one is asked for, since torch.func.grad asks for a
    graph of them in any case."""

    @staticmethod
    def forward(ctx: Any, below: Callable[..., list[Tensor]], args: Sequence[Any], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.caller = _request_of(args).caller
        return tuple(below(args))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise NotImplementedError(f"tk.{ctx.caller} has no gradient of its gradient (create_graph=True)")


def autograd_backward(keyset: Any, *args: Any) -> list[Tensor]:
    below = partial(_backward_below, keyset)
    request = _request_of(args)
    tensors = _given((*args[:4], *request.all_tensors))
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        _refuse_forward_mode(request)
        with _register.single_level():
            return list(_Gradients.apply(below, args, *tensors))  # type: ignore[attr-defined]
    return below(args)


def _request_of(args: Sequence[Any]) -> Request:
    """The request in the arguments of the gradient's op: after grad_out, grad_lse, out and lse, before of_captures."""
    return Request(*args[4:-1])


def _backward_below(keyset: Any, args: Sequence[Any]) -> list[Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        return flex.backward.redispatch(keyset & torch._C._after_autograd_keyset, *args)
