"""Linear layers and products of matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import tk
from tk.dropin.replacement import Replacement
from tk.dropin.speed import ALL, NONE, SIXTEEN_BITS, Rule, Rules, Speed, memory_us, tensor_core_us
from tk.dropin.target import Target, broadcasts
from tk.functional._call import product
from tk.ops.product import allows_tf32

# By dtype and pitch ("aligned": rows of 128 bytes or a multiple).
_LINEAR_RULES: Rules = {
    "sm_90": {  # an H200
        "16-bit aligned": Rule(
            "rows",
            ((1, 64), (2049, None)),
            ((2049, None),),
            "≤ 16: 1.08, ≤ 64: 1.03, ≤ 2048: 0.96 to 1.00, above: 1.03 to 1.05",
        ),
        "16-bit": Rule("rows", ((1, 16),), NONE, "≤ 16: 1.11, above: 0.77 to 0.94"),
        "tf32 aligned": Rule("rows", ALL, ((257, None),), "1.01 to 1.14"),
        "tf32": Rule("rows", ((1, 16), (257, None)), NONE, "≤ 16: 1.07, ≤ 64: 0.97, above: 1.01"),
    }
}
_MM_RULES: Rules = {
    "sm_90": {  # an H200
        "16-bit aligned": Rule(
            "rows", ((1, 64), (2049, None)), ((2049, None),), "≤ 64: 1.02, ≤ 2048: 0.97 to 1.00, above: 1.02 to 1.06"
        ),
        "16-bit": Rule("rows", ((1, 16),), NONE, "≤ 16: 1.08, above: 0.75 to 0.94"),
        "tf32 aligned": Rule("rows", ((257, None),), ((257, None),), "≤ 256: 0.90 to 1.00, above: 1.01 to 1.15"),
    }
}


def kind(dtype: torch.dtype, *pitches: int) -> str:
    """The kind of a product. pitches: elements from row to row of its operands, or what stands for that."""
    if dtype in SIXTEEN_BITS:
        return "16-bit aligned" if all(p % 64 == 0 for p in pitches) else "16-bit"
    if not allows_tf32():
        return "float32"
    return "tf32 aligned" if all(p % 32 == 0 for p in pitches) else "tf32"


# --- Linear layers ---


def _linear(target: Target) -> Callable[..., bool]:
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
        if not target.takes(input, weight, optional=(bias,)) or not input.dim() or weight.dim() != 2:
            return False
        k = weight.shape[1]
        if input.shape[-1] != k or (bias is not None and bias.shape != weight.shape[:1]):
            return False
        return target.is_fast(kind(target.product_dtype(input), k), product(input.shape[:-1]), input, weight, bias)

    return linear


def _linear_kind(module: nn.Module, dtype: torch.dtype) -> str:
    weight = getattr(module, "weight", None)
    return kind(dtype, weight.shape[1] if isinstance(weight, Tensor) and weight.dim() == 2 else 0)


def _linear_example(module: nn.Module, dtype: torch.dtype) -> tuple[Any, ...] | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    return weight.new_empty(16, weight.shape[1]), weight, getattr(module, "bias", None)


def _linear_us(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> float:
    return max(memory_us(input, weight), tensor_core_us(input.numel() * weight.shape[0]))


LINEAR = Replacement(
    op="linear",
    originals=("torch.nn.functional.linear",),
    takes=_linear,
    call=lambda input, weight, bias=None: tk.linear(input, weight, bias),
    speed=Speed(_LINEAR_RULES, _linear_kind, under_autocast=True, device_us=_linear_us),
    example=_linear_example,
    state=allows_tf32,
)


# --- Two matrices ---


def _multiplies(target: Target, a: Tensor, b: Tensor) -> bool:
    if not target.takes(a, b) or a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        return False
    return target.is_fast(kind(target.product_dtype(a), a.shape[1], b.shape[1]), a.shape[0], a, b)


def _mm(target: Target) -> Callable[..., bool]:
    def mm(input: Tensor, mat2: Tensor, *args: Any, **kwargs: Any) -> bool:
        return not args and not kwargs and _multiplies(target, input, mat2)

    return mm


def _addmm(target: Target) -> Callable[..., bool]:
    def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, **kwargs: Any) -> bool:
        is_taken = not kwargs and _multiplies(target, mat1, mat2) and target.takes(mat1, input)
        return is_taken and broadcasts(input, (mat1.shape[0], mat2.shape[1]))

    return addmm


def _product_us(*tensors: Tensor, **kwargs: Any) -> float:
    a, b = tensors[-2:]
    return max(memory_us(a, b), tensor_core_us(a.numel() * b.shape[-1]))


# A module does not say what it multiplies: its operands are taken to be aligned.
_MM_SPEED = Speed(_MM_RULES, lambda module, dtype: kind(dtype), under_autocast=True, device_us=_product_us)

MM = Replacement(
    op="mm",
    originals=("torch.mm",),
    takes=_mm,
    call=lambda input, mat2: tk.mm(input, mat2),
    speed=_MM_SPEED,
    state=allows_tf32,
)
ADDMM = Replacement(
    op="addmm",
    originals=("torch.addmm",),
    takes=_addmm,
    call=lambda input, mat1, mat2, *, beta=1, alpha=1: tk.addmm(input, mat1, mat2, beta=beta, alpha=alpha),
    speed=_MM_SPEED,
    state=allows_tf32,
)


# --- Batches of matrices ---


def _multiplies_batches(target: Target, a: Tensor, b: Tensor) -> bool:
    if not target.takes(a, b) or a.dim() < 3 or a.dim() != b.dim():
        return False
    if a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        return False
    return target.is_fast("batches", a.shape[-2], a, b)  # of which nothing was measured


def _bmm(target: Target) -> Callable[..., bool]:
    def bmm(input: Tensor, mat2: Tensor, *args: Any, **kwargs: Any) -> bool:
        return not args and not kwargs and _multiplies_batches(target, input, mat2) and input.dim() == 3

    return bmm


def _matmul(target: Target) -> Callable[..., bool]:
    """Two matrices, or batches of them in the same leading dimensions; what broadcasts is torch's."""

    def matmul(input: Tensor, other: Tensor, **kwargs: Any) -> bool:
        return not kwargs and (_multiplies(target, input, other) or _multiplies_batches(target, input, other))

    return matmul


def _call_matmul(input: Tensor, other: Tensor) -> Tensor:
    if input.dim() == 2:
        return tk.mm(input, other)
    if input.dim() == 3:
        return tk.bmm(input, other)
    out = tk.bmm(input.flatten(0, -3), other.flatten(0, -3))
    return out.reshape(*input.shape[:-1], other.shape[-1])


BMM = Replacement(
    op="bmm",
    originals=("torch.bmm",),
    takes=_bmm,
    call=lambda input, mat2: tk.bmm(input, mat2),
)
MATMUL = Replacement(
    op="matmul",
    originals=("torch.matmul",),
    takes=_matmul,
    call=_call_matmul,
    speed=_MM_SPEED,
    state=allows_tf32,
)
