"""The plans and the grid of the Hopper kernels."""

from dataclasses import replace
from functools import partial

from tk.aot.expr import Expr, Tensor
from tk.aot.spec import (
    Arg,
    Bundle,
    Config,
    Const,
    Int,
    Kernel,
    Plan,
    Point,
    Pointer,
)
from tk.kernels.gemm import cost
from tk.kernels.gemm.arguments import Scales
from tk.kernels.gemm.cost import Like, Work
from tk.kernels.gemm.problem import Gemm, out_dtype
from tk.kernels.gemm.tiles import Tiles, tiles_of
from tk.kernels.hopper.arguments import Maps, Schedule
from tk.kernels.hopper.plans import (
    StreamK,
    cluster_maps,
    cluster_out_map,
    persistent_plan,
    tile_of,
    whole_tiles,
)
from tk.kernels.scaled_mm.op import (
    OP,
    OUT,
    SCALE_A,
    SCALE_B,
    SCALED,
    SELECTOR_AXES,
    A,
    B,
)
from tk.kernels.scaled_mm.pointer import scaled_epilogue
from tk.kernels.scaled_mm.tma import Matrices, Pitches, scaled_mm_tma, scaled_mm_tma_device_maps


def is_usual(point: Point) -> bool:
    """What most calls are, for which there are more configs."""
    return point.dtype == point.b_dtype == "fp8e4nv" and point.out == "bf16"


def takes(point: Point) -> bool:
    """Whether there is such a product, and the config is for it. (torch too has none of two e5m2.)"""
    c = point.config
    exists = not (point.dtype == point.b_dtype == "fp8e5")
    return exists and point.accumulation in c.accumulations.split() and (c.all_types or is_usual(point))


def serves(point: Point) -> dict[str, tuple[int, ...]]:
    return {name: (values.index(point.axes[name]),) for name, values in SELECTOR_AXES.items()}


def predict(point: Point, work: Work, launch: int = 0) -> Expr:
    """Weights that were fitted predict the time, as of any product. Without them those of `like` do, mm's config of as
    many bytes in a stage: its 16-bit products take as long. launch: picoseconds that it takes more."""
    c = point.config
    percent = _slow_percent(point) * c.block_k // c.like_block_k
    return cost.predict(point, work, like=Like(f"{c.like}/bf16/nt", percent, launch))


def _slow_percent(point: Point) -> int:
    """What a stage takes of mm's where consumers add every stage to the sums themselves. One that shares a tile does so
    while the tensor cores work for the other; one that takes turns, over whole tiles, keeps them waiting
    (338x2416x7024: 27 us, of which mm's weights explain 20)."""
    if point.accumulation == "fast":
        return 100
    return 200 if point.config.params.get("pingpong") else 110


def _maps(point: Point) -> Maps:
    c = point.config
    first, second = cluster_maps(SCALED, point, c.swap_ab)
    return Maps(
        a=first(c.block_m // c.cooperative, blocks=c.cluster),
        b=second(c.block_n, multicast=c.cluster),
        out=cluster_out_map(SCALED, point, c.swap_ab),
    )


def scale_args(
    gemm: Gemm, point: Point, scale_a: Tensor, scale_b: Tensor, swap_ab: bool = False
) -> dict[str, Arg | Bundle]:
    """Gives the arguments of the epilogue. The scales: [M, 1] and [1, N]."""
    pointers = (Pointer(scale_a, "fp32", aligned=False), Pointer(scale_b, "fp32", aligned=False))
    return dict(
        scales=Scales(*(pointers[::-1] if swap_ab else pointers)),
        bias=gemm.bias_pointer(out_dtype(point)),
        epilogue=scaled_epilogue(gemm, scale_a, scale_b, swap_ab),
    )


def constants(point: Point) -> dict[str, Arg | Bundle]:
    c = point.config
    tile = replace(tile_of(point), BLOCK_M=c.block_m * c.cluster, EPILOGUE_STAGES=c.epilogue_stages)
    return dict(TILE=Const(tile), PROMOTED=Const(point.accumulation == "slow"))


def _tile_of_out(point: Point) -> tuple[int, int]:
    """Rows and columns of out that a cluster's tile has."""
    c = point.config
    tile = (c.block_m * c.cluster, c.block_n)
    return tile[::-1] if c.swap_ab else tile


def _tiles(point: Point) -> Tiles:
    return tiles_of(SCALED, point.config, _tile_of_out(point), point.config.cluster)


def _arguments(point: Point) -> dict[str, Arg | Bundle]:
    """All but what says how the tiles are scheduled."""
    c = point.config
    rest = dict(maps=_maps(point), size=SCALED.size(c.swap_ab), SWAP_AB=Const(c.swap_ab), STREAM_K=Const(c.stream_k))
    return scale_args(SCALED, point, SCALE_A, SCALE_B, c.swap_ab) | constants(point) | rest


def _plan(point: Point) -> Plan | None:
    if not takes(point):
        return None
    tiles = _tiles(point)
    args = _arguments(point) | whole_tiles(tiles.count, point.config.group_m)
    return persistent_plan(
        point, tiles, scaled_mm_tma, args, serves(point), SCALED.suits_tma(point), predict, dependent=SCALED.pdl
    )


def _plan_stream_k(point: Point) -> Plan | None:
    """out^T = b^T a^T for few rows."""
    c = point.config
    if not takes(point):
        return None
    cut = StreamK(SCALED, _tile_of_out(point), c.block_k, c.cooperative, itemsize=1)
    return cut.plan(point, scaled_mm_tma, _arguments(point), serves(point), predict)


def _plan_device_maps(point: Point) -> Plan | None:
    if not takes(point):
        return None
    tiles = _tiles(point)
    args = scale_args(SCALED, point, SCALE_A, SCALE_B) | constants(point)
    args |= dict(
        matrices=Matrices(Pointer(A, point.dtype), Pointer(B, point.b_dtype), Pointer(OUT, out_dtype(point))),
        size=SCALED.size(),
        schedule=Schedule(Int(tiles.count), Const(1), group=Int(point.config.group_m)),
        pitches=Pitches(Int(A.stride(0), "i64"), Int(B.stride(1), "i64"), Int(OUT.stride(0), "i64")),
    )
    # Making the maps takes each program some time before its first load.
    cost = partial(predict, launch=1_500_000)
    return persistent_plan(point, tiles, scaled_mm_tma_device_maps, args, serves(point), SCALED.suits_tma(point), cost)


# --- The grid ---


def tile(block_m: int, block_n: int, num_stages: int, subtile_n: int, subtile_n_fp32: int,
         accumulations: str = "slow fast", schedule: str = "coop", block_k: int = 128, cluster: int = 1,
         all_types: bool = False, like: str = "") -> Config:  # fmt: skip
    """accumulations: those that it is compiled for. schedule: consumers that share a tile (coop), that take turns
    (pingpong), or one (ws). all_types: for every pair of formats and every result; else for what is usual. like: mm's
    config that takes as long, where it has not the same name but for the block of K."""
    like = like or f"{block_m}x{block_n}x{block_k // 2}_s{num_stages}_{schedule}"
    params = dict(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=num_stages, subtile_n=subtile_n,
                  subtile_n_fp32=subtile_n_fp32, accumulations=accumulations, pingpong=schedule == "pingpong",
                  cooperative=2 if schedule == "coop" else 1, cluster=cluster, all_types=all_types, swap_ab=False,
                  stream_k=False, epilogue_stages=2, group_m=1024 // (block_m * cluster), like=like,
                  like_block_k=2 * int(like.split("_")[0].split("x")[2]))  # fmt: skip
    name = f"{block_m}x{block_n}x{block_k}_s{num_stages}_{schedule}"
    return Config(name + (f"_c{cluster}x1" if cluster > 1 else ""), params)


def _cut(block_m: int, block_n: int, num_stages: int, accumulations: str, schedule: str = "ws", block_k: int = 128,
         subtile_n: int = 0, all_types: bool = False, like: str = "") -> Config:  # fmt: skip
    """A config with swap-AB: block_m columns of out by block_n rows."""
    width = subtile_n or block_n
    like = like or f"{block_n}x{block_m}x{block_k // 2}_s{num_stages}_{schedule}_swap_ab_stream_k"
    usual = tile(block_m, block_n, num_stages, width, width, accumulations, schedule, block_k, 1, all_types, like)
    name = f"{block_n}x{block_m}x{block_k}_s{num_stages}_{schedule}_swap_ab_stream_k"
    return Config(name, usual.params | dict(swap_ab=True, stream_k=True, epilogue_stages=1))


# What accumulates slowly has the sums of a stage beside those of the tile: no more than 64 of each for a thread.
_TILES = (
    tile(128, 256, 4, 32, 16, "fast"),
    tile(128, 256, 4, 32, 16, "fast", cluster=2, like="256x128x64_s4_coop_swap_ab_c1x2"),
    tile(128, 128, 6, 64, 32, all_types=True),
    tile(128, 128, 6, 64, 32, cluster=2, like="128x128x64_s6_pingpong_c2x1"),
    tile(128, 128, 6, 32, 16, "fast", "pingpong"),
    tile(128, 128, 6, 32, 16, "fast", "pingpong", cluster=2, like="128x128x64_s6_pingpong_c2x1"),
    tile(64, 256, 4, 32, 16, "fast", "pingpong"),
    tile(64, 128, 8, 64, 32, "slow fast", "pingpong"),
)
# A stage of twice 128 values of K is half the barriers; slow accumulation adds up after 128.
_STREAM_K = (
    _cut(64, 16, 10, "fast", block_k=256),
    _cut(64, 16, 18, "slow", like="16x64x128_s10_ws_swap_ab_stream_k"),
    _cut(64, 32, 8, "fast", block_k=256, all_types=True),
    _cut(64, 32, 16, "slow", all_types=True, like="32x64x128_s8_ws_swap_ab_stream_k"),
    _cut(64, 64, 6, "fast", block_k=256),
    _cut(64, 64, 12, "slow", like="64x64x128_s6_ws_swap_ab_stream_k"),
    _cut(128, 128, 6, "slow fast", "coop", subtile_n=64),
)
_DEVICE_MAPS = tuple(
    replace(c, name=f"{c.name}_device_maps")
    for c in (tile(128, 256, 4, 32, 16, "fast"), tile(128, 128, 6, 64, 32, "slow"))
)
AXES = {name: SELECTOR_AXES[name] for name in ("dtype", "b_dtype", "out", "accumulation")} | {"order": ("nt",)}

KERNELS = (
    Kernel("scaled_mm_tma", OP, AXES, {90: _TILES}, _plan),
    Kernel("scaled_mm_tma_stream_k", OP, AXES, {90: _STREAM_K}, _plan_stream_k),
    Kernel("scaled_mm_tma_device_maps", OP, AXES, {90: _DEVICE_MAPS}, _plan_device_maps),
)
