"""What plans of Hopper's kernels have in common: their configs, how a tile is stored, and what walks over the tiles."""

from typing import Any

from triton.experimental.gluon.language import NVMMASharedLayout

from tk.aot.expr import Expr, Tensor, as_expr, device, minimum
from tk.aot.spec import ITEMSIZE, Config, Const, Int, Launch, Point, Pointer, TensorMap
from tk.kernels.conv.arguments import image_strides, leave_out
from tk.kernels.conv.op import has_pieces
from tk.kernels.conv.tma_maps import is_even, pixel_pitch
from tk.kernels.hopper.arguments import Tile

ALL_STORES = "matrix channels_last contiguous"


def store_args(out: Tensor, point: Point, rows: Expr, columns: Expr, subtile: int) -> tuple[dict[str, Any], Expr]:
    """How a kernel stores a tile, `rows` x `columns` of pixels and channels, in `point.store`'s way; and what of `out`
    that needs."""
    c, size = point.config, ITEMSIZE[point.dtype]
    wide = point.store == "channels_last"
    args: dict[str, Any] = {
        "out": Pointer(out, point.dtype, aligned=wide),
        "out_desc": Const(None),
        # 16 bytes at a time: the compiler must know that no store is cut off within.
        "cols": Int(columns, divisible=wide),
        "out_stride": leave_out(image_strides(out, divisible=wide, together=wide), "g"),
    }
    holds = as_expr(1)
    if point.store == "matrix":
        layout = repr(NVMMASharedLayout(min(128, size * subtile), 8 * size, 2))
        block = (c.block_m // c.cooperative, subtile)
        args["out_desc"] = TensorMap(out, point.dtype, (rows, columns), (pixel_pitch(out), 1), block, layout=layout)
        args |= dict(out=Const(None), out_stride=Const(None))
        holds = is_even(out, size)
    elif wide:
        holds = has_pieces(out, 2, 16)
    return args, holds


def subtile_of(point: Point) -> int:
    """Columns of a tile that are stored at a time."""
    return point.config.subtile_n // 2 if point.dtype == "fp32" else point.config.subtile_n


def is_compiled(point: Point) -> bool:
    """Whether a kernel with such a store is compiled, for so many dimensions: that of a config that is one of
    ``tile``."""
    c = point.config
    return point.store in c.stores.split() and (point.spatial == 2 or c.three)


def hopper_tile(point: Point) -> Tile:
    c = point.config
    return Tile(c.block_m, c.block_n, c.block_k, c.num_stages, c.cooperative, c.pingpong, subtile_of(point))


def tile(block_m: int, block_n: int, num_stages: int, subtile_n: int, stores: str = "matrix", pingpong: bool = False,
         three: bool = False, block_k: int = 64, suffix: str = "", **more: int) -> Config:  # fmt: skip
    """stores: those that it is compiled with. three: and for three dimensions."""
    name = f"{block_m}x{block_n}x{block_k}_s{num_stages}_{'pingpong' if pingpong else 'coop'}{suffix}"
    params = dict(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=num_stages, subtile_n=subtile_n,
                  stores=stores, pingpong=pingpong, cooperative=1 if pingpong else 2, three=three)  # fmt: skip
    return Config(name, params | more)


def tile_args(point: Point, rows: Expr, channels: Expr, tiles: Expr) -> dict[str, Any]:
    """The arguments of a kernel that walks over the tiles of a result of `rows`, which are pixels. channels: of a tap,
    which are summed over."""
    return dict(
        rows=Int(rows),
        channels=Int(channels),
        tiles=Int(tiles),
        group=Int(max(1024 // point.config.block_m, 1)),
        TILE=Const(hopper_tile(point)),
        SPATIAL=Const(point.spatial),
        STORE=Const(point.store),
    )


def persistent_launch(fn: object, args: dict[str, Any], tiles: Expr) -> Launch:
    """A program on each multiprocessor, with one tile after the other."""
    return Launch(fn, args, (minimum(device.sm_count, tiles), 1, 1), num_warps=4)
