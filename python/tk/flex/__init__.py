"""Attention with functions of the user's own: score_mod and mask_mod, BlockMask, and a library of mods.

mask = tk.flex.create_block_mask(tk.flex.mods.causal, None, None, S, S)
out = tk.flex_attention(query, key, value, score_mod=tk.flex.mods.soft_cap(30.0), block_mask=mask)
"""

from tk.flex import mods
from tk.flex.api import flex_attention, sdpa
from tk.flex.block_mask import BlockMask, create_block_mask
from tk.flex.mods import and_masks, or_masks
from tk.flex.registry import register, registered
from tk.flex.varlen import varlen_attn

__all__ = [
    "BlockMask", "and_masks", "create_block_mask", "flex_attention", "mods", "or_masks", "register", "registered",
    "sdpa", "varlen_attn",
]  # fmt: skip
