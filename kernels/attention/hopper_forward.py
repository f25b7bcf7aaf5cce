"""The forward for Hopper (sm_90a) in Gluon: persistent, TMA, warp-specialised.

    warps 0-3, 4-7 (and 8-11)   consumers: 64 query rows each; wgmma products, softmax in registers
    one warp                    producer: every TMA load, and which tile comes next

K and V go through rings of stages (kernels/hopper/pipeline.py). A consumer issues the products of key tile j and those
of P with the values of tile j - 1 together, and does the softmax of j while the second run; the other consumers'
products fill the rest. Under a mask tiles take unequal time: they are handed out by a counter, the long ones first.

Tiles that are met partially come first, with the mask; so does everything where the keys do not fill their last tile,
since bounds are checked with the mask: the producer says which tiles are full, where it does not count. Else full tiles
follow, without a comparison.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tk.aot.expr import Expr, ceil_div, device, maximum, minimum, select
from tk.aot.spec import (
    Arg,
    Buffer,
    Bundle,
    Config,
    Const,
    Constraint,
    Int,
    Kernel,
    Launch,
    Op,
    Plan,
    Point,
    Scratch,
    require,
)
from tk.kernels.attention.bundles import Mods
from tk.kernels.attention.hopper_tiles import (
    LONGEST,
    ROWS,
    Lengths,
    Schedule,
    Sizes,
    Tiles,
    Work,
    descriptor,
    get_number,
    is_full,
    make_ring,
    no_repeats,
    put_number,
    start_of,
)
from tk.kernels.attention.problem import Head, Problem, tensor, tile_time
from tk.kernels.attention.softmax import UNFUSED
from tk.kernels.attention.walk import lists_of
from tk.kernels.hopper.pipeline import Pipeline, PipelineState

# --- The producer ---


@gluon.aggregate
class Buffers:
    """Shared memory: a tile of queries and of the output for each consumer, rings of keys and values, and where each
    tile of keys begins (Keys.place). cut: the barrier of values that the producer itself waits for. SHARED: the output
    takes the place of the queries, which are loaded only when it has left."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    places: gl.shared_memory_descriptor
    cut: gl.shared_memory_descriptor
    q_ring: Pipeline  # a stage for each consumer
    k_ring: Pipeline
    v_ring: Pipeline
    SHARED: gl.constexpr


@gluon.jit
def _load(desc, b, h, row, smem, ring, state):
    ring.producer_acquire(state)
    barrier = ring.full.index(state.stage)
    mbarrier.expect(barrier, desc.nbytes_per_cta)
    tma.async_load(desc, [b, h, row, 0], barrier, smem.index(state.stage))


@gluon.jit
def _load_keys(desc, b, h, place, buffers, state):
    """The barrier of a stage has two arrivals: the load's, and one for where it begins."""
    _load(desc, b, h, start_of(place), buffers.k, buffers.k_ring, state)
    put_number(buffers.places.index(state.stage), place)
    mbarrier.arrive(buffers.k_ring.full.index(state.stage), count=1)


@gluon.jit
def _load_values(desc, b, h, place, kv_end, N, buffers, state, cut_phase):
    """Past an entry's length memory may hold what is no number, which a weight of 0 does not hide: those rows are made
    0 before the consumers are told. Returns the phase of `cut`."""
    BLOCK_N: gl.constexpr = buffers.v.shape[3]
    start = start_of(place)
    count = kv_end - start
    if (kv_end < N) & (count < BLOCK_N):
        buffers.v_ring.producer_acquire(state)
        mbarrier.expect(buffers.cut.index(0), desc.nbytes_per_cta)
        tma.async_load(desc, [b, h, start, 0], buffers.cut.index(0), buffers.v.index(state.stage))
        mbarrier.wait(buffers.cut.index(0), cut_phase)
        cut_phase ^= 1
        _clear_rows(buffers.v.index(state.stage).reshape([BLOCK_N, buffers.v.shape[4]]), count)
        fence_async_shared()
        gl.barrier()
        mbarrier.arrive(buffers.v_ring.full.index(state.stage), count=1)
    else:
        _load(desc, b, h, start, buffers.v, buffers.v_ring, state)
    return cut_phase


@gluon.jit
def _clear_rows(smem, first):
    """By one warp, in pieces for few registers: as the shared layout has them together."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    BLOCK_N: gl.constexpr = smem.shape[0]
    DV: gl.constexpr = smem.shape[1]
    for row in gl.static_range(0, BLOCK_N, 8):
        if row + 8 > first:
            inside = (row + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT)) < first)[:, None]
            for column in gl.static_range(0, DV, 64):
                piece = smem.slice(row, 8).slice(column, 64, dim=1)
                x = piece.load(LAYOUT)
                piece.store(gl.where(inside, x, gl.zeros([8, 64], smem.dtype, LAYOUT)))


@gluon.jit
def _produce(q_desc, k_desc, v_desc, work, buffers, tiles, counter, TILE: gl.constexpr):
    """The launch's last fetch leaves the counter at 0."""
    CONSUMERS: gl.constexpr = TILE.CONSUMERS
    k_state = buffers.k_ring.begin()
    v_state = buffers.v_ring.begin()
    tile_state = tiles.ring.begin()
    q_phase = 0
    cut_phase = gl.to_tensor(0)
    t = gl.program_id(0)
    while t < work.schedule.tiles:
        b, h, row0 = work.place(t)
        keys = work.keys(b, h, row0)
        tiles.put(tile_state, b, h, row0, keys.masked, keys.total, keys.tiles.end)
        tile_state = tile_state.next()
        b_kv = gl.minimum(b, work.sizes.B_kv - 1)
        h_kv = h // work.sizes.group
        place = gl.to_tensor(0)
        if keys.total > 0:
            place = keys.place(0)
            _load_keys(k_desc, b_kv, h_kv, place, buffers, k_state)
            k_state = k_state.next()
        for c in gl.static_range(CONSUMERS):
            state = PipelineState(gl.to_tensor(c), gl.to_tensor(q_phase), CONSUMERS)
            _load(q_desc, b, h, row0 + c * ROWS, buffers.q, buffers.q_ring, state)
        q_phase ^= 1
        t_next = t + gl.num_programs(0)
        if TILE.DYNAMIC:  # while this tile's first loads fly
            fetched = gl.atomic_add(counter, 1)
            if fetched == work.schedule.tiles - 1:
                gl.store(counter, 0)
            t_next = fetched + gl.num_programs(0)
        for i in range(keys.total):  # a tile's values after the next one's keys
            following = place
            if i + 1 < keys.total:
                following = keys.place(i + 1)
                _load_keys(k_desc, b_kv, h_kv, following, buffers, k_state)
                k_state = k_state.next()
            cut_phase = _load_values(v_desc, b_kv, h_kv, place, keys.tiles.end, work.sizes.N, buffers, v_state,
                                     cut_phase)  # fmt: skip
            v_state = v_state.next()
            place = following
        t = t_next
    tiles.put(tile_state, 0, 0, -1, 0, 0, 0)


# --- The consumers ---


@gluon.aggregate
class Scores:
    """What makes weights of products: the mods with what they read."""

    b: gl.tensor
    h: gl.tensor
    row0: gl.tensor
    kv_end: gl.tensor
    scale: gl.tensor
    mods: object

    @gluon.jit
    def of(self, s, place, MASKED: gl.constexpr):
        """Scores; without a score_mod products, of which `scale` makes scores. -inf where nothing is seen."""
        layout: gl.constexpr = s.type.layout
        rows = (self.row0 + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout)))[:, None]
        start = start_of(place)
        if self.mods.PAIRS is not None:
            gl.assume((start >= 0) & (start <= LONGEST))  # so no column overflows, and offsets add up in 64 bits
            start = start // 2 * 2  # even, as the compiler should know
        cols = (start + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout)))[None, :]
        if self.mods.SCORE is not None:
            s = self.mods.SCORE(s * self.scale, self.b, self.h, rows, cols, self.mods.captures, self.mods.PAIRS)
        if MASKED:
            keep = cols < self.kv_end
            if self.mods.MASK is not None:
                seen = self.mods.MASK(self.b, self.h, rows, cols, self.mods.captures, self.mods.PAIRS)
                keep = keep & (seen | is_full(place))
            s = gl.where(keep, s, -float("inf"))
        return s

    @gluon.jit
    def unit(self):
        """What a difference is to be multiplied with for base 2."""
        if self.mods.SCORE is not None:
            return gl.to_tensor(1.4426950408889634)
        else:
            return self.scale * 1.4426950408889634

    @gluon.jit
    def natural(self, m):
        """The score of what :meth:`of` gives."""
        if self.mods.SCORE is not None:
            return m
        else:
            return m * self.scale


@gluon.jit
def _softmax(s, m_i, l_i, unit, OPERAND: gl.constexpr, DTYPE: gl.constexpr):
    """One step of online softmax. Returns P as a product's left operand, maximum, sum, and the rescaling."""
    m_new = gl.maximum(m_i, gl.max(s, 1))
    base = gl.where(m_new == -float("inf"), 0.0, m_new)  # a row that has seen no key yet
    p = gl.exp2((s - base[:, None]) * unit)  # the difference first: softmax.py
    alpha = gl.exp2((m_i - base) * unit)
    l_i = l_i * alpha + gl.sum(p, 1)
    return gl.convert_layout(p.to(DTYPE), OPERAND, assert_trivial=True), m_new, l_i, alpha


@gluon.jit
def _products(buffers, c: gl.constexpr, stage, zeros):
    """Issues Q K^T of a stage."""
    q = buffers.q.index(c).reshape([ROWS, buffers.q.shape[4]])
    k = buffers.k.index(stage).reshape([zeros.shape[1], buffers.k.shape[4]])
    return warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def _step(c: gl.constexpr, buffers, scores, unit, k_state, v_state, p, acc, m_i, l_i, zeros,
          MASKED: gl.constexpr, OPERAND: gl.constexpr, DTYPE: gl.constexpr):  # fmt: skip
    """A tile of keys: its products are issued together with the values of the tile before, and its softmax is done
    while those run."""
    buffers.k_ring.consumer_wait(k_state)
    s = _products(buffers, c, k_state.stage, zeros)
    buffers.v_ring.consumer_wait(v_state)
    v = buffers.v.index(v_state.stage).reshape([zeros.shape[1], acc.shape[1]])
    acc = warpgroup_mma(p, v, acc, is_async=True)
    place = gl.to_tensor(0)
    if MASKED or scores.mods.SCORE is not None:
        place = get_number(buffers.places.index(k_state.stage))
    s = warpgroup_mma_wait(1, [s])
    buffers.k_ring.consumer_release(k_state.stage, True)
    s = scores.of(s, place, MASKED)
    p_next, m_i, l_i, alpha = _softmax(s, m_i, l_i, unit, OPERAND, DTYPE)
    acc, p = warpgroup_mma_wait(0, [acc, p])  # p is named to keep its registers until here
    buffers.v_ring.consumer_release(v_state.stage, True)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)[:, None]
    return p_next, acc, m_i, l_i


@gluon.jit
def _consume(c: gl.constexpr, o_desc, lse, H, M, sinks, stride_sink, extras, scale, mods, buffers, tiles,
             BLOCK_N: gl.constexpr):  # fmt: skip
    """extras: 1 for sinks, and 2 for the largest scores, M behind the log-sum-exps of a head. (One number, for few
    registers.)"""
    DV: gl.constexpr = buffers.v.shape[4]
    DTYPE: gl.constexpr = o_desc.dtype
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    LAYOUT_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT_O, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT_S)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT_S)

    k_state = buffers.k_ring.begin()
    v_state = buffers.v_ring.begin()
    tile_state = tiles.ring.begin()
    q_phase = 0
    tile = tiles.get(tile_state)
    while tile.row >= 0:
        b = tile.b
        h = tile.h
        row0 = tile.row + c * ROWS
        scores = Scores(b, h, row0, tile.kv_end, scale, mods)
        unit = scores.unit()
        m_i = gl.full([ROWS], -float("inf"), gl.float32, ROW)
        l_i = gl.full([ROWS], 0.0, gl.float32, ROW)
        acc = gl.zeros([ROWS, DV], gl.float32, LAYOUT_O)
        mbarrier.wait(buffers.q_ring.full.index(c), q_phase)
        q_phase ^= 1
        if tile.total > 0:
            # The first tile, with the mask whichever it is.
            buffers.k_ring.consumer_wait(k_state)
            place = get_number(buffers.places.index(k_state.stage))
            s = warpgroup_mma_wait(0, [_products(buffers, c, k_state.stage, zeros)])
            buffers.k_ring.consumer_release(k_state.stage, True)
            k_state = k_state.next()
            s = scores.of(s, place, True)
            p, m_i, l_i, alpha = _softmax(s, m_i, l_i, unit, OPERAND, DTYPE)
            for i in range(1, tile.masked):
                p, acc, m_i, l_i = _step(c, buffers, scores, unit, k_state, v_state, p, acc, m_i, l_i, zeros,
                                         True, OPERAND, DTYPE)  # fmt: skip
                k_state = k_state.next()
                v_state = v_state.next()
            for i in range(gl.maximum(tile.masked, 1), tile.total):
                p, acc, m_i, l_i = _step(c, buffers, scores, unit, k_state, v_state, p, acc, m_i, l_i, zeros,
                                         False, OPERAND, DTYPE)  # fmt: skip
                k_state = k_state.next()
                v_state = v_state.next()
            if not buffers.SHARED:
                mbarrier.arrive(buffers.q_ring.empty.index(c), count=1)
            buffers.v_ring.consumer_wait(v_state)
            v = buffers.v.index(v_state.stage).reshape([BLOCK_N, DV])
            acc = warpgroup_mma(p, v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            buffers.v_ring.consumer_release(v_state.stage, True)
            v_state = v_state.next()
        elif not buffers.SHARED:
            mbarrier.arrive(buffers.q_ring.empty.index(c), count=1)

        rows = row0 + gl.arange(0, ROWS, ROW)
        m_i = scores.natural(m_i)
        at = lse + (b * H + h).to(gl.int64) * (M << (extras >> 1)) + rows
        if extras > 1:
            gl.store(at + M, m_i, mask=rows < M)
        if (extras & 1) != 0:
            sink = gl.load(sinks + h.to(gl.int64) * stride_sink)
            m_new = gl.maximum(m_i, sink)
            base = gl.where(m_new == -float("inf"), 0.0, m_new)
            alpha = gl.exp2((m_i - base) * 1.4426950408889634)
            l_i = l_i * alpha + gl.exp2((sink - base) * 1.4426950408889634)
            m_i = m_new
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, LAYOUT_O), assert_trivial=True)[:, None]
        is_empty = l_i == 0.0
        l_safe = gl.where(is_empty, 1.0, l_i)
        acc = acc * gl.convert_layout(1.0 / l_safe, gl.SliceLayout(1, LAYOUT_O), assert_trivial=True)[:, None]
        tma.store_wait(0)  # what was stored from here before has left
        gl.barrier()
        buffers.o.index(c).reshape([ROWS, DV]).store(acc.to(DTYPE))
        fence_async_shared()
        gl.barrier()
        tma.async_store(o_desc, [b, h, row0, 0], buffers.o.index(c))
        row_lse = gl.where(is_empty, -float("inf"), m_i + gl.log2(l_safe) * 0.6931471805599453)
        gl.store(at, row_lse, mask=rows < M)
        if buffers.SHARED:
            tma.store_wait(0)
            gl.barrier()
            mbarrier.arrive(buffers.q_ring.empty.index(c), count=1)
        tile_state = tile_state.next()
        tile = tiles.get(tile_state)
    tma.store_wait(0)


# --- The kernel ---


class HopperTensors(NamedTuple):
    """query, key, value, out: tensor descriptors of [batch, heads, rows, head size]; the others are addresses."""

    query: Any
    key: Any
    value: Any
    out: Any
    lse: Any
    kv_lists: Any
    kv_lengths: Any
    sinks: Any
    counter: Any


class HopperOptional(NamedTuple):
    """Of kv_lengths and sinks, and which are given; extras as _consume has them."""

    stride_length: Any
    has_lengths: Any
    stride_sink: Any
    extras: Any


@dataclass(frozen=True)
class HopperTile:
    """DYNAMIC: tiles are handed out by a counter, else by a stride. SHARED: as Buffers has it."""

    CONSUMERS: int
    BLOCK_N: int
    STAGES: int
    DYNAMIC: bool
    SHARED: bool
    CONSUMER_REGS: int
    PRODUCER_REGS: int


@gluon.jit
def attention_hopper_forward(tensors, sizes, scale, schedule, mask, kv_strides, optional, mods, TILE: gl.constexpr):
    query = tensors.query
    key = tensors.key
    value = tensors.value
    out = tensors.out
    dtype: gl.constexpr = query.dtype
    CONSUMERS: gl.constexpr = TILE.CONSUMERS
    STAGES: gl.constexpr = TILE.STAGES
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    q = gl.allocate_shared_memory(dtype, [CONSUMERS] + query.block_shape, query.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES] + key.block_shape, key.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES] + value.block_shape, value.layout)
    o = q
    if not TILE.SHARED:
        o = gl.allocate_shared_memory(dtype, [CONSUMERS] + out.block_shape, out.layout)
    number: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    places = gl.allocate_shared_memory(gl.int32, [STAGES, 1], number)
    cut = mbarrier.allocate_mbarrier(batch=1)
    mbarrier.init(cut.index(0), count=1)
    numbers = gl.allocate_shared_memory(gl.int32, [2 * 6, 1], number)
    buffers = Buffers(q, k, v, o, places, cut, make_ring(CONSUMERS, 1, 1), make_ring(STAGES, 2, CONSUMERS),
                      make_ring(STAGES, 1, CONSUMERS), TILE.SHARED)  # fmt: skip
    tiles = Tiles(numbers, make_ring(2, 1, CONSUMERS))
    fence_async_shared()
    lengths = Lengths(tensors.kv_lengths, optional.stride_length, optional.has_lengths)
    partial, full = lists_of(tensors.kv_lists, kv_strides)
    work = Work(sizes, schedule, mask, lengths, partial, full, mods.MASK is not None, CONSUMERS * ROWS, BLOCK_N)
    # The first function runs in the kernel's own warps and gets the registers that the others leave.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (0, out, tensors.lse, sizes.H, sizes.M, tensors.sinks, optional.stride_sink, optional.extras,
                        scale, mods, buffers, tiles, BLOCK_N)),
            (_consume, (1, out, tensors.lse, sizes.H, sizes.M, tensors.sinks, optional.stride_sink, optional.extras,
                        scale, mods, buffers, tiles, BLOCK_N)),
            (_produce, (query, key, value, work, buffers, tiles, tensors.counter, TILE)),
        ], [4, 1], [TILE.CONSUMER_REGS, TILE.PRODUCER_REGS])  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize([
            (_consume, (0, out, tensors.lse, sizes.H, sizes.M, tensors.sinks, optional.stride_sink, optional.extras,
                        scale, mods, buffers, tiles, BLOCK_N)),
            (_consume, (1, out, tensors.lse, sizes.H, sizes.M, tensors.sinks, optional.stride_sink, optional.extras,
                        scale, mods, buffers, tiles, BLOCK_N)),
            (_consume, (2, out, tensors.lse, sizes.H, sizes.M, tensors.sinks, optional.stride_sink, optional.extras,
                        scale, mods, buffers, tiles, BLOCK_N)),
            (_produce, (query, key, value, work, buffers, tiles, tensors.counter, TILE)),
        ], [4, 4, 1], [TILE.CONSUMER_REGS, TILE.CONSUMER_REGS, TILE.PRODUCER_REGS])  # fmt: skip


# --- Plans ---


def _config(consumers: int, block_n: int, stages: int, regs: int, producer_regs: int) -> Config:
    shape = dict(consumers=consumers, block_m=64 * consumers, block_n=block_n, num_stages=stages, consumer_regs=regs,
                 producer_regs=producer_regs)  # fmt: skip
    return Config(f"hopper_{64 * consumers}x{block_n}_s{stages}", shape)


_TWO = _config(2, 128, 2, 240, 24)
_THREE = _config(3, 128, 2, 160, 32)  # 485 TF where two give 400, at head size 64 without a mask
_WIDE = _config(2, 64, 2, 240, 24)  # head sizes past 128: sums of 64 x 256 leave few registers
_L2_BYTES = 16 << 20  # keys and values that are worked on at a time: 594 TF with 32 MB, 609 with 16 (causal, 128)


def kernel(problem: Problem, mods: Mods, heads: tuple[Head, ...]) -> Kernel:
    """Smaller heads are served too: what a tensor map reads past the end is 0, and what it writes there is nothing."""
    op = problem.op
    has_mask, has_score = mods.MASK.value is not None, mods.SCORE.value is not None
    pairs = problem.pairs(op)

    def config_of(head: Head) -> Config:
        if head.size > 128:
            return _WIDE
        return _THREE if head.qk == 64 and not has_mask and not has_score else _TWO

    def plan(point: Point) -> Plan | None:
        c = point.config
        if point.dtype == "fp32" or c.name != config_of(point.head).name:
            return None
        B, H, M, N = (op.local(n) for n in ("B", "H", "M", "N"))
        m_tiles = ceil_div(M, c.block_m)
        tiles = B * H * m_tiles
        programs = minimum(tiles, device.sm_count)
        time = tile_time(c.block_m, c.block_n, point.head, 2) * 3 // 5
        constraints = [*problem.constraints(op, point, ("query", "key", "value", "out")), *_constraints(op, c)]
        reads = mods
        if pairs is not None:
            reads = mods._replace(PAIRS=Const(point.captured == "pairs"))
            if point.captured == "pairs":
                constraints.append(require(pairs, "captured tensors whose elements lie in pairs along keys"))
        waves = ceil_div(tiles, device.sm_count)
        launch = Launch(
            attention_hopper_forward,
            _arguments(problem, reads, point, m_tiles, tiles),
            (programs, 1, 1),
            num_warps=4,
            num_stages=1,
            max_spill_bytes=4096,
            options=UNFUSED,
        )
        return Plan(
            constraints=tuple(constraints),
            serves=problem.serves(point),
            launches=(launch,),
            cost=5_000_000 + waves * ceil_div(N, c.block_n) * time,
            buffers=(Buffer(4, zeroed=True),) if has_mask else (Buffer(4),),
        )

    axes = problem.axes(heads, ("aligned",))
    if pairs is not None:
        axes["captured"] = ("pairs", "any")  # the first that a call fits is taken
    return Kernel(f"{problem.name}_hopper", op, axes, {90: (_TWO, _THREE, _WIDE)}, plan)


def _constraints(op: Op, c: Config) -> tuple[Constraint, ...]:
    has_lists, q_block, kv_block = op.local("has_lists"), op.int("q_block"), op.int("kv_block")
    fits = (q_block % c.block_m == 0) & (kv_block % c.block_n == 0)
    found = [
        require(select(has_lists, fits, 1), f"mask blocks that are multiples of {c.block_m} and {c.block_n}"),
        require(~op.int("negative_scale"), "a scale of more than 0"),
        require(op.local("N") > 0, "keys"),
    ]
    return (*found, *no_repeats(op, ("query", "key", "value", "out")))


def _arguments(problem: Problem, mods: Mods, point: Point, m_tiles: Expr, tiles: Expr) -> dict[str, Arg | Bundle]:
    op, c, head = problem.op, point.config, point.head
    optional = problem.optional(op)
    has_mask = mods.MASK.value is not None
    heads = heads_at_a_time(op.local("B") * op.local("H"), op.local("N"), op.local("group"), head)
    return {
        "tensors": HopperTensors(
            query=descriptor(op, "query", point.dtype, 64, head.qk),
            key=descriptor(op, "key", point.dtype, c.block_n, head.qk),
            value=descriptor(op, "value", point.dtype, c.block_n, head.v),
            out=descriptor(op, "out", point.dtype, 64, head.v),
            kv_lists=problem.lists(op, "kv"),
            counter=Scratch(0, "i32"),
            **{name: problem.pointer(op, name) for name in ("lse", "kv_lengths", "sinks")},
        ),
        "sizes": Sizes(**problem.sizes(op, Sizes._fields, point) | {"B_kv": Int(tensor(op, "key").size(0))}),
        "scale": op.float("scale"),
        "schedule": Schedule(Int(m_tiles), Int(tiles), Int(heads)),
        "mask": problem.mask(op),
        "kv_strides": problem.list_strides(op, "kv", "i32"),  # what all warps hold they hold in registers
        "optional": HopperOptional(
            **{name: optional[name] for name in ("stride_length", "has_lengths", "stride_sink")},
            extras=Int((tensor(op, "sinks").size(0) > 0) + (op.int("max_scores") != 0) * 2),
        ),
        "mods": mods,
        "TILE": Const(
            HopperTile(
                CONSUMERS=c.consumers,
                BLOCK_N=c.block_n,
                STAGES=c.num_stages,
                DYNAMIC=has_mask,
                SHARED=head.qk == head.v == 256,  # there would be no room for both
                CONSUMER_REGS=c.consumer_regs,
                PRODUCER_REGS=c.producer_regs,
            )
        ),
    }


def heads_at_a_time(heads: Expr, N: Expr, group: Expr, head: Head) -> Expr:
    fit = maximum(_L2_BYTES // maximum(N * (head.qk + head.v) * 2, 1), 1)
    return minimum(fit * maximum(group, 1), heads)
