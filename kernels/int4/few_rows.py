"""Few rows, on tensor cores by mma.sync: out^T = weight^T a^T, each warp another part of K.

A lane loads words of four columns by two k, and makes of them the very registers that its tensor core reads: of two
words, eight bits of each side by side, every `and` gives a pair of values of one column, each over an exponent that
makes it 128 + value (bfloat16) or 1024 + value (float16), exactly. So unpacking takes one instruction for each weight,
whatever the rows, and nothing moves between lanes. Which k a pair has is a matter of which rows of a stand there.

The tensor cores' sums of a group are scaled in float32; what is not the value in them (128 and the group's zero) is
that times the group's sum of a, which a tile of ones gives.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from tk.aot.expr import ceil_div, device, maximum, select
from tk.aot.spec import Config, Const, Int, Kernel, Launch, Plan, Point, require
from tk.kernels.epilogue import finish
from tk.kernels.gemm.problem import OUT_AXIS
from tk.kernels.hopper.cluster import cluster_bases
from tk.kernels.int4.gemv import few_rows_args, few_rows_plan, few_rows_work
from tk.kernels.int4.op import DTYPE_AXIS, GROUP, INT4, OP, B
from tk.kernels.int4.unpack import four, load_scales

M, N, K = INT4.M, INT4.N, INT4.K

# --- The device functions ---


@gluon.constexpr_function
def _words_layout(pairs, count, vector, warps, blocks):
    """Of [slices of K, pairs of k, words, or rows of a]: four lanes have four pairs in a row each, and eight `vector`
    of the `count` words in a row."""

    def doublings(dim, first, end):
        steps = [first << i for i in range((end // first).bit_length() - 1)]
        return [[step if d == dim else 0 for d in range(3)] for step in steps]

    # What a thread has side by side in memory comes first, so that it is loaded at once.
    registers = doublings(2, 1, vector) + doublings(1, 1, 4) + doublings(1, 16, pairs) + doublings(2, 8 * vector, count)
    lanes = doublings(1, 4, 16) + doublings(2, vector, 8 * vector)
    across = doublings(0, warps, warps * blocks)
    return gl.DistributedLinearLayout(registers, lanes, doublings(0, 1, warps), across, [warps * blocks, pairs, count])


@gluon.constexpr_function
def _mma_layout(warps, blocks):
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8], cluster_bases(blocks, 0, 3))


@gluon.constexpr_function
def _exchange(slices, columns, warps, blocks):
    """A thread has all slices of a place; every block of the cluster has its share of the columns."""
    lanes = min(32, columns // blocks)
    down = min(warps, columns // blocks // lanes)
    return gl.BlockedLayout([slices, 1, 1], [1, lanes, 32 // lanes], [1, down, warps // down], [1, 2, 0],
                            cga_layout=cluster_bases(blocks, 1, 3))  # fmt: skip


@gluon.jit
def _half(x, i: gl.constexpr, DTYPE: gl.constexpr):
    """The first or second 16 bits of words, as DTYPE."""
    return (x >> (16 * i)).to(gl.int16).to(DTYPE, bitcast=True)


@gluon.jit
def _values(w, nibbles, SLICES: gl.constexpr, CHUNKS: gl.constexpr, VECTOR: gl.constexpr, EXPONENT: gl.constexpr,
            DTYPE: gl.constexpr):  # fmt: skip
    """Words [SLICES, 16 CHUNKS, 8 VECTOR] -> values over EXPONENT, [SLICES, 32 VECTOR columns, 32 CHUNKS k], in an
    order of columns and of k that `_columns` and `_rows` share."""
    pairs = w.reshape([SLICES, CHUNKS, 4, 2, 2, 8 * VECTOR]).permute((0, 1, 2, 3, 5, 4))
    first, second = gl.split(pairs)
    low = (first & 0xFFFF) | (second << 16)  # columns 0 and 1 of both
    high = ((first >> 16) & 0xFFFF) | (second & -0x10000)  # columns 2 and 3
    both = gl.join(low, high)
    even = gl.join(both & nibbles, (both >> 8) & nibbles)
    odd = gl.join((both >> 4) & nibbles, (both >> 12) & nibbles)
    x = gl.join(even, odd) | EXPONENT
    x = gl.join(_half(x, 0, DTYPE), _half(x, 1, DTYPE))
    # Warp, chunk, lane of four, step, lane of eight, word, pair of columns, column of it, parity of k, word of two.
    x = x.reshape([SLICES, CHUNKS, 4, 2, 8, VECTOR, 2, 2, 2, 2]).permute((0, 5, 6, 7, 4, 1, 3, 8, 2, 9))
    return x.reshape([SLICES, 32 * VECTOR, 32 * CHUNKS])


@gluon.jit
def _rows(x, SLICES: gl.constexpr, CHUNKS: gl.constexpr, ROWS: gl.constexpr, DTYPE: gl.constexpr):
    """Words of a, [SLICES, 16 CHUNKS, ROWS] -> [SLICES, 32 CHUNKS k, ROWS]."""
    both = gl.join(_half(x, 0, DTYPE), _half(x, 1, DTYPE))
    both = both.reshape([SLICES, CHUNKS, 4, 2, 2, ROWS, 2]).permute((0, 1, 3, 6, 2, 4, 5))
    return both.reshape([SLICES, 32 * CHUNKS, ROWS])


@gluon.jit
def _columns(x0, x1, x2, x3, SLICES: gl.constexpr, VECTOR: gl.constexpr):
    """[SLICES, 8 VECTOR] of each column of words -> [SLICES, 32 VECTOR]."""
    x = gl.join(gl.join(x0, x2), gl.join(x1, x3))
    x = x.reshape([SLICES, 8, VECTOR, 2, 2]).permute((0, 2, 3, 4, 1))
    return x.reshape([SLICES, 32 * VECTOR])


@gluon.jit
def _four_columns(x, SLICES: gl.constexpr, VECTOR: gl.constexpr, DTYPE: gl.constexpr):
    """Words of 64 bits [SLICES, 8 VECTOR], four 16-bit floats each -> fp32 [SLICES, 32 VECTOR]."""
    return _columns(four(x, 0, DTYPE), four(x, 1, DTYPE), four(x, 2, DTYPE), four(x, 3, DTYPE), SLICES, VECTOR)


@gluon.jit
def _for_each_column(x, SLICES: gl.constexpr, COLS: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """[SLICES, 16, ROWS], all sixteen alike -> [SLICES, COLS, ROWS]."""
    x = x.reshape([SLICES, 1, 16, ROWS]).broadcast_to([SLICES, COLS // 16, 16, ROWS])
    return gl.convert_layout(x.reshape([SLICES, COLS, ROWS]), LAYOUT, assert_trivial=True)


@gluon.jit
def _load(a, weight, first, size, group_shift, of_a, of_b, slice_a, slice_b, slice_s, word_b, word_s,
          PIECE: gl.constexpr, PIECES: gl.constexpr, FORMAT: gl.constexpr):  # fmt: skip
    """Of each piece of the step that begins at k = first: words of b and of a, scales, zeros. of_a, of_b: from the
    step's first words. slice_*, word_*: numbers, in the layouts of what is loaded."""
    SLICE: gl.constexpr = PIECES * PIECE
    loaded = ()
    for i in gl.static_range(PIECES):
        k = first + i * PIECE
        in_b = (slice_b * SLICE < size.K - k) & (word_b < size.N * 4)
        w = gl.load(weight.b + k // 2 * (weight.b_pitch * 4) + of_b, mask=in_b, other=0, eviction_policy="evict_first")
        x = gl.load(a + k // 2 + of_a, mask=slice_a * SLICE < size.K - k, other=0)
        in_s = (slice_s * SLICE < size.K - k) & (word_s < size.N * 4)
        g = ((k + slice_s * SLICE) >> group_shift).to(gl.int64)
        scale, zero = load_scales(weight, word_s, size.N, g, in_s, FORMAT)
        loaded = loaded + ((w, x, scale, zero),)
    return loaded


@gluon.jit
def _add(acc, loaded, nibbles, ones, SLICES: gl.constexpr, COLS: gl.constexpr, ROWS: gl.constexpr,
         PIECE: gl.constexpr, PIECES: gl.constexpr, DTYPE: gl.constexpr, EXPONENT: gl.constexpr, OFFSET: gl.constexpr,
         MMA: gl.constexpr):  # fmt: skip
    """acc [SLICES, COLS, ROWS] plus what was loaded."""
    VECTOR: gl.constexpr = COLS // 32
    CHUNKS: gl.constexpr = PIECE // 32
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(2, MMA)
    for i in gl.static_range(PIECES):
        left = _values(loaded[i][0], nibbles, SLICES, CHUNKS, VECTOR, EXPONENT, DTYPE)
        left = gl.convert_layout(left, LEFT, assert_trivial=True)
        right = _rows(loaded[i][1], SLICES, CHUNKS, ROWS, DTYPE)
        right = gl.convert_layout(right, RIGHT, assert_trivial=True)
        scale = _four_columns(loaded[i][2], SLICES, VECTOR, DTYPE)
        scale = gl.convert_layout(scale, OF_COLUMNS, assert_trivial=True)
        zero = _four_columns(loaded[i][3], SLICES, VECTOR, DTYPE)
        zero = gl.convert_layout(zero, OF_COLUMNS, assert_trivial=True)
        sums = mma_v2(left, right, gl.zeros([SLICES, COLS, ROWS], gl.float32, MMA))
        total = mma_v2(ones, right, gl.zeros([SLICES, 16, ROWS], gl.float32, MMA))
        total = _for_each_column(total, SLICES, COLS, ROWS, MMA)
        acc += (sums - (OFFSET + zero)[:, :, None] * total) * scale[:, :, None]
    return acc


@gluon.jit
def int4_few_rows(a, weight, bias, out, size, group_shift, stride_am, nibbles, stride_om, stride_on, epilogue,
                  ROWS: gl.constexpr, COLS: gl.constexpr, PIECE: gl.constexpr, PIECES: gl.constexpr,
                  AHEAD: gl.constexpr, BLOCKS: gl.constexpr, FORMAT: gl.constexpr, EXPONENT: gl.constexpr,
                  OFFSET: gl.constexpr):  # fmt: skip
    """One cluster of BLOCKS programs: ROWS rows of a times COLS columns. Each of their warps has a slice of a step of
    K: PIECES pieces, each PIECE long and in one group. AHEAD: the next step is loaded before this one is added up. a
    is words of two k, stride_am in four of them; the rest as of `int4_accumulate`. EXPONENT: of two values, which are
    OFFSET too large with it."""
    SLICES: gl.constexpr = gl.num_warps() * BLOCKS
    WORDS: gl.constexpr = COLS // 4
    VECTOR: gl.constexpr = COLS // 32
    PAIRS: gl.constexpr = PIECE // 2
    SLICE: gl.constexpr = PIECES * PIECE
    OF_B: gl.constexpr = _words_layout(PAIRS, WORDS, VECTOR, gl.num_warps(), BLOCKS)
    OF_A: gl.constexpr = _words_layout(PAIRS, ROWS, 1, gl.num_warps(), BLOCKS)
    MMA: gl.constexpr = _mma_layout(gl.num_warps(), BLOCKS)
    OF_SCALES: gl.constexpr = gl.SliceLayout(1, OF_B)

    row_tiles = gl.cdiv(size.M, ROWS)  # side by side, so that b comes from memory once
    tile = gl.program_id(0) // row_tiles
    first_row = gl.program_id(0) % row_tiles * ROWS
    slice_b = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, OF_B)))[:, None, None]
    pair_b = gl.arange(0, PAIRS, gl.SliceLayout(0, gl.SliceLayout(2, OF_B)))[None, :, None]
    word_b = tile * WORDS + gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, OF_B)))[None, None, :]
    slice_a = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, OF_A)))[:, None, None]
    pair_a = gl.arange(0, PAIRS, gl.SliceLayout(0, gl.SliceLayout(2, OF_A)))[None, :, None]
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, OF_A)))[None, None, :]
    row = gl.minimum(row, size.M - 1).to(gl.int64)  # what is read twice is not stored
    slice_s = gl.arange(0, SLICES, gl.SliceLayout(1, OF_SCALES))[:, None]
    word_s = tile * WORDS + gl.arange(0, WORDS, gl.SliceLayout(0, OF_SCALES))[None, :]

    # From a step's first row of b, in 32 bits.
    of_b = ((slice_b * (SLICE // 2) + pair_b) * (weight.b_pitch * 4).to(gl.int32) + word_b).to(gl.uint32)
    of_a = row * (stride_am * 4) + (slice_a * (SLICE // 2) + pair_a)
    ones = gl.full([SLICES, 16, PIECE], 1.0, FORMAT.DTYPE, gl.DotOperandLayout(0, MMA, 2))
    acc = gl.zeros([SLICES, COLS, ROWS], gl.float32, MMA)
    STEP: gl.constexpr = SLICES * SLICE
    if AHEAD:
        loaded = _load(a, weight, 0, size, group_shift, of_a, of_b, slice_a, slice_b, slice_s, word_b, word_s, PIECE,
                       PIECES, FORMAT)  # fmt: skip
    for first in range(0, size.K, STEP):
        # Past the end nothing is loaded.
        following = _load(a, weight, first + STEP if AHEAD else first, size, group_shift, of_a, of_b, slice_a, slice_b,
                          slice_s, word_b, word_s, PIECE, PIECES, FORMAT)  # fmt: skip
        acc = _add(acc, loaded if AHEAD else following, nibbles, ones, SLICES, COLS, ROWS, PIECE, PIECES, FORMAT.DTYPE,
                   EXPONENT, OFFSET, MMA)  # fmt: skip
        if AHEAD:
            loaded = following
    whole = gl.sum(gl.convert_layout(acc, _exchange(SLICES, COLS, gl.num_warps(), BLOCKS)), axis=0)
    i = gl.arange(0, COLS, gl.SliceLayout(1, whole.type.layout))
    # Word, pair of columns, column of it: as `_columns` has them.
    cols = tile * COLS + 4 * (i % 8 * VECTOR + i // 32) + i // 16 % 2 * 2 + i // 8 % 2
    rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, whole.type.layout))
    finish(whole, bias, out, cols, rows, size.N * 16, size.M, stride_on, stride_om, epilogue, "matrix")


# --- The plan ---

# Of bfloat16 and float16: the exponent with which four bits are a number, twice, and what it adds.
_EXPONENTS = {"bf16": (0x4300_4300, 128), "fp16": (0x6400_6400, 1024)}
ROWS_AXIS = (8, 16, 32)  # of a tile
_MOST_ROWS = 128  # from here on the weight is unpacked by itself


# Groups are of 32, 64 or 128, or there is one.
_GROUP_SHIFT = select(GROUP == 32, 5, select(GROUP == 64, 6, select(GROUP == 128, 7, 31)))


def _plan(point: Point) -> Plan | None:
    c = point.config
    if not c.least <= point.rows <= c.rows:
        return None
    most = point.rows if point.rows < ROWS_AXIS[-1] else _MOST_ROWS
    exponent, offset = _EXPONENTS[point.dtype]
    programs = ceil_div(N, c.cols) * ceil_div(M, point.rows)
    args = few_rows_args(point, swap_ab=True) | dict(
        nibbles=Int(0xF000F),
        group_shift=Int(_GROUP_SHIFT),
        PIECES=Const(c.pieces),
        AHEAD=Const(c.ahead),
        BLOCKS=Const(c.cluster),
        EXPONENT=Const(exponent),
        OFFSET=Const(offset),
    )
    launch = Launch(int4_few_rows, args, grid=(programs, 1, 1), num_warps=c.num_warps, num_ctas=c.cluster)
    waves = ceil_div(programs * c.cluster, device.sm_count)
    weights = waves * (c.cols // c.cluster) * K
    work = few_rows_work(point, waves, weights)
    # Nanoseconds, at 110 instructions each, of which a weight takes 1.7 and its address and scale's the rest; and rows.
    unpacked = weights * ((170 + 3800 // c.cols) * (7 + point.rows // 8) // 8) // 11000
    # And a launch, and what the slices take to become one. Of equals the one with the fewest scales.
    guess = 3_700_000 + 3_200_000 // c.piece + 1200 * maximum(unpacked, work.roofline(point))
    constraints = (
        require((GROUP == 32) | (GROUP == 64) | (GROUP == 128) | (GROUP >= K), "groups of 32, 64 or 128, or one"),
        require(B.stride(0) < 2**20, "b's rows less than 2**20 bytes apart"),
    )
    return few_rows_plan(point, launch, ROWS_AXIS, most, work, guess, constraints)


# --- The grid ---


def _config(cols: int, blocks: int, piece: int, pieces: int, num_warps: int, rows: int = 16, least: int = 8,
            ahead: bool = False) -> Config:  # fmt: skip
    """cols: of a cluster of `blocks`. rows: of a tile, at most; least: at least."""
    params = dict(cols=cols, cluster=blocks, piece=piece, pieces=pieces, num_warps=num_warps, rows=rows, least=least,
                  ahead=ahead)  # fmt: skip
    name = f"few_rows_{cols}x{piece}_p{pieces}_w{num_warps}{'_ahead' if ahead else ''}"
    return Config(name + (f"_c{blocks}" if blocks > 1 else ""), params)


# With four columns of words a lane has 16 bytes of a row; with groups of 32 and 64, slices of as many bytes.
_CONFIGS = (
    _config(32, 1, 128, 2, 16, rows=8),
    _config(32, 1, 128, 1, 16, rows=8, ahead=True),
    _config(32, 1, 128, 1, 8, rows=8, ahead=True),
    _config(64, 1, 128, 1, 4, rows=32, least=32),
    _config(64, 2, 128, 1, 4, rows=32, least=32),
    _config(64, 2, 128, 1, 8, rows=32, least=32),
    _config(64, 1, 128, 1, 8, ahead=True),
    _config(64, 2, 128, 1, 8, ahead=True),
    _config(64, 2, 128, 1, 16, rows=8),
    _config(128, 2, 128, 1, 8, rows=8),
    _config(128, 4, 128, 1, 4, rows=8),
    _config(64, 2, 64, 2, 8),
    _config(64, 2, 32, 4, 8),
)
KERNELS = (
    Kernel("int4_few_rows", OP, {"dtype": DTYPE_AXIS, "out": OUT_AXIS[:1], "rows": ROWS_AXIS}, {90: _CONFIGS}, _plan),
)
