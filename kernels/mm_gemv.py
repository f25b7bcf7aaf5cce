"""Products of a few rows without tensor cores, for every GPU: all that counts is how fast b comes from memory.

Tensor cores take 8 rows or more, through shared memory. Here each thread loads its own part of b into registers, and
the many threads of a multiprocessor keep more loads in flight than a ring of buffers does. It pays for one or two rows
where b is contiguous along K, and for up to 8 where the rows of b begin at odd addresses, of which nothing but single
elements can be loaded.

`mm_gemv` has all of K in a program. `mm_gemv_split` cuts it over several where there are few columns, and leaves their
parts to `mm_add_parts`. Both share one loop, `_products`.
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
    Scratch,
    require,
)
from tk.kernels.epilogue import activate
from tk.kernels.mm_hopper import let_the_next_begin, wait_for_those_before
from tk.kernels.mm_op import (
    BIAS,
    DTYPE_AXIS,
    EPILOGUE_AXIS,
    OP,
    OUT,
    OUT_AXIS,
    PRECISION_AXIS,
    A,
    B,
    K,
    M,
    N,
    Work,
    batch_invariant,
    epilogue_args,
    fits_32_bits,
    makes_sense,
    out_dtype,
    predict,
    serves,
    traffic,
)
from tk.kernels.mm_pointer import K_PART, PARTS, SPLITS, add_parts, cut_k

# --- The device functions ---


@gluon.constexpr_function
def _layout(along_k, cols, lanes, unroll, num_warps):
    """Of [rows, cols, lanes, unroll]: a thread has one lane, and all of its values of k. Neighbours in memory belong to
    neighbours among the threads, which lie along K or along the columns."""
    if not along_k:
        return gl.BlockedLayout([1, 1, 1, unroll], [1, 32, 1, 1], [1, 1, num_warps, 1], [1, 3, 2, 0])
    warps = min(num_warps, lanes // 32)
    others = num_warps // warps
    return gl.BlockedLayout([1, cols // others, 1, unroll], [1, 1, 32, 1], [1, others, warps, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def _along(dim, layout):
    """Of a vector that lies along `dim` of a tensor [outer, lanes, unroll]."""
    for other in (2, 1, 0):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _ks(LANES: gl.constexpr, UNROLL: gl.constexpr, WIDE: gl.constexpr, L: gl.constexpr):
    """Of a step: the first k of each lane, [1, lanes, 1], and how far from it the others are, [1, 1, unroll]. These are
    constants to the compiler, which puts them into the loads' addresses."""
    u = gl.arange(0, UNROLL, _along(2, L))
    return (
        (gl.arange(0, LANES, _along(1, L)) * WIDE)[None, :, None],
        (u // WIDE * (LANES * WIDE) + u % WIDE)[None, None, :],
    )


@gluon.jit
def _load(at, left, inside, CUT: gl.constexpr, ALONG_K: gl.constexpr):
    """Of b, which is read but once. CUT: not all values of k are `left`."""
    if CUT and ALONG_K:
        y = gl.load(at, mask=left, other=0.0, eviction_policy="evict_first")
    elif CUT:
        y = gl.load(at, mask=left & inside, other=0.0, eviction_policy="evict_first")
    elif ALONG_K:
        y = gl.load(at, eviction_policy="evict_first")
    else:
        y = gl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    return y


@gluon.jit
def _multiply(x, y):
    """[rows, cols, lanes]: each thread adds up its own values of k."""
    return gl.sum(x.to(gl.float32)[:, None, :, :] * y.to(gl.float32)[None, :, :, :], axis=3)


@gluon.jit
def _products(a, b, M, N, k_lo, k_hi, stride_am, stride_bk, stride_bn, col,
              ROWS: gl.constexpr, COLS: gl.constexpr, LANES: gl.constexpr, UNROLL: gl.constexpr, WIDE: gl.constexpr,
              ALONG_K: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """fp32 [ROWS, COLS], of the columns from `col` on: the sum over k in [k_lo, k_hi). A step takes LANES * UNROLL of
    them. EARLY: the first of b come before the kernels ahead have ended."""
    L: gl.constexpr = _layout(ALONG_K, COLS, LANES, UNROLL, gl.num_warps())
    OF_A: gl.constexpr = gl.SliceLayout(1, L)
    OF_B: gl.constexpr = gl.SliceLayout(0, L)
    STEP: gl.constexpr = LANES * UNROLL
    size = k_hi - k_lo
    whole = size // STEP
    lane, u = _ks(LANES, UNROLL, WIDE, OF_A)
    # Rows that are not there are read as the last one, and not stored; so are columns where they need no mask.
    a_at = a + k_lo + lane
    if ROWS > 1:
        row = gl.minimum(gl.arange(0, ROWS, _along(0, OF_A)), M - 1)
        a_at += row.to(gl.int64)[:, None, None] * stride_am
    b_lane, b_u = _ks(LANES, UNROLL, WIDE, OF_B)
    k = b_lane + b_u
    n = (col + gl.arange(0, COLS, _along(0, OF_B)))[:, None, None]
    inside = n < N
    if ALONG_K:
        n = gl.minimum(n, N - 1)
    else:
        b_u = b_u.to(gl.int64) * stride_bk
    b_at = b + (k_lo + b_lane).to(gl.int64) * stride_bk + n.to(gl.int64) * stride_bn
    b_step = gl.to_tensor(stride_bk).to(gl.int64) * STEP
    acc = gl.zeros([ROWS, COLS, LANES], gl.float32, gl.SliceLayout(3, L))
    if EARLY:
        y = _load(b_at + b_u, k < size, inside, True, ALONG_K)
        wait_for_those_before()
        last = gl.maximum(gl.cdiv(size, STEP) - 1, 0)
        for i in range(1, last + 1):
            acc += _multiply(gl.load(a_at + u), y)
            a_at += STEP
            b_at += b_step
            if i < whole:
                y = _load(b_at + b_u, k < size, inside, False, ALONG_K)
            else:
                y = _load(b_at + b_u, k < size - i * STEP, inside, True, ALONG_K)
        acc += _multiply(gl.load(a_at + u, mask=lane + u < size - last * STEP, other=0.0), y)
    else:
        for _ in range(whole):
            y = _load(b_at + b_u, k < size, inside, False, ALONG_K)
            acc += _multiply(gl.load(a_at + u), y)
            a_at += STEP
            b_at += b_step
        left = size - whole * STEP
        if left > 0:
            y = _load(b_at + b_u, k < left, inside, True, ALONG_K)
            acc += _multiply(gl.load(a_at + u, mask=lane + u < left, other=0.0), y)
    return gl.sum(acc, axis=2)


@gluon.jit
def mm_gemv(a, b, bias, out, M, N, k_units, stride_am, stride_bk, stride_bn, stride_bias_m, stride_bias_n, stride_om,
            alpha, beta, activation, has_bias,
            ROWS: gl.constexpr, COLS: gl.constexpr, LANES: gl.constexpr, UNROLL: gl.constexpr, WIDE: gl.constexpr,
            ALONG_K: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """One program: a, of at most ROWS rows, times COLS columns of b. ALONG_K: b is contiguous along K. WIDE: elements
    that a thread loads at once; K and the strides of rows come in units of it, so that the compiler knows."""
    if EARLY:
        let_the_next_begin()
    if ALONG_K:
        stride_bn *= WIDE
    col = gl.program_id(0) * COLS
    acc = _products(a, b, M, N, 0, k_units * WIDE, stride_am * WIDE, stride_bk, stride_bn, col,
                    ROWS, COLS, LANES, UNROLL, WIDE, ALONG_K, EARLY)  # fmt: skip
    x = acc * alpha
    i = gl.arange(0, ROWS, gl.SliceLayout(1, x.type.layout)).to(gl.int64)[:, None]
    j = (col + gl.arange(0, COLS, gl.SliceLayout(0, x.type.layout))).to(gl.int64)[None, :]
    inside = (i < M) & (j < N)
    if has_bias != 0:
        z = gl.load(bias + i * stride_bias_m + j * stride_bias_n, mask=inside, other=0.0)
        x += beta * z.to(gl.float32)
    x = activate(x, activation)
    gl.store(out + i * stride_om + j, x.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def mm_gemv_split(a, b, parts, M, N, K, k_part, stride_am, stride_bk, stride_bn,
                  ROWS: gl.constexpr, COLS: gl.constexpr, LANES: gl.constexpr, UNROLL: gl.constexpr,
                  WIDE: gl.constexpr, ALONG_K: gl.constexpr):  # fmt: skip
    """Program (n, s) leaves the sum over its k_part values of k in parts[s], fp32 [splits, M, N]."""
    col = gl.program_id(0) * COLS
    s = gl.program_id(1)
    k_lo = s * k_part
    k_hi = k_lo + gl.minimum(k_part, K - k_lo)  # where k_lo + k_part may pass 2**31
    x = _products(a, b, M, N, k_lo, k_hi, stride_am, stride_bk, stride_bn, col,
                  ROWS, COLS, LANES, UNROLL, WIDE, ALONG_K, False)  # fmt: skip
    i = gl.arange(0, ROWS, gl.SliceLayout(1, x.type.layout))[:, None]
    j = (col + gl.arange(0, COLS, gl.SliceLayout(0, x.type.layout)))[None, :]
    gl.store(parts + (s.to(gl.int64) * M + i) * N + j, x, mask=(i < M) & (j < N))


# --- The plans ---

ROWS_AXIS = (1, 2, 4, 8)  # of a, at most


def _worth_a_cubin(point: Point) -> bool:
    c = point.config
    along_k = point.order[1] == "t"
    return makes_sense(point) and along_k == c.along_k and point.rows <= (c.aligned_rows if point.aligned else c.rows)


def _wide(point: Point) -> int:
    return 16 // ITEMSIZE[point.dtype] if point.aligned else 1


def _constraints(point: Point) -> tuple[Constraint, ...]:
    fewer = max((rows for rows in ROWS_AXIS if rows < point.rows), default=0)
    found = [
        require((M > fewer) & (M <= point.rows), f"{fewer} < M <= {point.rows}"),  # first: most problems are done then
        fits_32_bits(),
        batch_invariant("it takes a few rows only"),
    ]
    if point.aligned:
        by = _wide(point)
        found.append(require(K % by == 0, f"K a multiple of {by}"))
        for t, apart in ((A, A.stride(0)), (B, B.stride(1))):
            holds = (t.alignment >= 16) & ((t.size(0 if t is A else 1) == 1) | (apart % by == 0))
            found.append(require(holds, f"{t.name} on a 16-byte boundary, its rows a multiple of {by} elements apart"))
    return tuple(found)


def _product_args(point: Point) -> dict[str, Arg]:
    """The arguments of `_products`, but for K."""
    c = point.config
    wide = _wide(point)
    along_k = c.along_k
    constants = dict(ROWS=point.rows, COLS=c.cols, LANES=c.lanes, UNROLL=c.unroll, WIDE=wide, ALONG_K=along_k)
    apart = Int(B.stride(1 if along_k else 0) // wide, "i64")
    return {name: Const(x) for name, x in constants.items()} | dict(
        a=Pointer(A, point.dtype, point.aligned),
        b=Pointer(B, point.dtype, point.aligned),
        M=Int(M),
        N=Int(N),
        stride_am=Int(A.stride(0) // wide, "i64"),
        stride_bk=Const(1) if along_k else apart,
        stride_bn=apart if along_k else Const(1),
    )


def _serves(point: Point) -> dict[str, tuple[int, ...]]:
    """What is more precise than tf32 serves it too. Any bias of a single row is one row."""
    precisions = range(len(PRECISION_AXIS)) if point.dtype == "fp32" else (0,)
    epilogues = EPILOGUE_AXIS if point.rows > 1 else ("plain", "vector")
    return serves(point, epilogues) | {"precision": tuple(precisions)}


def _work(point: Point, waves: Expr, steps: Expr, **more: Expr) -> Work:
    """A step is one row's: what does not depend on the rows goes by the bytes."""
    c = point.config
    return Work(
        waves=waves,
        steps=steps * point.rows,
        flops=2 * c.cols * c.lanes * c.unroll,
        block=(point.rows, c.cols),
        boxes=(1, 1),
        **more,
    )


def _slowdown(point: Point) -> int:
    """A guess, for where nothing was measured."""
    return 1 if point.aligned else 2


def _plan(point: Point) -> Plan | None:
    if not _worth_a_cubin(point):
        return None
    c = point.config
    # Otherwise it costs registers that all other launches miss.
    early = point.arch >= 90 and point.aligned and point.rows == 1
    programs = ceil_div(N, c.cols)
    args = (
        _product_args(point)
        | epilogue_args(point.dtype)
        | dict(
            out=Pointer(OUT, out_dtype(point), aligned=False),
            k_units=Int(K // _wide(point)),
            stride_bias_m=Int(BIAS.stride(0), "i64"),
            stride_bias_n=Int(BIAS.stride(1), "i64"),
            stride_om=Int(OUT.stride(0), "i64"),
            EARLY=Const(early),
        )
    )
    launch = Launch(
        mm_gemv,
        args,
        grid=(programs, 1, 1),
        num_warps=c.num_warps,
        # Then a multiprocessor holds as many threads as it can.
        maxnreg=32 if point.aligned and c.cols == 1 and point.dtype != "fp32" else None,
        dependent=OP.local("begins_early") if early else 0,
    )
    waves = ceil_div(programs, device.sm_count * (32 // c.num_warps))
    steps = ceil_div(K, c.lanes * c.unroll)
    work = _work(
        point,
        waves,
        waves * steps,
        moved=traffic(),
        shared=ceil_div(programs, device.sm_count) * steps * point.rows,
    )
    return Plan(
        constraints=_constraints(point),
        serves=_serves(point),
        launches=(launch,),
        cost=predict(point, work, _slowdown(point)),
        terms=work.terms(point),
    )


def _plan_split(point: Point) -> Plan | None:
    if not _worth_a_cubin(point):
        return None
    c = point.config
    tiles = ceil_div(N, c.cols)
    step = c.lanes * c.unroll
    pays, locals_ = cut_k(device.sm_count * (32 // c.num_warps) // tiles, step, least=2)
    launch = Launch(
        mm_gemv_split,
        _product_args(point) | {"K": Int(K), "k_part": Int(K_PART), "parts": Scratch(0, "fp32")},
        grid=(tiles, SPLITS, 1),
        num_warps=c.num_warps,
    )
    work = _work(point, const(1), K_PART // step, moved=traffic() + 8 * SPLITS * M * N, parts=SPLITS)
    return Plan(
        constraints=(
            *_constraints(point),
            require(pays, "few enough columns and a K long enough that a split pays"),
        ),
        serves=_serves(point),
        launches=(launch, add_parts(point)),
        locals=locals_,
        buffers=(PARTS,),
        cost=predict(point, work, _slowdown(point)),
        terms=work.terms(point),
    )


# --- The grid ---


def _config(cols: int, lanes: int, unroll: int, num_warps: int, rows: int, aligned_rows: int = 0,
            along_k: bool = True, prefix: str = "gemv") -> Config:  # fmt: skip
    """rows: of a, for which it is compiled; aligned_rows: where a and b can be loaded 16 bytes at once."""
    shape = dict(cols=cols, lanes=lanes, unroll=unroll, num_warps=num_warps)
    return Config(
        f"{prefix}_{cols}x{lanes}x{unroll}_w{num_warps}",
        shape | dict(rows=rows, aligned_rows=aligned_rows, along_k=along_k),
    )


_WHOLE = (
    _config(1, 128, 16, 4, rows=0, aligned_rows=1),
    _config(1, 256, 16, 8, rows=0, aligned_rows=1),
    _config(2, 128, 16, 4, rows=4, aligned_rows=2),
    _config(4, 64, 8, 2, rows=4),
    _config(2, 128, 8, 4, rows=8),
    _config(32, 32, 8, 32, rows=4, along_k=False),
    _config(128, 16, 2, 16, rows=4, along_k=False),
)
_SPLIT = (
    _config(128, 16, 4, 16, rows=4, along_k=False, prefix="gemv_split"),
    _config(128, 4, 2, 4, rows=4, along_k=False, prefix="gemv_split"),
)

_AXES = {
    "dtype": DTYPE_AXIS,
    "precision": PRECISION_AXIS[:1],
    "order": ("nn", "nt"),
    "aligned": (True, False),
    "rows": ROWS_AXIS,
    "out": OUT_AXIS,
}
_ARCHS = (80, 90, 100)

_SPLIT_AXES = _AXES | {"order": ("nn",), "aligned": (False,), "rows": ROWS_AXIS[:3]}

KERNELS = (
    Kernel("mm_gemv", OP, _AXES, dict.fromkeys(_ARCHS, _WHOLE), _plan),
    Kernel("mm_gemv_split", OP, _SPLIT_AXES, dict.fromkeys(_ARCHS, _SPLIT), _plan_split),
)
