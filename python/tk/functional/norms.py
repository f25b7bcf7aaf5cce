"""Norms, of the last dimensions or of groups of channels, with what is added before them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tk import parallel
from tk._arguments import shape_of, whole
from tk.functional._call import FLOATS, Config, autocast, check_plain, check_tensor, needs, product, run, taken

__all__ = ["add_layer_norm", "add_rms_norm", "group_norm", "layer_norm", "rms_norm"]


@needs("layer_norm")
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    config: Config = None,
) -> Tensor:
    """``(x - mean) / sqrt(var + eps) · weight + bias``, as ``torch.nn.functional.layer_norm``.

    Args:
        input: ``[..., *normalized_shape]``, bfloat16, float16 or float32; float64 is ATen's, but for strict mode on
            CUDA.
        weight, bias: ``normalized_shape``; missing ones count as 1 and 0. Of the dtype of input, or both in float32.

    Returns:
        The shape and dtype of input.

    Raises:
        ValueError: input does not end in normalized_shape, weight or bias is of another shape. TypeError: an argument
            of another kind. tk.UnsupportedError: a dtype that is none of these on CUDA, a tensor that is not dense.
    """
    input, weight, bias = autocast("layer_norm", input), autocast("layer_norm", weight), autocast("layer_norm", bias)
    if _is_mixed(input, weight, bias):
        wide = layer_norm(input.float(), normalized_shape, weight, bias, eps, config=config)
        return wide.to(input.dtype)
    is_taken = taken("layer_norm", input=input, weight=weight, bias=bias)
    shape = _check("layer_norm", input, normalized_shape, weight=weight, bias=bias)
    if not is_taken:
        return F.layer_norm(input, shape, weight, bias, eps)
    x = _rows(input, shape)
    out = run("layer_norm", x, _flat(x, weight, 1), _flat(x, bias, 0), eps, config=config)
    return out if x is input else out.reshape(input.shape)


@needs("rms_norm")
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    config: Config = None,
) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · weight``, as ``torch.nn.functional.rms_norm``. https://arxiv.org/abs/1910.07467

    Args:
        input: ``[..., *normalized_shape]``.
        weight: ``normalized_shape``; a missing one counts as 1. Of any dtype that input may have: of another one than
            input's all is worked out in float32, and the result has input's.
        eps: by default float32's, as torch has it for 16 bits too.

    Returns:
        The shape and dtype of input. Errors as of :func:`layer_norm`.
    """
    input, weight = autocast("rms_norm", input), autocast("rms_norm", weight)
    if weight is not None and _differ(input, weight):
        wide = rms_norm(input.float(), normalized_shape, weight.float(), _eps(input, eps), config=config)
        return wide.to(input.dtype)
    is_taken = taken("rms_norm", input=input, weight=weight)
    shape = _check("rms_norm", input, normalized_shape, weight=weight)
    if not is_taken:
        return F.rms_norm(input, shape, weight, eps)
    x = _rows(input, shape)
    out = run("rms_norm", x, _flat(x, weight, 1), _eps(x, eps), config=config)
    return out if x is input else out.reshape(input.shape)


@needs("group_norm")
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    config: Config = None,
) -> Tensor:
    """:func:`layer_norm` of each group of channels, as ``torch.nn.functional.group_norm``.
    https://arxiv.org/abs/1803.08494

    Args:
        input: ``[N, C, ...]``, C a multiple of num_groups. In memory formats other than the contiguous and the
            channels-last one it is copied.
        weight, bias: ``[C]``; missing ones count as 1 and 0.

    Returns:
        The shape and dtype of input.

    Raises:
        ValueError: C is no multiple of num_groups, weight or bias is of another length. Other errors as of
            :func:`layer_norm`.
    """
    check_plain("group_norm", "input", input)
    input, weight, bias = autocast("group_norm", input), autocast("group_norm", weight), autocast("group_norm", bias)
    if _is_mixed(input, weight, bias):
        return group_norm(input.float(), num_groups, weight, bias, eps, config=config).to(input.dtype)
    is_taken = taken("group_norm", input=input, weight=weight, bias=bias)
    if input.dim() < 2 or whole("group_norm", "num_groups", num_groups) < 1 or input.shape[1] % num_groups:
        raise ValueError(
            f"tk.group_norm: input must be [N, C, ...] with C a multiple of num_groups, which is {num_groups}; it is "
            f"{list(input.shape)}"
        )
    _check_affine("group_norm", (input.shape[1],), weight=weight, bias=bias)
    if not is_taken:
        return F.group_norm(input, num_groups, weight, bias, eps)
    shape = input.shape
    per_group = shape[1] // num_groups
    x = input.reshape(shape[0], num_groups, per_group, product(shape[2:]))
    scale = _flat(input, weight, 1, shape[1]).reshape(num_groups, per_group)
    shift = _flat(input, bias, 0, shape[1]).reshape(num_groups, per_group)
    return run("group_norm", x, scale, shift, eps, config=config).reshape(shape)


@needs("add_rms_norm")
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None, *, config: Config = None
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(x + residual), x + residual)``, over the last dimension.

    Args:
        x, residual: ``[..., N]``, of one shape. The sum is not rounded before it is normalised.
        weight, eps: as of :func:`rms_norm`.

    Returns:
        Two tensors of x's shape and dtype.

    Raises:
        ValueError: x and residual differ in shape. Other errors as of :func:`layer_norm`.
    """
    if weight is not None and _differ(x, weight) and isinstance(residual, Tensor) and residual.dtype == x.dtype:
        wide = add_rms_norm(x.float(), residual.float(), weight.float(), _eps(x, eps), config=config)
        return wide[0].to(x.dtype), wide[1].to(x.dtype)
    is_taken = taken("add_rms_norm", x=x, residual=residual, weight=weight)
    _check_sum("add_rms_norm", x, residual, weight=weight)
    if not is_taken:
        total = x + residual
        return F.rms_norm(total, total.shape[-1:], weight, eps), total
    return run("add_rms_norm", x, residual, _flat(x, weight, 1), _eps(x, eps), config=config)


@needs("add_layer_norm")
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    config: Config = None,
) -> tuple[Tensor, Tensor]:
    """``(layer_norm(x + residual), x + residual)``, over the last dimension. Arguments and errors as of
    :func:`add_rms_norm`."""
    if _is_mixed(x, weight, bias) and residual.dtype == x.dtype:
        wide = add_layer_norm(x.float(), residual.float(), weight, bias, eps, config=config)
        return wide[0].to(x.dtype), wide[1].to(x.dtype)
    is_taken = taken("add_layer_norm", x=x, residual=residual, weight=weight, bias=bias)
    _check_sum("add_layer_norm", x, residual, weight=weight, bias=bias)
    if not is_taken:
        total = x + residual
        return F.layer_norm(total, total.shape[-1:], weight, bias, eps), total
    return run("add_layer_norm", x, residual, _flat(x, weight, 1), _flat(x, bias, 0), eps, config=config)


def _differ(input: Tensor, weight: Tensor) -> bool:
    """Two dtypes that kernels have. ATen's layer and group norms take fewer pairs (:func:`_is_mixed`)."""
    if not isinstance(input, Tensor) or not isinstance(weight, Tensor) or input.dtype == weight.dtype:
        return False
    return input.dtype in FLOATS and weight.dtype in FLOATS


def _is_mixed(input: Tensor, *affine: Tensor | None) -> bool:
    """Whether 16 bits meet weights in float32: then the input is converted first, and all is worked out in float32."""
    if not isinstance(input, Tensor) or input.dtype not in (torch.bfloat16, torch.float16):
        return False
    is_any_given = False
    for t in affine:
        if t is not None:
            if not isinstance(t, Tensor) or t.dtype != torch.float32:
                return False
            is_any_given = True
    return is_any_given


def _check(function: str, x: Tensor, normalized_shape: Sequence[int], **affine: Tensor | None) -> tuple[int, ...]:
    is_one = type(normalized_shape) is int
    shape = (normalized_shape,) if is_one else shape_of(function, "normalized_shape", normalized_shape)
    if not shape or len(shape) > x.dim() or x.shape[-len(shape) :] != shape:
        raise ValueError(
            f"tk.{function}: input must end in normalized_shape, which is {list(shape)} and must have a dimension; "
            f"input is {list(x.shape)}"
        )
    _check_affine(function, shape, **affine)
    return shape


def _check_affine(function: str, shape: tuple[int, ...], **affine: Tensor | None) -> None:
    for name, t in affine.items():
        if t is not None and t.shape != shape:
            raise ValueError(f"tk.{function}: {name} must be {list(shape)}, is {list(t.shape)}")


def _check_sum(function: str, x: Tensor, residual: Tensor, **affine: Tensor | None) -> None:
    for name, t in (("x", x), ("residual", residual)):
        check_tensor(function, name, t)
    if x.dim() == 0 or x.shape != residual.shape:
        raise ValueError(
            f"tk.{function}: x and residual must be [..., N] and of one shape, are {list(x.shape)} and "
            f"{list(residual.shape)}"
        )
    _check(function, x, x.shape[-1:], **affine)


def _rows(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The normalised dimensions as one."""
    if len(shape) == 1:
        return x
    return x.reshape(*x.shape[: x.dim() - len(shape)], product(shape))


def _flat(x: Tensor, affine: Tensor | None, missing: float, size: int | None = None) -> Tensor:
    """A weight as one dimension; made, where there is none."""
    if affine is None:
        return parallel.full(x, (x.shape[-1] if size is None else size,), missing)
    return affine if affine.dim() == 1 else affine.reshape(-1)


def _eps(x: Tensor, eps: float | None) -> float:
    if eps is not None:
        return eps
    return _EPS if x.dtype in FLOATS else torch.finfo(x.dtype).eps


_EPS = torch.finfo(torch.float32).eps
