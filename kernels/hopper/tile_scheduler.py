"""Which tile of D comes next, and which blocks of its K.

Producers and consumers of a program walk the same sequence:

    state = scheduler.begin()
    while scheduler.has_work(state):
        state, tile, k_begin, k_end = scheduler.next(state)
        at = scheduler.coordinates(tile)

at[0] and at[1] are the tile's row and column. What else there is (the matrix of a batch) is for the ``locate`` of
operands and for the ``of_tile`` of store and epilogue.

Where tiles take turns with another consumer's, ``k_blocks_of(state)`` says how many k blocks the next tile has, and
``skip`` passes over it. ``has_k_blocks`` says whether a tile has any: where each has some, that is a constant.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.aggregate
class TileOrder:
    """The order of tiles: `group` rows of tiles are walked together, so that they share columns of tiles in L2."""

    m_tiles: gl.tensor
    n_tiles: gl.tensor
    group: gl.tensor | gl.constexpr

    @gluon.jit
    def coordinates(self, tile):
        group = tile // (self.group * self.n_tiles)
        rest = tile - group * self.group * self.n_tiles
        size = gl.minimum(self.group, self.m_tiles - group * self.group)
        return group * self.group + rest % size, rest // size


@gluon.aggregate
class BatchTileOrder:
    """Matrix after matrix of a batch. The coordinates are the row and the column of a tile, and the matrix."""

    of_matrix: TileOrder

    @gluon.jit
    def coordinates(self, tile):
        tiles = self.of_matrix.m_tiles * self.of_matrix.n_tiles
        batch = tile // tiles
        m, n = self.of_matrix.coordinates(tile - batch * tiles)
        return m, n, batch


@gluon.aggregate
class PersistentScheduler:
    """Whole tiles, round-robin over the programs. The state is the next tile."""

    tiles: gl.tensor
    k_blocks: gl.tensor
    order: object

    @gluon.jit
    def begin(self):
        return gl.program_id(0)

    @gluon.jit
    def has_work(self, tile):
        return tile < self.tiles

    @gluon.jit
    def next(self, tile):
        return tile + gl.num_programs(0), tile, 0, self.k_blocks

    @gluon.jit
    def k_blocks_of(self, tile):
        return self.k_blocks

    @gluon.jit
    def has_k_blocks(self, k_begin, k_end):
        return True

    @gluon.jit
    def skip(self, tile, count: gl.constexpr):
        """Passes over `count` tiles of this program: another consumer's."""
        return tile + count * gl.num_programs(0)

    @gluon.jit
    def coordinates(self, tile):
        return self.order.coordinates(tile)


@gluon.aggregate
class StreamKState:
    """tile: the next whole one. begin, end: what is left of this program's share of the k blocks of cut tiles."""

    tile: gl.tensor
    begin: gl.tensor
    end: gl.tensor


@gluon.aggregate
class StreamKScheduler:
    """Stream-K behind data-parallel tiles: tiles [0, whole) are done as they are, round-robin over the programs. The k
    blocks of the rest stand in one line, of which each program takes `share`. Where `share` divides the k blocks of a
    tile that is split-K."""

    whole: gl.tensor
    tiles: gl.tensor
    k_blocks: gl.tensor
    share: gl.tensor
    order: TileOrder

    @gluon.jit
    def begin(self):
        program = gl.program_id(0)
        begin = self.whole * self.k_blocks + program * self.share
        return StreamKState(program, begin, gl.minimum(begin + self.share, self.tiles * self.k_blocks))

    @gluon.jit
    def has_work(self, state):
        return (state.tile < self.whole) | (state.begin < state.end)

    @gluon.jit
    def next(self, state):
        is_whole = state.tile < self.whole
        cut = state.begin // self.k_blocks
        tile = gl.where(is_whole, state.tile, cut)
        k_begin = gl.where(is_whole, 0, state.begin - cut * self.k_blocks)
        k_end = gl.where(is_whole, self.k_blocks, gl.minimum(self.k_blocks, state.end - cut * self.k_blocks))
        next_tile = gl.where(is_whole, state.tile + gl.num_programs(0), state.tile)
        begin = gl.where(is_whole, state.begin, state.begin + k_end - k_begin)
        return StreamKState(next_tile, begin, state.end), tile, k_begin, k_end

    @gluon.jit
    def has_k_blocks(self, k_begin, k_end):
        return True

    @gluon.jit
    def coordinates(self, tile):
        return self.order.coordinates(tile)


@gluon.aggregate
class GroupState:
    """A tile and where it belongs: `first` is its group's first tile, [begin, end) are the group's rows."""

    tile: gl.tensor
    group: gl.tensor
    first: gl.tensor
    begin: gl.tensor
    end: gl.tensor


@gluon.aggregate
class GroupScheduler:
    """Tiles of groups of rows, whose ends lie on the device, round-robin over the programs. A program's tiles rise, so
    that it walks the groups but once. Ends are cut off to [0, rows].

    The coordinates are a tile's row and column within its group, the group, and where its rows begin and end. Tiles of
    the same columns come one after the other: they share the group's matrix, which is what there is most of."""

    offs: gl.tensor
    stride: gl.tensor
    groups: gl.tensor
    rows: gl.tensor
    n_tiles: gl.tensor
    k_blocks: gl.tensor
    BLOCK_M: gl.constexpr

    @gluon.jit
    def end_of(self, group):
        """0 for a group that there is not."""
        end = gl.load(self.offs + group.to(gl.int64) * self.stride, mask=group < self.groups, other=0)
        return gl.minimum(gl.maximum(end, 0), self.rows)

    @gluon.jit
    def find(self, tile, group, first, begin, end):
        """The state of `tile`, from that of one that is not behind it."""
        tiles = gl.cdiv(gl.maximum(end - begin, 0), self.BLOCK_M) * self.n_tiles
        while (group < self.groups) & (tile >= first + tiles):
            first += tiles
            begin = end
            group += 1
            end = self.end_of(group)
            tiles = gl.cdiv(gl.maximum(end - begin, 0), self.BLOCK_M) * self.n_tiles
        return GroupState(tile, group, first, begin, end)

    @gluon.jit
    def begin(self):
        none = gl.to_tensor(0)
        return self.find(gl.program_id(0), none, none, none, self.end_of(none))

    @gluon.jit
    def has_work(self, state):
        return state.group < self.groups

    @gluon.jit
    def next(self, state):
        return self.skip(state, 1), state, 0, self.k_blocks

    @gluon.jit
    def k_blocks_of(self, state):
        return self.k_blocks

    @gluon.jit
    def has_k_blocks(self, k_begin, k_end):
        return True

    @gluon.jit
    def skip(self, state, count: gl.constexpr):
        tile = state.tile + count * gl.num_programs(0)
        return self.find(tile, state.group, state.first, state.begin, state.end)

    @gluon.jit
    def coordinates(self, state):
        m_tiles = gl.cdiv(state.end - state.begin, self.BLOCK_M)
        tile = state.tile - state.first
        return tile % m_tiles, tile // m_tiles, state.group, state.begin, state.end
