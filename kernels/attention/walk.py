"""Which tiles of keys a tile of queries meets, and in the backward which tiles of queries a tile of keys.

The walked side is met in two lists of tiles: *partial* ones, where the mask function is asked, and *full* ones, where
it is not. They come from a block mask, whose blocks are as large as the caller made them: a block is cut into tiles,
and what stands out of its last one is masked off. Without a block mask they follow from a band: position x meets
[x - left, x + right], and nothing is asked where a tile lies in it entirely, if the mask is said to be that band.
"""

import triton
import triton.language as tl


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
def count_tiles(b, h, number, counts, stride_b, stride_h, stride_n, n_b, n_h, block, BLOCK: tl.constexpr):
    """Of a block list: how many tiles the blocks of row `number` have. n_b and n_h: 0 where there is no such list."""
    is_there = (n_b > 0) & (n_h > 0)
    at = counts + tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h + number * stride_n
    return tl.load(at, mask=is_there, other=0) * tl.cdiv(block, BLOCK)


@triton.jit
def tile_at(i, indices, stride, block, size, has_lists, lo, gap_lo, gap_hi, BLOCK: tl.constexpr):
    """The i-th tile: its first position, and the end of what it may touch.

    With lists: of the blocks numbered in `indices`. Without: tiles from `lo` on, [gap_lo, gap_hi) left out."""
    per_block = tl.cdiv(block, BLOCK)
    listed = tl.load(indices + tl.cast(i // per_block, tl.int64) * stride, mask=has_lists != 0, other=0)
    tile = lo + i
    tile = tl.where(tile >= gap_lo, tile + gap_hi - gap_lo, tile)
    start = tl.where(has_lists != 0, listed * block + i % per_block * BLOCK, tile * BLOCK)
    end = tl.where(has_lists != 0, tl.minimum(listed * block + block, size), size)
    return start, end


@triton.jit
def tile_of_both(i, first, indices, stride, full_indices, full_stride, block, size, has_lists, lo, full_lo, full_hi,
                 BLOCK: tl.constexpr):  # fmt: skip
    """As ``tile_at``, of the `first` partial tiles and then the full ones: for loops that ask the mask in any case."""
    per_block = tl.cdiv(block, BLOCK)
    is_partial = i < first
    j = tl.where(is_partial, i, i - first)
    place = tl.cast(j // per_block, tl.int64)
    listed = tl.load(indices + place * stride, mask=is_partial & (has_lists != 0), other=0)
    listed += tl.load(full_indices + place * full_stride, mask=(i >= first) & (has_lists != 0), other=0)
    tile = tl.where(is_partial, lo, full_lo) + j
    tile = tl.where(is_partial & (tile >= full_lo), tile + full_hi - full_lo, tile)
    start = tl.where(has_lists != 0, listed * block + j % per_block * BLOCK, tile * BLOCK)
    end = tl.where(has_lists != 0, tl.minimum(listed * block + block, size), size)
    return start, end
