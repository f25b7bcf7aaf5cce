"""The gradients for Hopper (sm_90a) in Gluon: persistent, TMA, warp-specialised, without atomics.

    warps 0-3, 4-7   consumers: 64 rows of the tile each; every product by wgmma, weights and gradients in registers
    one warp         producer: every TMA load, and which tile comes next

One function is two kernels. Both keep a pair of tiles in shared memory and walk pairs of tiles of the other side, which
come through a ring; each works out the weights anew:

    of keys      keeps K, V,  walks Q, dO:  S^T = K Q^T,  dP^T = V dO^T,  dV += P^T dO,  dK += dS^T Q
    of queries   keeps Q, dO, walks K, V:   S = Q K^T,    dP = dO V^T,                   dQ += dS K

These are seven products. Five would do, with dQ added to from every tile of keys: in whatever order the GPU takes
them, so that the same call would not give the same bits, and with dS through shared memory and a barrier between the
consumers in every step. Here P and dS are the left operands of the last products as they lie in registers, and the ring
is all that consumers share.

Barriers, with what completes a phase of each. All start in phase 0.

    ring.full[s]     the producer's expect and its arrival for where the pair begins, and the bytes of both loads
    ring.empty[s]    one arrival of each consumer, after the wait for its own last product that reads the stage
    kept.full[s]     the expect and the bytes of one consumer's pair; a stage is (slot, consumer), with two slots
    kept.empty[s]    that consumer's arrival: its gradients, which take the pair's place, have been read by TMA
    tiles            as in hopper_tiles.py: what consumers are told, a message for each head that a tile walks

A wait of the producer for `empty` in the phase before the first passes at once, as everywhere in kernels/hopper. The
producer tells of a tile before it waits for room for it, so a consumer that asks for its next tile before it gives back
what it keeps is always answered.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tk.kernels.attention.hopper_tiles import (
    ROWS,
    Keys,
    Lengths,
    Sizes,
    Tiles,
    Work,
    get_number,
    is_full,
    make_ring,
    put_number,
    start_of,
)
from tk.kernels.attention.operands import load_rows
from tk.kernels.attention.walk import (
    BothLists,
    Met,
    band_tiles,
    count_tiles,
    has_blocks,
    indices_of,
    lists_of,
)
from tk.kernels.hopper.pipeline import Pipeline, PipelineState

CONSUMERS = gl.constexpr(2)
SLOTS = gl.constexpr(2)  # of pairs that are kept: the next tile's comes while this one's is worked with


# --- What each row of queries is to be compared with ---


@triton.jit
def attention_statistics(out, grad_out, out_lse, grad_lse, lse, delta, B, H, M, DV, padded, out_strides, grad_strides,
                         lse_strides, grad_lse_strides, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
                         BLOCK_DV: tl.constexpr):  # fmt: skip
    """lse, of the forward pass's out_lse, and delta = rowsum(grad_out out) - grad_lse; [B H + 1,
    padded]. A row that sees nothing, or is not there (past M, and in the last head): inf and 0, so that its weights are
    0 without a comparison."""
    bh = tl.program_id(1)
    b64 = (bh // H).to(tl.int64)
    h64 = (bh % H).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (rows < M) & (bh < B * H)
    rows64 = rows.to(tl.int64)
    x = load_rows(out + h64 * out_strides.h, b64 * out_strides.b + rows64 * out_strides.n, inside, DV, out_strides.d,
                  BLOCK_DV, EVEN)  # fmt: skip
    grad = load_rows(grad_out + h64 * grad_strides.h, b64 * grad_strides.b + rows64 * grad_strides.n, inside, DV,
                     grad_strides.d, BLOCK_DV, EVEN)  # fmt: skip
    at = b64 * grad_lse_strides.b + h64 * grad_lse_strides.h + rows64 * grad_lse_strides.n
    value = tl.sum(x.to(tl.float32) * grad.to(tl.float32), 1) - tl.load(grad_lse + at, mask=inside, other=0.0)
    at = b64 * lse_strides.b + h64 * lse_strides.h + rows64 * lse_strides.n
    row_lse = tl.load(out_lse + at, mask=inside, other=float("-inf"))
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
    flat = bh.to(tl.int64) * padded + rows
    tl.store(lse + flat, row_lse, mask=rows < padded)
    tl.store(delta + flat, value, mask=rows < padded)


# --- Which tiles ---


@gluon.aggregate
class KeyWork:
    """Tiles of keys, which walk the queries of all heads and batch entries that share them."""

    H_kv: gl.tensor
    M: gl.tensor
    group: gl.tensor
    sharing: gl.tensor  # batch entries with the same keys
    schedule: object
    mask: object
    partial: object  # as Work has them, by key
    full: object
    HAS_MASK: gl.constexpr
    STEP: gl.constexpr

    @gluon.jit
    def count(self):
        return self.schedule.tiles

    @gluon.jit
    def place(self, t):
        """Tile number -> batch entry, head, first row. Early keys first: under a causal mask they take longest."""
        schedule = self.schedule
        count = schedule.heads * schedule.tiles_of_head
        which = t // count
        rest = t - which * count
        size = gl.minimum(schedule.heads, schedule.tiles // schedule.tiles_of_head - which * schedule.heads)
        bh = which * schedule.heads + rest % size
        return bh // self.H_kv, bh % self.H_kv, rest // size * (CONSUMERS * ROWS)

    @gluon.jit
    def turns(self):
        return self.sharing * self.group

    @gluon.jit
    def query(self, b, h, i):
        """Batch entry and head of the queries of a turn."""
        return b * self.sharing + i // self.group, h * self.group + i % self.group

    @gluon.jit
    def walked(self, b, h):
        return b, h

    @gluon.jit
    def walk(self, b, h, row0):
        """Whole tiles: queries past the end weigh 0, and what keys past the end get is not stored."""
        mask = self.mask
        lo, full_lo, full_hi, hi = band_tiles(row0, row0 + (CONSUMERS * ROWS - 1), self.M, mask.band_right,
                                              mask.band_left, mask.band_exact, self.HAS_MASK, self.STEP)  # fmt: skip
        number = row0 // mask.kv_block
        partial = count_tiles(b, h, number, self.partial, mask.q_block, self.STEP)
        full = count_tiles(b, h, number, self.full, mask.q_block, self.STEP)
        has_lists = has_blocks(self.partial).to(gl.int32)
        if has_lists == 0:
            partial = hi - lo - (full_hi - full_lo)
            full = full_hi - full_lo
        masked = partial if self.HAS_MASK else 0
        met = Met(partial, full, has_lists, lo, full_lo, full_hi)
        tiles = BothLists(met, indices_of(b, h, number, self.partial), self.partial.strides.indices_i,
                          indices_of(b, h, number, self.full), self.full.strides.indices_i, mask.q_block,
                          self.M)  # fmt: skip
        return Keys(gl.to_tensor(masked), partial + full, tiles, self.STEP)


@gluon.aggregate
class QueryWork:
    """Tiles of queries, which walk keys: the forward pass's."""

    work: Work

    @gluon.jit
    def count(self):
        return self.work.schedule.tiles

    @gluon.jit
    def place(self, t):
        return self.work.place(t)

    @gluon.jit
    def turns(self):
        return 1

    @gluon.jit
    def query(self, b, h, i):
        return b, h

    @gluon.jit
    def walked(self, b, h):
        return gl.minimum(b, self.work.sizes.B_kv - 1), h // self.work.sizes.group

    @gluon.jit
    def walk(self, b, h, row0):
        return self.work.keys(b, h, row0)


# --- The producer ---


@gluon.aggregate
class Statistics:
    """lse and delta of rows of queries, fp32 [heads of all batch entries + 1, padded]; the last is of none that is."""

    lse: gl.tensor
    delta: gl.tensor
    H: gl.tensor
    M: gl.tensor
    padded: gl.tensor
    nothing: gl.tensor  # where the last begins

    @gluon.jit
    def at(self, b, h, start):
        """A list's last block may have whole tiles past the end."""
        return gl.where(start < self.M, (b * self.H + h) * self.padded + start, self.nothing)


@gluon.aggregate
class Buffers:
    """Shared memory: pairs that are kept, a place for each slot and consumer; and the ring of pairs that are walked,
    with where each begins (of keys Keys.place, of queries Keys.start) and, of queries, their statistics. 0: query or
    key; 1: grad_out or value."""

    kept_0: gl.shared_memory_descriptor
    kept_1: gl.shared_memory_descriptor
    ring_0: gl.shared_memory_descriptor
    ring_1: gl.shared_memory_descriptor
    places: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    kept: Pipeline
    ring: Pipeline


@gluon.jit
def _load_pair(desc_0, desc_1, b, h, row, smem_0, smem_1, barrier):
    mbarrier.expect(barrier, desc_0.nbytes_per_cta + desc_1.nbytes_per_cta)
    tma.async_load(desc_0, [b, h, row, 0], barrier, smem_0)
    tma.async_load(desc_1, [b, h, row, 0], barrier, smem_1)


@gluon.jit
def _produce(kept_0, kept_1, walked_0, walked_1, statistics, work, buffers, tiles, counter, KEYS: gl.constexpr,
             DYNAMIC: gl.constexpr):  # fmt: skip
    """DYNAMIC: tiles are handed out by a counter, else by a stride. The launch's last fetch leaves the counter at 0."""
    STEP: gl.constexpr = buffers.ring_0.shape[3]
    LINE: gl.constexpr = gl.BlockedLayout([STEP // 32], [32], [1], [0])
    state = buffers.ring.begin()
    kept_state = PipelineState(gl.to_tensor(0), gl.to_tensor(0), SLOTS)
    tile_state = tiles.ring.begin()
    t = gl.program_id(0)
    while t < work.count():
        b, h, row0 = work.place(t)
        t += gl.num_programs(0)
        if DYNAMIC:
            fetched = gl.atomic_add(counter, 1)
            if fetched == work.count() - 1:
                gl.store(counter, 0)
            t = fetched + gl.num_programs(0)
        for i in range(work.turns()):
            b_q, h_q = work.query(b, h, i)
            walk = work.walk(b_q, h_q, row0)
            tiles.put(tile_state, b_q, h_q, row0, walk.masked, walk.total, walk.tiles.end)
            tile_state = tile_state.next()
            if i == 0:
                for c in gl.static_range(CONSUMERS):
                    place = kept_state.stage * CONSUMERS + c
                    mbarrier.wait(buffers.kept.empty.index(place), kept_state.phase ^ 1)
                    _load_pair(kept_0, kept_1, b, h, row0 + c * ROWS, buffers.kept_0.index(place),
                               buffers.kept_1.index(place), buffers.kept.full.index(place))  # fmt: skip
            b_w, h_w = work.walked(b_q, h_q)
            for j in range(walk.total):
                where = walk.start(j) if KEYS else walk.place(j)
                start = where if KEYS else start_of(where)
                if KEYS:  # on their way while the stage is waited for
                    at = statistics.at(b_q, h_q, start) + gl.arange(0, STEP, LINE)
                    lse = gl.load(statistics.lse + at)
                    delta = gl.load(statistics.delta + at)
                buffers.ring.producer_acquire(state)
                barrier = buffers.ring.full.index(state.stage)
                _load_pair(walked_0, walked_1, b_w, h_w, start, buffers.ring_0.index(state.stage),
                           buffers.ring_1.index(state.stage), barrier)  # fmt: skip
                put_number(buffers.places.index(state.stage), where)
                if KEYS:
                    buffers.lse.index(state.stage).store(lse)
                    buffers.delta.index(state.stage).store(delta)
                mbarrier.arrive(barrier, count=1)
                state = state.next()
        kept_state = kept_state.next()
    tiles.put(tile_state, 0, 0, -1, 0, 0, 0)


# --- The consumers ---


@gluon.aggregate
class Gradient:
    """What makes weights, and the gradient of the products, of products: of one turn. KEYS: rows are keys, columns
    queries, else the other way round."""

    b: gl.tensor
    h: gl.tensor
    row0: gl.tensor
    end: gl.tensor  # of what is walked
    scale: gl.tensor
    mods: object
    KEYS: gl.constexpr

    @gluon.jit
    def positions(self, s, where):
        """q_idx and kv_idx."""
        LAYOUT: gl.constexpr = s.type.layout
        rows = (self.row0 + gl.arange(0, s.shape[0], gl.SliceLayout(1, LAYOUT)))[:, None]
        start = where if self.KEYS else start_of(where)
        cols = (start + gl.arange(0, s.shape[1], gl.SliceLayout(0, LAYOUT)))[None, :]
        if self.KEYS:
            return cols, rows
        else:
            return rows, cols

    @gluon.jit
    def keep(self, q_idx, kv_idx, where, MASKED: gl.constexpr):
        keep = (q_idx if self.KEYS else kv_idx) < self.end
        if MASKED and self.mods.MASK is not None:
            seen = self.mods.MASK(self.b, self.h, q_idx, kv_idx, self.mods.captures)
            keep = keep & (seen if self.KEYS else seen | is_full(where))
        return keep

    @gluon.jit
    def weights(self, s, lse, where, MASKED: gl.constexpr):
        """P of the products s, of the tile that begins at `where`. lse: broadcast along keys."""
        q_idx, kv_idx = self.positions(s, where)
        score = s * self.scale
        if self.mods.SCORE is not None:
            score = self.mods.SCORE(score, self.b, self.h, q_idx, kv_idx, self.mods.captures)
        x = (score - lse) * 1.4426950408889634
        # What a score_mod makes of queries past the end may be no number, which their lse of inf would not hide.
        if MASKED or (self.mods.SCORE is not None and self.KEYS):
            x = gl.where(self.keep(q_idx, kv_idx, where, MASKED), x, -float("inf"))
        return gl.exp2(x)

    @gluon.jit
    def of_products(self, s, p, dp, where, MASKED: gl.constexpr):
        """Of P and dp = dO V^T - delta; without the scale."""
        ds = p * dp
        if self.mods.SCORE is not None:
            q_idx, kv_idx = self.positions(s, where)
            ds = self.mods.SCORE_GRAD(s * self.scale, self.b, self.h, q_idx, kv_idx, self.mods.captures, (), ds,
                                      self.keep(q_idx, kv_idx, where, MASKED), 1 if self.KEYS else 0,
                                      False)  # fmt: skip
        return ds


@gluon.jit
def _operand(x, acc, DTYPE: gl.constexpr):
    """As the left operand of a product that is added to `acc`."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return gl.convert_layout(x.to(DTYPE), OPERAND, assert_trivial=True)


@gluon.jit
def _matrix(smem, place):
    """A tile in shared memory without its dimensions of size 1."""
    return smem.index(place).reshape([smem.shape[3], smem.shape[4]])


@gluon.jit
def _step(place, buffers, gradient, row_lse, row_delta, state, acc_0, acc_1, zeros, MASKED: gl.constexpr):
    """A walked pair. The wait for the last product is at the end: the other consumer's products fill that time.

    The statistics are read where they are needed, for registers are short. (dP on top of -delta would save as many, but
    then ptxas copies accumulators while S is being worked out, and waits for it first.)"""
    KEYS: gl.constexpr = gradient.KEYS
    DTYPE: gl.constexpr = buffers.ring_0.dtype
    COLUMN: gl.constexpr = gl.SliceLayout(0, zeros.type.layout)
    buffers.ring.consumer_wait(state)
    walked_0 = _matrix(buffers.ring_0, state.stage)
    walked_1 = _matrix(buffers.ring_1, state.stage)
    s = warpgroup_mma(_matrix(buffers.kept_0, place), walked_0.permute([1, 0]), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(_matrix(buffers.kept_1, place), walked_1.permute([1, 0]), zeros, use_acc=False, is_async=True)
    where = gl.to_tensor(0)
    if MASKED or gradient.mods.SCORE is not None:
        where = get_number(buffers.places.index(state.stage))
    s = warpgroup_mma_wait(1, [s])
    lse = buffers.lse.index(state.stage).load(COLUMN)[None, :] if KEYS else row_lse
    p = gradient.weights(s, lse, where, MASKED)
    if KEYS:
        p_operand = _operand(p, acc_1, DTYPE)
        acc_1 = warpgroup_mma(p_operand, walked_1, acc_1, is_async=True)
        dp = warpgroup_mma_wait(1, [dp])
    else:
        dp = warpgroup_mma_wait(0, [dp])
    delta = buffers.delta.index(state.stage).load(COLUMN)[None, :] if KEYS else row_delta
    ds = _operand(gradient.of_products(s, p, dp - delta, where, MASKED), acc_0, DTYPE)
    acc_0 = warpgroup_mma(ds, walked_0, acc_0, is_async=True)
    if KEYS:
        acc_0, acc_1, ds, p_operand = warpgroup_mma_wait(0, [acc_0, acc_1, ds, p_operand])
    else:
        acc_0, ds = warpgroup_mma_wait(0, [acc_0, ds])
    buffers.ring.consumer_release(state.stage, True)
    return acc_0, acc_1


@gluon.jit
def _consume(c: gl.constexpr, grad_0, grad_1, statistics, sharing, group, turns, scale, mods, buffers, tiles,
             KEYS: gl.constexpr):  # fmt: skip
    STEP: gl.constexpr = buffers.ring_0.shape[3]
    D: gl.constexpr = buffers.kept_0.shape[4]
    DV: gl.constexpr = buffers.kept_1.shape[4]
    DTYPE: gl.constexpr = grad_0.dtype
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    LAYOUT_0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LAYOUT_1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    zeros = gl.zeros([ROWS, STEP], gl.float32, LAYOUT_S)

    state = buffers.ring.begin()
    kept_state = PipelineState(gl.to_tensor(0), gl.to_tensor(0), SLOTS)
    tile_state = tiles.ring.begin()
    tile = tiles.get(tile_state)
    while tile.row >= 0:
        b = tile.b // sharing
        h = tile.h // group
        row0 = tile.row + c * ROWS
        place = kept_state.stage * CONSUMERS + c
        acc_0 = gl.zeros([ROWS, D], gl.float32, LAYOUT_0)
        if KEYS:
            acc_1 = gl.zeros([ROWS, DV], gl.float32, LAYOUT_1)
            row_lse = 0.0
            row_delta = 0.0
        else:
            acc_1 = gl.to_tensor(0)
            at = statistics.at(b, h, tile.row) + c * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT_S))
            row_lse = gl.load(statistics.lse + at)[:, None]
            row_delta = gl.load(statistics.delta + at)[:, None]
        mbarrier.wait(buffers.kept.full.index(place), kept_state.phase)
        for _ in range(turns):
            gradient = Gradient(tile.b, tile.h, row0, tile.kv_end, scale, mods, KEYS)
            if mods.MASK is not None or not KEYS:
                for _i in range(tile.masked):
                    acc_0, acc_1 = _step(place, buffers, gradient, row_lse, row_delta, state, acc_0, acc_1, zeros,
                                         True)  # fmt: skip
                    state = state.next()
            for _i in range(tile.masked, tile.total):
                acc_0, acc_1 = _step(place, buffers, gradient, row_lse, row_delta, state, acc_0, acc_1, zeros,
                                     False)  # fmt: skip
                state = state.next()
            tile_state = tile_state.next()
            tile = tiles.get(tile_state)  # of the next turn, or the next tile's first

        # This consumer's products are done, and nobody else reads its pair.
        _matrix(buffers.kept_0, place).store((acc_0 * scale).to(DTYPE))
        if KEYS:
            _matrix(buffers.kept_1, place).store(acc_1.to(DTYPE))
        fence_async_shared()
        gl.barrier()
        tma.async_store(grad_0, [b, h, row0, 0], buffers.kept_0.index(place))
        if KEYS:
            tma.async_store(grad_1, [b, h, row0, 0], buffers.kept_1.index(place))
        tma.store_wait(0)
        gl.barrier()
        mbarrier.arrive(buffers.kept.empty.index(place), count=1)
        kept_state = kept_state.next()


# --- The kernels ---


class KeyTensors(NamedTuple):
    """Tensor descriptors of [batch, heads, rows, head size], then addresses. lse, delta: of attention_statistics."""

    query: Any
    key: Any
    value: Any
    grad_out: Any
    grad_key: Any
    grad_value: Any
    lse: Any
    delta: Any
    q_lists: Any
    counter: Any


class KeySizes(NamedTuple):
    B_kv: Any
    B: Any
    H: Any
    H_kv: Any
    M: Any
    group: Any


class QueryTensors(NamedTuple):
    """As KeyTensors."""

    query: Any
    key: Any
    value: Any
    grad_out: Any
    grad_query: Any
    lse: Any
    delta: Any
    kv_lists: Any
    kv_lengths: Any
    counter: Any


class QuerySizes(NamedTuple):
    B_kv: Any
    B: Any
    H: Any
    M: Any
    N: Any
    group: Any


@dataclass(frozen=True)
class Pace:
    """DYNAMIC: tiles are handed out by a counter, else by a stride."""

    STAGES: int
    DYNAMIC: bool
    CONSUMER_REGS: int
    PRODUCER_REGS: int


@gluon.jit
def _run(kept_0, kept_1, walked_0, walked_1, grad_0, grad_1, statistics, work, sharing, group, turns, scale, counter,
         mods, KEYS: gl.constexpr, PACE: gl.constexpr):  # fmt: skip
    """All but the statistics, work and numbers are tensor descriptors of [batch, heads, rows, head size]."""
    gl.static_assert(kept_0.block_shape[2] == ROWS and kept_1.block_shape[2] == ROWS, "a consumer keeps 64 rows")
    gl.static_assert(walked_0.block_shape[2] == walked_1.block_shape[2], "pairs are walked together")
    gl.static_assert(grad_0.block_shape[2] == ROWS and grad_0.block_shape[3] == kept_0.block_shape[3], "in its place")
    gl.static_assert(kept_0.block_shape[3] == walked_0.block_shape[3], "head sizes of query and key")
    gl.static_assert(kept_1.block_shape[3] == walked_1.block_shape[3], "head sizes of grad_out and value")
    STAGES: gl.constexpr = PACE.STAGES
    DYNAMIC: gl.constexpr = PACE.DYNAMIC
    dtype: gl.constexpr = kept_0.dtype
    PLACES: gl.constexpr = SLOTS * CONSUMERS
    number: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    smem_0 = gl.allocate_shared_memory(dtype, [PLACES] + kept_0.block_shape, kept_0.layout)
    smem_1 = gl.allocate_shared_memory(dtype, [PLACES] + kept_1.block_shape, kept_1.layout)
    ring_0 = gl.allocate_shared_memory(dtype, [STAGES] + walked_0.block_shape, walked_0.layout)
    ring_1 = gl.allocate_shared_memory(dtype, [STAGES] + walked_1.block_shape, walked_1.layout)
    places = gl.allocate_shared_memory(gl.int32, [STAGES, 1], number)
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, walked_0.block_shape[2]], number)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, walked_0.block_shape[2]], number)
    numbers = gl.allocate_shared_memory(gl.int32, [2 * 6, 1], number)
    buffers = Buffers(smem_0, smem_1, ring_0, ring_1, places, lse, delta, make_ring(PLACES, 1, 1),
                      make_ring(STAGES, 2, CONSUMERS))  # fmt: skip
    hand_out = Tiles(numbers, make_ring(2, 1, CONSUMERS))
    fence_async_shared()
    # The first function runs in the kernel's own warps and gets the registers that the others leave.
    gl.warp_specialize([
        (_consume, (0, grad_0, grad_1, statistics, sharing, group, turns, scale, mods, buffers, hand_out, KEYS)),
        (_consume, (1, grad_0, grad_1, statistics, sharing, group, turns, scale, mods, buffers, hand_out, KEYS)),
        (_produce, (kept_0, kept_1, walked_0, walked_1, statistics, work, buffers, hand_out, counter, KEYS, DYNAMIC)),
    ], [4, 1], [PACE.CONSUMER_REGS, PACE.PRODUCER_REGS])  # fmt: skip


@gluon.jit
def attention_hopper_keys(tensors, sizes, scale, padded, schedule, mask, q_strides, mods, PACE: gl.constexpr):
    """Gradients of key and value."""
    t = tensors
    partial, full = lists_of(t.q_lists, q_strides)
    sharing = sizes.B // sizes.B_kv  # 1, or all entries
    work = KeyWork(sizes.H_kv, sizes.M, sizes.group, sharing, schedule, mask, partial, full, mods.MASK is not None,
                   t.query.block_shape[2])  # fmt: skip
    statistics = Statistics(t.lse, t.delta, sizes.H, sizes.M, padded, sizes.B * sizes.H * padded)
    _run(t.key, t.value, t.query, t.grad_out, t.grad_key, t.grad_value, statistics, work, sharing, sizes.group,
         sharing * sizes.group, scale, t.counter, mods, True, PACE)  # fmt: skip


@gluon.jit
def attention_hopper_queries(tensors, sizes, scale, padded, schedule, mask, kv_strides, lengths, mods,
                             PACE: gl.constexpr):  # fmt: skip
    """The gradient of query."""
    t = tensors
    partial, full = lists_of(t.kv_lists, kv_strides)
    work = Work(Sizes(sizes.B_kv, sizes.H, sizes.M, sizes.N, sizes.group), schedule, mask,
                Lengths(t.kv_lengths, lengths.stride, lengths.is_given), partial, full, mods.MASK is not None,
                CONSUMERS * ROWS, t.key.block_shape[2])  # fmt: skip
    statistics = Statistics(t.lse, t.delta, sizes.H, sizes.M, padded, sizes.B * sizes.H * padded)
    one = gl.to_tensor(1)
    _run(t.query, t.grad_out, t.key, t.value, t.grad_query, t.grad_query, statistics, QueryWork(work), one, one, one,
         scale, t.counter, mods, False, PACE)  # fmt: skip
