"""The weight's gradient for Hopper: D[o, c] of a tap = the sum over pixels of grad[pixel, o] x[pixel + tap, c].

K runs over pixels, which lie along the rows of both operands: wgmma reads 16-bit operands either way round. TMA gathers
the pixels of x that a tap reads, as for the forward pass. Pixels are split over programs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tk.kernels.conv.geometry import tap_of
from tk.kernels.conv.tma import Convolution, Elements, make_tile
from tk.kernels.hopper.pipeline import allocate_barriers
from tk.kernels.hopper.stream_k import NoFixup
from tk.kernels.hopper.warp_roles import Consumer, Producer, consume
from tk.kernels.hopper.wgmma import Wgmma


@gluon.aggregate
class Units:
    """Of work: a tile's sum over `share` of its k blocks. Rows of tiles stand below each other once for every split, so
    that a row says which one it is; columns of tiles are taps, and within them blocks of channels."""

    m_tiles: gl.tensor
    n_tiles: gl.tensor
    splits: gl.tensor
    k_blocks: gl.tensor
    share: gl.tensor

    @gluon.jit
    def begin(self):
        return gl.program_id(0)

    @gluon.jit
    def has_work(self, unit):
        return unit < self.m_tiles * self.n_tiles * self.splits

    @gluon.jit
    def next(self, unit):
        begin = unit // (self.m_tiles * self.n_tiles) * self.share
        return unit + gl.num_programs(0), unit, begin, gl.minimum(begin + self.share, self.k_blocks)

    @gluon.jit
    def has_k_blocks(self, k_begin, k_end):
        return True

    @gluon.jit
    def coordinates(self, unit):
        """Programs that run side by side have the same pixels, for L2."""
        split = unit // (self.m_tiles * self.n_tiles)
        tile = unit - split * self.m_tiles * self.n_tiles
        n = tile // self.m_tiles
        return split * self.m_tiles + tile - n * self.m_tiles, n


@gluon.aggregate
class GradOperand:
    """TILE output channels as BLOCKS blocks of a block of pixels. `below`: rows of all tiles of one split."""

    desc: gl.nvidia.hopper.tma.tensor_descriptor
    smem: gl.shared_memory_descriptor
    below: gl.tensor
    TILE: gl.constexpr
    BLOCKS: gl.constexpr

    @gluon.jit
    def locate(self, row):
        return row % self.below

    @gluon.jit
    def load(self, pipeline, state, channel, pixel):
        barrier = pipeline.full.index(state.stage)
        mbarrier.expect(barrier, self.desc.nbytes_per_cta * self.BLOCKS)
        for i in gl.static_range(self.BLOCKS):
            at = [pixel, channel + i * (self.TILE // self.BLOCKS)]
            tma.async_load(self.desc, at, barrier, self.smem.index(state.stage * self.BLOCKS + i))


@gluon.aggregate
class ImageOperand:
    """TILE input channels of a tap, of a block of pixels."""

    desc: gl.nvidia.hopper.tma.tensor_descriptor_im2col
    smem: gl.shared_memory_descriptor
    conv: Convolution
    blocks: gl.tensor  # of channels
    TILE: gl.constexpr

    @gluon.jit
    def locate(self, col):
        conv = self.conv
        n = col // self.TILE
        tap = n // self.blocks
        kd, kh, kw = tap_of(tap, conv.KH, conv.KW)
        return (
            (kd * conv.dilation_d).to(gl.int16),
            (kh * conv.dilation_h).to(gl.int16),
            (kw * conv.dilation_w).to(gl.int16),
            (n - tap * self.blocks) * self.TILE,
        )

    @gluon.jit
    def load(self, pipeline, state, place, pixel):
        barrier = pipeline.full.index(state.stage)
        mbarrier.expect(barrier, self.desc.nbytes_per_cta)
        d_offset, h_offset, w_offset, c = place
        image, d, h, w = self.conv.locate(pixel)
        smem = self.smem.index(state.stage)
        if self.conv.SPATIAL == 2:
            tma.async_load_im2col(self.desc, [image, h, w, c], [h_offset, w_offset], barrier, smem)
        else:
            tma.async_load_im2col(self.desc, [image, d, h, w, c], [d_offset, h_offset, w_offset], barrier, smem)


@gluon.jit
def produce_pixels(self):
    """What a Producer does whose K runs over pixels."""
    work = self.scheduler.begin()
    state = self.pipeline.begin()
    while self.scheduler.has_work(work):
        work, unit, k_begin, k_end = self.scheduler.next(work)
        place = self.operand.locate(self.scheduler.coordinates(unit)[self.SIDE] * self.operand.TILE)
        for k in range(k_begin, k_end):
            self.pipeline.producer_acquire(state)
            self.operand.load(self.pipeline, state, place, k * self.BLOCK_K)
            state = state.next()


@gluon.aggregate
class Plain:
    """An epilogue that does nothing."""

    KIND: gl.constexpr

    @gluon.jit
    def of_tile(self, at):
        return self

    @gluon.jit
    def apply(self, acc, row, col):
        return acc


@gluon.aggregate
class PartialStore:
    """Into partials [splits, O, taps, C], fp32."""

    desc: Elements
    partials: gl.tensor
    rows: gl.tensor
    channels: gl.tensor
    taps: gl.tensor
    blocks: gl.tensor  # of channels
    below: gl.tensor
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr

    @gluon.jit
    def of_consumer(self, index: gl.constexpr):
        return self

    @gluon.jit
    def of_tile(self, at):
        return self

    @gluon.jit
    def put(self, x, buffer: gl.constexpr, row, col):
        LAYOUT: gl.constexpr = x.type.layout
        split = row // self.below
        n = col // self.BLOCK_N
        tap = n // self.blocks
        c_first = (n - tap * self.blocks) * self.BLOCK_N + col - n * self.BLOCK_N
        o = row - split * self.below + gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
        c = c_first + gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
        line = (split.to(gl.int64) * self.rows + o) * self.taps + tap
        channels = self.channels // 8 * 8  # as they are, and the compiler knows: it stores pairs
        at = self.partials + (line * channels)[:, None] + c[None, :]
        gl.store(at, x, mask=(o < self.rows)[:, None] & (c < channels)[None, :])


@gluon.aggregate
class TapStore:
    """Into the gradient itself, [O, taps, C], where nothing else is to be added to a tile's sum."""

    smem: gl.shared_memory_descriptor
    desc: gl.nvidia.hopper.tma.tensor_descriptor
    blocks: gl.tensor  # of channels
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr

    @gluon.jit
    def of_consumer(self, index: gl.constexpr):
        return gl.aggregate_replace(self, smem=self.smem.slice(index * self.STAGES, self.STAGES))

    @gluon.jit
    def of_tile(self, at):
        return self

    @gluon.jit
    def put(self, x, buffer: gl.constexpr, row, col):
        n = col // self.BLOCK_N
        tap = n // self.blocks
        smem = self.smem.index(buffer)
        tma.store_wait(self.STAGES - 1)
        gl.barrier()
        smem.store(x)
        fence_async_shared()
        gl.barrier()
        tma.async_store(self.desc, [row, tap, col - tap * self.blocks * self.BLOCK_N],
                        smem.reshape(self.desc.block_shape))  # fmt: skip


@gluon.jit
def weight_grad_tma(grad_desc, x_desc, out_desc, partials, rows, taps, channels, splits, k_blocks, share,
                    PD, PH, PW, KH, KW, stride_d, stride_h, stride_w, lower_d, lower_h, lower_w,
                    dilation_d, dilation_h, dilation_w, shift_d, shift_h, shift_w,
                    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
                    SUBTILE_N: gl.constexpr, SPATIAL: gl.constexpr, CONSUMER_REGS: gl.constexpr,
                    PRODUCER_REGS: gl.constexpr):  # fmt: skip
    """rows: output channels. k_blocks: of all pixels; share: of a split. Of one split alone, out_desc has the gradient;
    else it is None, and partials have the sums."""
    COOPERATIVE: gl.constexpr = 2
    ROWS: gl.constexpr = BLOCK_M // COOPERATIVE
    conv = Convolution(PD, PH, PW, KH, KW, channels, stride_d, stride_h, stride_w, lower_d, lower_h, lower_w,
                       dilation_d, dilation_h, dilation_w, shift_d, shift_h, shift_w, SPATIAL)  # fmt: skip
    m_tiles = gl.cdiv(rows, BLOCK_M)
    blocks = gl.cdiv(channels, BLOCK_N)
    below = m_tiles * BLOCK_M
    a_smem = gl.allocate_shared_memory(grad_desc.dtype, [STAGES * COOPERATIVE] + grad_desc.block_shape,
                                       grad_desc.layout)  # fmt: skip
    b_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_shape, x_desc.layout)
    pipeline, order = allocate_barriers(STAGES, 2, COOPERATIVE, 1)
    fence_async_shared()
    gl.barrier()
    scheduler = Units(m_tiles, taps * blocks, splits, k_blocks, share)
    producer_a = Producer(GradOperand(grad_desc, a_smem, below, BLOCK_M, COOPERATIVE), pipeline, scheduler, 0, BLOCK_K)
    producer_b = Producer(ImageOperand(x_desc, b_smem, conv, blocks, BLOCK_N), pipeline, scheduler, 1, BLOCK_K)
    mma = Wgmma(a_smem, b_smem, ROWS, BLOCK_N, False, False, COOPERATIVE, 0)
    if out_desc is None:
        store = PartialStore(Elements(gl.float32), partials, rows, channels, taps, blocks, below, BLOCK_N, 1)
    else:
        out_smem = gl.allocate_shared_memory(out_desc.dtype, [4, ROWS, SUBTILE_N], grad_desc.layout)
        store = TapStore(out_smem, out_desc, blocks, BLOCK_N, 2)
    TILE: gl.constexpr = make_tile(BLOCK_M, BLOCK_N, BLOCK_K, STAGES, COOPERATIVE, False, SUBTILE_N)
    consumer = Consumer(mma, store, pipeline, order, NoFixup(BLOCK_M), scheduler, Plain("plain"), TILE, 0)
    other = gl.aggregate_replace(consumer, mma=gl.aggregate_replace(mma, INDEX=1), INDEX=1)
    gl.warp_specialize(
        [(consume, (consumer,)), (consume, (other,)), (produce_pixels, (producer_a,)), (produce_pixels, (producer_b,))],
        [4, 1, 1],
        [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
    )
