"""The gradient of a convolution's input for Hopper: as the forward pass, a tile's rows being places of one phase.

The weight lies as the forward pass has it, [O, taps, C]: wgmma reads 16-bit B with K along its rows as well. Phases
have different numbers of taps; those with most come first, and what none reaches is stored as zeros.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tk.kernels.conv.geometry import pixel, place, tap_of
from tk.kernels.conv.tma import Elements, Position, _store_layout
from tk.kernels.conv_weight_grad.tma import Plain
from tk.kernels.hopper.epilogue import InMatrix, TmaStore, store_tile
from tk.kernels.hopper.pipeline import allocate_barriers
from tk.kernels.hopper.tile_scheduler import TileOrder
from tk.kernels.hopper.warp_roles import mainloop
from tk.kernels.hopper.wgmma import Wgmma


@gluon.aggregate
class Phase:
    """Of each dimension its first place, the first tap that reaches it and (KD, KH, KW) how many do. Place q's tap i
    reads pixel q + lower + start - i * back of grad."""

    first_d: gl.tensor
    first_h: gl.tensor
    first_w: gl.tensor
    tap_d: gl.tensor
    tap_h: gl.tensor
    tap_w: gl.tensor
    start_d: gl.tensor
    start_h: gl.tensor
    start_w: gl.tensor
    KD: gl.tensor
    KH: gl.tensor
    KW: gl.tensor
    channels: gl.tensor  # of grad


@gluon.jit
def _along(tap, taps, stride, padding, lower):
    """(first, start, taps) of the phase whose first tap is `tap`, of a dimension."""
    first = (tap + stride - padding % stride) % stride
    return first, (first + padding - tap) // stride - lower, (taps - tap + stride - 1) // stride


@gluon.aggregate
class PhaseScheduler:
    """Whole tiles, round-robin over the programs, phase after phase. The state is the next tile. A tile's coordinates
    are its row and column within its phase, and the phase, which is the number of its first tap among the first of each
    dimension: the lower, the more taps."""

    tiles: gl.tensor
    tiles_of_phase: gl.tensor
    order: TileOrder
    k_blocks_of_tap: gl.tensor
    channels: gl.tensor
    KD: gl.tensor
    KH: gl.tensor
    KW: gl.tensor
    stride_d: gl.tensor
    stride_h: gl.tensor
    stride_w: gl.tensor
    padding_d: gl.tensor
    padding_h: gl.tensor
    padding_w: gl.tensor
    lower_d: gl.tensor
    lower_h: gl.tensor
    lower_w: gl.tensor

    @gluon.jit
    def phase(self, index):
        tap_d, tap_h, tap_w = tap_of(index, self.stride_h, self.stride_w)
        first_d, start_d, KD = _along(tap_d, self.KD, self.stride_d, self.padding_d, self.lower_d)
        first_h, start_h, KH = _along(tap_h, self.KH, self.stride_h, self.padding_h, self.lower_h)
        first_w, start_w, KW = _along(tap_w, self.KW, self.stride_w, self.padding_w, self.lower_w)
        return Phase(first_d, first_h, first_w, tap_d, tap_h, tap_w, start_d, start_h, start_w, KD, KH, KW,
                     self.channels)  # fmt: skip

    @gluon.jit
    def k_blocks(self, tile):
        phase = self.phase(tile // self.tiles_of_phase)
        return phase.KD * phase.KH * phase.KW * self.k_blocks_of_tap

    @gluon.jit
    def begin(self):
        return gl.program_id(0)

    @gluon.jit
    def has_work(self, tile):
        return tile < self.tiles

    @gluon.jit
    def next(self, tile):
        return tile + gl.num_programs(0), tile, 0, self.k_blocks(tile)

    @gluon.jit
    def skip(self, tile, count: gl.constexpr):
        return tile + count * gl.num_programs(0)

    @gluon.jit
    def coordinates(self, tile):
        index = tile // self.tiles_of_phase
        m, n = self.order.coordinates(tile - index * self.tiles_of_phase)
        return m, n, index


@gluon.aggregate
class GradOperand:
    """The pixels that TILE places read, as BLOCKS blocks, one TMA load each."""

    desc: gl.nvidia.hopper.tma.tensor_descriptor_im2col
    smem: gl.shared_memory_descriptor
    QD: gl.tensor
    QH: gl.tensor
    QW: gl.tensor
    lower_d: gl.tensor
    lower_h: gl.tensor
    lower_w: gl.tensor
    back_d: gl.tensor
    back_h: gl.tensor
    back_w: gl.tensor
    TILE: gl.constexpr
    BLOCKS: gl.constexpr
    SPATIAL: gl.constexpr

    @gluon.jit
    def place_of(self, row):
        image, d, h, w = pixel(row, self.QD, self.QH, self.QW)
        return image, d + self.lower_d, h + self.lower_h, w + self.lower_w

    @gluon.jit
    def locate(self, at):
        row = at[0] * self.TILE
        places = (self.place_of(row),)
        for i in gl.static_range(1, self.BLOCKS):
            places = places + (self.place_of(row + i * (self.TILE // self.BLOCKS)),)
        return places

    @gluon.jit
    def load(self, pipeline, state, places, phase, at):
        barrier = pipeline.full.index(state.stage)
        mbarrier.expect(barrier, self.desc.nbytes_per_cta * self.BLOCKS)
        d_offset = (phase.start_d - at.kd * self.back_d).to(gl.int16)
        h_offset = (phase.start_h - at.kh * self.back_h).to(gl.int16)
        w_offset = (phase.start_w - at.kw * self.back_w).to(gl.int16)
        for i in gl.static_range(self.BLOCKS):
            image, d, h, w = places[i]
            smem = self.smem.index(state.stage * self.BLOCKS + i)
            if self.SPATIAL == 2:
                tma.async_load_im2col(self.desc, [image, h, w, at.c], [h_offset, w_offset], barrier, smem)
            else:
                offsets = [d_offset, h_offset, w_offset]
                tma.async_load_im2col(self.desc, [image, d, h, w, at.c], offsets, barrier, smem)


@gluon.aggregate
class WeightOperand:
    """TILE input channels: columns."""

    desc: gl.nvidia.hopper.tma.tensor_descriptor
    smem: gl.shared_memory_descriptor
    stride_d: gl.tensor
    stride_h: gl.tensor
    stride_w: gl.tensor
    TILE: gl.constexpr

    @gluon.jit
    def locate(self, at):
        return at[1] * self.TILE

    @gluon.jit
    def load(self, pipeline, state, column, phase, at):
        barrier = pipeline.full.index(state.stage)
        mbarrier.expect(barrier, self.desc.nbytes_per_cta)
        kd = phase.tap_d + at.kd * self.stride_d
        kh = phase.tap_h + at.kh * self.stride_h
        kw = phase.tap_w + at.kw * self.stride_w
        smem = self.smem.index(state.stage).reshape(self.desc.block_shape)
        tma.async_load(self.desc, [at.c, kd, kh, kw, column], barrier, smem)


@gluon.aggregate
class Producer:
    """One warp that loads an operand."""

    operand: object
    pipeline: object
    scheduler: PhaseScheduler
    BLOCK_K: gl.constexpr


@gluon.jit
def produce_phases(self):
    """What a Producer does."""
    work = self.scheduler.begin()
    state = self.pipeline.begin()
    while self.scheduler.has_work(work):
        work, tile, k_begin, k_end = self.scheduler.next(work)
        at = self.scheduler.coordinates(tile)
        phase = self.scheduler.phase(at[2])
        places = self.operand.locate(at)
        zero = gl.to_tensor(0)
        position = Position(zero, zero, zero, zero)
        for _ in range(k_begin, k_end):
            self.pipeline.producer_acquire(state)
            self.operand.load(self.pipeline, state, places, phase, position)
            state = state.next()
            position = position.next(phase, self.BLOCK_K)


@gluon.aggregate
class PhaseStore:
    """Straight to the places of a phase, which are `stride` from each other. What a phase has beyond the end of out is
    left away. `room`: the places of a tile's phase that there are."""

    desc: Elements
    out: gl.tensor
    rows: gl.tensor
    cols: gl.tensor
    scheduler: PhaseScheduler
    QD: gl.tensor
    QH: gl.tensor
    QW: gl.tensor
    D: gl.tensor
    H: gl.tensor
    W: gl.tensor
    stride_n: gl.tensor
    stride_c: gl.tensor
    stride_d: gl.tensor
    stride_h: gl.tensor
    stride_w: gl.tensor
    room_d: gl.tensor
    room_h: gl.tensor
    room_w: gl.tensor
    ROWS: gl.constexpr
    COLS: gl.constexpr
    STAGES: gl.constexpr
    CHANNELS_LAST: gl.constexpr

    @gluon.jit
    def of_consumer(self, index: gl.constexpr):
        return self

    @gluon.jit
    def of_tile(self, at):
        s = self.scheduler
        phase = s.phase(at[2])
        first = place(phase.first_d, phase.first_h, phase.first_w, self.stride_d, self.stride_h, self.stride_w)
        return gl.aggregate_replace(
            self,
            out=self.out + first,
            room_d=(self.D - phase.first_d + s.stride_d - 1) // s.stride_d,
            room_h=(self.H - phase.first_h + s.stride_h - 1) // s.stride_h,
            room_w=(self.W - phase.first_w + s.stride_w - 1) // s.stride_w,
        )

    @gluon.jit
    def put(self, x, buffer: gl.constexpr, row, col):
        LAYOUT: gl.constexpr = _store_layout(self.COLS, self.CHANNELS_LAST)
        x = gl.convert_layout(x, LAYOUT)
        i = row + gl.arange(0, self.ROWS, gl.SliceLayout(1, LAYOUT))
        j = col + gl.arange(0, self.COLS, gl.SliceLayout(0, LAYOUT))
        s = self.scheduler
        image, d, h, w = pixel(i, self.QD, self.QH, self.QW)
        there = (i < self.rows) & (d < self.room_d) & (h < self.room_h) & (w < self.room_w)
        at = image.to(gl.int64) * self.stride_n
        at += place(d * s.stride_d, h * s.stride_h, w * s.stride_w, self.stride_d, self.stride_h, self.stride_w)
        if self.CHANNELS_LAST:
            to = self.out + at[:, None] + j[None, :]
        else:
            to = self.out + at[:, None] + (j.to(gl.int64) * self.stride_c)[None, :]
        gl.store(to, x, mask=there[:, None] & (j < self.cols)[None, :])


@gluon.aggregate
class Consumer:
    """A warp group that multiplies and stores: the (INDEX % COOPERATIVE)-th rows of a tile, of every tile or, with
    PINGPONG, of every other one."""

    mma: object
    store: object
    pipeline: object
    order: object
    scheduler: PhaseScheduler
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    SUBTILE_N: gl.constexpr
    COOPERATIVE: gl.constexpr
    PINGPONG: gl.constexpr
    INDEX: gl.constexpr


@gluon.jit
def consume_phases(self):
    """As kernels/hopper/warp_roles.py's `consume`, of tiles with different numbers of steps, or none."""
    PART: gl.constexpr = self.INDEX % self.COOPERATIVE
    TURN: gl.constexpr = self.INDEX // self.COOPERATIVE
    ROWS: gl.constexpr = self.BLOCK_M // self.COOPERATIVE
    epilogue = Plain("plain")
    store = self.store.of_consumer(self.INDEX)
    work = self.scheduler.begin()
    state = self.pipeline.begin()
    last = 0
    turn_phase = 1 - TURN
    if TURN > 0:
        state = state.skip(self.scheduler.k_blocks(work))
        work = self.scheduler.skip(work, 1)
    while self.scheduler.has_work(work):
        work, tile, k_begin, k_end = self.scheduler.next(work)
        at = self.scheduler.coordinates(tile)
        row = at[0] * self.BLOCK_M + PART * ROWS
        col = at[1] * self.BLOCK_N
        if self.PINGPONG:
            self.order.wait(TURN, turn_phase)
            turn_phase ^= 1
        acc, state, last = mainloop(self.mma, self.pipeline, state, k_begin, k_end, last)
        if self.PINGPONG:
            self.order.arrive(1 - TURN)
        acc = self.mma.wait(acc, 0)
        self.pipeline.consumer_release(last, k_end > k_begin)
        store_tile(acc, row, col, store.of_tile(at), epilogue, self.SUBTILE_N, self.BLOCK_N // self.SUBTILE_N)
        if self.PINGPONG:
            state = state.skip(self.scheduler.k_blocks(work))
            work = self.scheduler.skip(work, 1)
    tma.store_wait(0)


@gluon.jit
def input_grad_tma(grad_desc, weight_desc, out_desc, out, rows, cols, channels, tiles, tiles_of_phase, group,
                   QD, QH, QW, D, H, W, KD, KH, KW, stride_d, stride_h, stride_w, padding_d, padding_h, padding_w,
                   lower_d, lower_h, lower_w, back_d, back_h, back_w, out_n, out_c, out_d, out_h, out_w,
                   BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
                   COOPERATIVE: gl.constexpr, PINGPONG: gl.constexpr, SUBTILE_N: gl.constexpr,
                   EPILOGUE_STAGES: gl.constexpr, SPATIAL: gl.constexpr, STORE: gl.constexpr,
                   CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr):  # fmt: skip
    """rows x cols: of a phase, which has QD x QH x QW places of each image. channels: of grad. STORE: "matrix": strides
    are 1, and out_desc is a view of out whose rows are its places; else see conv_tma."""
    ROWS: gl.constexpr = BLOCK_M // COOPERATIVE
    CONSUMERS: gl.constexpr = 2 if PINGPONG else COOPERATIVE
    order = TileOrder(gl.cdiv(rows, BLOCK_M), gl.cdiv(cols, BLOCK_N), group)
    scheduler = PhaseScheduler(tiles, tiles_of_phase, order, gl.cdiv(channels, BLOCK_K), channels, KD, KH, KW,
                               stride_d, stride_h, stride_w, padding_d, padding_h, padding_w,
                               lower_d, lower_h, lower_w)  # fmt: skip
    a_smem = gl.allocate_shared_memory(grad_desc.dtype, [STAGES * COOPERATIVE, ROWS, BLOCK_K], grad_desc.layout)
    a = GradOperand(grad_desc, a_smem, QD, QH, QW, lower_d, lower_h, lower_w, back_d, back_h, back_w,
                    BLOCK_M, COOPERATIVE, SPATIAL)  # fmt: skip
    b_smem = gl.allocate_shared_memory(grad_desc.dtype, [STAGES, BLOCK_K, BLOCK_N], grad_desc.layout)
    b = WeightOperand(weight_desc, b_smem, stride_d, stride_h, stride_w, BLOCK_N)
    if STORE == "matrix":
        out_smem = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS * EPILOGUE_STAGES] + out_desc.block_shape,
                                             out_desc.layout)  # fmt: skip
        store = TmaStore(out_smem, out_desc, InMatrix(False), EPILOGUE_STAGES)
    else:
        out_c = gl.to_tensor(out_c)  # which may be the constant 1
        store = PhaseStore(Elements(grad_desc.dtype), out, rows, cols, scheduler, QD, QH, QW, D, H, W,
                           out_n, out_c, out_d, out_h, out_w, QD, QH, QW,
                           ROWS, SUBTILE_N, EPILOGUE_STAGES, STORE == "channels_last")  # fmt: skip
    pipeline, turns = allocate_barriers(STAGES, 2, COOPERATIVE, 2 if PINGPONG else 1)
    fence_async_shared()
    gl.barrier()
    producer_a = Producer(a, pipeline, scheduler, BLOCK_K)
    producer_b = Producer(b, pipeline, scheduler, BLOCK_K)
    mma = Wgmma(a_smem, b_smem, ROWS, BLOCK_N, True, False, COOPERATIVE, 0)
    consumer = Consumer(mma, store, pipeline, turns, scheduler, BLOCK_M, BLOCK_N, SUBTILE_N, COOPERATIVE, PINGPONG, 0)
    other = gl.aggregate_replace(consumer, mma=gl.aggregate_replace(mma, INDEX=1 % COOPERATIVE), INDEX=1)
    gl.warp_specialize(
        [
            (consume_phases, (consumer,)),
            (consume_phases, (other,)),
            (produce_phases, (producer_a,)),
            (produce_phases, (producer_b,)),
        ],
        [4, 1, 1],
        [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
    )
