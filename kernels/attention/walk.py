"""Which tiles of keys a tile of queries meets, and in the backward which tiles of queries a tile of keys.

The walked side is met in two lists of tiles: *partial* ones, where the mask function is asked, and *full* ones, where
it is not. They come from a block mask, whose blocks are as large as the caller made them: a block is cut into tiles,
and what stands out of its last one is masked off. Without a block mask they follow from a band: position x meets
[x - left, x + right], and nothing is asked where a tile lies in it entirely, if the mask is said to be that band.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tk.kernels.attention.bundles import BlockList


class Met(NamedTuple):
    """How many tiles are met, in both lists. Without block lists those are [lo, full_lo) and those from full_hi on, and
    [full_lo, full_hi)."""

    partial: Any
    full: Any
    has_lists: Any
    lo: Any
    full_lo: Any
    full_hi: Any


class TileList(NamedTuple):
    """The tiles of one list. With block lists: of the blocks numbered in `indices`, of size `block`. Without: tiles
    from `lo` on, [gap_lo, gap_hi) left out. Nothing is touched from `end` on."""

    indices: Any
    stride: Any
    block: Any
    end: Any
    has_lists: Any
    lo: Any
    gap_lo: Any
    gap_hi: Any


class BothLists(NamedTuple):
    """The tiles of both lists, one after the other. stride and full_stride: of indices."""

    met: Met
    indices: Any
    stride: Any
    full_indices: Any
    full_stride: Any
    block: Any
    end: Any


@triton.jit
def tile_in_blocks(tile, block, size, BLOCK: tl.constexpr):
    """The number of the block that the `tile`-th tile is of, the tile's first position, and the end of the block."""
    per_block = tl.cdiv(block, BLOCK)
    number = tile // per_block
    start = number * block
    return number, start + tile % per_block * BLOCK, tl.minimum(start + block, size)


@triton.jit
def band_tiles(first, last, size, left, right, exact, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr):
    """For positions first … last: the tiles [lo, hi) of the other side that the band touches, of which [full_lo,
    full_hi) lie in it."""
    end = tl.minimum(last + right + 1, size)
    lo = tl.maximum(first - left, 0) // BLOCK
    hi = tl.maximum(tl.cdiv(tl.maximum(end, 0), BLOCK), lo)
    full_lo = lo
    full_hi = hi
    if HAS_MASK:
        full_lo = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(last - left, 0), BLOCK), lo), hi)
        full_hi = tl.minimum(tl.maximum((first + right + 1) // BLOCK, full_lo), hi)
        if exact == 0:
            full_lo = hi
            full_hi = hi
    return lo, full_lo, full_hi, hi


@triton.jit
def lists_of(lists, strides):
    """The list of partial blocks and that of full ones."""
    partial = BlockList(lists.counts, lists.indices, strides.partial)
    return partial, BlockList(lists.full_counts, lists.full_indices, strides.full)


@triton.jit
def has_blocks(blocks):
    return (blocks.strides.B > 0) & (blocks.strides.H > 0)


@triton.jit
def count_tiles(b, h, number, blocks, block, BLOCK: tl.constexpr):
    """How many tiles the blocks of a list's row `number` have; 0 where there is no such list."""
    strides = blocks.strides
    is_there = has_blocks(blocks)
    at = (
        blocks.counts
        + tl.cast(b, tl.int64) * strides.counts_b
        + tl.cast(h, tl.int64) * strides.counts_h
        + number * strides.counts_n
    )
    return tl.load(at, mask=is_there, other=0) * tl.cdiv(block, BLOCK)


@triton.jit
def indices_of(b, h, number, blocks):
    """Where the numbers of the blocks in row `number` of a list begin."""
    strides = blocks.strides
    at = blocks.indices + tl.cast(b, tl.int64) * strides.indices_b + tl.cast(h, tl.int64) * strides.indices_h
    return at + number * strides.indices_n


@triton.jit
def tiles_met(b, h, number, first, last, size, partial_blocks, full_blocks, block, left, right, exact,
              HAS_MASK: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """By positions first … last, of row `number` of blocks. block: the other side's."""
    has_lists = has_blocks(partial_blocks).to(tl.int32)
    lo, full_lo, full_hi, hi = band_tiles(first, last, size, left, right, exact, HAS_MASK, BLOCK)
    partial = count_tiles(b, h, number, partial_blocks, block, BLOCK)
    full = count_tiles(b, h, number, full_blocks, block, BLOCK)
    if has_lists == 0:
        partial = full_lo - lo + hi - full_hi
        full = full_hi - full_lo
    return Met(partial, full, has_lists, lo, full_lo, full_hi)


@triton.jit
def tile_at(i, tiles, BLOCK: tl.constexpr):
    """The i-th tile of a list: its first position, and the end of what it may touch."""
    per_block = tl.cdiv(tiles.block, BLOCK)
    listed = tl.load(
        tiles.indices + tl.cast(i // per_block, tl.int64) * tiles.stride, mask=tiles.has_lists != 0, other=0
    )
    tile = tiles.lo + i
    tile = tl.where(tile >= tiles.gap_lo, tile + tiles.gap_hi - tiles.gap_lo, tile)
    start = tl.where(tiles.has_lists != 0, listed * tiles.block + i % per_block * BLOCK, tile * BLOCK)
    end = tl.where(tiles.has_lists != 0, tl.minimum(listed * tiles.block + tiles.block, tiles.end), tiles.end)
    return start, end


@triton.jit
def tile_of_both(i, tiles, BLOCK: tl.constexpr):
    """As ``tile_at``, of the partial tiles and then the full ones: for loops that ask the mask in any case."""
    met = tiles.met
    per_block = tl.cdiv(tiles.block, BLOCK)
    is_partial = i < met.partial
    j = tl.where(is_partial, i, i - met.partial)
    place = tl.cast(j // per_block, tl.int64)
    listed = tl.load(tiles.indices + place * tiles.stride, mask=is_partial & (met.has_lists != 0), other=0)
    listed += tl.load(
        tiles.full_indices + place * tiles.full_stride,
        mask=(i >= met.partial) & (met.has_lists != 0),
        other=0,
    )
    tile = tl.where(is_partial, met.lo, met.full_lo) + j
    tile = tl.where(is_partial & (tile >= met.full_lo), tile + met.full_hi - met.full_lo, tile)
    start = tl.where(met.has_lists != 0, listed * tiles.block + j % per_block * BLOCK, tile * BLOCK)
    end = tl.where(met.has_lists != 0, tl.minimum(listed * tiles.block + tiles.block, tiles.end), tiles.end)
    return start, end
