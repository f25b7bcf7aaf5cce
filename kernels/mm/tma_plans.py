"""The plans and the grid of ``mm_tma`` and ``mm_tma_stream_k``."""

from tk.aot.spec import (
    ITEMSIZE,
    Arg,
    Bundle,
    Config,
    Const,
    Kernel,
    Plan,
    Point,
)
from tk.kernels.gemm.cost import predict
from tk.kernels.gemm.problem import (
    DTYPE_AXIS,
    EPILOGUE_AXIS,
    OUT_AXIS,
    PRECISION_AXIS,
    makes_sense,
    serves,
)
from tk.kernels.gemm.tiles import tiles_of
from tk.kernels.hopper.arguments import Tile
from tk.kernels.hopper.plans import (
    StreamK,
    cluster_maps,
    cluster_out_map,
    k_major,
    persistent_plan,
    subtile,
    suits_wgmma,
    whole_tiles,
)
from tk.kernels.mm.op import MM, OP
from tk.kernels.mm.tma import Maps, mm_tma


def takes(point: Point, swap_ab: bool) -> bool:
    """Whether wgmma takes the point's operands, and the config is for such."""
    b_k_major = point.order[0] == "n" if swap_ab else point.order[1] == "t"
    itemsize = ITEMSIZE[point.dtype]
    return (
        makes_sense(point) and point.config.itemsize == itemsize and suits_wgmma(itemsize, point.precision, b_k_major)
    )


def _box(point: Point, swap_ab: bool) -> int:
    """Rows of a that come or are left out together where a tile reaches past the last of them; 0: all of the tile's.
    More than a few boxes would cost the producer too many registers."""
    c = point.config
    rows, extra = (c.main_n, c.extra_n) if swap_ab else (c.block_m, 0)
    box = 64 if rows > 128 else 32
    one_view = swap_ab or c.cluster == 1  # else each block of the cluster has its own rows
    return box if point.order[0] == "n" and one_view and box <= rows and box < rows + extra else 0


def _maps(point: Point, swap_ab: bool) -> Maps:
    c = point.config
    first, second = cluster_maps(MM, point, swap_ab)
    of_a = second if swap_ab else first
    box = _box(point, swap_ab)
    return Maps(
        a=first(c.block_m // c.cooperative, blocks=c.cluster),
        b=second(c.main_n, multicast=c.cluster),
        b_extra=second(c.extra_n, multicast=c.cluster) if c.extra_n else Const(None),
        box=of_a(box, multicast=c.cluster) if box else Const(None),
        out=cluster_out_map(MM, point, swap_ab, round_to_tf32=False),
    )


def _arguments(point: Point, swap_ab: bool) -> dict[str, Arg | Bundle]:
    """All but what says how the tiles are scheduled."""
    c = point.config
    a_k, b_k = k_major(point)
    tile = Tile(c.block_m * c.cluster, c.main_n + c.extra_n, c.block_k, c.num_stages, c.cooperative, c.pingpong,
                subtile(point), c.epilogue_stages, c.extra_n, c.consumer_regs)  # fmt: skip
    constants = dict(TILE=tile, BOX=_box(point, swap_ab), A_K_MAJOR=b_k if swap_ab else a_k,
                     B_K_MAJOR=a_k if swap_ab else b_k, SWAP_AB=swap_ab, STREAM_K=c.stream_k,
                     EVICT_FIRST_B=c.evict_first_b, EPILOGUE=point.epilogue)  # fmt: skip
    return dict(
        maps=_maps(point, swap_ab),
        bias=MM.bias_pointer(point.dtype),
        size=MM.size(swap_ab),
        epilogue=MM.epilogue(swap_ab),
        **{name: Const(value) for name, value in constants.items()},
    )


def _tile_of_out(point: Point, swap_ab: bool) -> tuple[int, int]:
    """Rows and columns of out that a cluster's tile has."""
    c = point.config
    tile = (c.block_m * c.cluster, c.main_n + c.extra_n)
    return tile[::-1] if swap_ab else tile


def _plan(point: Point) -> Plan | None:
    """Whole tiles: out = a b, or with swap-AB, and for tf32 with b along N, out^T = b^T a^T."""
    c = point.config
    swap_ab = c.swap_ab or (point.dtype == "fp32" and point.order == "nn")
    if not takes(point, swap_ab) or point.epilogue not in c.epilogues.split():
        return None
    tile_m, tile_n = _tile_of_out(point, swap_ab)
    tiles = tiles_of(MM, c, (tile_m, tile_n), c.cluster)
    return persistent_plan(
        point,
        tiles,
        mm_tma,
        _arguments(point, swap_ab) | whole_tiles(tiles.count, c.group_m),
        serves(point, (point.epilogue,)),
        MM.suits_tma(point),
        predict,
        boxes=(_box(point, swap_ab) or tile_m, tile_n),
        dependent=MM.pdl,
    )


def _plan_stream_k(point: Point) -> Plan | None:
    """out^T = b^T a^T for few rows: tiles are cut along K where whole ones would leave multiprocessors without work."""
    c = point.config
    if not takes(point, swap_ab=True):
        return None
    tile_m, tile_n = _tile_of_out(point, swap_ab=True)
    cut = StreamK(MM, (tile_m, tile_n), c.block_k, c.cooperative, c.itemsize)
    boxes = (_box(point, swap_ab=True) or tile_m, tile_n)
    return cut.plan(point, mm_tma, _arguments(point, swap_ab=True), serves(point, EPILOGUE_AXIS), predict, boxes)


# --- The grid ---

# Twice as many were measured: without the others, the best config of a product is 0.1 % slower (benchmarks/log.md).
_HALF, _TF32 = 2, 4  # bytes of an operand's element: which dtypes a config is for


def _config(itemsizes: tuple[int, ...], block_m: int, main_n: int, extra_n: int, num_stages: int, block_k: int = 64,
            **other: int | str | None) -> tuple[Config, ...]:  # fmt: skip
    """A config for 16-bit operands, for tf32 with half the K, or for both. The block is wgmma's: with swap_ab, N by M
    of out.

    The name says what CUTLASS's would: tile of out x block of K, stages, schedule (ws: one consumer warp group, coop:
    two or three share a tile, pingpong), and the cluster along M x N."""
    params = dict(block_m=block_m, main_n=main_n, extra_n=extra_n, num_stages=num_stages, cooperative=2, pingpong=False,
                  subtile_n=main_n, subtile_n_fp32=main_n, epilogue_stages=1, cluster=1, consumer_regs=232,
                  swap_ab=False, stream_k=False, evict_first_b=False) | other  # fmt: skip

    def of(itemsize: int) -> Config:
        full = params | dict(block_k=2 * block_k // itemsize, itemsize=itemsize)
        return Config(_name(full), full)

    return tuple(map(of, itemsizes))


def _name(c: dict[str, int | str | None]) -> str:
    swap_ab, cluster = c["swap_ab"], c["cluster"]
    tile = (c["block_m"], c["main_n"] + c["extra_n"])
    tile_m, tile_n = tile[::-1] if swap_ab else tile
    parts = [
        f"{tile_m}x{tile_n}x{c['block_k']}",
        f"s{c['num_stages']}",
        "pingpong" if c["pingpong"] else "coop" if c["cooperative"] > 1 else "ws",
        "swap_ab" if swap_ab else "",
        "stream_k" if c["stream_k"] else "",
        "" if cluster == 1 else f"c1x{cluster}" if swap_ab else f"c{cluster}x1",
        "tf32" if c["itemsize"] == _TF32 else "",
    ]
    return "_".join(filter(None, parts))


def _tile(itemsizes: tuple[int, ...], block_m: int, main_n: int, extra_n: int, num_stages: int, subtile_n: int,
          subtile_n_fp32: int, epilogues: str = "plain vector", **other: int | str) -> tuple[Config, ...]:  # fmt: skip
    """epilogues: those that it is compiled with. 1,024 rows of tiles are walked together, for L2."""
    cluster = other.get("cluster", 1)
    rest = dict(subtile_n=subtile_n, subtile_n_fp32=subtile_n_fp32, epilogue_stages=2,
                group_m=1024 // (block_m * cluster), epilogues=epilogues)  # fmt: skip
    return _config(itemsizes, block_m, main_n, extra_n, num_stages, **rest | other)


_BOTH = (_HALF, _TF32)
_THREE = dict(cooperative=3, consumer_regs=152)
_PINGPONG = dict(cooperative=1, pingpong=True)
_ONE = dict(cooperative=1)

_TILES = (
    *_tile((_HALF,), 128, 128, 0, 6, 64, 32, "plain matrix"),
    *_tile((_TF32,), 128, 128, 0, 6, 64, 32, "plain vector matrix"),
    *_tile((_HALF,), 128, 256, 0, 4, 64, 32, "plain"),
    *_tile((_TF32,), 128, 256, 0, 4, 64, 32),
    *_tile((_TF32,), 128, 64, 0, 8, 32, 32),
    *_tile((_TF32,), 192, 128, 64, 4, 32, 16, **_THREE),
    *_tile(_BOTH, 192, 128, 0, 5, 32, 16, **_THREE, epilogues="plain"),
    *_tile((_HALF,), 128, 128, 32, 5, 32, 32, "plain"),
    *_tile((_HALF,), 128, 128, 64, 5, 32, 16, "plain", cluster=2),
    *_tile((_TF32,), 128, 256, 0, 4, 64, 32, "plain", cluster=2),
    *_tile((_HALF,), 64, 64, 32, 8, 32, 16, "plain", **_PINGPONG),
    *_tile((_HALF,), 64, 128, 0, 8, 64, 32, **_PINGPONG),
    *_tile((_HALF,), 64, 128, 0, 8, 64, 32, "plain", **_PINGPONG, cluster=2),
    *_tile((_HALF,), 64, 128, 32, 6, 32, 16, "plain", **_PINGPONG),
    *_tile((_HALF,), 64, 128, 64, 6, 32, 16, **_PINGPONG),
    *_tile((_HALF,), 64, 128, 64, 6, 32, 16, "plain", **_PINGPONG, cluster=2),
    *_tile((_HALF,), 64, 256, 0, 4, 64, 32, **_PINGPONG),
    *_tile((_HALF,), 128, 64, 0, 8, 32, 16, **_PINGPONG),
    *_tile((_HALF,), 128, 128, 0, 6, 32, 16, **_PINGPONG),
    *_tile((_HALF,), 128, 128, 0, 6, 32, 16, **_PINGPONG, cluster=2),
    *_tile((_HALF,), 128, 128, 32, 5, 32, 16, "plain", **_PINGPONG, cluster=2),
    *_tile((_HALF,), 128, 128, 64, 5, 16, 8, **_PINGPONG),
    *_tile((_HALF,), 128, 128, 64, 5, 16, 8, **_PINGPONG, cluster=2),
    *_tile((_HALF,), 64, 64, 0, 10, 32, 16, "plain", **_ONE, cluster=2, swap_ab=True),
    *_tile((_HALF,), 64, 128, 32, 7, 32, 16, "plain", **_ONE, swap_ab=True),
    *_tile((_HALF,), 64, 128, 32, 7, 32, 16, "plain", **_ONE, cluster=2, swap_ab=True),
    *_tile((_TF32,), 128, 64, 16, 7, 16, 16, cluster=2, swap_ab=True),
    *_tile((_HALF,), 128, 128, 0, 6, 64, 32, "plain", cluster=4, swap_ab=True),
    *_tile((_HALF,), 128, 128, 16, 5, 16, 16, "plain", cluster=2, swap_ab=True),
    *_tile((_HALF,), 128, 256, 0, 4, 64, 32, "plain", cluster=2, swap_ab=True),
    *_tile((_HALF,), 64, 64, 0, 10, 32, 16, "plain", **_PINGPONG, swap_ab=True),
    *_tile((_HALF,), 64, 128, 0, 8, 32, 16, "plain", **_PINGPONG, swap_ab=True),
    *_tile((_HALF,), 128, 128, 0, 6, 32, 16, "plain", **_PINGPONG, swap_ab=True, cluster=2),
    *_tile((_HALF,), 128, 128, 64, 5, 16, 8, "plain", **_PINGPONG, swap_ab=True, cluster=2),
)


def _cut(itemsizes: tuple[int, ...], block_m: int, main_n: int, num_stages: int, cooperative: int, block_k: int = 64,
         extra_n: int = 0, **other: int) -> tuple[Config, ...]:  # fmt: skip
    return _config(itemsizes, block_m, main_n, extra_n, num_stages, block_k, cooperative=cooperative, stream_k=True,
                   evict_first_b=True, swap_ab=True, **other)  # fmt: skip


_STREAM_K = (
    *_cut(_BOTH, 64, 16, 10, 1, block_k=128),
    *_cut(_BOTH, 64, 32, 8, 1, block_k=128),
    *_cut(_BOTH, 64, 64, 6, 1, block_k=128),
    *_cut(_BOTH, 128, 64, 8, 2),
    *_cut(_BOTH, 128, 64, 6, 2, extra_n=32, subtile_n=32, subtile_n_fp32=32),
    *_cut((_HALF,), 128, 128, 6, 2, subtile_n=64, subtile_n_fp32=64),
    *_cut(_BOTH, 128, 128, 5, 2, extra_n=64, subtile_n=64, subtile_n_fp32=32),
    *_cut((_TF32,), 128, 256, 4, 2, subtile_n=32, subtile_n_fp32=32),
)

_AXES = {"dtype": DTYPE_AXIS, "precision": PRECISION_AXIS, "out": OUT_AXIS}
_TILES_AXES = _AXES | {"order": ("nn", "nt", "tn", "tt"), "epilogue": EPILOGUE_AXIS}
_STREAM_K_AXES = _AXES | {"order": ("nn", "nt"), "epilogue": ("matrix",)}

KERNELS = (
    Kernel("mm_tma", OP, _TILES_AXES, {90: _TILES}, _plan),
    Kernel("mm_tma_stream_k", OP, _STREAM_K_AXES, {90: _STREAM_K}, _plan_stream_k),
)
