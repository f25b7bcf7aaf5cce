"""Functions of a tensor and a number, in words that serve every number.

ATen asks what the number is (an exponent of 2, a norm of order infinity, a smoothing of 0) and computes something else
for each. A number given at run time has no answer, so here the answers stand side by side, as ``torch.where`` of a
tensor without dimensions. What lies outside of a function's domain, which ATen refuses (a negative delta), is not seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion


def opmath(x: Tensor) -> Tensor:
    """Makes x the dtype that ATen computes it in."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def is_given(x: Any) -> bool:
    """A number of the call."""
    return isinstance(x, torch.SymInt | torch.SymFloat)


def _tensor(n: Any, like: Tensor) -> Tensor:
    return torch.full((), n, dtype=like.dtype, device=like.device)


def _floating(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.to(torch.get_default_dtype())


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _reduction(size_average: Any, reduce: Any, reduction: str) -> str:
    """The reduction that torch's older arguments mean."""
    if size_average is None and reduce is None:
        return reduction
    return "none" if reduce is False else "sum" if size_average is False else "mean"


# --- Powers and norms ---


def pow(input: Any, exponent: Any) -> Any:
    if not isinstance(input, Tensor):
        wide = opmath(exponent)
        return torch.pow(_tensor(input, wide), wide).to(exponent.dtype)
    if isinstance(exponent, Tensor) or not (input.is_floating_point() or isinstance(exponent, torch.SymFloat)):
        return torch.pow(input, _tensor(exponent, input) if is_given(exponent) else exponent)
    input = _floating(input)
    wide = opmath(input)
    return torch.pow(wide, _tensor(exponent, wide)).to(input.dtype)


def rpow(input: Tensor, other: Any) -> Tensor:
    return pow(other, input)


def vector_norm(x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """(sum of |x|^p)^(1/p), and the limits of it: the number of elements that are not 0, the largest, the smallest.
    Where the sum is 0 the gradient is 0, as ATen's."""
    if dim is None and x.dim() != 0:
        flat = x.reshape(-1)
        found = vector_norm(flat, ord, 0, False, dtype=dtype)
        return found.reshape([1] * x.dim()) if keepdim else found
    dims = [] if x.dim() == 0 else dim
    a = opmath(x if dtype is None else x.to(dtype)).abs()
    p = _tensor(ord, a)
    is_limit = torch.isinf(p) | (p == 0)
    power = torch.where(is_limit, 1.0, p)
    is_zero = a == 0
    powers = torch.where(is_zero, torch.where(power > 0, 0.0, math.inf), torch.where(is_zero, 1.0, a) ** power)
    total = powers.sum(dims, keepdim)
    is_none = total == 0
    root = torch.where(is_none, 0.0, torch.where(is_none, 1.0, total) ** (1 / power))
    count = (~is_zero).sum(dims, keepdim).to(a.dtype)
    ends = torch.where(p > 0, a.amax(dims, keepdim), a.amin(dims, keepdim))
    return torch.where(torch.isinf(p), ends, torch.where(p == 0, count, root)).to(dtype or x.dtype)


def norm(
    input: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None
) -> Tensor:
    return vector_norm(input, p, dim, keepdim, dtype=dtype)


def normalize(input: Tensor, p: Any = 2.0, dim: Any = 1, eps: Any = 1e-12, out: Any = None) -> Tensor:
    length = vector_norm(input, p, dim, True) if is_given(p) else torch.linalg.vector_norm(input, p, dim, True)
    return input / length.clamp_min(eps).expand_as(input)


def pairwise_distance(x1: Tensor, x2: Tensor, p: Any = 2.0, eps: Any = 1e-6, keepdim: bool = False) -> Tensor:
    apart = x1 - x2 + eps
    return vector_norm(apart, p, -1, keepdim) if is_given(p) else torch.linalg.vector_norm(apart, p, -1, keepdim)


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: Any = 1e-8) -> Tensor:
    a, b = torch.broadcast_tensors(x1, x2)
    unit = [x / torch.linalg.vector_norm(x, 2, dim, True).clamp_min(eps) for x in (a, b)]
    return (unit[0] * unit[1]).sum(dim)


# --- Statistics ---


def _moments(x: Tensor, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(variance, mean). The correction is given."""
    named = dict(zip(("dim", "correction", "keepdim"), args, strict=False)) | dict(named)
    dim, keepdim = named.get("dim"), bool(named.get("keepdim", False))
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    count = math.prod(x.shape[d] for d in dims)
    variance, mean = torch.var_mean(x, dim, correction=0, keepdim=keepdim)
    wide = opmath(variance)
    left = _tensor(count - named["correction"], wide).clamp_min(0)
    return (wide * (count / left)).to(x.dtype), mean


def var(input: Tensor, *args: Any, **named: Any) -> Tensor:
    return _moments(input, args, named)[0]


def std(input: Tensor, *args: Any, **named: Any) -> Tensor:
    return _moments(input, args, named)[0].sqrt()


def var_mean(input: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
    return _moments(input, args, named)


def std_mean(input: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
    variance, mean = _moments(input, args, named)
    return variance.sqrt(), mean


# --- Activations ---


def celu(input: Tensor, alpha: Any = 1.0, inplace: bool = False) -> Tensor:
    return input.relu() + alpha * torch.expm1(input.clamp(max=0) / alpha)


def softshrink(input: Tensor, lambd: Any = 0.5) -> Tensor:
    lambd = _tensor(lambd, input)
    inside = torch.where(input < -lambd, input + lambd, input * 0)
    return torch.where(input > lambd, input - lambd, inside)


def hardshrink(input: Tensor, lambd: Any = 0.5) -> Tensor:
    return torch.where((input >= -lambd) & (input <= lambd), torch.zeros_like(input), input)


def searchsorted(sorted_sequence: Tensor, input: Any, **named: Any) -> Tensor:
    if isinstance(input, Tensor):
        return torch.searchsorted(sorted_sequence, input, **named)
    row, x = _of_one_dtype(sorted_sequence, input)
    return torch.searchsorted(row, x, **named)


def bucketize(input: Any, boundaries: Tensor, **named: Any) -> Tensor:
    if isinstance(input, Tensor):
        return torch.bucketize(input, boundaries, **named)
    row, x = _of_one_dtype(boundaries, input)
    return torch.bucketize(x, row, **named)


def _of_one_dtype(row: Tensor, number: Any) -> tuple[Tensor, Tensor]:
    """A sorted row, and a number that is searched in it, which has as many digits."""
    dtype = torch.result_type(row, 1.0 if isinstance(number, float | torch.SymFloat) else 1)
    return row.to(dtype), torch.full((), number, dtype=dtype, device=row.device)


def hardtanh(input: Tensor, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False) -> Tensor:
    return torch.where(input <= min_val, min_val, torch.where(input >= max_val, max_val, input))


def logit(input: Tensor, eps: Any = None) -> Tensor:
    x = _floating(input).clamp(eps, 1 - eps)
    return torch.log(x / (1 - x))


def lerp(input: Tensor, end: Tensor, weight: Any) -> Tensor:
    return input + weight * (end - input)


def nan_to_num(input: Tensor, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Tensor:
    if not input.is_floating_point():
        return input.clone()
    most = torch.finfo(input.dtype).max
    found = torch.where(input == math.inf, most if posinf is None else posinf, input)
    found = torch.where(input == -math.inf, -most if neginf is None else neginf, found)
    return torch.where(torch.isnan(input), 0.0 if nan is None else nan, found)


def add(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return input + other * alpha


def sub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return input - other * alpha


def rsub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return other - input * alpha


# --- Losses ---


def huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: Any = 1.0, weight: Tensor | None = None
) -> Tensor:
    away = (input - target).abs()
    loss = torch.where(away < delta, 0.5 * away * away, delta * (away - 0.5 * delta))
    if weight is None:
        return _reduced(loss, reduction)
    loss = loss * weight
    return loss.sum() / weight.sum() if reduction == "mean" else _reduced(loss, reduction)


def smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    beta: Any = 1.0,
) -> Tensor:
    away = (input - target).abs()
    at = _tensor(beta, opmath(away))
    loss = torch.where(away < beta, 0.5 * away * away / torch.where(at == 0, 1.0, at), away - 0.5 * beta)
    return _reduced(loss, _reduction(size_average, reduce, reduction))


def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: Any = 0.0,
) -> Tensor:  # fmt: skip
    reduction = _reduction(size_average, reduce, reduction)
    dim = 1 if input.dim() > 1 else 0
    log_p = F.log_softmax(input, dim)
    shape = [-1 if d == dim else 1 for d in range(input.dim())]
    weighted = log_p if weight is None else log_p * weight.reshape(shape)
    n_classes = input.shape[dim]
    if target.is_floating_point():
        smoothed = target * (1 - label_smoothing) + label_smoothing / n_classes
        loss = -(weighted * smoothed).sum(dim)
        if reduction == "mean":
            return loss.sum() / max(math.prod(n for d, n in enumerate(input.shape) if d != dim), 1)
        return _reduced(loss, reduction)
    hard = F.nll_loss(log_p, target, weight, ignore_index=ignore_index, reduction=reduction)
    is_ignored = target == ignore_index
    smooth = torch.where(is_ignored, 0.0, -weighted.sum(dim))
    if reduction == "mean":
        of = torch.where(is_ignored, 0, 1) if weight is None else _weights_of(weight, target, is_ignored)
        smooth = smooth.sum() / of.sum()
    else:
        smooth = _reduced(smooth, reduction)
    return (1 - label_smoothing) * hard + (label_smoothing / n_classes) * smooth


def _weights_of(weight: Tensor, target: Tensor, is_ignored: Tensor) -> Tensor:
    return torch.where(is_ignored, 0.0, weight[torch.where(is_ignored, 0, target)])


def margin_ranking_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: Any = 0.0, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    loss = (-target * (input1 - input2) + margin).clamp_min(0)
    return _reduced(loss, _reduction(size_average, reduce, reduction))


def hinge_embedding_loss(
    input: Tensor, target: Tensor, margin: Any = 1.0, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    far = torch.where(target != 1, (margin - input).clamp_min(0), 0.0)
    loss = far + torch.where(target != -1, input, 0.0)
    return _reduced(loss, _reduction(size_average, reduce, reduction))


def triplet_margin_loss(
    anchor: Tensor, positive: Tensor, negative: Tensor, margin: Any = 1.0, p: Any = 2, eps: Any = 1e-6,
    swap: bool = False, size_average: Any = None, reduce: Any = None, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    near, far = pairwise_distance(anchor, positive, p, eps), pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, pairwise_distance(positive, negative, p, eps))
    loss = (margin + near - far).clamp_min(0)
    return _reduced(loss, _reduction(size_average, reduce, reduction))


def in_place(word: Callable[..., Any]) -> Callable[..., Tensor]:
    def write(input: Tensor, *args: Any, **named: Any) -> Tensor:
        return input.copy_(word(input, *args, **named))

    return write


def _both(name: str, word: Callable[..., Any]) -> dict[Any, Callable[..., Any]]:
    """torch.name, Tensor.name and Tensor.name_, as far as there are such."""
    found = {getattr(torch, name, None): word, getattr(Tensor, name, None): word}
    found[getattr(Tensor, f"{name}_", None)] = found[getattr(torch, f"{name}_", None)] = in_place(word)
    return {func: made for func, made in found.items() if func is not None}


_POWERS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    **_both("pow", pow), Tensor.__pow__: pow, Tensor.__ipow__: in_place(pow), Tensor.__rpow__: rpow,
}  # fmt: skip
_ASKS_FOR_EXPONENTS = TorchVersion(torch.__version__) < TorchVersion("2.13")  # whether they are 1, 2 or a half

# What is called where a number of the call is among the arguments.
GIVEN: Mapping[Callable[..., Any], Callable[..., Any]] = {
    **(_POWERS if _ASKS_FOR_EXPONENTS else {}),
    **_both("norm", norm), torch.functional.norm: norm, torch.linalg.vector_norm: vector_norm,
    **_both("nan_to_num", nan_to_num), **_both("logit", logit), torch.special.logit: logit,
    **_both("var", var), **_both("std", std), torch.var_mean: var_mean, torch.std_mean: std_mean,
    F.normalize: normalize, F.pairwise_distance: pairwise_distance, torch.pairwise_distance: pairwise_distance,
    F.cosine_similarity: cosine_similarity, torch.cosine_similarity: cosine_similarity,
    F.hardtanh: hardtanh, F.huber_loss: huber_loss, F.smooth_l1_loss: smooth_l1_loss,
    F.cross_entropy: cross_entropy, F.margin_ranking_loss: margin_ranking_loss,
    F.hinge_embedding_loss: hinge_embedding_loss, F.triplet_margin_loss: triplet_margin_loss,
}  # fmt: skip

# The same, but only where a gradient is asked for: ATen's own forward takes any number.
DIFFERENTIATED: Mapping[Callable[..., Any], Callable[..., Any]] = {
    **_POWERS, **_both("lerp", lerp), **_both("add", add), **_both("sub", sub), **_both("subtract", sub),
    torch.rsub: rsub,
    F.celu: celu, torch.celu: celu,
}  # fmt: skip

# Whatever the arguments are: ATen's gradients of these have no rule for symbolic sizes; and a search for a number has
# none for what is no tensor.
ALWAYS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.hardshrink: hardshrink, Tensor.hardshrink: hardshrink, torch.hardshrink: hardshrink, F.softshrink: softshrink,
    torch.searchsorted: searchsorted, torch.bucketize: bucketize,
}  # fmt: skip
