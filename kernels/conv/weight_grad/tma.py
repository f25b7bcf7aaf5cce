"""The weight's gradient for Hopper: D[o, c] of a tap = the sum over pixels of grad[pixel, o] x[pixel + tap, c].

K runs over pixels, which lie along the rows of both operands: wgmma reads 16-bit operands either way round. TMA gathers
the pixels of x that a tap reads, as for the forward pass. Pixels are split over programs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tk.kernels.conv.forward.tma import Convolution, Elements, load_pixels
from tk.kernels.conv.geometry import Spatial, tap_of
from tk.kernels.hopper.epilogue import TmaStore
from tk.kernels.hopper.product import multiply
from tk.kernels.hopper.stream_k import NoFixup
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
    AHEAD: gl.constexpr

    @gluon.jit
    def locate(self, row, at):
        return row % self.below

    @gluon.jit
    def advance(self, place, BLOCK_K: gl.constexpr):
        return place

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
    AHEAD: gl.constexpr

    @gluon.jit
    def locate(self, col, at):
        conv = self.conv
        n = col // self.TILE
        tap = n // self.blocks
        tap_at = tap_of(tap, conv.gather.kernel)
        dilation = conv.gather.dilation
        offset = Spatial((tap_at.d * dilation.d).to(gl.int16), (tap_at.h * dilation.h).to(gl.int16),
                         (tap_at.w * dilation.w).to(gl.int16))  # fmt: skip
        return offset, (n - tap * self.blocks) * self.TILE

    @gluon.jit
    def advance(self, place, BLOCK_K: gl.constexpr):
        return place

    @gluon.jit
    def load(self, pipeline, state, place, pixel):
        barrier = pipeline.full.index(state.stage)
        mbarrier.expect(barrier, self.desc.nbytes_per_cta)
        offset, c = place
        smem = self.smem.index(state.stage)
        load_pixels(self.desc, self.conv.locate(pixel), c, offset, barrier, smem, self.conv.SPATIAL)


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
class InTaps:
    """Where a TmaStore writes: the gradient itself, [O, taps, C]. Nothing else is added to a tile's sum."""

    blocks: gl.tensor  # of channels
    BLOCK_N: gl.constexpr
    SWAP_AB: gl.constexpr

    @gluon.jit
    def of_tile(self, at):
        return self

    @gluon.jit
    def coordinates(self, row, col):
        tap = col // self.BLOCK_N // self.blocks
        return [row, tap, col - tap * self.blocks * self.BLOCK_N]


@gluon.jit
def weight_grad_tma(grad_desc, x_desc, out_desc, partials, rows, taps, channels, splits, k_blocks, share, gather,
                    TILE: gl.constexpr, SPATIAL: gl.constexpr):  # fmt: skip
    """rows: output channels. k_blocks: of all pixels; share: of a split. Of one split alone, out_desc has the gradient;
    else it is None, and partials have the sums."""
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    conv = Convolution(gather, channels, SPATIAL)
    m_tiles = gl.cdiv(rows, TILE.BLOCK_M)
    blocks = gl.cdiv(channels, BLOCK_N)
    below = m_tiles * TILE.BLOCK_M
    a_smem = gl.allocate_shared_memory(grad_desc.dtype, [TILE.STAGES * TILE.COOPERATIVE] + grad_desc.block_shape,
                                       grad_desc.layout)  # fmt: skip
    b_smem = gl.allocate_shared_memory(x_desc.dtype, [TILE.STAGES] + x_desc.block_shape, x_desc.layout)
    a = GradOperand(grad_desc, a_smem, below, TILE.BLOCK_M, TILE.COOPERATIVE, True)
    b = ImageOperand(x_desc, b_smem, conv, blocks, BLOCK_N, True)
    mma = Wgmma(a_smem, b_smem, TILE.ROWS, BLOCK_N, False, False, TILE.COOPERATIVE, 0)
    if out_desc is None:
        store = PartialStore(Elements(gl.float32), partials, rows, channels, taps, blocks, below, BLOCK_N, 1)
    else:
        out_smem = gl.allocate_shared_memory(out_desc.dtype, [4, TILE.ROWS, TILE.SUBTILE_N], grad_desc.layout)
        store = TmaStore(out_smem, out_desc, InTaps(blocks, BLOCK_N, False), TILE.EPILOGUE_STAGES)
    scheduler = Units(m_tiles, taps * blocks, splits, k_blocks, share)
    multiply(a, b, mma, scheduler, NoFixup(TILE.BLOCK_M), store, Plain("plain"), TILE)
