"""``tk.varlen_attn``: attention of packed sequences."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tk import errors
from tk._arguments import flag, number, whole
from tk.flex import autograd, packed
from tk.flex.checks import autocast, check_operands
from tk.ops import flex
from tk.parallel import is_distributed

__all__ = ["varlen_attn"]


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """Attention within each of several sequences that stand one after the other, as
    ``torch.nn.attention.varlen.varlen_attn``. There is no mask tensor, and nothing waits for the GPU.

    Args:
        query: ``[Tq, H, D]``, bfloat16, float16 or float32 (float64 on the CPU), any strides. Tq: of all sequences.
        key, value: ``[Tk, Hkv, D]`` and ``[Tk, Hkv, Dv]`` of the same dtype.
        cu_seq_q: int32 ``[n + 1]``: where each of the n sequences of queries begins, and where the last one ends. A
            sequence may be empty.
        cu_seq_k: the same of the keys.
        max_q, max_k: the length of the longest sequence, as torch asks for it. The kernels do not need it.
        return_aux: torch's ``AuxRequest``; with ``lse=True`` the result is (out, lse).
        scale: by default ``D ** -0.5``.
        window_size: (left, right), how many keys a query sees on each side of its own; -1: all. (-1, 0) is causal.
            Where a sequence has more keys than queries, the last query stands at the last key. On CUDA a window over
            sequences of other lengths is torch's own kernel's, and so is one where cu_seq_q and cu_seq_k are not the
            same memory: to compare them would be to wait for the GPU.
        enable_gqa: H may be a multiple of Hkv.
        seqused_k, block_table: must be None; tk.flex_attention has kv_lengths and page_table.
        num_splits: as torch's, and left to torch's own kernel on CUDA.

    Returns:
        ``[Tq, H, Dv]``, and lse float32 ``[H, Tq]``, natural logarithms, with a gradient. A row that sees no key is 0,
        and its lse -inf. Rows past the last sequence are undefined.

    Raises:
        ValueError, TypeError: arguments that do not go together, with what they must be.
        tk.UnsupportedError: seqused_k, block_table, a dtype that no kernel has, or a DTensor.
        tk.VariantNotFoundError: no loaded pack has kernels for this dtype and head size.

    Source: python/tk/flex/varlen.py
    """
    flag("varlen_attn", "enable_gqa", enable_gqa)
    for name, x in (("seqused_k", seqused_k), ("block_table", block_table)):
        if x is not None:
            raise errors.UnsupportedError(
                f"tk.varlen_attn: {name} must be None; tk.flex_attention takes kv_lengths and page_table"
            )
    _check_operands(query, key, value)
    query, key, value = autocast(query, key, value)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    check_operands(q, k, v, enable_gqa, None, "tk.varlen_attn")
    longest = (whole("varlen_attn", "max_q", max_q), whole("varlen_attn", "max_k", max_k))
    for name, x, total, most in zip(("cu_seq_q", "cu_seq_k"), (cu_seq_q, cu_seq_k), (query, key), longest, strict=True):
        _check_starts(name, x, total, most)
    if cu_seq_q.shape != cu_seq_k.shape:
        raise ValueError(
            f"tk.varlen_attn: cu_seq_q is {list(cu_seq_q.shape)} and cu_seq_k {list(cu_seq_k.shape)}; they must be of "
            "as many sequences"
        )
    if num_splits is not None:
        whole("varlen_attn", "num_splits", num_splits)
    window = _window(window_size)
    wants_lse = _wants_lse(return_aux)
    scale = query.shape[2] ** -0.5 if scale is None else number("varlen_attn", "scale", scale)
    sequences = packed.Sequences(cu_seq_q, cu_seq_k, packed.are_same(cu_seq_q, cu_seq_k))
    if query.is_cuda and (num_splits is not None or (window.is_bounded and not sequences.are_same)):
        return _torchs(
            query, key, value, cu_seq_q, cu_seq_k, *longest, return_aux=return_aux, scale=scale,
            window_size=(window_size[0], window_size[1]), enable_gqa=enable_gqa, num_splits=num_splits,
        )  # fmt: skip
    has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    request = packed.packed(query, key, value, sequences, window, scale, "varlen_attn", has_gradient)
    if torch.compiler.is_dynamo_compiling():
        out, lse = flex.forward(*request)
    else:
        try:
            out, lse = autograd.attend(request)
        except RuntimeError as error:
            raise errors.typed(error) from None
    out = out.squeeze(0).transpose(0, 1)
    return (out, lse.squeeze(0)) if wants_lse else out


def _torchs(*operands: Any, num_splits: int | None, enable_gqa: bool, **settings: Any) -> Any:
    """torch's own. What its version does not take by name yet, its kernel has: groups of query heads."""
    from torch.nn.attention import varlen

    if operands[0].dtype not in (torch.bfloat16, torch.float16):
        raise errors.UnsupportedError(
            f"tk.varlen_attn: query is {operands[0].dtype}; torch's kernel, for num_splits and for windows over two "
            "tensors of lengths, takes bfloat16 and float16. Without num_splits, and with one tensor as cu_seq_q and "
            "cu_seq_k, tk's takes float32"
        )
    if enable_gqa and _torch_takes("enable_gqa"):
        settings["enable_gqa"] = True
    if num_splits is not None:
        if not _torch_takes("num_splits"):
            raise errors.UnsupportedError(f"tk.varlen_attn: torch {torch.__version__} does not take num_splits")
        settings["num_splits"] = num_splits
    return varlen.varlen_attn(*operands, **settings)


def _torch_takes(name: str) -> bool:
    from torch.nn.attention import varlen

    return name in inspect.signature(varlen.varlen_attn).parameters


_torch_takes._dynamo_marked_constant = True  # type: ignore[attr-defined]  # run while the compiler traces, not traced


# --- Checks ---


def _wants_lse(wanted: Any) -> bool:
    if wanted is None:
        return False
    if not hasattr(wanted, "lse"):
        raise TypeError(
            f"tk.varlen_attn: return_aux must be an AuxRequest of torch.nn.attention.varlen, is {type(wanted).__name__}"
        )
    return bool(wanted.lse)


def _check_operands(query: Any, key: Any, value: Any) -> None:
    named = (("query", query), ("key", key), ("value", value))
    for name, x in named:
        if not isinstance(x, Tensor):
            raise TypeError(f"tk.varlen_attn: {name} must be a Tensor, is {type(x).__name__}")
        if is_distributed(x):
            raise errors.UnsupportedError(
                f"tk.varlen_attn: {name} is a DTensor; call it on each rank's part, as by "
                "torch.distributed.tensor.experimental.local_map"
            )
        if (refused := errors.not_dense("varlen_attn", name, x)) is not None:
            raise refused
        if x.dim() != 3:
            raise ValueError(f"tk.varlen_attn: {name} is {list(x.shape)}, must have 3 dimensions: [total, H, D]")
    if value.shape[:2] != key.shape[:2] or value.shape[2] == 0:
        raise ValueError(
            f"tk.varlen_attn: value is {list(value.shape)}, must be {list(key.shape[:2])} as key is, and Dv > 0"
        )


def _check_starts(name: str, x: Any, packed_rows: Tensor, most: Any) -> None:
    """What they hold, on the CPU alone: elsewhere it would mean to wait for the device."""
    if not isinstance(x, Tensor):
        raise TypeError(f"tk.varlen_attn: {name} must be a Tensor, is {type(x).__name__}")
    if (refused := errors.not_dense("varlen_attn", name, x)) is not None:
        raise refused
    if x.dtype != torch.int32:
        raise TypeError(f"tk.varlen_attn: {name} is {x.dtype}, must be int32")
    if x.dim() != 1 or x.shape[0] == 0:
        raise ValueError(f"tk.varlen_attn: {name} is {list(x.shape)}, must be [n + 1] for n sequences")
    if x.device != packed_rows.device:
        raise ValueError(f"tk.varlen_attn: {name} is on {x.device}, query on {packed_rows.device}; move it")
    if x.device.type != "cpu" or torch.compiler.is_compiling() or type(x) is not Tensor:
        return
    starts = x.tolist()
    lengths = [end - start for start, end in pairwise(starts)]
    total = packed_rows.shape[0]
    if starts[0] != 0 or starts[-1] != total or min(lengths, default=0) < 0:
        raise ValueError(
            f"tk.varlen_attn: {name} must begin with 0, never fall, and end with the number of rows, {total}; it is "
            f"{_shown(starts)}"
        )
    if max(lengths, default=0) > most:
        raise ValueError(f"tk.varlen_attn: max_{name[-1]} is {most}, and {name} has a sequence of {max(lengths)} rows")


def _shown(starts: list[int]) -> str:
    return str(starts) if len(starts) <= 8 else f"[{', '.join(map(str, starts[:6]))}, …, {starts[-1]}]"


def _window(size: Any) -> packed.Window:
    if not isinstance(size, tuple | list) or len(size) != 2:
        raise TypeError(f"tk.varlen_attn: window_size must be two ints, (left, right), is {size!r}")
    for n in size:
        if whole("varlen_attn", "window_size", n) < -1:
            raise ValueError(f"tk.varlen_attn: window_size is {tuple(size)}, must not be less than -1, which is all")
    return packed.Window.of(*size)
