"""What a function calls, in words that can be traced: ATen's own norms take eps as a number known when they are called,
its padding makes numbers of sizes, and so do some of its functions that make floats of integers. More of these words
are in :mod:`tk.codegen.tracing.numbers` and :mod:`tk.codegen.tracing.windows`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher

from tk.codegen.tracing import numbers, places, random, scattering, shapes, windows


def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    x = _opmath(input)
    dims = list(range(-len(normalized_shape), 0))
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    return _affine((x - mean) * torch.rsqrt(variance + eps), weight, bias).to(input.dtype)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    x = _opmath(input)
    dims = list(range(-len(normalized_shape), 0))
    y = x * torch.rsqrt((x * x).mean(dims, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps))
    return _affine(y, weight, None).to(input.dtype)


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    x = _opmath(input)
    torch._check(x.shape[1] % num_groups == 0, lambda: f"{x.shape[1]} channels in {num_groups} groups")
    each = x.shape[1] // num_groups * math.prod(x.shape[2:])  # no -1, which torch refuses of no rows
    groups = shapes.reshape(x, x.shape[0], num_groups, each)
    variance, mean = torch.var_mean(groups, -1, correction=0, keepdim=True)
    y = ((groups - mean) * torch.rsqrt(variance + eps)).reshape(x.shape)
    shape = [1, -1] + [1] * (x.dim() - 2)
    parts = [None if t is None else t.reshape(shape) for t in (weight, bias)]
    return _affine(y, *parts).to(input.dtype)


def _opmath(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


def batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float | None = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """ATen's own has no gradient for the statistics that it is given."""
    x = _opmath(input)
    shape = [1, -1] + [1] * (x.dim() - 2)
    if training:
        dims = [d for d in range(x.dim()) if d != 1]
        variance, mean = torch.var_mean(x, dims, correction=0)
        _update_statistics(x, running_mean, running_var, mean, variance, momentum)
    elif running_mean is None or running_var is None:
        raise ValueError("Expected running_mean and running_var to be defined when training=False")
    else:
        mean, variance = _opmath(running_mean), _opmath(running_var)
    y = (x - mean.reshape(shape)) * torch.rsqrt(variance.reshape(shape) + eps)
    parts = [None if t is None else t.reshape(shape) for t in (weight, bias)]
    return _affine(y, *parts).to(input.dtype)


def _update_statistics(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, mean: Tensor, variance: Tensor,
    momentum: float | None,
) -> None:  # fmt: skip
    by = 0.0 if momentum is None else momentum
    count = x.numel() // x.shape[1]
    for running, new in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
        if running is not None:
            running.copy_((1 - by) * running + by * new)


def instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if running_mean is not None or running_var is not None:
        raise NotImplementedError(
            "instance_norm that updates running statistics: leave out running_mean and running_var, or give "
            "use_input_stats=False"
        )
    x = _opmath(input)
    variance, mean = torch.var_mean(x, list(range(2, x.dim())), correction=0, keepdim=True)
    shape = [1, -1] + [1] * (x.dim() - 2)
    parts = [None if t is None else t.reshape(shape) for t in (weight, bias)]
    return _affine((x - mean) * torch.rsqrt(variance + eps), *parts).to(input.dtype)


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """ATen's own asks whether a variance is negative."""
    variance = torch.full_like(input, var) if not isinstance(var, Tensor) else var
    if variance.dim() == input.dim() - 1:
        variance = variance.unsqueeze(-1)
    # The bound takes no part in the gradient, and the gradient is not 0 below it.
    kept = variance + (variance.clamp_min(eps) - variance).detach()
    loss = 0.5 * (torch.log(kept) + (input - target) ** 2 / kept) + (0.5 * math.log(2 * math.pi) if full else 0.0)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def bessel_y0(input: Tensor) -> Tensor:
    return torch.special.bessel_y0(input if input.is_floating_point() else input.to(torch.get_default_dtype()))


def bessel_y1(input: Tensor) -> Tensor:
    return torch.special.bessel_y1(input if input.is_floating_point() else input.to(torch.get_default_dtype()))


def _taken_apart(func: Callable[..., Any]) -> Callable[..., Any]:
    """Takes a function apart as torch's own Python does, which serves every size, before autograd sees it. It is not
    for everything: traced like this, ``torch.where`` of a number loses its gradient."""

    def word(*args: Any, **named: Any) -> Any:
        with enable_python_dispatcher():
            return func(*args, **named)

    return word


def _broadcast_first(func: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's own says what the result of these is with sizes as numbers, unless all tensors are of one shape."""
    is_in_place = func.__name__.endswith("_")

    def word(*args: Any, **named: Any) -> Any:
        values = [*args, *named.values()]
        wide = iter(torch.broadcast_tensors(*(x for x in values if isinstance(x, Tensor))))
        values = [next(wide) if isinstance(x, Tensor) else x for x in values]
        values[:is_in_place] = args[:is_in_place]
        return func(*values[: len(args)], **dict(zip(named, values[len(args) :], strict=True)))

    return word


_TERNARY = ("lerp", "addcmul", "addcdiv")

# Where a number of the call is among the arguments.
GIVEN: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.layer_norm: layer_norm, torch.layer_norm: layer_norm, F.rms_norm: rms_norm, torch.rms_norm: rms_norm,
    F.group_norm: group_norm, torch.group_norm: group_norm, **numbers.GIVEN,
}  # fmt: skip

ALWAYS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.dropout: random.dropout, torch.dropout: random.dropout,
    F.batch_norm: batch_norm, F.instance_norm: instance_norm, F.gaussian_nll_loss: gaussian_nll_loss,
    torch.unsafe_chunk: torch.chunk, Tensor.unsafe_chunk: Tensor.chunk,  # which counts the pieces
    torch.special.bessel_y0: bessel_y0, torch.special.bessel_y1: bessel_y1, **places.ALWAYS, **windows.ALWAYS,
    **numbers.ALWAYS, **scattering.ALWAYS, **shapes.ALWAYS,
    **{func: _taken_apart(func) for func in (F.interpolate, F.unfold, F.fold)},
    **{f: _broadcast_first(f) for name in _TERNARY
       for f in (getattr(torch, name), getattr(Tensor, name), getattr(Tensor, f"{name}_"))},
}  # fmt: skip


def replacement(func: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """What is called instead of `func` while it is traced; most often itself. args: by name, too."""
    has_number = any(map(numbers.is_given, args))
    if has_number and func in GIVEN:
        return GIVEN[func]
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
        if has_number and func in numbers.DIFFERENTIATED:
            return numbers.DIFFERENTIATED[func]
        if func in windows.DIFFERENTIATED:
            return windows.DIFFERENTIATED[func]
    return ALWAYS.get(func, func)
