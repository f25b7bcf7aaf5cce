"""f(a @ b) @ c in one kernel, as attention's forward has its two products: a tile of a @ b is made, f is applied to the
float32 sums, and what it gives, rounded to the operands' dtype, is multiplied by c's rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tk.aot.expr import ceil_div, device
from tk.aot.spec import Arg, Bundle, Config, Const, Int, Kernel, Launch, Plan, Point, Pointer, Tensor, require
from tk.kernels.b2b.op import LAYOUTS, Problem, serves, suits
from tk.kernels.epilogue import activate


@triton.jit
def named(score, b, h, q_idx, kv_idx, captures):
    """f by the number of its name, as a printed one is called."""
    return activate(score, captures[0])


@triton.jit
def unchanged(score, b, h, q_idx, kv_idx, captures):
    return score


class Sizes(NamedTuple):
    M: Any
    N: Any
    K: Any
    P: Any


class Strides(NamedTuple):
    """Of a [M, K], b [K, P], c [P, N] and out [M, N], in elements; a constant 1 along contiguous rows or columns."""

    am: Any
    ak: Any
    bk: Any
    bp: Any
    cp: Any
    cn: Any
    om: Any
    on: Any


@triton.jit
def b2b_fused(a, b, c, out, sizes, strides, captures, F: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Program (m, n): a tile of out. All of K is one block."""
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    cols = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    ks = tl.arange(0, BLOCK_K).to(tl.int64)
    in_rows, in_cols, in_k = rows < sizes.M, cols < sizes.N, ks < sizes.K
    a_at = a + rows[:, None] * strides.am + ks[None, :] * strides.ak
    x = tl.load(a_at, mask=in_rows[:, None] & in_k[None, :], other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for p in range(0, sizes.P, BLOCK_P):
        ps = (p + tl.arange(0, BLOCK_P)).to(tl.int64)
        in_p = ps < sizes.P
        b_at = b + ks[:, None] * strides.bk + ps[None, :] * strides.bp
        y = tl.load(b_at, mask=in_k[:, None] & in_p[None, :], other=0.0)
        s = F(tl.dot(x, y), 0, 0, 0, 0, captures)
        s = tl.where(in_p[None, :], s, 0.0)  # f of 0 may be anything
        c_at = c + ps[:, None] * strides.cp + cols[None, :] * strides.cn
        z = tl.load(c_at, mask=in_p[:, None] & in_cols[None, :], other=0.0)
        acc = tl.dot(s.to(x.dtype), z, acc)
    at = out + rows[:, None] * strides.om + cols[None, :] * strides.on
    tl.store(at, acc.to(x.dtype), mask=in_rows[:, None] & in_cols[None, :])


# --- Plans ---

# (K up to, N of a tile) -> rows, P of a block, stages, warps.
SIZES = {(64, 64): (128, 64, 3, 4), (128, 128): (128, 64, 3, 8), (256, 128): (64, 64, 2, 4), (256, 256): (64, 32, 2, 8)}
_STRIDED = (64, 32, 2, 4)  # an address for each element leaves fewer registers


def _setting(point: Point) -> tuple[int, int, int, int]:
    return _STRIDED if point.layout == "strided" else SIZES[point.size]


def _config(rows: int, columns: int, stages: int, warps: int) -> Config:
    shape = dict(block_m=rows, block_p=columns, num_stages=stages, num_warps=warps)
    return Config(f"{rows}x{columns}_s{stages}_w{warps}", shape)


_CONFIGS = tuple({s: _config(*s) for s in (*SIZES.values(), _STRIDED)}.values())

_PORTABLE = (_config(*SIZES[128, 128]), _config(*_STRIDED))


def kernel(problem: Problem, f: Any) -> Kernel:
    """f: `named`, or a printed function that is called like it."""

    def plan(point: Point) -> Plan | None:
        return _plan(problem, f, point)

    axes = {"dtype": problem.dtypes, "size": tuple(SIZES), "layout": LAYOUTS}
    return Kernel(problem.name, problem.op, axes, {90: _CONFIGS, 80: _PORTABLE}, plan)


def _plan(problem: Problem, f: Any, point: Point) -> Plan | None:
    op, c = problem.op, point.config
    is_strided = point.layout == "strided"
    if c.name != _config(*_setting(point)).name or (is_strided and point.size != (256, 128)):
        return None
    most_k, block_n = point.size
    M, N, K, P = (op.local(n) for n in ("M", "N", "K", "P"))
    programs = ceil_div(M, c.block_m) * ceil_div(N, block_n)
    launch = Launch(
        b2b_fused,
        _arguments(problem, f, point),
        grid=(ceil_div(M, c.block_m), ceil_div(N, block_n), 1),
        num_warps=c.num_warps,
        num_stages=c.num_stages,
        max_spill_bytes=4096 if is_strided else 2048,
    )
    # Picoseconds of a program on one multiprocessor, at some 3 TF.
    time = 2 * c.block_m * c.block_p * (most_k + block_n) // 3 * (4 if is_strided else 1)
    return Plan(
        constraints=(
            require(K <= most_k, f"K <= {most_k}"),
            require(ceil_div(N, block_n) < 65536, f"N < {65536 * block_n}"),
            *suits(point.layout, op.tensors),
        ),
        serves=serves(problem, point),
        launches=(launch,),
        cost=3_000_000 + ceil_div(programs, device.sm_count) * ceil_div(P, c.block_p) * time,
        general=is_strided,
    )


def _arguments(problem: Problem, f: Any, point: Point) -> dict[str, Arg | Bundle]:
    op, c = problem.op, point.config
    aligned = point.layout != "strided"

    def strides(t: Tensor) -> Iterator[Arg]:
        for d in range(2):
            is_unit = aligned and d == (1 if point.layout == "left" else 0)
            yield Const(1) if is_unit else Int(t.stride(d), "i64", divisible=aligned)

    along = {"left": "NKP", "right": "MKP", "strided": ""}[point.layout]
    blocks = dict(BLOCK_M=c.block_m, BLOCK_N=point.size[1], BLOCK_P=c.block_p, BLOCK_K=point.size[0])
    return {
        **{t.name: Pointer(t, point.dtype, aligned) for t in op.tensors},
        "sizes": Sizes(*(Int(op.local(n), divisible=n in along) for n in Sizes._fields)),
        "strides": Strides(*(stride for t in op.tensors for stride in strides(t))),
        "captures": problem.captured(),
        "F": Const(f),
        **{name: Const(x) for name, x in blocks.items()},
    }
