"""Convolutions for Hopper: the parts of kernels/hopper/, with an operand that TMA gathers from images (im2col).

A row of A is a pixel of the result, and a block of its K has channels of one tap: TMA fetches it for a tile's pixels in
turn, across the ends of lines and images, and fills the padding with zeros. B is the weight, [O, KD, KH, KW, C].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tk.kernels.conv.geometry import pixel, place
from tk.kernels.gemm.arguments import Epilogue
from tk.kernels.hopper.arguments import Tile
from tk.kernels.hopper.epilogue import BiasActivation, InMatrix, TmaStore
from tk.kernels.hopper.pipeline import allocate_barriers
from tk.kernels.hopper.stream_k import NoFixup
from tk.kernels.hopper.tile_scheduler import PersistentScheduler, TileOrder
from tk.kernels.hopper.warp_roles import Consumer, Producer, consume
from tk.kernels.hopper.wgmma import Wgmma


@gluon.aggregate
class Convolution:
    """What both operands must know of it. A pixel reads from pixel * stride + lower on, tap t at offset t * dilation +
    shift, which is never negative."""

    PD: gl.tensor
    PH: gl.tensor
    PW: gl.tensor
    KH: gl.tensor
    KW: gl.tensor
    channels: gl.tensor
    stride_d: gl.tensor
    stride_h: gl.tensor
    stride_w: gl.tensor
    lower_d: gl.tensor
    lower_h: gl.tensor
    lower_w: gl.tensor
    dilation_d: gl.tensor
    dilation_h: gl.tensor
    dilation_w: gl.tensor
    shift_d: gl.tensor
    shift_h: gl.tensor
    shift_w: gl.tensor
    SPATIAL: gl.constexpr  # 2 or 3 dimensions

    @gluon.jit
    def locate(self, row):
        """Where the pixels of a row begin to read: (image, d, h, w)."""
        image, pd, ph, pw = pixel(row, self.PD, self.PH, self.PW)
        return (
            image,
            pd * self.stride_d + self.lower_d,
            ph * self.stride_h + self.lower_h,
            pw * self.stride_w + self.lower_w,
        )


@gluon.aggregate
class Position:
    """Where in K: a tap, and the first channel of a block. Counting on costs no division."""

    kd: gl.tensor
    kh: gl.tensor
    kw: gl.tensor
    c: gl.tensor

    @gluon.jit
    def next(self, conv, BLOCK_K: gl.constexpr):
        c = self.c + BLOCK_K
        tap_ends = c >= conv.channels
        kw = gl.where(tap_ends, self.kw + 1, self.kw)
        line_ends = kw == conv.KW
        kh = gl.where(line_ends, self.kh + 1, self.kh)
        plane_ends = kh == conv.KH
        kd = gl.where(plane_ends, self.kd + 1, self.kd)
        return Position(kd, gl.where(plane_ends, 0, kh), gl.where(line_ends, 0, kw), gl.where(tap_ends, 0, c))


@gluon.aggregate
class ImageOperand:
    """TILE pixels as BLOCKS blocks, one TMA load each. GROUPED: `tiles_of_group` columns of tiles have a group's output
    channels, and read that group's input channels."""

    desc: gl.nvidia.hopper.tma.tensor_descriptor_im2col
    smem: gl.shared_memory_descriptor
    conv: Convolution
    tiles_of_group: gl.tensor
    TILE: gl.constexpr
    BLOCKS: gl.constexpr
    GROUPED: gl.constexpr

    @gluon.jit
    def locate(self, at):
        """For each block its image and first pixel; then the first channel."""
        row = at[0] * self.TILE
        places = (self.conv.locate(row),)
        for i in gl.static_range(1, self.BLOCKS):
            places = places + (self.conv.locate(row + i * (self.TILE // self.BLOCKS)),)
        if self.GROUPED:
            return places + (at[1] // self.tiles_of_group * self.conv.channels,)
        else:
            return places + (gl.to_tensor(0),)

    @gluon.jit
    def load(self, pipeline, state, places, at):
        conv = self.conv
        barrier = pipeline.full.index(state.stage)
        mbarrier.expect(barrier, self.desc.nbytes_per_cta * self.BLOCKS)
        d_offset = (at.kd * conv.dilation_d + conv.shift_d).to(gl.int16)
        h_offset = (at.kh * conv.dilation_h + conv.shift_h).to(gl.int16)
        w_offset = (at.kw * conv.dilation_w + conv.shift_w).to(gl.int16)
        c = places[self.BLOCKS] + at.c
        for i in gl.static_range(self.BLOCKS):
            image, d, h, w = places[i]
            smem = self.smem.index(state.stage * self.BLOCKS + i)
            if conv.SPATIAL == 2:
                tma.async_load_im2col(self.desc, [image, h, w, c], [h_offset, w_offset], barrier, smem)
            else:
                offsets = [d_offset, h_offset, w_offset]
                tma.async_load_im2col(self.desc, [image, d, h, w, c], offsets, barrier, smem)


@gluon.aggregate
class WeightOperand:
    """TILE output channels."""

    desc: gl.nvidia.hopper.tma.tensor_descriptor
    smem: gl.shared_memory_descriptor
    conv: Convolution
    TILE: gl.constexpr

    @gluon.jit
    def locate(self, at):
        return at[1] * self.TILE

    @gluon.jit
    def load(self, pipeline, state, row, at):
        barrier = pipeline.full.index(state.stage)
        mbarrier.expect(barrier, self.desc.nbytes_per_cta)
        smem = self.smem.index(state.stage).reshape(self.desc.block_shape)
        tma.async_load(self.desc, [row, at.kd, at.kh, at.kw, at.c], barrier, smem)


@gluon.jit
def produce_taps(self):
    """What a Producer does whose operand reads tap by tap, from places that it works out once for a tile."""
    work = self.scheduler.begin()
    state = self.pipeline.begin()
    while self.scheduler.has_work(work):
        work, tile, k_begin, k_end = self.scheduler.next(work)
        places = self.operand.locate(self.scheduler.coordinates(tile))
        zero = gl.to_tensor(0)
        at = Position(zero, zero, zero, zero)
        for _ in range(k_begin, k_end):
            self.pipeline.producer_acquire(state)
            self.operand.load(self.pipeline, state, places, at)
            state = state.next()
            at = at.next(self.operand.conv, self.BLOCK_K)


@gluon.constexpr_function
def _store_layout(cols, channels_last):
    """Of four warps: neighbouring threads have neighbouring channels, or pixels."""
    if channels_last:
        return gl.BlockedLayout([1, cols // 8], [4, 8], [4, 1], [1, 0])
    return gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])


@gluon.aggregate
class Elements:
    """What a store without a tensor map says of its elements, in a map's place."""

    dtype: gl.constexpr


@gluon.aggregate
class PixelStore:
    """Straight to memory, wherever the pixels lie: out of strides that no matrix has."""

    desc: Elements
    out: gl.tensor
    rows: gl.tensor
    cols: gl.tensor
    conv: Convolution
    stride_n: gl.tensor
    stride_o: gl.tensor
    stride_d: gl.tensor
    stride_h: gl.tensor
    stride_w: gl.tensor
    ROWS: gl.constexpr
    COLS: gl.constexpr
    STAGES: gl.constexpr
    CHANNELS_LAST: gl.constexpr

    @gluon.jit
    def of_consumer(self, index: gl.constexpr):
        return self

    @gluon.jit
    def of_tile(self, at):
        return self

    @gluon.jit
    def put(self, x, buffer: gl.constexpr, row, col):
        LAYOUT: gl.constexpr = _store_layout(self.COLS, self.CHANNELS_LAST)
        x = gl.convert_layout(x, LAYOUT)
        i = row + gl.arange(0, self.ROWS, gl.SliceLayout(1, LAYOUT))
        j = col + gl.arange(0, self.COLS, gl.SliceLayout(0, LAYOUT))
        image, pd, ph, pw = pixel(i, self.conv.PD, self.conv.PH, self.conv.PW)
        pixels = image.to(gl.int64) * self.stride_n + place(pd, ph, pw, self.stride_d, self.stride_h, self.stride_w)
        at = self.out + pixels[:, None] + (j.to(gl.int64) * self.stride_o)[None, :]
        gl.store(at, x, mask=(i < self.rows)[:, None] & (j < self.cols)[None, :])


@gluon.constexpr_function
def make_tile(block_m, block_n, block_k, stages, cooperative, pingpong, subtile_n):
    return Tile(block_m, block_n, block_k, stages, cooperative, pingpong, subtile_n)


@gluon.jit
def conv_tma(x_desc, weight_desc, out_desc, out, bias, rows, cols, taps, channels, tiles, tiles_of_group, group,
             PD, PH, PW, KH, KW, stride_d, stride_h, stride_w, lower_d, lower_h, lower_w,
             dilation_d, dilation_h, dilation_w, shift_d, shift_h, shift_w,
             out_n, out_o, out_d, out_h, out_w, bias_o, activation, has_bias,
             BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
             COOPERATIVE: gl.constexpr, PINGPONG: gl.constexpr, SUBTILE_N: gl.constexpr,
             EPILOGUE_STAGES: gl.constexpr, SPATIAL: gl.constexpr, STORE: gl.constexpr, EPILOGUE: gl.constexpr,
             GROUPED: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr):  # fmt: skip
    """out, rows x cols. tiles: of all of it; tiles_of_group: columns of them. channels: of a group. STORE: "matrix":
    out_desc is a view of it whose rows are pixels; "channels_last", "contiguous": by strides, and which of them
    neighbouring threads should have."""
    ROWS: gl.constexpr = BLOCK_M // COOPERATIVE
    CONSUMERS: gl.constexpr = 2 if PINGPONG else COOPERATIVE
    conv = Convolution(PD, PH, PW, KH, KW, channels, stride_d, stride_h, stride_w, lower_d, lower_h, lower_w,
                       dilation_d, dilation_h, dilation_w, shift_d, shift_h, shift_w, SPATIAL)  # fmt: skip
    a_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES * COOPERATIVE, ROWS, BLOCK_K], x_desc.layout)
    a = ImageOperand(x_desc, a_smem, conv, tiles_of_group, BLOCK_M, COOPERATIVE, GROUPED)
    b_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], x_desc.layout)
    b = WeightOperand(weight_desc, b_smem, conv, BLOCK_N)
    if STORE == "matrix":
        out_smem = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS * EPILOGUE_STAGES] + out_desc.block_shape,
                                             out_desc.layout)  # fmt: skip
        store = TmaStore(out_smem, out_desc, InMatrix(False), EPILOGUE_STAGES)
    else:
        out_o = gl.to_tensor(out_o)  # which may be the constant 1
        store = PixelStore(Elements(x_desc.dtype), out, rows, cols, conv, out_n, out_o, out_d, out_h, out_w,
                           ROWS, SUBTILE_N, EPILOGUE_STAGES, STORE == "channels_last")  # fmt: skip
    pipeline, order = allocate_barriers(STAGES, 2, COOPERATIVE, 2 if PINGPONG else 1)
    fence_async_shared()
    gl.barrier()
    scheduler = PersistentScheduler(tiles, taps * gl.cdiv(channels, BLOCK_K),
                                    TileOrder(gl.cdiv(rows, BLOCK_M), gl.cdiv(cols, BLOCK_N), group))  # fmt: skip
    one = gl.to_tensor(1.0)
    epilogue = BiasActivation(
        rows, cols, bias, Epilogue(gl.to_tensor(0), bias_o, one, one, activation, has_bias), False, EPILOGUE
    )
    producer_a = Producer(a, pipeline, scheduler, 0, BLOCK_K)
    producer_b = Producer(b, pipeline, scheduler, 1, BLOCK_K)
    mma = Wgmma(a_smem, b_smem, ROWS, BLOCK_N, True, True, COOPERATIVE, 0)
    TILE: gl.constexpr = make_tile(BLOCK_M, BLOCK_N, BLOCK_K, STAGES, COOPERATIVE, PINGPONG, SUBTILE_N)
    consumer = Consumer(mma, store, pipeline, order, NoFixup(BLOCK_M), scheduler, epilogue, TILE, 0)
    other = gl.aggregate_replace(consumer, mma=gl.aggregate_replace(mma, INDEX=1 % COOPERATIVE), INDEX=1)
    gl.warp_specialize(
        [(consume, (consumer,)), (consume, (other,)), (produce_taps, (producer_a,)), (produce_taps, (producer_b,))],
        [4, 1, 1],
        [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
    )
