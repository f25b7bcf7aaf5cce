"""Activations, and those of gated layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tk.dropin.replacement import Replacement
from tk.dropin.speed import ALL, Rule, Speed
from tk.dropin.target import Target
from tk.functional import activations


def _gelu(target: Target) -> Callable[..., bool]:
    def gelu(input: Tensor, approximate: str = "none") -> bool:
        return target.takes(input) and approximate in ("none", "tanh") and _is_fast_row(target, input)

    return gelu


def _silu(target: Target) -> Callable[..., bool]:
    def silu(input: Tensor, inplace: bool = False) -> bool:
        return not inplace and target.takes(input) and _is_fast_row(target, input)

    return silu


def _is_fast_row(target: Target, x: Tensor) -> bool:
    return x.dim() > 0 and target.is_fast("", x.shape[-1], x)


def _example(module: nn.Module, dtype: torch.dtype) -> tuple[Any, ...]:
    weight = getattr(module, "weight", None)
    device = weight.device if isinstance(weight, Tensor) else torch.device("cuda")
    return (torch.empty(16, 128, dtype=dtype, device=device),)


GELU = Replacement(
    op="gelu",
    originals=("torch.nn.functional.gelu",),
    takes=_gelu,
    call=lambda input, approximate="none": activations.gelu(input, None, approximate),
    speed=Speed({"sm_90": {"": Rule("columns", ALL, ALL, "1.27, backward 1.16")}}),
    example=_example,
)
SILU = Replacement(
    op="silu",
    originals=("torch.nn.functional.silu",),
    takes=_silu,
    call=lambda input, inplace=False: activations.silu(input),
    speed=Speed({"sm_90": {"": Rule("columns", ALL, ALL, "1.02, backward 1.02")}}),
    example=_example,
)


def _gated(target: Target) -> Callable[..., bool]:
    def gated(gate: Tensor, up: Tensor, approximate: str = "none") -> bool:
        return (
            target.takes(gate, up)
            and gate.dtype is up.dtype
            and gate.dim() > 0
            and gate.shape == up.shape
            and target.is_fast("", gate.shape[-1], gate, up)
        )

    return gated


SWIGLU = Replacement(
    op="swiglu",
    originals=(),
    takes=_gated,
    call=activations.swiglu,
    speed=Speed({"sm_90": {"": Rule("columns", ALL, ALL, "1.54, backward 2.21")}}, least_us=(0.0, 600.0)),
)
GEGLU = Replacement(
    op="geglu",
    originals=(),
    takes=_gated,
    call=activations.geglu,
)
