"""Matrix products for Hopper (sm_90a), in Gluon: TMA producers, wgmma consumers, persistent programs.

One device function computes out = P Q^T with P [p, K] and Q [q, K], each stored either way round, fp32 accumulators:

    tiles    P = a, Q = b^T: out as it is. For many rows.
    split    P = b^T, Q = a: out transposed. wgmma always has 64 rows of P, and with few rows of a those are columns of
             b; the few rows of a are its N.

A program has one to three consumer warpgroups, 64 or 128 rows of P each, and two producer warps, one for P and one for
Q. They share a ring of slots; a slot has a "full" barrier (both operands have landed) and an "empty" one.

Work: tiles [0, whole) are done as they are, round-robin over the programs. The rest is cut along K: its (tile, block of
K) pairs stand in one line, and each program takes `part` of them. Programs that hold a part of a tile leave it in fp32
in scratch memory, and whoever arrives last adds the parts in the order of K: always the same sum, whoever that is.
"""

import math

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

from tk.aot.expr import Expr, Tensor, ceil_div, device, local, maximum, minimum, select
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
    Work,
    batch_invariant,
    epilogue_args,
    fits_32_bits,
    makes_sense,
    out_dtype,
    predict,
    reread,
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
def _load(desc, row, k, bar, slot, K_MAJOR: gl.constexpr, POLICY: gl.constexpr):
    if K_MAJOR:
        tma.async_load(desc, [row, k], bar, slot, cache_policy=POLICY)
    else:
        tma.async_load(desc, [k, row], bar, slot, cache_policy=POLICY)


@gluon.jit
def _produce(WHICH: gl.constexpr, desc, ring, more_desc, more_ring, full, empty, work, ROWS: gl.constexpr,
             PARTS: gl.constexpr, MORE: gl.constexpr, BK: gl.constexpr, K_MAJOR: gl.constexpr, STAGES: gl.constexpr,
             POLICY: gl.constexpr):  # fmt: skip
    """WHICH: 0 loads P, 1 loads Q; PARTS blocks of ROWS rows, then one of MORE."""
    whole, n_tiles, nk, part, n_p, n_q, group = work
    t, lo, hi = _first(whole, n_tiles, nk, part)
    slot = 0
    phase = 0
    while (t < whole) | (lo < hi):
        t, lo, tile, k0, k1 = _next(t, lo, hi, whole, nk)
        p, q = _place(tile, n_p, n_q, group)
        row = (p if WHICH == 0 else q) * (ROWS * PARTS + MORE)
        for k in range(k0, k1):
            mbarrier.wait(empty.index(slot), phase ^ 1)
            if MORE > 0:
                mbarrier.expect(full.index(slot), desc.nbytes_per_cta * PARTS + more_desc.nbytes_per_cta)
                _load(more_desc, row + PARTS * ROWS, k * BK, full.index(slot), more_ring.index(slot), K_MAJOR, POLICY)
            else:
                mbarrier.expect(full.index(slot), desc.nbytes_per_cta * PARTS)
            for c in gl.static_range(PARTS):
                _load(desc, row + c * ROWS, k * BK, full.index(slot), ring.index(slot * PARTS + c), K_MAJOR, POLICY)
            slot, phase = _advance(slot, phase, STAGES)


# --- Consumers ---


@gluon.jit
def _epilogue(acc, row, col, size, fused, SWAP: gl.constexpr, EPILOGUE: gl.constexpr):
    """activation(alpha acc + beta bias) for the block of P Q^T at (row, col). EPILOGUE "plain": alpha alone; "vector":
    bias is one row of out, which is a column of P Q^T when SWAP; "matrix": anything."""
    LAYOUT: gl.constexpr = acc.type.layout
    rows, cols = size
    bias, stride_bias_p, stride_bias_q, alpha, beta, activation, has_bias = fused
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
def _finish(acc, out_s, desc, row, col, size, fused, SWAP: gl.constexpr, PIECE: gl.constexpr, EPILOGUE: gl.constexpr):
    """PIECE columns at a time: a whole tile would take the ring's shared memory, its epilogue too many registers."""
    HALF: gl.constexpr = acc.shape[1] // 2
    if acc.shape[1] == PIECE:
        acc = _epilogue(acc, row, col, size, fused, SWAP, EPILOGUE)
        _put(acc.to(desc.dtype), out_s, desc, row, col, SWAP)
    else:
        lo, hi = gl.split(acc.reshape([acc.shape[0], 2, HALF]).permute([0, 2, 1]))
        _finish(lo, out_s, desc, row, col, size, fused, SWAP, PIECE, EPILOGUE)
        _finish(hi, out_s, desc, row, col + HALF, size, fused, SWAP, PIECE, EPILOGUE)


@gluon.jit
def _add_parts(acc, scratch, counters, tile, k0, c: gl.constexpr, work, P_ROWS: gl.constexpr):
    """Leave this part; the last to arrive gets the sum of all, in the order of K. Returns (sum, is it whole)."""
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
def _product(p, q, acc, MMA: gl.constexpr, P_K: gl.constexpr):
    """p q^T on top of acc; p as it lies in its slot."""
    if not P_K:
        p = p.permute([1, 0])
    if P_K or p.dtype.primitive_bitwidth == 16:
        acc = warpgroup_mma(p, q, acc, is_async=True)
    else:
        # wgmma reads tf32 from shared memory along K only; from registers P may stand either way. It waits for the
        # product, whose registers the next load takes: the other consumers' products fill that time.
        acc = warpgroup_mma(p.load(gl.DotOperandLayout(0, MMA, 1)), q, acc)
    return acc


@gluon.jit
def _consume(c: gl.constexpr, p_s, q_s, more_s, out_s, out_desc, full, empty, scratch, counters, work, size, fused,
             BP: gl.constexpr, BQ: gl.constexpr, MORE: gl.constexpr, PARTS: gl.constexpr, P_K: gl.constexpr,
             Q_K: gl.constexpr, SWAP: gl.constexpr, STAGES: gl.constexpr, PIECE: gl.constexpr, SPLIT: gl.constexpr,
             EPILOGUE: gl.constexpr):  # fmt: skip
    whole, n_tiles, nk, part, n_p, n_q, group = work
    ROWS: gl.constexpr = BP // PARTS
    K_STEP: gl.constexpr = 256 // p_s.dtype.primitive_bitwidth
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BQ, K_STEP])
    MORE_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE if MORE > 0 else BQ, K_STEP])
    t, lo, hi = _first(whole, n_tiles, nk, part)
    slot = 0
    phase = 0
    last = 0
    while (t < whole) | (lo < hi):
        t, lo, tile, k0, k1 = _next(t, lo, hi, whole, nk)
        acc = gl.zeros([ROWS, BQ], gl.float32, MMA)
        more = gl.zeros([ROWS, MORE if MORE > 0 else 1], gl.float32, MORE_MMA)
        for k in range(k0, k1):
            mbarrier.wait(full.index(slot), phase)
            p = p_s.index(slot * PARTS + c)
            q = q_s.index(slot).permute([1, 0]) if Q_K else q_s.index(slot)
            acc = _product(p, q, acc, MMA, P_K)
            # The products before these are done: their slot is free.
            if MORE > 0:
                q = more_s.index(slot).permute([1, 0]) if Q_K else more_s.index(slot)
                more = _product(p, q, more, MORE_MMA, P_K)
                acc, more = warpgroup_mma_wait(2, [acc, more])
            else:
                acc = warpgroup_mma_wait(1, [acc])
            mbarrier.arrive(empty.index(last), count=1, pred=k > k0)
            last = slot
            slot, phase = _advance(slot, phase, STAGES)
        if MORE > 0:
            acc, more = warpgroup_mma_wait(0, [acc, more])
        else:
            acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index(last), count=1)

        done = True
        if SPLIT:
            if k1 - k0 < nk:
                acc, done = _add_parts(acc, scratch, counters, tile, k0, c, work, BP)
        if done:
            p_at, q_at = _place(tile, n_p, n_q, group)
            row = p_at * BP + c * ROWS
            col = q_at * (BQ + MORE)
            _finish(acc, out_s.index(c), out_desc, row, col, size, fused, SWAP, PIECE, EPILOGUE)
            if MORE > 0:
                _finish(more, out_s.index(c), out_desc, row, col + BQ, size, fused, SWAP, PIECE, EPILOGUE)
    tma.store_wait(0)


# --- The kernel ---


@gluon.jit
def mm_hopper(p_desc, q_desc, more_desc, out_desc, scratch, counters, bias, rows, cols, K, whole, part, group,
              stride_bias_p, stride_bias_q, alpha, beta, activation, has_bias,
              BP: gl.constexpr, BQ: gl.constexpr, MORE: gl.constexpr, BK: gl.constexpr, PARTS: gl.constexpr,
              P_K: gl.constexpr, Q_K: gl.constexpr, SWAP: gl.constexpr, STAGES: gl.constexpr, PIECE: gl.constexpr,
              SPLIT: gl.constexpr, ONCE: gl.constexpr, EPILOGUE: gl.constexpr, CONSUMER_REGS: gl.constexpr,
              PRODUCER_REGS: gl.constexpr):  # fmt: skip
    """rows, cols: of P and of Q. whole, part, group: see the top. P_K, Q_K: K is the operand's contiguous dimension.

    A tile is BP by BQ + MORE, which need not be a power of two: BQ and MORE are products of their own. more_desc: a
    view of Q like q_desc, for the MORE rows; None where MORE is 0.
    scratch: fp32 [programs, 2, BP, BQ]; counters: int32, a zero for each tile that is cut and consumer (SPLIT).
    ONCE: b leaves L2 first. PIECE: columns of the tile that go out through shared memory at a time.
    """
    dtype: gl.constexpr = p_desc.dtype
    p_s = gl.allocate_shared_memory(dtype, [STAGES * PARTS] + p_desc.block_shape, p_desc.layout)
    q_s = gl.allocate_shared_memory(dtype, [STAGES] + q_desc.block_shape, q_desc.layout)
    more_s = q_s
    if MORE > 0:
        more_s = gl.allocate_shared_memory(dtype, [STAGES] + more_desc.block_shape, more_desc.layout)
    out_s = gl.allocate_shared_memory(out_desc.dtype, [PARTS] + out_desc.block_shape, out_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=PARTS)
    fence_async_shared()
    gl.barrier()
    n_p = gl.cdiv(rows, BP)
    n_q = gl.cdiv(cols, BQ + MORE)
    work = (whole, n_p * n_q, gl.cdiv(K, BK), part, n_p, n_q, group)
    size = (rows, cols)
    fused = (bias, stride_bias_p, stride_bias_q, alpha, beta, activation, has_bias)
    B_POLICY: gl.constexpr = _ONCE if ONCE else None
    P_POLICY: gl.constexpr = B_POLICY if SWAP else None
    Q_POLICY: gl.constexpr = None if SWAP else B_POLICY
    ROWS: gl.constexpr = BP // PARTS
    # The first function runs in the kernel's own four warps, with the registers that the others leave.
    if PARTS == 1:
        gl.warp_specialize([
            (_consume, (0, p_s, q_s, more_s, out_s, out_desc, full, empty, scratch, counters, work, size, fused,
                        BP, BQ, MORE, PARTS, P_K, Q_K, SWAP, STAGES, PIECE, SPLIT, EPILOGUE)),
            (_produce, (0, p_desc, p_s, p_desc, p_s, full, empty, work, ROWS, PARTS, 0, BK, P_K, STAGES, P_POLICY)),
            (_produce, (1, q_desc, q_s, more_desc, more_s, full, empty, work, BQ, 1, MORE, BK, Q_K, STAGES,
                        Q_POLICY)),
        ], [1, 1], [PRODUCER_REGS, PRODUCER_REGS])  # fmt: skip
    elif PARTS == 2:
        gl.warp_specialize([
            (_consume, (0, p_s, q_s, more_s, out_s, out_desc, full, empty, scratch, counters, work, size, fused,
                        BP, BQ, MORE, PARTS, P_K, Q_K, SWAP, STAGES, PIECE, SPLIT, EPILOGUE)),
            (_consume, (1, p_s, q_s, more_s, out_s, out_desc, full, empty, scratch, counters, work, size, fused,
                        BP, BQ, MORE, PARTS, P_K, Q_K, SWAP, STAGES, PIECE, SPLIT, EPILOGUE)),
            (_produce, (0, p_desc, p_s, p_desc, p_s, full, empty, work, ROWS, PARTS, 0, BK, P_K, STAGES, P_POLICY)),
            (_produce, (1, q_desc, q_s, more_desc, more_s, full, empty, work, BQ, 1, MORE, BK, Q_K, STAGES,
                        Q_POLICY)),
        ], [4, 1, 1], [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.static_assert(PARTS == 3)
        gl.warp_specialize([
            (_consume, (0, p_s, q_s, more_s, out_s, out_desc, full, empty, scratch, counters, work, size, fused,
                        BP, BQ, MORE, PARTS, P_K, Q_K, SWAP, STAGES, PIECE, SPLIT, EPILOGUE)),
            (_consume, (1, p_s, q_s, more_s, out_s, out_desc, full, empty, scratch, counters, work, size, fused,
                        BP, BQ, MORE, PARTS, P_K, Q_K, SWAP, STAGES, PIECE, SPLIT, EPILOGUE)),
            (_consume, (2, p_s, q_s, more_s, out_s, out_desc, full, empty, scratch, counters, work, size, fused,
                        BP, BQ, MORE, PARTS, P_K, Q_K, SWAP, STAGES, PIECE, SPLIT, EPILOGUE)),
            (_produce, (0, p_desc, p_s, p_desc, p_s, full, empty, work, ROWS, PARTS, 0, BK, P_K, STAGES, P_POLICY)),
            (_produce, (1, q_desc, q_s, more_desc, more_s, full, empty, work, BQ, 1, MORE, BK, Q_K, STAGES,
                        Q_POLICY)),
        ], [4, 4, 1, 1], [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS])  # fmt: skip


# --- Plans ---


def descriptor(t: Tensor, dtype: str, contiguous: int, block: tuple[int, int],
               cluster: tuple[int, int] = (1, 1), shared_by: int = 1) -> TensorMap:  # fmt: skip
    """A TMA view of a matrix, `contiguous` its dimension of stride 1. block: of one thread block; cluster: how many of
    them stand side by side along a dimension; both in the matrix's own order. shared_by: blocks that have the same."""
    order = (1 - contiguous, contiguous)
    rows, cols = (block[d] for d in order)
    across = [cluster[d] for d in order]
    bases = [[b * (n > 1) for n in across] for b in (1, 2, 4, 8) if b < shared_by * math.prod(across)]
    size = ITEMSIZE[dtype]
    layout = NVMMASharedLayout(min(128, size * cols), 8 * size, 2, cga_layout=bases)
    return TensorMap(
        t,
        dtype,
        tuple(t.size(d) for d in order),
        (t.stride(order[0]), 1),
        (rows * across[0], cols * across[1]),
        layout=repr(layout),
        round_to_tf32=dtype == "fp32" and t is not OUT,  # wgmma itself would cut off what tf32 has no room for
    )


def suits_tma(point: Point) -> tuple[Constraint, ...]:
    """Of a and b."""
    found = [_rows_suit_tma(t, letter, point.dtype) for t, letter in ((A, point.order[0]), (B, point.order[1]))]
    return (*fits_32_bits(), *found)


def _out_suits_tma(point: Point) -> tuple[Constraint, ...]:
    """A TMA store writes whole pieces of 16 bytes, also across the end of a row."""
    by = 16 // ITEMSIZE[out_dtype(point)]
    return _rows_suit_tma(OUT, "n", out_dtype(point)), require(N % by == 0, f"N a multiple of {by}")


def _rows_suit_tma(t: Tensor, letter: str, dtype: str) -> Constraint:
    by = 16 // ITEMSIZE[dtype]
    outer = t.stride(0 if letter == "n" else 1)
    holds = (t.alignment >= 16) & (outer % by == 0) & (outer > 0)
    return require(holds, f"{t.name} on a 16-byte boundary, its rows a multiple of {by} elements apart (TMA)")


def suits_wgmma(point: Point, swap: bool) -> bool:
    """wgmma reads 16-bit operands either way round; of tf32 ones Q must lie along K, P comes through registers."""
    if not makes_sense(point) or point.config.itemsize != ITEMSIZE[point.dtype]:
        return False
    along_k = point.order[0] == "n" if swap else point.order[1] == "t"
    return point.dtype != "fp32" or (point.precision == "tf32" and along_k)


def _operands(point: Point, swap: bool) -> dict[str, Arg]:
    """The tensor maps, and which way round they are."""
    c = point.config
    rows = c.bp // c.parts
    piece = c.piece_fp32 if out_dtype(point) == "fp32" else c.piece
    a_k, b_k = point.order[0] == "n", point.order[1] == "t"  # K contiguous

    def a(block: int) -> TensorMap:
        return descriptor(A, point.dtype, 1 if a_k else 0, (block, c.bk))

    def b(block: int) -> TensorMap:
        return descriptor(B, point.dtype, 0 if b_k else 1, (c.bk, block))

    p, q = (b, a) if swap else (a, b)
    return dict(
        p_desc=p(rows),
        q_desc=q(c.bq),
        more_desc=q(c.more) if c.more else Const(None),
        out_desc=descriptor(OUT, out_dtype(point), 1, (piece, rows) if swap else (rows, piece)),
        P_K=Const(b_k if swap else a_k),
        Q_K=Const(a_k if swap else b_k),
        SWAP=Const(swap),
        PIECE=Const(piece),
    )


def bias_strides(swap: bool) -> dict[str, Arg]:
    m, n = Int(BIAS.stride(0), "i64"), Int(BIAS.stride(1), "i64")
    return dict(stride_bias_p=n if swap else m, stride_bias_q=m if swap else n)


def _arguments(point: Point, swap: bool) -> dict[str, Arg]:
    """All but what says how the work is cut."""
    c = point.config
    constants = dict(BP=c.bp, BQ=c.bq, MORE=c.more, BK=c.bk, PARTS=c.parts, STAGES=c.stages, SPLIT=c.split, ONCE=c.once,
                     EPILOGUE=point.epilogue, CONSUMER_REGS=c.consumer_regs, PRODUCER_REGS=24)  # fmt: skip
    return (
        _operands(point, swap)
        | epilogue_args(point.dtype)
        | bias_strides(swap)
        | dict(rows=Int(N if swap else M), cols=Int(M if swap else N), K=Int(K))
        | {name: Const(value) for name, value in constants.items()}
    )


def _plan_tiles(point: Point) -> Plan | None:
    """out = a b, or with b along N for tf32 out^T = b^T a^T, in whole tiles."""
    c = point.config
    swap = point.dtype == "fp32" and point.order == "nn"
    if not suits_wgmma(point, swap) or point.epilogue not in c.epilogues.split():
        return None

    def tiles(rows: Expr) -> Expr:
        p, q = (N, rows) if swap else (rows, N)
        return ceil_div(p, c.bp) * ceil_div(q, c.bq + c.more)

    args = _arguments(point, swap) | dict(
        scratch=Const(None), counters=Const(None), whole=Int(tiles(M)), part=Const(1), group=Int(c.group)
    )
    block_m, block_n = (c.bq + c.more, c.bp) if swap else (c.bp, c.bq + c.more)
    waves = ceil_div(tiles(M_CHOICE), device.sm_count)
    work = Work(
        waves=waves,
        steps=waves * ceil_div(K, c.bk),
        flops=2 * block_m * block_n * c.bk,
        moved=traffic(point),
        reread=reread(point, block_m, block_n),
    )
    return Plan(
        constraints=(*suits_tma(point), *_out_suits_tma(point)),
        serves=serves(point, (point.epilogue,)),
        launches=(Launch(mm_hopper, args, grid=(minimum(device.sm_count, tiles(M)), 1, 1), num_warps=4),),
        cost=predict(point, work),
        terms=work.terms,
    )


def _plan_split(point: Point) -> Plan | None:
    """out^T = b^T a^T, K cut so that every multiprocessor has its share of b."""
    c = point.config
    if not suits_wgmma(point, swap=True):
        return None
    slots = device.sm_count * c.resident
    tiles = ceil_div(N, c.bp) * ceil_div(M, c.bq)
    nk = ceil_div(K, c.bk)
    whole, part, grid = (local(len(OP.locals) + i) for i in range(3))
    # Whole tiles while they fill the GPU; each of the others in the same number of parts, none shorter than 4 blocks.
    left = tiles - tiles // slots * slots
    cut = maximum(ceil_div(nk, maximum(slots // maximum(left, 1), 1)), minimum(nk, 4))
    programs = select(whole > 0, slots, ceil_div(tiles * nk, part))
    steps = whole // slots * nk + select(whole == tiles, 0, part)
    work = Work(
        waves=ceil_div(tiles, slots),
        steps=steps,
        flops=2 * c.bp * c.bq * c.bk,
        moved=traffic(point) + select(part < nk, 8 * grid * c.bp * c.bq, 0),
        reread=reread(point, c.bq, c.bp),
        parts=part < nk,
    )
    args = _arguments(point, swap=True) | dict(
        scratch=Scratch(0, "fp32"), counters=Scratch(1, "i32"), whole=Int(whole), part=Int(part), group=Const(1)
    )
    return Plan(
        constraints=(
            *suits_tma(point),
            *_out_suits_tma(point),
            batch_invariant(),
            require(M <= 2 * c.bq, f"M <= {2 * c.bq}"),
        ),
        serves=serves(point, EPILOGUE_AXIS),
        launches=(Launch(mm_hopper, args, grid=(grid, 1, 1), num_warps=4, maxnreg=c.maxnreg),),
        locals=(tiles // slots * slots, cut, programs),
        buffers=(Buffer(8 * grid * c.bp * c.bq), Buffer((tiles - whole) * c.parts * 4, zeroed=True)),
        cost=predict(point, work),
        terms=work.terms,
    )


# --- The grid ---


def _pair(name: str, bp: int, bq: int, stages: int, bk: int = 64, more: int = 0, **other: int | bool | None) -> tuple:
    """A config for 16-bit operands and, with half the K, one for tf32."""
    params = dict(bp=bp, bq=bq, more=more, stages=stages, parts=2, piece=bq, piece_fp32=bq, consumer_regs=232,
                  maxnreg=None, split=False, once=False) | other  # fmt: skip
    return Config(name, params | dict(bk=bk, itemsize=2)), Config(f"{name}_tf32", params | dict(bk=bk // 2, itemsize=4))


def _tile(bp: int, bq: int, more: int, stages: int, piece: int, piece_fp32: int, **other: int | str) -> tuple:
    """Twice: with 1024 and with 2048 rows of P walked together. epilogues: those that it is compiled with."""
    sizes = dict(bp=bp, bq=bq, more=more, stages=stages, piece=piece, piece_fp32=piece_fp32)
    rest = sizes | {"epilogues": "plain vector"} | other
    groups = [_pair(f"tiles_{bp}x{bq + more}_g{g}", group=max(1, g // bp), **rest) for g in (1024, 2048)]
    return groups[0] + groups[1]


_TILES = (
    *_tile(128, 128, 0, 6, 64, 64, epilogues="plain vector matrix"),
    *_tile(128, 256, 0, 4, 64, 64),
    *_tile(256, 128, 0, 4, 64, 32),
    *_tile(128, 128, 64, 5, 64, 32),
    *_tile(192, 128, 0, 5, 64, 32, parts=3, consumer_regs=152, epilogues="plain"),
    *_tile(192, 128, 64, 4, 64, 32, parts=3, consumer_regs=152, epilogues="plain"),
    *_tile(128, 64, 32, 7, 32, 32, epilogues="plain"),
    *_tile(128, 64, 0, 8, 64, 64),
)


def _cut(bp: int, bq: int, stages: int, parts: int, bk: int = 64, resident: int = 1, **other: int) -> tuple:
    """resident: programs that a multiprocessor holds at once."""
    return _pair(f"split_{bp}x{bq}_r{resident}", bp, bq, stages, bk, parts=parts, resident=resident, split=True,
                 once=True, **other)  # fmt: skip


_SPLIT = (
    *_cut(64, 16, 10, 1, bk=128),
    *_cut(64, 32, 8, 1, bk=128),
    *_cut(64, 64, 6, 1, bk=128),
    *_cut(64, 128, 8, 1),
    *_cut(128, 64, 8, 2),
    *_cut(128, 128, 6, 2, piece=64, piece_fp32=64),
    # For wide b: two programs hide each other's ends.
    *_cut(128, 16, 5, 2, resident=2, consumer_regs=88, maxnreg=80),
    *_cut(128, 32, 5, 2, resident=2, consumer_regs=88, maxnreg=80),
    *_cut(128, 64, 4, 2, resident=2, consumer_regs=88, maxnreg=80),
)

_AXES = {"dtype": DTYPE_AXIS, "precision": PRECISION_AXIS, "out": OUT_AXIS}
_TILES_AXES = _AXES | {"order": ("nn", "nt", "tn", "tt"), "epilogue": EPILOGUE_AXIS}
_SPLIT_AXES = _AXES | {"order": ("nn", "nt"), "epilogue": ("matrix",)}

KERNELS = (
    Kernel("mm_hopper_tiles", OP, _TILES_AXES, {90: _TILES}, _plan_tiles),
    Kernel("mm_hopper_split", OP, _SPLIT_AXES, {90: _SPLIT}, _plan_split),
)
