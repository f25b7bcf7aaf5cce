"""Losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction

from tk import parallel
from tk._arguments import number, optional_flag, whole
from tk.functional._call import (
    Config,
    as_int64,
    autocast,
    check_tensor,
    classes_last,
    needs,
    only_aten_has,
    product,
    run,
    taken,
)
from tk.functional.reductions import sum

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["cross_entropy"]

FEW_ROWS = 4096  # which 32 at once are a program for each multiprocessor
SHORT_ROW = 1024  # to copy it would take longer than a kernel that reads it across memory

_OPS = {"none": "cross_entropy_rows", "sum": "cross_entropy_sum", "mean": "cross_entropy_mean"}


@needs(*_OPS.values(), "cross_entropy_weighted", "cross_entropy_of_probabilities", "total_sum")
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    config: Config = None,
) -> Tensor:
    """``-log(softmax(input)[target])``, as ``torch.nn.functional.cross_entropy``, in one pass over input.

    Args:
        input: ``[C]``, ``[N, C]`` or ``[N, C, ...]``; the last is copied, and so are fewer than 4096 rows of more than
            1024 classes that do not lie beside each other. Of no classes the loss is ATen's, but for
            strict mode on CUDA. Of a DTensor with sharded classes it is worked out without gathering them, and is a
            DTensor (:func:`tk.parallel.loss.cross_entropy`).
        target: int64 or uint8, the indices of the classes: the shape of input without C. One that is no class and not
            ignore_index is ATen's error on the CPU; on CUDA it ends the kernel, and with it the process's CUDA context.
            Or probabilities, of the shape and dtype of input.
        weight: of the classes, ``[C]``, of the dtype of input. It has no gradient. With it, or with probabilities,
            logits of 16 bits are converted to float32 first.
        size_average, reduce: torch's deprecated forms of reduction.
        ignore_index: rows with this target count for nothing.
        reduction: "none", "sum", or "mean" over the rows that count, by their classes' weights.
        label_smoothing: 0 to 1: how much of the target is spread over all classes.

    Returns:
        A 0-d tensor, or the shape of target without its classes; of the dtype of input.

    Raises:
        ValueError: shapes that do not go together, a reduction that is none, a label_smoothing that is not 0 to 1.
        TypeError: an argument of the wrong kind. tk.UnsupportedError: dtypes that no kernel has, on CUDA.
    """
    input, weight = autocast("cross_entropy", input), autocast("cross_entropy", weight)
    has_probabilities = isinstance(target, Tensor) and target.is_floating_point()
    if has_probabilities:
        target = autocast("cross_entropy", target)
    is_taken = taken("cross_entropy", input=input, weight=weight, target=target if has_probabilities else None)
    reduction = _reduction_of(size_average, reduce, reduction)
    label_smoothing = number("cross_entropy", "label_smoothing", label_smoothing)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"tk.cross_entropy: label_smoothing is {label_smoothing}, must be 0 to 1")
    whole("cross_entropy", "ignore_index", ignore_index)
    check_tensor("cross_entropy", "target", target)
    if parallel.is_distributed(input) and _has_sharded_classes(input):
        from tk.parallel.loss import cross_entropy as of_shards

        return of_shards(input, target, weight, ignore_index, reduction, label_smoothing, config)
    if weight is not None and weight.requires_grad:
        only_aten_has("cross_entropy", input, "the gradient of weight")
        is_taken = False
    if input.dim() and input.shape[min(input.dim() - 1, 1)] == 0:  # a row of none has no largest logit
        only_aten_has("cross_entropy", input, "no classes")
        is_taken = False
    if not is_taken:
        return F.cross_entropy(
            input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    rows, shape = _rows(input, target, weight)
    if has_probabilities:
        if ignore_index >= 0:
            raise ValueError("tk.cross_entropy: ignore_index is of targets that are indices, not of probabilities")
        given = (rows.float(), classes_last(target).float(), _weights(input, weight))
        loss = run("cross_entropy_of_probabilities", *given, label_smoothing, config=config)
        return _reduced(loss, None, reduction, shape, config).to(input.dtype)
    if target.dtype not in (torch.int64, torch.uint8):
        raise ValueError(
            f"tk.cross_entropy: target is {target.dtype}, must be int64 or uint8, or floating-point probabilities"
        )
    target = as_int64(target if target.dim() == 1 else target.reshape(-1))
    numbers = (ignore_index, label_smoothing)
    if weight is not None:
        given = (rows.float(), target, _weights(input, weight))
        loss, of_class = run("cross_entropy_weighted", *given, *numbers, config=config)
        return _reduced(loss, of_class, reduction, shape, config).to(input.dtype)
    if reduction == "mean" and parallel.is_distributed(rows):  # of rows that are sharded; the op has all or none
        loss = run(_OPS["sum"], rows, target, *numbers, config=config)
        return loss / (target != ignore_index).sum()
    loss = run(_OPS[reduction], rows, target, *numbers, config=config)
    return loss.reshape(shape) if reduction == "none" else loss


def _has_sharded_classes(input: DTensor) -> bool:
    classes = min(input.dim() - 1, 1)
    return any(getattr(placement, "dim", None) == classes for placement in input.placements)


def _reduction_of(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    optional_flag("cross_entropy", "size_average", size_average)
    optional_flag("cross_entropy", "reduce", reduce)
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    if reduction not in _OPS:
        raise ValueError(f"tk.cross_entropy: reduction is {reduction!r}, must be one of {', '.join(_OPS)}")
    return reduction


def _rows(input: Tensor, target: Tensor, weight: Tensor | None) -> tuple[Tensor, Sequence[int]]:
    """[rows, C], and the shape of the losses."""
    classes = 0 if input.dim() == 1 else 1
    shape = (*input.shape[:classes], *input.shape[classes + 1 :])
    if input.dim() == 0 or target.shape != (input.shape if target.is_floating_point() else shape):
        raise ValueError(
            "tk.cross_entropy: input must be [C], [N, C] or [N, C, ...], and target that without C, or probabilities "
            f"of the same shape; they are {list(input.shape)} and {list(target.shape)}"
        )
    if weight is not None and weight.shape != (input.shape[classes],):
        raise ValueError(f"tk.cross_entropy: weight must be [{input.shape[classes]}], is {list(weight.shape)}")
    rows = classes_last(input)
    if _is_few_long_columns(rows):
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows, shape


def _is_few_long_columns(x: Tensor) -> bool:
    """Whether there are few long rows across memory. A program has 32 at once: of few, few programs would each run
    through many classes. To guard a symbolic size would cost more than the copy gains."""
    rows, classes = x.shape
    is_across = type(rows) is int and type(classes) is int and 1 < rows < FEW_ROWS and x.stride(1) != 1
    return is_across and classes > SHORT_ROW


def _weights(input: Tensor, weight: Tensor | None) -> Tensor:
    if weight is not None:
        return weight.float()
    return parallel.full(input, input.shape[0 if input.dim() == 1 else 1 :][:1], 1.0, torch.float32)


def _reduced(loss: Tensor, of_class: Tensor | None, reduction: str, shape: Sequence[int], config: Config) -> Tensor:
    if reduction == "none":
        return loss.reshape(shape)
    total = sum(loss, config=config)
    if reduction == "sum":
        return total
    return total / (product(shape) if of_class is None else sum(of_class, config=config))
