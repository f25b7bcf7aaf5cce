"""Operands that TMA loads. For each tile a producer asks the operand for the place where it begins, and then to load
every block of K into a stage:

    place = operand.locate(row, at)         # row: the tile's first; at: its coordinates, a scheduler's
    for k in ...:
        operand.load(pipeline, state, place, k)
        place = operand.advance(place, BLOCK_K)

``load`` tells the stage's "full" barrier how many bytes will come. ``advance`` is for operands whose blocks of K do not
follow from `k` alone, such as a convolution's taps; others leave the place as it is.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import CachePolicy, FractionalEvictionPolicy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Of weights that are read but once.
EVICT_FIRST = gl.constexpr(CachePolicy(l2=FractionalEvictionPolicy("evict_first", 1.0)))


@gluon.jit
def _load_block(desc, row, k, barrier, smem, K_MAJOR: gl.constexpr, MULTICAST: gl.constexpr, POLICY: gl.constexpr):
    at = [row, k] if K_MAJOR else [k, row]
    tma.async_load(desc, at, barrier, smem, multicast=MULTICAST, cache_policy=POLICY)


@gluon.aggregate
class TmaOperand:
    """TILE rows of an operand as BLOCKS blocks, one TMA load each.

    K_MAJOR: K is the contiguous dimension. MULTICAST: the first block of the cluster loads for all of them, once the
    stage is free in all of them. POLICY: of L2, or None. AHEAD: it may be read before the kernels ahead have ended
    (weights that nothing queued writes)."""

    desc: gl.nvidia.hopper.tma.tensor_descriptor
    smem: gl.shared_memory_descriptor
    TILE: gl.constexpr
    BLOCKS: gl.constexpr
    K_MAJOR: gl.constexpr
    MULTICAST: gl.constexpr
    POLICY: gl.constexpr
    AHEAD: gl.constexpr

    @gluon.jit
    def locate(self, row, at):
        return row

    @gluon.jit
    def advance(self, place, BLOCK_K: gl.constexpr):
        return place

    @gluon.jit
    def load(self, pipeline, state, row, k):
        barrier = pipeline.full.index(state.stage)
        mbarrier.expect(barrier, self.desc.nbytes_per_cta * self.BLOCKS)
        if self.MULTICAST:
            pipeline.producer_acquire_cluster(state)
        self.load_blocks(barrier, state.stage, row, k)

    @gluon.jit
    def load_blocks(self, barrier, stage, row, k):
        ROWS: gl.constexpr = self.TILE // self.BLOCKS
        for i in gl.static_range(self.BLOCKS):
            _load_block(self.desc, row + i * ROWS, k, barrier, self.smem.index(stage * self.BLOCKS + i), self.K_MAJOR,
                        self.MULTICAST, self.POLICY)  # fmt: skip


@gluon.aggregate
class TmaOperandExtra:
    """A tile that is no power of two: `main`, and behind it the rows of `extra`. TILE: of both."""

    main: TmaOperand
    extra: TmaOperand
    TILE: gl.constexpr
    AHEAD: gl.constexpr

    @gluon.jit
    def locate(self, row, at):
        return row

    @gluon.jit
    def advance(self, place, BLOCK_K: gl.constexpr):
        return place

    @gluon.jit
    def load(self, pipeline, state, row, k):
        barrier = pipeline.full.index(state.stage)
        mbarrier.expect(barrier, self.main.desc.nbytes_per_cta + self.extra.desc.nbytes_per_cta)
        if self.main.MULTICAST:
            pipeline.producer_acquire_cluster(state)
        self.extra.load_blocks(barrier, state.stage, row + self.main.TILE, k)
        self.main.load_blocks(barrier, state.stage, row, k)


@gluon.aggregate
class TmaOperandRagged:
    """An operand whose last tile reaches past `end`, its number of rows. There the rows come in TMA boxes of BOX, and
    only those that begin before the end: TMA takes longer over rows that do not exist than over those that do. What the
    stage held before stays in the others' place, and goes into rows of the result that are not stored.

    whole: loads a tile that ends before `end`. main: the part of it that comes in boxes; K is contiguous."""

    whole: TmaOperand | TmaOperandExtra
    main: TmaOperand
    box_desc: gl.nvidia.hopper.tma.tensor_descriptor
    end: gl.tensor
    BOX: gl.constexpr
    TILE: gl.constexpr
    AHEAD: gl.constexpr

    @gluon.jit
    def locate(self, row, at):
        return row

    @gluon.jit
    def advance(self, place, BLOCK_K: gl.constexpr):
        return place

    @gluon.jit
    def load(self, pipeline, state, row, k):
        # Where the last box begins.
        LAST: gl.constexpr = self.main.TILE - (0 if self.TILE > self.main.TILE else self.BOX)
        if row + LAST < self.end:  # a branch: predicates on all loads cost 2 to 4 %
            self.whole.load(pipeline, state, row, k)
        else:
            self.load_boxes(pipeline, state, row, k)

    @gluon.jit
    def load_boxes(self, pipeline, state, row, k):
        barrier = pipeline.full.index(state.stage)
        BLOCKS: gl.constexpr = self.main.BLOCKS
        OF_BLOCK: gl.constexpr = self.main.TILE // BLOCKS // self.BOX
        boxes = gl.minimum(gl.cdiv(self.end - row, self.BOX), OF_BLOCK * BLOCKS)
        for n in gl.static_range(1, OF_BLOCK * BLOCKS + 1):  # the bytes that a barrier expects are a constant
            mbarrier.expect(barrier, n * self.box_desc.nbytes_per_cta, pred=boxes == n)
        if self.main.MULTICAST:
            pipeline.producer_acquire_cluster(state)
        for i in gl.static_range(OF_BLOCK * BLOCKS):
            block = self.main.smem.index(state.stage * BLOCKS + i // OF_BLOCK)
            box = block.slice(i % OF_BLOCK * self.BOX, self.BOX)
            tma.async_load(self.box_desc, [row + i * self.BOX, k], barrier, box,
                           pred=i < boxes, multicast=self.main.MULTICAST, cache_policy=self.main.POLICY)  # fmt: skip


@gluon.constexpr_function
def _layout_of_matrix(layout):
    """Of one matrix, where `layout` is a batch's."""
    return gl.NVMMASharedLayout(layout.swizzle_byte_width, layout.element_bitwidth, 2)


@gluon.jit
def allocate_blocks(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT blocks of a tensor map, as matrices: of a batch's map a block is one matrix's."""
    if len(desc.block_shape) == 3:
        return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_shape[1:], _layout_of_matrix(desc.layout))
    else:
        return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_shape, desc.layout)


@gluon.jit
def as_block(smem, desc):
    """A matrix in shared memory as TMA sees it: of more dimensions where the tensor map has more."""
    if len(desc.block_shape) == 2:
        return smem
    else:
        return smem.reinterpret(shape=desc.block_shape, layout=desc.layout)


@gluon.aggregate
class TmaOperandBatch:
    """As TmaOperand, of a batch, whose matrix is the third of a tile's coordinates. step: 0 where all of the batch are
    the same matrix, of which `desc` then has one, else 1."""

    desc: gl.nvidia.hopper.tma.tensor_descriptor
    smem: gl.shared_memory_descriptor
    step: gl.tensor
    TILE: gl.constexpr
    BLOCKS: gl.constexpr
    K_MAJOR: gl.constexpr
    AHEAD: gl.constexpr

    @gluon.jit
    def locate(self, row, at):
        return at[2] * self.step, row

    @gluon.jit
    def advance(self, place, BLOCK_K: gl.constexpr):
        return place

    @gluon.jit
    def load(self, pipeline, state, place, k):
        batch, row = place
        ROWS: gl.constexpr = self.TILE // self.BLOCKS
        barrier = pipeline.full.index(state.stage)
        mbarrier.expect(barrier, self.desc.nbytes_per_cta * self.BLOCKS)
        for i in gl.static_range(self.BLOCKS):
            first = row + i * ROWS
            at = [batch, first, k] if self.K_MAJOR else [batch, k, first]
            smem = self.smem.index(state.stage * self.BLOCKS + i)
            tma.async_load(self.desc, at, barrier, as_block(smem, self.desc))


@gluon.aggregate
class TmaOperandPair:
    """Two operands that come one after the other along K: `second` from `second_begins` on, which is a multiple of the
    blocks that are asked for. Both load into `smem`."""

    first: TmaOperand
    second: TmaOperand
    second_begins: gl.tensor
    smem: gl.shared_memory_descriptor
    TILE: gl.constexpr
    K_MAJOR: gl.constexpr
    AHEAD: gl.constexpr

    @gluon.jit
    def locate(self, row, at):
        return row

    @gluon.jit
    def advance(self, place, BLOCK_K: gl.constexpr):
        return place

    @gluon.jit
    def load(self, pipeline, state, row, k):
        if k < self.second_begins:
            self.first.load(pipeline, state, row, k)
        else:
            self.second.load(pipeline, state, row, k - self.second_begins)


@gluon.aggregate
class TmaOperandGroupRows:
    """As `all`, of a group's rows, which begin at the fourth of a tile's coordinates. A tile's rows past the group's
    end are the next group's: they go into rows of the result that are not stored."""

    all: TmaOperand
    smem: gl.shared_memory_descriptor
    TILE: gl.constexpr
    K_MAJOR: gl.constexpr
    AHEAD: gl.constexpr

    @gluon.jit
    def locate(self, row, at):
        return at[3] + row

    @gluon.jit
    def advance(self, place, BLOCK_K: gl.constexpr):
        return place

    @gluon.jit
    def load(self, pipeline, state, row, k):
        self.all.load(pipeline, state, row, k)


@gluon.jit
def group_operands(maps, b_step, TILE: gl.constexpr, A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr):
    """Of a grouped product: rows of a group, and the group's matrix. b_step: as of TmaOperandBatch."""
    a_smem = allocate_blocks(maps.a, TILE.STAGES * TILE.COOPERATIVE)
    b_smem = allocate_blocks(maps.b, TILE.STAGES)
    of_all = TmaOperand(maps.a, a_smem, TILE.BLOCK_M, TILE.COOPERATIVE, A_K_MAJOR, False, None, False)
    a = TmaOperandGroupRows(of_all, a_smem, TILE.BLOCK_M, A_K_MAJOR, False)
    return a, TmaOperandBatch(maps.b, b_smem, b_step, TILE.BLOCK_N, 1, B_K_MAJOR, False)
