"""Matrix products for Hopper (sm_90a), in Gluon: TMA producers, wgmma consumers, persistent programs.

One device function computes out = P Q^T with P [p, K] and Q [q, K], each stored either way round, fp32 accumulators:

    tiles    P = a, Q = b^T: out as it is. For many rows.
    wide     P = b^T, Q = a: out transposed. wgmma always has 64 rows of P, and with few rows of a, or an odd number of
             them, it is better that those are columns of b; the rows of a are its N.
    turns    As tiles or wide, but the consumers take turns.
    split    As wide, with K cut for want of tiles.

A program has one to three consumer warpgroups, 64 or 128 rows of P each, and two producer warps, one for P and one for
Q. They share a ring of slots; a slot has a "full" barrier (both operands have landed) and an "empty" one. Consumers
share a tile, or each takes every other tile for itself: then one's epilogue runs beside the other's products.

A program may be a cluster of thread blocks. Its tile is theirs, one below the other: each has its own rows of P, all
have the same Q, which the first block loads once for all of them (multicast). To the compiler there is one tile, with
the cluster in its layouts: shapes and positions below are the cluster's.

Work: tiles [0, whole) are done as they are, round-robin over the programs. The rest is cut along K: its (tile, block of
K) pairs stand in one line, and each program takes `part` of them. Programs that hold a part of a tile leave it in fp32
in scratch memory, and whoever arrives last adds the parts in the order of K: always the same sum, whoever that is.
"""

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
    makes_sense,
    out_dtype,
    out_suits_tma,
    predict,
    serves,
    suits_tma,
    traffic,
)

# Of weights that are read but once.
ONCE_POLICY = gl.constexpr(CachePolicy(l2=FractionalEvictionPolicy("evict_first", 1.0)))


# --- Work: the same sequence of segments (tile, blocks k0..k1 of K) for the producers and consumers of a program ---


@gluon.jit
def _first(work, SPLIT: gl.constexpr):
    """State: the next whole tile, and what is left of this program's stretch of the line."""
    whole, n_tiles, nk, part, n_p, n_q, group = work
    t = gl.program_id(0)
    lo = t
    hi = t
    if SPLIT:
        lo = whole * nk + t * part
        hi = gl.minimum(lo + part, n_tiles * nk)
    return t, lo, hi


@gluon.jit
def _next(t, lo, hi, work, SPLIT: gl.constexpr):
    """Returns the new state, then the segment: tile, k0, k1."""
    whole, n_tiles, nk, part, n_p, n_q, group = work
    tile = t
    k0 = 0
    k1 = nk
    if SPLIT:
        is_whole = t < whole
        cut = lo // nk
        tile = gl.where(is_whole, t, cut)
        k0 = gl.where(is_whole, 0, lo - cut * nk)
        k1 = gl.where(is_whole, nk, gl.minimum(nk, hi - cut * nk))
        t = gl.where(is_whole, t + gl.num_programs(0), t)
        lo = gl.where(is_whole, lo, lo + k1 - k0)
    else:
        t += gl.num_programs(0)
    return t, lo, tile, k0, k1


@gluon.jit
def _place(tile, n_p, n_q, group):
    """Tile number -> (block of P's rows, block of Q's rows). `group` blocks of P are walked together, for L2."""
    g = tile // (group * n_q)
    r = tile - g * group * n_q
    size = gl.minimum(group, n_p - g * group)
    return g * group + r % size, r // size


@gluon.constexpr_function
def side_by_side(blocks, dim, rank):
    """The bases of a cluster's blocks, all along one dimension."""
    return [[b if d == dim else 0 for d in range(rank)] for b in (1, 2, 4, 8) if b < blocks]


@gluon.constexpr_function
def _one_for_all(blocks):
    """The layout of a barrier that a cluster has but once."""
    return mbarrier.MBarrierLayout([[0] for b in (1, 2, 4, 8) if b < blocks])


@gluon.jit
def _advance(slot, phase, STAGES: gl.constexpr):
    slot += 1
    wrap = slot == STAGES
    return gl.where(wrap, 0, slot), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def _skip(slot, phase, steps, STAGES: gl.constexpr):
    """As `steps` times _advance."""
    slot += steps
    return slot % STAGES, phase ^ (slot // STAGES & 1)


# --- Programmatic dependent launch, in static_weights mode: b is read while kernels ahead in the stream still run ---


@gluon.jit
def let_the_next_begin():
    gl.inline_asm("griddepcontrol.launch_dependents;")


@gluon.jit
def wait_for_those_before():
    """Before anything that they may have written is read, and before anything is written that they may still read. In a
    launch that is not dependent it does nothing."""
    gl.inline_asm("griddepcontrol.wait;")


# --- Producers ---


@gluon.jit
def _load(desc, row, k, bar, slot, K_MAJOR: gl.constexpr, SHARED: gl.constexpr, POLICY: gl.constexpr):
    at = [row, k] if K_MAJOR else [k, row]
    tma.async_load(desc, at, bar, slot, multicast=SHARED, cache_policy=POLICY)


@gluon.jit
def _fetch(descs, rings, bars, row, k, slot, phase, ROWS: gl.constexpr, PARTS: gl.constexpr, MORE: gl.constexpr,
           K_MAJOR: gl.constexpr, SHARED: gl.constexpr, POLICY: gl.constexpr):  # fmt: skip
    desc, more_desc, box_desc = descs
    ring, more_ring = rings
    full, empty, all_empty, turn = bars
    bar = full.index(slot)
    if MORE > 0:
        mbarrier.expect(bar, desc.nbytes_per_cta * PARTS + more_desc.nbytes_per_cta)
    else:
        mbarrier.expect(bar, desc.nbytes_per_cta * PARTS)
    if SHARED:
        mbarrier.wait(all_empty.index(slot), phase ^ 1)  # the first block waits; the others pass
    if MORE > 0:
        _load(more_desc, row + PARTS * ROWS, k, bar, more_ring.index(slot), K_MAJOR, SHARED, POLICY)
    for c in gl.static_range(PARTS):
        _load(desc, row + c * ROWS, k, bar, ring.index(slot * PARTS + c), K_MAJOR, SHARED, POLICY)


@gluon.jit
def _fetch_boxes(descs, rings, bars, row, end, k, slot, phase, ROWS: gl.constexpr, PARTS: gl.constexpr,
                 BOX: gl.constexpr, SHARED: gl.constexpr, POLICY: gl.constexpr):  # fmt: skip
    """Only the boxes that begin before the end: TMA takes longer over rows that are not there than over those that are.
    What the slot held before stays in the others' place, and goes into rows of the result that are not stored."""
    desc, more_desc, box_desc = descs
    ring, more_ring = rings
    full, empty, all_empty, turn = bars
    bar = full.index(slot)
    EACH: gl.constexpr = ROWS // BOX
    boxes = gl.minimum(gl.cdiv(end - row, BOX), EACH * PARTS)
    for n in gl.static_range(1, EACH * PARTS + 1):  # the bytes that a barrier expects are a constant
        mbarrier.expect(bar, n * box_desc.nbytes_per_cta, pred=boxes == n)
    if SHARED:
        mbarrier.wait(all_empty.index(slot), phase ^ 1)
    for i in gl.static_range(EACH * PARTS):
        box = ring.index(slot * PARTS + i // EACH).slice(i % EACH * BOX, BOX)
        tma.async_load(box_desc, [row + i * BOX, k], bar, box, pred=i < boxes, multicast=SHARED, cache_policy=POLICY)


@gluon.jit
def _produce(WHICH: gl.constexpr, descs, rings, bars, work, end, ROWS: gl.constexpr, PARTS: gl.constexpr,
             MORE: gl.constexpr, BOX: gl.constexpr, BK: gl.constexpr, K_MAJOR: gl.constexpr, STAGES: gl.constexpr,
             SPLIT: gl.constexpr, SHARED: gl.constexpr, EARLY: gl.constexpr, POLICY: gl.constexpr):  # fmt: skip
    """WHICH: 0 loads P, 1 loads Q, which has `end` rows; PARTS blocks of ROWS rows, then one of MORE. BOX: unless it is
    0, a tile that reaches past the end comes in boxes of so many rows; K is contiguous then. SHARED: the first block of
    the cluster loads for all of them, once the slot is free in all of them. EARLY: this is b, and may be read at once;
    consumers begin when a has come too."""
    if not EARLY:
        wait_for_those_before()
    full, empty, all_empty, turn = bars
    whole, n_tiles, nk, part, n_p, n_q, group = work
    LAST: gl.constexpr = ROWS * PARTS - (0 if MORE > 0 else BOX)  # where a tile's last box begins
    t, lo, hi = _first(work, SPLIT)
    slot = 0
    phase = 0
    while (t < whole) | (lo < hi):
        t, lo, tile, k0, k1 = _next(t, lo, hi, work, SPLIT)
        p, q = _place(tile, n_p, n_q, group)
        row = (p if WHICH == 0 else q) * (ROWS * PARTS + MORE)
        for k in range(k0, k1):
            mbarrier.wait(empty.index(slot), phase ^ 1)
            if BOX == 0 or row + LAST < end:  # a branch: predicates on all loads cost 2 to 4 %
                _fetch(descs, rings, bars, row, k * BK, slot, phase, ROWS, PARTS, MORE, K_MAJOR, SHARED, POLICY)
            else:
                _fetch_boxes(descs, rings, bars, row, end, k * BK, slot, phase, ROWS, PARTS, BOX, SHARED, POLICY)
            slot, phase = _advance(slot, phase, STAGES)


# --- Consumers ---


@gluon.jit
def _fetch_bias(row, col, size, fused, ROWS: gl.constexpr, COLS: gl.constexpr, SWAP: gl.constexpr):
    """Into L1, before the product whose epilogue wants it: from L2 each piece would wait for it once more."""
    rows, cols = size
    bias, stride_bias_p, stride_bias_q, alpha, beta, activation, has_bias = fused
    CGA: gl.constexpr = side_by_side(gl.num_ctas(), 0 if SWAP else 1, 1)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=CGA)
    if has_bias != 0:
        if SWAP:
            at = bias + gl.minimum(row + gl.arange(0, ROWS, LAYOUT), rows - 1) * stride_bias_p
        else:
            at = bias + gl.minimum(col + gl.arange(0, COLS, LAYOUT), cols - 1) * stride_bias_q
        gl.inline_asm_elementwise("prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(gl.int64)], gl.int32,
                                  is_pure=False, pack=1)  # fmt: skip


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
def _put(x, out_s, desc, row, col, SWAP: gl.constexpr, BUFFERS: gl.constexpr):
    """Through shared memory; the TMA store cuts off what lies outside."""
    tma.store_wait(BUFFERS - 1)  # what was stored from here before has left
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
def _pieces(acc, LAYOUT: gl.constexpr):
    """acc's columns in parts as wide as LAYOUT's instruction, a tuple."""
    if acc.shape[1] == LAYOUT.instr_shape[1]:
        return (gl.convert_layout(acc, LAYOUT),)
    else:
        lo, hi = gl.split(acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute([0, 2, 1]))
        return _pieces(lo, LAYOUT) + _pieces(hi, LAYOUT)


@gluon.jit
def _finish(pieces, COUNT: gl.constexpr, out_s, desc, row, col, size, fused, SWAP: gl.constexpr,
            BUFFERS: gl.constexpr, EPILOGUE: gl.constexpr):  # fmt: skip
    """COUNT pieces, since a whole tile would take the ring's shared memory, and its epilogue too many registers. They
    take turns with the BUFFERS of out_s."""
    WIDTH: gl.constexpr = pieces[0].shape[1]
    if EPILOGUE == "plain" or COUNT == 1:
        for i in gl.static_range(COUNT):
            x = _epilogue(pieces[i], row, col + i * WIDTH, size, fused, SWAP, EPILOGUE)
            _put(x.to(desc.dtype), out_s.index(i % BUFFERS), desc, row, col + i * WIDTH, SWAP, BUFFERS)
    else:
        # A loop at run time, in which the pieces move up: registers have no numbers that a loop could count. Unrolled,
        # the activations are more code than the instruction cache holds, and fetching it takes longer than running it.
        for i in range(COUNT):
            x = _epilogue(pieces[0], row, col, size, fused, SWAP, EPILOGUE)
            _put(x.to(desc.dtype), out_s.index(i % BUFFERS), desc, row, col, SWAP, BUFFERS)
            pieces = pieces[1:] + pieces[:1]
            col += WIDTH


@gluon.jit
def _places(scratch, block):
    """Where the elements of a block of 64 (or 128) rows go in scratch memory: those that one instruction of a warp
    stores side by side. In the layout of wgmma's result a thread has two neighbours of a row, and of each 16 rows the
    same ones again 8 below and in every 8th column."""
    LAYOUT: gl.constexpr = block.type.layout
    i = gl.arange(0, block.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    j = gl.arange(0, block.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    pair = (i // 64) * 128 + (i // 16 % 4) * 32 + i % 8 * 4 + j // 2 % 4
    turn = j // 8 * 2 + i // 8 % 2
    return scratch + (turn * (block.shape[0] * 4) + pair * 2 + j % 2)


@gluon.jit
def _add_parts(acc, more, scratch, counters, tile, k0, c: gl.constexpr, work, P_ROWS: gl.constexpr,
               MORE: gl.constexpr):  # fmt: skip
    """Leave this part; the last to arrive gets the sum of all, in the order of K. Returns (sum of acc, sum of more, is
    it whole)."""
    whole, n_tiles, nk, part, n_p, n_q, group = work
    ROWS: gl.constexpr = acc.shape[0]
    BQ: gl.constexpr = acc.shape[1]
    WIDTH: gl.constexpr = BQ + MORE
    PLACE: gl.constexpr = P_ROWS * WIDTH
    at = _places(scratch + c * ROWS * WIDTH, acc)
    more_at = _places(scratch + c * ROWS * WIDTH + ROWS * BQ, more)
    # A program's stretch holds at most one part that begins a tile and one that does not: two places each.
    me = gl.program_id(0)
    mine = (2 * me + (k0 == 0).to(gl.int32)).to(gl.int64) * PLACE
    gl.store(at + mine, acc)
    if MORE > 0:
        gl.store(more_at + mine, more)
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
        where = (2 * first + 1).to(gl.int64) * PLACE
        acc = gl.load(at + where, cache_modifier=".cg")
        if MORE > 0:
            more = gl.load(more_at + where, cache_modifier=".cg")
        for b in range(first + 1, last + 1):
            where = (2 * b).to(gl.int64) * PLACE
            acc += gl.load(at + where, cache_modifier=".cg")
            if MORE > 0:
                more += gl.load(more_at + where, cache_modifier=".cg")
    return acc, more, is_last


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
def _release(bars, slot, pred):
    full, empty, all_empty, turn = bars
    mbarrier.arrive(empty.index(slot), count=1, pred=pred)
    if gl.num_ctas() > 1:
        mbarrier.arrive(all_empty.index(slot), count=1, pred=pred)


@gluon.jit
def _consume(c: gl.constexpr, rings, out_s, out_desc, bars, parts, work, size, fused, BP: gl.constexpr,
             BQ: gl.constexpr, MORE: gl.constexpr, PARTS: gl.constexpr, TURNS: gl.constexpr, P_K: gl.constexpr,
             Q_K: gl.constexpr, SWAP: gl.constexpr, STAGES: gl.constexpr, PIECE: gl.constexpr, BUFFERS: gl.constexpr,
             SPLIT: gl.constexpr, EPILOGUE: gl.constexpr):  # fmt: skip
    """The c-th consumer: the (c % PARTS)-th rows of P's tile, of every tile or, with TURNS of 2, of every other one:
    the one's epilogue runs beside the other's products."""
    p_s, q_s, more_s = rings
    full, empty, all_empty, turn = bars
    scratch, counters = parts
    whole, n_tiles, nk, part, n_p, n_q, group = work
    ROWS: gl.constexpr = BP // PARTS
    K_STEP: gl.constexpr = 256 // p_s.dtype.primitive_bitwidth
    CGA: gl.constexpr = side_by_side(gl.num_ctas(), 0, 2)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BQ, K_STEP], CGA)
    MORE_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE if MORE > 0 else BQ, K_STEP], CGA)
    PIECE_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, K_STEP], CGA)
    PART: gl.constexpr = c % PARTS
    TURN: gl.constexpr = c // PARTS
    t, lo, hi = _first(work, SPLIT)
    slot = 0
    phase = 0
    last = 0
    turn_phase = 1 - TURN
    if EPILOGUE == "vector":
        wait_for_those_before()  # they may write the bias, and L1 would keep what it was
    if TURN > 0:
        t += TURN * gl.num_programs(0)
        slot, phase = _skip(slot, phase, TURN * nk, STAGES)
    while (t < whole) | (lo < hi):
        t, lo, tile, k0, k1 = _next(t, lo, hi, work, SPLIT)
        p_at, q_at = _place(tile, n_p, n_q, group)
        row = p_at * BP + PART * ROWS
        col = q_at * (BQ + MORE)
        if EPILOGUE == "vector":
            _fetch_bias(row, col, size, fused, ROWS, BQ if MORE == 0 else 2 * BQ, SWAP)
        acc = gl.zeros([ROWS, BQ], gl.float32, MMA)
        more = gl.zeros([ROWS, MORE if MORE > 0 else 1], gl.float32, MORE_MMA)
        if TURNS > 1:
            # Not before its slots are the next to be filled: the phase says only odd or even.
            mbarrier.wait(turn.index(TURN), turn_phase)
            turn_phase ^= 1
        for k in range(k0, k1):
            mbarrier.wait(full.index(slot), phase)
            p = p_s.index(slot * PARTS + PART)
            q = q_s.index(slot).permute([1, 0]) if Q_K else q_s.index(slot)
            acc = _product(p, q, acc, MMA, P_K)
            # The products before these are done: their slot is free.
            if MORE > 0:
                q = more_s.index(slot).permute([1, 0]) if Q_K else more_s.index(slot)
                more = _product(p, q, more, MORE_MMA, P_K)
                acc, more = warpgroup_mma_wait(2, [acc, more])
            else:
                acc = warpgroup_mma_wait(1, [acc])
            _release(bars, last, k > k0)
            last = slot
            slot, phase = _advance(slot, phase, STAGES)
        if TURNS > 1:
            mbarrier.arrive(turn.index(1 - TURN), count=1)
        if MORE > 0:
            acc, more = warpgroup_mma_wait(0, [acc, more])
        else:
            acc = warpgroup_mma_wait(0, [acc])
        _release(bars, last, True)

        done = True
        if SPLIT:
            if k1 - k0 < nk:
                acc, more, done = _add_parts(acc, more, scratch, counters, tile, k0, PART, work, BP, MORE)
        if done:
            mine = out_s.slice(c * BUFFERS, BUFFERS)
            pieces = _pieces(acc, PIECE_MMA)
            if MORE > 0:
                pieces = pieces + _pieces(more, PIECE_MMA)
            _finish(pieces, (BQ + MORE) // PIECE, mine, out_desc, row, col, size, fused, SWAP, BUFFERS, EPILOGUE)
        if TURNS > 1:
            t += (TURNS - 1) * gl.num_programs(0)
            slot, phase = _skip(slot, phase, (TURNS - 1) * nk, STAGES)
    tma.store_wait(0)


# --- The kernel ---


@gluon.jit
def mm_hopper(p_desc, q_desc, more_desc, box_desc, out_desc, scratch, counters, bias, rows, cols, K, whole, part,
              group, stride_bias_p, stride_bias_q, alpha, beta, activation, has_bias,
              BP: gl.constexpr, BQ: gl.constexpr, MORE: gl.constexpr, BOX: gl.constexpr, BK: gl.constexpr,
              PARTS: gl.constexpr, TURNS: gl.constexpr, P_K: gl.constexpr, Q_K: gl.constexpr, SWAP: gl.constexpr,
              STAGES: gl.constexpr, PIECE: gl.constexpr, BUFFERS: gl.constexpr, SPLIT: gl.constexpr,
              ONCE: gl.constexpr, EPILOGUE: gl.constexpr, CONSUMER_REGS: gl.constexpr,
              PRODUCER_REGS: gl.constexpr):  # fmt: skip
    """rows, cols: of P and of Q. whole, part, group: see the top. P_K, Q_K: K is the operand's contiguous dimension.
    PARTS: consumers that share a tile, each its rows of P. TURNS: 2 where two consumers have every other tile.

    A tile is BP by BQ + MORE, which need not be a power of two: BQ and MORE are products of their own. more_desc: a
    view of Q like q_desc, for the MORE rows; None where MORE is 0. box_desc: a view of BOX rows of a, whether a is P
    or Q, for tiles that reach past its end; None where BOX is 0.
    scratch: fp32 [programs, 2, BP * (BQ + MORE)]; counters: int32, a zero for each tile that is cut and consumer
    (SPLIT). ONCE: b leaves L2 first. PIECE: columns of the tile that go out at a time, through the next of BUFFERS.
    """
    dtype: gl.constexpr = p_desc.dtype
    p_s = gl.allocate_shared_memory(dtype, [STAGES * PARTS] + p_desc.block_shape, p_desc.layout)
    q_s = gl.allocate_shared_memory(dtype, [STAGES] + q_desc.block_shape, q_desc.layout)
    more_s = q_s
    if MORE > 0:
        more_s = gl.allocate_shared_memory(dtype, [STAGES] + more_desc.block_shape, more_desc.layout)
    out_s = gl.allocate_shared_memory(out_desc.dtype, [PARTS * TURNS * BUFFERS] + out_desc.block_shape, out_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    turn = mbarrier.allocate_mbarrier(batch=TURNS)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=PARTS)
    for i in gl.static_range(TURNS):
        mbarrier.init(turn.index(i), count=1)
    all_empty = empty
    if gl.num_ctas() > 1:
        all_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], _one_for_all(gl.num_ctas()))
        for i in gl.static_range(STAGES):
            mbarrier.init(all_empty.index(i), count=PARTS)
    fence_async_shared()
    gl.barrier()
    let_the_next_begin()
    SHARED: gl.constexpr = gl.num_ctas() > 1
    n_p = gl.cdiv(rows, BP)
    n_q = gl.cdiv(cols, BQ + MORE)
    work = (whole, n_p * n_q, gl.cdiv(K, BK), part, n_p, n_q, group)
    size = (rows, cols)
    fused = (bias, stride_bias_p, stride_bias_q, alpha, beta, activation, has_bias)
    B_POLICY: gl.constexpr = ONCE_POLICY if ONCE else None
    P_POLICY: gl.constexpr = B_POLICY if SWAP else None
    Q_POLICY: gl.constexpr = None if SWAP else B_POLICY
    ROWS: gl.constexpr = BP // PARTS
    P_BOX: gl.constexpr = 0 if SWAP else BOX
    Q_BOX: gl.constexpr = BOX if SWAP else 0
    p_descs, p_rings = (p_desc, None, box_desc), (p_s, p_s)
    q_descs, q_rings = (q_desc, more_desc, box_desc), (q_s, more_s)
    rings = (p_s, q_s, more_s)
    bars = (full, empty, all_empty, turn)
    parts = (scratch, counters)
    # The first function runs in the kernel's own four warps, with the registers that the others leave.
    if PARTS * TURNS == 1:
        gl.warp_specialize([
            (_consume, (0, rings, out_s, out_desc, bars, parts, work, size, fused, BP, BQ, MORE, PARTS, TURNS, P_K,
                        Q_K, SWAP, STAGES, PIECE, BUFFERS, SPLIT, EPILOGUE)),
            (_produce, (0, p_descs, p_rings, bars, work, rows, ROWS, PARTS, 0, P_BOX, BK, P_K, STAGES, SPLIT, False,
                        SWAP, P_POLICY)),
            (_produce, (1, q_descs, q_rings, bars, work, cols, BQ, 1, MORE, Q_BOX, BK, Q_K, STAGES, SPLIT, SHARED,
                        not SWAP, Q_POLICY)),
        ], [1, 1], [PRODUCER_REGS, PRODUCER_REGS])  # fmt: skip
    elif PARTS * TURNS == 2:
        gl.warp_specialize([
            (_consume, (0, rings, out_s, out_desc, bars, parts, work, size, fused, BP, BQ, MORE, PARTS, TURNS, P_K,
                        Q_K, SWAP, STAGES, PIECE, BUFFERS, SPLIT, EPILOGUE)),
            (_consume, (1, rings, out_s, out_desc, bars, parts, work, size, fused, BP, BQ, MORE, PARTS, TURNS, P_K,
                        Q_K, SWAP, STAGES, PIECE, BUFFERS, SPLIT, EPILOGUE)),
            (_produce, (0, p_descs, p_rings, bars, work, rows, ROWS, PARTS, 0, P_BOX, BK, P_K, STAGES, SPLIT, False,
                        SWAP, P_POLICY)),
            (_produce, (1, q_descs, q_rings, bars, work, cols, BQ, 1, MORE, Q_BOX, BK, Q_K, STAGES, SPLIT, SHARED,
                        not SWAP, Q_POLICY)),
        ], [4, 1, 1], [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.static_assert(PARTS * TURNS == 3)
        gl.warp_specialize([
            (_consume, (0, rings, out_s, out_desc, bars, parts, work, size, fused, BP, BQ, MORE, PARTS, TURNS, P_K,
                        Q_K, SWAP, STAGES, PIECE, BUFFERS, SPLIT, EPILOGUE)),
            (_consume, (1, rings, out_s, out_desc, bars, parts, work, size, fused, BP, BQ, MORE, PARTS, TURNS, P_K,
                        Q_K, SWAP, STAGES, PIECE, BUFFERS, SPLIT, EPILOGUE)),
            (_consume, (2, rings, out_s, out_desc, bars, parts, work, size, fused, BP, BQ, MORE, PARTS, TURNS, P_K,
                        Q_K, SWAP, STAGES, PIECE, BUFFERS, SPLIT, EPILOGUE)),
            (_produce, (0, p_descs, p_rings, bars, work, rows, ROWS, PARTS, 0, P_BOX, BK, P_K, STAGES, SPLIT, False,
                        SWAP, P_POLICY)),
            (_produce, (1, q_descs, q_rings, bars, work, cols, BQ, 1, MORE, Q_BOX, BK, Q_K, STAGES, SPLIT, SHARED,
                        not SWAP, Q_POLICY)),
        ], [4, 4, 1, 1], [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS])  # fmt: skip


# --- Plans ---


def descriptor(t: Tensor, dtype: str, contiguous: int, block: tuple[int, int], along: int = 0, blocks: int = 1,
               shared_by: int = 1) -> TensorMap:  # fmt: skip
    """A TMA view of a matrix, `contiguous` its dimension of stride 1. block: what one thread block has of it, in the
    matrix's own order. In a cluster, `blocks` of them stand side by side along dimension `along`, or `shared_by` of
    them have the same."""
    order = (1 - contiguous, contiguous)
    rows, cols = (block[d] for d in order)
    across = [blocks if d == along else 1 for d in order]
    bases = [[b * (n > 1) for n in across] for b in (1, 2, 4, 8) if b < shared_by * blocks]
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


def clusters_at_once(blocks: int, resident: int = 1) -> Expr:
    """How many clusters run at a time, with `resident` blocks on a multiprocessor. Two blocks always find a pair of
    them; groups of four leave some over in every part of the GPU."""
    usable = device.sm_count if blocks <= 2 else device.sm_count * 9 // 10
    return usable * resident // blocks


def suits_wgmma(point: Point, swap: bool) -> bool:
    """wgmma reads 16-bit operands either way round; of tf32 ones Q must lie along K, P comes through registers."""
    if not makes_sense(point) or point.config.itemsize != ITEMSIZE[point.dtype]:
        return False
    along_k = point.order[0] == "n" if swap else point.order[1] == "t"
    return point.dtype != "fp32" or (point.precision == "tf32" and along_k)


def _box(point: Point, swap: bool) -> int:
    """Rows of a that come or are left out together where a tile reaches past the last of them; 0: all of the tile's.
    More than a few boxes would cost the producer too many registers."""
    c = point.config
    rows, more = (c.bq, c.more) if swap else (c.bp, 0)
    box = 64 if rows > 128 else 32
    one_view = swap or c.cluster == 1  # else each block of the cluster has its own rows
    return box if point.order[0] == "n" and one_view and box <= rows and box < rows + more else 0


def _operands(point: Point, swap: bool) -> dict[str, Arg]:
    """The tensor maps, and which way round they are."""
    c = point.config
    rows = c.bp // c.parts
    piece = c.piece_fp32 if out_dtype(point) == "fp32" else c.piece
    a_k, b_k = point.order[0] == "n", point.order[1] == "t"  # K contiguous

    def a(block: int, **cluster: int) -> TensorMap:
        return descriptor(A, point.dtype, 1 if a_k else 0, (block, c.bk), 0, **cluster)

    def b(block: int, **cluster: int) -> TensorMap:
        return descriptor(B, point.dtype, 0 if b_k else 1, (c.bk, block), 1, **cluster)

    p, q = (b, a) if swap else (a, b)
    box = _box(point, swap)
    out_block, out_dim = ((piece, rows), 1) if swap else ((rows, piece), 0)
    return dict(
        p_desc=p(rows, blocks=c.cluster),
        q_desc=q(c.bq, shared_by=c.cluster),
        more_desc=q(c.more, shared_by=c.cluster) if c.more else Const(None),
        box_desc=a(box, shared_by=c.cluster) if box else Const(None),
        out_desc=descriptor(OUT, out_dtype(point), 1, out_block, out_dim, blocks=c.cluster),
        P_K=Const(b_k if swap else a_k),
        Q_K=Const(a_k if swap else b_k),
        SWAP=Const(swap),
        BOX=Const(box),
        PIECE=Const(piece),
        BUFFERS=Const(c.buffers),
    )


def bias_strides(swap: bool) -> dict[str, Arg]:
    m, n = Int(BIAS.stride(0), "i64"), Int(BIAS.stride(1), "i64")
    return dict(stride_bias_p=n if swap else m, stride_bias_q=m if swap else n)


def _arguments(point: Point, swap: bool) -> dict[str, Arg]:
    """All but what says how the work is cut."""
    c = point.config
    constants = dict(BP=c.bp * c.cluster, BQ=c.bq, MORE=c.more, BK=c.bk, PARTS=c.parts, TURNS=c.turns, STAGES=c.stages,
                     SPLIT=c.split, ONCE=c.once, EPILOGUE=point.epilogue, CONSUMER_REGS=c.consumer_regs,
                     PRODUCER_REGS=24)  # fmt: skip
    return (
        _operands(point, swap)
        | epilogue_args(point.dtype)
        | bias_strides(swap)
        | dict(rows=Int(N if swap else M), cols=Int(M if swap else N), K=Int(K))
        | {name: Const(value) for name, value in constants.items()}
    )


def _plan_tiles(point: Point) -> Plan | None:
    """Whole tiles: out = a b, or with `swap`, and for tf32 with b along N, out^T = b^T a^T."""
    c = point.config
    swap = c.swap or (point.dtype == "fp32" and point.order == "nn")
    if not suits_wgmma(point, swap) or point.epilogue not in c.epilogues.split():
        return None

    def tiles(rows: Expr) -> Expr:
        p, q = (N, rows) if swap else (rows, N)
        return ceil_div(p, c.bp * c.cluster) * ceil_div(q, c.bq + c.more)

    args = _arguments(point, swap) | dict(
        scratch=Const(None), counters=Const(None), whole=Int(tiles(M)), part=Const(1), group=Int(c.group)
    )
    block_m, block_n = (c.bq + c.more, c.bp * c.cluster) if swap else (c.bp * c.cluster, c.bq + c.more)
    slots = clusters_at_once(c.cluster)
    waves = ceil_div(tiles(M_CHOICE), slots)
    work = Work(
        waves=waves,
        steps=waves * ceil_div(K, c.bk),
        flops=2 * c.bp * (c.bq + c.more) * c.bk,
        moved=traffic(),
        block=(block_m, block_n),
        boxes=(_box(point, swap) or block_m, block_n),
    )
    grid = (minimum(slots, tiles(M)), 1, 1)
    return Plan(
        constraints=(*suits_tma(point), out_suits_tma(point)),
        serves=serves(point, (point.epilogue,)),
        launches=(
            Launch(mm_hopper, args, grid=grid, num_warps=4, num_ctas=c.cluster, dependent=OP.local("begins_early")),
        ),
        cost=predict(point, work),
        terms=work.terms(point),
    )


def _plan_split(point: Point) -> Plan | None:
    """out^T = b^T a^T for few rows: tiles are cut along K where whole ones would leave multiprocessors without work."""
    c = point.config
    if not suits_wgmma(point, swap=True):
        return None
    block_m, block_n = c.bq + c.more, c.bp
    slots = device.sm_count
    tiles = ceil_div(M, block_m) * ceil_div(N, block_n)
    nk = ceil_div(K, c.bk)
    whole, part, grid = (local(len(OP.locals) + i) for i in range(3))
    # Whole tiles if that leaves less than an eighth of the slots idle. Else all but the last one or two rounds of them;
    # what is left is cut so that each tile has the same number of parts, or, where that too would leave an eighth idle,
    # each program the same share. No part is shorter than 4 blocks.
    rounds = ceil_div(tiles, slots)
    left = tiles - whole
    even = maximum(slots // maximum(left, 1), 1)
    evenly = (left <= slots) & (8 * left * even >= 7 * slots)
    share = select(evenly, ceil_div(nk, even), ceil_div(left * nk, slots))
    steps = whole // slots * nk + select(left > 0, part, 0)
    scratch = 8 * grid * block_m * block_n
    again = (ceil_div(M, block_m) - 1) * N * K * c.itemsize  # what is cut is not walked side by side
    work = Work(
        waves=rounds,
        steps=steps,
        flops=2 * block_m * block_n * c.bk,
        moved=traffic() + select(left > 0, scratch + again, 0),
        block=(block_m, block_n),
        boxes=(_box(point, swap=True) or block_m, block_n),
        parts=select(left > 0, ceil_div(nk, part) + select(evenly, 0, 1), 0),
    )
    args = _arguments(point, swap=True) | dict(
        scratch=Scratch(0, "fp32"), counters=Scratch(1, "i32"), whole=Int(whole), part=Int(part), group=Const(1)
    )
    few = require(M <= 2 * block_m, f"M <= {2 * block_m}")
    return Plan(
        constraints=(*suits_tma(point), out_suits_tma(point), batch_invariant(), few),
        serves=serves(point, EPILOGUE_AXIS),
        launches=(Launch(mm_hopper, args, grid=(grid, 1, 1), num_warps=4, dependent=OP.local("begins_early")),),
        locals=(
            select(8 * tiles >= 7 * rounds * slots, tiles, maximum(tiles // slots - 1, 0) * slots),
            maximum(share, minimum(nk, 4)),
            select(whole > 0, slots, ceil_div(left * nk, part)),
        ),
        buffers=(Buffer(select(left > 0, scratch, 0)), Buffer((tiles - whole) * c.parts * 4, zeroed=True)),
        cost=predict(point, work),
        terms=work.terms(point),
    )


# --- The grid ---

# Twice as many were measured: without the others, the best config of a product is 0.1 % slower (docs/performance.md).
_HALF, _TF32 = 2, 4  # bytes of an operand's element: which dtypes a config is for


def _config(name: str, itemsizes: tuple[int, ...], bp: int, bq: int, more: int, stages: int, bk: int = 64,
            **other: int | str | None) -> tuple[Config, ...]:  # fmt: skip
    """For 16-bit operands, for tf32 with half the K, or for both."""
    params = dict(bp=bp, bq=bq, more=more, stages=stages, parts=2, turns=1, piece=bq, piece_fp32=bq, buffers=1,
                  cluster=1, consumer_regs=232, swap=False, split=False, once=False) | other  # fmt: skip
    suffix = {_HALF: "", _TF32: "_tf32"}
    return tuple(Config(name + suffix[i], params | dict(bk=2 * bk // i, itemsize=i)) for i in itemsizes)


def _tile(itemsizes: tuple[int, ...], bp: int, bq: int, more: int, stages: int, piece: int, piece_fp32: int,
          epilogues: str = "plain vector", walked: int = 1024, **other: int | str) -> tuple[Config, ...]:  # fmt: skip
    """epilogues: those that it is compiled with. walked: how many rows of P are walked together."""
    cluster = other.get("cluster", 1)
    kinds = ["wide"] * bool(other.get("swap")) + ["turns"] * ("turns" in other)
    name = f"{'_'.join(kinds) or 'tiles'}_{bp}x{bq + more}" + (f"_c{cluster}" if cluster > 1 else "")
    rest = dict(piece=piece, piece_fp32=piece_fp32, buffers=2, group=walked // (bp * cluster), epilogues=epilogues)
    return _config(name, itemsizes, bp, bq, more, stages, **rest | other)


_BOTH = (_HALF, _TF32)
_THREE = dict(parts=3, consumer_regs=152)
_TURNS = dict(parts=1, turns=2)

_TILES = (
    *_tile((_HALF,), 128, 128, 0, 6, 64, 32, "plain matrix"),
    *_tile((_TF32,), 128, 128, 0, 6, 64, 32, "plain vector matrix"),
    *_tile((_HALF,), 128, 256, 0, 4, 64, 32, "plain"),
    *_tile((_TF32,), 128, 256, 0, 4, 64, 32),
    *_tile((_TF32,), 128, 64, 0, 8, 32, 32),
    *_tile((_TF32,), 192, 128, 64, 4, 32, 16, **_THREE),
    *_tile(_BOTH, 192, 128, 0, 5, 32, 16, **_THREE, epilogues="plain"),
    *_tile((_HALF,), 128, 128, 32, 5, 32, 32, "plain"),
    *_tile((_HALF,), 128, 128, 64, 5, 32, 16, "plain", cluster=2),
    *_tile((_TF32,), 128, 256, 0, 4, 64, 32, "plain", cluster=2),
    *_tile((_HALF,), 64, 64, 32, 8, 32, 16, "plain", **_TURNS),
    *_tile((_HALF,), 64, 128, 0, 8, 64, 32, **_TURNS),
    *_tile((_HALF,), 64, 128, 0, 8, 64, 32, "plain", **_TURNS, cluster=2),
    *_tile((_HALF,), 64, 128, 32, 6, 32, 16, "plain", **_TURNS),
    *_tile((_HALF,), 64, 128, 64, 6, 32, 16, **_TURNS),
    *_tile((_HALF,), 64, 128, 64, 6, 32, 16, "plain", **_TURNS, cluster=2),
    *_tile((_HALF,), 64, 256, 0, 4, 64, 32, **_TURNS),
    *_tile((_HALF,), 128, 64, 0, 8, 32, 16, **_TURNS),
    *_tile((_HALF,), 128, 128, 0, 6, 32, 16, **_TURNS),
    *_tile((_HALF,), 128, 128, 0, 6, 32, 16, **_TURNS, cluster=2),
    *_tile((_HALF,), 128, 128, 32, 5, 32, 16, "plain", **_TURNS, cluster=2),
    *_tile((_HALF,), 128, 128, 64, 5, 16, 8, **_TURNS),
    *_tile((_HALF,), 128, 128, 64, 5, 16, 8, **_TURNS, cluster=2),
    *_tile((_HALF,), 64, 64, 0, 10, 32, 16, "plain", cluster=2, swap=True, parts=1),
    *_tile((_HALF,), 64, 128, 32, 7, 32, 16, "plain", swap=True, parts=1),
    *_tile((_HALF,), 64, 128, 32, 7, 32, 16, "plain", cluster=2, swap=True, parts=1),
    *_tile((_TF32,), 128, 64, 16, 7, 16, 16, cluster=2, swap=True),
    *_tile((_HALF,), 128, 128, 0, 6, 64, 32, "plain", cluster=4, swap=True),
    *_tile((_HALF,), 128, 128, 16, 5, 16, 16, "plain", cluster=2, swap=True),
    *_tile((_HALF,), 128, 256, 0, 4, 64, 32, "plain", cluster=2, swap=True),
    *_tile((_HALF,), 64, 64, 0, 10, 32, 16, "plain", **_TURNS, swap=True),
    *_tile((_HALF,), 64, 128, 0, 8, 32, 16, "plain", **_TURNS, swap=True),
    *_tile((_HALF,), 128, 128, 0, 6, 32, 16, "plain", **_TURNS, swap=True, cluster=2),
    *_tile((_HALF,), 128, 128, 64, 5, 16, 8, "plain", **_TURNS, swap=True, cluster=2),
)


def _cut(itemsizes: tuple[int, ...], bp: int, bq: int, stages: int, parts: int, bk: int = 64, more: int = 0,
         **other: int) -> tuple[Config, ...]:  # fmt: skip
    return _config(f"split_{bp}x{bq + more}", itemsizes, bp, bq, more, stages, bk, parts=parts, split=True, once=True,
                   swap=True, **other)  # fmt: skip


_SPLIT = (
    *_cut(_BOTH, 64, 16, 10, 1, bk=128),
    *_cut(_BOTH, 64, 32, 8, 1, bk=128),
    *_cut(_BOTH, 64, 64, 6, 1, bk=128),
    *_cut(_BOTH, 128, 64, 8, 2),
    *_cut(_BOTH, 128, 64, 6, 2, more=32, piece=32, piece_fp32=32),
    *_cut((_HALF,), 128, 128, 6, 2, piece=64, piece_fp32=64),
    *_cut(_BOTH, 128, 128, 5, 2, more=64, piece=64, piece_fp32=32),
    *_cut((_TF32,), 128, 256, 4, 2, piece=32, piece_fp32=32),
)

_AXES = {"dtype": DTYPE_AXIS, "precision": PRECISION_AXIS, "out": OUT_AXIS}
_TILES_AXES = _AXES | {"order": ("nn", "nt", "tn", "tt"), "epilogue": EPILOGUE_AXIS}
_SPLIT_AXES = _AXES | {"order": ("nn", "nt"), "epilogue": ("matrix",)}

KERNELS = (
    Kernel("mm_hopper_tiles", OP, _TILES_AXES, {90: _TILES}, _plan_tiles),
    Kernel("mm_hopper_split", OP, _SPLIT_AXES, {90: _SPLIT}, _plan_split),
)
