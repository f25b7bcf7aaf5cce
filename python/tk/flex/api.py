"""``tk.flex_attention`` and ``tk.sdpa``: what is asked for, checked, and handed to the op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from tk import errors
from tk._arguments import flag, number
from tk.flex import autograd, compiled
from tk.flex import kernel_options as options
from tk.flex.block_mask import BlockMask
from tk.flex.checks import (
    NO_LISTS,
    UNBOUNDED,
    autocast,
    check_dims,
    check_lengths,
    check_mask,
    check_operands,
    check_products,
    check_tensor,
    moved,
)
from tk.flex.mods import MaskMod, ScoreMod, causal, learned_bias, of_bool_table
from tk.flex.tracing import trace
from tk.ops import flex
from tk.ops.flex import Request
from tk.parallel import is_distributed

__all__ = ["flex_attention", "sdpa"]


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
    flag("flex_attention", "enable_gqa", enable_gqa)
    flag("flex_attention", "return_lse", return_lse)
    if is_distributed(query):
        raise errors.UnsupportedError(
            "tk.flex_attention: query is a DTensor; call it on each rank's part, as by "
            "torch.distributed.tensor.experimental.local_map"
        )
    query, key, value = autocast(query, key, value)
    n_keys = check_operands(query, key, value, enable_gqa, page_table)
    if sinks is not None:
        check_tensor("sinks", sinks, (query.shape[1],), query, floating=True)
    if kv_lengths is not None:
        check_tensor("kv_lengths", kv_lengths, (query.shape[0],), query)
        check_lengths(kv_lengths, n_keys)
    tile = options.check(kernel_options) if kernel_options else ""
    lists, block, mask_mod = NO_LISTS, (UNBOUNDED, UNBOUNDED), None
    if block_mask is not None:
        lists, block, mask_mod = check_mask(block_mask, query, n_keys)
    scale = _scale("flex_attention", scale, query)
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
        query, key, value: ``[..., H, M, D]``, ``[..., Hkv, N, D]`` and ``[..., Hkv, N, Dv]``. What stands before
            M and N is broadcast, the heads only without enable_gqa.
        attn_mask: bool (True: takes part) or added to the scores; broadcast to ``[..., H, M, N]``.
        dropout_p: must be 0.
        is_causal: query i sees keys up to i. Not together with attn_mask.

    Returns:
        ``[..., H, M, Dv]``; a row that sees no key is 0. Where value has no elements, the result is zeros of
        query's batches and heads, whatever key is, as ATen has it; on CUDA torch 2.11 broadcasts. Raises as
        :func:`flex_attention`.
    """
    flag("sdpa", "is_causal", is_causal)
    flag("sdpa", "enable_gqa", enable_gqa)
    if number("sdpa", "dropout_p", dropout_p) != 0:
        raise errors.UnsupportedError(f"tk.sdpa: dropout_p is {dropout_p}; no kernel drops, use 0")
    if attn_mask is not None and is_causal:
        raise ValueError("tk.sdpa: give attn_mask or is_causal, not both")
    for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(x, Tensor) and (x is not None or name != "attn_mask"):
            raise TypeError(f"tk.sdpa: {name} must be a Tensor, is {type(x).__name__}")
        if x is not None and (refused := errors.not_dense("sdpa", name, x)) is not None:
            raise refused
    if is_distributed(query):
        from tk.parallel import attention  # it needs torch.distributed.tensor

        return attention.sdpa(sdpa, query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
    if query.dim() < 2:
        raise ValueError(f"tk.sdpa: query is {list(query.shape)}, must be [..., H, M, D]")
    if attn_mask is not None:
        _check_table(attn_mask, query)
    check_dims(query, key, value, 2)
    if value.numel() == 0:
        return _of_no_values(query, key, value, attn_mask, enable_gqa)
    dims = max(query.dim(), key.dim(), value.dim())
    query, key, value = _broadcast(query, key, value, enable_gqa)
    leading = query.shape[:-3]
    enable_gqa = enable_gqa or key.shape[-3] == 1  # a head that all share is not copied
    q, k, v = _as_4d(query), _as_4d(key), _as_4d(value)
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = causal if is_causal else None
    if attn_mask is not None:
        table = _mask_table(attn_mask, query, key)
        if attn_mask.dtype == torch.bool:
            mask_mod = of_bool_table(table)
        else:
            score_mod = learned_bias(table)
    q, k, v = autocast(q, k, v)
    check_operands(q, k, v, enable_gqa, None, "tk.sdpa")
    scale = _scale("sdpa", scale, q)
    others = (*NO_LISTS, None, None, None)  # the mask is asked everywhere: to list its blocks would take longer
    block = (UNBOUNDED, UNBOUNDED)
    if torch.compiler.is_dynamo_compiling():  # these mods are known: the compiler need not record them
        tensors = [] if attn_mask is None else [table]
        text = _text(is_causal, None if attn_mask is None else attn_mask.dtype)
        given: tuple[Any, ...] = (q, k, v, text, tensors, [], [], *others, scale, *block, "sdpa")
        out, _ = flex.forward(*Request(*given))
    else:
        out, _ = _attend(q, k, v, score_mod, mask_mod, others, scale, block, caller="sdpa")
    if dims == 4:
        return out
    return out.reshape(*leading, *out.shape[1:]) if dims > 2 else out.view(out.shape[2:])


# --- The call ---


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
    caller: str = "flex_attention",
) -> tuple[Tensor, Tensor]:
    """others: the block lists, kv_lengths, page_table and sinks. max_scores: they are behind lse, ``[B, H, 2 M]``.
    tile: what kernel_options ask of the config."""
    if torch.compiler.is_dynamo_compiling():
        return compiled.call(query, key, value, score_mod, mask_mod, others, scale, block, max_scores, tile)
    pair = trace.pair(score_mod, mask_mod, others[0] is not None)
    traced = pair.traced
    tensors, floats, ints = traced.by_kind(pair.values)
    tensors = moved(tensors, query)
    for x in tensors:
        if x.device != query.device:
            _refuse_device(pair, query)
    try:
        given = (query, key, value, traced.text, tensors, floats, ints, *others, scale, *block, caller)
        given = (*given, max_scores, tile)
        return autograd.attend(Request._make(given))
    except RuntimeError as error:
        for name, x in (("query", query), ("key", key), ("value", value)):
            if (refused := errors.not_dense(caller, name, x)) is not None:
                raise refused from None
        raise errors.typed(error) from None


def _scale(function: str, scale: float | None, query: Tensor) -> Any:
    return query.shape[3] ** -0.5 if scale is None else number(function, "scale", scale)


def _refuse_device(pair: trace.Pair, query: Tensor) -> None:
    for c in pair.captures:
        if c.kind == "tensor" and moved([c.value], query)[0].device != query.device:
            raise ValueError(
                f"tk.flex_attention: {c.name}, which the {c.of}_mod captures, is on {c.value.device}, query on "
                f"{query.device}; move it"
            )


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


# --- scaled_dot_product_attention ---


def _text(is_causal: bool, mask: torch.dtype | None) -> str:
    """The pair of :func:`sdpa` as the op takes it, with a mask of this dtype as the only capture."""
    table = None if mask is None else torch.ones(1, 1, 1, 1, dtype=mask)
    score_mod = learned_bias(table) if table is not None and mask != torch.bool else None
    mask_mod = of_bool_table(table) if table is not None and mask == torch.bool else causal if is_causal else None
    return trace.pair(score_mod, mask_mod).traced.text


_text._dynamo_marked_constant = True  # type: ignore[attr-defined]  # run while the compiler traces, not traced


def _broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The operands with equal dimensions before the last two, of which there are one or more; nothing is copied. Keys
    and values that both have one head, or 1 for a batch, keep it."""
    if enable_gqa:
        check_dims(query, key, value, 3)  # as ATen, which takes the third dimension from the end for heads
    end = -3 if enable_gqa else -2
    # torch.broadcast_shapes takes twice as long as the rest of a call. A compiler's sizes are left to it: symbols of
    # unknown values cannot be compared.
    is_compared = query.dim() > 2 and not torch.compiler.is_compiling()
    if is_compared and query.shape[:end] == key.shape[:end] == value.shape[:end]:
        return query, key, value
    named = {"query": query, "key": key, "value": value}
    dims = max(3, *(x.dim() for x in named.values()))
    q, k, v = (_padded(x, dims) for x in named.values())
    shapes = [x.shape[:end] for x in (q, k, v)]
    try:
        batch = torch.broadcast_shapes(*shapes)
        of_keys = torch.broadcast_shapes(*shapes[1:])
    except RuntimeError:
        found = ", ".join(f"{name} {list(x.shape)}" for name, x in named.items())
        heads = [x.shape[-3] for x in (q, k, v)]
        are_groups = not enable_gqa and heads[1] == heads[2] and 0 < heads[1] < heads[0] and heads[0] % heads[1] == 0
        hint = "; for groups of query heads give enable_gqa=True" if are_groups else ""
        raise ValueError(f"tk.sdpa: batches and heads must broadcast, are {found}{hint}") from None
    outer, of_heads = of_keys[: dims - 3], of_keys[dims - 3 :]
    if dims > 4 or any(n != 1 for n in outer):  # the kernels take one batch, or 1 for it
        outer = batch[: dims - 3]
    if of_heads and of_heads[0] != 1:
        of_heads = batch[-1:]
    wanted = (batch, (*outer, *of_heads), (*outer, *of_heads))
    return tuple(x.expand(*w, *x.shape[len(w) :]) for x, w in zip((q, k, v), wanted, strict=True))  # type: ignore[return-value]


_MULTIPLIES = TorchVersion(torch.__version__) < TorchVersion("2.12")  # on CUDA, also where there is nothing to multiply


def _of_no_values(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool) -> Tensor:
    """Zeros, shaped as ATen shapes them: it looks at nothing but query and the last size of value. Torch 2.11
    multiplies on CUDA, and so broadcasts. The gradients are 0."""
    query, key, value = autocast(query, key, value)
    for name, x in (("key", key), ("value", value)):
        if x.device != query.device:
            raise ValueError(f"tk.sdpa: {name} is on {x.device}, must be on query's {query.device}")
        if x.dtype != query.dtype:
            raise ValueError(f"tk.sdpa: {name} is {x.dtype}, must be {query.dtype} as query is")
    leading = query.shape[:-1]
    if query.is_cuda and _MULTIPLIES:
        is_matrix = max(query.dim(), key.dim(), value.dim()) == 2
        q, k, v = _broadcast(query, key, value, enable_gqa)
        check_products(q, k, v, enable_gqa)
        if attn_mask is not None:
            _mask_table(attn_mask, q, k)
        leading = q.shape[1 if is_matrix else 0 : -1]
    out = query.new_zeros(*leading, value.shape[-1])
    return out + sum(x.narrow(-1, 0, 0).sum() for x in (query, key, value))


def _check_table(attn_mask: Tensor, query: Tensor) -> None:
    if attn_mask.dtype != torch.bool and not attn_mask.dtype.is_floating_point:
        raise TypeError(f"tk.sdpa: attn_mask is {attn_mask.dtype}, must be bool or floating-point")
    if attn_mask.device != query.device:
        raise ValueError(f"tk.sdpa: attn_mask is on {attn_mask.device}, query on {query.device}; move it")


def _as_4d(x: Tensor) -> Tensor:
    return _padded(x, 4) if x.dim() <= 4 else x.flatten(0, -4)


def _padded(x: Tensor, dims: int) -> Tensor:
    return x if x.dim() == dims else x.view((1,) * (dims - x.dim()) + x.shape)


def _mask_table(attn_mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """``[B, H, M, N]``, expanded without a copy."""
    leading = query.shape[:-2] if query.dim() > 2 else (1,)
    shape = (*leading, query.shape[-2], key.shape[-2])
    try:
        table = attn_mask.expand(shape)
    except RuntimeError:
        raise ValueError(f"tk.sdpa: attn_mask is {list(attn_mask.shape)}, must broadcast to {list(shape)}") from None
    return _as_4d(table)
