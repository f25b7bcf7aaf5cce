"""A product's assembly: barriers, producers and consumers around the parts that a kernel has chosen."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tk.kernels.hopper.dependent_launch import launch_dependents
from tk.kernels.hopper.pipeline import allocate_barriers
from tk.kernels.hopper.stream_k import Fixup, NoFixup
from tk.kernels.hopper.tile_scheduler import GroupScheduler, PersistentScheduler, StreamKScheduler, TileOrder
from tk.kernels.hopper.warp_roles import Consumer, Producer, specialize


@gluon.jit
def schedule_tiles(size, schedule, partials, TILE: gl.constexpr, STREAM_K: gl.constexpr):
    """A scheduler of a ``Size`` and a ``Schedule``, and the fix-up of what it cuts."""
    order = TileOrder(gl.cdiv(size.M, TILE.BLOCK_M), gl.cdiv(size.N, TILE.BLOCK_N), schedule.group)
    k_blocks = gl.cdiv(size.K, TILE.BLOCK_K)
    if STREAM_K:
        scheduler = StreamKScheduler(schedule.whole, order.m_tiles * order.n_tiles, k_blocks, schedule.share, order)
        return scheduler, Fixup(partials.workspace, partials.counters, TILE.BLOCK_M)
    else:
        return PersistentScheduler(schedule.whole, k_blocks, order), NoFixup(TILE.BLOCK_M)


@gluon.jit
def schedule_groups(offs, stride_offs, groups, size, TILE: gl.constexpr):
    """The scheduler of groups of rows, which end at `offs`."""
    n_tiles = gl.cdiv(size.N, TILE.BLOCK_N)
    k_blocks = gl.cdiv(size.K, TILE.BLOCK_K)
    return GroupScheduler(offs, stride_offs, groups, size.M, n_tiles, k_blocks, TILE.BLOCK_M)


@gluon.jit
def multiply(a, b, mma, scheduler, fixup, store, epilogue, TILE: gl.constexpr, DEPENDENT: gl.constexpr = False):
    """D = A B^T by the tiles of `scheduler`; of cut tiles `fixup` makes whole ones.

    a, b: what the producers load (tma_load.py). mma: what consumer 0 multiplies of it (wgmma.py). store, epilogue: what
    becomes of a tile's sums (epilogue.py). TILE: a ``Tile``. DEPENDENT: the next kernel in the stream may begin while
    this one runs."""
    CONSUMERS: gl.constexpr = TILE.CONSUMERS
    pipeline, order = allocate_barriers(TILE.STAGES, 2, TILE.COOPERATIVE, 2 if TILE.PINGPONG else 1)
    fence_async_shared()
    gl.barrier()
    if DEPENDENT:
        launch_dependents()
    producers = (Producer(a, pipeline, scheduler, 0, TILE.BLOCK_K), Producer(b, pipeline, scheduler, 1, TILE.BLOCK_K))
    consumers = (Consumer(mma, store, pipeline, order, fixup, scheduler, epilogue, TILE, 0),)
    for i in gl.static_range(1, CONSUMERS):
        other = gl.aggregate_replace(consumers[0], mma=mma.of_part(i % TILE.COOPERATIVE), INDEX=i)
        consumers = consumers + (other,)
    specialize(consumers, producers, TILE.CONSUMER_REGS, TILE.PRODUCER_REGS)
