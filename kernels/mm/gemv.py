"""Products of a few rows without tensor cores, for every GPU: all that counts is how fast b comes from memory.

Tensor cores take 8 rows or more, through shared memory. Here each thread loads its own part of b into registers, and
the many threads of a multiprocessor keep more loads in flight than a pipeline in shared memory does. It pays for one or
two rows where b is K-major (contiguous along K), and for up to 8 where the rows of b begin at odd addresses, of which
nothing but single elements can be loaded.

`mm_gemv` has all of K in a program. `mm_gemv_split_k` splits it over several where there are few columns; their partial
sums go the way of split_k.py. Both share one loop, `_products`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tk.aot.expr import Expr, ceil_div, const, device
from tk.aot.spec import (
    ITEMSIZE,
    Arg,
    Config,
    Const,
    Constraint,
    Int,
    Kernel,
    Launch,
    Plan,
    Point,
    Pointer,
    require,
)
from tk.kernels.epilogue import finish
from tk.kernels.gemm.cost import Work, predict
from tk.kernels.gemm.pointer import ARCHS, masked_load
from tk.kernels.gemm.problem import (
    DTYPE_AXIS,
    EPILOGUE_AXIS,
    OUT_AXIS,
    PRECISION_AXIS,
    batch_invariant,
    makes_sense,
    out_dtype,
    serves,
)
from tk.kernels.hopper.dependent_launch import launch_dependents, wait_for_prerequisites
from tk.kernels.mm.op import MM, OP, OUT, A, B
from tk.kernels.mm.split_k import SplitK, store_partials

M, N, K = MM.M, MM.N, MM.K

# --- The device functions ---


@gluon.constexpr_function
def _layout(k_major, cols, k_threads, k_per_thread, num_warps):
    """Of [rows, cols, k_threads, k_per_thread]: a thread has all of its values of k. Neighbours in memory belong to
    neighbours among the threads, which lie along K or along the columns."""
    if not k_major:
        return gl.BlockedLayout([1, 1, 1, k_per_thread], [1, 32, 1, 1], [1, 1, num_warps, 1], [1, 3, 2, 0])
    warps = min(num_warps, k_threads // 32)
    others = num_warps // warps
    return gl.BlockedLayout([1, cols // others, 1, k_per_thread], [1, 1, 32, 1], [1, others, warps, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def _along(dim, layout):
    """Of a vector that lies along `dim` of a tensor [outer, k_threads, k_per_thread]."""
    for other in (2, 1, 0):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _ks(K_THREADS: gl.constexpr, K_PER_THREAD: gl.constexpr, VECTOR: gl.constexpr, L: gl.constexpr):
    """Of a k block: the first k of each thread, [1, k_threads, 1], and how far from it its others are,
    [1, 1, k_per_thread]. These are constants to the compiler, which puts them into the loads' addresses."""
    u = gl.arange(0, K_PER_THREAD, _along(2, L))
    return (
        (gl.arange(0, K_THREADS, _along(1, L)) * VECTOR)[None, :, None],
        (u // VECTOR * (K_THREADS * VECTOR) + u % VECTOR)[None, None, :],
    )


@gluon.jit
def _load_b(at, left, inside, CUT: gl.constexpr, K_MAJOR: gl.constexpr):
    """b is read but once. CUT: not all values of k are `left`."""
    return masked_load(at, inside, left, not K_MAJOR, CUT, "evict_first")


@gluon.jit
def _multiply(x, y):
    """[rows, cols, k_threads]: each thread adds up its own values of k."""
    return gl.sum(x.to(gl.float32)[:, None, :, :] * y.to(gl.float32)[None, :, :, :], axis=3)


@gluon.jit
def _products(a, b, M, N, k_lo, k_hi, stride_am, stride_bk, stride_bn, col,
              ROWS: gl.constexpr, COLS: gl.constexpr, K_THREADS: gl.constexpr, K_PER_THREAD: gl.constexpr,
              VECTOR: gl.constexpr, K_MAJOR: gl.constexpr, AHEAD: gl.constexpr):  # fmt: skip
    """fp32 [ROWS, COLS], of the columns from `col` on: the sum over k in [k_lo, k_hi). A k block has K_THREADS *
    K_PER_THREAD. AHEAD: the first of b come before the kernels ahead have ended."""
    L: gl.constexpr = _layout(K_MAJOR, COLS, K_THREADS, K_PER_THREAD, gl.num_warps())
    OF_A: gl.constexpr = gl.SliceLayout(1, L)
    OF_B: gl.constexpr = gl.SliceLayout(0, L)
    BLOCK_K: gl.constexpr = K_THREADS * K_PER_THREAD
    size = k_hi - k_lo
    whole = size // BLOCK_K
    first, u = _ks(K_THREADS, K_PER_THREAD, VECTOR, OF_A)
    # Rows that are not there are read as the last one, and not stored; so are columns where they need no mask.
    a_at = a + k_lo + first
    if ROWS > 1:
        row = gl.minimum(gl.arange(0, ROWS, _along(0, OF_A)), M - 1)
        a_at += row.to(gl.int64)[:, None, None] * stride_am
    b_first, b_u = _ks(K_THREADS, K_PER_THREAD, VECTOR, OF_B)
    k = b_first + b_u
    n = (col + gl.arange(0, COLS, _along(0, OF_B)))[:, None, None]
    inside = n < N
    if K_MAJOR:
        n = gl.minimum(n, N - 1)
    else:
        b_u = b_u.to(gl.int64) * stride_bk
    b_at = b + (k_lo + b_first).to(gl.int64) * stride_bk + n.to(gl.int64) * stride_bn
    b_step = gl.to_tensor(stride_bk).to(gl.int64) * BLOCK_K
    acc = gl.zeros([ROWS, COLS, K_THREADS], gl.float32, gl.SliceLayout(3, L))
    if AHEAD:
        y = _load_b(b_at + b_u, k < size, inside, True, K_MAJOR)
        wait_for_prerequisites()
        last = gl.maximum(gl.cdiv(size, BLOCK_K) - 1, 0)
        for i in range(1, last + 1):
            acc += _multiply(gl.load(a_at + u), y)
            a_at += BLOCK_K
            b_at += b_step
            if i < whole:
                y = _load_b(b_at + b_u, k < size, inside, False, K_MAJOR)
            else:
                y = _load_b(b_at + b_u, k < size - i * BLOCK_K, inside, True, K_MAJOR)
        acc += _multiply(gl.load(a_at + u, mask=first + u < size - last * BLOCK_K, other=0.0), y)
    else:
        for _ in range(whole):
            y = _load_b(b_at + b_u, k < size, inside, False, K_MAJOR)
            acc += _multiply(gl.load(a_at + u), y)
            a_at += BLOCK_K
            b_at += b_step
        left = size - whole * BLOCK_K
        if left > 0:
            y = _load_b(b_at + b_u, k < left, inside, True, K_MAJOR)
            acc += _multiply(gl.load(a_at + u, mask=first + u < left, other=0.0), y)
    return gl.sum(acc, axis=2)


@gluon.jit
def mm_gemv(a, b, bias, out, M, N, k_units, stride_am, stride_bk, stride_bn, stride_om, epilogue,
            ROWS: gl.constexpr, COLS: gl.constexpr, K_THREADS: gl.constexpr, K_PER_THREAD: gl.constexpr,
            VECTOR: gl.constexpr, K_MAJOR: gl.constexpr, AHEAD: gl.constexpr):  # fmt: skip
    """One program: a, of at most ROWS rows, times COLS columns of b. K_MAJOR: b is contiguous along K. VECTOR: elements
    that a thread loads at once; K and the strides of rows come in units of it, so that the compiler knows."""
    if AHEAD:
        launch_dependents()
    if K_MAJOR:
        stride_bn *= VECTOR
    col = gl.program_id(0) * COLS
    acc = _products(a, b, M, N, 0, k_units * VECTOR, stride_am * VECTOR, stride_bk, stride_bn, col,
                    ROWS, COLS, K_THREADS, K_PER_THREAD, VECTOR, K_MAJOR, AHEAD)  # fmt: skip
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))
    cols = col + gl.arange(0, COLS, gl.SliceLayout(0, acc.type.layout))
    finish(acc, bias, out, rows, cols, M, N, stride_om, 1, epilogue, "matrix")


@gluon.jit
def mm_gemv_split_k(a, b, partials, M, N, K, k_per_split, stride_am, stride_bk, stride_bn,
                    ROWS: gl.constexpr, COLS: gl.constexpr, K_THREADS: gl.constexpr, K_PER_THREAD: gl.constexpr,
                    VECTOR: gl.constexpr, K_MAJOR: gl.constexpr):  # fmt: skip
    """Program (n, s) leaves the sum over its k_per_split values of k in partials[s], fp32 [splits, M, N]."""
    col = gl.program_id(0) * COLS
    s = gl.program_id(1)
    k_lo = s * k_per_split
    k_hi = k_lo + gl.minimum(k_per_split, K - k_lo)  # where k_lo + k_per_split may pass 2**31
    x = _products(a, b, M, N, k_lo, k_hi, stride_am, stride_bk, stride_bn, col,
                  ROWS, COLS, K_THREADS, K_PER_THREAD, VECTOR, K_MAJOR, False)  # fmt: skip
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, x.type.layout))
    cols = col + gl.arange(0, COLS, gl.SliceLayout(0, x.type.layout))
    store_partials(partials, x, s, rows, cols, M, N)


# --- The plans ---

ROWS_AXIS = (1, 2, 4, 8)  # of a, at most


def _worth_a_cubin(point: Point) -> bool:
    c = point.config
    k_major = point.order[1] == "t"
    return makes_sense(point) and k_major == c.k_major and point.rows <= (c.aligned_rows if point.aligned else c.rows)


def _vector(point: Point) -> int:
    return 16 // ITEMSIZE[point.dtype] if point.aligned else 1


def _constraints(point: Point) -> tuple[Constraint, ...]:
    fewer = max((rows for rows in ROWS_AXIS if rows < point.rows), default=0)
    found = [
        require((M > fewer) & (M <= point.rows), f"{fewer} < M <= {point.rows}"),  # first: most problems are done then
        MM.fits_32_bits(),
        batch_invariant("it takes a few rows only"),
    ]
    if point.aligned:
        by = _vector(point)
        found += [require(K % by == 0, f"K a multiple of {by}"), *MM.loads_16_bytes(point)]
    return tuple(found)


def _product_args(point: Point) -> dict[str, Arg]:
    """The arguments of `_products`, but for K."""
    c = point.config
    vector = _vector(point)
    k_major = c.k_major
    constants = dict(ROWS=point.rows, COLS=c.cols, K_THREADS=c.k_threads, K_PER_THREAD=c.k_per_thread, VECTOR=vector,
                     K_MAJOR=k_major)  # fmt: skip
    apart = Int(B.stride(1 if k_major else 0) // vector, "i64")
    return {name: Const(x) for name, x in constants.items()} | dict(
        a=Pointer(A, point.dtype, point.aligned),
        b=Pointer(B, point.dtype, point.aligned),
        M=Int(M),
        N=Int(N),
        stride_am=Int(A.stride(0) // vector, "i64"),
        stride_bk=Const(1) if k_major else apart,
        stride_bn=apart if k_major else Const(1),
    )


def _serves(point: Point) -> dict[str, tuple[int, ...]]:
    """What is more precise than tf32 serves it too. Any bias of a single row is one row."""
    precisions = range(len(PRECISION_AXIS)) if point.dtype == "fp32" else (0,)
    epilogues = EPILOGUE_AXIS if point.rows > 1 else ("plain", "vector")
    return serves(point, epilogues) | {"precision": tuple(precisions)}


def _work(point: Point, waves: Expr, k_blocks: Expr, **more: Expr) -> Work:
    """A k block is one row's: what does not depend on the rows goes by the bytes."""
    c = point.config
    return Work(
        MM,
        waves=waves,
        k_blocks=k_blocks * point.rows,
        flops=2 * c.cols * c.k_threads * c.k_per_thread,
        tile=(point.rows, c.cols),
        boxes=(1, 1),
        **more,
    )


def _predicted(point: Point, work: Work) -> Expr:
    """Picoseconds. The slowdown of loads one by one is a guess, for where nothing was measured."""
    return predict(point, work, 1 if point.aligned else 2)


def _plan(point: Point) -> Plan | None:
    if not _worth_a_cubin(point):
        return None
    c = point.config
    # Otherwise it costs registers that all other launches miss.
    ahead = point.arch >= 90 and point.aligned and point.rows == 1
    programs = ceil_div(N, c.cols)
    args = _product_args(point) | dict(
        bias=MM.bias_pointer(point.dtype),
        out=Pointer(OUT, out_dtype(point), aligned=False),
        k_units=Int(K // _vector(point)),
        stride_om=Int(OUT.stride(0), "i64"),
        epilogue=MM.epilogue(),
        AHEAD=Const(ahead),
    )
    launch = Launch(
        mm_gemv,
        args,
        grid=(programs, 1, 1),
        num_warps=c.num_warps,
        # Then a multiprocessor holds as many threads as it can.
        maxnreg=32 if point.aligned and c.cols == 1 and point.dtype != "fp32" else None,
        dependent=MM.pdl if ahead else 0,
    )
    waves = ceil_div(programs, device.sm_count * (32 // c.num_warps))
    k_blocks = ceil_div(K, c.k_threads * c.k_per_thread)
    work = _work(
        point,
        waves,
        waves * k_blocks,
        dram=MM.traffic(),
        sm_k_blocks=ceil_div(programs, device.sm_count) * k_blocks * point.rows,
    )
    return work.plan(_predicted(point, work), (launch,), _serves(point), _constraints(point))


def _plan_split(point: Point) -> Plan | None:
    if not _worth_a_cubin(point):
        return None
    c = point.config
    tiles = ceil_div(N, c.cols)
    step = c.k_threads * c.k_per_thread
    cut = SplitK(MM, device.sm_count * (32 // c.num_warps) // tiles, step, least=2)
    return cut.plan(
        point,
        mm_gemv_split_k,
        _product_args(point) | {"K": Int(K), "k_per_split": Int(cut.k_per_split)},
        tiles,
        _serves(point),
        (*_constraints(point), cut.pays("columns")),
        _predicted,
        _work(point, const(1), cut.k_per_split // step, dram=MM.traffic() + 8 * cut.splits * M * N, fixups=cut.splits),
    )


# --- The grid ---


def _config(cols: int, k_threads: int, k_per_thread: int, num_warps: int, rows: int, aligned_rows: int = 0,
            k_major: bool = True, suffix: str = "") -> Config:  # fmt: skip
    """rows: of a, for which it is compiled; aligned_rows: where a and b can be loaded 16 bytes at once. Named for its
    columns x block of K."""
    shape = dict(cols=cols, k_threads=k_threads, k_per_thread=k_per_thread, num_warps=num_warps)
    return Config(
        f"gemv_{cols}x{k_threads * k_per_thread}_w{num_warps}{suffix}",
        shape | dict(rows=rows, aligned_rows=aligned_rows, k_major=k_major),
    )


_WHOLE = (
    _config(1, 128, 16, 4, rows=0, aligned_rows=1),
    _config(1, 256, 16, 8, rows=0, aligned_rows=1),
    _config(2, 128, 16, 4, rows=4, aligned_rows=2),
    _config(4, 64, 8, 2, rows=4),
    _config(2, 128, 8, 4, rows=8),
    _config(32, 32, 8, 32, rows=4, k_major=False),
    _config(128, 16, 2, 16, rows=4, k_major=False),
)
_SPLIT = (
    _config(128, 16, 4, 16, rows=4, k_major=False, suffix="_split_k"),
    _config(128, 4, 2, 4, rows=4, k_major=False, suffix="_split_k"),
)

_AXES = {
    "dtype": DTYPE_AXIS,
    "precision": PRECISION_AXIS[:1],
    "order": ("nn", "nt"),
    "aligned": (True, False),
    "rows": ROWS_AXIS,
    "out": OUT_AXIS,
}
_SPLIT_AXES = _AXES | {"order": ("nn",), "aligned": (False,), "rows": ROWS_AXIS[:3]}

KERNELS = (
    Kernel("mm_gemv", OP, _AXES, dict.fromkeys(ARCHS, _WHOLE), _plan),
    Kernel("mm_gemv_split_k", OP, _SPLIT_AXES, dict.fromkeys(ARCHS, _SPLIT), _plan_split),
)
