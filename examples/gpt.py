"""Trains a small GPT on the bytes of the installed tk's sources, with documents packed side by side in each row.

    python examples/gpt.py [--steps 60] [--device cuda]

A row holds several files, and a document mask keeps each from seeing the others; so no position is padding. The mask
is made anew for every step, and costs no compilation. On two CPU cores it takes about a minute.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tk
from tk.flex import BlockMask, and_masks, create_block_mask, mods

SOURCES = Path(tk.__file__).parent  # there wherever this file is copied to
END = 256  # of a document; the tokens before it are bytes


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(tk.flex_attention(q, k, v, block_mask=mask).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, width: int = 128, heads: int = 2, layers: int = 2, longest: int = 4096):
        super().__init__()
        self.tokens = nn.Embedding(END + 1, width)
        self.positions = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        """tokens, documents: [B, S] -> logits [B, S, 257]."""
        B, S = tokens.shape
        mask_mod = and_masks(mods.causal, mods.document(documents))
        mask = create_block_mask(mask_mod, B, None, S, S, tokens.device)
        x = self.tokens(tokens) + self.positions(position_in_document(documents))
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x) @ self.tokens.weight.T


def position_in_document(documents: Tensor) -> Tensor:
    at = torch.arange(documents.shape[1], device=documents.device)
    is_first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return at - torch.where(is_first, at, 0).cummax(1).values


def read_documents(folder: Path) -> list[Tensor]:
    """The bytes of the sources, each with an END."""
    return [torch.tensor([*p.read_bytes(), END]) for p in sorted(folder.rglob("*.py"))]


def rows(documents: Sequence[Tensor], B: int, S: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, documents), each [B, S + 1]: pieces of random documents until the row is full."""
    while True:
        tokens, numbers = torch.empty(B, S + 1, dtype=torch.int64), torch.empty(B, S + 1, dtype=torch.int32)
        for b in range(B):
            filled, number = 0, 0
            while filled <= S:
                document = documents[int(torch.randint(len(documents), (), generator=generator))]
                longest = int(torch.randint(S // 8, S // 2, (), generator=generator))
                start = int(torch.randint(max(1, len(document) - longest), (), generator=generator))
                piece = document[start : start + min(longest, S + 1 - filled)]
                tokens[b, filled : filled + len(piece)] = piece
                numbers[b, filled : filled + len(piece)] = number
                filled, number = filled + len(piece), number + 1
        yield tokens, numbers


def train(steps: int, device: str = "cpu", B: int = 4, S: int = 512) -> list[float]:
    """The loss of each step, in bits per byte."""
    torch.manual_seed(0)
    batches = rows(read_documents(SOURCES), B, S, torch.Generator().manual_seed(0))
    model = GPT(longest=S).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    losses = []
    for step in range(steps):
        start = time.perf_counter()
        tokens, documents = (x.to(device) for x in next(batches))
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(tokens[:, :-1], documents[:, :-1].contiguous())
        is_inside = documents[:, 1:] == documents[:, :-1]  # the first byte of a document follows from nothing
        loss = F.cross_entropy(logits[is_inside].float(), tokens[:, 1:][is_inside])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() / 0.6931)
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:4}: {losses[-1]:.2f} bits per byte, {time.perf_counter() - start:.2f} s")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    train(args.steps, args.device)
