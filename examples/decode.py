"""Decodes for several sequences of different lengths from one cache of pages, with ALiBi.

    python examples/decode.py [--steps 40] [--device cuda]

Each sequence owns pages of the cache, taken from a common stock as it grows. Every step appends a key and a value for
each sequence, and attends to all of its keys: `page_table` says where they are, `kv_lengths` how many there are. The
mod reads the lengths too, since a query of one row has q_idx 0 wherever it stands. On CUDA the mod is built first:

    tk build examples/decode.py -o decode.tkpack && TK_PACK_PATH=decode.tkpack python examples/decode.py --device cuda
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

import tk


def alibi_at_the_end(slopes: Tensor, lengths: Tensor) -> Any:
    """ALiBi for one query per sequence, which stands at its last key."""

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - (lengths[b] - 1))

    return mod


tk.flex.register(
    "alibi_at_the_end",
    alibi_at_the_end(torch.empty(1), torch.empty(1, dtype=torch.int32)),
    head_dims=(64,),
    dtypes=(torch.bfloat16, torch.float32),
    backward=False,
)


class PagedCache:
    """Keys and values of several sequences: [n_pages, Hkv, page_size, D] each."""

    def __init__(self, n_pages: int, batch: int, heads: int, page_size: int, head_dim: int, **where: Any):
        self.keys, self.values = (torch.zeros(n_pages, heads, page_size, head_dim, **where) for _ in range(2))
        device = self.keys.device
        self.page_table = torch.zeros(batch, n_pages // batch, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.page_size = page_size
        self._free = list(range(n_pages))
        self._held = [0] * batch  # keys of each sequence, so that no step waits for the device

    def append(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        """keys, values: [Hkv, n, D]. Raises RuntimeError when the pages are used up."""
        for i in range(keys.shape[1]):
            page, place = divmod(self._held[sequence], self.page_size)
            if place == 0:
                if not self._free or page == self.page_table.shape[1]:
                    raise RuntimeError(
                        f"no page is left for sequence {sequence}, which has {self._held[sequence]} keys"
                    )
                self.page_table[sequence, page] = self._free.pop()
            at = self.page_table[sequence, page]
            self.keys[at, :, place], self.values[at, :, place] = keys[:, i], values[:, i]
            self._held[sequence] += 1
        self.lengths[sequence] += keys.shape[1]

    def attend(self, query: Tensor, slopes: Tensor) -> Tensor:
        """query: [B, H, 1, D] -> [B, H, 1, D]."""
        mod = alibi_at_the_end(slopes, self.lengths)
        return tk.flex_attention(
            query, self.keys, self.values, mod, enable_gqa=True, kv_lengths=self.lengths, page_table=self.page_table
        )


def decode(steps: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """The largest difference from attention over each sequence by itself."""
    torch.manual_seed(0)
    B, H, H_kv, D, page_size = 4, 8, 2, 64, 16
    where = {"device": device, "dtype": dtype}
    slopes = 2.0 ** -torch.arange(1, H + 1, device=device)
    cache = PagedCache(64, B, H_kv, page_size, D, **where)
    history: list[list[Tensor]] = []
    for sequence, prompt in enumerate((5, 100, 1, 37)):
        keys, values = (torch.randn(H_kv, prompt, D, **where) for _ in range(2))
        cache.append(sequence, keys, values)
        history.append([keys, values])
    worst = 0.0
    for _ in range(steps):
        for sequence, held in enumerate(history):
            new = [torch.randn(H_kv, 1, D, **where) for _ in range(2)]
            cache.append(sequence, *new)
            held[:] = [torch.cat(pair, 1) for pair in zip(held, new, strict=True)]
        query = torch.randn(B, H, 1, D, **where)
        out = cache.attend(query, slopes)
        for sequence, (keys, values) in enumerate(history):
            expected = _alone(query[sequence], keys, values, slopes)
            worst = max(worst, float((out[sequence] - expected).abs().max()))
    print(f"{steps} steps, lengths {cache.lengths.tolist()}, {len(cache._free)} pages left, off by {worst:.1e} at most")
    return worst


def _alone(query: Tensor, keys: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
    """One sequence: [H, 1, D] against [Hkv, n, D]."""
    group = query.shape[0] // keys.shape[0]
    keys, values = (x.repeat_interleave(group, 0).float() for x in (keys, values))
    n = keys.shape[1]
    bias = slopes[:, None, None] * torch.arange(1 - n, 1, device=query.device)
    return torch.softmax(query.float() @ keys.mT * query.shape[-1] ** -0.5 + bias, -1) @ values


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    decode(args.steps, args.device)
