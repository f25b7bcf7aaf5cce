"""Gradients: with P the weights and delta = rowsum(grad_out out) - grad_lse,

    dV = P^T dO        dS = P (dO V^T - delta), through the score mod's derivative        dQ = dS K        dK = dS^T Q

One launch works out dK, dV and dQ: some of its programs have a tile of keys and walk the queries that see it, the
others have a tile of queries and walk its keys. Nothing is added to from two programs but captured tensors' gradients,
which are sums of integers: the same call gives the same bits. Keys and values that heads or batch entries share are
walked by one program. What the mask says of full tiles does not count, as in the forward pass, but it is asked there:
beside five products it costs little, and a loop for each list would be twice the code.

Captured tensors' gradients are sums of dS over so many places that they cancel: those of a row sum to 0. With delta
from an output of 16 bits they do not, by much more than all other errors. So where they are wanted the programs of
queries, which add them up, walk their keys twice, and work delta = rowsum(P dP) / rowsum(P) - grad_lse out first.
Both walks must round P alike, to the last bit: a multiplication and an addition that one of them fuses make P of a
bias of hundreds differ by 2^-15, and where the bias grows with the distance, as alibi does, the gradient by 0.2 %.
Nothing is fused here, as nowhere in attention (softmax.py).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tk.aot.expr import Expr, as_expr, ceil_div, device, minimum
from tk.aot.spec import (
    ITEMSIZE,
    Arg,
    Buffer,
    Bundle,
    Config,
    Const,
    Int,
    Kernel,
    Launch,
    Plan,
    Point,
    Pointer,
    Scratch,
    require,
)
from tk.kernels.attention.bundles import Mods, Positions, Rows, bundle
from tk.kernels.attention.forward import length_of, query_tiles
from tk.kernels.attention.gradients import WORDS, finish_gradient, largest_of, zero_gradient
from tk.kernels.attention.operands import load_rows, store_rows
from tk.kernels.attention.problem import Capture, Head, Problem, distinct, of_heads, takes_layout, tensor, tile_time
from tk.kernels.attention.softmax import LOG2_E, UNFUSED
from tk.kernels.attention.walk import BothLists, indices_of, lists_of, tile_in_blocks, tile_of_both, tiles_met

# --- The device functions ---


class BackwardTensors(NamedTuple):
    """Addresses. lse: the forward pass's; delta: of attention_delta."""

    query: Any
    key: Any
    value: Any
    grad_out: Any
    lse: Any
    delta: Any
    grad_query: Any
    grad_key: Any
    grad_value: Any
    q_lists: Any
    kv_lists: Any
    kv_lengths: Any


class BackwardSizes(NamedTuple):
    """B_kv: 1, or B. group: heads of queries that share one of keys."""

    B: Any
    B_kv: Any
    H: Any
    H_kv: Any
    M: Any
    N: Any
    D: Any
    DV: Any
    group: Any
    scale: Any


class BackwardStrides(NamedTuple):
    query: Any
    key: Any
    value: Any
    grad_out: Any
    grad_query: Any
    grad_key: Any
    grad_value: Any
    lse: Any


class Lengths(NamedTuple):
    """Of kv_lengths."""

    stride: Any
    is_given: Any


@dataclass(frozen=True)
class BackwardTile:
    """LONG: rows that a program keeps; SHORT: those that it walks at a time. BLOCK_D and BLOCK_DV: head sizes; EVEN:
    which are the call's. WITH_CAPTURES: gradients of captured tensors are wanted."""

    SHORT: int
    LONG: int
    BLOCK_D: int
    BLOCK_DV: int
    EVEN: bool
    PRECISION: str
    WITH_CAPTURES: bool


class Queries(NamedTuple):
    """Some queries with their gradients and statistics. lse: inf where there is nothing to be seen."""

    q: Any
    grad: Any
    lse: Any
    delta: Any
    rows: Any
    inside: Any


class Keys(NamedTuple):
    """Some keys with their values."""

    k: Any
    v: Any
    cols: Any
    inside: Any


class Statistics(NamedTuple):
    """lse [batch, heads, rows], and delta, dense."""

    lse: Any
    delta: Any
    strides: Any


@triton.jit
def attention_delta(out, grad_out, grad_lse, delta, largest, H, M, DV, out_strides, grad_strides, grad_lse_strides,
                    WITH_CAPTURES: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
                    BLOCK_DV: tl.constexpr):  # fmt: skip
    """delta = rowsum(grad_out out) - grad_lse, [B, H, M]. WITH_CAPTURES: behind it grad_lse, and in `largest` the bits
    of the largest finite magnitude of both gradients."""
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    b64 = tl.cast(b, tl.int64)
    h64 = tl.cast(h, tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < M
    rows64 = rows.to(tl.int64)
    x = load_rows(out + h64 * out_strides.h, b64 * out_strides.b + rows64 * out_strides.n, inside, DV, out_strides.d,
                  BLOCK_DV, EVEN)  # fmt: skip
    grad = load_rows(grad_out + h64 * grad_strides.h, b64 * grad_strides.b + rows64 * grad_strides.n, inside, DV,
                     grad_strides.d, BLOCK_DV, EVEN)  # fmt: skip
    at = b64 * grad_lse_strides.b + h64 * grad_lse_strides.h + rows64 * grad_lse_strides.n
    row_grad_lse = tl.load(grad_lse + at, mask=inside, other=0.0)
    value = tl.sum(x.to(tl.float32) * grad.to(tl.float32), 1) - row_grad_lse
    tl.store(delta + (b64 * H + h) * M + rows, value, mask=inside)
    if WITH_CAPTURES:
        tl.store(delta + (tl.num_programs(1) + b64 * H + h) * M + rows, row_grad_lse, mask=inside)
        most = tl.maximum(tl.max(largest_of(grad.to(tl.float32)), 1), largest_of(row_grad_lse))
        tl.atomic_max(largest, tl.max(most, 0), sem="relaxed")


@triton.jit
def attention_sink_gradient(sinks, lse, delta, grad_sinks, B, H, M, padded, stride_sink, lse_strides,
                            BLOCK_M: tl.constexpr):  # fmt: skip
    """Of one head: minus the sum of delta, [B H, padded], weighted with the sink's share of each row."""
    h = tl.program_id(0).to(tl.int64)
    sink = tl.load(sinks + h * stride_sink)
    total = tl.zeros([BLOCK_M], tl.float32)
    for b in range(B):
        for start in range(0, M, BLOCK_M):
            rows = start + tl.arange(0, BLOCK_M)
            inside = rows < M
            b64 = tl.cast(b, tl.int64)
            at = lse + b64 * lse_strides.b + h * lse_strides.h + rows * lse_strides.n
            row_lse = tl.load(at, mask=inside, other=float("inf"))
            row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
            row_delta = tl.load(delta + (b64 * H + h) * padded + rows, mask=inside, other=0.0)
            total -= tl.exp2((sink - row_lse) * LOG2_E) * row_delta
    tl.store(grad_sinks + h, tl.sum(total, 0))


@triton.jit
def weights(score, lse, at, inside, is_full, mods):
    """P at some Positions, and where something is seen: in full tiles whatever the mask says. lse: inf for rows that
    see nothing."""
    keep = inside
    if mods.MASK is not None:
        keep = keep & (mods.MASK(at.b, at.h, at.q_idx, at.kv_idx, mods.captures) | is_full)
    if mods.SCORE is not None:
        score = mods.SCORE(score, at.b, at.h, at.q_idx, at.kv_idx, mods.captures)
    return tl.exp2((tl.where(keep, score, float("-inf")) - lse) * LOG2_E), keep


@triton.jit
def weights_and_gradient(s, dp, lse, delta, scale, at, inside, is_full, mods, Q_AXIS: tl.constexpr,
                         WITH_CAPTURES: tl.constexpr):  # fmt: skip
    """P, and the gradient of the products. s and dp: query key^T and grad_out value^T, either way round (Q_AXIS: the
    one that queries run along)."""
    score = s * scale
    p, keep = weights(score, lse, at, inside, is_full, mods)
    ds = p * (dp - delta)
    if mods.SCORE is not None:
        ds = mods.SCORE_GRAD(score, at.b, at.h, at.q_idx, at.kv_idx, mods.captures, mods.grads, ds, keep, Q_AXIS,
                             WITH_CAPTURES)  # fmt: skip
    return p, ds


@triton.jit
def head_of(base, strides, b, h):
    """The rows of one head of a batch entry."""
    return Rows(base + b * strides.b + h * strides.h, strides)


@triton.jit
def head_of_keys(base, strides, b, h):
    """The same, added up in the order that the machine code of :func:`gradient_of_keys` is made from."""
    return Rows(base + h * strides.h + b * strides.b, strides)


@triton.jit
def load_of_head(x, rows64, inside, size, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    return load_rows(x.base, rows64 * x.strides.n, inside, size, x.strides.d, BLOCK, EVEN)


@triton.jit
def rows_of(statistics, b, h, rows, inside, sizes):
    """lse and delta of some rows of queries."""
    strides = statistics.strides
    at = tl.cast(b, tl.int64) * strides.b + tl.cast(h, tl.int64) * strides.h + rows.to(tl.int64) * strides.n
    lse = tl.load(statistics.lse + at, mask=inside, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    at = statistics.delta + (tl.cast(b, tl.int64) * sizes.H + h) * sizes.M + rows
    return lse, tl.load(at, mask=inside, other=0.0)


@triton.jit
def walk_queries(dk, dv, keys, tiles, b, h, query, grad_out, statistics, sizes, mods, TILE: tl.constexpr):
    """For a tile of keys: the tiles of queries of one head. Products stand with keys first, so that what comes of them
    is already the way round in which dK and dV take it."""
    for i in range(tiles.met.partial + tiles.met.full):
        start, end = tile_of_both(i, tiles, TILE.SHORT)
        rows = start + tl.arange(0, TILE.SHORT)
        inside = rows < end
        rows64 = rows.to(tl.int64)
        q = load_of_head(query, rows64, inside, sizes.D, TILE.BLOCK_D, TILE.EVEN)
        grad = load_of_head(grad_out, rows64, inside, sizes.DV, TILE.BLOCK_DV, TILE.EVEN)
        lse, delta = rows_of(statistics, b, h, rows, inside, sizes)
        s = tl.dot(keys.k, tl.trans(q), input_precision=TILE.PRECISION)
        dp = tl.dot(keys.v, tl.trans(grad), input_precision=TILE.PRECISION)
        p, ds = weights_and_gradient(
            s, dp, lse[None, :], delta[None, :], sizes.scale, Positions(b, h, rows[None, :], keys.cols[:, None]),
            keys.inside[:, None] & inside[None, :], i >= tiles.met.partial, mods, 1, False)  # fmt: skip
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=TILE.PRECISION)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=TILE.PRECISION)
    return dk, dv


@triton.jit
def walked_keys(i, tiles, key, value, sizes, TILE: tl.constexpr):
    """The i-th tile."""
    start, end = tile_of_both(i, tiles, TILE.SHORT)
    cols = start + tl.arange(0, TILE.SHORT)
    inside = cols < end
    cols64 = cols.to(tl.int64)
    k = load_of_head(key, cols64, inside, sizes.D, TILE.BLOCK_D, TILE.EVEN)
    v = load_of_head(value, cols64, inside, sizes.DV, TILE.BLOCK_DV, TILE.EVEN)
    return Keys(k, v, cols, inside)


@triton.jit
def exact_delta(queries, tiles, b, h, key, value, sizes, mods, TILE: tl.constexpr):
    """queries.delta + rowsum(P dP) / rowsum(P), of the same products as in :func:`walk_keys`.

    With a log-sum-exp of hundreds P is off by its rounding, all of a row by the same factor, and dP - delta must sum to
    0 over what P is. Where a sink has more than that of a row, rowsum(P) is not 1, and nothing is divided."""
    total = tl.zeros_like(queries.lse)
    sums = tl.zeros_like(queries.lse)
    for i in range(tiles.met.partial + tiles.met.full):
        x = walked_keys(i, tiles, key, value, sizes, TILE)
        s = tl.dot(queries.q, tl.trans(x.k), input_precision=TILE.PRECISION)
        dp = tl.dot(queries.grad, tl.trans(x.v), input_precision=TILE.PRECISION)
        p, _ = weights(
            s * sizes.scale, queries.lse[:, None], Positions(b, h, queries.rows[:, None], x.cols[None, :]),
            queries.inside[:, None] & x.inside[None, :], i >= tiles.met.partial, mods)  # fmt: skip
        total += tl.sum(p, 1)
        sums += tl.sum(p * dp, 1)
    rounding = (tl.abs(queries.lse) + 4.0) * (2.0**-20)
    return queries.delta + tl.where((total > 0.0) & (tl.abs(total - 1.0) <= rounding), sums / total, sums)


@triton.jit
def walk_keys(dq, queries, tiles, b, h, key, value, sizes, mods, TILE: tl.constexpr):
    """For a tile of queries: its tiles of keys."""
    for i in range(tiles.met.partial + tiles.met.full):
        x = walked_keys(i, tiles, key, value, sizes, TILE)
        s = tl.dot(queries.q, tl.trans(x.k), input_precision=TILE.PRECISION)
        dp = tl.dot(queries.grad, tl.trans(x.v), input_precision=TILE.PRECISION)
        p, ds = weights_and_gradient(
            s, dp, queries.lse[:, None], queries.delta[:, None], sizes.scale,
            Positions(b, h, queries.rows[:, None], x.cols[None, :]), queries.inside[:, None] & x.inside[None, :],
            i >= tiles.met.partial, mods, 0, TILE.WITH_CAPTURES)  # fmt: skip
        dq = tl.dot(ds.to(x.k.dtype), x.k, dq, input_precision=TILE.PRECISION)
    return dq


@triton.jit
def gradient_of_keys(pid, tensors, sizes, strides, q_strides, lengths, mask, mods, TILE: tl.constexpr):
    """dK and dV of one tile, summed over the heads and batch entries that share it."""
    n_tiles = tl.cdiv(sizes.N, mask.kv_block) * tl.cdiv(tl.minimum(mask.kv_block, sizes.N), TILE.LONG)
    tile = pid % n_tiles
    h_kv = pid // n_tiles % sizes.H_kv
    b_kv = pid // n_tiles // sizes.H_kv
    number, col0, col_end = tile_in_blocks(tile, mask.kv_block, sizes.N, TILE.LONG)
    cols = col0 + tl.arange(0, TILE.LONG)
    exists = cols < col_end
    cols64 = cols.to(tl.int64)
    b_kv64 = tl.cast(b_kv, tl.int64)
    h_kv64 = tl.cast(h_kv, tl.int64)
    key = head_of_keys(tensors.key, strides.key, b_kv64, h_kv64)
    k = load_of_head(key, cols64, exists, sizes.D, TILE.BLOCK_D, TILE.EVEN)
    value = head_of_keys(tensors.value, strides.value, b_kv64, h_kv64)
    v = load_of_head(value, cols64, exists, sizes.DV, TILE.BLOCK_DV, TILE.EVEN)
    dk = tl.zeros([TILE.LONG, TILE.BLOCK_D], tl.float32)
    dv = tl.zeros([TILE.LONG, TILE.BLOCK_DV], tl.float32)
    is_used = cols < 0
    partial, full = lists_of(tensors.q_lists, q_strides)
    statistics = Statistics(tensors.lse, tensors.delta, strides.lse)
    sharing = sizes.B // sizes.B_kv  # 1, or all entries
    for i in range(sharing * sizes.group):
        b = b_kv * sharing + i // sizes.group
        h = h_kv * sizes.group + i % sizes.group
        b64 = tl.cast(b, tl.int64)
        h64 = tl.cast(h, tl.int64)
        kv_end = length_of(tensors.kv_lengths, lengths.stride, b, sizes.N, lengths.is_given)
        col_inside = exists & (cols < kv_end)
        is_used = is_used | col_inside
        met = tiles_met(b, h, number, col0, tl.minimum(col0 + TILE.LONG, col_end) - 1, sizes.M, partial, full,
                        mask.q_block, mask.band_right, mask.band_left, mask.band_exact, mods.MASK is not None,
                        TILE.SHORT)  # fmt: skip
        query = head_of(tensors.query, strides.query, b64, h64)
        grad_out = head_of(tensors.grad_out, strides.grad_out, b64, h64)
        tiles = BothLists(met, indices_of(b, h, number, partial), partial.strides.indices_i,
                          indices_of(b, h, number, full), full.strides.indices_i, mask.q_block, sizes.M)  # fmt: skip
        keys = Keys(k, v, cols, col_inside)
        dk, dv = walk_queries(dk, dv, keys, tiles, b, h, query, grad_out, statistics, sizes, mods, TILE)
    dk = tl.where(is_used[:, None], dk, 0.0)  # past every length keys and values may be no numbers
    grad_key = head_of_keys(tensors.grad_key, strides.grad_key, b_kv64, h_kv64)
    store_rows(grad_key.base, cols64 * strides.grad_key.n, dk * sizes.scale, exists, sizes.D, strides.grad_key.d,
               TILE.BLOCK_D, TILE.EVEN)  # fmt: skip
    grad_value = head_of_keys(tensors.grad_value, strides.grad_value, b_kv64, h_kv64)
    store_rows(grad_value.base, cols64 * strides.grad_value.n, dv, exists, sizes.DV, strides.grad_value.d,
               TILE.BLOCK_DV, TILE.EVEN)  # fmt: skip


@triton.jit
def gradient_of_queries(pid, tensors, sizes, strides, kv_strides, lengths, mask, mods, TILE: tl.constexpr):
    """dQ of one tile, and what it adds to captured tensors' gradients."""
    n_tiles = tl.cdiv(sizes.M, mask.q_block) * tl.cdiv(tl.minimum(mask.q_block, sizes.M), TILE.LONG)
    tile = n_tiles - 1 - pid % n_tiles  # under a causal mask the last have the most to do
    h = pid // n_tiles % sizes.H
    b = pid // n_tiles // sizes.H
    number, row0, row_end = tile_in_blocks(tile, mask.q_block, sizes.M, TILE.LONG)
    rows = row0 + tl.arange(0, TILE.LONG)
    row_inside = rows < row_end
    rows64 = rows.to(tl.int64)
    b64 = tl.cast(b, tl.int64)
    h64 = tl.cast(h, tl.int64)
    h_kv64 = (h // sizes.group).to(tl.int64)
    q = load_of_head(head_of(tensors.query, strides.query, b64, h64), rows64, row_inside, sizes.D, TILE.BLOCK_D,
                     TILE.EVEN)  # fmt: skip
    grad = load_of_head(head_of(tensors.grad_out, strides.grad_out, b64, h64), rows64, row_inside, sizes.DV,
                        TILE.BLOCK_DV, TILE.EVEN)  # fmt: skip
    lse, delta = rows_of(Statistics(tensors.lse, tensors.delta, strides.lse), b, h, rows, row_inside, sizes)
    queries = Queries(q, grad, lse, delta, rows, row_inside)
    kv_end = length_of(tensors.kv_lengths, lengths.stride, b, sizes.N, lengths.is_given)
    partial, full = lists_of(tensors.kv_lists, kv_strides)
    met = tiles_met(b, h, number, row0, tl.minimum(row0 + TILE.LONG, row_end) - 1, kv_end, partial, full,
                    mask.kv_block, mask.band_left, mask.band_right, mask.band_exact, mods.MASK is not None,
                    TILE.SHORT)  # fmt: skip
    key = head_of(tensors.key, strides.key, b64, h_kv64)
    value = head_of(tensors.value, strides.value, b64, h_kv64)
    dq = tl.zeros([TILE.LONG, TILE.BLOCK_D], tl.float32)
    tiles = BothLists(met, indices_of(b, h, number, partial), partial.strides.indices_i,
                      indices_of(b, h, number, full), full.strides.indices_i, mask.kv_block, kv_end)  # fmt: skip
    if TILE.WITH_CAPTURES:
        at = tensors.delta + ((sizes.B + b64) * sizes.H + h) * sizes.M + rows
        grad_lse = tl.load(at, mask=row_inside, other=0.0)
        queries = Queries(queries.q, queries.grad, queries.lse, -grad_lse, rows, row_inside)
        delta = exact_delta(queries, tiles, b, h, key, value, sizes, mods, TILE)
        queries = Queries(queries.q, queries.grad, queries.lse, delta, rows, row_inside)
    dq = walk_keys(dq, queries, tiles, b, h, key, value, sizes, mods, TILE)
    grad_query = head_of(tensors.grad_query, strides.grad_query, b64, h64)
    store_rows(grad_query.base, rows64 * strides.grad_query.n, dq * sizes.scale, row_inside, sizes.D,
               strides.grad_query.d, TILE.BLOCK_D, TILE.EVEN)  # fmt: skip


@triton.jit
def attention_backward(tensors, sizes, kv_programs, strides, q_strides, kv_strides, lengths, mask, mods,
                       TILE: tl.constexpr):  # fmt: skip
    """A program has LONG keys and walks queries by SHORT, or has LONG queries and walks keys by SHORT."""
    pid = tl.program_id(0)
    if pid < kv_programs:
        gradient_of_keys(pid, tensors, sizes, strides, q_strides, lengths, mask, mods, TILE)
    else:
        gradient_of_queries(pid - kv_programs, tensors, sizes, strides, kv_strides, lengths, mask, mods, TILE)


# --- Plans ---

# head size -> (short, long, stages, warps)
_16 = {
    90: {64: (32, 128, 3, 4), 128: (64, 64, 2, 4), 256: (64, 64, 1, 8)},
    80: {64: (64, 128, 3, 8), 128: (32, 64, 2, 4), 256: (32, 32, 1, 4)},
}
_32 = {64: (32, 32, 2, 4), 128: (16, 32, 2, 4), 256: (16, 16, 1, 4), 512: (16, 16, 1, 8)}
LAYOUTS = ("aligned", "strided")
_BLOCK = 1024  # of gradients of captured tensors


# Where addresses of every element, or of captured tensors', take registers.
_SMALL = {64: (32, 64, 2, 8), 128: (32, 64, 2, 8), 256: (32, 32, 1, 8), 512: (16, 16, 1, 8)}


def _config(short: int, long: int, stages: int, warps: int) -> Config:
    shape = dict(short=short, long=long, num_stages=stages, num_warps=warps)
    return Config(f"backward_{short}x{long}_s{stages}_w{warps}", shape)


def _setting(problem: Problem, point: Point) -> Config:
    size = point.head.size
    if point.dtype == "fp32":
        return _config(*_32[size])
    # A table of scores: with large tiles the compiler for Ampere keeps none of its addresses in registers.
    has_table = point.arch < 90 and any(c.rank > 2 for c in problem.grad_captures)
    if point.layout == "strided" or point.captures != "none" or has_table:
        return _config(*_SMALL[size])
    return _config(*_16[80 if point.arch < 90 else 90][size])


def kernel(problem: Problem, mods: Mods, heads: tuple[Head, ...], layouts: tuple[str, ...] = LAYOUTS) -> Kernel:
    op = problem.backward_op
    grads = problem.grad_captures

    def plan(point: Point) -> Plan | None:
        c = point.config
        if not problem.makes_sense(point) or not takes_layout(point.layout, point.head, heads):
            return None
        if c.name != _setting(problem, point).name:
            return None
        names = ("query", "key", "value", "grad_0", "result_0", "grad_query", "grad_key", "grad_value")
        ways = {} if not grads else {"captures": (int(point.captures != "none"),)}
        time = tile_time(c.long, c.short, point.head, ITEMSIZE[point.dtype], 1 if point.layout == "aligned" else 4)
        M, N, heads_ = op.local("M"), op.local("N"), op.local("B") * op.local("H")
        steps = ceil_div(ceil_div(M, c.long) * ceil_div(N, c.short) * heads_ * 5, device.sm_count * 2)
        return Plan(
            constraints=(
                *problem.constraints(op, point, names),
                require(~op.local("has_pages"), "key and value without pages (they have no gradient)"),
                require(kv_programs(problem, c.long) + q_programs(problem, c.long) < 2**31, "fewer tiles"),
            ),
            serves=problem.serves(point) | ways,
            launches=tuple(_launches(problem, mods, point)),
            cost=8_000_000 + steps * time,
            buffers=tuple(_buffers(problem, point)),
            general=point.layout == "strided",
        )

    axes = problem.axes(heads, layouts, tf32=True) | {"captures": ("none", "wanted") if grads else ("none",)}
    configs = {}
    for arch in (80, 90):
        tables = (_16[arch], _SMALL, _32)
        configs[arch] = distinct(_config(*setting) for table in tables for setting in of_heads(table, heads))
    return Kernel(f"{problem.name}_backward", op, axes, configs, plan)


def kv_programs(problem: Problem, long: int) -> Expr:
    op = problem.backward_op
    N, block = op.local("N"), op.int("kv_block")
    return ceil_div(N, block) * ceil_div(minimum(block, N), long) * op.local("H_kv") * tensor(op, "key").size(0)


def q_programs(problem: Problem, long: int) -> Expr:
    op = problem.backward_op
    return query_tiles(op, long) * op.local("B") * op.local("H")


def _buffers(problem: Problem, point: Point) -> list[Buffer]:
    op = problem.backward_op
    rows = op.local("B") * op.local("H") * op.local("M") * 4
    if point.captures == "none":
        return [Buffer(rows)]
    return [Buffer(rows * 2), Buffer(4), *(Buffer(_numel(op, c) * WORDS * 8) for c in problem.summed_captures)]


def _numel(op: object, c: Capture) -> Expr:
    size = as_expr(1)
    for d in range(c.rank):
        size = size * tensor(op, c.name).size(d)  # type: ignore[arg-type]
    return size


def _launches(problem: Problem, mods: Mods, point: Point) -> list[Launch]:
    c, op = point.config, problem.backward_op
    B, H, M = op.local("B"), op.local("H"), op.local("M")
    shared = row_arguments(problem, point)
    rows = 8 if point.head.is_wide else 32
    of_delta: dict[str, Arg | Bundle] = {
        "delta": Scratch(0, "fp32"),
        "largest": Scratch(0 if point.captures == "none" else 1, "i32"),
        "WITH_CAPTURES": Const(point.captures != "none"),
        "BLOCK_M": Const(rows),
    }
    delta = Launch(attention_delta, pick(attention_delta, shared | of_delta), (ceil_div(M, rows), B * H, 1))
    main = Launch(
        attention_backward,
        _arguments(problem, mods, point),
        (kv_programs(problem, c.long) + q_programs(problem, c.long), 1, 1),
        num_warps=c.num_warps,
        num_stages=c.num_stages,
        max_spill_bytes=8192 if point.layout == "strided" else 2048,
        options=UNFUSED,
    )
    before, after = capture_launches(problem, point)
    return [*before, delta, sink_launch(problem, point, Scratch(0, "fp32"), M), main, *after]


def pick(fn: Any, args: dict[str, Arg | Bundle]) -> dict[str, Arg | Bundle]:
    return {n: args[n] for n in fn.arg_names}


def sink_launch(problem: Problem, point: Point, delta: Scratch, padded: Expr) -> Launch:
    op = problem.backward_op
    args: dict[str, Arg | Bundle] = {
        "sinks": problem.pointer(op, "sinks"),
        "lse": problem.pointer(op, "result_1"),
        "delta": delta,
        "grad_sinks": problem.pointer(op, "grad_sinks"),
        **problem.sizes(op, ("B", "H", "M"), point),
        "padded": Int(padded),
        "stride_sink": problem.optional(op)["stride_sink"],
        "lse_strides": problem.row_strides(op, "result_1"),
        "BLOCK_M": Const(1024),
    }
    return Launch(attention_sink_gradient, args, (tensor(op, "sinks").size(0), 1, 1))


def capture_launches(problem: Problem, point: Point) -> tuple[list[Launch], list[Launch]]:
    """Zeros, before; and from the sums to the gradients, after."""
    op = problem.backward_op
    before, after = [], []
    block = Const(_BLOCK)
    sums = _sums(problem)
    if point.captures != "none":
        before.append(
            Launch(zero_gradient, {"buffer": Scratch(1, "i32"), "size": Int(1, "i64"), "BLOCK": block}, (1, 1, 1))
        )
    for c in problem.grad_captures:
        size = _numel(op, c)
        grid = (ceil_div(size, _BLOCK), 1, 1)
        common: dict[str, Arg] = {"size": Int(size, "i64"), "BLOCK": block}
        out = _gradient_of(problem, c)
        if point.captures == "none" or c.is_per_score:  # where no score reads an element, its gradient is 0
            before.append(Launch(zero_gradient, {"buffer": out} | common, grid))
            continue
        buffer = sums[c]
        words = {"buffer": buffer, "size": Int(size * WORDS, "i64"), "BLOCK": block}
        before.append(Launch(zero_gradient, words, (ceil_div(size * WORDS, _BLOCK), 1, 1)))
        after.append(
            Launch(finish_gradient, {"buffer": buffer, "largest": Scratch(1, "i32"), "out": out} | common, grid)
        )
    return before, after


def _sums(problem: Problem) -> dict[Capture, Scratch]:
    return {c: Scratch(2 + i, "i64") for i, c in enumerate(problem.summed_captures)}


def _gradient_of(problem: Problem, c: Capture) -> Pointer:
    return Pointer(tensor(problem.backward_op, f"grad_{c.name}"), c.dtype, aligned=False)


def row_arguments(problem: Problem, point: Point) -> dict[str, Arg | Bundle]:
    """The arguments, by name, of the launches that work out statistics of rows of queries."""
    op = problem.backward_op
    return {
        "out": problem.rows(op, "result_0", point),
        "grad_out": problem.rows(op, "grad_0", point),
        "grad_lse": problem.pointer(op, "grad_1"),
        **problem.sizes(op, ("B", "H", "M", "DV"), point),
        "out_strides": problem.strides(op, "result_0", point),
        "grad_strides": problem.strides(op, "grad_0", point),
        "grad_lse_strides": problem.row_strides(op, "grad_1"),
        "EVEN": Const(point.head.exact),
        "BLOCK_DV": Const(point.head.v),
    }


def _arguments(problem: Problem, mods: Mods, point: Point) -> dict[str, Arg | Bundle]:
    op, c = problem.backward_op, point.config
    optional = problem.optional(op)
    rows = {name: name for name in ("query", "key", "value", "grad_query", "grad_key", "grad_value")}
    rows["grad_out"] = "grad_0"
    if point.captures != "none":
        sums = _sums(problem)
        grads = {f"grad_{c.name}": sums.get(c) or _gradient_of(problem, c) for c in problem.grad_captures}
        mods = mods._replace(grads=bundle("Grads", {"largest": Scratch(1, "i32")} | grads))
    return {
        "tensors": BackwardTensors(
            **{name: problem.rows(op, of, point) for name, of in rows.items()},
            lse=problem.pointer(op, "result_1"),
            delta=Scratch(0, "fp32"),
            q_lists=problem.lists(op, "q"),
            kv_lists=problem.lists(op, "kv"),
            kv_lengths=problem.pointer(op, "kv_lengths"),
        ),
        "sizes": BackwardSizes(**problem.sizes(op, BackwardSizes._fields, point)),
        "kv_programs": Int(kv_programs(problem, c.long)),
        "strides": BackwardStrides(
            **{name: problem.strides(op, of, point) for name, of in rows.items()},
            lse=problem.row_strides(op, "result_1"),
        ),
        "q_strides": problem.list_strides(op, "q"),
        "kv_strides": problem.list_strides(op, "kv"),
        "lengths": Lengths(optional["stride_length"], optional["has_lengths"]),
        "mask": problem.mask(op),
        "mods": mods,
        "TILE": Const(
            BackwardTile(
                SHORT=c.short,
                LONG=c.long,
                BLOCK_D=point.head.qk,
                BLOCK_DV=point.head.v,
                EVEN=point.head.exact,
                PRECISION=point.precision,
                WITH_CAPTURES=point.captures != "none",
            )
        ),
    }
