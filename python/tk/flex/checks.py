"""What the arguments of ``tk.flex_attention`` and ``tk.sdpa`` must be, with messages that say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tk import errors
from tk.flex.mods import MaskMod

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NO_LISTS: tuple[Tensor | None, ...] = (None,) * 8
UNBOUNDED = 1 << 30  # the block size of torch's mask that masks nothing


def _check_quickly(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> int:
    """The number of keys where all is as it mostly is, in a third of the time that :func:`check_operands` takes else;
    or -1."""
    try:
        B, H, _, D = query.shape
        B_kv, H_kv, n_keys, D_key = key.shape
        B_v, H_v, n_values, D_v = value.shape
        dtype, device = query.dtype, query.device
        if (
            B == B_kv == B_v
            and H_kv == H_v > 0
            and (H_kv == H or (enable_gqa and H % H_kv == 0))
            and n_keys == n_values
            and D_key == D > 0
            and D_v > 0
            and dtype in _DTYPES
            and key.dtype is dtype
            and value.dtype is dtype
            and key.device == device
            and value.device == device
        ):
            return n_keys
    except (AttributeError, RuntimeError, ValueError):  # RuntimeError: nested tensors have no sizes
        pass
    return -1


def check_operands(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, page_table: Tensor | None,
    function: str = "tk.flex_attention",
) -> int:  # fmt: skip
    """Raises for shapes, dtypes and devices that do not go together; the number of keys."""
    if page_table is None and (n_keys := _check_quickly(query, key, value, enable_gqa)) >= 0:
        return n_keys
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{function}: {name} must be a Tensor, is {type(x).__name__}")
        if (refused := errors.not_dense(function.removeprefix("tk."), name, x)) is not None:
            raise refused
        if x.dim() != 4:
            raise ValueError(f"{function}: {name} is {list(x.shape)}, must have 4 dimensions: [B, H, length, D]")
        if x.dtype != query.dtype:
            raise ValueError(f"{function}: {name} is {x.dtype}, must be {query.dtype} as query is")
        if x.device != query.device:
            raise ValueError(f"{function}: {name} is on {x.device}, query on {query.device}; move it")
    if query.dtype not in _DTYPES and not (query.dtype == torch.float64 and query.device.type != "cuda"):
        raise errors.UnsupportedError(
            f"{function}: query is {query.dtype}; it takes bfloat16, float16 and float32 (float64 on the CPU)"
        )
    B, H, _, D = query.shape
    B_kv, H_kv, n_keys, D_key = key.shape
    if D_key != D or D == 0:
        raise ValueError(f"{function}: head sizes of query ({D}) and key ({D_key}) must be equal, and not 0")
    if value.shape[:3] != key.shape[:3] or value.shape[3] == 0:
        raise ValueError(
            f"{function}: value is {list(value.shape)}, must be {[B_kv, H_kv, n_keys]} as key is, and Dv > 0"
        )
    if H_kv == 0 or H % H_kv:
        raise ValueError(
            f"{function}: query has {H} heads and key {H_kv}; query's must be as many, or with enable_gqa=True a "
            "multiple of key's"
        )
    if H_kv != H and not enable_gqa:
        raise ValueError(
            f"{function}: query has {H} heads and key {H_kv}; for groups of query heads give enable_gqa=True"
        )
    if page_table is not None:
        return _check_pages(page_table, query, n_keys)
    if B_kv not in (B, 1):
        raise ValueError(f"{function}: batch size of key is {B_kv}, must be {B} as query's, or 1")
    return n_keys


def _check_pages(page_table: Tensor, query: Tensor, page_size: int) -> int:
    check_tensor("page_table", page_table, None, query)
    if page_table.dim() != 2 or page_table.shape[0] != query.shape[0]:
        raise ValueError(
            f"tk.flex_attention: page_table is {list(page_table.shape)}, must be [{query.shape[0]}, pages]: a row for "
            "each batch entry"
        )
    return page_table.shape[1] * page_size


def check_tensor(name: str, x: Any, shape: tuple[int, ...] | None, query: Tensor, floating: bool = False) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"tk.flex_attention: {name} must be a Tensor, is {type(x).__name__}")
    if shape is not None and tuple(x.shape) != shape:
        raise ValueError(f"tk.flex_attention: {name} is {list(x.shape)}, must be {list(shape)}")
    if not (x.dtype.is_floating_point if floating else x.dtype == torch.int32):
        raise TypeError(f"tk.flex_attention: {name} is {x.dtype}, must be {'floating-point' if floating else 'int32'}")
    if x.device != query.device:
        raise ValueError(f"tk.flex_attention: {name} is on {x.device}, query on {query.device}; move it")


def check_lengths(kv_lengths: Tensor, n_keys: int) -> None:
    """What they hold, on the CPU alone: elsewhere it would mean to wait for the device."""
    if kv_lengths.device.type != "cpu" or torch.compiler.is_compiling() or not kv_lengths.numel():
        return
    low, high = (int(x) for x in torch.aminmax(kv_lengths))
    if low < 0 or high > n_keys:
        raise ValueError(f"tk.flex_attention: kv_lengths are from {low} to {high}, must be from 0 to {n_keys}")


def check_mask(
    mask: Any, query: Tensor, n_keys: int
) -> tuple[tuple[Tensor | None, ...], tuple[int, int], MaskMod | None]:
    """The lists, the block size and the mask_mod of a BlockMask, tk's or torch's."""
    try:
        num, at, mask_mod = mask.kv_num_blocks, mask.kv_indices, mask.mask_mod
        lengths = mask.seq_lengths
        q_block, kv_block = mask.BLOCK_SIZE
    except AttributeError:
        raise TypeError(
            f"tk.flex_attention: block_mask must be a BlockMask, is {type(mask).__name__}; make one with "
            "tk.flex.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)"
        ) from None
    if q_block >= UNBOUNDED and kv_block >= UNBOUNDED and getattr(mask_mod, "__name__", "") == "noop_mask":
        return NO_LISTS, (UNBOUNDED, UNBOUNDED), mask_mod
    B, H, n_queries, _ = query.shape
    if lengths[0] != n_queries or lengths[1] != n_keys:
        raise ValueError(
            f"tk.flex_attention: block_mask is for {lengths[0]} queries and {lengths[1]} keys, the call has "
            f"{n_queries} and {n_keys}; make one for these lengths, or take block_mask.adjust({n_queries}, {n_keys})"
        )
    if num.device != query.device:
        raise ValueError(
            f"tk.flex_attention: block_mask is on {num.device}, query on {query.device}; move it with .to()"
        )
    rows = -(-n_queries // q_block)
    B_num, H_num, n_rows = num.shape if num.dim() == 3 else (-1, -1, -1)
    if B_num not in (1, B) or H_num not in (1, H) or n_rows != rows or at.shape[:-1] != num.shape:
        raise ValueError(
            f"tk.flex_attention: block_mask has lists of {list(num.shape)} and {list(at.shape)}; for this call they "
            f"must be [1 or {B}, 1 or {H}, {rows}] and the same with the number of columns"
        )
    lists = (  # in the order of tk.ops.flex.LISTS
        num, at, mask.full_kv_num_blocks, mask.full_kv_indices,
        mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices,
    )  # fmt: skip
    return lists, (q_block, kv_block), mask_mod


def moved(tensors: Sequence[Tensor], query: Tensor) -> list[Tensor]:
    """What mods capture. A tensor of no dimensions on the CPU goes beside tensors of any device, as torch has it; its
    gradient goes back."""
    device = query.device
    return [x.to(device) if not x.dim() and x.device != device and x.device.type == "cpu" else x for x in tensors]


def autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The operands in autocast's dtype where it is on, as of ATen's attention."""
    if not isinstance(query, Tensor):
        return query, key, value
    kind = "cuda" if query.is_cuda else query.device.type
    if kind not in ("cuda", "cpu"):  # "meta" has no autocast; torch.compile of torch 2.11 cannot ask torch whether
        return query, key, value
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        return query.to(dtype), key.to(dtype), value.to(dtype)
    return query, key, value


def check_dims(query: Tensor, key: Tensor, value: Tensor, fewest: int) -> None:
    """Checks the dimensions of ``tk.sdpa``'s operands."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < fewest:
            raise ValueError(f"tk.sdpa: {name} is {list(x.shape)}, must be [..., H, length, D]")


def check_products(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Checks that operands of ``tk.sdpa``, of any size, 0 too, can be multiplied."""
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"tk.sdpa: head sizes of query ({query.shape[-1]}) and key ({key.shape[-1]}) must be equal")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"tk.sdpa: value has {value.shape[-2]} rows, must have {key.shape[-2]} as key has")
    heads = [x.shape[-3] for x in (key, value)]
    if enable_gqa and any(n != query.shape[-3] and (n == 0 or query.shape[-3] % n) for n in heads):
        raise ValueError(
            f"tk.sdpa: query has {query.shape[-3]} heads, key {heads[0]} and value {heads[1]}; query's must be a "
            "multiple of each"
        )
