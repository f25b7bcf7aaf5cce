"""What reads tables: embeddings and rotary positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tk import errors
from tk._arguments import flag, number, whole
from tk.functional._call import Config, check_tensor, needs, one_device, only_aten_has, run, taken

__all__ = ["embedding", "rope"]


@needs("embedding", "embedding_backward")
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    config: Config = None,
) -> Tensor:
    """``weight[input]``, as ``torch.nn.functional.embedding``.

    Args:
        input: int64 or int32, any shape. On CUDA an index that is no row ends the kernel, and with it the process's
            CUDA context, as ATen's assertion does.
        weight: ``[V, D]``. Its gradient in float32 is added up by atomic additions, or in deterministic mode without
            regard to order; in 16 bits it is ATen's.
        padding_idx: a row that gets no gradient.
        max_norm, norm_type, scale_grad_by_freq, sparse: by ATen, but for strict mode on CUDA.

    Returns:
        ``[*input.shape, D]``, of the dtype of weight.

    Raises:
        ValueError: an index that is neither int64 nor int32, a weight of other dimensions, a padding_idx that is no
            row. IndexError: an index that is no row, on the CPU. tk.UnsupportedError: a weight that no kernel takes.
    """
    is_taken = taken("embedding", weight=weight)
    check_tensor("embedding", "input", input)
    if input.is_quantized:
        raise errors.UnsupportedError("tk.embedding: input is quantized, must be int64 or int32")
    if weight.dim() != 2:
        raise ValueError(f"tk.embedding: weight must be [V, D], is {list(weight.shape)}")
    rows = weight.shape[0]
    if padding_idx is not None and not -rows <= whole("embedding", "padding_idx", padding_idx) < rows:
        raise ValueError(f"tk.embedding: padding_idx is {padding_idx}, must be {-rows} to {rows - 1}")
    flag("embedding", "scale_grad_by_freq", scale_grad_by_freq)
    flag("embedding", "sparse", sparse)
    norm_type = number("embedding", "norm_type", norm_type)
    if max_norm is not None:
        max_norm = number("embedding", "max_norm", max_norm)
    is_plain = max_norm is None and not scale_grad_by_freq and not sparse
    if not is_plain:
        only_aten_has("embedding", weight, "max_norm, scale_grad_by_freq or sparse")
    if not is_taken or not is_plain:
        one_device("embedding", input=input, weight=weight)
        return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return run("embedding", weight, input, -1 if padding_idx is None else padding_idx % rows, config=config)


@needs("rope", "rope_interleaved")
def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, *, config: Config = None) -> Tensor:
    """Rotary position embedding: pairs (a, b) become (a·cos - b·sin, b·cos + a·sin). https://arxiv.org/abs/2104.09864

    Args:
        x: ``[..., S, D]``, D even; bfloat16, float16 or float32 (others on the CPU).
        cos, sin: ``[S, D/2]``, a value for each pair, or ``[S, D]`` with each of them twice, where the elements of its
            pair are: in equal halves, or with ``interleaved`` side by side. float32 or the dtype of x. They carry no
            gradient.
        interleaved: pairs are neighbours, as in GLM and Cohere; else element i goes with element i + D/2.

    Returns:
        The shape and dtype of x.

    Raises:
        ValueError: an odd D, tables that have neither of these shapes. tk.UnsupportedError: a dtype that no kernel has.
    """
    is_taken = taken("rope", x=x) & _takes_tables(x, cos, sin)
    flag("rope", "interleaved", interleaved)
    if x.dim() < 2 or x.shape[-1] % 2:
        raise ValueError(f"tk.rope: x must be [..., S, D] with an even D, is {list(x.shape)}")
    cos, sin = _table(x, "cos", cos, interleaved), _table(x, "sin", sin, interleaved)
    if not is_taken:
        return _rotated(x, cos, sin, interleaved)
    cos, sin = cos.float(), sin.float()
    if interleaved:
        return run("rope_interleaved", x, cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1), config=config)
    halves = x.unflatten(-1, (2, x.shape[-1] // 2))
    return run("rope", halves, cos, sin, config=config).flatten(-2)


def _takes_tables(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor("rope", name, table)
    is_taken = True
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype not in (torch.float32, x.dtype):
            if x.device.type != "cpu":
                raise errors.UnsupportedError(f"tk.rope: {name} is {table.dtype}, must be float32 or x's {x.dtype}")
            is_taken = False
    return is_taken


def _table(x: Tensor, name: str, table: Tensor, interleaved: bool) -> Tensor:
    """[S, D/2]."""
    rows, half = x.shape[-2], x.shape[-1] // 2
    if table.dim() != 2 or table.shape[0] != rows or table.shape[1] not in (half, 2 * half):
        raise ValueError(
            f"tk.rope: {name} must be [{rows}, {half}] or [{rows}, {2 * half}] for x of {list(x.shape)}, is "
            f"{list(table.shape)}"
        )
    if interleaved and table.shape[1] == 2 * half:
        return table.unflatten(1, (half, 2)).select(2, 0)
    return table.narrow(1, 0, half)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
    first, second = a * cos - b * sin, b * cos + a * sin
    found = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return found.to(x.dtype)
