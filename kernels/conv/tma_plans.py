"""The plans and the grid of ``conv_tma``."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from triton.experimental.gluon.language import NVMMASharedLayout

from tk.aot.expr import Expr, Tensor, as_expr, ceil_div, device, maximum, minimum, select
from tk.aot.spec import (
    ITEMSIZE,
    Config,
    Const,
    Constraint,
    Im2col,
    Int,
    Kernel,
    Launch,
    Op,
    Plan,
    Point,
    Pointer,
    TensorMap,
    require,
)
from tk.kernels.conv.arguments import extents, image_strides, leave_out, spatial
from tk.kernels.conv.cost import predict, tiles_of
from tk.kernels.conv.geometry import Epilogue
from tk.kernels.conv.geometry import Gather as GatherBundle
from tk.kernels.conv.op import (
    BIAS,
    DTYPE_AXIS,
    OF_PIXELS,
    OF_TAPS,
    OP,
    OUT,
    PRECISION_AXIS,
    WEIGHT,
    X,
    fits_32_bits,
    geometry,
    has_pieces,
    makes_sense,
)
from tk.kernels.conv.op import serves as serves_bucket
from tk.kernels.conv.tma import conv_tma
from tk.kernels.hopper.arguments import Tile

M, N, C, TAPS = OP.local("M"), OP.local("N"), WEIGHT.size(2), OP.local("taps")
G = OP.local("groups")


# --- What TMA sees ---


def dense_strides(t: Tensor, dims: tuple[int, ...], least: Expr) -> tuple[Expr, ...]:
    """Of `dims`, outermost first. The stride of a dimension of size 1 says nothing, and TMA wants one: as if dense, on
    top of `least`."""
    found: list[Expr] = []
    inner = least
    for d in reversed(dims):
        stride = select(t.size(d) == 1, inner, t.stride(d))
        found.append(stride)
        inner = stride * t.size(d)
    return tuple(reversed(found))


def whole_pieces(t: Tensor, itemsize: int, others: tuple[int, ...] = OF_PIXELS) -> Constraint:
    """That TMA can have it: 16-byte pieces everywhere. The stride of a dimension of size 1 is 0. others: see
    ``has_pieces``."""
    holds = (t.alignment >= 16) & (t.stride(2) == 1)
    for d in others:
        holds = holds & (t.stride(d) * itemsize % 16 == 0)
    name = "the weight" if others is OF_TAPS else t.name
    return require(holds, f"{name} channels-last, in pieces of 16 bytes")


def im2col_map(images: Tensor, dtype: str, channels: Expr, block: tuple[int, int], spatial: int,
               lower: Callable[[int], Expr], upper: Callable[[int], Expr],
               steps: Callable[[int], Expr | int]) -> TensorMap:  # fmt: skip
    """block: pixels and channels. lower, upper, steps: see ``Im2col``; of dimensions 0, 1 and 2, which are d, h and w,
    of which there are the last `spatial`."""
    dims = range(3 - spatial, 3)
    places = (0, *(3 + d for d in dims))
    size = ITEMSIZE[dtype]
    return TensorMap(
        images,
        dtype,
        (*(images.size(p) for p in places), channels),
        (*dense_strides(images, places, channels), 1),
        block,
        layout=repr(NVMMASharedLayout(min(128, size * block[1]), 8 * size, 2)),
        round_to_tf32=dtype == "fp32",
        im2col=Im2col(tuple(map(lower, dims)), tuple(map(upper, dims)), tuple(map(steps, dims))),
    )


def weight_map(weight: Tensor, dtype: str, filters: Expr, channels: Expr, block: tuple[int, int]) -> TensorMap:
    """block: filters and channels, of one tap."""
    size = ITEMSIZE[dtype]
    return TensorMap(
        weight,
        dtype,
        (filters, *(weight.size(p) for p in OF_TAPS[1:]), channels),
        (*dense_strides(weight, OF_TAPS, channels), 1),
        (block[0], 1, 1, 1, block[1]),
        layout=repr(NVMMASharedLayout(min(128, size * block[1]), 8 * size, 5)),
        round_to_tf32=dtype == "fp32",
    )


def has_dimensions(spatial: int, x: Tensor, weight: Tensor, out: Tensor) -> Expr:
    """Whether an im2col map of so many tells all of it."""
    if spatial == 3:
        return x.size(3) >= 1
    return (x.size(3) == 1) & (weight.size(3) == 1) & (out.size(3) == 1)


@dataclass(frozen=True)
class Gather:
    """What TMA gathers of `x` for pixels of `out` and taps of `weight`, tensors of `op`: 0, 1 and 2 stand for d, h and
    w."""

    op: Op
    x: Tensor
    weight: Tensor
    out: Tensor

    def geometry(self, what: str, d: int) -> Expr:
        return geometry(self.op, what, d)

    def shift(self, d: int) -> Expr:
        """What makes the offsets of all taps positive, where they are walked backwards."""
        return maximum(0, (1 - self.weight.size(3 + d)) * self.geometry("dilation", d))

    def lower(self, d: int) -> Expr:
        return -self.geometry("padding", d) - self.shift(d)

    def upper(self, d: int) -> Expr:
        last = (self.out.size(3 + d) - 1) * self.geometry("stride", d)
        return self.lower(d) + last - (self.x.size(3 + d) - 1)

    def bundle(self) -> GatherBundle:
        return GatherBundle(
            out=extents(self.out),
            kernel=leave_out(extents(self.weight), "d"),
            stride=spatial(partial(self.geometry, "stride")),
            lower=spatial(self.lower),
            dilation=spatial(partial(self.geometry, "dilation")),
            shift=spatial(self.shift),
        )

    def image_map(self, dtype: str, spatial: int, pixels: int, channels: int, grouped: bool = False) -> TensorMap:
        count = self.weight.size(2) * self.op.local("groups") if grouped else self.weight.size(2)
        return im2col_map(
            self.x, dtype, count, (pixels, channels), spatial, self.lower, self.upper, partial(self.geometry, "stride")
        )

    def within_reach(self, spatial: int) -> Constraint:
        """Corners and offsets of an im2col map are small numbers."""
        reach, offsets = ((128, 255), (16, 31))[spatial - 2]
        holds = has_dimensions(spatial, self.x, self.weight, self.out)
        if spatial == 2:
            holds = holds & (self.geometry("padding", 0) == 0)
        for d in range(3 - spatial, 3):
            step = self.geometry("dilation", d)
            farthest = (self.weight.size(3 + d) - 1) * maximum(step, -step)
            holds = holds & (minimum(self.lower(d), self.upper(d)) >= -reach) & (farthest <= offsets)
            holds = holds & (maximum(self.lower(d), self.upper(d)) < reach) & (self.geometry("stride", d) <= 8)
        message = f"{spatial} dimensions, a stride of up to 8, padding and taps that reach {reach} pixels"
        return require(holds, message)


# --- Plans ---

_GATHER = Gather(OP, X, WEIGHT, OUT)


def pixel_pitch(t: Tensor) -> Expr:
    """From a pixel to the next, if `is_even`; of a single one, its channels."""
    pitch: Expr = t.size(2)
    for d in (0, 3, 4, 5):
        pitch = select(t.size(d) == 1, pitch, t.stride(d))
    return pitch


def is_even(t: Tensor, itemsize: int) -> Expr:
    """Pixels are the rows of a matrix that TMA can have: all as far from each other. Between them may lie the channels
    of other groups."""
    pitch = pixel_pitch(t)
    holds = (t.stride(2) == 1) & (t.alignment >= 16) & (pitch * itemsize % 16 == 0)
    for d in (5, 4, 3, 0):
        holds = holds & ((t.size(d) == 1) | (t.stride(d) == pitch))
        pitch = pitch * t.size(d)
    return holds


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
    """With such a store, for so many dimensions: of a config that is one of ``tile``."""
    c = point.config
    return point.store in c.stores.split() and (point.spatial == 2 or c.three)


def hopper_tile(point: Point) -> Tile:
    c = point.config
    return Tile(c.block_m, c.block_n, c.block_k, c.num_stages, c.cooperative, c.pingpong, subtile_of(point))


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
        rows=Int(M),
        taps=Int(TAPS),
        channels=Int(C),
        tiles=Int(tiles),
        tiles_of_group=Int(N // c.block_n),
        group=Int(max(1024 // c.block_m, 1)),
        gather=_GATHER.bundle(),
        bias_activation=Epilogue(Const(None), Int(BIAS.stride(1), "i64"), Int(OP.int("activation")), Int(BIAS.present)),
        TILE=Const(hopper_tile(point)),
        SPATIAL=Const(point.spatial),
        STORE=Const(point.store),
        EPILOGUE=Const(point.epilogue),
        GROUPED=Const(point.grouped),
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
        launches=(Launch(conv_tma, args, (minimum(device.sm_count, tiles), 1, 1), num_warps=4),),
        cost=predict(point, OP, judged, TAPS * ceil_div(C, c.block_k) * c.block_k, percent=percent),
    )


# --- The grid ---


def tile(block_m: int, block_n: int, num_stages: int, subtile_n: int, stores: str = "matrix", pingpong: bool = False,
         three: bool = False, block_k: int = 64, suffix: str = "", **more: int) -> Config:  # fmt: skip
    """stores: those that it is compiled with. three: and for three dimensions."""
    name = f"{block_m}x{block_n}x{block_k}_s{num_stages}_{'pingpong' if pingpong else 'coop'}{suffix}"
    params = dict(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=num_stages, subtile_n=subtile_n,
                  stores=stores, pingpong=pingpong, cooperative=1 if pingpong else 2, three=three)  # fmt: skip
    return Config(name, params | more)


_tile = partial(tile, itemsize=2, grouped=False)  # grouped: compiled for groups, too
_tf32 = partial(_tile, itemsize=4, block_k=32, suffix="_tf32")
ALL_STORES = "matrix channels_last contiguous"
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
