"""Matrix products for Hopper (sm_90a), in Gluon: TMA producers, wgmma consumers, persistent programs.

One device function computes out = P Q^T with P [p, K] and Q [q, K], each stored either way round, fp32 accumulators:

    tiles    P = a, Q = b^T: out as it is. For many rows.
    rows     P = b^T, Q = a: out transposed. wgmma always has 64 rows of P, and with few rows of a those are columns of
             b; the few rows of a are its N of 8 to 128.

A program has one or two consumer warpgroups, 64 or 128 rows of P each, and two producer warps, one for P and one for Q.
They share a ring of slots; a slot has a "full" barrier (both operands have landed) and an "empty" one.

Work: tiles [0, whole) are done as they are, round-robin over the programs. The rest is cut along K: its (tile, block of
K) pairs stand in one line, and each program takes `part` of them. Programs that hold a part of a tile leave it in fp32 in
scratch memory, and whoever arrives last adds the parts in the order of K: always the same sum, whoever that is.
"""

from collections.abc import Iterable

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.ampere import CachePolicy, FractionalEvictionPolicy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tk.aot.expr import Expr, Tensor, ceil_div, const, device, local, maximum, minimum, mode, select
from tk.aot.spec import (
    ITEMSIZE,
    Arg,
    Buffer,
    Config,
    Const,
    Constraint,
    Int,
    Kernel,
    Launch,
    Plan,
    Point,
    Scratch,
    TensorMap,
    require,
)
from tk.kernels.epilogue import activate
from tk.kernels.mm_op import (
    BIAS,
    DTYPE_AXIS,
    EPILOGUE_AXIS,
    M_CHOICE,
    OP,
    OUT,
    OUT_AXIS,
    PRECISION_AXIS,
    A,
    B,
    K,
    M,
    N,
    batch_invariant,
    epilogue_args,
    fits_32_bits,
    makes_sense,
    out_dtype,
    predict,
    serves,
    traffic,
)

_ONCE = gl.constexpr(CachePolicy(l2=FractionalEvictionPolicy("evict_first", 1.0)))  # weights that are read but once


# --- Work: the same sequence of segments (tile, blocks k0..k1 of K) for the producers and consumers of a program ---


@gluon.jit
def _first(whole, n_tiles, nk, part):
    """State: the next whole tile, and what is left of this program's stretch of the line."""
    lo = whole * nk + gl.program_id(0) * part
    return gl.program_id(0), lo, gl.minimum(lo + part, n_tiles * nk)


@gluon.jit
def _next(t, lo, hi, whole, nk):
    is_whole = t < whole
    cut = lo // nk
    tile = gl.where(is_whole, t, cut)
    k0 = gl.where(is_whole, 0, lo - cut * nk)
    k1 = gl.where(is_whole, nk, gl.minimum(nk, hi - cut * nk))
    return gl.where(is_whole, t + gl.num_programs(0), t), gl.where(is_whole, lo, lo + k1 - k0), tile, k0, k1


@gluon.jit
def _place(tile, n_p, n_q, group):
    """Tile number -> (block of P's rows, block of Q's rows). `group` blocks of P are walked together, for L2."""
    g = tile // (group * n_q)
    r = tile - g * group * n_q
    size = gl.minimum(group, n_p - g * group)
    return g * group + r % size, r // size


@gluon.jit
def _advance(slot, phase, STAGES: gl.constexpr):
    slot += 1
    wrap = slot == STAGES
    return gl.where(wrap, 0, slot), gl.where(wrap, phase ^ 1, phase)


# --- Producers ---


@gluon.jit
def _produce(WHICH: gl.constexpr, desc, ring, full, empty, work, early, ROWS: gl.constexpr, PARTS: gl.constexpr,
             BK: gl.constexpr, K_MAJOR: gl.constexpr, STAGES: gl.constexpr, WAIT: gl.constexpr,
             POLICY: gl.constexpr):  # fmt: skip
    """WHICH: 0 loads P, 1 loads Q. WAIT: "always" or "unless_early" for the end of the kernels before this one in the
    stream, when this one was launched while they run ("never": it was not)."""
    whole, n_tiles, nk, part, n_p, n_q, group = work
    if WAIT == "always":
        gl.inline_asm("griddepcontrol.wait;")
    elif WAIT == "unless_early":
        if early == 0:
            gl.inline_asm("griddepcontrol.wait;")
    t, lo, hi = _first(whole, n_tiles, nk, part)
    slot = 0
    phase = 0
    while (t < whole) | (lo < hi):
        t, lo, tile, k0, k1 = _next(t, lo, hi, whole, nk)
        p, q = _place(tile, n_p, n_q, group)
        row = (p if WHICH == 0 else q) * (ROWS * PARTS)
        for k in range(k0, k1):
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(full.index(slot), desc.nbytes_per_cta * PARTS)
            for c in gl.static_range(PARTS):
                at = [row + c * ROWS, k * BK] if K_MAJOR else [k * BK, row + c * ROWS]
                tma.async_load(desc, at, full.index(slot), ring.index(slot * PARTS + c), cache_policy=POLICY)
            slot, phase = _advance(slot, phase, STAGES)


# --- Consumers ---


@gluon.jit
def _epilogue(acc, row, col, rows, cols, bias, stride_bias_p, stride_bias_q, alpha, beta, activation, has_bias,
              SWAP: gl.constexpr, EPILOGUE: gl.constexpr):  # fmt: skip
    """activation(alpha acc + beta bias) for the block of P Q^T at (row, col). EPILOGUE "plain": alpha alone; "vector":
    bias is one row of out, which is a column of P Q^T when SWAP; "matrix": anything."""
    LAYOUT: gl.constexpr = acc.type.layout
    acc = acc * alpha
    if EPILOGUE == "plain":
        return acc
    if has_bias != 0:
        i = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
        j = col + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
        if EPILOGUE == "vector":
            if SWAP:
                z = gl.load(bias + i * stride_bias_p, mask=i < rows, other=0.0).to(gl.float32)[:, None]
            else:
                z = gl.load(bias + j * stride_bias_q, mask=j < cols, other=0.0).to(gl.float32)[None, :]
        else:
            at = i[:, None].to(gl.int64) * stride_bias_p + j[None, :].to(gl.int64) * stride_bias_q
            z = gl.load(bias + at, mask=(i < rows)[:, None] & (j < cols)[None, :], other=0.0).to(gl.float32)
        acc = acc + beta * z
    return activate(acc, activation)


@gluon.jit
def _put(x, out_s, desc, row, col, SWAP: gl.constexpr):
    """Through shared memory; the TMA store cuts off what lies outside."""
    tma.store_wait(0)  # what was stored before has left out_s
    gl.barrier()
    if SWAP:
        out_s.permute([1, 0]).store(x)
    else:
        out_s.store(x)
    fence_async_shared()
    gl.barrier()
    if SWAP:
        tma.async_store(desc, [col, row], out_s)
    else:
        tma.async_store(desc, [row, col], out_s)


@gluon.jit
def _store(acc, out_s, desc, row, col, SWAP: gl.constexpr, PIECES: gl.constexpr):
    """In PIECES along the columns, where the ring needs the room that the whole tile would take."""
    COLS: gl.constexpr = acc.shape[1] // PIECES
    if PIECES == 1:
        _put(acc.to(desc.dtype), out_s, desc, row, col, SWAP)
    else:
        lo, hi = gl.split(acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute([0, 2, 1]))
        _store(lo, out_s, desc, row, col, SWAP, PIECES // 2)
        _store(hi, out_s, desc, row, col + COLS * (PIECES // 2), SWAP, PIECES // 2)


@gluon.jit
def _add_parts(acc, scratch, counters, tile, k0, c: gl.constexpr, work, P_ROWS: gl.constexpr):
    """Leave this part; the last to arrive gets the sum of all, in the order of K. Returns (sum, whether it is whole)."""
    whole, n_tiles, nk, part, n_p, n_q, group = work
    ROWS: gl.constexpr = acc.shape[0]
    COLS: gl.constexpr = acc.shape[1]
    LAYOUT: gl.constexpr = acc.type.layout
    i = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
    at = scratch + c * ROWS * COLS + i[:, None] * COLS + j[None, :]
    # A program's stretch holds at most one part that begins a tile and one that does not: two places each.
    me = gl.program_id(0)
    gl.store(at + (2 * me + (k0 == 0).to(gl.int32)).to(gl.int64) * (P_ROWS * COLS), acc)
    begin = (tile - whole) * nk
    first = begin // part
    last = (begin + nk - 1) // part
    counter = counters + (tile - whole) * (P_ROWS // ROWS) + c
    gl.barrier()  # every thread's part is written before one of them says so
    arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    gl.barrier()
    is_last = arrived == last - first
    if is_last:
        gl.store(counter, 0)  # ready for the next launch
        acc = gl.load(at + (2 * first + 1).to(gl.int64) * (P_ROWS * COLS), cache_modifier=".cg")
        for b in range(first + 1, last + 1):
            acc += gl.load(at + (2 * b).to(gl.int64) * (P_ROWS * COLS), cache_modifier=".cg")
    return acc, is_last


@gluon.jit
def _consume(c: gl.constexpr, p_s, q_s, out_s, out_desc, full, empty, scratch, counters, work, size, fused,
             BP: gl.constexpr, BQ: gl.constexpr, PARTS: gl.constexpr, P_K: gl.constexpr, Q_K: gl.constexpr,
             SWAP: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr, SPLIT: gl.constexpr,
             EPILOGUE: gl.constexpr):  # fmt: skip
    whole, n_tiles, nk, part, n_p, n_q, group = work
    rows, cols = size
    bias, stride_bias_p, stride_bias_q, alpha, beta, activation, has_bias = fused
    ROWS: gl.constexpr = BP // PARTS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BQ, 256 // p_s.dtype.primitive_bitwidth])
    t, lo, hi = _first(whole, n_tiles, nk, part)
    slot = 0
    phase = 0
    last = 0
    while (t < whole) | (lo < hi):
        t, lo, tile, k0, k1 = _next(t, lo, hi, whole, nk)
        acc = gl.zeros([ROWS, BQ], gl.float32, MMA)
        for k in range(k0, k1):
            mbarrier.wait(full.index(slot), phase)
            p = p_s.index(slot * PARTS + c)
            q = q_s.index(slot)
            if not P_K:
                p = p.permute([1, 0])
            if Q_K:
                q = q.permute([1, 0])
            acc = warpgroup_mma(p, q, acc, is_async=True)
            acc = warpgroup_mma_wait(1, [acc])  # the product before is done: its slot is free
            mbarrier.arrive(empty.index(last), count=1, pred=k > k0)
            last = slot
            slot, phase = _advance(slot, phase, STAGES)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index(last), count=1)

        done = True
        if SPLIT:
            if k1 - k0 < nk:
                acc, done = _add_parts(acc, scratch, counters, tile, k0, c, work, BP)
        if done:
            p_at, q_at = _place(tile, n_p, n_q, group)
            row = p_at * BP + c * ROWS
            acc = _epilogue(acc, row, q_at * BQ, rows, cols, bias, stride_bias_p, stride_bias_q, alpha, beta,
                            activation, has_bias, SWAP, EPILOGUE)  # fmt: skip
            _store(acc, out_s.index(c), out_desc, row, q_at * BQ, SWAP, PIECES)
    tma.store_wait(0)


# --- The kernel ---


@gluon.jit
def mm_hopper(p_desc, q_desc, out_desc, scratch, counters, bias, rows, cols, K, whole, part, group, stride_bias_p,
              stride_bias_q, alpha, beta, activation, has_bias, early,
              BP: gl.constexpr, BQ: gl.constexpr, BK: gl.constexpr, PARTS: gl.constexpr, P_K: gl.constexpr,
              Q_K: gl.constexpr, SWAP: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr, SPLIT: gl.constexpr,
              DEPENDENT: gl.constexpr, ONCE: gl.constexpr, EPILOGUE: gl.constexpr, CONSUMER_REGS: gl.constexpr,
              PRODUCER_REGS: gl.constexpr):  # fmt: skip
    """rows, cols: of P and of Q. whole, part, group: see the top. P_K, Q_K: K is the operand's contiguous dimension.

    scratch: fp32 [programs, 2, BP, BQ]; counters: int32, a zero for each tile that is cut and consumer (SPLIT).
    DEPENDENT: launched before the kernels ahead of it in the stream have ended; `early` lets it read b before they have.
    ONCE: b leaves L2 first. PIECES: in how many the tile goes out through shared memory.
    """
    dtype: gl.constexpr = p_desc.dtype
    p_s = gl.allocate_shared_memory(dtype, [STAGES * PARTS] + p_desc.block_shape, p_desc.layout)
    q_s = gl.allocate_shared_memory(dtype, [STAGES] + q_desc.block_shape, q_desc.layout)
    out_s = gl.allocate_shared_memory(out_desc.dtype, [PARTS] + out_desc.block_shape, out_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=PARTS)
    fence_async_shared()
    gl.barrier()
    if DEPENDENT:
        gl.inline_asm("griddepcontrol.launch_dependents;")
    n_p = gl.cdiv(rows, BP)
    n_q = gl.cdiv(cols, BQ)
    work = (whole, n_p * n_q, gl.cdiv(K, BK), part, n_p, n_q, group)
    size = (rows, cols)
    fused = (bias, stride_bias_p, stride_bias_q, alpha, beta, activation, has_bias)
    ROWS: gl.constexpr = BP // PARTS
    B_WAIT: gl.constexpr = "unless_early" if DEPENDENT else "never"
    A_WAIT: gl.constexpr = "always" if DEPENDENT else "never"
    B_POLICY: gl.constexpr = _ONCE if ONCE else None
    P_WAIT: gl.constexpr = B_WAIT if SWAP else A_WAIT
    Q_WAIT: gl.constexpr = A_WAIT if SWAP else B_WAIT
    P_POLICY: gl.constexpr = B_POLICY if SWAP else None
    Q_POLICY: gl.constexpr = None if SWAP else B_POLICY
    # The first function runs in the kernel's own four warps, with the registers that the others leave.
    if PARTS == 1:
        gl.warp_specialize([
            (_consume, (0, p_s, q_s, out_s, out_desc, full, empty, scratch, counters, work, size, fused, BP, BQ, PARTS,
                        P_K, Q_K, SWAP, STAGES, PIECES, SPLIT, EPILOGUE)),
            (_produce, (0, p_desc, p_s, full, empty, work, early, ROWS, PARTS, BK, P_K, STAGES, P_WAIT, P_POLICY)),
            (_produce, (1, q_desc, q_s, full, empty, work, early, BQ, 1, BK, Q_K, STAGES, Q_WAIT, Q_POLICY)),
        ], [1, 1], [PRODUCER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.static_assert(PARTS == 2)
        gl.warp_specialize([
            (_consume, (0, p_s, q_s, out_s, out_desc, full, empty, scratch, counters, work, size, fused, BP, BQ, PARTS,
                        P_K, Q_K, SWAP, STAGES, PIECES, SPLIT, EPILOGUE)),
            (_consume, (1, p_s, q_s, out_s, out_desc, full, empty, scratch, counters, work, size, fused, BP, BQ, PARTS,
                        P_K, Q_K, SWAP, STAGES, PIECES, SPLIT, EPILOGUE)),
            (_produce, (0, p_desc, p_s, full, empty, work, early, ROWS, PARTS, BK, P_K, STAGES, P_WAIT, P_POLICY)),
            (_produce, (1, q_desc, q_s, full, empty, work, early, BQ, 1, BK, Q_K, STAGES, Q_WAIT, Q_POLICY)),
        ], [4, 1, 1], [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS])  # fmt: skip


# --- Plans: what both uses of the kernel share ---


def _descriptor(t: Tensor, dtype: str, contiguous: int, block: tuple[int, int]) -> TensorMap:
    """A TMA view of a matrix, `contiguous` its dimension of stride 1; block in the matrix's own order."""
    outer = 1 - contiguous
    shape = (block[outer], block[contiguous])
    size = ITEMSIZE[dtype]
    layout = NVMMASharedLayout(min(128, size * shape[1]), 8 * size, 2)
    return TensorMap(
        t, dtype, (t.size(outer), t.size(contiguous)), (t.stride(outer), const(1)), shape, layout=repr(layout)
    )


def _operands(point: Point, swap: bool) -> dict[str, Arg]:
    """p_desc, q_desc and out_desc, and which way round they are."""
    c = point.config
    rows = c.bp // c.parts
    a_k, b_k = point.order[0] == "n", point.order[1] == "t"  # K contiguous
    a_rows, b_rows = (c.bq, rows) if swap else (rows, c.bq)
    a = _descriptor(A, point.dtype, 1 if a_k else 0, (a_rows, c.bk))
    b = _descriptor(B, point.dtype, 0 if b_k else 1, (c.bk, b_rows))
    out_block = (c.bq, rows) if swap else (rows, c.bq // _pieces(point))
    out = _descriptor(OUT, out_dtype(point), 1, out_block)
    if swap:
        return dict(p_desc=b, q_desc=a, out_desc=out, P_K=Const(b_k), Q_K=Const(a_k), SWAP=Const(True))
    return dict(p_desc=a, q_desc=b, out_desc=out, P_K=Const(a_k), Q_K=Const(b_k), SWAP=Const(False))


def _pieces(point: Point) -> int:
    """An fp32 tile takes twice the shared memory."""
    return point.config.pieces * ITEMSIZE[out_dtype(point)] // 2


def _tma(t: Tensor, dtype: str) -> Constraint:
    by = 16 // ITEMSIZE[dtype]
    rows = [(t.stride(d) == 1) | ((t.stride(d) % by == 0) & (t.stride(d) > 0)) for d in (0, 1)]
    holds = (t.alignment >= 16) & rows[0] & rows[1]
    return require(holds, f"{t.name} on a 16-byte boundary, with strides of 1 and a multiple of {by} (TMA)")


def _constraints(point: Point) -> tuple[Constraint, ...]:
    return (
        *fits_32_bits(),
        _tma(A, point.dtype),
        _tma(B, point.dtype),
        _tma(OUT, out_dtype(point)),
    )


def _launch(point: Point, swap: bool, grid: Expr, args: dict[str, Arg]) -> Launch:
    c = point.config
    bias_m, bias_n = Int(BIAS.stride(0), "i64"), Int(BIAS.stride(1), "i64")
    constants = dict(
        BP=c.bp, BQ=c.bq, BK=c.bk, PARTS=c.parts, STAGES=c.stages, PIECES=1 if swap else _pieces(point), SPLIT=c.split,
        DEPENDENT=True, ONCE=swap, EPILOGUE=point.epilogue, CONSUMER_REGS=c.consumer_regs, PRODUCER_REGS=24,
    )  # fmt: skip
    return Launch(
        mm_hopper,
        _operands(point, swap)
        | epilogue_args(point.dtype)
        | dict(
            scratch=Scratch(0, "fp32"),
            counters=Scratch(1, "i32"),
            rows=Int(N if swap else M),
            cols=Int(M if swap else N),
            K=Int(K),
            stride_bias_p=bias_n if swap else bias_m,
            stride_bias_q=bias_m if swap else bias_n,
            early=Int(mode("static_weights")),
        )
        | {name: Const(value) for name, value in constants.items()}
        | args,
        grid=(grid, 1, 1),
        num_warps=4,
        maxnreg=c.maxnreg,
        dependent=True,
    )


def _suits_wgmma(point: Point) -> bool:
    """wgmma reads 16-bit operands either way round, tf32 ones only along K."""
    if point.dtype == "fp32":
        return point.precision == "tf32" and point.order == "nt" and point.out == "same"
    return makes_sense(point)


# --- Many rows: out = a b in whole tiles ---


def _plan_tiles(point: Point) -> Plan | None:
    c = point.config
    if not _suits_wgmma(point) or c.dtype_size != ITEMSIZE[point.dtype]:
        return None
    if point.epilogue == "matrix" and not c.matrix:
        return None

    def tiles(rows: Expr) -> Expr:
        return ceil_div(rows, c.bp) * ceil_div(N, c.bq)

    launch = _launch(
        point,
        swap=False,
        grid=minimum(device.sm_count, tiles(M)),
        args=dict(whole=Int(tiles(M)), part=Int(1), group=Int(c.group)),
    )
    return Plan(
        constraints=_constraints(point),
        serves=serves(point, {"plain": ("plain",), "vector": ("vector",), "matrix": ("matrix",)}[point.epilogue]),
        launches=(launch,),
        buffers=(Buffer(0), Buffer(0, zeroed=True)),
        cost=predict(point, "tiles", ceil_div(tiles(M_CHOICE), device.sm_count), ceil_div(K, c.bk), traffic(point),
                     2 * c.bp * c.bq * c.bk),  # fmt: skip
    )


# --- Few rows: out^T = b^T a^T, K cut so that every multiprocessor has a share of b ---


def _plan_rows(point: Point) -> Plan | None:
    c = point.config
    if not _suits_wgmma(point) or c.dtype_size != ITEMSIZE[point.dtype] or point.order[0] != "n":
        return None
    slots = device.sm_count * c.resident
    tiles = ceil_div(N, c.bp) * ceil_div(M, c.bq)
    nk = ceil_div(K, c.bk)
    base = len(OP.locals)
    whole, part, grid = local(base), local(base + 1), local(base + 2)
    # Whole tiles while they fill the GPU; each of the others in the same number of parts, none shorter than 4 blocks.
    left = tiles - tiles // slots * slots
    parts = maximum(slots // maximum(left, 1), 1)
    cut = maximum(ceil_div(nk, parts), minimum(nk, 4))
    programs = select(whole > 0, slots, ceil_div(tiles * nk, part))
    launch = _launch(
        point, swap=True, grid=grid, args=dict(whole=Int(whole), part=Int(part), group=Int(1))
    )
    steps = whole // slots * nk + select(whole == tiles, 0, part)
    moved = traffic(point) + select(part < nk, 8 * grid * c.bp * c.bq, 0)
    return Plan(
        constraints=(*_constraints(point), batch_invariant(), require(M <= 4 * c.bq, f"M <= {4 * c.bq}")),
        serves=serves(point, EPILOGUE_AXIS),
        launches=(launch,),
        locals=(tiles // slots * slots, cut, programs),
        buffers=(Buffer(8 * grid * c.bp * c.bq), Buffer((tiles - whole) * c.parts * 4, zeroed=True)),
        cost=predict(point, "rows", const(1), steps, moved, 2 * c.bp * c.bq * c.bk),
    )


# --- The grid ---


def _config(name: str, bp: int, bq: int, bk: int, stages: int, **more: int | bool | None) -> Config:
    """bk in elements of 2 bytes; fp32 takes half as many. resident: programs that a multiprocessor holds at once."""
    params = dict(bp=bp, bq=bq, bk=bk, stages=stages, parts=2, pieces=1, split=False, consumer_regs=232, maxnreg=None,
                  group=1, resident=1, matrix=False, dtype_size=2)  # fmt: skip
    return Config(name, params | more)


def _both_sizes(configs: Iterable[Config]) -> tuple[Config, ...]:
    """Each for 16-bit operands and, with half the K, for tf32."""
    found = []
    for c in configs:
        found += [c, Config(c.name + "_tf32", dict(c.params) | dict(bk=c.bk // 2, dtype_size=4))]
    return tuple(found)


_TILES = _both_sizes(
    _config(f"tiles_{bp}x{bq}_g{group}", bp, bq, 64, stages, pieces=pieces, group=group // bp, matrix=matrix)
    for bp, bq, stages, pieces, matrix in ((128, 256, 4, 2, False), (256, 128, 4, 2, True), (128, 128, 6, 1, True))
    for group in (1024, 2048)
)

# One block with a ring of some 200 KB ("deep"); two blocks on a multiprocessor, so that the next kernel's can start
# beside them ("pair"); 128 rows of b in a tile for wide b ("wide").
_ROWS = _both_sizes(
    [
        *(
            _config(f"rows_{bq}_deep", 64, bq, 128, stages, parts=1, split=True, consumer_regs=104)
            for bq, stages in ((8, 10), (16, 10), (32, 8), (64, 6))
        ),
        *(
            _config(f"rows_{bq}_pair", 64, bq, 128, stages, parts=1, split=True, maxnreg=128, resident=2)
            for bq, stages in ((8, 5), (16, 5), (32, 4), (64, 3))
        ),
        *(
            _config(f"rows_{bq}_wide", 128, bq, 64, stages, split=True, consumer_regs=88, maxnreg=80, resident=2)
            for bq, stages in ((8, 5), (16, 5), (32, 5), (64, 4))
        ),
        _config("rows_128_deep", 64, 128, 64, 8, parts=1, split=True, consumer_regs=200),
        _config("rows_128_big", 128, 128, 64, 6, split=True),
    ]
)

_AXES = {"dtype": DTYPE_AXIS, "precision": PRECISION_AXIS, "out": OUT_AXIS}
_TILES_AXES = _AXES | {"order": ("nn", "nt", "tn", "tt"), "epilogue": EPILOGUE_AXIS}
_ROWS_AXES = _AXES | {"order": ("nn", "nt"), "epilogue": ("matrix",)}

KERNELS = (
    Kernel("mm_hopper_tiles", OP, _TILES_AXES, {90: _TILES}, _plan_tiles),
    Kernel("mm_hopper_rows", OP, _ROWS_AXES, {90: _ROWS}, _plan_rows),
)
