"""Convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import tk
from tk.dropin.replacement import Replacement
from tk.dropin.speed import ALL, NONE, SIXTEEN_BITS, Rule, Rules, Speed, memory_us, tensor_core_us
from tk.dropin.target import Target, needs_gradient
from tk.errors import UnsupportedError, VariantNotFoundError

# Of images and videos, which is what was measured. Against cuDNN with benchmark on: networks' layers channels-last and
# contiguous, then random ones. Gradients: 0.95.
RULES: Rules = {
    "sm_90": {  # an H200
        "16-bit": Rule("channels", ALL, NONE, "1.21 and 1.32, random 1.05 and 1.10"),
        "16-bit groups": Rule("channels of a group", ((8, None),), NONE, "1.12 and 1.24, fewer: 0.79 and 1.23"),
    }
}


def _kind(dtype: torch.dtype, groups: int) -> str:
    if dtype in SIXTEEN_BITS:
        return "16-bit" if groups == 1 else "16-bit groups"
    return "float32" if groups == 1 else "float32 groups"


def _kind_of(module: nn.Module, dtype: torch.dtype) -> str:
    return _kind(dtype, getattr(module, "groups", 1))


def _conv(spatial: int) -> Callable[[Target], Callable[..., bool]]:
    def make(target: Target) -> Callable[..., bool]:
        serves_training = target.serves_training

        def conv(
            input: Tensor,
            weight: Tensor,
            bias: Tensor | None = None,
            stride: Any = 1,
            padding: Any = 0,
            dilation: Any = 1,
            groups: int = 1,
        ) -> bool:
            return (
                (serves_training or not needs_gradient(input, weight, bias))
                and target.takes(input, weight, optional=(bias,))
                and weight.dim() == spatial + 2
                and input.dim() in (spatial + 1, spatial + 2)
                and target.is_fast(_kind(target.product_dtype(input), groups), weight.shape[1], input, weight, bias)
            )

        return conv

    return make


def _example(module: nn.Module, dtype: torch.dtype) -> tuple[Any, ...] | None:
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return None
    sizes = [(k - 1) * d + 8 for k, d in zip(module.kernel_size, module.dilation, strict=True)]
    x = module.weight.new_empty(1, module.in_channels, *sizes)
    return x, module.weight, module.bias, module.stride, 0, module.dilation, module.groups


def _conv_us(spatial: int) -> Callable[..., float]:
    def device_us(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, *args: Any,
                  **kwargs: Any) -> float:  # fmt: skip
        steps = stride**spatial if isinstance(stride, int) else math.prod(stride)
        pixels = math.prod(input.shape[-spatial:]) * (input.shape[0] if input.dim() > spatial + 1 else 1) / steps
        return max(memory_us(input, weight), tensor_core_us(pixels * weight.numel()))

    return device_us


def _replacement(spatial: int, call: Callable[..., Tensor], rules: Rules) -> Replacement:
    refusals = (ValueError, UnsupportedError, VariantNotFoundError)
    return Replacement(
        op=f"conv{spatial}d",
        originals=(f"torch.nn.functional.conv{spatial}d",),
        takes=_conv(spatial),
        call=call,
        speed=Speed(rules, _kind_of, under_autocast=True, device_us=_conv_us(spatial)),
        example=_example,
        refusals={"cpu": refusals, "cuda": refusals},
    )


CONV1D = _replacement(1, tk.conv1d, rules={})
CONV2D = _replacement(2, tk.conv2d, RULES)
CONV3D = _replacement(3, tk.conv3d, RULES)
