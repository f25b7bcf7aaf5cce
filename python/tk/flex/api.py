"""``tk.flex_attention`` and ``tk.sdpa``: what is asked for, checked, and handed to the op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tk import errors
from tk.flex import compiled, ops, trace
from tk.flex import kernel_options as options
from tk.flex.block_mask import BlockMask
from tk.flex.mods import MaskMod, ScoreMod, causal, learned_bias, of_bool_table

__all__ = ["flex_attention", "sdpa"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_UNBOUNDED = 1 << 30  # the block size of torch's mask that masks nothing


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Any | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
    sinks: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    page_table: Tensor | None = None,
) -> Any:
    """``softmax(score_mod(scale * query @ key.mT)) @ value``, as ``torch.nn.attention.flex_attention``.

    Args:
        query: ``[B, H, M, D]``, bfloat16, float16 or float32 (float64 on the CPU), any strides.
        key, value: ``[B, Hkv, N, D]`` and ``[B, Hkv, N, Dv]`` of the same dtype; B may be 1.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)`` -> the score that is used; see tk.flex.mods. Tensors that
            it captures may have gradients.
        block_mask: of tk.flex.create_block_mask or torch's, for exactly these lengths. Without one nothing is masked.
        scale: by default ``D ** -0.5``.
        enable_gqa: H may be a multiple of Hkv; query head h then reads key head ``h // (H // Hkv)``.
        return_lse: return (out, lse).
        kernel_options: torch's, where they say what is allowed or promised, or name the tile of a compiled config; see
            tk.flex.kernel_options.
        return_aux: torch's ``AuxRequest``: which of ``lse`` and ``max_scores`` to return, in its ``AuxOutput``.
            max_scores are float32 ``[B, H, M]``: each row's largest score, after scale and score_mod; -inf for a row
            that sees no key. They have no gradient.
        sinks: ``[H]``, one more logit in the sum of each row, that no value belongs to.
        kv_lengths: int32 ``[B]``: how many keys each batch entry has; the others are not read.
        page_table: int32 ``[B, pages]``. key and value are then ``[n_pages, Hkv, page_size, D]``, in any strides, and
            page p of entry b holds its keys from ``p * page_size`` on. Mods and masks see positions in the sequence.

    Returns:
        ``[B, H, M, Dv]``, and lse float32 ``[B, H, M]``: the natural logarithm of each row's sum, with its sink. A row
        that sees no key is 0, and its lse -inf.

    Raises:
        ValueError, TypeError: arguments that do not go together, with what they must be.
        IndexError: a mod or page table that reads past the end of a tensor (on the CPU).
        tk.UnsupportedError: a dtype or a mod that no kernel can have.
        tk.VariantNotFoundError: no loaded pack has kernels for these mods; the message has the ``tk build`` line.
    """
    query, key, value = _autocast(query, key, value)
    n_keys = _check(query, key, value, enable_gqa, page_table)
    if sinks is not None:
        _check_tensor("sinks", sinks, (query.shape[1],), query, floating=True)
    if kv_lengths is not None:
        _check_tensor("kv_lengths", kv_lengths, (query.shape[0],), query)
        _check_lengths(kv_lengths, n_keys)
    tile = options.check(kernel_options) if kernel_options else ""
    lists, block, mask_mod = _NO_LISTS, (_UNBOUNDED, _UNBOUNDED), None
    if block_mask is not None:
        lists, block, mask_mod = _check_mask(block_mask, query, n_keys)
    if scale is None:
        scale = query.shape[3] ** -0.5
    others = (*lists, kv_lengths, page_table, sinks)
    max_scores = return_aux is not None and _wants_max_scores(return_aux, return_lse)
    out, lse = _attend(query, key, value, score_mod, mask_mod, others, scale, block, max_scores, tile)
    if return_aux is not None:
        return out, _aux(return_aux, lse, query.shape[2])
    return (out, lse) if return_lse else out


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` over the same kernels.

    Args:
        query, key, value: ``[..., H, M, D]``, ``[..., Hkv, N, D]`` and ``[..., Hkv, N, Dv]``.
        attn_mask: bool (True: takes part) or added to the scores; broadcast to ``[..., H, M, N]``.
        dropout_p: must be 0.
        is_causal: query i sees keys up to i. Not together with attn_mask.

    Returns:
        ``[..., H, M, Dv]``; a row that sees no key is 0. Raises as :func:`flex_attention`.
    """
    if dropout_p != 0:
        raise errors.UnsupportedError(f"tk.sdpa: dropout_p is {dropout_p}; no kernel drops, use 0")
    if attn_mask is not None and is_causal:
        raise ValueError("tk.sdpa: give attn_mask or is_causal, not both")
    for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(x, Tensor) and (x is not None or name != "attn_mask"):
            raise TypeError(f"tk.sdpa: {name} must be a Tensor, is {type(x).__name__}")
    if query.dim() < 2:
        raise ValueError(f"tk.sdpa: query is {list(query.shape)}, must be [..., H, M, D]")
    if not query.dim() == key.dim() == value.dim():
        raise ValueError(
            f"tk.sdpa: query, key and value must have as many dimensions, are {list(query.shape)}, {list(key.shape)} "
            f"and {list(value.shape)}"
        )
    leading = query.shape[:-3]
    q, k, v = (_as_4d(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = causal if is_causal else None
    if attn_mask is not None:
        table = _mask_table(attn_mask, query, key)
        if attn_mask.dtype == torch.bool:
            mask_mod = of_bool_table(table)
        else:
            score_mod = learned_bias(table)
    q, k, v = _autocast(q, k, v)
    _check(q, k, v, enable_gqa, None)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    others = (*_NO_LISTS, None, None, None)  # the mask is asked everywhere: to list its blocks would take longer
    block = (_UNBOUNDED, _UNBOUNDED)
    if torch.compiler.is_dynamo_compiling():  # these mods are known: the compiler need not record them
        tensors = [] if attn_mask is None else [table]
        text = _text(is_causal, None if attn_mask is None else attn_mask.dtype)
        out, _ = ops.forward_op(q, k, v, text, tensors, [], [], *others, scale, *block)
    else:
        out, _ = _attend(q, k, v, score_mod, mask_mod, others, scale, block)
    if query.dim() == 4:
        return out
    return out.reshape(*leading, *out.shape[1:]) if query.dim() != 2 else out[0, 0]


# --- The call ---

_NO_LISTS: tuple[Tensor | None, ...] = (None,) * 8


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    others: tuple[Any, ...],
    scale: float,
    block: tuple[int, int],
    max_scores: bool = False,
    tile: str = "",
) -> tuple[Tensor, Tensor]:
    """others: the block lists, kv_lengths, page_table and sinks. max_scores: they are behind lse, ``[B, H, 2 M]``.
    tile: what kernel_options ask of the config."""
    if torch.compiler.is_dynamo_compiling():
        return compiled.call(query, key, value, score_mod, mask_mod, others, scale, block, max_scores, tile)
    pair = trace.pair(score_mod, mask_mod)
    traced = pair.traced
    tensors, floats, ints = ops.by_kind(traced, pair.values)
    for x in tensors:
        if x.device != query.device:
            _refuse_device(pair, query)
    try:
        more = (*others, scale, *block, max_scores, tile) if max_scores or tile else (*others, scale, *block)
        return ops.attend(traced, query, key, value, None, tensors, floats, ints, *more)
    except RuntimeError as error:
        raise errors.typed(error) from None


def _refuse_device(pair: trace.Pair, query: Tensor) -> None:
    for c in pair.captures:
        if c.kind == "tensor" and c.value.device != query.device:
            raise ValueError(
                f"tk.flex_attention: {c.name}, which the {c.of}_mod captures, is on {c.value.device}, query on "
                f"{query.device}; move it"
            )


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In autocast's dtype where it is on, as ATen's attention."""
    if not isinstance(query, Tensor):
        return query, key, value
    kind = "cuda" if query.is_cuda else query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        return query.to(dtype), key.to(dtype), value.to(dtype)
    return query, key, value


def _wants_max_scores(wanted: Any, return_lse: bool) -> bool:
    if return_lse:
        raise ValueError("tk.flex_attention: give return_lse or return_aux, not both")
    if not (hasattr(wanted, "lse") and hasattr(wanted, "max_scores")):
        raise TypeError(
            f"tk.flex_attention: return_aux must be an AuxRequest of torch.nn.attention.flex_attention, is "
            f"{type(wanted).__name__}"
        )
    return bool(wanted.max_scores)


def _aux(wanted: Any, lse: Tensor, n_queries: int) -> Any:
    """lse: as :func:`_attend` gives it."""
    from torch.nn.attention.flex_attention import AuxOutput

    lse, largest = (lse[:, :, :n_queries], lse[:, :, n_queries:].detach()) if wanted.max_scores else (lse, None)
    return AuxOutput(lse=lse if wanted.lse else None, max_scores=largest)


# --- Checks ---


def _check_quickly(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> int:
    """The number of keys where all is as it mostly is, in a third of the time that :func:`_check` takes else; or -1."""
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
    except (AttributeError, ValueError):
        pass
    return -1


def _check(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, page_table: Tensor | None) -> int:
    """Raises for shapes, dtypes and devices that do not go together; the number of keys."""
    if page_table is None and (n_keys := _check_quickly(query, key, value, enable_gqa)) >= 0:
        return n_keys
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"tk.flex_attention: {name} must be a Tensor, is {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"tk.flex_attention: {name} is {list(x.shape)}, must have 4 dimensions: [B, H, length, D]")
        if x.dtype != query.dtype:
            raise ValueError(f"tk.flex_attention: {name} is {x.dtype}, must be {query.dtype} as query is")
        if x.device != query.device:
            raise ValueError(f"tk.flex_attention: {name} is on {x.device}, query on {query.device}")
    if query.dtype not in _DTYPES and not (query.dtype == torch.float64 and query.device.type != "cuda"):
        raise errors.UnsupportedError(
            f"tk.flex_attention: query is {query.dtype}; it takes bfloat16, float16 and float32 (float64 on the CPU)"
        )
    B, H, _, D = query.shape
    B_kv, H_kv, n_keys, D_key = key.shape
    if D_key != D or D == 0:
        raise ValueError(f"tk.flex_attention: head sizes of query ({D}) and key ({D_key}) must be equal, and not 0")
    if value.shape[:3] != key.shape[:3] or value.shape[3] == 0:
        raise ValueError(
            f"tk.flex_attention: value is {list(value.shape)}, must be {[B_kv, H_kv, n_keys]} as key is, and Dv > 0"
        )
    if H_kv != H and not enable_gqa:
        raise ValueError(
            f"tk.flex_attention: query has {H} heads and key {H_kv}; for groups of query heads give enable_gqa=True"
        )
    if H_kv == 0 or H % H_kv:
        raise ValueError(f"tk.flex_attention: query's heads ({H}) must be a multiple of key's ({H_kv})")
    if page_table is not None:
        return _check_pages(page_table, query, n_keys)
    if B_kv not in (B, 1):
        raise ValueError(f"tk.flex_attention: batch size of key is {B_kv}, must be {B} as query's, or 1")
    return n_keys


def _check_pages(page_table: Tensor, query: Tensor, page_size: int) -> int:
    _check_tensor("page_table", page_table, None, query)
    if page_table.dim() != 2 or page_table.shape[0] != query.shape[0]:
        raise ValueError(
            f"tk.flex_attention: page_table is {list(page_table.shape)}, must be [{query.shape[0]}, pages]: a row for "
            "each batch entry"
        )
    return page_table.shape[1] * page_size


def _check_tensor(name: str, x: Any, shape: tuple[int, ...] | None, query: Tensor, floating: bool = False) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"tk.flex_attention: {name} must be a Tensor, is {type(x).__name__}")
    if shape is not None and tuple(x.shape) != shape:
        raise ValueError(f"tk.flex_attention: {name} is {list(x.shape)}, must be {list(shape)}")
    if x.dtype.is_floating_point if not floating else not x.dtype.is_floating_point:
        raise TypeError(f"tk.flex_attention: {name} is {x.dtype}, must be {'floating-point' if floating else 'int32'}")
    if not floating and x.dtype != torch.int32:
        raise TypeError(f"tk.flex_attention: {name} is {x.dtype}, must be int32")
    if x.device != query.device:
        raise ValueError(f"tk.flex_attention: {name} is on {x.device}, query on {query.device}")


def _check_lengths(kv_lengths: Tensor, n_keys: int) -> None:
    """What they hold, on the CPU alone: elsewhere it would mean to wait for the device."""
    if kv_lengths.device.type != "cpu" or torch.compiler.is_compiling() or not kv_lengths.numel():
        return
    low, high = (int(x) for x in torch.aminmax(kv_lengths))
    if low < 0 or high > n_keys:
        raise ValueError(f"tk.flex_attention: kv_lengths are from {low} to {high}, must be from 0 to {n_keys}")


def _check_mask(
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
    if q_block >= _UNBOUNDED and kv_block >= _UNBOUNDED and getattr(mask_mod, "__name__", "") == "noop_mask":
        return _NO_LISTS, (_UNBOUNDED, _UNBOUNDED), mask_mod
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
    lists = (
        num, at, mask.full_kv_num_blocks, mask.full_kv_indices,
        mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices,
    )  # fmt: skip
    return lists, (q_block, kv_block), mask_mod


# --- scaled_dot_product_attention ---


def _text(is_causal: bool, mask: torch.dtype | None) -> str:
    """The pair of :func:`sdpa` as the op takes it, with a mask of this dtype as the only capture."""
    table = None if mask is None else torch.ones(1, 1, 1, 1, dtype=mask)
    score_mod = learned_bias(table) if table is not None and mask != torch.bool else None
    mask_mod = of_bool_table(table) if table is not None and mask == torch.bool else causal if is_causal else None
    return trace.pair(score_mod, mask_mod).traced.text


_text._dynamo_marked_constant = True  # type: ignore[attr-defined]  # run while the compiler traces, not traced


def _as_4d(name: str, x: Tensor) -> Tensor:
    if x.dim() < 2:
        raise ValueError(f"tk.sdpa: {name} is {list(x.shape)}, must be [..., H, length, D]")
    if x.dim() < 4:
        return x[(None,) * (4 - x.dim())]
    return x if x.dim() == 4 else x.flatten(0, -4)


def _mask_table(attn_mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """``[B, H, M, N]``, expanded without a copy."""
    leading = query.shape[:-2] if query.dim() > 2 else (1,)
    shape = (*leading, query.shape[-2], key.shape[-2])
    try:
        table = attn_mask.expand(shape)
    except RuntimeError:
        raise ValueError(f"tk.sdpa: attn_mask is {list(attn_mask.shape)}, must broadcast to {list(shape)}") from None
    return _as_4d("attn_mask", table)
