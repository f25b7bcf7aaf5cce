"""The weight itself, [K, N] of the activations' dtype."""

import triton
import triton.language as tl

from tk.aot.expr import ceil_div
from tk.aot.spec import Config, Const, Int, Kernel, Launch, Plan, Point, Pointer, require
from tk.kernels.int4.general import element_args
from tk.kernels.int4.op import DEQUANTIZE, DTYPE_AXIS, OF_PACKED, PACKED, WEIGHT, ZEROS_OF_PACKED, reads_words
from tk.kernels.int4.tile import word_constants
from tk.kernels.int4.unpack import TYPES, load_four, load_weights, weights

N, K, GROUP = (DEQUANTIZE.local(name) for name in ("N", "K", "group"))


@triton.jit
def int4_dequantize(b, scales, zeros, out, N, K, group, b_pitch, scales_pitch, zeros_pitch, out_pitch, has_scales,
                    has_zeros, even_mask, odd_mask, COLS: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
                    ONES: tl.constexpr, EIGHTS: tl.constexpr):  # fmt: skip
    """Program (n, k): BLOCK_K rows, all in one group, of COLS columns. Words and units of 16 columns as of
    `int4_accumulate`."""
    WORDS: tl.constexpr = COLS // 4
    PAIRS: tl.constexpr = BLOCK_K // 2
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = words < N * 4
    pairs = (tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)).to(tl.int64)
    w = tl.load(b + pairs[:, None] * (b_pitch * 4) + words[None, :], mask=inside[None, :], other=0)
    g = tl.program_id(1) * BLOCK_K // group
    scale = load_four(scales, words, N * 4 * has_scales, g, scales_pitch * 4, inside, ONES)
    zero = load_four(zeros, words, N * 4 * has_zeros, g, zeros_pitch * 4, inside, EIGHTS)
    even, odd = weights(w, scale, zero, even_mask, odd_mask, PAIRS, WORDS, DTYPE)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    at = out + pairs[:, None] * (2 * 16 * out_pitch) + cols[None, :]
    tl.store(at, even, mask=(cols < N * 16)[None, :])
    tl.store(at + 16 * out_pitch, odd, mask=(cols < N * 16)[None, :])


@triton.jit
def int4_dequantize_general(b, scales, zeros, out, N, K, group, stride_bk, stride_bn, stride_sg, stride_sn, stride_zg,
                            stride_zn, stride_ok, stride_on, has_scales, has_zeros, COLS: tl.constexpr,
                            BLOCK_K: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """The same, of any strides."""
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    ks = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    w = load_weights(b, scales, zeros, ks, cols, K, N, group, stride_bk, stride_bn, stride_sg, stride_sn, stride_zg,
                     stride_zn, has_scales, has_zeros, DTYPE)  # fmt: skip
    at = out + ks.to(tl.int64)[:, None] * stride_ok + cols.to(tl.int64)[None, :] * stride_on
    tl.store(at, w, mask=(ks < K)[:, None] & (cols < N)[None, :])


def _plan(point: Point) -> Plan:
    c = point.config
    general = not point.aligned
    fits = require(DEQUANTIZE.local("largest") < 2**31 - 2**16, "N and K < 2**31 - 65536")
    blocks = require(ceil_div(K, c.block_k) < 65536, f"K < {65536 * c.block_k}")
    constants = dict(COLS=Const(c.cols), BLOCK_K=Const(c.block_k))
    if general:
        args = element_args(PACKED, OF_PACKED, ZEROS_OF_PACKED, GROUP, point.dtype) | constants | dict(
            out=Pointer(WEIGHT, point.dtype, aligned=False),
            N=Int(N),
            K=Int(K),
            stride_ok=Int(WEIGHT.stride(0), "i64"),
            stride_on=Int(WEIGHT.stride(1), "i64"),
        )  # fmt: skip
        constraints = (fits, blocks)
    else:
        args = word_constants(point.dtype, PACKED, OF_PACKED, ZEROS_OF_PACKED) | constants | dict(
            out=Pointer(WEIGHT, point.dtype),
            N=Int(N // 16),
            K=Int(K),
            group=Int(GROUP),
            out_pitch=Int(WEIGHT.stride(0) // 16, "i64"),
            DTYPE=Const(TYPES[point.dtype]),
        )  # fmt: skip
        is_row_major = (WEIGHT.stride(1) == 1) & (WEIGHT.alignment >= 16) & (WEIGHT.stride(0) % 16 == 0)
        constraints = (
            fits,
            blocks,
            *reads_words(PACKED, OF_PACKED, ZEROS_OF_PACKED),
            require(is_row_major, "out row-major and on a 16-byte boundary, its rows a multiple of 16 elements apart"),
            require((GROUP % c.block_k == 0) & (K % c.block_k == 0), f"groups of {c.block_k}"),
        )
    grid = (ceil_div(N, c.cols), ceil_div(K, c.block_k), 1)
    return Plan(
        constraints=constraints,
        serves={"dtype": (DTYPE_AXIS.index(point.dtype),)},
        launches=(Launch(int4_dequantize_general if general else int4_dequantize, args, grid, num_warps=4),),
        cost=3_000_000 + N * K * (20 if general else 1),
        general=general,
    )


_CONFIG = Config("128x32_w4", dict(cols=128, block_k=32))
KERNELS = (
    Kernel("int4_dequantize", DEQUANTIZE, {"dtype": DTYPE_AXIS, "aligned": (True, False)},
           dict.fromkeys((80, 90, 100), (_CONFIG,)), _plan),
)  # fmt: skip
