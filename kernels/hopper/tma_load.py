"""Operands that TMA loads. A producer asks an operand to ``load`` a tile's rows at a block of K into a stage; ``load``
tells the stage's "full" barrier how many bytes will come. Before, ``of_tile`` says which tile it is: of_tile(at) is the
operand at the coordinates `at` of a scheduler."""

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
    def of_tile(self, at):
        return self

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
    def of_tile(self, at):
        return self

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
    def of_tile(self, at):
        return self

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
def layout_of_matrix(layout):
    """Of one matrix, where `layout` is a batch's."""
    return gl.NVMMASharedLayout(layout.swizzle_byte_width, layout.element_bitwidth, 2)


@gluon.jit
def as_batch(smem, desc):
    """A matrix in shared memory as TMA sees it: a batch of one."""
    return smem.reinterpret(shape=[1] + smem.shape, layout=desc.layout)


@gluon.aggregate
class TmaOperandBatch:
    """As TmaOperand, of matrix `batch` of a batch. step: 0 where all of the batch are the same matrix, of which `desc`
    then has one, else 1."""

    desc: gl.nvidia.hopper.tma.tensor_descriptor
    smem: gl.shared_memory_descriptor
    step: gl.tensor
    batch: gl.tensor
    TILE: gl.constexpr
    BLOCKS: gl.constexpr
    K_MAJOR: gl.constexpr
    AHEAD: gl.constexpr

    @gluon.jit
    def of_tile(self, at):
        return gl.aggregate_replace(self, batch=at[2] * self.step)

    @gluon.jit
    def load(self, pipeline, state, row, k):
        ROWS: gl.constexpr = self.TILE // self.BLOCKS
        barrier = pipeline.full.index(state.stage)
        mbarrier.expect(barrier, self.desc.nbytes_per_cta * self.BLOCKS)
        for i in gl.static_range(self.BLOCKS):
            first = row + i * ROWS
            at = [self.batch, first, k] if self.K_MAJOR else [self.batch, k, first]
            smem = self.smem.index(state.stage * self.BLOCKS + i)
            tma.async_load(self.desc, at, barrier, as_batch(smem, self.desc))


@gluon.aggregate
class TmaOperandPair:
    """Two operands that come one after the other along K: `second` from `second_begins` on, which is a multiple of the
    blocks that are asked for. Both load into `smem`."""

    first: TmaOperand
    second: TmaOperand
    second_begins: gl.tensor
    smem: gl.shared_memory_descriptor
    TILE: gl.constexpr
    AHEAD: gl.constexpr

    @gluon.jit
    def of_tile(self, at):
        return self

    @gluon.jit
    def load(self, pipeline, state, row, k):
        if k < self.second_begins:
            self.first.load(pipeline, state, row, k)
        else:
            self.second.load(pipeline, state, row, k - self.second_begins)


@gluon.aggregate
class TmaOperandGroupRows:
    """As `all`, of a group's rows, which begin at `begin`. A tile's rows past the group's end are the next group's:
    they go into rows of the result that are not stored."""

    all: TmaOperand
    begin: gl.tensor
    TILE: gl.constexpr
    AHEAD: gl.constexpr

    @gluon.jit
    def of_tile(self, at):
        return gl.aggregate_replace(self, begin=at[3])

    @gluon.jit
    def load(self, pipeline, state, row, k):
        self.all.load(pipeline, state, self.begin + row, k)
