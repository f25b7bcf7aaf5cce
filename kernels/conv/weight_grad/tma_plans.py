"""The plans and the grid of ``weight_grad_tma``."""

from dataclasses import replace

from triton.experimental.gluon.language import NVMMASharedLayout

from tk.aot.expr import Expr, Tensor, ceil_div
from tk.aot.spec import ITEMSIZE, REDUCED_FLOATS, Config, Const, Int, Kernel, Plan, Point, Scratch, TensorMap, require
from tk.kernels.conv.cost import predict, step_ns
from tk.kernels.conv.tma_maps import Gather, is_even, pixel_pitch, whole_pieces
from tk.kernels.conv.tma_tiles import persistent_launch
from tk.kernels.conv.weight_grad.op import GRAD, OP, OUT, X
from tk.kernels.conv.weight_grad.reduce import SHARE, SPLITS, split_locals, split_plan
from tk.kernels.conv.weight_grad.tma import weight_grad_tma
from tk.kernels.hopper.arguments import Tile

_GATHER = Gather(OP, X, OUT, GRAD)
M, N, C, TAPS = OP.local("M"), OP.local("N"), OUT.size(2), OP.local("taps")


def _grad_map(dtype: str, pixels: int, channels: int) -> TensorMap:
    layout = NVMMASharedLayout(128, 8 * ITEMSIZE[dtype], 2)
    return TensorMap(GRAD, dtype, (M, N), (pixel_pitch(GRAD), 1), (pixels, channels), layout=repr(layout))


def _out_map(dtype: str, channels: int) -> TensorMap:
    layout = NVMMASharedLayout(128, 8 * ITEMSIZE[dtype], 3)
    sizes = (N, TAPS, C)
    strides = (OUT.stride(1), C, 1)
    return TensorMap(OUT, dtype, sizes, strides, (64, 1, channels), layout=repr(layout))


def _is_dense(t: Tensor) -> Expr:
    """Taps of C channels one behind the other: what a map of [O, taps, C] says."""
    pitch: Expr = C
    holds = (t.stride(2) == 1) & (t.alignment >= 16) & (t.stride(1) >= C * TAPS) & (t.stride(1) % 8 == 0)
    for d in (5, 4, 3):
        holds = holds & ((t.size(d) == 1) | (t.stride(d) == pitch))
        pitch = pitch * t.size(d)
    return holds


def _compiled_for(point: Point, subtile_n: int) -> Tile:
    c = point.config
    return Tile(c.block_m, c.block_n, c.block_k, c.num_stages, 2, False, subtile_n)


def _whole_plan(point: Point) -> Plan:
    """All pixels of a tile in one sum, which is the gradient: no parts, no second launch."""
    split = _plan(point)
    c = point.config
    tiles = ceil_div(N, c.block_m) * ceil_div(C, c.block_n) * TAPS
    steps = ceil_div(M, c.block_k)
    (launch, _) = split.launches
    args = dict(launch.args) | dict(
        out_desc=_out_map(point.dtype, 64),
        TILE=Const(_compiled_for(point, subtile_n=64)),
        partials=Const(None),
        splits=Int(1),
        share=Int(steps),
    )
    holds = _is_dense(OUT)
    return replace(
        split,
        constraints=(*split.constraints, require(holds & (N > 1), "out channels-last, its taps side by side")),
        launches=(persistent_launch(weight_grad_tma, args, tiles),),
        locals=(),
        buffers=(),
        cost=predict(point, OP, tiles, steps * c.block_k, percent=90),
    )


def _plan(point: Point) -> Plan:
    c = point.config
    tiles = ceil_div(N, c.block_m) * ceil_div(C, c.block_n) * TAPS
    args = dict(
        grad_desc=_grad_map(point.dtype, c.block_k, c.block_m // 2),
        x_desc=_GATHER.image_map(point.dtype, point.spatial, c.block_k, c.block_n),
        out_desc=Const(None),
        partials=Scratch(0, "fp32"),
        rows=Int(N),
        taps=Int(TAPS),
        splits=Int(SPLITS),
        k_blocks=Int(ceil_div(M, c.block_k)),
        share=Int(SHARE // c.block_k),
        channels=Int(C),
        gather=_GATHER.bundle(),
        TILE=Const(_compiled_for(point, subtile_n=c.block_n)),
        SPATIAL=Const(point.spatial),
    )
    units = tiles * SPLITS
    launch = persistent_launch(weight_grad_tma, args, units)
    again = 8 * SPLITS * N * OP.local("K")  # the partial sums are written and read
    itemsize = ITEMSIZE[point.dtype]
    constraints = (
        require(OP.local("groups") == 1, "1 group"),
        whole_pieces(X, itemsize),
        require(is_even(GRAD, itemsize), "grad channels-last with evenly spaced pixels, on 16-byte boundaries"),
        require((C * itemsize % 16 == 0) & (N * itemsize % 16 == 0), f"channels a multiple of {16 // itemsize}"),
        require((C > 0) & (M > 0), "channels and pixels"),
        _GATHER.within_reach(point.spatial),
    )
    splits = split_locals(tiles, 1, c.block_k, 16, step_ns(point, 90))
    cost = predict(point, OP, units, SHARE, percent=90, extra_bytes=again, launches=2)
    return split_plan(point, launch, splits, constraints, cost, wide=True)


def _tile(block_m: int, block_n: int, num_stages: int) -> Config:
    params = dict(block_m=block_m, block_n=block_n, block_k=64, num_stages=num_stages)
    return Config(f"{block_m}x{block_n}x64_s{num_stages}_coop", params)


_CONFIGS = (_tile(128, 128, 6), _tile(128, 64, 8))
_WHOLE_CONFIGS = tuple(replace(c, name=f"{c.name}_whole") for c in _CONFIGS)
_AXES = {"dtype": REDUCED_FLOATS, "precision": ("ieee",), "spatial": (2, 3)}

KERNELS = (
    Kernel("weight_grad_tma", OP, _AXES, {90: _CONFIGS}, _plan),
    Kernel("weight_grad_tma_whole", OP, _AXES, {90: _WHOLE_CONFIGS}, _whole_plan),
)
