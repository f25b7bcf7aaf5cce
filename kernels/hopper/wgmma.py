"""What a consumer warp group multiplies. The mainloop keeps one stage's instructions in flight:

    acc = mma.zeros()
    for ...:
        acc = mma.issue(acc, stage)     # the products of a stage
        acc = mma.wait(acc, keep=1)     # those of the stage before are done: it can be released
    acc = mma.wait(acc, keep=0)

The accumulator is a tuple, whose parts lie side by side along N.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from tk.kernels.hopper.cluster import cluster_bases


@gluon.constexpr_function
def accumulator_layout(n, dtype, num_ctas):
    """Of what one warp group accumulates with an instruction `n` wide."""
    bases = cluster_bases(num_ctas, 0, 2)
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 256 // dtype.primitive_bitwidth], bases)


@gluon.jit
def _issue(a, b, acc, LAYOUT: gl.constexpr, A_K_MAJOR: gl.constexpr):
    """a b on top of acc; a as it lies in its stage."""
    if not A_K_MAJOR:
        a = a.permute([1, 0])
    if A_K_MAJOR or a.dtype.primitive_bitwidth == 16:
        acc = warpgroup_mma(a, b, acc, is_async=True)
    else:
        # wgmma reads tf32 from shared memory along K only; from registers A may stand either way. It waits for the
        # product, whose registers the next load takes: the other consumers' products fill that time.
        acc = warpgroup_mma(a.load(gl.DotOperandLayout(0, LAYOUT, 1)), b, acc)
    return acc


@gluon.aggregate
class Wgmma:
    """A tile of ROWS x N: block INDEX of the BLOCKS blocks of A in a stage, times all of B."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    ROWS: gl.constexpr
    N: gl.constexpr
    A_K_MAJOR: gl.constexpr
    B_K_MAJOR: gl.constexpr
    BLOCKS: gl.constexpr
    INDEX: gl.constexpr

    @gluon.jit
    def of_part(self, index: gl.constexpr):
        """With that block of A."""
        return gl.aggregate_replace(self, INDEX=index)

    @gluon.jit
    def zeros(self):
        LAYOUT: gl.constexpr = accumulator_layout(self.N, self.a.dtype, gl.num_ctas())
        return (gl.zeros([self.ROWS, self.N], gl.float32, LAYOUT),)

    @gluon.jit
    def issue(self, acc, stage):
        a = self.a.index(stage * self.BLOCKS + self.INDEX)
        b = self.b.index(stage).permute([1, 0]) if self.B_K_MAJOR else self.b.index(stage)
        return (_issue(a, b, acc[0], acc[0].type.layout, self.A_K_MAJOR),)

    @gluon.jit
    def wait(self, acc, keep: gl.constexpr):
        return (warpgroup_mma_wait(keep, [acc[0]]),)


@gluon.jit
def wgmma(a, b, TILE: gl.constexpr):
    """What consumer 0 multiplies of two operands with a `smem`."""
    return Wgmma(a.smem, b.smem, TILE.ROWS, b.TILE, a.K_MAJOR, b.K_MAJOR, TILE.COOPERATIVE, 0)


@gluon.aggregate
class WgmmaExtra:
    """A width that is no power of two: `main`, and beside it the columns of `extra`, an accumulator of its own."""

    main: Wgmma
    extra: Wgmma

    @gluon.jit
    def of_part(self, index: gl.constexpr):
        return WgmmaExtra(self.main.of_part(index), self.extra.of_part(index))

    @gluon.jit
    def zeros(self):
        return self.main.zeros() + self.extra.zeros()

    @gluon.jit
    def issue(self, acc, stage):
        return self.main.issue(acc[:1], stage) + self.extra.issue(acc[1:], stage)

    @gluon.jit
    def wait(self, acc, keep: gl.constexpr):
        main, extra = warpgroup_mma_wait(2 * keep, [acc[0], acc[1]])
        return (main, extra)


@gluon.aggregate
class WgmmaPromoted:
    """Of float8, whose sums keep some 14 bits inside of the tensor cores: those of a stage are added up in fp32. Both
    operands lie along K. A consumer waits for its own products; the other consumers' fill that time."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    ROWS: gl.constexpr
    N: gl.constexpr
    BLOCKS: gl.constexpr
    INDEX: gl.constexpr

    @gluon.jit
    def of_part(self, index: gl.constexpr):
        """With that block of A."""
        return gl.aggregate_replace(self, INDEX=index)

    @gluon.jit
    def zeros(self):
        LAYOUT: gl.constexpr = accumulator_layout(self.N, self.a.dtype, gl.num_ctas())
        return (gl.zeros([self.ROWS, self.N], gl.float32, LAYOUT),)

    @gluon.jit
    def issue(self, acc, stage):
        a = self.a.index(stage * self.BLOCKS + self.INDEX)
        b = self.b.index(stage).permute([1, 0])
        new = warpgroup_mma(a, b, self.zeros()[0], use_acc=False, is_async=True)
        return (acc[0] + warpgroup_mma_wait(0, [new]),)

    @gluon.jit
    def wait(self, acc, keep: gl.constexpr):
        return acc
