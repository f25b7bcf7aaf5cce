"""The pairs of mods that the wheel has kernels for, from the library of mods (tk.flex.mods).

Numbers and tensors that a mod captures are run-time arguments: what stands here says of which kind they are, no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from tk.aot.spec import REDUCED_FLOATS
from tk.flex import mods
from tk.flex.codegen.family import Wanted
from tk.flex.tracing import trace
from tk.flex.tracing.trace import Traced

# --- Mods, with captures of every kind that they are called with ---

IDS = torch.zeros(1, 1, dtype=torch.int32)  # which serves for int64 too, and for ids of all batch entries
OFFSET = torch.zeros((), dtype=torch.int64, device="meta")  # in the GPU's memory: one of the CPU's is a number
CAUSAL = mods.causal
DOCUMENTS = mods.and_masks(mods.causal, mods.document(IDS))


def band(left: int, right: int) -> mods.MaskMod:
    def of_distance(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return (kv_idx - q_idx <= right) & (q_idx - kv_idx <= left)

    return of_distance


def documents_at(offset: int, ids_of_queries: torch.Tensor, ids_of_keys: torch.Tensor) -> mods.MaskMod:
    def same(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return ids_of_queries[b, q_idx + offset] == ids_of_keys[b, kv_idx]

    return same


def behind(mask_mod: mods.MaskMod, offset: int | torch.Tensor) -> mods.MaskMod:
    """The mask for queries that stand `offset` behind the first key, as they do in decoding."""

    def of_later(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return mask_mod(b, h, q_idx + offset, kv_idx)

    return of_later


# What these capture of the same kind is captured apart, so that each may be bound by itself (tk.flex.matching): to no
# bound, to no offset.
BAND = band(1, 2)
DOCUMENTS_IN_BAND = mods.and_masks(BAND, documents_at(3, IDS, IDS.clone()))
BEHIND_TENSOR = behind(mods.sliding_window(1), OFFSET)


_SLOPES = torch.zeros(1)
ALIBI = mods.alibi(_SLOPES)  # and slopes that a mod works out of its head


def alibi_at(offset: int) -> mods.ScoreMod:
    def bias(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        return score + _SLOPES[h] * (kv_idx - (q_idx + offset))

    return bias


ALIBI_AT = alibi_at(1)
SOFT_CAP = mods.soft_cap(1.0)
RELATIVE = mods.relative_bias(torch.zeros(1, 3), 1)


def _table(dtype: torch.dtype, rank: int) -> torch.Tensor:
    return torch.zeros([1] * rank, dtype=dtype)


PER_HEAD = mods.per_head_bias(_table(torch.float32, 1))
LEARNED = mods.learned_bias(_table(torch.float32, 3))


# --- What is built of them ---

# The masks that language models are made of: prompts in pages, every head size; fp32 for the two plainest, and heads
# past 256.
_MOST = Wanted(exact=((64, 64), (128, 128)), rounded=((64, 64), (128, 128), (256, 128), (256, 256)), paged=True)
_EXACT = Wanted(dtypes=("bf16", "fp16", "fp32"), exact=_MOST.exact, rounded=(*_MOST.rounded, (512, 512)),
                paged=True, wide_dtypes=REDUCED_FLOATS)  # fmt: skip
_USUAL = Wanted(exact=((64, 64), (128, 128)), rounded=((128, 128), (256, 256)))
_WITH_FP32 = replace(_USUAL, dtypes=("bf16", "fp16", "fp32"))
_TABLE = replace(_WITH_FP32, decode_dtypes=REDUCED_FLOATS)  # encoders in fp32 have masks too, and do not decode
_BEHIND = replace(_MOST, exact=((128, 128),), rounded=((128, 128), (256, 256)), backward=False)
_RARE = Wanted(dtypes=("bf16",), exact=((128, 128),), rounded=((128, 128), (256, 256)), decode=False)


def pairs() -> Iterator[tuple[Traced, Wanted]]:
    for score, mask, wanted in chosen():
        yield trace.pair(score, mask).traced, wanted


def chosen() -> Iterator[tuple[object, object, Wanted]]:
    yield None, None, _EXACT
    yield None, CAUSAL, _EXACT
    yield None, BAND, replace(_MOST, dtypes=("bf16", "fp16", "fp32"), sampled=True)
    yield None, DOCUMENTS, replace(_MOST, dtypes=("bf16", "fp16", "fp32"))
    yield None, DOCUMENTS_IN_BAND, _WITH_FP32
    yield None, mods.document(IDS), _USUAL
    for score, at in ((ALIBI, ALIBI_AT), (SOFT_CAP, SOFT_CAP)):
        yield score, None, _USUAL
        yield score, CAUSAL, _WITH_FP32
        yield at, BAND, _WITH_FP32
        yield at, DOCUMENTS_IN_BAND, _WITH_FP32
    for mask in (None, CAUSAL):
        yield RELATIVE, mask, _USUAL
        yield PER_HEAD, mask, _RARE
        yield LEARNED, mask, _RARE
    for mask in (BAND, DOCUMENTS_IN_BAND):
        yield RELATIVE, mask, _RARE
    # scaled_dot_product_attention's additive masks: of the model's dtype, and in fp32, which serves for any.
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        yield mods.learned_bias(_table(dtype, 4)), None, replace(_USUAL, dtypes=(name,))
    yield mods.learned_bias(_table(torch.float32, 4)), None, _TABLE
    yield None, mods.of_bool_table(_table(torch.bool, 4)), _TABLE
    yield None, mods.prefix_lm(1), _USUAL
    yield None, mods.prefix_lm(torch.zeros(1, dtype=torch.int32)), _RARE
    yield None, BEHIND_TENSOR, _BEHIND
    yield None, mods.dilated_window(1, 1), _RARE
    yield None, mods.natten_2d(4, 4, 3), _RARE
