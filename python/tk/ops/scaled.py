"""What products of float8 operands with scales share.

out = activation(scale_a * scale_b * (a @ b) + bias)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tk.ops import _register, product
from tk.ops.product import ACTIVATE, Activation

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def reference(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    activation: Activation = "none",
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Computes a scaled product in plain torch and in `dtype`, as the reference of tests.

    The scales must broadcast to ``[M, N]``.
    """
    z = (a.to(dtype) @ b.to(dtype)) * scale_b.to(dtype) * scale_a.to(dtype)
    return ACTIVATE[activation](z if bias is None else z + bias.to(dtype))


def allocate(
    op: str, a: Tensor, b: Tensor, bias: Tensor | None, activation: int, out_dtype: torch.dtype | None, *settings: int
) -> Tensor:
    """The empty result of a product of ``[M, K]`` and ``[..., K, N]``."""
    torch._check_value(
        a.shape[-1] == b.shape[-2], lambda: f"tk.{op}: the inner sizes differ: a is {a.shape}, b is {b.shape}"
    )
    dtype = out_dtype or torch.bfloat16
    torch._check_value(dtype in OUT_DTYPES, lambda: f"tk.{op}: out_dtype is {dtype}, must be one of {OUT_DTYPES}")
    if bias is not None:
        is_narrower = dtype is torch.float32 and bias.dtype in OUT_DTYPES
        torch._check_value(
            bias.dtype == dtype or is_narrower,
            lambda: f"tk.{op}: bias is {bias.dtype}, must be {dtype} as the result is",
        )
    return a.new_empty((a.shape[0], b.shape[-1]), dtype=dtype)


def register(name: str, fake: Any) -> None:
    """Registers an op whose backward raises NotImplementedError.

    It takes no part in autocast, whose dtypes are not those of the operands.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    def backward(ctx: Any, grad: Tensor) -> Any:
        raise NotImplementedError(
            f"tk.{name} is for inference and has no gradient: call it under torch.no_grad(), or with detached tensors"
        )

    _register.fake(name, fake)
    _register.autograd(name, setup, backward)
    _register.vmap(name, product.loop)
    _register.out_form(name)
