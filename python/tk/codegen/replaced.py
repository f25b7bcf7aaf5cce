"""What a function calls, in words that can be traced: ATen's own norms take eps as a number known when they are called,
its padding makes numbers of sizes, and so do some of its functions that make floats of integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tk.codegen import places, random


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
    groups = x.reshape(x.shape[0], num_groups, -1)
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


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    if mode != "constant":
        raise NotImplementedError(f"padding by {mode!r}: only 'constant' can be generated")
    result = input
    for n in range(len(pad) // 2):
        dim = input.dim() - 1 - n
        before, after = pad[2 * n], pad[2 * n + 1]
        inside = result.narrow(dim, max(-before, 0), result.shape[dim] - max(-before, 0) - max(-after, 0))
        parts = [_filled(result, dim, before, value), inside, _filled(result, dim, after, value)]
        result = torch.cat([p for p in parts if p is not None], dim) if before > 0 or after > 0 else inside
    return result


def _filled(like: Tensor, dim: int, size: int, value: float | None) -> Tensor | None:
    shape = [*like.shape[:dim], size, *like.shape[dim + 1 :]]
    return like.new_full(shape, 0 if value is None else value) if size > 0 else None


def bessel_y0(input: Tensor) -> Tensor:
    return torch.special.bessel_y0(input if input.is_floating_point() else input.to(torch.get_default_dtype()))


def bessel_y1(input: Tensor) -> Tensor:
    return torch.special.bessel_y1(input if input.is_floating_point() else input.to(torch.get_default_dtype()))


RUNTIME_EPS: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    F.group_norm: group_norm,
    torch.group_norm: group_norm,
}

ALWAYS: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    F.pad: pad, torch.constant_pad_nd: pad, F.dropout: random.dropout, torch.dropout: random.dropout,
    torch.special.bessel_y0: bessel_y0, torch.special.bessel_y1: bessel_y1, **places.ALWAYS,
}  # fmt: skip


def replacement(func: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """What is called instead of `func` while it is traced; most often itself."""
    if func in RUNTIME_EPS and any(isinstance(a, torch.SymFloat) for a in args):
        return RUNTIME_EPS[func]
    return ALWAYS.get(func, func)
