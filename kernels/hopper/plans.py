"""The host's side: TMA descriptors, how many clusters a GPU holds, and what wgmma takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from triton.experimental.gluon.language import NVMMASharedLayout

from tk.aot.expr import Expr, Tensor, ceil_div, const, device, local, maximum, minimum, select
from tk.aot.spec import (
    ITEMSIZE,
    REDUCED_FLOATS,
    Arg,
    Buffer,
    Bundle,
    Config,
    Const,
    Constraint,
    Int,
    Launch,
    Plan,
    Point,
    Pointer,
    Scratch,
    TensorMap,
    require,
)
from tk.kernels.gemm.cost import Like, Work, predict
from tk.kernels.gemm.problem import (
    EPILOGUE_AXIS,
    OUT_AXIS,
    Batch,
    Gemm,
    batch_invariant,
    out_dtype,
    serves,
)
from tk.kernels.gemm.tiles import Tiles
from tk.kernels.hopper.arguments import ClusterTile, Maps, Partials, Schedule, Tile


def tensor_map(t: Tensor, dtype: str, contiguous: int, block: tuple[int, int], along: int = 0, blocks: int = 1,
               multicast: int = 1, round_to_tf32: bool = True) -> TensorMap:  # fmt: skip
    """A TMA view of a matrix, `contiguous` its dimension of stride 1. block: what one thread block has of it, in the
    matrix's own order. In a cluster, `blocks` of them stand side by side along dimension `along`, or `multicast` of
    them have the same. round_to_tf32: of fp32 operands."""
    order = (1 - contiguous, contiguous)
    rows, cols = (block[d] for d in order)
    across = [blocks if d == along else 1 for d in order]
    bases = [[b * (n > 1) for n in across] for b in (1, 2, 4, 8) if b < multicast * blocks]
    size = ITEMSIZE[dtype]
    layout = NVMMASharedLayout(min(128, size * cols), 8 * size, 2, cga_layout=bases)
    return TensorMap(
        t,
        dtype,
        tuple(t.size(d) for d in order),
        (t.stride(order[0]), 1),
        (rows * across[0], cols * across[1]),
        layout=repr(layout),
        round_to_tf32=dtype == "fp32" and round_to_tf32,  # wgmma itself would cut off what tf32 has no room for
    )


def batch_tensor_map(t: Batch, dtype: str, contiguous: int, block: tuple[int, int], is_shared: bool = False,
                     round_to_tf32: bool = True) -> TensorMap:  # fmt: skip
    """A TMA view of a batch of matrices, as ``tensor_map``'s of one. is_shared: all of a batch may be one matrix, with
    a stride of 0 that no tensor map has: then the view is of a batch of one, and the kernel counts in steps of 0."""
    one = tensor_map(t, dtype, contiguous, block, round_to_tf32=round_to_tf32)
    layout = NVMMASharedLayout(min(128, ITEMSIZE[dtype] * one.block[1]), 8 * ITEMSIZE[dtype], 3)
    is_one = (t.batch_stride == 0) if is_shared else (t.batch == 1)
    # The stride of a dimension of size 1 is never used, but the driver wants one.
    return replace(
        one,
        sizes=(select(is_one, 1, t.batch), *one.sizes),
        strides=(select(is_one, 16, t.batch_stride), *one.strides),
        block=(1, *one.block),
        layout=repr(layout),
    )


def resident_clusters(blocks: int, occupancy: int = 1) -> Expr:
    """How many clusters run at a time, with `occupancy` blocks on a multiprocessor. Two blocks always find a pair of
    multiprocessors; groups of four leave some over in every part of the GPU."""
    usable = device.sm_count if blocks <= 2 else device.sm_count * 9 // 10
    return usable * occupancy // blocks


def whole_tiles(tiles: Expr, group: int) -> dict[str, Bundle]:
    """What says that no tile is cut, in place of ``StreamK``."""
    return dict(partials=Partials(Const(None), Const(None)), schedule=Schedule(Int(tiles), Const(1), group=Int(group)))


@dataclass(frozen=True)
class StreamK:
    """How the tiles of a product of few rows are cut along K (``StreamKScheduler``, ``Fixup``).

    Whole tiles if that leaves less than an eighth of the multiprocessors idle. Else all but the last one or two waves
    of them; what is left is cut so that each tile has the same number of parts (split-K), or, where that too would
    leave an eighth idle, each program the same share (stream-K). No part is shorter than 4 k blocks.

    tile: rows and columns of out."""

    gemm: Gemm
    tile: tuple[int, int]
    block_k: int
    consumers: int  # that share a tile
    itemsize: int

    @property
    def _tiles(self) -> Expr:
        return ceil_div(self.gemm.M, self.tile[0]) * ceil_div(self.gemm.N, self.tile[1])

    @property
    def _k_blocks(self) -> Expr:
        return ceil_div(self.gemm.K, self.block_k)

    @property
    def _waves(self) -> Expr:
        return ceil_div(self._tiles, device.sm_count)

    def _local(self, i: int) -> Expr:
        return local(len(self.gemm.op.locals) + i)

    @property
    def _left(self) -> Expr:
        return self._tiles - self._local(0)

    @property
    def _splits(self) -> Expr:
        return maximum(device.sm_count // maximum(self._left, 1), 1)

    @property
    def _is_split_k(self) -> Expr:
        return (self._left <= device.sm_count) & (8 * self._left * self._splits >= 7 * device.sm_count)

    @property
    def _workspace(self) -> Expr:
        return 8 * self._grid * self.tile[0] * self.tile[1]

    @property
    def _grid(self) -> Expr:
        return self._local(2)

    @property
    def _locals(self) -> tuple[Expr, ...]:
        """Whole tiles, a program's share, programs."""
        sms, tiles, left, k_blocks = device.sm_count, self._tiles, self._left, self._k_blocks
        wanted = select(self._is_split_k, ceil_div(k_blocks, self._splits), ceil_div(left * k_blocks, sms))
        return (
            select(8 * tiles >= 7 * self._waves * sms, tiles, maximum(tiles // sms - 1, 0) * sms),
            maximum(wanted, minimum(k_blocks, 4)),
            select(self._local(0) > 0, sms, ceil_div(left * k_blocks, self._local(1))),
        )

    @property
    def _buffers(self) -> tuple[Buffer, ...]:
        return (
            Buffer(select(self._left > 0, self._workspace, 0)),
            Buffer(self._left * self.consumers * 4, zeroed=True),
        )

    def _args(self) -> dict[str, Bundle]:
        return dict(
            partials=Partials(Scratch(0, "fp32"), Scratch(1, "i32")),
            schedule=Schedule(Int(self._local(0)), Int(self._local(1)), Const(1)),
        )

    def _work(self, boxes: tuple[int, int]) -> Work:
        share, k_blocks, left = self._local(1), self._k_blocks, self._left
        # What is cut is not walked side by side.
        again = (ceil_div(self.gemm.M, self.tile[0]) - 1) * self.gemm.N * self.gemm.K * self.itemsize
        return Work(
            self.gemm,
            waves=self._waves,
            k_blocks=self._local(0) // device.sm_count * k_blocks + select(left > 0, share, 0),
            flops=2 * self.tile[0] * self.tile[1] * self.block_k,
            dram=self.gemm.traffic() + select(left > 0, self._workspace + again, 0),
            tile=self.tile,
            boxes=boxes,
            fixups=select(left > 0, ceil_div(k_blocks, share) + select(self._is_split_k, 0, 1), 0),
        )

    def plan(
        self,
        point: Point,
        fn: object,
        args: Mapping[str, Arg | Bundle],
        serves: Mapping[str, tuple[int, ...]],
        cost: Callable[[Point, Work], Expr],
        boxes: tuple[int, int] | None = None,
    ) -> Plan:
        """args: all but what says how the tiles are scheduled. boxes: where they are not the tile's."""
        gemm, few = self.gemm, 2 * self.tile[0]
        work = self._work(boxes or self.tile)
        launch = Launch(fn, {**args, **self._args()}, (self._grid, 1, 1), num_warps=4, dependent=gemm.pdl)
        constraints = (*gemm.suits_tma(point), batch_invariant(), require(gemm.M <= few, f"M <= {few}"))
        own = dict(locals=self._locals, buffers=self._buffers)
        return work.plan(cost(point, work), (launch,), serves, constraints, **own)


@dataclass(frozen=True)
class ClusterSplitK:
    """A product of few rows whose tiles a cluster sums together, each block of it another part of K
    (``sum_by_cluster``), with columns of b as its rows. config: of one tile."""

    gemm: Gemm
    config: Config

    @property
    def _tiles(self) -> Expr:
        return ceil_div(self.gemm.N, self.config.block_m) * ceil_div(self.gemm.M, self.config.block_n)

    @property
    def _k_per_split(self) -> Expr:
        return ceil_div(ceil_div(self.gemm.K, self.config.block_k), self.config.cluster) * self.config.block_k

    def plan(
        self,
        point: Point,
        fn: object,
        args: Mapping[str, Arg | Bundle],
        serves: Mapping[str, tuple[int, ...]],
        cost: Callable[[Point, Work], Expr],
    ) -> Plan:
        """args: those of `fn` that the loop and the result's place do not say."""
        work = self._work()
        return work.plan(cost(point, work), (self._launch(point, fn, args),), serves, self._constraints(point))

    def _launch(self, point: Point, fn: object, args: Mapping[str, Arg | Bundle]) -> Launch:
        g, c = self.gemm, self.config
        shared = dict(
            a=tensor_map(g.b, b_dtype(point), 0 if k_major(point)[1] else 1, (c.block_k, c.block_m), 1, c.cluster),
            b=tensor_map(g.a, point.dtype, 1, (c.block_n, c.block_k), multicast=c.cluster),
            out=Pointer(g.out, out_dtype(point), aligned=False),
            size=g.size(swap_ab=True),
            k_per_split=Int(self._k_per_split),
            stride_om=Int(g.out.stride(0), "i64"),
            TILE=Const(ClusterTile(c.block_m, c.block_n, c.block_k, c.num_stages, c.cluster)),
        )
        grid = (self._tiles, 1, 1)
        return Launch(fn, {**args, **shared}, grid, num_warps=c.block_m // 16, num_ctas=c.cluster, dependent=g.pdl)

    def _constraints(self, point: Point) -> tuple[Constraint, ...]:
        few = 4 * self.config.block_n
        return (*self.gemm.operands_suit_tma(point), batch_invariant(), require(self.gemm.M <= few, f"M <= {few}"))

    def _work(self) -> Work:
        g, c, tiles = self.gemm, self.config, self._tiles
        k_blocks = self._k_per_split // c.block_k
        waves = ceil_div(tiles, resident_clusters(c.cluster, c.occupancy))
        return Work(
            g,
            waves=waves,
            k_blocks=waves * k_blocks,
            flops=2 * c.block_m * c.block_n * c.block_k,
            dram=g.traffic(),
            tile=(c.block_n, c.block_m),
            boxes=(c.block_n, c.block_m),
            sm_k_blocks=ceil_div(tiles * c.cluster, device.sm_count) * k_blocks if c.occupancy > 1 else const(0),
        )


def k_major(point: Point) -> tuple[bool, bool]:
    """Whether K is contiguous in a, and in b."""
    return point.order[0] == "n", point.order[1] == "t"


def b_dtype(point: Point) -> str:
    """The dtype of b is that of a, but for float8."""
    return str(point.axes.get("b_dtype", point.dtype))


def subtile(point: Point) -> int:
    """Columns that go out at a time."""
    c = point.config
    return int(c.subtile_n_fp32 if out_dtype(point) == "fp32" else c.subtile_n)


def tile_of(point: Point) -> Tile:
    """Makes the ``Tile`` of a point whose config is one of ``config``, or has its names."""
    c = point.config
    return Tile(c.block_m, c.block_n, c.block_k, c.num_stages, c.cooperative, c.pingpong, subtile(point))


def operand_map(t: Tensor, dtype: str, contiguous: int, block: tuple[int, int]) -> TensorMap:
    """Maps a matrix, or a batch that may be one matrix."""
    if isinstance(t, Batch):
        return batch_tensor_map(t, dtype, contiguous, block, is_shared=True)
    return tensor_map(t, dtype, contiguous, block)


def maps_of(gemm: Gemm, point: Point) -> Maps:
    """Makes the tensor maps of a kernel without clusters."""
    c, (a_k, b_k) = point.config, k_major(point)
    rows = c.block_m // c.cooperative
    of_out = batch_tensor_map if isinstance(gemm.out, Batch) else tensor_map
    return Maps(
        a=operand_map(gemm.a, point.dtype, 1 if a_k else 0, (rows, c.block_k)),
        b=operand_map(gemm.b, b_dtype(point), 0 if b_k else 1, (c.block_k, c.block_n)),
        out=of_out(gemm.out, out_dtype(point), 1, (rows, subtile(point)), round_to_tf32=False),
    )


def cluster_maps(gemm: Gemm, point: Point, swap_ab: bool) -> tuple[Callable[..., TensorMap], Callable[..., TensorMap]]:
    """What makes tensor maps of the left operand and of the right, which with swap-AB are b and a: of so many rows or
    columns of out, and of how a cluster shares them (``tensor_map``)."""
    block_k = point.config.block_k
    a_k, b_k = k_major(point)

    def of_a(rows: int, **cluster: int) -> TensorMap:
        return tensor_map(gemm.a, point.dtype, 1 if a_k else 0, (rows, block_k), 0, **cluster)

    def of_b(columns: int, **cluster: int) -> TensorMap:
        return tensor_map(gemm.b, b_dtype(point), 0 if b_k else 1, (block_k, columns), 1, **cluster)

    return (of_b, of_a) if swap_ab else (of_a, of_b)


def cluster_out_map(gemm: Gemm, point: Point, swap_ab: bool, round_to_tf32: bool = True) -> TensorMap:
    """Maps a sub-tile of each block of a cluster."""
    c = point.config
    block, along = (c.block_m // c.cooperative, subtile(point)), 0
    if swap_ab:
        block, along = block[::-1], 1
    return tensor_map(gemm.out, out_dtype(point), 1, block, along, blocks=c.cluster, round_to_tf32=round_to_tf32)


def product_args(gemm: Gemm, point: Point) -> dict[str, Arg | Bundle]:
    """Gives those arguments of a kernel without clusters that have to do with one product."""
    a_k, b_k = k_major(point)
    return dict(
        maps=maps_of(gemm, point),
        bias=gemm.bias_pointer(point.dtype),
        size=gemm.size(),
        epilogue=gemm.epilogue(),
        TILE=Const(tile_of(point)),
        A_K_MAJOR=Const(a_k),
        B_K_MAJOR=Const(b_k),
    )


def persistent_plan(
    point: Point,
    tiles: Tiles,
    fn: object,
    args: Mapping[str, Arg | Bundle],
    serves: Mapping[str, tuple[int, ...]],
    constraints: tuple[Constraint, ...],
    cost: Callable[[Point, Work], Expr],
    boxes: tuple[int, int] | None = None,
    dependent: Expr | int = 0,
) -> Plan:
    """Plans as many clusters as run at a time, each with one tile after the other.

    boxes: where they are not the tile's."""
    at_once = resident_clusters(tiles.cluster)
    work = tiles.work(at_once, boxes or tiles.shape)
    grid = (minimum(at_once, tiles.count), 1, 1)
    launch = Launch(fn, args, grid, num_warps=4, num_ctas=tiles.cluster, dependent=dependent)
    return work.plan(cost(point, work), (launch,), serves, constraints)


def suits_wgmma(itemsize: int, precision: str, b_k_major: bool) -> bool:
    """wgmma reads 16-bit operands either way round; of tf32 ones B must lie along K, A can come through registers."""
    return itemsize == 2 or (itemsize == 4 and precision == "tf32" and b_k_major)


def config(block_m: int, block_n: int, num_stages: int, subtile_n: int, subtile_n_fp32: int, pingpong: bool = True,
           **more: str | bool) -> Config:  # fmt: skip
    """A producer and two consumers, which take turns or share a tile."""
    params = dict(block_m=block_m, block_n=block_n, block_k=64, num_stages=num_stages, subtile_n=subtile_n,
                  subtile_n_fp32=subtile_n_fp32, pingpong=pingpong, cooperative=1 if pingpong else 2)  # fmt: skip
    return Config(f"{block_m}x{block_n}x64_s{num_stages}_{'pingpong' if pingpong else 'coop'}", params | more)


def is_compiled(point: Point) -> bool:
    """Says whether a kernel that has AXES is compiled for the point.

    A config's `kinds` are the epilogues that it is compiled with; "fp32" is a result of float32, with any epilogue."""
    kinds = point.config.kinds.split()
    return point.epilogue in kinds if point.out == "same" else "fp32" in kinds and point.epilogue == "matrix"


def serves_epilogues(point: Point) -> Mapping[str, tuple[int, ...]]:
    if point.epilogue == "plain":
        return serves(point, ("plain",))
    return serves(point, EPILOGUE_AXIS[0 if point.out == "fp32" else 1 :])


AXES = {
    "dtype": REDUCED_FLOATS,
    "precision": ("ieee",),
    "out": OUT_AXIS,
    "order": ("nn", "nt", "tn", "tt"),
    "epilogue": ("plain", "matrix"),
}


# What mm has under another name: a square tile of two consumers is the same either way round.
_OF_MM = {"64x64x64_s10_pingpong": "64x64x64_s10_pingpong_swap_ab"}


def predict_like_mm(point: Point, work: Work) -> Expr:
    """Predicts the time of a kernel with mm's loop, at a point whose config is one of ``config``."""
    name = point.config.name
    return predict(point, work, like=Like(f"{_OF_MM.get(name, name)}/bf16/{point.order}"))
