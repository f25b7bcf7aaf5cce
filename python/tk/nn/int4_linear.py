"""A linear layer whose weight has four bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tk._arguments import flag, whole
from tk.ops import int4


class Int4Linear(nn.Module):
    """``nn.Linear`` for inference, with a weight of four bits and a scale and zero for each group of inputs.

    Buffers: packed uint8 ``[in_features / 2, out_features]``, scales and zeros
    ``[in_features / group_size, out_features]``, bias ``[out_features]`` or None; as of :func:`tk.int4_mm`. They are
    uninitialised until a state is loaded: :meth:`from_linear` makes a layer of a trained one.

    Args:
        group_size: 32, 64, 128 or in_features, and a divisor of in_features, which is even.
        dtype: of scales, zeros, bias and inputs: bfloat16 or float16 on CUDA. None is torch's default.

    Raises:
        TypeError: an argument of another type, or a dtype that has no floating point.
        ValueError: a negative size, or a group_size that is none of these.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group_size: int = 128,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = torch.bfloat16,
    ):
        super().__init__()
        if whole("nn.Int4Linear", "out_features", out_features) < 0:
            raise ValueError(f"tk.nn.Int4Linear: out_features is {out_features}, must not be negative")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"tk.nn.Int4Linear: dtype must be a floating-point torch.dtype, is {dtype!r}")
        flag("nn.Int4Linear", "bias", bias)
        check_group_size(in_features, group_size)
        self.in_features, self.out_features, self.group_size = in_features, out_features, group_size
        groups = in_features // group_size
        self.register_buffer("packed", torch.empty(in_features // 2, out_features, dtype=torch.uint8, device=device))
        self.register_buffer("scales", torch.empty(groups, out_features, dtype=dtype, device=device))
        self.register_buffer("zeros", torch.empty(groups, out_features, dtype=dtype, device=device))
        self.register_buffer("bias", torch.empty(out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    def from_linear(cls, linear: nn.Linear, group_size: int = 128) -> Int4Linear:
        """The layer with its weight rounded to the nearest of sixteen steps, from each group's least to its largest
        value and 0. Of the layer's device and dtype.

        Raises:
            TypeError: linear is no ``nn.Linear``."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"tk.nn.Int4Linear.from_linear: linear must be an nn.Linear, is {type(linear).__name__}")
        weight = linear.weight.detach()
        made = cls(
            linear.in_features, linear.out_features, linear.bias is not None, group_size, weight.device, weight.dtype
        )
        q, scales, zeros = quantize(weight.t(), group_size)
        made.packed.copy_(int4.pack_int4(q))
        made.scales.copy_(scales)
        made.zeros.copy_(zeros)
        if made.bias is not None:
            made.bias.copy_(linear.bias.detach())
        return made.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        return int4.int4_mm(x, self.packed, self.scales, self.zeros, self.group_size, bias=self.bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"group_size={self.group_size}"
        )


def check_group_size(in_features: int, group_size: int) -> None:
    """Raises ValueError for a group_size that :func:`tk.int4_mm` has no kernels for."""
    if whole("nn.Int4Linear", "in_features", in_features) < 0:
        raise ValueError(f"tk.nn.Int4Linear: in_features is {in_features}, must not be negative")
    whole("nn.Int4Linear", "group_size", group_size)
    if in_features % 2:
        raise ValueError(f"tk.nn.Int4Linear: in_features is {in_features}, must be even: two values share a byte")
    if group_size not in (32, 64, 128, in_features) or in_features % group_size:
        raise ValueError(
            f"tk.nn.Int4Linear: group_size is {group_size}, must be 32, 64, 128 or in_features, {in_features}, and "
            "divide it"
        )


def quantize(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """``[K, N]`` -> values uint8 ``[K, N]``, scales and zeros ``[K / group_size, N]`` of the weight's dtype, with
    weight ≈ (value - zero) * scale. A zero is a whole number, so that 0 stays 0."""
    K, N = weight.shape
    groups = weight.float().reshape(K // group_size, group_size, N)
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scales = ((high - low) / 15).to(weight.dtype)
    # A scale that rounds to 0, of a group of zeros or nearly, would divide by it.
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    zeros = (-low / scales.float()).round().clamp(0, 15)
    values = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
    return values.to(torch.uint8).view(K, N), scales, zeros.to(weight.dtype)
