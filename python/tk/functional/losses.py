"""Losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction

from tk.functional._call import Config, autocast, needs, number, only_aten_has, run, taken

__all__ = ["cross_entropy"]

_OPS = {"none": "cross_entropy_rows", "sum": "cross_entropy_sum", "mean": "cross_entropy_mean"}


@needs(*_OPS.values())
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
        input: ``[C]``, ``[N, C]`` or ``[N, C, ...]``; the last is copied.
        target: int64, the indices of the classes: the shape of input without C. On a GPU the loss of a target that is
            no class is NaN; on the CPU it raises IndexError.
            On the CPU also probabilities, of the shape of input.
        weight: of the classes, ``[C]``; on the CPU only.
        size_average, reduce: torch's deprecated forms of reduction.
        ignore_index: rows with this target count for nothing.
        reduction: "none", "sum", or "mean" over the rows that count.
        label_smoothing: 0 to 1: how much of the target is spread over all classes.

    Returns:
        A 0-d tensor, or the shape of target; of the dtype of input.
    """
    input, weight = autocast("cross_entropy", input), autocast("cross_entropy", weight)
    is_taken = taken("cross_entropy", input=input)
    reduction = _reduction_of(size_average, reduce, reduction)
    if not 0 <= number("cross_entropy", "label_smoothing", label_smoothing) <= 1:
        raise ValueError(f"tk.cross_entropy: label_smoothing is {label_smoothing}, must be 0 to 1")
    if not isinstance(target, Tensor):
        raise TypeError(f"tk.cross_entropy: target must be a Tensor, is {type(target).__name__}")
    if target.is_floating_point():
        only_aten_has("cross_entropy", input, "a target of probabilities")
    if weight is not None:
        only_aten_has("cross_entropy", input, "weight")
    if not is_taken or weight is not None or target.is_floating_point():
        return F.cross_entropy(
            input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    x = _rows(input, target)
    _check_targets(target, x.shape[-1], ignore_index)
    loss = run(_OPS[reduction], x, target.reshape(-1), ignore_index, label_smoothing, config=config)
    return loss.reshape(target.shape) if reduction == "none" else loss


def _check_targets(target: Tensor, classes: int, ignore_index: int) -> None:
    """What they hold, on the CPU alone, and where they are numbers: not of a trace, or of a batch under vmap."""
    if (
        target.device.type != "cpu"
        or type(target) is not Tensor
        or not target.numel()
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return
    wrong = target[((target < 0) | (target >= classes)) & (target != ignore_index)]
    if wrong.numel():
        raise IndexError(
            f"tk.cross_entropy: target has {wrong[0].item()}, must be 0 to {classes - 1}, or {ignore_index}"
        )


def _reduction_of(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    if reduction not in _OPS:
        raise ValueError(f"tk.cross_entropy: reduction is {reduction!r}, must be one of {', '.join(_OPS)}")
    return reduction


def _rows(input: Tensor, target: Tensor) -> Tensor:
    """[rows, C]."""
    classes = 0 if input.dim() == 1 else 1
    if input.dim() == 0 or target.shape != (*input.shape[:classes], *input.shape[classes + 1 :]):
        raise ValueError(
            "tk.cross_entropy: input must be [C], [N, C] or [N, C, ...], and target that without C; they are "
            f"{list(input.shape)} and {list(target.shape)}"
        )
    if input.dim() == 2:
        return input
    x = input.movedim(classes, -1)
    return x.reshape(target.numel(), x.shape[-1])
