"""What Gluon's kernels of both directions share: which tiles there are, and how a producer tells consumers of them."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tk.aot.expr import maximum
from tk.aot.spec import Constraint, Op, TensorMap, require
from tk.kernels.attention.forward import length_of
from tk.kernels.attention.problem import MAX_LENGTH, tensor
from tk.kernels.attention.walk import (
    BothLists,
    Met,
    TileList,
    band_tiles,
    count_tiles,
    has_blocks,
    indices_of,
    tile_at,
)
from tk.kernels.hopper.pipeline import Pipeline

ROWS = gl.constexpr(64)  # of a consumer: the M of wgmma
LONGEST = gl.constexpr(MAX_LENGTH)


# --- Which tiles ---


class Sizes(NamedTuple):
    """Those that tiles depend on. group: heads of queries that share one of keys."""

    B_kv: Any
    H: Any
    M: Any
    N: Any
    group: Any


class Schedule(NamedTuple):
    """Tiles of one head, and in all. heads: how many heads' tiles are walked together, so that what they walk stays in
    L2."""

    tiles_of_head: Any
    tiles: Any
    heads: Any


class Lengths(NamedTuple):
    """kv_lengths."""

    base: Any
    stride: Any
    is_given: Any


@gluon.aggregate
class Keys:
    """The tiles of keys that one tile of queries meets: in both lists `total`; of these the first `masked` are met with
    the mask. At least one is."""

    masked: gl.tensor
    total: gl.tensor
    tiles: object  # BothLists
    BLOCK_N: gl.constexpr

    @gluon.jit
    def start(self, i):
        tiles = self.tiles
        met = tiles.met
        if i < met.partial:
            partial = TileList(tiles.indices, tiles.stride, tiles.block, tiles.end, met.has_lists, met.lo, met.full_lo,
                               met.full_hi)  # fmt: skip
            start, end = tile_at(i, partial, self.BLOCK_N)
        else:
            full = TileList(tiles.full_indices, tiles.full_stride, tiles.block, tiles.end, met.has_lists, met.full_lo,
                            met.full_hi, met.full_hi)  # fmt: skip
            start, end = tile_at(i - met.partial, full, self.BLOCK_N)
        return start

    @gluon.jit
    def place(self, i):
        """The i-th tile's first position, which is even, and 1 more of a full tile: where the bounds of keys are
        checked the mask is asked, and what it says does not count there."""
        return self.start(i) + (i >= self.tiles.met.partial).to(gl.int32)


@gluon.aggregate
class Work:
    """Everything that says what there is to do."""

    sizes: object
    schedule: object
    mask: object
    lengths: object
    partial: object  # BlockList
    full: object
    HAS_MASK: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr

    @gluon.jit
    def place(self, t):
        """Tile number -> batch entry, head, first row. Late rows first: under a causal mask they take longest."""
        schedule = self.schedule
        count = schedule.heads * schedule.tiles_of_head
        which = t // count
        rest = t - which * count
        size = gl.minimum(schedule.heads, schedule.tiles // schedule.tiles_of_head - which * schedule.heads)
        bh = which * schedule.heads + rest % size
        H = self.sizes.H
        return bh // H, bh % H, (schedule.tiles_of_head - 1 - rest // size) * self.BLOCK_M

    @gluon.jit
    def keys(self, b, h, row0):
        mask = self.mask
        N = self.sizes.N
        kv_end = length_of(self.lengths.base, self.lengths.stride, b, N, self.lengths.is_given)
        last = gl.minimum(row0 + self.BLOCK_M, self.sizes.M) - 1
        lo, full_lo, full_hi, hi = band_tiles(row0, last, kv_end, mask.band_left, mask.band_right, mask.band_exact,
                                              self.HAS_MASK, self.BLOCK_N)  # fmt: skip
        number = row0 // mask.q_block
        partial = count_tiles(b, h, number, self.partial, mask.kv_block, self.BLOCK_N)
        full = count_tiles(b, h, number, self.full, mask.kv_block, self.BLOCK_N)
        has_lists = has_blocks(self.partial).to(gl.int32)
        is_ragged = kv_end % self.BLOCK_N != 0
        if has_lists == 0:
            full_hi = gl.where(is_ragged & (full_hi == hi), gl.maximum(hi - 1, full_lo), full_hi)
            partial = hi - lo - (full_hi - full_lo)
            full = full_hi - full_lo
        total = partial + full
        masked = partial
        strides = self.full.strides
        b64 = b.to(gl.int64)
        h64 = h.to(gl.int64)
        full_indices = self.full.indices
        full_indices += b64 * strides.indices_b + h64 * strides.indices_h + number * strides.indices_n
        if (has_lists != 0) & (is_ragged | (kv_end < N)):
            blocks = full // gl.cdiv(mask.kv_block, self.BLOCK_N)
            masked = gl.where(_end_past(full_indices, strides.indices_i, blocks, mask.kv_block, kv_end), total, partial)
        met = Met(partial, full, has_lists, lo, full_lo, full_hi)
        tiles = BothLists(met, indices_of(b, h, number, self.partial), self.partial.strides.indices_i, full_indices,
                          strides.indices_i, mask.kv_block, kv_end)  # fmt: skip
        return Keys(masked, total, tiles, self.BLOCK_N)


@gluon.jit
def start_of(place):
    return place & -2


@gluon.jit
def is_full(place):
    return (place & 1) != 0


@gluon.jit
def _end_past(indices, stride, count, block, end):
    """Whether any of these blocks, in whatever order they are, has positions from `end` on. Asked by one warp."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lanes = gl.arange(0, 32, layout)
    last = gl.full([32], -1, gl.int32, layout)
    for i in range(0, count, 32):
        at = i + lanes
        last = gl.maximum(last, gl.load(indices + at.to(gl.int64) * stride, mask=at < count, other=-1))
    return (gl.max(last, 0) + 1) * block > end


@gluon.aggregate
class Tile:
    """What consumers are told of a tile. row: below 0 after the last."""

    b: gl.tensor
    h: gl.tensor
    row: gl.tensor
    masked: gl.tensor
    total: gl.tensor
    kv_end: gl.tensor


@gluon.aggregate
class Tiles:
    """A ring in shared memory through which the producer tells the consumers of its tiles: what they need not work out
    they need not hold in registers."""

    numbers: gl.shared_memory_descriptor
    ring: Pipeline

    @gluon.jit
    def put(self, state, b, h, row, masked, total, kv_end):
        self.ring.producer_acquire(state)
        put_number(self.numbers.index(state.stage * 6), b)
        put_number(self.numbers.index(state.stage * 6 + 1), h)
        put_number(self.numbers.index(state.stage * 6 + 2), row)
        put_number(self.numbers.index(state.stage * 6 + 3), masked)
        put_number(self.numbers.index(state.stage * 6 + 4), total)
        put_number(self.numbers.index(state.stage * 6 + 5), kv_end)
        mbarrier.arrive(self.ring.full.index(state.stage), count=1)

    @gluon.jit
    def get(self, state):
        self.ring.consumer_wait(state)
        b = get_number(self.numbers.index(state.stage * 6))
        h = get_number(self.numbers.index(state.stage * 6 + 1))
        row = get_number(self.numbers.index(state.stage * 6 + 2))
        masked = get_number(self.numbers.index(state.stage * 6 + 3))
        total = get_number(self.numbers.index(state.stage * 6 + 4))
        kv_end = get_number(self.numbers.index(state.stage * 6 + 5))
        mbarrier.arrive(self.ring.empty.index(state.stage), count=1)
        return Tile(b, h, row, masked, total, kv_end)


@gluon.jit
def put_number(smem, x):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    smem.store(gl.full([1], x, gl.int32, layout))


@gluon.jit
def get_number(smem):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(smem.load(layout), 0)


@gluon.jit
def make_ring(STAGES: gl.constexpr, ARRIVALS: gl.constexpr, CONSUMERS: gl.constexpr):
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=ARRIVALS)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    return Pipeline(full, empty, empty, STAGES)


# --- Host side ---


def no_repeats(op: Op, names: Sequence[str]) -> Iterator[Constraint]:
    """Requires that what tensor maps describe is repeated nowhere."""
    for name in names:
        t = tensor(op, name)
        for d in range(3):
            yield require((t.stride(d) > 0) | (t.size(d) == 1), f"{name} without repeated elements")


def descriptor(op: Op, name: str, dtype: str, rows: int, columns: int) -> TensorMap:
    """The tensor map of a [batch, heads, rows, head size] tensor."""
    t = tensor(op, name)
    layout = NVMMASharedLayout(128, 16, 4)
    # The stride of a dimension of size 1 is 0, which no tensor map takes.
    strides = tuple(maximum(t.stride(d), 8) for d in range(3))
    return TensorMap(t, dtype, tuple(t.size(d) for d in range(4)), (*strides, 1), (1, 1, rows, columns), repr(layout))
