"""Activations, with a bias or gated."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from tk.functional._call import Config, needs, run, taken

__all__ = ["geglu", "gelu", "silu", "swiglu"]

Approximate = Literal["none", "tanh"]


@needs("gelu", "bias_gelu")
def gelu(
    input: Tensor, bias: Tensor | None = None, approximate: Approximate = "none", *, config: Config = None
) -> Tensor:
    """``gelu(input + bias)``, as ``torch.nn.functional.gelu``.

    Args:
        input: ``[..., N]``, bfloat16, float16 or float32; float64 is ATen's, but for strict mode on CUDA.
        bias: ``[N]``.
        approximate: "tanh", or "none" for the exact one.

    Returns:
        The shape and dtype of input.

    Raises:
        TypeError: an argument is not a tensor where one is needed. ValueError: a bias of another length, an approximate
            that is neither. tk.UnsupportedError: a dtype that is none of these on CUDA, a tensor that is not dense.
    """
    tanh = _is_tanh("gelu", approximate)
    if not taken("gelu", input=input, bias=bias):
        return F.gelu(input if bias is None else input + bias, approximate=approximate)
    return (
        run("gelu", input, tanh, config=config) if bias is None else run("bias_gelu", input, bias, tanh, config=config)
    )


@needs("silu", "bias_silu")
def silu(input: Tensor, bias: Tensor | None = None, *, config: Config = None) -> Tensor:
    """``silu(input + bias)``, ``silu(z) = z · sigmoid(z)``, as ``torch.nn.functional.silu``. bias: ``[N]``.
    Dtypes, result and errors as of :func:`gelu`."""
    if not taken("silu", input=input, bias=bias):
        return F.silu(input if bias is None else input + bias)
    return run("silu", input, config=config) if bias is None else run("bias_silu", input, bias, config=config)


@needs("swiglu")
def swiglu(gate: Tensor, up: Tensor | None = None, *, config: Config = None) -> Tensor:
    """``silu(gate) · up``. https://arxiv.org/abs/2002.05202

    Args:
        gate: any shape; without ``up`` ``[..., 2N]``, the gate first. Dtypes as of :func:`gelu`.
        up: the shape of gate.

    Returns:
        The shape of gate, or ``[..., N]``.

    Raises:
        ValueError: gate and up differ in shape, or without ``up`` the last dimension of gate is odd. Other errors as of
            :func:`gelu`.
    """
    gate, up, is_taken = _halves("swiglu", gate, up)
    if not is_taken:
        return F.silu(gate) * up
    return run("swiglu", gate, up, config=config)


@needs("geglu")
def geglu(
    gate: Tensor, up: Tensor | None = None, approximate: Approximate = "none", *, config: Config = None
) -> Tensor:
    """``gelu(gate) · up``. Arguments and errors as of :func:`swiglu` and :func:`gelu`.
    https://arxiv.org/abs/2002.05202"""
    tanh = _is_tanh("geglu", approximate)
    gate, up, is_taken = _halves("geglu", gate, up)
    if not is_taken:
        return F.gelu(gate, approximate=approximate) * up
    return run("geglu", gate, up, tanh, config=config)


def _is_tanh(function: str, approximate: str) -> bool:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"tk.{function}: approximate is {approximate!r}, must be 'none' or 'tanh'")
    return approximate == "tanh"


def _halves(function: str, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor, bool]:
    """The two halves, and whether the kernels take them."""
    is_taken = taken(function, gate=gate, up=up)
    if up is None:
        if gate.dim() == 0 or gate.shape[-1] % 2:
            raise ValueError(f"tk.{function}: without up, gate must be [..., 2N], is {list(gate.shape)}")
        n = gate.shape[-1] // 2
        # Their gradients are put side by side by one launch; those of two slices would be padded with zeros and added.
        gate, up = gate.split_with_sizes((n, n), -1)
        return gate, up, is_taken
    if gate.shape != up.shape:
        raise ValueError(f"tk.{function}: gate and up must have one shape, are {list(gate.shape)} and {list(up.shape)}")
    return gate, up, is_taken
