"""The plans and the grid of ``conv_tma``."""

from functools import partial
from typing import Any

from tk.aot.expr import Expr, ceil_div
from tk.aot.spec import ITEMSIZE, Const, Constraint, Int, Kernel, Plan, Point, Pointer, require
from tk.kernels.conv.cost import predict, tiles_of
from tk.kernels.conv.forward.tma import conv_tma
from tk.kernels.conv.geometry import Epilogue
from tk.kernels.conv.op import (
    BIAS,
    DTYPE_AXIS,
    OF_TAPS,
    OP,
    OUT,
    PRECISION_AXIS,
    WEIGHT,
    X,
    fits_32_bits,
    makes_sense,
)
from tk.kernels.conv.op import serves as serves_bucket
from tk.kernels.conv.tma_maps import Gather, weight_map, whole_pieces
from tk.kernels.conv.tma_tiles import (
    ALL_STORES,
    is_compiled,
    persistent_launch,
    store_args,
    subtile_of,
    tile,
    tile_args,
)

M, N, C, TAPS = OP.local("M"), OP.local("N"), WEIGHT.size(2), OP.local("taps")
G = OP.local("groups")


_GATHER = Gather(OP, X, WEIGHT, OUT)


def _columns(point: Point) -> Expr:
    return G * N if point.grouped else N


def _groups(point: Point) -> tuple[Constraint, ...]:
    c = point.config
    if not point.grouped:
        return (require(G == 1, "1 group"),)
    joined = (X.stride(1) == C) & (OUT.stride(1) == N * OUT.stride(2)) & (WEIGHT.stride(0) == N * WEIGHT.stride(1))
    joined = joined & (~BIAS.present | (BIAS.stride(0) == N * BIAS.stride(1)))
    # Not more: what a step reads beyond them would be the next group's.
    whole = (C % c.block_k == 0) & (N % c.block_n == 0)
    return (
        require((G > 1) & joined, "groups, side by side"),
        require(whole, f"input channels a multiple of {c.block_k} in each group, output channels of {c.block_n}"),
    )


def _out(point: Point) -> tuple[dict[str, Any], tuple[Constraint, ...]]:
    args, holds = store_args(OUT, point, M, _columns(point), subtile_of(point))
    if point.store == "matrix":
        message = "out channels-last with evenly spaced pixels, 16 bytes of channels"
        return args, (require(holds & (N * ITEMSIZE[point.dtype] % 16 == 0), message),)
    if point.store == "channels_last":
        message = "out channels-last, a multiple of 16 channels, pixels as far apart"
        return args, (require(holds & (N % 16 == 0), message),)
    return args, ()


def _plan(point: Point) -> Plan | None:
    c = point.config
    itemsize = ITEMSIZE[point.dtype]
    if not makes_sense(point) or (point.dtype == "fp32") != (point.precision == "tf32") or c.itemsize != itemsize:
        return None
    if not is_compiled(point):
        return None
    if (point.epilogue == "plain") and point.store != "matrix":
        return None
    if point.grouped and not c.grouped:
        return None
    out_args, out_constraints = _out(point)
    tile = (c.block_m, c.block_n)
    columns = _columns(point)
    tiles = tiles_of(M, columns, tile)
    args: dict[str, Any] = dict(
        x_desc=_GATHER.image_map(point.dtype, point.spatial, c.block_m // c.cooperative, c.block_k, point.grouped),
        weight_desc=weight_map(WEIGHT, point.dtype, columns, C, (c.block_n, c.block_k)),
        bias=Pointer(BIAS, point.dtype, aligned=False),
        taps=Int(TAPS),
        tiles_of_group=Int(N // c.block_n),
        gather=_GATHER.bundle(),
        bias_activation=Epilogue(Const(None), Int(BIAS.stride(1), "i64"), Int(OP.int("activation")), Int(BIAS.present)),
        EPILOGUE=Const(point.epilogue),
        GROUPED=Const(point.grouped),
        **tile_args(point, M, C, tiles),
        **out_args,
    )
    plain = require(~BIAS.present & (OP.int("activation") == 0), "neither bias nor activation")
    judged = tiles_of(OP.local("M_choice"), columns, tile)
    # Stores by threads take longer, across pixels longest.
    percent = {"matrix": 100, "channels_last": 92, "contiguous": 80}[point.store] - (point.epilogue != "plain")
    return Plan(
        constraints=(
            fits_32_bits(OP, X),
            *_groups(point),
            whole_pieces(X, itemsize),
            whole_pieces(WEIGHT, itemsize, OF_TAPS),
            require(C * itemsize % 16 == 0, f"a multiple of {16 // itemsize} channels"),
            require(C * TAPS > 0, "channels and taps"),
            _GATHER.within_reach(point.spatial),
            *out_constraints,
            *((plain,) if point.epilogue == "plain" else ()),
        ),
        serves=serves_bucket(point),
        launches=(persistent_launch(conv_tma, args, tiles),),
        cost=predict(point, OP, judged, TAPS * ceil_div(C, c.block_k) * c.block_k, percent=percent),
    )


# --- The grid ---

_tile = partial(tile, itemsize=2, grouped=False)  # grouped: compiled for groups, too
_tf32 = partial(_tile, itemsize=4, block_k=32, suffix="_tf32")
CONFIGS = (
    _tile(128, 128, 6, 64, stores=ALL_STORES, three=True),
    _tile(128, 256, 4, 64, stores=ALL_STORES),
    _tile(128, 64, 8, 32, stores=ALL_STORES, three=True, grouped=True),
    _tile(256, 128, 4, 32),
    # 64 channels out: with twice the pixels, the weight is fetched half as often.
    _tile(256, 64, 4, 32, stores=ALL_STORES, three=True, grouped=True),
    # 32 channels in, as unfolded first layers have: of 64, half would be zeros.
    _tile(128, 64, 12, 32, stores=ALL_STORES, three=True, block_k=32),
    _tile(256, 64, 8, 32, stores=ALL_STORES, three=True, block_k=32),
    _tile(64, 128, 8, 64, pingpong=True),
    _tile(128, 128, 6, 32, pingpong=True),
    _tf32(128, 128, 6, 64, stores=ALL_STORES, three=True),
    _tf32(128, 64, 8, 32),
)
_AXES = {
    "dtype": DTYPE_AXIS,
    "precision": PRECISION_AXIS,
    "spatial": (2, 3),
    "store": ("matrix", "channels_last", "contiguous"),
    "epilogue": ("plain", "vector"),
    "grouped": (False, True),
}

KERNELS = (Kernel("conv_tma", OP, _AXES, {90: CONFIGS}, _plan),)
