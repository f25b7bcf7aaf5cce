"""The plans and the grid of ``input_grad_tma``."""

from functools import partial
from typing import Any

from tk.aot.expr import Expr, ceil_div
from tk.aot.spec import REDUCED_FLOATS, Constraint, Int, Kernel, Plan, Point, require
from tk.kernels.conv.arguments import extents, spatial
from tk.kernels.conv.cost import predict, tiles_of
from tk.kernels.conv.input_grad.op import GRAD, OP, OUT, WEIGHT, places
from tk.kernels.conv.input_grad.tma import Phases, input_grad_tma
from tk.kernels.conv.op import OF_TAPS, geometry, serves
from tk.kernels.conv.tma_maps import has_dimensions, im2col_map, weight_map, whole_pieces
from tk.kernels.conv.tma_tiles import (
    ALL_STORES,
    is_compiled,
    persistent_launch,
    store_args,
    subtile_of,
    tile,
    tile_args,
)

ROWS, PHASES, TAPS = OP.local("rows"), OP.local("phases"), OP.local("taps")
O, C = WEIGHT.size(1), WEIGHT.size(2)  # noqa: E741  as docs/conv.md calls them


# Bytes a nanosecond: what TMA fetches from L2 for all multiprocessors, as a forward pass of tiles of 128 x 128 did on
# an H200, and what one of them stores.
_FETCHED, _STORED = 11000, 30


_geometry = partial(geometry, OP)


def _span(d: int) -> Expr:
    """How far apart the first pixel of grad is that a place reads and the last, rounded up."""
    return ceil_div((WEIGHT.size(3 + d) - 1) * _geometry("dilation", d), _geometry("stride", d))


def _lower(d: int) -> Expr:
    """A pixel of grad that is not above the first one that place 0 of any phase reads."""
    return _geometry("padding", d) // _geometry("stride", d) - _span(d)


def _upper(d: int) -> Expr:
    return _lower(d) + places(d) - GRAD.size(3 + d)


def _within_reach(spatial: int) -> Constraint:
    """Corners and offsets of an im2col map are small numbers."""
    reach, offsets = ((128, 255), (16, 31))[spatial - 2]
    holds = has_dimensions(spatial, GRAD, WEIGHT, OUT)
    if spatial == 2:
        holds = holds & (_geometry("padding", 0) == 0) & (_geometry("stride", 0) == 1)
    for d in range(3 - spatial, 3):
        stride = _geometry("stride", d)
        holds = holds & (stride <= 8) & ((stride == 1) | (_geometry("dilation", d) == 1))
        # A phase's first tap reads up to a pixel behind what padding alone makes of it.
        holds = holds & (_span(d) + 1 <= offsets)
        for corner in (_lower(d), _upper(d)):
            holds = holds & (corner >= -reach) & (corner < reach)
    message = f"{spatial} dimensions, a stride or a dilation of 1, padding and taps that reach {reach} pixels"
    return require(holds, message)


def _out(point: Point) -> tuple[dict[str, Any], tuple[Constraint, ...]]:
    args, holds = store_args(OUT, point, ROWS, C, subtile_of(point))
    if point.store == "matrix":
        return args, (require((PHASES == 1) & holds, "a stride of 1, out with evenly spaced pixels"),)
    if point.store == "channels_last":
        return args, (require(holds & (C % 16 == 0), "out channels-last, a multiple of 16 channels"),)
    return args, ()


def _plan(point: Point) -> Plan | None:
    c = point.config
    if not is_compiled(point):
        return None
    out_args, out_constraints = _out(point)
    tiles_of_phase = tiles_of(ROWS, C, (c.block_m, c.block_n))
    tiles = PHASES * tiles_of_phase
    args: dict[str, Any] = dict(
        grad_desc=im2col_map(
            GRAD, point.dtype, O, (c.block_m // c.cooperative, c.block_k), point.spatial, _lower, _upper, lambda d: 1
        ),
        weight_desc=weight_map(WEIGHT, point.dtype, O, C, (c.block_k, c.block_n)),
        tiles_of_phase=Int(tiles_of_phase),
        phases=Phases(
            places=spatial(places),
            image=extents(OUT),
            kernel=extents(WEIGHT),
            stride=spatial(partial(_geometry, "stride")),
            padding=spatial(partial(_geometry, "padding")),
            lower=spatial(_lower),
            dilation=spatial(partial(_geometry, "dilation")),
        ),
        **tile_args(point, ROWS, O, tiles),
        **out_args,
    )
    judged = PHASES * tiles_of(OP.local("rows_choice"), C, (c.block_m, c.block_n))
    steps = ceil_div(TAPS * ceil_div(O, c.block_k), PHASES)  # of a tile, on average
    percent = {"matrix": 100, "channels_last": 95, "contiguous": 80}[point.store]
    alone_ns = 0 if c.pingpong else 2 * c.block_m * c.block_n // _STORED
    return Plan(
        constraints=(
            require(OP.local("groups") == 1, "1 group"),
            require(
                (ROWS < 2**31 - 2**16) & (OP.local("K") < 2**31 - 2**16) & (tiles < 2**31 - 2**16),
                "less than 2**31 - 65536 places of a phase, taps times channels, and tiles",
            ),
            whole_pieces(GRAD, 2),
            whole_pieces(WEIGHT, 2, OF_TAPS),
            require((C % 8 == 0) & (O % 8 == 0), "a multiple of 8 channels"),
            require((O * TAPS > 0) & (OP.local("M") > 0), "channels, taps and pixels"),
            _within_reach(point.spatial),
            *out_constraints,
        ),
        serves=serves(point),
        launches=(persistent_launch(input_grad_tma, args, tiles),),
        cost=predict(point, OP, judged, steps * c.block_k, percent=percent, l2=_FETCHED, alone_ns=alone_ns),
    )


_tile = partial(tile, stores="matrix channels_last")
CONFIGS = (
    _tile(128, 128, 6, 64, stores=ALL_STORES, three=True),
    _tile(128, 64, 8, 32, stores=ALL_STORES, three=True),
    _tile(256, 64, 4, 32),
    _tile(256, 128, 4, 32),
    _tile(64, 128, 8, 64, pingpong=True),
    _tile(128, 64, 8, 32, pingpong=True),
    _tile(128, 128, 6, 32, pingpong=True),
)
_AXES = {
    "dtype": REDUCED_FLOATS,
    "precision": ("ieee",),
    "spatial": (2, 3),
    "store": ("matrix", "channels_last", "contiguous"),
}

KERNELS = (Kernel("input_grad_tma", OP, _AXES, {90: CONFIGS}, _plan),)
