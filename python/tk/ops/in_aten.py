"""The hand-written ops as ATen ops, with the same arguments. Forward mode differentiates these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tk.ops import conv, product

_ACTIVATE = tuple(product.ACTIVATE[name] for name in product.ACTIVATIONS)
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def _wide(x: Tensor) -> Tensor:
    """In float32 where x has 16 bits, so that nothing is rounded to 16 bits in between."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _activated(z: Tensor, activation: int, out_dtype: torch.dtype) -> Tensor:
    return _ACTIVATE[activation](z).to(out_dtype)


def _mm(a: Tensor, b: Tensor, bias: Tensor | None, activation: int, out_dtype: torch.dtype | None, *_: Any) -> Tensor:
    z = _wide(a) @ _wide(b)
    return _activated(z if bias is None else z + _wide(bias), activation, out_dtype or a.dtype)


def _addmm(
    bias: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float, activation: int, out_dtype: torch.dtype | None,
    *_: Any,
) -> Tensor:  # fmt: skip
    z = alpha * (_wide(a) @ _wide(b))
    return _activated(z + beta * _wide(bias) if beta else z, activation, out_dtype or a.dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    return _mm(x, weight.mT, bias, *settings)


def _mm_plus_mm(
    a: Tensor, b: Tensor, c: Tensor, d: Tensor, bias: Tensor | None, activation: int, out_dtype: torch.dtype | None,
    *_: Any,
) -> Tensor:  # fmt: skip
    z = _wide(a) @ _wide(b) + _wide(c) @ _wide(d)
    return _activated(z if bias is None else z + _wide(bias), activation, out_dtype or a.dtype)


def _conv(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, activation: int, *_: Any,
) -> Tensor:  # fmt: skip
    spatial = weight.dim() - 2
    padded, padding = _padded(_wide(input), padding, spatial)
    wide_bias = None if bias is None else _wide(bias)
    z = _CONV[spatial](padded, _wide(weight), wide_bias, stride, padding, dilation, groups)
    return _activated(z, activation, input.dtype)


def _padded(input: Tensor, padding: Sequence[int], spatial: int) -> tuple[Tensor, list[int]]:
    """ATen pads as much behind as in front."""
    low, high = conv._split(padding, spatial)
    if low == high:
        return input, low
    return F.pad(input, [n for d in reversed(range(spatial)) for n in (low[d], high[d])]), [0] * spatial


def _conv_gradient(which: int) -> Callable[..., Tensor]:
    """which: 0 for input, 1 for weight."""

    def gradient(
        grad: Tensor, input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int],
        dilation: Sequence[int], groups: int, *_: Any,
    ) -> Tensor:  # fmt: skip
        spatial = weight.dim() - 2
        batched = input.dim() == spatial + 2
        grad, images = (x if batched else x.unsqueeze(0) for x in (grad, input))
        padded, both = _padded(_wide(images), padding, spatial)
        geometry = (
            conv._as_list(stride, spatial),
            both,
            conv._as_list(dilation, spatial),
            False,
            [0] * spatial,
            groups,
        )
        wanted = [which == 0, which == 1, False]
        found = torch.ops.aten.convolution_backward(_wide(grad), padded, _wide(weight), None, *geometry, wanted)[which]
        if which == 0:
            for d in range(-spatial, 0):
                low = (padded.shape[d] - images.shape[d]) // 2  # of a padding "same", which has one more behind
                found = found.narrow(d, low, images.shape[d])
            found = found if batched else found.squeeze(0)
        return found.to(input.dtype)

    return gradient


IN_ATEN: Mapping[str, Callable[..., Tensor]] = {
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "linear": _linear,
    "mm_plus_mm": _mm_plus_mm,
    "conv1d": _conv,
    "conv2d": _conv,
    "conv3d": _conv,
    "conv_input_grad": _conv_gradient(0),
    "conv_weight_grad": _conv_gradient(1),
}
