"""Convolutions for Hopper: the parts of kernels/hopper/, with an operand that TMA gathers from images (im2col).

A row of A is a pixel of the result, and a block of its K has channels of one tap: TMA fetches it for a tile's pixels in
turn, across the ends of lines and images, and fills the padding with zeros. B is the weight, [O, KD, KH, KW, C].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tk.kernels.conv.geometry import ImageStrides, Spatial, pixel, place
from tk.kernels.gemm.arguments import Epilogue
from tk.kernels.hopper.epilogue import BiasActivation, InMatrix, tma_store
from tk.kernels.hopper.product import multiply
from tk.kernels.hopper.stream_k import NoFixup
from tk.kernels.hopper.tile_scheduler import PersistentScheduler, TileOrder
from tk.kernels.hopper.wgmma import Wgmma


@gluon.aggregate
class Convolution:
    """What both operands must know of it. gather: a `Gather`; channels: of a group."""

    gather: object
    channels: gl.tensor
    SPATIAL: gl.constexpr  # 2 or 3 dimensions

    @gluon.jit
    def locate(self, row):
        """Where the pixels of a row begin to read: (image, d, h, w)."""
        gather = self.gather
        image, p = pixel(row, gather.out)
        return (
            image,
            p.d * gather.stride.d + gather.lower.d,
            p.h * gather.stride.h + gather.lower.h,
            p.w * gather.stride.w + gather.lower.w,
        )


@gluon.aggregate
class Position:
    """Where in K: a tap, and the first channel of a block. Counting on costs no division."""

    kd: gl.tensor
    kh: gl.tensor
    kw: gl.tensor
    c: gl.tensor

    @gluon.jit
    def next(self, channels, kernel, BLOCK_K: gl.constexpr):
        c = self.c + BLOCK_K
        tap_ends = c >= channels
        kw = gl.where(tap_ends, self.kw + 1, self.kw)
        line_ends = kw == kernel.w
        kh = gl.where(line_ends, self.kh + 1, self.kh)
        plane_ends = kh == kernel.h
        kd = gl.where(plane_ends, self.kd + 1, self.kd)
        return Position(kd, gl.where(plane_ends, 0, kh), gl.where(line_ends, 0, kw), gl.where(tap_ends, 0, c))


@gluon.jit
def first_position():
    zero = gl.to_tensor(0)
    return Position(zero, zero, zero, zero)


@gluon.jit
def load_pixels(desc, at, c, offset, barrier, smem, SPATIAL: gl.constexpr):
    """From pixel `at` on, which is (image, d, h, w), and channel c, by a tap's offset."""
    image, d, h, w = at
    if SPATIAL == 2:
        tma.async_load_im2col(desc, [image, h, w, c], [offset.h, offset.w], barrier, smem)
    else:
        tma.async_load_im2col(desc, [image, d, h, w, c], [offset.d, offset.h, offset.w], barrier, smem)


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
    AHEAD: gl.constexpr

    @gluon.jit
    def locate(self, row, at):
        """For each block its image and first pixel; the first channel; where in K."""
        pixels = (self.conv.locate(row),)
        for i in gl.static_range(1, self.BLOCKS):
            pixels = pixels + (self.conv.locate(row + i * (self.TILE // self.BLOCKS)),)
        if self.GROUPED:
            return pixels, at[1] // self.tiles_of_group * self.conv.channels, first_position()
        else:
            return pixels, gl.to_tensor(0), first_position()

    @gluon.jit
    def advance(self, place, BLOCK_K: gl.constexpr):
        pixels, channel, at = place
        return pixels, channel, at.next(self.conv.channels, self.conv.gather.kernel, BLOCK_K)

    @gluon.jit
    def load(self, pipeline, state, place, k):
        conv = self.conv
        pixels, channel, at = place
        barrier = pipeline.full.index(state.stage)
        mbarrier.expect(barrier, self.desc.nbytes_per_cta * self.BLOCKS)
        dilation, shift = conv.gather.dilation, conv.gather.shift
        d_offset = (at.kd * dilation.d + shift.d).to(gl.int16)
        h_offset = (at.kh * dilation.h + shift.h).to(gl.int16)
        w_offset = (at.kw * dilation.w + shift.w).to(gl.int16)
        offset = Spatial(d_offset, h_offset, w_offset)
        c = channel + at.c
        for i in gl.static_range(self.BLOCKS):
            smem = self.smem.index(state.stage * self.BLOCKS + i)
            load_pixels(self.desc, pixels[i], c, offset, barrier, smem, conv.SPATIAL)


@gluon.aggregate
class WeightOperand:
    """TILE output channels."""

    desc: gl.nvidia.hopper.tma.tensor_descriptor
    smem: gl.shared_memory_descriptor
    conv: Convolution
    TILE: gl.constexpr
    AHEAD: gl.constexpr

    @gluon.jit
    def locate(self, row, at):
        return row, first_position()

    @gluon.jit
    def advance(self, place, BLOCK_K: gl.constexpr):
        row, at = place
        return row, at.next(self.conv.channels, self.conv.gather.kernel, BLOCK_K)

    @gluon.jit
    def load(self, pipeline, state, place, k):
        row, at = place
        barrier = pipeline.full.index(state.stage)
        mbarrier.expect(barrier, self.desc.nbytes_per_cta)
        smem = self.smem.index(state.stage).reshape(self.desc.block_shape)
        tma.async_load(self.desc, [row, at.kd, at.kh, at.kw, at.c], barrier, smem)


@gluon.constexpr_function
def store_layout(cols, channels_last):
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
    sizes: object  # of an image of out
    stride: object
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
        LAYOUT: gl.constexpr = store_layout(self.COLS, self.CHANNELS_LAST)
        x = gl.convert_layout(x, LAYOUT)
        i = row + gl.arange(0, self.ROWS, gl.SliceLayout(1, LAYOUT))
        j = col + gl.arange(0, self.COLS, gl.SliceLayout(0, LAYOUT))
        image, p = pixel(i, self.sizes)
        pixels = image.to(gl.int64) * self.stride.n + place(p, self.stride.pixel)
        at = self.out + pixels[:, None] + (j.to(gl.int64) * self.stride.c)[None, :]
        gl.store(at, x, mask=(i < self.rows)[:, None] & (j < self.cols)[None, :])


@gluon.jit
def conv_tma(x_desc, weight_desc, out_desc, out, bias, rows, cols, taps, channels, tiles, tiles_of_group, group,
             gather, out_stride, bias_activation, TILE: gl.constexpr, SPATIAL: gl.constexpr, STORE: gl.constexpr,
             EPILOGUE: gl.constexpr, GROUPED: gl.constexpr):  # fmt: skip
    """out, rows x cols. tiles: of all of it; tiles_of_group: columns of them. channels: of a group. SPATIAL: 2 or 3
    dimensions. STORE: "matrix": out_desc is a view of it whose rows are pixels; "channels_last", "contiguous": by
    strides, and which of them neighbouring threads should have. EPILOGUE: the KIND of BiasActivation."""
    conv = Convolution(gather, channels, SPATIAL)
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    a_smem = gl.allocate_shared_memory(x_desc.dtype, [TILE.STAGES * TILE.COOPERATIVE, TILE.ROWS, TILE.BLOCK_K],
                                       x_desc.layout)  # fmt: skip
    a = ImageOperand(x_desc, a_smem, conv, tiles_of_group, TILE.BLOCK_M, TILE.COOPERATIVE, GROUPED, True)
    b_smem = gl.allocate_shared_memory(x_desc.dtype, [TILE.STAGES, BLOCK_N, TILE.BLOCK_K], x_desc.layout)
    b = WeightOperand(weight_desc, b_smem, conv, BLOCK_N, True)
    mma = Wgmma(a_smem, b_smem, TILE.ROWS, BLOCK_N, True, True, TILE.COOPERATIVE, 0)
    if STORE == "matrix":
        store = tma_store(out_desc, InMatrix(False), TILE)
    else:
        # The stride of channels may be the constant 1.
        out_stride = ImageStrides(out_stride.n, None, gl.to_tensor(out_stride.c), out_stride.pixel)
        store = PixelStore(Elements(x_desc.dtype), out, rows, cols, gather.out, out_stride,
                           TILE.ROWS, TILE.SUBTILE_N, TILE.EPILOGUE_STAGES, STORE == "channels_last")  # fmt: skip
    order = TileOrder(gl.cdiv(rows, TILE.BLOCK_M), gl.cdiv(cols, BLOCK_N), group)
    scheduler = PersistentScheduler(tiles, taps * gl.cdiv(channels, TILE.BLOCK_K), order)
    one = gl.to_tensor(1.0)
    terms = Epilogue(gl.to_tensor(0), bias_activation.bias_o, one, one, bias_activation.activation,
                     bias_activation.has_bias)  # fmt: skip
    finish = BiasActivation(rows, cols, bias, terms, False, EPILOGUE)
    # What looks at the result of merged groups (contained.py) may begin beside the last tiles.
    multiply(a, b, mma, scheduler, NoFixup(TILE.BLOCK_M), store, finish, TILE, DEPENDENT=GROUPED)
