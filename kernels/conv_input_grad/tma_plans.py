"""The plans and the grid of ``input_grad_tma``."""

from typing import Any

from triton.experimental.gluon.language import NVMMASharedLayout

from tk.aot.expr import Expr, ceil_div, device, minimum
from tk.aot.spec import (
    ITEMSIZE,
    Config,
    Const,
    Constraint,
    Im2col,
    Int,
    Kernel,
    Launch,
    Plan,
    Point,
    TensorMap,
    require,
)
from tk.kernels.conv.arguments import extents, spatial
from tk.kernels.conv.cost import predict, tiles_of
from tk.kernels.conv.op import SPATIAL, serves
from tk.kernels.conv.tma_plans import dense_strides, hopper_tile, store_args, subtile_of, whole_pieces
from tk.kernels.conv_input_grad.op import GRAD, OP, OUT, WEIGHT, places
from tk.kernels.conv_input_grad.tma import Phases, input_grad_tma

ROWS, PHASES, TAPS = OP.local("rows"), OP.local("phases"), OP.local("taps")
O, C = WEIGHT.size(1), WEIGHT.size(2)  # noqa: E741  as docs/conv.md calls them


# Bytes a nanosecond: what TMA fetches from L2 for all multiprocessors, as a forward pass of tiles of 128 x 128 did on
# an H200, and what one of them stores.
_FETCHED, _STORED = 11000, 30


def _geometry(what: str, d: int) -> Expr:
    return OP.int(f"{what}_{SPATIAL[d]}")


def _span(d: int) -> Expr:
    """How far apart the first pixel of grad is that a place reads and the last, rounded up."""
    return ceil_div((WEIGHT.size(3 + d) - 1) * _geometry("dilation", d), _geometry("stride", d))


def _lower(d: int) -> Expr:
    """Not above the first pixel of grad that place 0 of any phase reads."""
    return _geometry("padding", d) // _geometry("stride", d) - _span(d)


def _upper(d: int) -> Expr:
    return _lower(d) + places(d) - GRAD.size(3 + d)


def _within_reach(spatial: int) -> Constraint:
    """Corners and offsets of an im2col map are small numbers."""
    reach, offsets = ((128, 255), (16, 31))[spatial - 2]
    holds = GRAD.size(3) >= 1
    if spatial == 2:
        holds = (GRAD.size(3) == 1) & (WEIGHT.size(3) == 1) & (OUT.size(3) == 1)
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


def _grad_map(point: Point) -> TensorMap:
    c = point.config
    dims = range(3 - point.spatial, 3)
    sizes = (0, *(3 + d for d in dims))
    return TensorMap(
        GRAD,
        point.dtype,
        (*(GRAD.size(p) for p in sizes), O),
        (*dense_strides(GRAD, sizes, O), 1),
        (c.block_m // c.cooperative, c.block_k),
        layout=repr(NVMMASharedLayout(128, 8 * ITEMSIZE[point.dtype], 2)),
        im2col=Im2col(tuple(map(_lower, dims)), tuple(map(_upper, dims)), (1,) * point.spatial),
    )


def _weight_map(point: Point) -> TensorMap:
    sizes = (1, 3, 4, 5)
    return TensorMap(
        WEIGHT,
        point.dtype,
        (*(WEIGHT.size(p) for p in sizes), C),
        (*dense_strides(WEIGHT, sizes, C), 1),
        (point.config.block_k, 1, 1, 1, point.config.block_n),
        layout=repr(NVMMASharedLayout(128, 8 * ITEMSIZE[point.dtype], 5)),
    )


def _out(point: Point) -> tuple[dict[str, Any], tuple[Constraint, ...]]:
    args, holds = store_args(OUT, point, ROWS, C, subtile_of(point))
    if point.store == "matrix":
        return args, (require((PHASES == 1) & holds, "a stride of 1, out with evenly spaced pixels"),)
    if point.store == "channels_last":
        return args, (require(holds & (C % 16 == 0), "out channels-last, a multiple of 16 channels"),)
    return args, ()


def _plan(point: Point) -> Plan | None:
    c = point.config
    if point.store not in c.stores.split() or (point.spatial == 3 and not c.three):
        return None
    out_args, out_constraints = _out(point)
    tile = (c.block_m, c.block_n)
    tiles_of_phase = tiles_of(ROWS, C, tile)
    tiles = PHASES * tiles_of_phase
    args: dict[str, Any] = dict(
        grad_desc=_grad_map(point),
        weight_desc=_weight_map(point),
        rows=Int(ROWS),
        channels=Int(O),
        tiles=Int(tiles),
        tiles_of_phase=Int(tiles_of_phase),
        group=Int(max(1024 // c.block_m, 1)),
        phases=Phases(
            places=spatial(places),
            image=extents(OUT),
            kernel=extents(WEIGHT),
            stride=spatial(lambda d: _geometry("stride", d)),
            padding=spatial(lambda d: _geometry("padding", d)),
            lower=spatial(_lower),
            dilation=spatial(lambda d: _geometry("dilation", d)),
        ),
        TILE=Const(hopper_tile(point)),
        SPATIAL=Const(point.spatial),
        STORE=Const(point.store),
        **out_args,
    )
    judged = PHASES * tiles_of(OP.local("rows_choice"), C, tile)
    steps = ceil_div(TAPS * ceil_div(O, c.block_k), PHASES)  # of a tile, on average
    percent = {"matrix": 100, "channels_last": 95, "contiguous": 80}[point.store]
    return Plan(
        constraints=(
            require(OP.local("groups") == 1, "1 group"),
            require(
                (ROWS < 2**31 - 2**16) & (OP.local("K") < 2**31 - 2**16) & (tiles < 2**31 - 2**16),
                "less than 2**31 - 65536 places of a phase, taps times channels, and tiles",
            ),
            require(whole_pieces(GRAD, (0, 3, 4, 5), 2), "grad channels-last, in pieces of 16 bytes"),
            require(whole_pieces(WEIGHT, (1, 3, 4, 5), 2), "the weight channels-last, in pieces of 16 bytes"),
            require((C % 8 == 0) & (O % 8 == 0), "a multiple of 8 channels"),
            require((O * TAPS > 0) & (OP.local("M") > 0), "channels, taps and pixels"),
            _within_reach(point.spatial),
            *out_constraints,
        ),
        serves=serves(point),
        launches=(Launch(input_grad_tma, args, (minimum(device.sm_count, tiles), 1, 1), num_warps=4),),
        cost=predict(
            point, OP, tile, judged, ceil_div(judged, device.sm_count), steps * c.block_k, percent=percent,
            l2=_FETCHED, alone_ns=0 if c.pingpong else 2 * c.block_m * c.block_n // _STORED,
        ),
    )  # fmt: skip


def _tile(block_m: int, block_n: int, num_stages: int, subtile_n: int, stores: str = "matrix channels_last",
          pingpong: bool = False, three: bool = False) -> Config:  # fmt: skip
    """stores: those that it is compiled with. three: and for three dimensions."""
    name = f"{block_m}x{block_n}x64_s{num_stages}_{'pingpong' if pingpong else 'coop'}"
    params = dict(block_m=block_m, block_n=block_n, block_k=64, num_stages=num_stages, subtile_n=subtile_n,
                  stores=stores, pingpong=pingpong, cooperative=1 if pingpong else 2, three=three)  # fmt: skip
    return Config(name, params)


_ALL = "matrix channels_last contiguous"
CONFIGS = (
    _tile(128, 128, 6, 64, stores=_ALL, three=True),
    _tile(128, 64, 8, 32, stores=_ALL, three=True),
    _tile(256, 64, 4, 32),
    _tile(256, 128, 4, 32),
    _tile(64, 128, 8, 64, pingpong=True),
    _tile(128, 64, 8, 32, pingpong=True),
    _tile(128, 128, 6, 32, pingpong=True),
)
_AXES = {
    "dtype": ("bf16", "fp16"),
    "precision": ("ieee",),
    "spatial": (2, 3),
    "store": ("matrix", "channels_last", "contiguous"),
}

KERNELS = (Kernel("input_grad_tma", OP, _AXES, {90: CONFIGS}, _plan),)
