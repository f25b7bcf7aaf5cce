"""The ring of stages between producer and consumer warps.

A stage of the ring holds a block of K of both operands. Its "full" barrier says that they have landed, its "empty" one
that every consumer is done with them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tk.kernels.hopper.cluster import shared_barrier_layout


@gluon.aggregate
class PipelineState:
    """Where in the ring a warp is: its stage, and the phase of that stage's barriers."""

    stage: gl.tensor
    phase: gl.tensor
    STAGES: gl.constexpr

    @gluon.jit
    def next(self):
        stage = self.stage + 1
        wrap = stage == self.STAGES
        return PipelineState(gl.where(wrap, 0, stage), gl.where(wrap, self.phase ^ 1, self.phase), self.STAGES)

    @gluon.jit
    def skip(self, k_blocks):
        """As `k_blocks` times ``next``."""
        stage = self.stage + k_blocks
        return PipelineState(stage % self.STAGES, self.phase ^ (stage // self.STAGES & 1), self.STAGES)


@gluon.aggregate
class Pipeline:
    """cluster_empty: of the stage in all blocks of a cluster, for operands that one block loads for all (multicast)."""

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    cluster_empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def begin(self):
        return PipelineState(gl.to_tensor(0), gl.to_tensor(0), self.STAGES)

    @gluon.jit
    def producer_acquire(self, state):
        mbarrier.wait(self.empty.index(state.stage), state.phase ^ 1)

    @gluon.jit
    def producer_acquire_cluster(self, state):
        """The first block waits, for all; the others pass."""
        mbarrier.wait(self.cluster_empty.index(state.stage), state.phase ^ 1)

    @gluon.jit
    def consumer_wait(self, state):
        mbarrier.wait(self.full.index(state.stage), state.phase)

    @gluon.jit
    def consumer_release(self, stage, pred):
        mbarrier.arrive(self.empty.index(stage), count=1, pred=pred)
        if gl.num_ctas() > 1:
            mbarrier.arrive(self.cluster_empty.index(stage), count=1, pred=pred)


@gluon.jit
def allocate_barriers(STAGES: gl.constexpr, PRODUCERS: gl.constexpr, CONSUMERS: gl.constexpr,
                      ORDERED: gl.constexpr):  # fmt: skip
    """A Pipeline, and the order barriers of ORDERED consumers that take turns (see OrderBarrier)."""
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    order = mbarrier.allocate_mbarrier(batch=ORDERED)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=PRODUCERS)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    for i in gl.static_range(ORDERED):
        mbarrier.init(order.index(i), count=1)
    cluster_empty = empty
    if gl.num_ctas() > 1:
        cluster_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], shared_barrier_layout(gl.num_ctas()))
        for i in gl.static_range(STAGES):
            mbarrier.init(cluster_empty.index(i), count=CONSUMERS)
    return Pipeline(full, empty, cluster_empty, STAGES), OrderBarrier(order)


@gluon.aggregate
class OrderBarrier:
    """Of ping-pong consumers: whose mainloop is next. A consumer waits for its own barrier and then arrives at the
    other's: without it one of them could take a stage two rounds too early, since a phase says only odd or even."""

    barriers: gl.shared_memory_descriptor

    @gluon.jit
    def wait(self, turn, phase):
        mbarrier.wait(self.barriers.index(turn), phase)

    @gluon.jit
    def arrive(self, turn):
        mbarrier.arrive(self.barriers.index(turn), count=1)
