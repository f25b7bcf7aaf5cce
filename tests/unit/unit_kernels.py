"""A family that exercises every part of the road: each kind of argument, Triton and Gluon, one launch and two."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tk.aot.expr import ceil_div, const, device, int_arg, local, mode, select, tensors
from tk.aot.spec import (
    DTYPES,
    ITEMSIZE,
    Buffer,
    Config,
    Const,
    Family,
    Int,
    Kernel,
    Launch,
    Op,
    Plan,
    Point,
    Pointer,
    Scratch,
    Selector,
    TensorMap,
    require,
)

X, Y, OUT = tensors("x", "y", "out")
DTYPE_AXIS = ("fp32", "fp16")


@triton.jit
def _scaled(x, factor):
    return x * factor


@triton.jit
def scale_add(x, y, out, n, alpha, BLOCK: tl.constexpr, COMBINE: tl.constexpr):
    """out = COMBINE(x, alpha) + y."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    z = COMBINE(tl.load(x + at, mask=inside), alpha) + tl.load(y + at, mask=inside)
    tl.store(out + at, z, mask=inside)


@triton.jit
def partial_sums(x, parts, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(parts + tl.program_id(0), tl.sum(tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)))


@triton.jit
def add_sums(parts, counters, out, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(parts + at, mask=at < count, other=0.0))
    tl.store(out, (total + tl.load(counters)).to(out.dtype.element_ty))


@triton.jit
def copy_tma(x, out, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A tile by TMA, through descriptors that the host made."""
    at = [tl.program_id(0) * ROWS, tl.program_id(1) * COLS]
    out.store(at, x.load(at))


@triton.jit
def copy_device_tma(x, out, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The same, through descriptors that the program makes in scratch memory."""
    source = tl.make_tensor_descriptor(x, [rows, cols], [cols, 1], [ROWS, COLS])
    target = tl.make_tensor_descriptor(out, [rows, cols], [cols, 1], [ROWS, COLS])
    at = [tl.program_id(0) * ROWS, tl.program_id(1) * COLS]
    target.store(at, source.load(at))


@gluon.jit
def copy_gluon(x, out):
    """The same in Gluon: one block in and out, a barrier between."""
    tile = gl.allocate_shared_memory(x.dtype, x.block_shape, x.layout)
    ready = mbarrier.allocate_mbarrier(batch=1)
    mbarrier.init(ready.index(0), count=1)
    fence_async_shared()
    mbarrier.expect(ready.index(0), x.nbytes_per_cta)
    at = [gl.program_id(0) * x.block_shape[0], gl.program_id(1) * x.block_shape[1]]
    tma.async_load(x, at, ready.index(0), tile)
    mbarrier.wait(ready.index(0), 0)
    tma.async_store(out, at, tile)
    tma.store_wait(0)


OP = Op(
    name="unit_test_op",
    tensors=(X, Y, OUT),
    ints=("way",),
    floats=("alpha",),
    locals={"n": X.size(0) * X.size(1), "rows": X.size(0), "cols": X.size(1), "x_aligned": X.alignment >= 16},
    selectors={
        "dtype": Selector(select(X.dtype == DTYPES["fp32"], 0, 1), 2),
        "way": Selector(int_arg(0), 3),
    },
    dims=("rows", "cols"),
)
N, ROWS, COLS = (OP.local(name) for name in ("n", "rows", "cols"))


def _serves(point: Point, way: int) -> dict[str, tuple[int, ...]]:
    return {"dtype": (DTYPE_AXIS.index(point.dtype),), "way": (way,)}


ALIGNED = require(OP.local("x_aligned") & (Y.alignment >= 16) & (OUT.alignment >= 16), "16-byte boundaries")


def _plan_scale_add(point: Point) -> Plan:
    block = point.config.block
    launch = Launch(
        scale_add,
        # In another order than the function's parameters, which decides.
        {
            "BLOCK": Const(block),
            "COMBINE": Const(_scaled),
            "alpha": OP.float("alpha"),
            "n": Int(N, divisible=point.even),
            "out": Pointer(OUT, point.dtype, aligned=point.even),
            "x": Pointer(X, point.dtype, aligned=point.even, offset=16),
            "y": Pointer(Y, point.dtype, aligned=point.even),
        },
        grid=(ceil_div(N, block), 1, 1),
    )
    even = (ALIGNED, require(N % 16 == 0, "n a multiple of 16")) if point.even else ()
    return Plan(
        constraints=(
            *even,
            require(point.dtype != "fp16" or block <= 512, "fp16 with at most 512 elements a program"),
        ),
        serves=_serves(point, 0),
        launches=(launch,),
        cost=N * (1 if point.even else 2) + 1000,
        general=not point.even,
    )


def _plan_reduce(point: Point) -> Plan:
    block = point.config.block
    first = len(OP.locals)
    parts = local(first)
    return Plan(
        constraints=(ALIGNED, require(~mode("batch_invariant"), "batch_invariant mode off")),
        serves=_serves(point, 1),
        launches=(
            Launch(
                partial_sums,
                {"x": Pointer(X, point.dtype), "parts": Scratch(0, "fp32"), "n": Int(N, "i64"), "BLOCK": Const(block)},
                grid=(parts, 1, 1),
                dependent=1,
            ),
            Launch(
                add_sums,
                {
                    "parts": Scratch(0, "fp32", offset=parts * 4),
                    "counters": Scratch(1, "i32"),
                    "out": Pointer(OUT, point.dtype, aligned=False),
                    "count": Int(parts),
                    "BLOCK": Const(1024),
                },
                grid=(1, 1, 1),
                num_warps=2,
                when=parts > 0,
                cooperative=True,
            ),
        ),
        cost=N + device.sm_count,
        locals=(ceil_div(N, block),),
        buffers=(Buffer(parts * 8), Buffer(const(4), alignment=16, zeroed=True)),
        deterministic=False,
    )


def tensor_map(tensor, point: Point, layout: str = "", **kw) -> TensorMap:
    block = (point.config.rows, point.config.cols)
    return TensorMap(tensor, point.dtype, (ROWS, COLS), (tensor.stride(0), 1), block, layout, **kw)


def _plan_tma(point: Point) -> Plan:
    args = {"x": tensor_map(X, point, nan_fill=True), "out": tensor_map(OUT, point, l2_promotion=256)}
    if point.how == "gluon":
        itemsize = ITEMSIZE[point.dtype]
        layout = repr(NVMMASharedLayout(min(128, itemsize * point.config.cols), 8 * itemsize, 2))
        args = {"x": tensor_map(X, point, layout), "out": tensor_map(OUT, point, layout)}
    fn = {"triton": copy_tma, "gluon": copy_gluon, "device": copy_device_tma}[point.how]
    if point.how == "device":
        args = {"x": Pointer(X, point.dtype), "out": Pointer(OUT, point.dtype), "rows": Int(ROWS), "cols": Int(COLS)}
    if point.how != "gluon":
        args |= {"ROWS": Const(point.config.rows), "COLS": Const(point.config.cols)}
    return Plan(
        constraints=(ALIGNED, require(X.stride(0) % 8 == 0, "rows of x 16 bytes apart")),
        serves=_serves(point, 2),
        launches=(Launch(fn, args, (ceil_div(ROWS, point.config.rows), ceil_div(COLS, point.config.cols), 1)),),
        cost=N * 3,
    )


BLOCKS = tuple(Config(f"block{b}", {"block": b}) for b in (256, 1024))
SUMS = (Config("sum2048", {"block": 2048}),)


def tiles(how: str) -> tuple[Config, ...]:
    return (Config(f"{how}_64x32", {"rows": 64, "cols": 32}),)


def _tma_kernel(how: str, archs: tuple[int, ...] = (90, 100)) -> Kernel:
    axes = {"dtype": DTYPE_AXIS, "how": (how,)}
    return Kernel(f"copy_{how}", OP, axes, {arch: tiles(how) for arch in archs}, _plan_tma)


KERNELS = (
    Kernel("scale_add", OP, {"dtype": DTYPE_AXIS, "even": (True, False)}, {80: BLOCKS, 90: BLOCKS}, _plan_scale_add),
    Kernel("reduce", OP, {"dtype": DTYPE_AXIS}, {80: SUMS, 90: SUMS, 100: SUMS}, _plan_reduce),
    _tma_kernel("triton"),
    _tma_kernel("gluon"),
    _tma_kernel("device"),
)


def _sample(kernel: Kernel, point: Point) -> bool:
    return point.config.name != "block1024"


FAMILY = Family(OP, KERNELS, _sample)
