"""One to four rows, without tensor cores: as fast as b comes from memory.

A thread has a few words of b next to each other, four columns of two k each, and eight of a group's lines of words,
one after the other; so that scaling their sum costs little. What is summed is x (value - 8), in fp32: the group's scale
is applied to the sum, and of its zero what is not 8 to the sum of x.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tk.aot.expr import Expr, ceil_div, device, maximum
from tk.aot.spec import Arg, Bundle, Config, Const, Constraint, Int, Kernel, Launch, Plan, Point, Pointer, require
from tk.kernels.epilogue import finish
from tk.kernels.gemm.cost import Work, predict_or
from tk.kernels.gemm.problem import OUT_AXIS, batch_invariant, out_dtype
from tk.kernels.int4.op import (
    DTYPE_AXIS,
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
from tk.kernels.int4.tile import word_args
from tk.kernels.int4.unpack import even_values, four, load_scales, odd_values

M, N, K = INT4.M, INT4.N, INT4.K

# --- The device functions ---


@gluon.constexpr_function
def _layout(words, vector, num_warps):
    """Of [rows, threads along K, words]: a thread has all rows and `vector` words."""
    across = words // vector
    return gl.BlockedLayout([1, 1, vector], [1, 32 // across, across], [1, num_warps, 1], [2, 1, 0])


@gluon.jit
def _pair(x, DTYPE: gl.constexpr):
    """Words of two 16-bit floats: both, as fp32."""
    first = x.to(gl.int16).to(DTYPE, bitcast=True)
    second = (x >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return first.to(gl.float32), second.to(gl.float32)


@gluon.jit
def _add(sums, even, odd, x, y):
    """sums[m, t, w] + x[m, t] even[t, w] + y[m, t] odd[t, w]."""
    sums += x[:, :, None] * even[None, :, :]
    return sums + y[:, :, None] * odd[None, :, :]


@gluon.jit
def _scaled(sums, x, scale, zero, i: gl.constexpr, DTYPE: gl.constexpr):
    """A piece's sums of x (128 + value), of column i of words, as those of x (value - zero) scale. x: its sums."""
    return (sums - (128.0 + four(zero, i, DTYPE))[None, :, :] * x[:, :, None]) * four(scale, i, DTYPE)[None, :, :]


@gluon.jit
def int4_gemv(a, weight, bias, out, size, stride_am, stride_om, stride_on, epilogue, ROWS: gl.constexpr,
              COLS: gl.constexpr, VECTOR: gl.constexpr, PIECE: gl.constexpr, LINES: gl.constexpr,
              FORMAT: gl.constexpr):  # fmt: skip
    """One program: a, of at most ROWS rows, times COLS columns. Of a piece of K, PIECE long and in one group, a thread
    has LINES lines of a pair of k. a is words of two k, stride_am in four of them; the rest as of
    `int4_accumulate`."""
    WORDS: gl.constexpr = COLS // 4
    THREADS: gl.constexpr = PIECE // 2 // LINES  # of a piece
    DEPTH: gl.constexpr = gl.num_warps() * 32 * VECTOR // WORDS  # threads along K
    STEP: gl.constexpr = DEPTH * LINES * 2  # of K
    L: gl.constexpr = _layout(WORDS, VECTOR, gl.num_warps())
    OF_A: gl.constexpr = gl.SliceLayout(2, L)
    OF_B: gl.constexpr = gl.SliceLayout(0, L)
    m = gl.minimum(gl.arange(0, ROWS, gl.SliceLayout(1, OF_A)), size.M - 1)  # what is read twice is not stored
    a_t = gl.arange(0, DEPTH, gl.SliceLayout(0, OF_A))
    b_t = gl.arange(0, DEPTH, gl.SliceLayout(1, OF_B))
    words = (gl.program_id(0) * WORDS + gl.arange(0, WORDS, gl.SliceLayout(0, OF_B)))[None, :]
    # Of a piece's lines the first THREADS come first.
    a_at = a + m.to(gl.int64)[:, None] * (stride_am * 4) + (a_t // THREADS * (PIECE // 2) + a_t % THREADS)[None, :]
    b_line = b_t // THREADS * (PIECE // 2) + b_t % THREADS
    b_at = weight.b + b_line.to(gl.int64)[:, None] * (weight.b_pitch * 4) + words
    acc0 = gl.zeros([ROWS, DEPTH, WORDS], gl.float32, L)
    acc1 = gl.zeros([ROWS, DEPTH, WORDS], gl.float32, L)
    acc2 = gl.zeros([ROWS, DEPTH, WORDS], gl.float32, L)
    acc3 = gl.zeros([ROWS, DEPTH, WORDS], gl.float32, L)
    for first in range(0, size.K, STEP):
        in_a = (a_t // THREADS * PIECE < size.K - first)[None, :]
        in_b = (b_t // THREADS * PIECE < size.K - first)[:, None] & (words < size.N * 4)
        loaded = ()
        for i in gl.static_range(LINES):
            w = gl.load(b_at + (weight.b_pitch * 4) * (i * THREADS), mask=in_b, other=0)
            x = gl.load(a_at + i * THREADS, mask=in_a, other=0)
            loaded = loaded + ((w, x),)
        g = ((first + b_t // THREADS * PIECE) // weight.group).to(gl.int64)[:, None]
        scale, zero = load_scales(weight, words, size.N, g, in_b, FORMAT)
        sum0 = gl.zeros([ROWS, DEPTH, WORDS], gl.float32, L)
        sum1 = gl.zeros([ROWS, DEPTH, WORDS], gl.float32, L)
        sum2 = gl.zeros([ROWS, DEPTH, WORDS], gl.float32, L)
        sum3 = gl.zeros([ROWS, DEPTH, WORDS], gl.float32, L)
        x_sum = gl.zeros([ROWS, DEPTH], gl.float32, OF_A)
        for i in gl.static_range(LINES):
            x, y = _pair(loaded[i][1], FORMAT.DTYPE)
            e0, e1, e2, e3 = even_values(loaded[i][0], weight.even_mask)
            o0, o1, o2, o3 = odd_values(loaded[i][0], weight.even_mask)
            sum0 = _add(sum0, e0, o0, x, y)
            sum1 = _add(sum1, e1, o1, x, y)
            sum2 = _add(sum2, e2, o2, x, y)
            sum3 = _add(sum3, e3, o3, x, y)
            x_sum += x + y
        acc0 += _scaled(sum0, x_sum, scale, zero, 0, FORMAT.DTYPE)
        acc1 += _scaled(sum1, x_sum, scale, zero, 1, FORMAT.DTYPE)
        acc2 += _scaled(sum2, x_sum, scale, zero, 2, FORMAT.DTYPE)
        acc3 += _scaled(sum3, x_sum, scale, zero, 3, FORMAT.DTYPE)
        a_at += STEP // 2
        b_at += weight.b_pitch * (4 * STEP // 2)
    left = gl.join(gl.sum(acc0, axis=1), gl.sum(acc2, axis=1))
    right = gl.join(gl.sum(acc1, axis=1), gl.sum(acc3, axis=1))
    whole = gl.join(left, right).reshape([ROWS, COLS])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, whole.type.layout))
    cols = gl.program_id(0) * COLS + gl.arange(0, COLS, gl.SliceLayout(0, whole.type.layout))
    finish(whole, bias, out, rows, cols, size.M, size.N * 16, stride_om, stride_on, epilogue, "matrix")


# --- The plan ---

ROWS_AXIS = (1, 2, 4)  # of a, at most


_LINES = 8  # of a piece, that a thread has one after the other


def few_rows_plan(
    point: Point,
    launch: Launch,
    rows_axis: tuple[int, ...],
    most: int,
    work: Work,
    guess: Expr,
    constraints: tuple[Constraint, ...] = (),
) -> Plan:
    """The plan of a kernel for up to `most` rows, and for more than the value of `rows_axis` before the point's is
    for."""
    fewer = max((rows for rows in rows_axis if rows < point.rows), default=0)
    constraints = (
        require((M > fewer) & (M <= most), f"{fewer} < M <= {most}"),
        INT4.fits_32_bits(),
        batch_invariant("it takes a few rows only"),
        row_major(A, 8),
        require(INT4.out.stride(1) == 1, "out row-major"),
        *reads_words(B, SCALES, ZEROS),
        whole_groups(point.config.piece),
        *constraints,
    )
    return work.plan(predict_or(point, work, guess), (launch,), serves(point), constraints)


def few_rows_args(point: Point, swap_ab: bool = False) -> dict[str, Arg | Bundle]:
    """What such kernels have in common."""
    return word_args(point) | dict(
        a=Pointer(A, "i32"),
        out=Pointer(INT4.out, out_dtype(point), aligned=False),
        bias=INT4.bias_pointer(point.dtype),
        epilogue=INT4.epilogue(swap_ab),
        stride_am=Int(A.stride(0) // 8, "i64"),
        stride_om=Int(INT4.out.stride(0), "i64"),
        stride_on=Const(1),
        ROWS=Const(point.rows),
        COLS=Const(point.config.cols),
        PIECE=Const(point.config.piece),
    )


def few_rows_work(point: Point, waves: Expr, weights: Expr) -> Work:
    """weights: that the busiest multiprocessor unpacks."""
    return Work(INT4, waves, weights // 1024, 0, INT4.traffic(), tile=(point.rows, point.config.cols), boxes=(1, 1))


def _plan(point: Point) -> Plan | None:
    c = point.config
    if point.rows > c.rows:
        return None
    programs = ceil_div(N, c.cols)
    vector = 4 if point.rows < 4 else 2  # else registers do not last
    args = few_rows_args(point) | dict(VECTOR=Const(vector), LINES=Const(_LINES))
    launch = Launch(int4_gemv, args, grid=(programs, 1, 1), num_warps=c.num_warps)
    # Weights that the busiest multiprocessor unpacks: nanoseconds, at some 224 instructions each, and of memory.
    waves = ceil_div(programs, device.sm_count)
    weights = waves * c.cols * (K + 2048)
    work = few_rows_work(point, waves, weights)
    unpacked = weights * (4 + point.rows) // 224
    # Of equals the one with whole sectors of b and the fewest scales.
    guess = 3_000_000 + 3_200_000 // c.cols + 3_200_000 // c.piece + 1200 * maximum(unpacked, INT4.traffic() // 4200)
    return few_rows_plan(point, launch, ROWS_AXIS, point.rows, work, guess)


# --- The grid ---


def _config(cols: int, piece: int, num_warps: int, rows: int) -> Config:
    """rows: of a, at most."""
    return Config(f"gemv_{cols}x{piece}_w{num_warps}", dict(cols=cols, piece=piece, num_warps=num_warps, rows=rows))


_CONFIGS = (_config(32, 128, 8, 4), _config(32, 128, 16, 1), _config(16, 128, 8, 2), _config(32, 32, 8, 4))
KERNELS = (
    Kernel("int4_gemv", OP, {"dtype": DTYPE_AXIS, "out": OUT_AXIS[:1], "rows": ROWS_AXIS},
           {90: _CONFIGS} | dict.fromkeys((80, 100), (_CONFIGS[0], _CONFIGS[-1])), _plan),
)  # fmt: skip
