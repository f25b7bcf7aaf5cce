"""Losses of what a linear layer computes, without its result in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tk import errors
from tk._arguments import number, whole
from tk.functional._call import (
    AUTOCAST_TO_FLOAT32,
    Config,
    check_tensor,
    needs,
    needs_gradient,
    one_device,
    product,
    taken,
)
from tk.functional.losses import cross_entropy
from tk.heuristics import overrides
from tk.ops._register import cast
from tk.ops.linear_cross_entropy import linear_cross_entropy as _rows
from tk.ops.linear_cross_entropy import reduced, total_of_rows
from tk.ops.mm import linear
from tk.parallel import is_distributed

__all__ = ["linear_cross_entropy"]

_NAME = "linear_cross_entropy"
_KERNEL = "logsumexp"
_REDUCTIONS = ("none", "mean", "sum")


@needs("logsumexp", "row_sum", "row_amax", "column_sum", *cross_entropy.ops)  # type: ignore[attr-defined]
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    config: Config = None,
) -> Tensor:
    """The cross entropy of ``input @ linear_weight.T + linear_bias``, as ``torch.nn.functional.linear_cross_entropy``,
    of which no more than a block of classes is in memory at a time.

    Beside the gradients a call takes at most 240 MiB up to 8192 rows of 4096 features. With more of them it is the
    gradient of input in float32 and 96 to 240 MiB; past 131,072 rows a block takes more. Logits are float32: of 16 bits
    they are not rounded, as torch's are.

    A sum or a mean whose logits fit this at once, 8 bytes each in 192 MiB, has its gradients worked out with it where
    gradients are enabled and needed. They are in memory from the forward on, and the backward multiplies them by the
    gradient of the loss. Up to 32 MiB every backward of the same graph does so; of larger gradients a second one
    computes them again. Of float32 this is so wherever 256 rows or more fit; of float16 up to 32 MiB of gradients in
    float32, without weight. Losses that are not reduced keep their logits, 4 bytes each, up to 32 MiB. Otherwise the
    backward computes the logits again. Under ``torch.no_grad()`` nothing of a gradient is computed.

    Args:
        input: ``[in_features]`` or ``[..., in_features]``.
        linear_weight: ``[C, in_features]``, of the dtype of input. ``[C, d_1, ..., in_features]`` is a loss of more
            dimensions, for an input of at most two.
        target: int64 or uint8, the indices of the classes: the shape of input without its last dimension, and with
            ``d_1, ...`` behind. A wrong one is an IndexError on the CPU; on CUDA it ends the process's CUDA context. Or
            probabilities, in the dtype and shape of the logits, ``[C]`` or ``[N, C, d_1, ...]``.
        linear_bias: the shape of linear_weight without its last dimension.
        weight: of the classes, ``[C]``, of the dtype of input.
        reduction: "none", "sum", or "mean" over the rows that count, by their classes' weights.
        ignore_index: rows with this target count for nothing; None is -100. Probabilities take None alone.
        label_smoothing: 0 to 1: how much of the target is spread over all classes.
        options: a ``torch.nn.LinearCrossEntropyOptions`` or None. It says how torch divides the logits, and changes
            nothing here.
        config: of the kernel that reduces the rows of logits.

    Returns:
        A 0-d tensor, or the shape of target without its classes; of the dtype of input, and float32 under autocast.

    Logits are whole in memory, as of :func:`tk.linear` and :func:`tk.cross_entropy`, with probabilities, more
    dimensions of loss, a gradient of weight, no classes, or float64, which is ATen's.

    Raises:
        ValueError: shapes that do not go together, a reduction that is none, ignore_index with probabilities.
        TypeError: an argument of the wrong kind. NotImplementedError: a gradient of the gradient.
        tk.UnsupportedError: dtypes that no kernel has, on CUDA.
    """
    device = input.device.type if isinstance(input, Tensor) else ""
    is_autocast = device in AUTOCAST_TO_FLOAT32 and torch.is_autocast_enabled(device)
    if is_autocast:
        dtype = torch.get_autocast_dtype(device)
        input, linear_weight, linear_bias = (cast(x, device, dtype) for x in (input, linear_weight, linear_bias))
        weight = weight.float() if isinstance(weight, Tensor) else weight
    of_one_dtype = None if is_autocast else weight
    is_taken = taken(_NAME, input=input, linear_weight=linear_weight, linear_bias=linear_bias, weight=of_one_dtype)
    check_tensor(_NAME, "linear_weight", linear_weight)  # which taken lets be None
    check_tensor(_NAME, "target", target)
    if weight is not None:
        check_tensor(_NAME, "weight", weight)
    _check_settings(reduction, ignore_index, label_smoothing, options)
    logits_shape = _logits_shape(input, linear_weight, linear_bias)
    has_probabilities = target.shape == logits_shape and target.is_floating_point()
    _check_target(target, has_probabilities, logits_shape, weight, input)
    tensors = dict(input=input, linear_weight=linear_weight, target=target, linear_bias=linear_bias, weight=weight)
    one_device(_NAME, **tensors)
    if has_probabilities and ignore_index is not None:
        raise ValueError(f"tk.{_NAME}: ignore_index is {ignore_index}, must be None: target holds probabilities")
    ignore_index = -100 if ignore_index is None else ignore_index
    if not is_taken:
        logits = F.linear(input, *_matrix(linear_weight, linear_bias)).reshape(logits_shape)
        return F.cross_entropy(logits, target, weight, None, ignore_index, None, reduction, label_smoothing)
    # Logits of DTensors are sharded, and no rank has all of them.
    trains_weight = weight is not None and needs_gradient(weight)
    needs_more = linear_weight.shape[0] == 0 or trains_weight or is_distributed(input)
    if has_probabilities or linear_weight.dim() > 2 or needs_more:
        logits = linear(input, *_matrix(linear_weight, linear_bias)).reshape(logits_shape)
        return cross_entropy(
            logits, target, weight, None, ignore_index, None, reduction, label_smoothing, config=config
        )
    mode, number_of = overrides.find(_KERNEL, input)
    number_of = number_of if config is None else overrides.number(_KERNEL, config, input)
    at = target.reshape(-1).long()
    rows = input if input.dim() == 2 else input.reshape(at.shape[0], input.shape[-1])
    given = (rows, linear_weight, at, linear_bias, weight, ignore_index, float(label_smoothing))
    try:
        if reduction == "none" or number_of >= 0:  # a config is of the kernel that takes blocks of classes
            loss, *_ = _rows(*given, number_of, mode)
        else:
            loss = reduced(*given, reduction == "mean", mode)
    except RuntimeError as error:
        raise errors.typed(error) from None
    if reduction == "none":
        loss = loss.reshape(target.shape)
    elif number_of >= 0:
        loss = total_of_rows(loss, at, weight, ignore_index, reduction == "mean")
    return loss.to(torch.float32 if is_autocast else input.dtype)


def _matrix(linear_weight: Tensor, linear_bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The weight with all but in_features one dimension, and the bias."""
    matrix = linear_weight.reshape(product(linear_weight.shape[:-1]), linear_weight.shape[-1])
    return matrix, None if linear_bias is None else linear_bias.reshape(-1)


# --- What is refused ---


def _check_settings(reduction: Any, ignore_index: Any, label_smoothing: Any, options: Any) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"tk.{_NAME}: reduction is {reduction!r}, must be one of {', '.join(_REDUCTIONS)}")
    if ignore_index is not None:
        whole(_NAME, "ignore_index", ignore_index)
    if not 0 <= number(_NAME, "label_smoothing", label_smoothing) <= 1:
        raise ValueError(f"tk.{_NAME}: label_smoothing is {label_smoothing}, must be 0 to 1")
    kind = getattr(torch.nn, "LinearCrossEntropyOptions", type(None))  # torch has it from 2.13 on
    if not isinstance(options, kind | None):
        raise TypeError(f"tk.{_NAME}: options must be a torch.nn.LinearCrossEntropyOptions or None, is {options!r}")


def _logits_shape(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> tuple[int, ...]:
    if linear_weight.dim() < 2:
        raise ValueError(f"tk.{_NAME}: linear_weight must have 2 dimensions or more, is {list(linear_weight.shape)}")
    more = linear_weight.shape[1:-1]
    if input.dim() == 0 or (more and input.dim() != 2):
        wanted = "2 dimensions beside a linear_weight of more" if more else "1 dimension or more"
        raise ValueError(f"tk.{_NAME}: input must have {wanted}, is {list(input.shape)}")
    if input.shape[-1] != linear_weight.shape[-1]:
        raise ValueError(
            f"tk.{_NAME}: the last sizes differ: input is {list(input.shape)}, linear_weight "
            f"{list(linear_weight.shape)}"
        )
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:-1]:
        raise ValueError(
            f"tk.{_NAME}: linear_bias must be {list(linear_weight.shape[:-1])}, is {list(linear_bias.shape)}"
        )
    return (*input.shape[:-1], linear_weight.shape[0], *more)


def _check_target(
    target: Tensor, has_probabilities: bool, logits_shape: Sequence[int], weight: Tensor | None, input: Tensor
) -> None:
    classes = min(input.dim() - 1, len(logits_shape) - 1)
    of_indices = (*logits_shape[:classes], *logits_shape[classes + 1 :])
    if not has_probabilities and target.shape != of_indices:
        raise ValueError(
            f"tk.{_NAME}: target must be {list(of_indices)}, or probabilities {list(logits_shape)}, is "
            f"{list(target.shape)}"
        )
    if not has_probabilities and target.dtype not in (torch.int64, torch.uint8):
        raise ValueError(
            f"tk.{_NAME}: target is {target.dtype}, must be int64 or uint8, or floating-point probabilities"
        )
    if weight is not None and weight.shape != (logits_shape[classes],):
        raise ValueError(f"tk.{_NAME}: weight must be [{logits_shape[classes]}], is {list(weight.shape)}")
