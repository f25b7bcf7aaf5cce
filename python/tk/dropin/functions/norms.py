"""Norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tk.dropin.replacement import Replacement
from tk.dropin.speed import ALL, Rule, Speed
from tk.dropin.target import Target, is_in_order
from tk.functional import norms
from tk.functional._call import AUTOCAST_TO_FLOAT32, product


def _layer_norm(target: Target) -> Callable[..., bool]:
    def layer_norm(
        input: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> bool:
        return _normalises(target, "layer_norm", input, normalized_shape, weight, bias)

    return layer_norm


def _rms_norm(target: Target) -> Callable[..., bool]:
    def rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> bool:
        return _normalises(target, "rms_norm", input, normalized_shape, weight)

    return rms_norm


def _normalises(target: Target, op: str, x: Tensor, shape: Any, *affine: Tensor | None) -> bool:
    if not target.takes(x, optional=affine):
        return False
    shape = tuple(shape)
    if not shape or x.shape[-len(shape) :] != shape or not is_in_order(x, len(shape)):
        return False
    return _fit(target, op, x, shape, affine) and target.is_fast("", product(shape), x, *affine)


def _fit(target: Target, op: str, x: Tensor, shape: tuple[int, ...], affine: tuple[Tensor | None, ...]) -> bool:
    """Weight and bias have this shape, and the dtype of x, as they are or as autocast makes them."""
    for t in affine:
        if t is not None and (t.shape != shape or (t.dtype is not x.dtype and not _is_cast(target, op))):
            return False
    return True


def _is_cast(target: Target, op: str) -> bool:
    device = target.device_type
    return op in AUTOCAST_TO_FLOAT32.get(device, ()) and torch.is_autocast_enabled(device)


def _example(module: nn.Module, dtype: torch.dtype) -> tuple[Any, ...] | None:
    weight = getattr(module, "weight", None)
    return (weight.new_empty(16, *weight.shape), weight.shape, weight) if isinstance(weight, Tensor) else None


LAYER_NORM = Replacement(
    op="layer_norm",
    originals=("torch.nn.functional.layer_norm",),
    takes=_layer_norm,
    call=norms.layer_norm,
    speed=Speed({"sm_90": {"": Rule("columns", ALL, ALL, "2.01, backward 1.23")}}),
    example=_example,
)
RMS_NORM = Replacement(
    op="rms_norm",
    originals=("torch.nn.functional.rms_norm",),
    takes=_rms_norm,
    call=norms.rms_norm,
    speed=Speed({"sm_90": {"": Rule("columns", ALL, ALL, "1.72, backward 1.48")}}),
    example=_example,
)


def _group_norm(target: Target) -> Callable[..., bool]:
    def group_norm(
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> bool:
        return (
            target.takes(input, optional=(weight, bias))
            and input.dim() >= 2
            and input.shape[1] % num_groups == 0
            and _fit(target, "group_norm", input, input.shape[1:2], (weight, bias))
            and target.is_fast("", input.shape[1], input, weight, bias)
        )

    return group_norm


GROUP_NORM = Replacement(
    op="group_norm",
    originals=("torch.nn.functional.group_norm",),
    takes=_group_norm,
    call=norms.group_norm,
)
