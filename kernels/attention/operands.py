"""Rows of query, key and value as tiles. A row is a position, its columns the head size, rounded up to BLOCK_D; EVEN:
it is BLOCK_D. Offsets are in 64 bits."""

import triton
import triton.language as tl


@triton.jit
def row_offsets(n, inside, b, pages, strides, PAGED: tl.constexpr):
    """Where the rows of positions `n` begin, one head's first element being 0. PAGED: a page table may say so; without
    one the page is the batch entry, and holds all positions."""
    if PAGED:
        at = pages.table + tl.cast(b, tl.int64) * pages.stride_b + (n // pages.size).to(tl.int64) * pages.stride_p
        page = tl.load(at, mask=inside & (pages.has_pages != 0), other=b)
        return page.to(tl.int64) * strides.b + (n % pages.size).to(tl.int64) * strides.n
    else:
        return tl.cast(b, tl.int64) * strides.b + n.to(tl.int64) * strides.n


@triton.jit
def load_integers(base, offset, inside, words):
    """Of a tensor of 32 bits, words = 1, or 64, words = 2, which is told at run time: as 64 bits, and 0 outside. base:
    of its words of 32 bits."""
    at = base + offset * words
    low = tl.load(at, mask=inside, other=0)
    high = tl.load(at + 1, mask=inside & (words == 2), other=0)
    both = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    return tl.where(words == 2, both, low.to(tl.int64))


@triton.jit
def load_pairs(base, offset, kv_idx, size, inside, other):
    """Elements at offset + kv_idx, `other` where not inside or past `size`, two at a time: offsets, which are of rows,
    and size are even, base is on the size of two elements, and columns begin with an even one."""
    IS_BOOL: tl.constexpr = base.dtype.element_ty == tl.int1
    if IS_BOOL:
        base = base.to(tl.pointer_type(tl.int8), bitcast=True)
    BYTES: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    at = tl.max_contiguous(tl.multiple_of(base + offset + kv_idx, [1, 2 * BYTES]), [1, 2])
    x = tl.load(at, mask=inside & (kv_idx < size // 2 * 2), other=other)
    if IS_BOOL:
        x = x.to(tl.int32) != 0
    return x


@triton.jit
def load_rows(base, offsets, inside, D, stride_d, BLOCK_D: tl.constexpr, EVEN: tl.constexpr):
    """[rows, BLOCK_D]: zeros outside."""
    d = tl.arange(0, BLOCK_D)
    at = base + offsets[:, None] + d[None, :].to(tl.int64) * stride_d
    if EVEN:
        x = tl.load(at, mask=inside[:, None], other=0.0)
    else:
        x = tl.load(at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    return x


@triton.jit
def load_rows_transposed(base, offsets, inside, D, stride_d, BLOCK_D: tl.constexpr, EVEN: tl.constexpr):
    """[BLOCK_D, rows]."""
    d = tl.arange(0, BLOCK_D)
    at = base + offsets[None, :] + d[:, None].to(tl.int64) * stride_d
    if EVEN:
        x = tl.load(at, mask=inside[None, :], other=0.0)
    else:
        x = tl.load(at, mask=inside[None, :] & (d < D)[:, None], other=0.0)
    return x


@triton.jit
def store_rows(base, offsets, x, inside, D, stride_d, BLOCK_D: tl.constexpr, EVEN: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    at = base + offsets[:, None] + d[None, :].to(tl.int64) * stride_d
    x = x.to(base.dtype.element_ty)
    if EVEN:
        tl.store(at, x, mask=inside[:, None])
    else:
        tl.store(at, x, mask=inside[:, None] & (d < D)[None, :])
