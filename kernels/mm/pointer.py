"""Matrix products in plain Triton, for every GPU and every layout.

`mm_pointer` takes every problem: any strides, any alignment, any size. Its loop over K, `accumulate`, is split-K's too
(split_k.py).
"""

import triton
import triton.language as tl

from tk.aot.expr import ceil_div, device
from tk.aot.spec import (
    ITEMSIZE,
    Arg,
    Config,
    Const,
    Constraint,
    Int,
    Kernel,
    Launch,
    Plan,
    Point,
    Pointer,
    Tensor,
    require,
)
from tk.kernels.epilogue import finish
from tk.kernels.gemm.cost import Work, predict
from tk.kernels.gemm.problem import DTYPE_AXIS, ORDER_AXIS, OUT_AXIS, PRECISION_AXIS, makes_sense, out_dtype, serves
from tk.kernels.mm.op import BIAS, MM, OP, OUT, A, B

M, N, K = MM.M, MM.N, MM.K

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
def accumulate(a, b, rows, cols, M, N, k_lo, k_hi, stride_am, stride_ak, stride_bk, stride_bn,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
               ORDER: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """fp32 sum over k in [k_lo, k_hi). EVEN_K: BLOCK_K divides k_hi - k_lo."""
    A_MASK: tl.constexpr = ORDER[0] == "t"
    B_MASK: tl.constexpr = ORDER[1] == "n"
    rows, row_inside = _edge(rows, M, A_MASK)
    cols, col_inside = _edge(cols, N, B_MASK)
    ks = (k_lo + tl.arange(0, BLOCK_K)).to(tl.int64)
    a_at = a + rows[:, None] * stride_am + ks[None, :] * stride_ak
    b_at = b + ks[:, None] * stride_bk + cols[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
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
        a_at += tl.cast(stride_ak, tl.int64) * BLOCK_K
        b_at += tl.cast(stride_bk, tl.int64) * BLOCK_K
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


@triton.jit
def mm_pointer(a, b, bias, out, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_bias_m, stride_bias_n,
               stride_om, stride_on, alpha, beta, activation, has_bias,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
               EVEN_K: tl.constexpr, ORDER: tl.constexpr, PRECISION: tl.constexpr, EPILOGUE: tl.constexpr):  # fmt: skip
    """One program, one tile of out."""
    m, n = tile_coordinates(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = accumulate(a, b, rows, cols, M, N, 0, K, stride_am, stride_ak, stride_bk, stride_bn,
                     BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, ORDER, PRECISION)  # fmt: skip
    finish(acc, bias, out, rows, cols, M, N, stride_bias_m, stride_bias_n, stride_om, stride_on,
           alpha, beta, activation, has_bias, EPILOGUE)  # fmt: skip


# --- Plans: what this kernel and split-K tell the compiler, and what the launcher must check for it ---


def _aligned(point: Point) -> tuple[Constraint, ...]:
    """What lets the compiler load and store 16 bytes at once."""
    found = []
    for t, letter in ((A, point.order[0]), (B, point.order[1]), (OUT, "n")):
        outer = t.stride(0 if letter == "n" else 1)
        holds = (t.alignment >= 16) & (outer % 16 == 0)
        found.append(require(holds, f"{t.name} on a 16-byte boundary, its rows a multiple of 16 elements apart"))
    sizes = {"N": N} | ({"K": K} if _wide_k(point) else {}) | ({"M": M} if _wide_m(point) else {})
    return (*found, *(require(x % 16 == 0, f"{name} a multiple of 16") for name, x in sizes.items()))


def _wide_k(point: Point) -> bool:
    return point.order[0] == "n" or point.order[1] == "t"


def _wide_m(point: Point) -> bool:
    return point.order[0] == "t"


def constraints(point: Point) -> tuple[Constraint, ...]:
    found: tuple[Constraint, ...] = (MM.fits_32_bits(),)
    if point.aligned:
        found += _aligned(point)
    if point.even_k:
        block_k = point.config.block_k
        found += (require(K % block_k == 0, f"K a multiple of {block_k}"),)
    return found


def product_args(point: Point) -> dict[str, Arg]:
    """The arguments of `accumulate`."""
    c = point.config

    def strides(t: Tensor, letter: str, names: tuple[str, str]) -> dict[str, Arg]:
        both: list[Arg] = [Int(t.stride(d), "i64", divisible=point.aligned) for d in (0, 1)]
        if letter != "s":
            both["tn".index(letter)] = Const(1)
        return dict(zip(names, both, strict=True))

    return dict(
        a=Pointer(A, point.dtype, point.aligned),
        b=Pointer(B, point.dtype, point.aligned),
        **strides(A, point.order[0], ("stride_am", "stride_ak")),
        **strides(B, point.order[1], ("stride_bk", "stride_bn")),
        M=Int(M, divisible=point.aligned and _wide_m(point)),
        N=Int(N, divisible=point.aligned),
        K=Int(K, divisible=point.aligned and _wide_k(point)),
        BLOCK_M=Const(c.block_m),
        BLOCK_N=Const(c.block_n),
        BLOCK_K=Const(c.block_k),
        GROUP_M=Const(8),
        EVEN_K=Const(point.even_k),
        ORDER=Const(point.order),
        PRECISION=Const(point.precision),
    )


def finish_args(point: Point, epilogue: str) -> dict[str, Arg]:
    """The arguments of `_finish`."""
    return MM.epilogue_args(point.dtype) | dict(
        out=Pointer(OUT, out_dtype(point), point.aligned),
        stride_bias_m=Const(0) if epilogue == "vector" else Int(BIAS.stride(0), "i64"),
        stride_bias_n=Int(BIAS.stride(1), "i64"),
        stride_om=Int(OUT.stride(0), "i64", divisible=point.aligned),
        stride_on=Int(OUT.stride(1), "i64") if point.order == "ss" else Const(1),
    )


_SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that a program may use


def worth_a_cubin(point: Point) -> bool:
    c = point.config
    fma = point.dtype == "fp32" and point.precision == "ieee"
    shared = c.num_stages * (c.block_m + c.block_n) * c.block_k * ITEMSIZE[point.dtype]
    if not makes_sense(point) or c.fma != fma or shared > _SHARED[point.arch]:
        return False
    if not point.aligned:
        return c.unaligned and not point.even_k
    if point.order == "ss":
        return False
    if not point.even_k and _wide_k(point) and 16 % c.block_k == 0:
        return False  # K is a multiple of 16: it is always even
    # What suits 16-byte loads suits TMA: on Hopper that is the TMA kernels'.
    return not (point.arch == 90 and point.dtype != "fp32")


def slowdown(point: Point) -> int:
    """A guess: loads of 2 bytes keep the tensor cores waiting."""
    return 1 if point.aligned else 4


def _plan(point: Point) -> Plan | None:
    if not worth_a_cubin(point) or (point.order == "ss" and point.epilogue == "vector"):
        return None
    accumulators = point.config.block_m * point.config.block_n // (32 * point.config.num_warps)  # of a thread
    if point.epilogue == "matrix" and accumulators > 64:
        return None  # with the addresses of a whole tile of bias beside them, they would not stay in registers
    c = point.config

    def tiles(rows):
        return ceil_div(rows, c.block_m) * ceil_div(N, c.block_n)

    launch = Launch(
        mm_pointer,
        product_args(point) | finish_args(point, point.epilogue) | {"EPILOGUE": Const(point.epilogue)},
        grid=(tiles(M), 1, 1),
        num_warps=c.num_warps,
        num_stages=c.num_stages,
    )
    waves = ceil_div(tiles(MM.M_choice), device.sm_count * c.occupancy)
    work = Work(
        MM,
        waves=waves,
        k_blocks=waves * ceil_div(K, c.block_k),
        flops=2 * c.block_m * c.block_n * c.block_k,
        dram=MM.traffic(),
        tile=(c.block_m, c.block_n),
        boxes=(1, 1),
    )
    # A strided product is not worth a kernel of its own for one row of bias.
    everything = ("plain", "vector", "matrix")
    served = {"vector": ("plain", "vector"), "matrix": everything if point.order == "ss" else ("matrix",)}
    return Plan(
        constraints=constraints(point),
        serves=serves(point, served[point.epilogue]),
        launches=(launch,),
        cost=predict(point, work, slowdown(point)),
        terms=work.terms(point),
        general=not point.aligned,
    )


# --- The grid ---


def _tile(block_m: int, block_n: int, block_k: int, num_stages: int, num_warps: int, occupancy: int = 1,
          fma: bool = False, unaligned: bool = False) -> Config:  # fmt: skip
    """occupancy: programs that a multiprocessor holds at once. fma: for fp32 without tensor cores. unaligned: compiled
    also for operands that cannot be loaded 16 bytes at a time."""
    shape = dict(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=num_stages, num_warps=num_warps)
    return Config(
        f"{block_m}x{block_n}x{block_k}_s{num_stages}_w{num_warps}{'_fma' if fma else ''}",
        shape | dict(occupancy=occupancy, fma=fma, unaligned=unaligned),
    )


SMALL = (
    _tile(16, 64, 128, 4, 4, 2),
    _tile(32, 64, 64, 4, 4, 2, unaligned=True),
    _tile(64, 64, 64, 4, 4, 2, unaligned=True),
    _tile(16, 32, 32, 3, 4, 4, fma=True, unaligned=True),
    _tile(32, 64, 16, 3, 4, 4, fma=True),
    _tile(64, 64, 16, 3, 4, 2, fma=True),
)
_LARGE = (
    _tile(64, 128, 64, 4, 4),
    _tile(128, 64, 64, 4, 4),
    _tile(128, 128, 32, 4, 4),
    _tile(128, 128, 64, 3, 8, unaligned=True),
    _tile(128, 256, 32, 3, 8),
    _tile(256, 128, 32, 3, 8),
    _tile(128, 64, 16, 3, 8, fma=True, unaligned=True),
    _tile(128, 128, 8, 3, 8, fma=True),
)

AXES = {
    "dtype": DTYPE_AXIS,
    "precision": PRECISION_AXIS,
    "order": ORDER_AXIS,
    "aligned": (True, False),
    "even_k": (True, False),
    "out": OUT_AXIS,
}
ARCHS = (80, 90, 100)

_POINTER_AXES = AXES | {"epilogue": ("vector", "matrix")}
KERNELS = (Kernel("mm_pointer", OP, _POINTER_AXES, dict.fromkeys(ARCHS, SMALL + _LARGE), _plan),)
