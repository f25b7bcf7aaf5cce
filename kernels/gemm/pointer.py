"""A product in plain Triton, as far as all have it: the loop over K, what its arguments ask of a problem, its plan."""

from collections.abc import Callable, Mapping

import triton
import triton.language as tl

from tk.aot.expr import Expr, device
from tk.aot.spec import (
    ITEMSIZE,
    Arg,
    Bundle,
    Config,
    Const,
    Constraint,
    Int,
    Launch,
    Plan,
    Point,
    Pointer,
    Tensor,
    require,
)
from tk.kernels.gemm.arguments import PointerTile, Size, Strides
from tk.kernels.gemm.cost import Work, predict
from tk.kernels.gemm.problem import DTYPE_AXIS, ORDER_AXIS, OUT_AXIS, PRECISION_AXIS, Gemm, makes_sense, out_dtype
from tk.kernels.gemm.tiles import Tiles

# --- The device functions ---


@triton.jit
def tile_coordinates(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """The program order: program -> tile. GROUP_M rows of tiles are walked together, so that they share columns of b in
    L2."""
    n_m = tl.cdiv(M, BLOCK_M)
    n_n = tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP_M * n_n)
    size = min(n_m - group * GROUP_M, GROUP_M)
    in_group = pid % (GROUP_M * n_n)
    return group * GROUP_M + in_group % size, in_group // size


@triton.jit
def _edge(index, size, CONTIGUOUS: tl.constexpr):
    """Indices along an operand's outer dimension, and which of them exist. Where the dimension is contiguous in memory
    what lies outside is masked, which keeps the loads wide; elsewhere it reads the last one that exists, which costs no
    mask, and what it gives is not stored."""
    if CONTIGUOUS:
        inside = index < size
    else:
        index = tl.minimum(index, size - 1)
        inside = index >= 0
    return index.to(tl.int64), inside


@triton.jit
def _round_to_tf32(x):
    """To 10 bits of mantissa, ties away from zero, as cuBLAS does. Tensor cores alone cut the rest off, at 2.6 times
    the error. A NaN may not carry into the sign."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True), x)


@triton.jit
def tile_indices(pid, M, N, TILE: tl.constexpr):
    """The rows and the columns of a program's tile."""
    m, n = tile_coordinates(pid, M, N, TILE.BLOCK_M, TILE.BLOCK_N, TILE.GROUP_M)
    return m * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M), n * TILE.BLOCK_N + tl.arange(0, TILE.BLOCK_N)


@triton.jit
def accumulate(a, b, rows, cols, M, N, k_lo, k_hi, strides, TILE: tl.constexpr):
    """fp32 sum over k in [k_lo, k_hi). strides: ``Strides``. TILE: a ``PointerTile``."""
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    EVEN_K: tl.constexpr = TILE.EVEN_K
    ORDER: tl.constexpr = TILE.ORDER
    PRECISION: tl.constexpr = TILE.PRECISION
    A_MASK: tl.constexpr = ORDER[0] == "t"
    B_MASK: tl.constexpr = ORDER[1] == "n"
    rows, row_inside = _edge(rows, M, A_MASK)
    cols, col_inside = _edge(cols, N, B_MASK)
    ks = (k_lo + tl.arange(0, BLOCK_K)).to(tl.int64)
    a_at = a + rows[:, None] * strides.am + ks[None, :] * strides.ak
    b_at = b + ks[:, None] * strides.bk + cols[None, :] * strides.bn
    acc = tl.zeros((TILE.BLOCK_M, TILE.BLOCK_N), dtype=tl.float32)
    for k in range(k_lo, k_hi, BLOCK_K):
        left = tl.arange(0, BLOCK_K) < k_hi - k
        x = masked_load(a_at, row_inside[:, None], left[None, :], A_MASK, not EVEN_K)
        y = masked_load(b_at, col_inside[None, :], left[:, None], B_MASK, not EVEN_K)
        if PRECISION == "ieee" and x.dtype == tl.float32:
            # A sum for each block of K, then the sum of those: the error of one long chain of fp32 additions is some
            # three times cuBLAS's at K = 4096.
            acc += tl.dot(x, y, input_precision=PRECISION)
        else:
            if PRECISION == "tf32":
                x = _round_to_tf32(x)
                y = _round_to_tf32(y)
            acc = tl.dot(x, y, acc, input_precision=PRECISION)
        # 64-bit steps: BLOCK_K * stride may pass 2**31
        a_at += tl.cast(strides.ak, tl.int64) * BLOCK_K
        b_at += tl.cast(strides.bk, tl.int64) * BLOCK_K
    return acc


@triton.jit
def masked_load(at, outer, inner, OUTER: tl.constexpr, INNER: tl.constexpr, EVICTION: tl.constexpr = ""):
    """Zeros where a mask that is needed says so. EVICTION: of L2, as tl.load's eviction_policy."""
    if OUTER and INNER:
        x = tl.load(at, mask=outer & inner, other=0.0, eviction_policy=EVICTION)
    elif OUTER:
        x = tl.load(at, mask=outer, other=0.0, eviction_policy=EVICTION)
    elif INNER:
        x = tl.load(at, mask=inner, other=0.0, eviction_policy=EVICTION)
    else:
        x = tl.load(at, eviction_policy=EVICTION)
    return x


# --- Plans: what is told to the compiler, and what the launcher must check for it ---


def _aligned(gemm: Gemm, point: Point) -> tuple[Constraint, ...]:
    """What lets the compiler load and store 16 bytes at once."""
    found = []
    for t, letter in ((gemm.a, point.order[0]), (gemm.b, point.order[1]), (gemm.out, "n")):
        outer = t.stride(0 if letter == "n" else 1)
        holds = (t.alignment >= 16) & (outer % 16 == 0)
        found.append(require(holds, f"{t.name} on a 16-byte boundary, its rows a multiple of 16 elements apart"))
    sizes = {"N": gemm.N} | ({"K": gemm.K} if wide_k(point) else {}) | ({"M": gemm.M} if _wide_m(point) else {})
    return (*found, *(require(x % 16 == 0, f"{name} a multiple of 16") for name, x in sizes.items()))


def wide_k(point: Point) -> bool:
    return point.order[0] == "n" or point.order[1] == "t"


def _wide_m(point: Point) -> bool:
    return point.order[0] == "t"


def constraints(gemm: Gemm, point: Point) -> tuple[Constraint, ...]:
    found: tuple[Constraint, ...] = (gemm.fits_32_bits(),)
    if point.aligned:
        found += _aligned(gemm, point)
    if point.even_k:
        block_k = point.config.block_k
        found += (require(gemm.K % block_k == 0, f"K a multiple of {block_k}"),)
    return found


def product_args(gemm: Gemm, point: Point) -> dict[str, Arg | Bundle]:
    """The arguments of `accumulate`."""
    c = point.config

    def strides(t: Tensor, letter: str) -> list[Arg]:
        both: list[Arg] = [Int(t.stride(d), "i64", divisible=point.aligned) for d in (0, 1)]
        if letter != "s":
            both["tn".index(letter)] = Const(1)
        return both

    size = Size(
        M=Int(gemm.M, divisible=point.aligned and _wide_m(point)),
        N=Int(gemm.N, divisible=point.aligned),
        K=Int(gemm.K, divisible=point.aligned and wide_k(point)),
    )
    tile = PointerTile(c.block_m, c.block_n, c.block_k, point.even_k, point.order, point.precision)
    return dict(
        a=Pointer(gemm.a, point.dtype, point.aligned),
        b=Pointer(gemm.b, point.dtype, point.aligned),
        size=size,
        strides=Strides(*strides(gemm.a, point.order[0]), *strides(gemm.b, point.order[1])),
        TILE=Const(tile),
    )


def finish_args(gemm: Gemm, point: Point, epilogue: str) -> dict[str, Arg | Bundle]:
    """The arguments of `finish`."""
    of_bias = gemm.epilogue()
    return dict(
        bias=gemm.bias_pointer(point.dtype),
        out=Pointer(gemm.out, out_dtype(point), point.aligned),
        stride_om=Int(gemm.out.stride(0), "i64", divisible=point.aligned),
        stride_on=Int(gemm.out.stride(1), "i64") if point.order == "ss" else Const(1),
        epilogue=of_bias._replace(stride_bias_m=Const(0)) if epilogue == "vector" else of_bias,
    )


# --- The plan ---

SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that a program may use


def fits_shared(point: Point) -> bool:
    c = point.config
    return c.num_stages * (c.block_m + c.block_n) * c.block_k * ITEMSIZE[point.dtype] <= SHARED[point.arch]


def suits_config(point: Point) -> bool:
    """Whether the config is for the dtype, with or without tensor cores, and its stages fit."""
    fma = point.dtype == "fp32" and point.precision == "ieee"
    return point.config.fma == fma and fits_shared(point)


def is_compiled(point: Point, beside_tma: bool = False) -> bool:
    """Whether a kernel is compiled that has AXES, and whose config is one of ``tile``. beside_tma: also where TMA
    kernels would do."""
    if not makes_sense(point) or not suits_config(point):
        return False
    if not point.aligned:
        return bool(point.config.unaligned)
    # What suits 16-byte loads suits TMA: on Hopper that is the TMA kernels'.
    is_for_tma = point.arch == 90 and point.dtype != "fp32" and not beside_tma
    return point.order != "ss" and not is_for_tma


def predicted(point: Point, work: Work) -> Expr:
    """Picoseconds. As a guess, loads of 2 bytes keep the tensor cores waiting."""
    return predict(point, work, 1 if point.aligned else 4)


def pointer_plan(
    point: Point,
    tiles: Tiles,
    fn: object,
    args: Mapping[str, Arg | Bundle],
    serves: Mapping[str, tuple[int, ...]],
    constraints: tuple[Constraint, ...],
    occupancy: int = 1,
    sharing: int = 1,
    cost: Callable[[Point, Work], Expr] = predicted,
) -> Plan:
    """A program for each tile. occupancy: programs that a multiprocessor holds at once. sharing: see ``Tiles.work``."""
    c = point.config
    work = tiles.work(device.sm_count * occupancy, sharing=sharing)
    launch = Launch(fn, args, (tiles.count, 1, 1), num_warps=c.num_warps, num_stages=c.num_stages)
    return work.plan(cost(point, work), (launch,), serves, constraints, general=not point.aligned)


# --- The grid ---


def shape(block_m: int, block_n: int, block_k: int, num_stages: int, num_warps: int, suffix: str = "",
          **more: int | bool) -> Config:  # fmt: skip
    """Named for the tile of out x block of K, the stages and the warps. unaligned: compiled also for operands that
    cannot be loaded 16 bytes at a time."""
    params = dict(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=num_stages, num_warps=num_warps)
    return Config(f"{block_m}x{block_n}x{block_k}_s{num_stages}_w{num_warps}{suffix}", params | more)


def tile(block_m: int, block_n: int, block_k: int, num_stages: int, num_warps: int, occupancy: int = 1,
         fma: bool = False, unaligned: bool = False, **more: bool) -> Config:  # fmt: skip
    """occupancy: programs that a multiprocessor holds at once. fma: for fp32 without tensor cores."""
    flags = dict(occupancy=occupancy, fma=fma, unaligned=unaligned) | more
    return shape(block_m, block_n, block_k, num_stages, num_warps, "_fma" if fma else "", **flags)


ARCHS = (80, 90, 100)
AXES = {
    "dtype": DTYPE_AXIS,
    "precision": PRECISION_AXIS,
    "order": ORDER_AXIS,
    "aligned": (True, False),
    "even_k": (False,),
    "out": OUT_AXIS,
}
