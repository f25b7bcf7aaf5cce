"""The weight itself, [K, N] of the activations' dtype."""

import triton
import triton.language as tl

from tk.aot.expr import ceil_div
from tk.aot.spec import Arg, Bundle, Config, Const, Int, Kernel, Launch, Plan, Point, Pointer, require
from tk.kernels.gemm.pointer import ARCHS
from tk.kernels.int4.general import elements_of
from tk.kernels.int4.op import (
    DEQUANTIZE,
    DTYPE_AXIS,
    OF_PACKED,
    PACKED,
    WEIGHT,
    ZEROS_OF_PACKED,
    reads_words,
    row_major,
)
from tk.kernels.int4.tile import format_of, words_of
from tk.kernels.int4.unpack import TYPES, load_scales, load_weights, weights

N, K, GROUP = (DEQUANTIZE.local(name) for name in ("N", "K", "group"))


@triton.jit
def int4_dequantize(weight, out, N, K, out_pitch, COLS: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr):
    """Program (n, k): BLOCK_K rows, all in one group, of COLS columns. Words and units of 16 columns as of
    `int4_accumulate`."""
    WORDS: tl.constexpr = COLS // 4
    PAIRS: tl.constexpr = BLOCK_K // 2
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = words < N * 4
    pairs = (tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)).to(tl.int64)
    w = tl.load(weight.b + pairs[:, None] * (weight.b_pitch * 4) + words[None, :], mask=inside[None, :], other=0)
    g = tl.program_id(1) * BLOCK_K // weight.group
    scale, zero = load_scales(weight, words, N, g, inside, FORMAT)
    even, odd = weights(w, scale, zero, weight.even_mask, weight.odd_mask, PAIRS, WORDS, FORMAT.DTYPE)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    at = out + pairs[:, None] * (2 * 16 * out_pitch) + cols[None, :]
    tl.store(at, even, mask=(cols < N * 16)[None, :])
    tl.store(at + 16 * out_pitch, odd, mask=(cols < N * 16)[None, :])


@triton.jit
def int4_dequantize_general(weight, out, N, K, stride_ok, stride_on, COLS: tl.constexpr, BLOCK_K: tl.constexpr,
                            DTYPE: tl.constexpr):  # fmt: skip
    """The same, of any strides."""
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    ks = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    w = load_weights(weight, ks, cols, K, N, DTYPE)
    at = out + ks.to(tl.int64)[:, None] * stride_ok + cols.to(tl.int64)[None, :] * stride_on
    tl.store(at, w, mask=(ks < K)[:, None] & (cols < N)[None, :])


def _plan(point: Point) -> Plan:
    c = point.config
    general = not point.aligned
    fits = require(DEQUANTIZE.local("largest") < 2**31 - 2**16, "N and K < 2**31 - 65536")
    blocks = require(ceil_div(K, c.block_k) < 65536, f"K < {65536 * c.block_k}")
    constants = dict(COLS=Const(c.cols), BLOCK_K=Const(c.block_k))
    if general:
        args: dict[str, Arg | Bundle] = dict(
            weight=elements_of(PACKED, OF_PACKED, ZEROS_OF_PACKED, GROUP, point.dtype),
            out=Pointer(WEIGHT, point.dtype, aligned=False),
            N=Int(N),
            K=Int(K),
            stride_ok=Int(WEIGHT.stride(0), "i64"),
            stride_on=Int(WEIGHT.stride(1), "i64"),
            DTYPE=Const(TYPES[point.dtype]),
        )
        constraints = (fits, blocks)
    else:
        args = dict(
            weight=words_of(PACKED, OF_PACKED, ZEROS_OF_PACKED, Int(GROUP)),
            out=Pointer(WEIGHT, point.dtype),
            N=Int(N // 16),
            K=Int(K),
            out_pitch=Int(WEIGHT.stride(0) // 16, "i64"),
            FORMAT=format_of(point.dtype),
        )
        constraints = (
            fits,
            blocks,
            *reads_words(PACKED, OF_PACKED, ZEROS_OF_PACKED),
            row_major(WEIGHT),
            require((GROUP % c.block_k == 0) & (K % c.block_k == 0), f"groups of {c.block_k}"),
        )
    grid = (ceil_div(N, c.cols), ceil_div(K, c.block_k), 1)
    return Plan(
        constraints=constraints,
        serves={"dtype": (DTYPE_AXIS.index(point.dtype),)},
        launches=(
            Launch(int4_dequantize_general if general else int4_dequantize, args | constants, grid, num_warps=4),
        ),
        cost=3_000_000 + N * K * (20 if general else 1),
        general=general,
    )


_CONFIG = Config("128x32_w4", dict(cols=128, block_k=32))
KERNELS = (
    Kernel("int4_dequantize", DEQUANTIZE, {"dtype": DTYPE_AXIS, "aligned": (True, False)},
           dict.fromkeys(ARCHS, (_CONFIG,)), _plan),
)  # fmt: skip
