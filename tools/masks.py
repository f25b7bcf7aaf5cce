"""Draws the masks of docs/attention.md: docs/masks/NAME.svg, queries downwards, keys to the right.

    python tools/masks.py [--check]

What a query sees is dark; blocks that the mask lets through entirely are darker, and blocks that are not visited are
crossed out. --check writes nothing and fails when a picture is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from tk.flex import BlockMask, and_masks, create_block_mask, mods, or_masks
from tk.flex.mods import MaskMod
from tk.flex.tracing.evaluate import evaluate, indices
from tk.flex.tracing.trace import pair

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "masks"

LENGTH, BLOCK, CELL = 32, 8, 6
BACKGROUND, PARTIAL, FULL, GRID = "#f4f1ea", "#7fa7c9", "#2f5d8a", "#b9b2a3"

IDS = torch.tensor([0] * 11 + [1] * 9 + [2] * 12, dtype=torch.int32)
MASKS: dict[str, MaskMod] = {
    "causal": mods.causal,
    "sliding_window": mods.sliding_window(10),
    "dilated_window": mods.dilated_window(5, 3),
    "prefix_lm": mods.prefix_lm(10),
    "document": mods.document(IDS),
    "natten_2d": mods.natten_2d(4, 8, 3),
    "and_masks": and_masks(mods.causal, mods.document(IDS)),
    "or_masks": or_masks(mods.sliding_window(6), mods.prefix_lm(4)),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail instead of writing when a picture is out of date")
    args = parser.parse_args(argv)
    drawn = {FOLDER / f"{name}.svg": draw(name, mask_mod) for name, mask_mod in MASKS.items()}
    stale = [path for path, text in drawn.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if args.check:
            print(f"{path.relative_to(ROOT)} is out of date; run python tools/masks.py", file=sys.stderr)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(drawn[path])
    return 1 if args.check and stale else 0


def draw(name: str, mask_mod: MaskMod) -> str:
    graph = pair(None, mask_mod)
    assert graph.mask is not None
    at = indices([0], [0], (0, LENGTH), (0, LENGTH), "cpu")
    is_seen = evaluate(graph.mask, at, graph.values).expand(1, 1, LENGTH, LENGTH)[0, 0]
    blocks = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, "cpu", BLOCK)
    side = LENGTH * CELL
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {side + 2} {side + 2}" width="{side}" role="img">',
        f"<title>{name}: queries downwards, keys to the right</title>",
        f'<rect width="{side}" height="{side}" fill="{BACKGROUND}"/>',
        *_cells(is_seen, blocks),
        f'<path d="{_grid(side)}{_crosses(blocks)}" stroke="{GRID}" stroke-width="1" fill="none"/>',
        "</svg>\n",
    ]
    return "\n".join(parts)


def _cells(is_seen: Tensor, blocks: BlockMask) -> list[str]:
    """A path for each colour; neighbours in a row are one rectangle."""
    is_full = (blocks.kinds()[0, 0] == 2).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    colours = (is_seen.int() + (is_seen & is_full).int()).tolist()
    paths = {1: "", 2: ""}
    for row, line in enumerate(colours):
        column = 0
        for colour, run in groupby(line):
            n = len(list(run))
            if colour:
                paths[colour] += f"M{column * CELL} {row * CELL}h{n * CELL}v{CELL}h-{n * CELL}z"
            column += n
    return [f'<path d="{paths[c]}" fill="{colour}"/>' for c, colour in ((1, PARTIAL), (2, FULL)) if paths[c]]


def _grid(side: int) -> str:
    steps = range(0, side + 1, BLOCK * CELL)
    return "".join(f"M{s} 0v{side}M0 {s}h{side}" for s in steps)


def _crosses(blocks: BlockMask) -> str:
    size = BLOCK * CELL
    empty = (blocks.kinds()[0, 0] == 0).nonzero().tolist()
    return "".join(f"M{c * size} {r * size}l{size} {size}m-{size} 0l{size} -{size}" for r, c in empty)


if __name__ == "__main__":
    raise SystemExit(main())
