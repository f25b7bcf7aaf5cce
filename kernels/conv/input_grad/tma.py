"""The gradient of a convolution's input for Hopper: as the forward pass, a tile's rows being places of one phase.

The weight lies as the forward pass has it, [O, taps, C]: wgmma reads 16-bit B with K along its rows as well. Phases
have different numbers of taps; those with most come first, and what none reaches is stored as zeros.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tk.kernels.conv.forward.tma import Elements, first_position, load_pixels, store_layout
from tk.kernels.conv.geometry import ImageStrides, Spatial, pixel, place, tap_of, times
from tk.kernels.conv.weight_grad.tma import Plain
from tk.kernels.hopper.epilogue import InMatrix, tma_store
from tk.kernels.hopper.product import multiply
from tk.kernels.hopper.stream_k import NoFixup
from tk.kernels.hopper.tile_scheduler import TileOrder
from tk.kernels.hopper.wgmma import Wgmma


class Phases(NamedTuple):
    """Sizes of all phases: `places` is what each has of an image, `image` out's sizes, `kernel` the weight's. The map
    of grad begins at pixel `lower` of place 0."""

    places: Spatial
    image: Spatial
    kernel: Spatial
    stride: Spatial
    padding: Spatial
    lower: Spatial
    dilation: Spatial


class Phase(NamedTuple):
    """Of each dimension its first place, the first tap that reaches it and (`kernel`) how many do. Place q's tap i
    reads pixel q + lower + start - i * dilation of grad."""

    first: Spatial
    tap: Spatial
    start: Spatial
    kernel: Spatial


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
    channels: gl.tensor  # of grad
    phases: object

    @gluon.jit
    def phase(self, index):
        p = self.phases
        tap = tap_of(index, p.stride)
        first_d, start_d, kd = _along(tap.d, p.kernel.d, p.stride.d, p.padding.d, p.lower.d)
        first_h, start_h, kh = _along(tap.h, p.kernel.h, p.stride.h, p.padding.h, p.lower.h)
        first_w, start_w, kw = _along(tap.w, p.kernel.w, p.stride.w, p.padding.w, p.lower.w)
        return Phase(Spatial(first_d, first_h, first_w), tap, Spatial(start_d, start_h, start_w), Spatial(kd, kh, kw))

    @gluon.jit
    def k_blocks_of(self, tile):
        phase = self.phase(tile // self.tiles_of_phase)
        return phase.kernel.d * phase.kernel.h * phase.kernel.w * self.k_blocks_of_tap

    @gluon.jit
    def begin(self):
        return gl.program_id(0)

    @gluon.jit
    def has_work(self, tile):
        return tile < self.tiles

    @gluon.jit
    def next(self, tile):
        return tile + gl.num_programs(0), tile, 0, self.k_blocks_of(tile)

    @gluon.jit
    def has_k_blocks(self, k_begin, k_end):
        return k_end > k_begin

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
    scheduler: PhaseScheduler
    TILE: gl.constexpr
    BLOCKS: gl.constexpr
    SPATIAL: gl.constexpr
    AHEAD: gl.constexpr

    @gluon.jit
    def place_of(self, row):
        phases = self.scheduler.phases
        lower = phases.lower
        image, q = pixel(row, phases.places)
        return image, q.d + lower.d, q.h + lower.h, q.w + lower.w

    @gluon.jit
    def locate(self, row, at):
        """For each block its image and first pixel; the phase; where in K."""
        phase = self.scheduler.phase(at[2])
        pixels = (self.place_of(row),)
        for i in gl.static_range(1, self.BLOCKS):
            pixels = pixels + (self.place_of(row + i * (self.TILE // self.BLOCKS)),)
        return pixels, phase, first_position()

    @gluon.jit
    def advance(self, place, BLOCK_K: gl.constexpr):
        pixels, phase, at = place
        return pixels, phase, at.next(self.scheduler.channels, phase.kernel, BLOCK_K)

    @gluon.jit
    def load(self, pipeline, state, place, k):
        pixels, phase, at = place
        barrier = pipeline.full.index(state.stage)
        mbarrier.expect(barrier, self.desc.nbytes_per_cta * self.BLOCKS)
        back = self.scheduler.phases.dilation
        d_offset = (phase.start.d - at.kd * back.d).to(gl.int16)
        h_offset = (phase.start.h - at.kh * back.h).to(gl.int16)
        w_offset = (phase.start.w - at.kw * back.w).to(gl.int16)
        offset = Spatial(d_offset, h_offset, w_offset)
        for i in gl.static_range(self.BLOCKS):
            smem = self.smem.index(state.stage * self.BLOCKS + i)
            load_pixels(self.desc, pixels[i], at.c, offset, barrier, smem, self.SPATIAL)


@gluon.aggregate
class WeightOperand:
    """TILE input channels: columns."""

    desc: gl.nvidia.hopper.tma.tensor_descriptor
    smem: gl.shared_memory_descriptor
    scheduler: PhaseScheduler
    TILE: gl.constexpr
    AHEAD: gl.constexpr

    @gluon.jit
    def locate(self, column, at):
        return column, self.scheduler.phase(at[2]), first_position()

    @gluon.jit
    def advance(self, place, BLOCK_K: gl.constexpr):
        column, phase, at = place
        return column, phase, at.next(self.scheduler.channels, phase.kernel, BLOCK_K)

    @gluon.jit
    def load(self, pipeline, state, place, k):
        column, phase, at = place
        stride = self.scheduler.phases.stride
        barrier = pipeline.full.index(state.stage)
        mbarrier.expect(barrier, self.desc.nbytes_per_cta)
        kd = phase.tap.d + at.kd * stride.d
        kh = phase.tap.h + at.kh * stride.h
        kw = phase.tap.w + at.kw * stride.w
        smem = self.smem.index(state.stage).reshape(self.desc.block_shape)
        tma.async_load(self.desc, [at.c, kd, kh, kw, column], barrier, smem)


@gluon.aggregate
class PhaseStore:
    """Straight to the places of a phase, which are `stride` from each other. What a phase has beyond the end of out is
    left away. `phase`: its index."""

    desc: Elements
    out: gl.tensor
    rows: gl.tensor
    cols: gl.tensor
    scheduler: PhaseScheduler
    stride: object
    phase: gl.tensor
    ROWS: gl.constexpr
    COLS: gl.constexpr
    STAGES: gl.constexpr
    CHANNELS_LAST: gl.constexpr

    @gluon.jit
    def of_consumer(self, index: gl.constexpr):
        return self

    @gluon.jit
    def of_tile(self, at):
        return gl.aggregate_replace(self, phase=at[2])

    @gluon.jit
    def put(self, x, buffer: gl.constexpr, row, col):
        LAYOUT: gl.constexpr = store_layout(self.COLS, self.CHANNELS_LAST)
        x = gl.convert_layout(x, LAYOUT)
        i = row + gl.arange(0, self.ROWS, gl.SliceLayout(1, LAYOUT))
        j = col + gl.arange(0, self.COLS, gl.SliceLayout(0, LAYOUT))
        # Only here, behind the sums: they would take registers from them.
        p = self.scheduler.phases
        phase = self.scheduler.phase(self.phase)
        out = self.out + place(phase.first, self.stride.pixel)
        room = Spatial((p.image.d - phase.first.d + p.stride.d - 1) // p.stride.d,
                       (p.image.h - phase.first.h + p.stride.h - 1) // p.stride.h,
                       (p.image.w - phase.first.w + p.stride.w - 1) // p.stride.w)  # fmt: skip
        image, q = pixel(i, p.places)
        there = (i < self.rows) & (q.d < room.d) & (q.h < room.h) & (q.w < room.w)
        at = image.to(gl.int64) * self.stride.n
        at += place(times(q, p.stride), self.stride.pixel)
        if self.CHANNELS_LAST:
            to = out + at[:, None] + j[None, :]
        else:
            to = out + at[:, None] + (j.to(gl.int64) * self.stride.c)[None, :]
        gl.store(to, x, mask=there[:, None] & (j < self.cols)[None, :])


@gluon.jit
def input_grad_tma(grad_desc, weight_desc, out_desc, out, rows, cols, channels, tiles, tiles_of_phase, group,
                   phases, out_stride, TILE: gl.constexpr, SPATIAL: gl.constexpr, STORE: gl.constexpr):  # fmt: skip
    """rows x cols: of a phase. channels: of grad. STORE: "matrix": strides are 1, and out_desc is a view of out whose
    rows are its places; else see conv_tma."""
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    order = TileOrder(gl.cdiv(rows, TILE.BLOCK_M), gl.cdiv(cols, BLOCK_N), group)
    scheduler = PhaseScheduler(tiles, tiles_of_phase, order, gl.cdiv(channels, TILE.BLOCK_K), channels, phases)
    a_smem = gl.allocate_shared_memory(grad_desc.dtype, [TILE.STAGES * TILE.COOPERATIVE, TILE.ROWS, TILE.BLOCK_K],
                                       grad_desc.layout)  # fmt: skip
    a = GradOperand(grad_desc, a_smem, scheduler, TILE.BLOCK_M, TILE.COOPERATIVE, SPATIAL, True)
    b_smem = gl.allocate_shared_memory(grad_desc.dtype, [TILE.STAGES, TILE.BLOCK_K, BLOCK_N], grad_desc.layout)
    b = WeightOperand(weight_desc, b_smem, scheduler, BLOCK_N, True)
    mma = Wgmma(a_smem, b_smem, TILE.ROWS, BLOCK_N, True, False, TILE.COOPERATIVE, 0)
    if STORE == "matrix":
        store = tma_store(out_desc, InMatrix(False), TILE)
    else:
        # The stride of channels may be the constant 1.
        out_stride = ImageStrides(out_stride.n, None, gl.to_tensor(out_stride.c), out_stride.pixel)
        store = PhaseStore(Elements(grad_desc.dtype), out, rows, cols, scheduler, out_stride, gl.to_tensor(0),
                           TILE.ROWS, TILE.SUBTILE_N, TILE.EPILOGUE_STAGES, STORE == "channels_last")  # fmt: skip
    multiply(a, b, mma, scheduler, NoFixup(TILE.BLOCK_M), store, Plain("plain"), TILE)
