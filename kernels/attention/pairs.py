"""The pairs of mods that the wheel has kernels for, from the library of mods (tk.flex.mods).

Numbers and tensors that a mod captures are run-time arguments: what stands here says of which kind they are, no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from tk.flex import mods
from tk.flex.codegen.family import Wanted
from tk.flex.tracing import trace
from tk.flex.tracing.trace import Traced

# --- Mods, with captures of every kind that they are called with ---

IDS = torch.zeros(1, 1, dtype=torch.int32)  # which serves for int64 too
OFFSET = torch.zeros((), dtype=torch.int64, device="meta")  # in the GPU's memory: one of the CPU's is a number
CAUSAL = mods.causal
WINDOW = mods.sliding_window(1)
DOCUMENTS = mods.and_masks(mods.causal, mods.document(IDS))
WINDOW_DOCUMENTS = mods.and_masks(WINDOW, mods.document(IDS))


def behind(mask_mod: mods.MaskMod, offset: int | torch.Tensor) -> mods.MaskMod:
    """For queries that stand `offset` behind the first key, as they do in decoding."""

    def of_later(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return mask_mod(b, h, q_idx + offset, kv_idx)

    return of_later


_SLOPES = torch.zeros(1)
ALIBI = mods.alibi(_SLOPES)
ALIBI_OF_HEADS = mods.alibi(8)
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
                paged=True, wide_dtypes=("bf16", "fp16"))  # fmt: skip
_USUAL = Wanted(exact=((64, 64), (128, 128)), rounded=((128, 128), (256, 256)))
_WITH_FP32 = replace(_USUAL, dtypes=("bf16", "fp16", "fp32"))
_TABLE = replace(_WITH_FP32, decode_dtypes=("bf16", "fp16"))  # encoders in fp32 have masks too, and do not decode
_SOME = replace(_USUAL, exact=((128, 128),), decode=False)
_DECODED = Wanted(exact=(), rounded=((128, 128),), backward=False)
_RARE = Wanted(dtypes=("bf16",), exact=((128, 128),), rounded=((128, 128), (256, 256)), decode=False)


def pairs() -> Iterator[tuple[Traced, Wanted]]:
    for score, mask, wanted in chosen():
        yield trace.pair(score, mask).traced, wanted


def chosen() -> Iterator[tuple[object, object, Wanted]]:
    yield None, None, _EXACT
    yield None, CAUSAL, _EXACT
    yield None, WINDOW, replace(_MOST, sampled=True)
    yield None, DOCUMENTS, _MOST
    for score in (ALIBI, SOFT_CAP):
        for mask in (None, CAUSAL, WINDOW, DOCUMENTS):
            yield score, mask, _WITH_FP32 if mask is CAUSAL else _USUAL
    yield ALIBI_OF_HEADS, CAUSAL, replace(_SOME, decode=True)
    for mask in (None, CAUSAL):
        yield RELATIVE, mask, _USUAL
        yield PER_HEAD, mask, _RARE
        yield LEARNED, mask, _RARE
    for mask in (WINDOW, DOCUMENTS):
        yield RELATIVE, mask, _RARE
    # scaled_dot_product_attention's additive masks: of the model's dtype, and in fp32, which serves for any.
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        yield mods.learned_bias(_table(dtype, 4)), None, replace(_USUAL, dtypes=(name,))
    yield mods.learned_bias(_table(torch.float32, 4)), None, _TABLE
    yield None, mods.of_bool_table(_table(torch.bool, 4)), _TABLE
    yield None, mods.prefix_lm(1), _USUAL
    yield None, mods.prefix_lm(torch.zeros(1, dtype=torch.int32)), _RARE
    yield None, mods.document(IDS), _USUAL
    yield None, mods.document(IDS[0]), _RARE
    yield None, WINDOW_DOCUMENTS, _SOME
    yield None, mods.and_masks(mods.causal, mods.document(IDS[0])), _RARE
    for offset in (1, OFFSET):
        yield None, behind(mods.causal, offset), _DECODED
    yield None, mods.dilated_window(1, 1), _RARE
    yield None, mods.natten_2d(4, 4, 3), _RARE
