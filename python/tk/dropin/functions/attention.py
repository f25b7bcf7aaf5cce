"""Attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import tk
from tk.dropin.replacement import Replacement, is_served
from tk.dropin.speed import NONE, SIXTEEN_BITS, Rule, Rules, Speed, tensor_core_us
from tk.dropin.target import Target, broadcasts, is_plain, needs_gradient
from tk.errors import UnsupportedError, VariantNotFoundError

# By dtype, mask and head size. What F.scaled_dot_product_attention takes of itself is cuDNN's.
_SDPA_RULES: Rules = {
    "sm_90": {  # an H200
        "16-bit causal 128": Rule("rows", ((1024, None),), NONE, "1.08 to 1.16; fewer rows 0.94; backward 0.46 to 0.96")
    }
}


def _kind(dtype: torch.dtype, mask: str, head_dim: int) -> str:
    """mask: "full" for none, "causal", "bool" or "bias"."""
    return f"{'16-bit' if dtype in SIXTEEN_BITS else 'float32'} {mask} {head_dim}"


def _sdpa(target: Target) -> Callable[..., bool]:
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> bool:
        return dropout_p == 0 and _attends(target, query, key, value, attn_mask, is_causal, enable_gqa)

    return scaled_dot_product_attention


def _attends(
    target: Target, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> bool:
    if not target.takes(q, k, v) or not (q.dim() == k.dim() == v.dim() >= 3):
        return False
    if q.shape[:-3] != k.shape[:-3] or k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        return False
    if k.shape[-3] != q.shape[-3] and not (enable_gqa and k.shape[-3] > 0 and q.shape[-3] % k.shape[-3] == 0):
        return False
    kind = "causal" if is_causal else "full"
    if mask is not None:
        if is_causal or not is_plain(mask) or mask.device != q.device or mask.requires_grad:
            return False
        if mask.dtype not in (torch.bool, q.dtype) or not broadcasts(mask, (*q.shape[:-1], k.shape[-2])):
            return False
        kind = "bool" if mask.dtype is torch.bool else "bias"
    if _is_transformed() or _has_chosen_backends():
        return False
    if not target.is_fast(_kind(q.dtype, kind, q.shape[-1]), q.shape[-2], q, k, v):
        return False
    if target.device_type == "cpu":
        return True
    return _has_attention(q.device, q.dtype, q.shape[-1], v.shape[-1], kind, needs_gradient(q, k, v))


def _is_transformed() -> bool:
    """Whether torch.func.grad or its like is active. They differentiate gradients, and attention's have none."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _has_chosen_backends() -> bool:
    """Whether some of torch's backends are switched off, by ``torch.nn.attention.sdpa_kernel`` or for good: then one of
    the others is asked for."""
    backends = torch.backends.cuda
    return not (
        backends.flash_sdp_enabled()
        and backends.mem_efficient_sdp_enabled()
        and backends.math_sdp_enabled()
        and backends.cudnn_sdp_enabled()
    )


# While tracing it is run, not traced.
_has_chosen_backends._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _has_attention(device: torch.device, dtype: torch.dtype, d: int, d_v: int, kind: str, needs_gradient: bool) -> bool:
    return _finds_attention(device, dtype, d, d_v, kind, needs_gradient)


_has_attention._dynamo_marked_constant = True  # type: ignore[attr-defined]  # run while tracing, not traced


@cache
def _finds_attention(
    device: torch.device, dtype: torch.dtype, d: int, d_v: int, kind: str, needs_gradient: bool
) -> bool:
    """Whether a loaded pack has the kernels. Asked once for each: a pack loaded later changes nothing."""
    with _disable_current_modes(), torch.no_grad():
        q, v = (torch.empty(1, 1, 16, n, device=device, dtype=dtype) for n in (d, d_v))
        mask = {"bool": torch.bool, "bias": dtype}.get(kind)
        attn_mask = None if mask is None else torch.empty(1, 1, 16, 16, device=q.device, dtype=mask)
        return is_served(tk.sdpa, q, q, v, attn_mask, 0.0, kind == "causal", needs_gradient=needs_gradient)


def _call_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    return tk.sdpa(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)


def _sdpa_us(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> float:
    """Two products, of which half is masked at most."""
    return tensor_core_us(query.numel() * key.shape[-2])


def _state() -> bool | None:
    """None in a transform and where some backends are off, which end."""
    return None if _is_transformed() or _has_chosen_backends() else True


SDPA = Replacement(
    op="sdpa",
    takes_distributed=False,
    originals=("torch.nn.functional.scaled_dot_product_attention",),
    takes=_sdpa,
    call=_call_sdpa,
    speed=Speed(
        _SDPA_RULES,
        lambda module, dtype: _kind(dtype, "causal", 128),
        assumes="causal, head size 128",
        device_us=_sdpa_us,
    ),
    state=_state,
)


def _flex_attention(target: Target) -> Callable[..., bool]:
    """Takes no call of a compiled graph on CUDA: whether a mod has kernels is known only when it is called."""

    def flex_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> bool:
        return (
            target.takes(query, key, value)
            and not _is_transformed()
            and target.is_fast("", query.shape[-2], query, key, value)
            and (target.device_type == "cpu" or not torch.compiler.is_compiling())
        )

    return flex_attention


FLEX_ATTENTION = Replacement(
    op="flex_attention",
    takes_distributed=False,
    originals=("torch.nn.attention.flex_attention.flex_attention",),
    takes=_flex_attention,
    call=lambda *args, **kwargs: tk.flex_attention(*args, **kwargs),
    state=_state,
    refusals={"cuda": (VariantNotFoundError, UnsupportedError)},
)
