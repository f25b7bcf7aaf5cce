"""Stream-K's fix-up: a tile that several programs share is added up by whoever arrives last, in the order of K. So the
sum is always the same, whoever that is."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _coalesced(workspace, block):
    """Where the elements of a block of 64 (or 128) rows go in the workspace: those that one instruction of a warp
    stores side by side. In the layout of wgmma's result a thread has two neighbours of a row, and of each 16 rows the
    same ones again 8 below and in every 8th column."""
    LAYOUT: gl.constexpr = block.type.layout
    i = gl.arange(0, block.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    j = gl.arange(0, block.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    pair = (i // 64) * 128 + (i // 16 % 4) * 32 + i % 8 * 4 + j // 2 % 4
    instruction = j // 8 * 2 + i // 8 % 2
    return workspace + (instruction * (block.shape[0] * 4) + pair * 2 + j % 2)


@gluon.aggregate
class NoFixup:
    """Of a scheduler that cuts no tile."""

    BLOCK_M: gl.constexpr

    @gluon.jit
    def complete(self, acc, scheduler, tile, k_begin, k_end, INDEX: gl.constexpr):
        return acc, True


@gluon.aggregate
class Fixup:
    """workspace: fp32 [programs, 2, BLOCK_M * BLOCK_N]. counters: int32, a zero for each cut tile and
    consumer."""

    workspace: gl.tensor
    counters: gl.tensor
    BLOCK_M: gl.constexpr

    @gluon.jit
    def complete(self, acc, scheduler, tile, k_begin, k_end, INDEX: gl.constexpr):
        """What consumer INDEX has summed of a tile -> (the sum to store, whether it is this program that stores it)."""
        is_whole = True
        if k_end - k_begin < scheduler.k_blocks:
            acc, is_whole = self.reduce(acc, scheduler, tile, k_begin, INDEX)
        return acc, is_whole

    @gluon.jit
    def reduce(self, acc, scheduler, tile, k_begin, INDEX: gl.constexpr):
        """Leave the partial sum `acc`; the last to arrive gets the sum of all. Returns (acc, is it that)."""
        main = acc[0]
        ROWS: gl.constexpr = main.shape[0]
        N: gl.constexpr = main.shape[1]
        EXTRA: gl.constexpr = acc[1].shape[1] if len(acc) > 1 else 0
        BLOCK_N: gl.constexpr = N + EXTRA
        PARTIAL: gl.constexpr = self.BLOCK_M * BLOCK_N
        at = _coalesced(self.workspace + INDEX * ROWS * BLOCK_N, main)
        if EXTRA > 0:
            extra = acc[1]
            extra_at = _coalesced(self.workspace + INDEX * ROWS * BLOCK_N + ROWS * N, extra)
        # A program's share holds at most one partial sum that begins a tile and one that does not: two places each.
        program = gl.program_id(0)
        mine = (2 * program + (k_begin == 0).to(gl.int32)).to(gl.int64) * PARTIAL
        gl.store(at + mine, main)
        if EXTRA > 0:
            gl.store(extra_at + mine, extra)
        begin = (tile - scheduler.whole) * scheduler.k_blocks
        first = begin // scheduler.share
        last = (begin + scheduler.k_blocks - 1) // scheduler.share
        counter = self.counters + (tile - scheduler.whole) * (self.BLOCK_M // ROWS) + INDEX
        gl.barrier()  # every thread's partial sum is written before one of them says so
        arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        gl.barrier()
        is_last = arrived == last - first
        if is_last:
            gl.store(counter, 0)  # ready for the next launch
            where = (2 * first + 1).to(gl.int64) * PARTIAL
            main = gl.load(at + where, cache_modifier=".cg")
            if EXTRA > 0:
                extra = gl.load(extra_at + where, cache_modifier=".cg")
            for b in range(first + 1, last + 1):
                where = (2 * b).to(gl.int64) * PARTIAL
                main += gl.load(at + where, cache_modifier=".cg")
                if EXTRA > 0:
                    extra += gl.load(extra_at + where, cache_modifier=".cg")
        if EXTRA > 0:
            return (main, extra), is_last
        else:
            return (main,), is_last
