"""The plans and the grid of ``conv_tma``."""

from dataclasses import dataclass
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
from tk.kernels.conv.op import BIAS, DTYPE_AXIS, OP, OUT, PRECISION_AXIS, SPATIAL, WEIGHT, X, fits_32_bits, makes_sense
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


def whole_pieces(t: Tensor, dims: tuple[int, ...], itemsize: int) -> Expr:
    """Whether TMA can have it: 16-byte pieces everywhere. The stride of a dimension of size 1 is 0."""
    holds = (t.alignment >= 16) & (t.stride(2) == 1)
    for d in dims:
        holds = holds & (t.stride(d) * itemsize % 16 == 0)
    return holds


@dataclass(frozen=True)
class Gather:
    """What TMA gathers of `x` for pixels of `out` and taps of `weight`, tensors of `op`: 0, 1 and 2 stand for d, h and
    w."""

    op: Op
    x: Tensor
    weight: Tensor
    out: Tensor

    def geometry(self, what: str, d: int) -> Expr:
        return self.op.int(f"{what}_{SPATIAL[d]}")

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
            stride=spatial(lambda d: self.geometry("stride", d)),
            lower=spatial(self.lower),
            dilation=spatial(lambda d: self.geometry("dilation", d)),
            shift=spatial(self.shift),
        )

    def image_map(self, dtype: str, spatial: int, pixels: int, channels: int, grouped: bool = False) -> TensorMap:
        dims = range(3 - spatial, 3)
        places = (0, *(3 + d for d in dims))
        count = self.weight.size(2) * self.op.local("groups") if grouped else self.weight.size(2)
        layout = NVMMASharedLayout(min(128, ITEMSIZE[dtype] * channels), 8 * ITEMSIZE[dtype], 2)
        steps = tuple(self.geometry("stride", d) for d in dims)
        return TensorMap(
            self.x,
            dtype,
            (*(self.x.size(p) for p in places), count),
            (*dense_strides(self.x, places, count), 1),
            (pixels, channels),
            layout=repr(layout),
            round_to_tf32=dtype == "fp32",
            im2col=Im2col(tuple(map(self.lower, dims)), tuple(map(self.upper, dims)), steps),
        )

    def within_reach(self, spatial: int) -> Constraint:
        """Corners and offsets of an im2col map are small numbers."""
        reach, offsets = ((128, 255), (16, 31))[spatial - 2]
        holds = self.x.size(3) >= 1
        if spatial == 2:
            holds = (self.x.size(3) == 1) & (self.weight.size(3) == 1) & (self.out.size(3) == 1)
            holds = holds & (self.geometry("padding", 0) == 0)
        for d in range(3 - spatial, 3):
            step = self.geometry("dilation", d)
            farthest = (self.weight.size(3 + d) - 1) * maximum(step, -step)
            holds = holds & (minimum(self.lower(d), self.upper(d)) >= -reach) & (farthest <= offsets)
            holds = holds & (maximum(self.lower(d), self.upper(d)) < reach) & (self.geometry("stride", d) <= 8)
        message = f"{spatial} dimensions, a stride of up to 8, padding and taps that reach {reach} pixels"
        return require(holds, message)


def weight_map(dtype: str, rows: int, channels: int, grouped: bool) -> TensorMap:
    """grouped: the output channels of all groups."""
    layout = NVMMASharedLayout(min(128, ITEMSIZE[dtype] * channels), 8 * ITEMSIZE[dtype], 5)
    places = (1, 3, 4, 5)
    return TensorMap(
        WEIGHT,
        dtype,
        (G * N if grouped else N, *(WEIGHT.size(p) for p in places[1:]), C),
        (*dense_strides(WEIGHT, places, C), 1),
        (rows, 1, 1, 1, channels),
        layout=repr(layout),
        round_to_tf32=dtype == "fp32",
    )


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
        "out_stride": leave_out(image_strides(out, divisible=wide), "g"),
    }
    holds = as_expr(1)
    if point.store == "matrix":
        layout = repr(NVMMASharedLayout(min(128, size * subtile), 8 * size, 2))
        block = (c.block_m // c.cooperative, subtile)
        args["out_desc"] = TensorMap(out, point.dtype, (rows, columns), (pixel_pitch(out), 1), block, layout=layout)
        args |= dict(out=Const(None), out_stride=Const(None))
        holds = is_even(out, size)
    elif wide:
        args["out_stride"] = args["out_stride"]._replace(c=Const(1))
        holds = (out.alignment >= 16) & (out.stride(2) == 1)
        for i in (0, 3, 4, 5):
            holds = holds & (out.stride(i) % 16 == 0)
    return args, holds


def subtile_of(point: Point) -> int:
    """Columns of a tile that are stored at a time."""
    return point.config.subtile_n // 2 if point.dtype == "fp32" else point.config.subtile_n


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
    if point.store not in c.stores.split() or (point.spatial == 3 and not c.three):
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
        weight_desc=weight_map(point.dtype, c.block_n, c.block_k, point.grouped),
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
    waves = ceil_div(judged, device.sm_count)
    # Stores by threads take longer, across pixels longest.
    percent = {"matrix": 100, "channels_last": 92, "contiguous": 80}[point.store] - (point.epilogue != "plain")
    return Plan(
        constraints=(
            fits_32_bits(OP, X),
            *_groups(point),
            require(whole_pieces(X, (0, 3, 4, 5), itemsize), "x channels-last, in pieces of 16 bytes"),
            require(whole_pieces(WEIGHT, (1, 3, 4, 5), itemsize), "the weight channels-last, in pieces of 16 bytes"),
            require(C * itemsize % 16 == 0, f"a multiple of {16 // itemsize} channels"),
            require(C * TAPS > 0, "channels and taps"),
            _GATHER.within_reach(point.spatial),
            *out_constraints,
            *((plain,) if point.epilogue == "plain" else ()),
        ),
        serves=serves_bucket(point),
        launches=(Launch(conv_tma, args, (minimum(device.sm_count, tiles), 1, 1), num_warps=4),),
        cost=predict(point, OP, tile, judged, waves, TAPS * ceil_div(C, c.block_k) * c.block_k, percent=percent),
    )


# --- The grid ---


def _tile(block_m: int, block_n: int, num_stages: int, subtile_n: int, itemsize: int = 2, pingpong: bool = False,
          stores: str = "matrix", three: bool = False, block_k: int = 0, grouped: bool = False) -> Config:  # fmt: skip
    """stores: those that it is compiled with. three: and for three dimensions. block_k: 128 bytes by default. grouped:
    and for groups."""
    block_k = block_k or 128 // itemsize
    schedule = "pingpong" if pingpong else "coop"
    name = f"{block_m}x{block_n}x{block_k}_s{num_stages}_{schedule}{'_tf32' if itemsize == 4 else ''}"
    params = dict(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=num_stages, subtile_n=subtile_n,
                  itemsize=itemsize, pingpong=pingpong, cooperative=1 if pingpong else 2, stores=stores,
                  three=three, grouped=grouped)  # fmt: skip
    return Config(name, params)


_ALL = "matrix channels_last contiguous"
CONFIGS = (
    _tile(128, 128, 6, 64, stores=_ALL, three=True),
    _tile(128, 256, 4, 64, stores=_ALL),
    _tile(128, 64, 8, 32, stores=_ALL, three=True, grouped=True),
    _tile(256, 128, 4, 32),
    # 64 channels out: with twice the pixels, the weight is fetched half as often.
    _tile(256, 64, 4, 32, stores=_ALL, three=True, grouped=True),
    # 32 channels in, as unfolded first layers have: of 64, half would be zeros.
    _tile(128, 64, 12, 32, stores=_ALL, three=True, block_k=32),
    _tile(256, 64, 8, 32, stores=_ALL, three=True, block_k=32),
    _tile(64, 128, 8, 64, pingpong=True),
    _tile(128, 128, 6, 32, pingpong=True),
    _tile(128, 128, 6, 64, itemsize=4, stores=_ALL, three=True),
    _tile(128, 64, 8, 32, itemsize=4),
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
