"""Split-K in plain Triton, for products of few tiles: K is split over several programs, and a second launch adds up
their partial sums, always in the same order."""

import triton
import triton.language as tl

from tk.aot.expr import Expr, ceil_div, const, device, local, maximum, minimum
from tk.aot.spec import Buffer, Config, Const, Int, Kernel, Launch, Plan, Point, Scratch, require
from tk.kernels.epilogue import finish
from tk.kernels.gemm.cost import Work
from tk.kernels.gemm.pointer import (
    ARCHS,
    accumulate,
    constraints,
    finish_args,
    predicted,
    product_args,
    tile_indices,
)
from tk.kernels.gemm.problem import EPILOGUE_AXIS, batch_invariant, serves
from tk.kernels.mm.op import MM, OP
from tk.kernels.mm.pointer import AXES, SMALL, worth_a_cubin

M, N, K = MM.M, MM.N, MM.K

# --- The device functions ---


@triton.jit
def store_partials(partials, x, s, rows, cols, M, N):
    """The sum of the s-th part of K, into fp32 [splits, M, N]."""
    at = partials + (s.to(tl.int64) * M + rows[:, None]) * N + cols[None, :]
    tl.store(at, x, mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit
def mm_split_k(a, b, partials, size, k_per_split, strides, TILE: tl.constexpr):
    """Program (tile, s) leaves the sum over its k_per_split values of k in partials[s]."""
    rows, cols = tile_indices(tl.program_id(0), size.M, size.N, TILE)
    s = tl.program_id(1)
    k_lo = s * k_per_split
    k_hi = k_lo + min(k_per_split, size.K - k_lo)  # where k_lo + k_per_split may pass 2**31
    acc = accumulate(a, b, rows, cols, size.M, size.N, k_lo, k_hi, strides, TILE)
    store_partials(partials, acc, s, rows, cols, size.M, size.N)


@triton.jit
def mm_split_k_reduce(partials, bias, out, M, N, splits, stride_om, stride_on, epilogue, BLOCK_N: tl.constexpr):
    """The second pass: the partial sums in the order of K, then the epilogue. Program (m, n): BLOCK_N columns of a
    row."""
    rows = tl.program_id(0) + tl.arange(0, 1)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = partials + rows[:, None].to(tl.int64) * N + cols[None, :]
    inside = (cols < N)[None, :]
    acc = tl.zeros((1, BLOCK_N), dtype=tl.float32)
    for _ in range(splits):
        acc += tl.load(at, mask=inside, other=0.0)
        at += M.to(tl.int64) * N
    finish(acc, bias, out, rows, cols, M, N, stride_om, stride_on, epilogue, "matrix")


# --- Plans ---

# Of a plan that splits K. Its locals are those of `split_k_locals`, its buffer is PARTIALS, its second launch
# `reduce_launch`.
K_PER_SPLIT, SPLITS = local(len(OP.locals)), local(len(OP.locals) + 1)
PARTIALS = Buffer(SPLITS * M * N * 4)


def split_k_locals(room: Expr, step: int, least: int) -> tuple[Expr, tuple[Expr, Expr]]:
    """As many splits as there is room for, of whole steps, none shorter than `least` of them: whether that is more than
    one, and the plan's locals."""
    wanted = maximum(minimum(room, ceil_div(K, least * step)), 1)
    return wanted > 1, (ceil_div(ceil_div(K, step), wanted) * step, ceil_div(K, K_PER_SPLIT))


def reduce_launch(point: Point) -> Launch:
    return Launch(
        mm_split_k_reduce,
        finish_args(MM, point, "matrix")
        | {
            "partials": Scratch(0, "fp32"),
            "M": Int(M),
            "N": Int(N, divisible=point.aligned),
            "splits": Int(SPLITS),
            "BLOCK_N": Const(256),
        },
        grid=(M, ceil_div(N, 256), 1),
        num_warps=2,
    )


def _plan(point: Point) -> Plan | None:
    if not worth_a_cubin(point):
        return None
    c = point.config
    tiles = ceil_div(M, c.block_m) * ceil_div(N, c.block_n)
    pays, locals_ = split_k_locals(device.sm_count * c.occupancy // tiles, c.block_k, least=4)
    split = Launch(
        mm_split_k,
        product_args(MM, point) | {"k_per_split": Int(K_PER_SPLIT), "partials": Scratch(0, "fp32")},
        grid=(tiles, SPLITS, 1),
        num_warps=c.num_warps,
        num_stages=c.num_stages,
    )
    work = Work(
        MM,
        waves=const(1),
        k_blocks=K_PER_SPLIT // c.block_k,
        flops=2 * c.block_m * c.block_n * c.block_k,
        dram=MM.traffic() + 8 * SPLITS * MM.M_choice * N,  # the partial sums are written and read
        tile=(c.block_m, c.block_n),
        boxes=(1, 1),
        fixups=SPLITS,
    )
    return Plan(
        constraints=(
            *constraints(MM, point),
            batch_invariant(),
            require(pays, "few enough tiles and a K long enough that a split pays"),
        ),
        serves=serves(point, EPILOGUE_AXIS),
        launches=(split, reduce_launch(point)),
        locals=locals_,
        buffers=(PARTIALS,),
        cost=predicted(point, work),
        terms=work.terms(point),
        general=not point.aligned,
    )


# --- The grid ---

_CONFIGS = tuple(Config(f"{c.name}_split_k", c.params) for c in SMALL)

KERNELS = (Kernel("mm_split_k", OP, AXES, dict.fromkeys(ARCHS, _CONFIGS), _plan),)
