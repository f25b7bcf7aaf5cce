"""Rows by tiles, on tensor cores: out^T = weight^T a^T.

The weight's tile is the left operand, which Hopper's tensor cores take from registers, and each is unpacked once for
all rows of a tile; so that a tile may have as few as 16 rows where the other way round Hopper's take 64. Packed words
and a come through shared memory, several blocks of K ahead; words are unpacked while the block before is multiplied.
"""

import triton
import triton.language as tl

from tk.aot.expr import Expr, Tensor, ceil_div, const, device
from tk.aot.spec import (
    Arg,
    Bundle,
    Config,
    Const,
    Constraint,
    Int,
    Kernel,
    Launch,
    Plan,
    Point,
    Pointer,
)
from tk.kernels.epilogue import finish
from tk.kernels.gemm.arguments import Size
from tk.kernels.gemm.cost import Work, predict_or
from tk.kernels.gemm.pointer import finish_args, shape, tile_coordinates
from tk.kernels.gemm.problem import OUT_AXIS, batch_invariant
from tk.kernels.gemm.tiles import tiles_of
from tk.kernels.int4.op import (
    DTYPE_AXIS,
    GROUP,
    INT4,
    OP,
    SCALES,
    ZEROS,
    A,
    B,
    reads_words,
    row_major,
    serves,
    whole_groups,
)
from tk.kernels.int4.unpack import EVEN_MASK, ODD_MASK, TYPES, Format, Words, load_scales, weights
from tk.kernels.mm.split_k import SplitK, store_partials

M, N, K = INT4.M, INT4.N, INT4.K

# --- The device functions ---


@triton.jit
def int4_accumulate(a, weight, rows, n, M, N, k_lo, k_hi, stride_am, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                    BLOCK_K: tl.constexpr, FORMAT: tl.constexpr):  # fmt: skip
    """fp32 [BLOCK_M, BLOCK_N], the sum over k in [k_lo, k_hi), whole blocks, each in one group, for the n-th tile of
    columns. weight: ``Words``. N too is in units of 16 columns."""
    WORDS: tl.constexpr = BLOCK_N // 4
    PAIRS: tl.constexpr = BLOCK_K // 2
    words = n * WORDS + tl.arange(0, WORDS)
    inside = words < N * 4
    row = tl.minimum(rows, M - 1).to(tl.int64)  # what is read twice is not stored
    a_at = a + row[:, None] * stride_am + (k_lo + tl.arange(0, BLOCK_K)).to(tl.int64)[None, :]
    pairs = (k_lo // 2 + tl.arange(0, PAIRS)).to(tl.int64)
    b_at = weight.b + pairs[:, None] * (weight.b_pitch * 4) + words[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in range(k_lo, k_hi, BLOCK_K):
        x = tl.load(a_at)
        w = tl.load(b_at, mask=inside[None, :], other=0)
        scale, zero = load_scales(weight, words, N, k // weight.group, inside, FORMAT)
        even, odd = weights(w, scale, zero, weight.even_mask, weight.odd_mask, PAIRS, WORDS, FORMAT.DTYPE)
        both = tl.join(even, odd).permute(0, 2, 1).reshape(BLOCK_K, BLOCK_N)
        acc = tl.dot(both.T, x.T, acc)
        a_at += BLOCK_K
        b_at += weight.b_pitch * (4 * PAIRS)
    return acc.T


@triton.jit
def int4_tile(a, weight, bias, out, size, stride_am, stride_om, stride_on, epilogue, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr):  # fmt: skip
    """One program, one tile of out."""
    m, n = tile_coordinates(tl.program_id(0), size.M, size.N * 16, BLOCK_M, BLOCK_N, 8)
    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = int4_accumulate(a, weight, rows, n, size.M, size.N, 0, size.K, stride_am, BLOCK_M, BLOCK_N, BLOCK_K, FORMAT)
    finish(acc, bias, out, rows, cols, size.M, size.N * 16, stride_om, stride_on, epilogue, "matrix")


@triton.jit
def int4_split_k(a, weight, partials, size, k_per_split, stride_am, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_K: tl.constexpr, FORMAT: tl.constexpr):  # fmt: skip
    """Program (tile, s) leaves the sum over its k_per_split values of k in partials[s], fp32 [splits, M, 16 N]."""
    m, n = tile_coordinates(tl.program_id(0), size.M, size.N * 16, BLOCK_M, BLOCK_N, 8)
    s = tl.program_id(1)
    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = n * BLOCK_N + tl.arange(0, BLOCK_N)
    k_lo = s * k_per_split
    k_hi = k_lo + min(k_per_split, size.K - k_lo)  # where k_lo + k_per_split may pass 2**31
    acc = int4_accumulate(a, weight, rows, n, size.M, size.N, k_lo, k_hi, stride_am, BLOCK_M, BLOCK_N, BLOCK_K, FORMAT)
    store_partials(partials, acc, s, rows, cols, size.M, size.N * 16)


# --- Plans ---

_BITS = {"bf16": (0x3F80, 0x4100), "fp16": (0x3C00, 0x4800)}  # of 1 and 8
_REPEATED = 0x0001_0001_0001_0001

# What unpacking a weight costs beside multiplying it, in operations of the tensor cores: some five instructions.
_UNPACK = 128
_SECOND_LAUNCH = 2_500_000  # picoseconds, with the sums that it adds up


def words_of(b: Tensor, scales: Tensor, zeros: Tensor, group: Int) -> Words:
    return Words(
        b=Pointer(b, "i32"),
        scales=Pointer(scales, "i64"),
        zeros=Pointer(zeros, "i64"),
        group=group,
        b_pitch=Int(b.stride(0) // 16, "i64"),
        scales_pitch=Int(scales.stride(0) // 16, "i64"),
        zeros_pitch=Int(zeros.stride(0) // 16, "i64"),
        has_scales=Int(scales.present),
        has_zeros=Int(zeros.present),
        even_mask=Int(EVEN_MASK),
        odd_mask=Int(ODD_MASK),
    )


def format_of(dtype: str) -> Const:
    one, eight = _BITS[dtype]
    return Const(Format(TYPES[dtype], one * _REPEATED, eight * _REPEATED))


def word_args(point: Point) -> dict[str, Arg | Bundle]:
    return dict(
        weight=words_of(B, SCALES, ZEROS, Int(GROUP, divisible=True)),
        size=Size(Int(M), Int(N // 16), Int(K, divisible=True)),
        FORMAT=format_of(point.dtype),
    )


def _product_args(point: Point) -> dict[str, Arg | Bundle]:
    c = point.config
    return word_args(point) | dict(
        a=Pointer(A, point.dtype),
        stride_am=Int(A.stride(0), "i64", divisible=True),
        BLOCK_M=Const(c.block_m),
        BLOCK_N=Const(c.block_n),
        BLOCK_K=Const(c.block_k),
    )


def _constraints(point: Point) -> tuple[Constraint, ...]:
    return (
        INT4.fits_32_bits(),
        row_major(A),
        *reads_words(B, SCALES, ZEROS),
        whole_groups(point.config.block_k),
        row_major(INT4.out),
    )


def _as_product(point: Point) -> Point:
    """An order and an alignment, which products' recipes ask for, are not axes here."""
    return Point(point.arch, {"order": "nn", "aligned": True, **point.axes}, point.config)


def _work(point: Point, waves: Expr, k_blocks: Expr, dram: Expr, fixups: Expr = const(0)) -> Work:
    c = point.config
    flops = (2 * c.block_m + _UNPACK) * c.block_n * c.block_k
    return Work(INT4, waves, k_blocks, flops, dram, tile=(c.block_m, c.block_n), boxes=(1, 1), fixups=fixups)


def _cost(point: Point, work: Work) -> Expr:
    """Picoseconds; as a guess a launch, a tile's and a block's beginning and end, half as much again as the roofline,
    and for a fix-up a second launch."""
    guess = 3_000_000 + 500_000 * work.waves + 50_000 * work.k_blocks + 1500 * work.roofline(point)
    return predict_or(point, work, guess + _SECOND_LAUNCH * work.fixups)


def _plan(point: Point) -> Plan:
    c = point.config
    tiles = tiles_of(INT4, c)
    waves = ceil_div(tiles.expected, device.sm_count * c.occupancy)
    work = _work(point, waves, waves * c.occupancy * (K // c.block_k), INT4.traffic())
    args = _product_args(point) | finish_args(INT4, _as_product(point), "matrix")
    launch = Launch(int4_tile, args, (tiles.count, 1, 1), num_warps=c.num_warps, num_stages=c.num_stages)
    return work.plan(_cost(point, work), (launch,), serves(point), _constraints(point))


def _plan_split(point: Point) -> Plan:
    c = point.config
    tiles = tiles_of(INT4, c).count
    cut = SplitK(INT4, device.sm_count * c.occupancy // tiles, c.block_k, least=2)
    partials = cut.splits * M * N * 4  # bytes, which are written and read
    k_blocks = c.occupancy * (cut.k_per_split // c.block_k)
    return cut.plan(
        _as_product(point),
        int4_split_k,
        _product_args(point) | {"k_per_split": Int(cut.k_per_split, divisible=True)},
        tiles,
        serves(point),
        (*_constraints(point), batch_invariant()),
        _cost,
        _work(point, const(1), k_blocks, INT4.traffic() + 2 * partials, fixups=const(1)),
    )


# --- The grid ---


# A tile, its stages and warps, and how many programs a multiprocessor holds at once. Blocks of K of each group's size.
# What has groups of 128 or of K is worth more tiles.
_WHOLE = (
    (16, 128, 128, 4, 4, 2),
    (64, 128, 128, 3, 4, 2),
    (128, 128, 128, 3, 8, 1),
    (64, 128, 64, 4, 4, 2),
    (64, 128, 32, 4, 4, 2),
)
_SPLIT = (
    (16, 64, 128, 4, 4, 3),
    (16, 128, 128, 4, 4, 2),
    (64, 128, 128, 3, 4, 2),
    (16, 128, 64, 4, 4, 2),
    (64, 128, 64, 4, 4, 2),
    (16, 128, 32, 4, 4, 2),
    (64, 128, 32, 4, 4, 2),
)


def _configs(shapes: tuple[tuple[int, ...], ...], suffix: str = "") -> dict[int, tuple[Config, ...]]:
    """The configs by architecture: on other GPUs than Hopper's one for each block of K."""
    hopper = tuple(shape(*sizes, suffix, occupancy=occupancy) for *sizes, occupancy in shapes)
    last = {c.block_k: c for c in hopper if c.block_m <= 64}
    return {90: hopper} | dict.fromkeys((80, 100), tuple(last.values()))


KERNELS = (
    Kernel("int4_tile", OP, {"dtype": DTYPE_AXIS, "out": OUT_AXIS[:1]}, _configs(_WHOLE), _plan),
    Kernel("int4_split_k", OP, {"dtype": DTYPE_AXIS, "out": OUT_AXIS}, _configs(_SPLIT, "_split_k"), _plan_split),
)
