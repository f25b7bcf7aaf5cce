"""Products of few rows on Hopper, with swap-AB: out^T = b^T a^T. A cluster of thread blocks has a tile of out, and
K is split over its blocks.

wgmma always has 64 rows: here they are columns of b, and the few rows of a are its N. A block streams its share of b
through a ring of TMA loads; no producer warps, since one product in flight is enough to keep a memory-bound ring full.
The blocks of a cluster then exchange their partial sums through distributed shared memory: each adds up one part of the
tile, always in the same order. No workspace, no counters, no second launch.
"""

from collections.abc import Iterator

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tk.aot.spec import Config, Const, Kernel, Plan, Point
from tk.kernels.epilogue import finish
from tk.kernels.gemm.cost import predict
from tk.kernels.gemm.problem import (
    DTYPE_AXIS,
    EPILOGUE_AXIS,
    OUT_AXIS,
    PRECISION_AXIS,
    serves,
)
from tk.kernels.hopper.cluster import cluster_bases
from tk.kernels.hopper.dependent_launch import launch_dependents, wait_for_prerequisites
from tk.kernels.hopper.pipeline import PipelineState
from tk.kernels.hopper.plans import ClusterSplitK
from tk.kernels.hopper.tma_load import EVICT_FIRST, allocate_blocks
from tk.kernels.hopper.wgmma import accumulator_layout
from tk.kernels.mm.op import MM, OP
from tk.kernels.mm.tma_plans import takes


@gluon.constexpr_function
def _exchange(blocks, rows, num_warps):
    """[blocks, rows, cols]: every block of the cluster has all parts of its share of the rows; rows contiguous."""
    share = rows // blocks
    wide = min(8, share)
    lanes = min(32, share // wide)
    return gl.BlockedLayout([blocks, wide, 1], [1, lanes, 32 // lanes], [1, 1, num_warps], [1, 2, 0],
                            cga_layout=cluster_bases(blocks, 1, 3))  # fmt: skip


@gluon.jit
def _load_a(desc, ring, full, stage, row, k, pred, A_K_MAJOR: gl.constexpr, BYTES: gl.constexpr):
    """Also announces the bytes of both operands."""
    mbarrier.expect(full.index(stage), BYTES, pred=pred)
    at = [row, k] if A_K_MAJOR else [k, row]
    tma.async_load(desc, at, full.index(stage), ring.index(stage), pred=pred, cache_policy=EVICT_FIRST)


@gluon.jit
def sum_by_cluster(a_desc, b_desc, size, k_per_split, TILE: gl.constexpr, A_K_MAJOR: gl.constexpr,
                   PROMOTED: gl.constexpr):  # fmt: skip
    """This block's share of its cluster's tile of D = A B^T, and the share's rows and columns. TILE: a ``ClusterTile``.
    k_per_split: how much of K each block sums, a multiple of BLOCK_K. PROMOTED: as in WgmmaPromoted."""
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    BLOCK_K: gl.constexpr = TILE.BLOCK_K
    STAGES: gl.constexpr = TILE.STAGES
    BLOCKS: gl.constexpr = TILE.BLOCKS
    dtype: gl.constexpr = a_desc.dtype
    BYTES: gl.constexpr = a_desc.nbytes_per_cta + b_desc.nbytes_per_cta
    a_smem = allocate_blocks(a_desc, STAGES)
    b_smem = allocate_blocks(b_desc, STAGES)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.barrier()
    launch_dependents()
    rank = 0
    if BLOCKS > 1:
        rank = gl.inline_asm_elementwise("mov.u32 $0, %cluster_ctarank;", "=r", [], gl.int32, is_pure=True, pack=1)
    n_tiles = gl.cdiv(size.N, BLOCK_N)
    tile = gl.program_id(0)
    m = tile // n_tiles
    # To the compiler A's tile has BLOCKS * BLOCK_M rows, of which this block has the rank-th BLOCK_M. They are the same
    # rows, at other values of k.
    row = (m - rank) * BLOCK_M
    col = (tile % n_tiles) * BLOCK_N
    k_begin = rank * k_per_split
    k_blocks = gl.cdiv(gl.minimum(k_per_split, size.K - k_begin), BLOCK_K)

    for i in gl.static_range(STAGES - 1):
        _load_a(a_desc, a_smem, full, i, row, k_begin + i * BLOCK_K, i < k_blocks, A_K_MAJOR, BYTES)
    wait_for_prerequisites()
    for i in gl.static_range(STAGES - 1):
        tma.async_load(b_desc, [col, k_begin + i * BLOCK_K], full.index(i), b_smem.index(i), pred=i < k_blocks)

    LAYOUT: gl.constexpr = accumulator_layout(BLOCK_N, dtype, BLOCKS)
    acc = gl.zeros([BLOCKS * BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
    state = PipelineState(gl.to_tensor(0), gl.to_tensor(0), STAGES)
    free = STAGES - 1
    for i in range(k_blocks):
        mbarrier.wait(full.index(state.stage), state.phase)
        x = a_smem.index(state.stage)
        if not A_K_MAJOR:
            x = x.permute([1, 0])
        y = b_smem.index(state.stage).permute([1, 0])
        if PROMOTED:
            new = warpgroup_mma(x, y, gl.zeros_like(acc), use_acc=False, is_async=True)
            acc += warpgroup_mma_wait(0, [new])
        else:
            acc = warpgroup_mma(x, y, acc, is_async=True)
            acc = warpgroup_mma_wait(1, [acc])  # the product before is done: its stage is free
        k = i + STAGES - 1
        _load_a(a_desc, a_smem, full, free, row, k_begin + k * BLOCK_K, k < k_blocks, A_K_MAJOR, BYTES)
        tma.async_load(b_desc, [col, k_begin + k * BLOCK_K], full.index(free), b_smem.index(free), pred=k < k_blocks)
        free = state.stage
        state = state.next()
    if not PROMOTED:
        acc = warpgroup_mma_wait(0, [acc])

    EXCHANGE: gl.constexpr = _exchange(BLOCKS, BLOCK_M, gl.num_warps())
    x = gl.sum(gl.convert_layout(acc.reshape([BLOCKS, BLOCK_M, BLOCK_N]), EXCHANGE), axis=0)
    i = m * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, x.type.layout))
    j = col + gl.arange(0, BLOCK_N, gl.SliceLayout(0, x.type.layout))
    return x, i, j


@gluon.jit
def mm_tma_cluster_split_k(a, b, out, bias, size, k_per_split, stride_om, epilogue, TILE: gl.constexpr,
                           A_K_MAJOR: gl.constexpr):  # fmt: skip
    """D = A B^T of tensor maps: columns of b by rows of a."""
    x, i, j = sum_by_cluster(a, b, size, k_per_split, TILE, A_K_MAJOR, False)
    finish(x, bias, out, i, j, size.M, size.N, 1, stride_om, epilogue, "matrix")


# --- The plan ---


def _plan(point: Point) -> Plan | None:
    a_k_major = point.order[1] == "t"
    # tf32 has no way from shared memory to wgmma but along K.
    if not takes(point, swap_ab=True) or (point.dtype == "fp32" and not a_k_major):
        return None
    args = dict(bias=MM.bias_pointer(point.dtype), epilogue=MM.epilogue(swap_ab=True), A_K_MAJOR=Const(a_k_major))
    cut = ClusterSplitK(MM, point.config)
    return cut.plan(point, mm_tma_cluster_split_k, args, serves(point, EPILOGUE_AXIS), predict)


# --- The grid ---


# Rows of out in a tile, blocks of a cluster, occupancy (programs that a multiprocessor holds at once), and the
# itemsizes that it is for: 16-bit operands, tf32.
_SHAPES = (
    *((16, 1, 2, (2, 4)), (16, 2, 2, (2,)), (16, 4, 2, (2, 4))),
    (32, 1, 2, (2,)),
    *((64, 2, 1, (2,)), (64, 4, 1, (2, 4))),
)


def _configs() -> Iterator[Config]:
    """A ring of 200 KB for one block on a multiprocessor, or of 100 KB for two of them. Named for the tile of out x
    block of K, the stages, and the cluster along M x N x K."""
    for rows, cluster, occupancy, itemsizes in _SHAPES:
        stages = 200 * 1024 // occupancy // (2 * (64 + rows) * 128)
        for size in itemsizes:
            block_k = 256 // size
            name = f"{rows}x64x{block_k}_s{stages}_cluster_split_k_c1x1x{cluster}" + ("_tf32" if size == 4 else "")
            params = dict(block_m=64, block_n=rows, block_k=block_k, num_stages=stages, cluster=cluster,
                          occupancy=occupancy, itemsize=size)  # fmt: skip
            yield Config(name, params)


_AXES = {
    "dtype": DTYPE_AXIS,
    "precision": PRECISION_AXIS,
    "order": ("nn", "nt"),
    "epilogue": ("matrix",),
    "out": OUT_AXIS,
}

KERNELS = (Kernel("mm_tma_cluster_split_k", OP, _AXES, {90: tuple(_configs())}, _plan),)
