"""One to four rows, without tensor cores: as fast as b comes from memory.

A thread has four words of b at a time, sixteen columns of two k, and so many of a group's rows after one another that
scaling their sum costs little. What is summed is x (value - 8), in fp32: the group's scale is applied to the sum, and
of its zero what is not 8 to the sum of x.
"""

import triton
import triton.language as tl

from tk.aot.expr import ceil_div, device, maximum
from tk.aot.spec import Config, Const, Int, Kernel, Launch, Plan, Point, Pointer, require
from tk.kernels.epilogue import finish
from tk.kernels.gemm.problem import OUT_AXIS, batch_invariant, out_dtype
from tk.kernels.int4.op import DTYPE_AXIS, GROUP, INT4, OP, SCALES, ZEROS, A, B, reads_words
from tk.kernels.int4.tile import word_args
from tk.kernels.int4.unpack import TYPES, even_values, four, load_four, odd_values

M, N, K = INT4.M, INT4.N, INT4.K

# --- The device functions ---


@triton.jit
def _pair(x, DTYPE: tl.constexpr):
    """Words of two 16-bit floats -> both, as fp32."""
    first = x.to(tl.int16).to(DTYPE, bitcast=True)
    second = (x >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _add(sums, even, odd, x, y):
    """sums[m, t, w] + the products of values [t, w] with x and y, [m, t], which belong to k even and odd."""
    sums += x[:, :, None] * (even - 136.0)[None, :, :]
    return sums + y[:, :, None] * (odd - 2056.0)[None, :, :]


@triton.jit
def _scaled(acc, sums, x, scale, zero, i: tl.constexpr, DTYPE: tl.constexpr):
    """Column i of words: acc + (sums - (zero - 8) x) scale, of a group."""
    correction = (four(zero, i, DTYPE) - 8.0)[None, :, :] * x[:, :, None]
    return acc + (sums - correction) * four(scale, i, DTYPE)[None, :, :]


@triton.jit
def int4_gemv(a, b, scales, zeros, bias, out, M, N, K, group, stride_am, b_pitch, scales_pitch, zeros_pitch,
              has_scales, has_zeros, stride_bias_m, stride_bias_n, stride_om, stride_on, alpha, beta, activation,
              has_bias, ROWS: tl.constexpr, COLS: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
              DTYPE: tl.constexpr, ONES: tl.constexpr, EIGHTS: tl.constexpr):  # fmt: skip
    """One program: a, of at most ROWS rows, times COLS columns, PIECES pieces of PIECE k, each in one group, at a time;
    of a piece eight lines of a pair of k at a time. a is words of two k; the rest as `int4_accumulate` says."""
    WORDS: tl.constexpr = COLS // 4
    LINES: tl.constexpr = 8 * PIECES
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    columns_inside = (words < N * 4)[None, :]
    line = tl.arange(0, LINES)
    m = tl.arange(0, ROWS)
    acc0 = tl.zeros((ROWS, LINES, WORDS), dtype=tl.float32)
    acc1 = tl.zeros((ROWS, LINES, WORDS), dtype=tl.float32)
    acc2 = tl.zeros((ROWS, LINES, WORDS), dtype=tl.float32)
    acc3 = tl.zeros((ROWS, LINES, WORDS), dtype=tl.float32)
    for first in range(0, K, PIECES * PIECE):
        begin = first + line // 8 * PIECE  # of the line's piece
        inside = begin < K
        pair = (begin // 2 + line % 8).to(tl.int64)
        a_at = a + m[:, None] * stride_am + pair[None, :]
        b_at = b + pair[:, None] * (b_pitch * 4) + words[None, :]
        in_a = (m < M)[:, None] & inside[None, :]
        in_b = inside[:, None] & columns_inside
        loaded = ()
        for i in tl.static_range(PIECE // 16):
            loaded = loaded + (
                (tl.load(a_at + i * 8, mask=in_a, other=0), tl.load(b_at + i * 8 * (b_pitch * 4), mask=in_b, other=0)),
            )
        g = (begin // group)[:, None].to(tl.int64)
        scale = load_four(scales, words[None, :], N * 4 * has_scales, g, scales_pitch * 4, in_b, ONES)
        zero = load_four(zeros, words[None, :], N * 4 * has_zeros, g, zeros_pitch * 4, in_b, EIGHTS)
        x_sum = tl.zeros((ROWS, LINES), dtype=tl.float32)
        sum0 = tl.zeros((ROWS, LINES, WORDS), dtype=tl.float32)
        sum1 = tl.zeros((ROWS, LINES, WORDS), dtype=tl.float32)
        sum2 = tl.zeros((ROWS, LINES, WORDS), dtype=tl.float32)
        sum3 = tl.zeros((ROWS, LINES, WORDS), dtype=tl.float32)
        for i in tl.static_range(PIECE // 16):
            x, y = _pair(loaded[i][0], DTYPE)
            e0, e1, e2, e3 = even_values(loaded[i][1])
            o0, o1, o2, o3 = odd_values(loaded[i][1])
            sum0 = _add(sum0, e0, o0, x, y)
            sum1 = _add(sum1, e1, o1, x, y)
            sum2 = _add(sum2, e2, o2, x, y)
            sum3 = _add(sum3, e3, o3, x, y)
            x_sum += x + y
        acc0 = _scaled(acc0, sum0, x_sum, scale, zero, 0, DTYPE)
        acc1 = _scaled(acc1, sum1, x_sum, scale, zero, 1, DTYPE)
        acc2 = _scaled(acc2, sum2, x_sum, scale, zero, 2, DTYPE)
        acc3 = _scaled(acc3, sum3, x_sum, scale, zero, 3, DTYPE)
    both = tl.join(tl.join(tl.sum(acc0, 1), tl.sum(acc2, 1)), tl.join(tl.sum(acc1, 1), tl.sum(acc3, 1)))
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    finish(both.reshape(ROWS, COLS), bias, out, m, cols, M, N * 16, stride_bias_m, stride_bias_n, stride_om, stride_on,
           alpha, beta, activation, has_bias, "matrix")  # fmt: skip


# --- The plan ---

ROWS_AXIS = (1, 2, 4)  # of a, at most


def _plan(point: Point) -> Plan:
    c = point.config
    fewer = max((rows for rows in ROWS_AXIS if rows < point.rows), default=0)
    programs = ceil_div(N, c.cols)
    args = (
        word_args(point)
        | INT4.epilogue_args(point.dtype)
        | dict(
            a=Pointer(A, "i32", aligned=False),
            out=Pointer(INT4.out, out_dtype(point), aligned=False),
            stride_am=Int(A.stride(0) // 2, "i64"),
            stride_bias_m=Int(INT4.bias.stride(0), "i64"),
            stride_bias_n=Int(INT4.bias.stride(1), "i64"),
            stride_om=Int(INT4.out.stride(0), "i64"),
            stride_on=Const(1),
            ROWS=Const(point.rows),
            COLS=Const(c.cols),
            PIECES=Const(c.pieces),
            PIECE=Const(c.piece),
            DTYPE=Const(TYPES[point.dtype]),
        )
    )
    launch = Launch(int4_gemv, args, grid=(programs, 1, 1), num_warps=c.num_warps)
    # Nanoseconds of the busiest multiprocessor, at some 224 instructions each, and of memory.
    unpacked = ceil_div(programs, device.sm_count) * c.cols * (K + c.piece * c.pieces) * (4 + point.rows) // 224
    return Plan(
        constraints=(
            require((M > fewer) & (M <= point.rows), f"{fewer} < M <= {point.rows}"),
            INT4.fits_32_bits(),
            batch_invariant("it takes a few rows only"),
            require((A.stride(1) == 1) & (A.alignment >= 4) & (A.stride(0) % 2 == 0),
                    "a row-major, on a 4-byte boundary, its rows a multiple of 2 elements apart"),
            require(INT4.out.stride(1) == 1, "out row-major"),
            *reads_words(B, SCALES, ZEROS),
            require((GROUP % c.piece == 0) & (K % c.piece == 0), f"groups (without scales: K) of {c.piece}"),
        ),
        serves={"dtype": (DTYPE_AXIS.index(point.dtype),), "out": (OUT_AXIS.index(point.out),)},
        launches=(launch,),
        cost=3_000_000 + 1200 * maximum(unpacked, INT4.traffic() // 4200),
    )  # fmt: skip


# --- The grid ---


def _config(cols: int, pieces: int, piece: int, num_warps: int) -> Config:
    shape = dict(cols=cols, pieces=pieces, piece=piece, num_warps=num_warps)
    return Config(f"gemv_{cols}x{pieces}x{piece}_w{num_warps}", shape)


_CONFIGS = (_config(32, 16, 128, 8), _config(16, 16, 128, 4), _config(32, 16, 32, 8))
KERNELS = (
    Kernel("int4_gemv", OP, {"dtype": DTYPE_AXIS, "out": OUT_AXIS[:1], "rows": ROWS_AXIS},
           dict.fromkeys((80, 90, 100), _CONFIGS), _plan),
)  # fmt: skip
