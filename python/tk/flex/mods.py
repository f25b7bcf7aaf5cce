"""The library of mods: each a score_mod or a mask_mod, or a function that returns one.

    mask = tk.flex.and_masks(tk.flex.mods.causal, tk.flex.mods.document(ids))
    block_mask = tk.flex.create_block_mask(mask, B, None, S, S)
    out = tk.flex_attention(q, k, v, score_mod=tk.flex.mods.alibi(slopes), block_mask=block_mask)

Masks take (b, h, q_idx, kv_idx) and say which keys a query sees; score mods take (score, b, h, q_idx, kv_idx) and give
the score that is used instead. What they are made with stays a run-time argument: another window size, table or length
needs no other kernel. docs/attention.md has a picture of each mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from tk._arguments import number, whole
from tk.flex.tracing.trace import check_parameters

__all__ = [
    "alibi", "and_masks", "causal", "dilated_window", "document", "learned_bias", "natten_2d", "or_masks",
    "per_head_bias", "prefix_lm", "relative_bias", "sliding_window", "soft_cap",
]  # fmt: skip

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


# --- Masks ---


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Keys up to the query's own."""
    return q_idx >= kv_idx


def sliding_window(size: int) -> MaskMod:
    """Causal: the last `size` keys, with the query's own."""
    _positive_ints("sliding_window", size=size)

    def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < size)

    return _named(window, "sliding_window", size)


def dilated_window(size: int, dilation: int) -> MaskMod:
    """Causal: `size` keys, every `dilation`-th back from the query's own."""
    _positive_ints("dilated_window", size=size, dilation=dilation)

    def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        back = q_idx - kv_idx
        return (back >= 0) & (back // dilation < size) & (back % dilation == 0)

    return _named(window, "dilated_window", size, dilation)


def prefix_lm(length: int | Tensor) -> MaskMod:
    """The first `length` keys, and causally the rest. length: a number, or an integer tensor ``[B]``."""
    if isinstance(length, Tensor):
        _table("prefix_lm", "length", length, (1,), integer=True)

        def prefix(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (kv_idx < length[b]) | (q_idx >= kv_idx)

        return _named(prefix, "prefix_lm")
    _not_negative("prefix_lm", "length", length)

    def prefix_of_all(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < length) | (q_idx >= kv_idx)

    return _named(prefix_of_all, "prefix_lm", length)


def document(ids: Tensor) -> MaskMod:
    """Packed documents: equal ids see each other. Not causal by itself.

    ids: integer ``[S]`` or ``[B, S]``; position i belongs to document ``ids[i]``. Queries and keys share positions."""
    _table("document", "ids", ids, (1, 2), integer=True)
    if ids.dim() == 1:

        def same(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return ids[q_idx] == ids[kv_idx]

        return _named(same, "document")

    def same_in_entry(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ids[b, q_idx] == ids[b, kv_idx]

    return _named(same_in_entry, "document")


def natten_2d(height: int, width: int, kernel: int) -> MaskMod:
    """Neighbourhood attention on a picture in row-major order: ``kernel * kernel`` keys around each query. At borders
    the window is moved inwards, so that every query has as many."""
    _positive_ints("natten_2d", height=height, width=width, kernel=kernel)
    if kernel > min(height, width):
        shown, picture = _shown(kernel), f"{_shown(height)} x {_shown(width)}"
        raise ValueError(f"tk.flex.mods.natten_2d: kernel is {shown}, must fit into {picture}")

    def neighbourhood(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = torch.clamp(q_idx // width - kernel // 2, 0, height - kernel)
        column = torch.clamp(q_idx % width - kernel // 2, 0, width - kernel)
        down, right = kv_idx // width - row, kv_idx % width - column
        return (down >= 0) & (down < kernel) & (right >= 0) & (right < kernel)

    return _named(neighbourhood, "natten_2d", height, width, kernel)


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """What all of the masks let through; with none, everything."""
    _functions("and_masks", mask_mods)

    def all_of(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        allowed = torch.ones_like(b, dtype=torch.bool)
        for mask_mod in mask_mods:
            allowed = allowed & mask_mod(b, h, q_idx, kv_idx)
        return allowed

    return _named(all_of, "_and_".join(_name(m) for m in mask_mods) or "all")


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """What any of the masks lets through; with none, nothing."""
    _functions("or_masks", mask_mods)

    def any_of(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        allowed = torch.zeros_like(b, dtype=torch.bool)
        for mask_mod in mask_mods:
            allowed = allowed | mask_mod(b, h, q_idx, kv_idx)
        return allowed

    return _named(any_of, "_or_".join(_name(m) for m in mask_mods) or "none")


# --- Score mods ---


def alibi(slopes: Tensor | int) -> ScoreMod:
    """``score + slope * (kv_idx - q_idx)`` (https://arxiv.org/abs/2108.12409).

    slopes: ``[H]``, or the number of heads H, which gives head h the slope ``2 ** (-8 * (h + 1) / H)``."""
    if isinstance(slopes, Tensor):
        _table("alibi", "slopes", slopes, (1,))

        def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + slopes[h] * (kv_idx - q_idx)

        return _named(bias, "alibi")
    _positive_ints("alibi", slopes=slopes)
    n_heads = slopes

    def bias_of_head(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + torch.exp2(-8.0 * (h + 1) / n_heads) * (kv_idx - q_idx)

    return _named(bias_of_head, "alibi", n_heads)


def relative_bias(table: Tensor, max_distance: int) -> ScoreMod:
    """``score + table[h, clamp(kv_idx - q_idx, -max_distance, max_distance) + max_distance]``.

    table: ``[H, 2 * max_distance + 1]``; it may have a gradient."""
    _table("relative_bias", "table", table, (2,))
    _not_negative("relative_bias", "max_distance", max_distance)
    if table.shape[1] != 2 * max_distance + 1:
        raise ValueError(
            f"tk.flex.mods.relative_bias: table is {_shown(list(table.shape))}, must be "
            f"[H, {_shown(2 * max_distance + 1)}] for a max_distance of {_shown(max_distance)}"
        )

    def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = torch.clamp(kv_idx - q_idx, -max_distance, max_distance)
        return score + table[h, distance + max_distance]

    return _named(bias, "relative_bias", max_distance)


def per_head_bias(bias: Tensor) -> ScoreMod:
    """``score + bias[h]``. bias: ``[H]``; it may have a gradient."""
    _table("per_head_bias", "bias", bias, (1,))

    def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[h]

    return _named(add, "per_head_bias")


def soft_cap(cap: float) -> ScoreMod:
    """``cap * tanh(score / cap)``: scores stay between -cap and cap."""
    if isinstance(cap, bool):
        raise TypeError(f"tk.flex.mods.soft_cap: cap must be a number, is {cap!r}")
    cap = number("flex.mods.soft_cap", "cap", cap)
    if not 0 < cap < math.inf:
        raise ValueError(f"tk.flex.mods.soft_cap: cap is {_shown(cap)}, must be more than 0, and finite")
    cap = float(cap)

    def capped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return _named(capped, "soft_cap", cap)


def learned_bias(table: Tensor) -> ScoreMod:
    """``score + table[..., q_idx, kv_idx]``. table: ``[Q, KV]``, ``[H, Q, KV]`` or ``[B, H, Q, KV]``; it may have a
    gradient."""
    _table("learned_bias", "table", table, (2, 3, 4))

    def of_all(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[q_idx, kv_idx]

    def of_head(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, q_idx, kv_idx]

    def of_entry(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[b, h, q_idx, kv_idx]

    return _named((of_all, of_head, of_entry)[table.dim() - 2], "learned_bias")


# --- Of scaled_dot_product_attention ---


def of_bool_table(table: Tensor) -> MaskMod:
    """``table[b, h, q_idx, kv_idx]``, bool ``[B, H, Q, KV]``."""

    def of_table(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return table[b, h, q_idx, kv_idx]

    return of_table


# --- Checks ---

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _named(mod: Any, name: str, *numbers: float) -> Any:
    """Puts the numbers into a mod's name, for messages. torch.compile may hold them as symbols, which have no digits:
    to ask for some would make another graph for each value, or fail."""
    if numbers and not torch.compiler.is_dynamo_compiling():
        name = "_".join([name, *(f"{n:g}" if isinstance(n, float) else str(n) for n in numbers)])
    mod.__name__ = name
    return mod


def _shown(value: Any) -> str:
    """Numbers as a message has them; see _named."""
    return "a symbol" if torch.compiler.is_dynamo_compiling() else str(value)


def _name(mod: Any) -> str:
    return getattr(mod, "__name__", type(mod).__name__)


def _positive_ints(function: str, **numbers: int) -> None:
    for name, value in numbers.items():
        if not whole(f"flex.mods.{function}", name, value) > 0:
            raise ValueError(f"tk.flex.mods.{function}: {name} is {_shown(value)}, must be more than 0")


def _not_negative(function: str, name: str, value: int) -> None:
    if whole(f"flex.mods.{function}", name, value) < 0:
        raise ValueError(f"tk.flex.mods.{function}: {name} is {_shown(value)}, must not be negative")


def _table(function: str, name: str, value: Any, dims: tuple[int, ...], integer: bool = False) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"tk.flex.mods.{function}: {name} must be a Tensor, is {type(value).__name__}")
    if value.dim() not in dims:
        wanted = " or ".join(map(str, dims))
        raise ValueError(f"tk.flex.mods.{function}: {name} has {value.dim()} dimensions, must have {wanted}")
    is_of_kind = value.dtype in _INTEGERS if integer else value.dtype.is_floating_point
    if not is_of_kind:
        kind = "of integers" if integer else "floating-point"
        raise TypeError(f"tk.flex.mods.{function}: {name} is {value.dtype}, must be {kind}")


def _functions(function: str, mods: tuple[Any, ...]) -> None:
    for mod in mods:
        if not callable(mod):
            raise TypeError(f"tk.flex.{function}: {mod!r} is no mask_mod, which is a function of (b, h, q_idx, kv_idx)")
        # A signature costs 30 us, and a mask is made anew for many a call. torch.compile follows none.
        if torch.compiler.is_compiling() or _takes_four(mod):
            continue
        try:
            check_parameters(mod, "mask_mod")
        except TypeError as error:
            raise TypeError(f"tk.flex.{function}: {error}") from None


def _takes_four(mod: Any) -> bool:
    """Whether a plain function takes four arguments, and needs no other."""
    code = mod.__code__ if isinstance(mod, FunctionType) else None
    return code is not None and code.co_argcount == 4 and code.co_kwonlyargcount == 0
