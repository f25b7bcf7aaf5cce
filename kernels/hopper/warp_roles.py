"""The loops of a warp-specialised kernel: producer warps fill the ring, consumer warp groups multiply and store.

Both walk the same tiles. Consumers are cooperative — each has its rows of one tile — or ping-pong: each has every other
tile for itself, and one's epilogue runs beside the other's mainloop.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tk.kernels.hopper.dependent_launch import wait_for_prerequisites
from tk.kernels.hopper.epilogue import store_tile


@gluon.aggregate
class Producer:
    """One warp that loads an operand. SIDE: 0 for A, whose tiles are the scheduler's rows, 1 for B and its columns."""

    operand: object
    pipeline: object
    scheduler: object
    SIDE: gl.constexpr
    BLOCK_K: gl.constexpr


@gluon.jit
def produce(self):
    """What a Producer does."""
    if not self.operand.AHEAD:
        wait_for_prerequisites()
    work = self.scheduler.begin()
    state = self.pipeline.begin()
    while self.scheduler.has_work(work):
        work, tile, k_begin, k_end = self.scheduler.next(work)
        at = self.scheduler.coordinates(tile)
        place = self.operand.locate(at[self.SIDE] * self.operand.TILE, at)
        for k in range(k_begin, k_end):
            self.pipeline.producer_acquire(state)
            self.operand.load(self.pipeline, state, place, k * self.BLOCK_K)
            state = state.next()
            place = self.operand.advance(place, self.BLOCK_K)


@gluon.aggregate
class Consumer:
    """A warp group that multiplies and stores: the (INDEX % COOPERATIVE)-th rows of a tile, of every tile or, with
    PINGPONG, of every other one. TILE: a ``Tile``."""

    mma: object
    store: object
    pipeline: object
    order: object
    fixup: object
    scheduler: object
    epilogue: object
    TILE: gl.constexpr
    INDEX: gl.constexpr


@gluon.constexpr_function
def _power_of_two(n):
    return 1 << (n - 1).bit_length()


@gluon.jit
def mainloop(mma, pipeline, state, k_begin, k_end, last):
    """Of one tile. Returns the accumulator, the state behind it, and the stage that is still to be released. `last`:
    the stage that the mainloop before used."""
    acc = mma.zeros()
    for k in range(k_begin, k_end):
        pipeline.consumer_wait(state)
        acc = mma.issue(acc, state.stage)
        acc = mma.wait(acc, 1)
        pipeline.consumer_release(last, k > k_begin)
        last = state.stage
        state = state.next()
    return acc, state, last


@gluon.jit
def consume(self):
    """What a Consumer does."""
    TILE: gl.constexpr = self.TILE
    PART: gl.constexpr = self.INDEX % TILE.COOPERATIVE
    TURN: gl.constexpr = self.INDEX // TILE.COOPERATIVE
    store = self.store.of_consumer(self.INDEX)
    work = self.scheduler.begin()
    state = self.pipeline.begin()
    last = 0
    turn_phase = 1 - TURN
    if self.epilogue.KIND == "vector":
        wait_for_prerequisites()  # they may write the bias, and L1 would keep what it was
    if TURN > 0:  # the first tile is the other consumer's
        state = state.skip(self.scheduler.k_blocks_of(work))
        work = self.scheduler.skip(work, 1)
    while self.scheduler.has_work(work):
        work, tile, k_begin, k_end = self.scheduler.next(work)
        at = self.scheduler.coordinates(tile)
        row = at[0] * TILE.BLOCK_M + PART * TILE.ROWS
        col = at[1] * TILE.BLOCK_N
        tile_store = store.of_tile(at)
        epilogue = self.epilogue.of_tile(at)
        if self.epilogue.KIND == "vector":
            epilogue.prefetch(row, col, TILE.ROWS, _power_of_two(TILE.BLOCK_N))
        if TILE.PINGPONG:
            self.order.wait(TURN, turn_phase)
            turn_phase ^= 1
        acc, state, last = mainloop(self.mma, self.pipeline, state, k_begin, k_end, last)
        if TILE.PINGPONG:
            self.order.arrive(1 - TURN)
        acc = self.mma.wait(acc, 0)
        self.pipeline.consumer_release(last, self.scheduler.has_k_blocks(k_begin, k_end))

        acc, is_whole = self.fixup.complete(acc, self.scheduler, tile, k_begin, k_end, PART)
        if is_whole:
            store_tile(acc, row, col, tile_store, epilogue, TILE.SUBTILE_N, TILE.BLOCK_N // TILE.SUBTILE_N)
        if TILE.PINGPONG:
            state = state.skip(self.scheduler.k_blocks_of(work))
            work = self.scheduler.skip(work, 1)
    tma.store_wait(0)


@gluon.jit
def specialize(consumers, producers, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr):
    """Gives each of one to three consumers four warps, and each of two producers one. The first consumer has the
    kernel's own warps, with the registers that the others leave."""
    a, b = producers
    if len(consumers) == 1:
        gl.warp_specialize(
            [(consume, (consumers[0],)), (produce, (a,)), (produce, (b,))], [1, 1], [PRODUCER_REGS, PRODUCER_REGS]
        )
    elif len(consumers) == 2:
        gl.warp_specialize(
            [(consume, (consumers[0],)), (consume, (consumers[1],)), (produce, (a,)), (produce, (b,))],
            [4, 1, 1],
            [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
        )
    else:
        gl.static_assert(len(consumers) == 3)
        gl.warp_specialize(
            [
                (consume, (consumers[0],)),
                (consume, (consumers[1],)),
                (consume, (consumers[2],)),
                (produce, (a,)),
                (produce, (b,)),
            ],
            [4, 4, 1, 1],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
        )
