"""Takes the accumulator to memory: activation(alpha acc + beta bias), by sub-tiles, through shared memory and TMA.

A whole tile would take the ring's shared memory, and its epilogue too many registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tk.kernels.epilogue import activate
from tk.kernels.hopper.cluster import cluster_bases
from tk.kernels.hopper.tma_load import allocate_blocks, as_block


@gluon.aggregate
class BiasActivation:
    """activation(alpha D + beta bias), D being rows x cols. terms: an ``Epilogue``.

    KIND "plain": alpha alone; "vector": bias is one row of the result, which is a column of D where SWAP_AB; "matrix":
    any bias."""

    rows: gl.tensor
    cols: gl.tensor
    bias: gl.tensor
    terms: object
    SWAP_AB: gl.constexpr
    KIND: gl.constexpr

    @gluon.jit
    def of_tile(self, at):
        return self

    @gluon.jit
    def prefetch(self, row, col, ROWS: gl.constexpr, COLS: gl.constexpr):
        """The bias into L1, before the mainloop whose epilogue wants it: from L2 each sub-tile would wait for it."""
        BASES: gl.constexpr = cluster_bases(gl.num_ctas(), 0 if self.SWAP_AB else 1, 1)
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=BASES)
        if self.terms.has_bias != 0:
            if self.SWAP_AB:
                at = self.bias + gl.minimum(row + gl.arange(0, ROWS, LAYOUT), self.rows - 1) * self.terms.stride_bias_m
            else:
                at = self.bias + gl.minimum(col + gl.arange(0, COLS, LAYOUT), self.cols - 1) * self.terms.stride_bias_n
            gl.inline_asm_elementwise("prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(gl.int64)], gl.int32,
                                      is_pure=False, pack=1)  # fmt: skip

    @gluon.jit
    def apply(self, acc, row, col):
        """Of the block of D at (row, col)."""
        LAYOUT: gl.constexpr = acc.type.layout
        acc = acc * self.terms.alpha
        if self.KIND == "plain":
            return acc
        if self.terms.has_bias != 0:
            i = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
            j = col + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
            if self.KIND == "vector":
                if self.SWAP_AB:
                    z = gl.load(self.bias + i * self.terms.stride_bias_m, mask=i < self.rows, other=0.0)
                    z = z.to(gl.float32)[:, None]
                else:
                    z = gl.load(self.bias + j * self.terms.stride_bias_n, mask=j < self.cols, other=0.0)
                    z = z.to(gl.float32)[None, :]
            else:
                at = (
                    i[:, None].to(gl.int64) * self.terms.stride_bias_m
                    + j[None, :].to(gl.int64) * self.terms.stride_bias_n
                )
                inside = (i < self.rows)[:, None] & (j < self.cols)[None, :]
                z = gl.load(self.bias + at, mask=inside, other=0.0).to(gl.float32)
            acc = acc + self.terms.beta * z
        return activate(acc, self.terms.activation)


@gluon.aggregate
class BatchBiasActivation:
    """The same of a batch, whose biases lie `stride` apart."""

    matrix: BiasActivation
    stride: gl.tensor
    KIND: gl.constexpr

    @gluon.jit
    def of_tile(self, at):
        return gl.aggregate_replace(self.matrix, bias=self.matrix.bias + at[2].to(gl.int64) * self.stride)


@gluon.aggregate
class InMatrix:
    """Where a TmaStore writes: a matrix. SWAP_AB: it is D transposed."""

    SWAP_AB: gl.constexpr

    @gluon.jit
    def of_tile(self, at):
        return self

    @gluon.jit
    def coordinates(self, row, col):
        if self.SWAP_AB:
            return [col, row]
        else:
            return [row, col]


@gluon.aggregate
class InBatch:
    """Matrix `batch` of a batch, which is the third of a tile's coordinates."""

    batch: gl.tensor
    SWAP_AB: gl.constexpr

    @gluon.jit
    def of_tile(self, at):
        return gl.aggregate_replace(self, batch=at[2])

    @gluon.jit
    def coordinates(self, row, col):
        return [self.batch, row, col]


@gluon.aggregate
class TmaStore:
    """Through STAGES buffers of shared memory, to where `place` has a row and a column of D. TMA cuts off what lies
    outside."""

    smem: gl.shared_memory_descriptor
    desc: gl.nvidia.hopper.tma.tensor_descriptor
    place: object
    STAGES: gl.constexpr

    @gluon.jit
    def of_consumer(self, index: gl.constexpr):
        """With that consumer's own buffers."""
        return gl.aggregate_replace(self, smem=self.smem.slice(index * self.STAGES, self.STAGES))

    @gluon.jit
    def of_tile(self, at):
        return gl.aggregate_replace(self, place=self.place.of_tile(at))

    @gluon.jit
    def put(self, x, buffer: gl.constexpr, row, col):
        smem = self.smem.index(buffer)
        tma.store_wait(self.STAGES - 1)  # what was stored from here before has left
        gl.barrier()
        if self.place.SWAP_AB:
            smem.permute([1, 0]).store(x)
        else:
            smem.store(x)
        fence_async_shared()
        gl.barrier()
        tma.async_store(self.desc, self.place.coordinates(row, col), as_block(smem, self.desc))


@gluon.jit
def tma_store(desc, place, TILE: gl.constexpr):
    """A TmaStore with buffers for all consumers of a ``Tile``."""
    smem = allocate_blocks(desc, TILE.CONSUMERS * TILE.EPILOGUE_STAGES)
    return TmaStore(smem, desc, place, TILE.EPILOGUE_STAGES)


@gluon.aggregate
class TmaStoreGroupRows:
    """Into a group's rows, [begin, end). What reaches past the end would go into the next group's rows: it is stored by
    threads, one element at a time, which only a group's last rows are."""

    whole: TmaStore
    desc: gl.nvidia.hopper.tma.tensor_descriptor
    out: gl.tensor
    stride: gl.tensor
    cols: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    STAGES: gl.constexpr

    @gluon.jit
    def of_consumer(self, index: gl.constexpr):
        return gl.aggregate_replace(self, whole=self.whole.of_consumer(index))

    @gluon.jit
    def of_tile(self, at):
        return gl.aggregate_replace(self, begin=at[3], end=at[4])

    @gluon.jit
    def put(self, x, buffer: gl.constexpr, row, col):
        first = self.begin + row
        if first + x.shape[0] <= self.end:
            self.whole.put(x, buffer, first, col)
        else:
            i = first + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
            j = col + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
            at = self.out + i[:, None].to(gl.int64) * self.stride + j[None, :]
            gl.store(at, x, mask=(i < self.end)[:, None] & (j < self.cols)[None, :])


@gluon.jit
def store_group_rows(desc, out, stride, cols, TILE: gl.constexpr):
    """A TmaStoreGroupRows with buffers for all consumers."""
    whole = tma_store(desc, InMatrix(False), TILE)
    none = gl.to_tensor(0)
    return TmaStoreGroupRows(whole, desc, out, stride, cols, none, none, TILE.EPILOGUE_STAGES)


@gluon.jit
def _subtiles(acc, LAYOUT: gl.constexpr):
    """acc's columns in parts as wide as LAYOUT's instruction, a tuple."""
    if acc.shape[1] == LAYOUT.instr_shape[1]:
        return (gl.convert_layout(acc, LAYOUT),)
    else:
        lo, hi = gl.split(acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute([0, 2, 1]))
        return _subtiles(lo, LAYOUT) + _subtiles(hi, LAYOUT)


@gluon.jit
def _all_subtiles(acc, LAYOUT: gl.constexpr):
    if len(acc) == 1:
        return _subtiles(acc[0], LAYOUT)
    else:
        return _subtiles(acc[0], LAYOUT) + _all_subtiles(acc[1:], LAYOUT)


@gluon.constexpr_function
def _of_width(layout, n):
    """The same accumulator layout, of an instruction `n` wide."""
    shape = [layout.instr_shape[0], n, layout.instr_shape[2]]
    return gl.NVMMADistributedLayout(layout.version, layout.warps_per_cta, shape, layout.cga_layout)


@gluon.jit
def store_tile(acc, row, col, store, epilogue, SUBTILE_N: gl.constexpr, COUNT: gl.constexpr):
    """acc, a tuple that holds COUNT sub-tiles, goes out at (row, col) of D."""
    LAYOUT: gl.constexpr = _of_width(acc[0].type.layout, SUBTILE_N)
    subtiles = _all_subtiles(acc, LAYOUT)
    if epilogue.KIND == "plain" or COUNT == 1:
        for i in gl.static_range(COUNT):
            x = epilogue.apply(subtiles[i], row, col + i * SUBTILE_N)
            store.put(x.to(store.desc.dtype), i % store.STAGES, row, col + i * SUBTILE_N)
    else:
        # A loop at run time, in which the sub-tiles move up: registers have no numbers that a loop could count.
        # Unrolled, the activations are more code than the instruction cache holds, and fetching it takes longer than
        # running it.
        for i in range(COUNT):
            x = epilogue.apply(subtiles[0], row, col)
            store.put(x.to(store.desc.dtype), i % store.STAGES, row, col)
            subtiles = subtiles[1:] + subtiles[:1]
            col += SUBTILE_N
