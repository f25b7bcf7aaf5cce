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
bias of hundreds differ by 2^-15, and where the bias grows with the distance, as alibi does, the gradient by 0.2 %. So
nothing is fused there.
"""

from typing import Any

import triton
import triton.language as tl

from tk.aot.expr import Expr, as_expr, ceil_div, device, maximum, minimum
from tk.aot.spec import (
    ITEMSIZE,
    Arg,
    Buffer,
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
from tk.kernels.attention.forward import length_of, query_tiles
from tk.kernels.attention.gradients import WORDS, finish_gradient, largest_of, zero_gradient
from tk.kernels.attention.operands import load_rows, store_rows
from tk.kernels.attention.problem import PRECISIONS, Capture, Head, Problem, takes_layout, tensor, tile_time
from tk.kernels.attention.softmax import LOG2_E
from tk.kernels.attention.walk import band_tiles, count_tiles, tile_in_blocks, tile_of_both

# --- The device functions ---


@triton.jit
def attention_delta(out0, grad_0, grad_1, delta, largest, H, M, DV, stride_ob, stride_oh, stride_om, stride_od,
                    stride_gb, stride_gh, stride_gm, stride_gd, stride_grad_lse_b, stride_grad_lse_h, stride_grad_lse_m,
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
    out = load_rows(out0 + h64 * stride_oh, b64 * stride_ob + rows64 * stride_om, inside, DV, stride_od, BLOCK_DV, EVEN)
    grad = load_rows(grad_0 + h64 * stride_gh, b64 * stride_gb + rows64 * stride_gm, inside, DV, stride_gd, BLOCK_DV,
                     EVEN)  # fmt: skip
    at = b64 * stride_grad_lse_b + h64 * stride_grad_lse_h + rows64 * stride_grad_lse_m
    grad_lse = tl.load(grad_1 + at, mask=inside, other=0.0)
    value = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1) - grad_lse
    tl.store(delta + (b64 * H + h) * M + rows, value, mask=inside)
    if WITH_CAPTURES:
        tl.store(delta + (tl.num_programs(1) + b64 * H + h) * M + rows, grad_lse, mask=inside)
        most = tl.maximum(tl.max(largest_of(grad.to(tl.float32)), 1), largest_of(grad_lse))
        tl.atomic_max(largest, tl.max(most, 0), sem="relaxed")


@triton.jit
def attention_sink_gradient(sinks, out1, delta, grad_sinks, B, H, M, padded, stride_sink, stride_lb, stride_lh,
                            stride_lm, BLOCK_M: tl.constexpr):  # fmt: skip
    """Of one head: minus the sum of delta, [B H, padded], weighted with the sink's share of each row."""
    h = tl.program_id(0).to(tl.int64)
    sink = tl.load(sinks + h * stride_sink)
    total = tl.zeros([BLOCK_M], tl.float32)
    for b in range(B):
        for start in range(0, M, BLOCK_M):
            rows = start + tl.arange(0, BLOCK_M)
            inside = rows < M
            b64 = tl.cast(b, tl.int64)
            row_lse = tl.load(
                out1 + b64 * stride_lb + h * stride_lh + rows * stride_lm, mask=inside, other=float("inf")
            )
            row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
            row_delta = tl.load(delta + (b64 * H + h) * padded + rows, mask=inside, other=0.0)
            total -= tl.exp2((sink - row_lse) * LOG2_E) * row_delta
    tl.store(grad_sinks + h, tl.sum(total, 0))


@triton.jit
def weights(score, lse, b, h, q_idx, kv_idx, inside, is_full, captures, SCORE_MOD: tl.constexpr,
            MASK_MOD: tl.constexpr, HAS_SCORE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """P, and where something is seen: in full tiles whatever the mask says. lse: in units of base 2, inf for rows that
    see nothing."""
    keep = inside
    if MASKED:
        keep = keep & (MASK_MOD(b, h, q_idx, kv_idx, captures) | is_full)
    if HAS_SCORE:
        x = SCORE_MOD(score, b, h, q_idx, kv_idx, captures) * LOG2_E
    else:
        x = score * LOG2_E
    return tl.exp2(tl.where(keep, x, float("-inf")) - lse), keep


@triton.jit
def weights_and_gradient(s, dp, lse, delta, scale, b, h, q_idx, kv_idx, inside, is_full, captures, grads,
                         SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, SCORE_GRAD: tl.constexpr,
                         HAS_SCORE: tl.constexpr, MASKED: tl.constexpr, Q_AXIS: tl.constexpr,
                         WITH_CAPTURES: tl.constexpr):  # fmt: skip
    """P, and the gradient of the products. s and dp: query key^T and grad_out value^T, either way round (Q_AXIS: the
    one that queries run along)."""
    score = s * scale
    p, keep = weights(score, lse, b, h, q_idx, kv_idx, inside, is_full, captures, SCORE_MOD, MASK_MOD, HAS_SCORE,
                      MASKED)  # fmt: skip
    ds = p * (dp - delta)
    if HAS_SCORE:
        ds = SCORE_GRAD(score, b, h, q_idx, kv_idx, captures, grads, ds, keep, Q_AXIS, WITH_CAPTURES)
    return p, ds


@triton.jit
def rows_of(lse, delta, b, h, H, M, rows, inside, stride_lb, stride_lh, stride_lm):
    """The statistics of some query rows. lse: in units of base 2, inf where there is nothing to be seen."""
    at = tl.cast(b, tl.int64) * stride_lb + tl.cast(h, tl.int64) * stride_lh + rows.to(tl.int64) * stride_lm
    row_lse = tl.load(lse + at, mask=inside, other=float("inf"))
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse) * LOG2_E
    row_delta = tl.load(delta + (tl.cast(b, tl.int64) * H + h) * M + rows, mask=inside, other=0.0)
    return row_lse, row_delta


@triton.jit
def walk_queries(dk, dv, k, v, partial, count, b, h, cols, col_inside, query, grad_out, lse, delta, captures, scale,
                 indices, stride_i, full_indices, stride_fi, q_block, has_lists, lo, full_lo, full_hi, H, M, D,
                 DV, stride_qm, stride_qd, stride_gm, stride_gd, stride_lb, stride_lh, stride_lm,
                 SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, SCORE_GRAD: tl.constexpr, HAS_SCORE: tl.constexpr,
                 HAS_MASK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """For a tile of keys: `count` tiles of queries of one head, `partial` of them in the first list. Products stand
    with keys first, so that what comes of them is already the way round in which dK and dV take it."""
    for i in range(count):
        start, end = tile_of_both(i, partial, indices, stride_i, full_indices, stride_fi, q_block, M, has_lists, lo,
                                  full_lo, full_hi, BLOCK_M)  # fmt: skip
        rows = start + tl.arange(0, BLOCK_M)
        inside = rows < end
        rows64 = rows.to(tl.int64)
        q = load_rows(query, rows64 * stride_qm, inside, D, stride_qd, BLOCK_D, EVEN)
        grad = load_rows(grad_out, rows64 * stride_gm, inside, DV, stride_gd, BLOCK_DV, EVEN)
        row_lse, row_delta = rows_of(lse, delta, b, h, H, M, rows, inside, stride_lb, stride_lh, stride_lm)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        p, ds = weights_and_gradient(
            s, dp, row_lse[None, :], row_delta[None, :], scale, b, h, rows[None, :], cols[:, None],
            col_inside[:, None] & inside[None, :], i >= partial, captures, (), SCORE_MOD, MASK_MOD, SCORE_GRAD,
            HAS_SCORE, HAS_MASK, 1, False)  # fmt: skip
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def keys_and_values(i, partial, key, value, kv_end, indices, stride_i, full_indices, stride_fi, kv_block, has_lists, lo,
                    full_lo, full_hi, D, DV, stride_kn, stride_kd, stride_vn, stride_vd, EVEN: tl.constexpr,
                    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """The i-th tile: its positions, which of them are, its keys and values."""
    start, end = tile_of_both(i, partial, indices, stride_i, full_indices, stride_fi, kv_block, kv_end, has_lists, lo,
                              full_lo, full_hi, BLOCK_N)  # fmt: skip
    cols = start + tl.arange(0, BLOCK_N)
    inside = cols < end
    cols64 = cols.to(tl.int64)
    k = load_rows(key, cols64 * stride_kn, inside, D, stride_kd, BLOCK_D, EVEN)
    v = load_rows(value, cols64 * stride_vn, inside, DV, stride_vd, BLOCK_DV, EVEN)
    return cols, inside, k, v


@triton.jit
def exact_delta(row_delta, q, grad, row_lse, partial, count, b, h, rows, row_inside, key, value, kv_end, captures,
                scale, indices, stride_i, full_indices, stride_fi, kv_block, has_lists, lo, full_lo, full_hi, D, DV,
                stride_kn, stride_kd, stride_vn, stride_vd, SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
                HAS_SCORE: tl.constexpr, HAS_MASK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
                BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """row_delta + rowsum(P dP) / rowsum(P), of the same products as in :func:`walk_keys`.

    With a log-sum-exp of hundreds P is off by its rounding, all of a row by the same factor, and dP - delta must sum to
    0 over what P is. Where a sink has more than that of a row, rowsum(P) is not 1, and nothing is divided."""
    total = tl.zeros_like(row_lse)
    sums = tl.zeros_like(row_lse)
    for i in range(count):
        cols, inside, k, v = keys_and_values(
            i, partial, key, value, kv_end, indices, stride_i, full_indices, stride_fi, kv_block, has_lists, lo,
            full_lo, full_hi, D, DV, stride_kn, stride_kd, stride_vn, stride_vd, EVEN, BLOCK_N, BLOCK_D,
            BLOCK_DV)  # fmt: skip
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        p, _ = weights(s * scale, row_lse[:, None], b, h, rows[:, None], cols[None, :],
                       row_inside[:, None] & inside[None, :], i >= partial, captures, SCORE_MOD, MASK_MOD, HAS_SCORE,
                       HAS_MASK)  # fmt: skip
        total += tl.sum(p, 1)
        sums += tl.sum(p * dp, 1)
    rounding = (tl.abs(row_lse) + 4.0) * (2.0**-21)
    return row_delta + tl.where((total > 0.0) & (tl.abs(total - 1.0) <= rounding), sums / total, sums)


@triton.jit
def walk_keys(dq, q, grad, row_lse, row_delta, partial, count, b, h, rows, row_inside, key, value, kv_end, captures,
              grads, scale, indices, stride_i, full_indices, stride_fi, kv_block, has_lists, lo, full_lo, full_hi, D,
              DV, stride_kn, stride_kd, stride_vn, stride_vd, SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
              SCORE_GRAD: tl.constexpr, HAS_SCORE: tl.constexpr, HAS_MASK: tl.constexpr,
              WITH_CAPTURES: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
              BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """For a tile of queries: `count` tiles of keys, `partial` of them in the first list."""
    for i in range(count):
        cols, inside, k, v = keys_and_values(
            i, partial, key, value, kv_end, indices, stride_i, full_indices, stride_fi, kv_block, has_lists, lo,
            full_lo, full_hi, D, DV, stride_kn, stride_kd, stride_vn, stride_vd, EVEN, BLOCK_N, BLOCK_D,
            BLOCK_DV)  # fmt: skip
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        p, ds = weights_and_gradient(
            s, dp, row_lse[:, None], row_delta[:, None], scale, b, h, rows[:, None], cols[None, :],
            row_inside[:, None] & inside[None, :], i >= partial, captures, grads, SCORE_MOD, MASK_MOD, SCORE_GRAD,
            HAS_SCORE, HAS_MASK, 0, WITH_CAPTURES)  # fmt: skip
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def gradient_of_keys(pid, query, key, value, grad_0, out1, delta, grad_key, grad_value, q_counts, q_indices,
                     full_q_counts, full_q_indices, kv_lengths, B, B_kv, H, H_kv, M, N, D, DV, group, scale,
                     stride_qb, stride_qh, stride_qm, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
                     stride_vb, stride_vh, stride_vn, stride_vd, stride_gb, stride_gh, stride_gm, stride_gd,
                     stride_yb, stride_yh, stride_yn, stride_yd, stride_zb, stride_zh, stride_zn, stride_zd,
                     stride_lb, stride_lh, stride_lm,
                     stride_qcb, stride_qch, stride_qcn, stride_qib, stride_qih, stride_qin, stride_qii, q_mask_b,
                     q_mask_h, stride_fqcb, stride_fqch, stride_fqcn, stride_fqib, stride_fqih, stride_fqin,
                     stride_fqii, full_q_b, full_q_h, stride_length, has_lengths, q_block, kv_block, band_left,
                     band_right, band_exact, captures, SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
                     SCORE_GRAD: tl.constexpr, HAS_SCORE: tl.constexpr, HAS_MASK: tl.constexpr, EVEN: tl.constexpr,
                     PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                     BLOCK_DV: tl.constexpr):  # fmt: skip
    """dK and dV of one tile, summed over the heads and batch entries that share it."""
    n_tiles = tl.cdiv(N, kv_block) * tl.cdiv(tl.minimum(kv_block, N), BLOCK_N)
    tile = pid % n_tiles
    h_kv = pid // n_tiles % H_kv
    b_kv = pid // n_tiles // H_kv
    number, col0, col_end = tile_in_blocks(tile, kv_block, N, BLOCK_N)
    cols = col0 + tl.arange(0, BLOCK_N)
    exists = cols < col_end
    cols64 = cols.to(tl.int64)
    b_kv64 = tl.cast(b_kv, tl.int64)
    h_kv64 = tl.cast(h_kv, tl.int64)
    k = load_rows(key + h_kv64 * stride_kh + b_kv64 * stride_kb, cols64 * stride_kn, exists, D, stride_kd, BLOCK_D,
                  EVEN)  # fmt: skip
    v = load_rows(value + h_kv64 * stride_vh + b_kv64 * stride_vb, cols64 * stride_vn, exists, DV, stride_vd, BLOCK_DV,
                  EVEN)  # fmt: skip
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    is_used = cols < 0
    has_lists = ((q_mask_b > 0) & (q_mask_h > 0)).to(tl.int32)
    sharing = B // B_kv  # 1, or all entries
    for i in range(sharing * group):
        b = b_kv * sharing + i // group
        h = h_kv * group + i % group
        b64 = tl.cast(b, tl.int64)
        h64 = tl.cast(h, tl.int64)
        kv_end = length_of(kv_lengths, stride_length, b, N, has_lengths)
        col_inside = exists & (cols < kv_end)
        is_used = is_used | col_inside
        lo, full_lo, full_hi, hi = band_tiles(col0, tl.minimum(col0 + BLOCK_N, col_end) - 1, M, band_right, band_left,
                                              band_exact, HAS_MASK, BLOCK_M)  # fmt: skip
        partial = count_tiles(b, h, number, q_counts, stride_qcb, stride_qch, stride_qcn, q_mask_b, q_mask_h, q_block,
                              BLOCK_M)  # fmt: skip
        full = count_tiles(b, h, number, full_q_counts, stride_fqcb, stride_fqch, stride_fqcn, full_q_b, full_q_h,
                           q_block, BLOCK_M)  # fmt: skip
        if has_lists == 0:
            partial = full_lo - lo + hi - full_hi
            full = full_hi - full_lo
        q_head = query + b64 * stride_qb + h64 * stride_qh
        g_head = grad_0 + b64 * stride_gb + h64 * stride_gh
        at = q_indices + b64 * stride_qib + h64 * stride_qih + number * stride_qin
        full_at = full_q_indices + b64 * stride_fqib + h64 * stride_fqih + number * stride_fqin
        dk, dv = walk_queries(
            dk, dv, k, v, partial, partial + full, b, h, cols, col_inside, q_head, g_head, out1, delta, captures, scale,
            at, stride_qii, full_at, stride_fqii, q_block, has_lists, lo, full_lo, full_hi, H, M, D, DV,
            stride_qm, stride_qd, stride_gm, stride_gd, stride_lb, stride_lh, stride_lm, SCORE_MOD, MASK_MOD,
            SCORE_GRAD, HAS_SCORE, HAS_MASK, EVEN, PRECISION, BLOCK_M, BLOCK_D, BLOCK_DV)  # fmt: skip
    dk = tl.where(is_used[:, None], dk, 0.0)  # past every length keys and values may be no numbers
    store_rows(grad_key + h_kv64 * stride_yh + b_kv64 * stride_yb, cols64 * stride_yn, dk * scale, exists, D, stride_yd,
               BLOCK_D, EVEN)  # fmt: skip
    store_rows(grad_value + h_kv64 * stride_zh + b_kv64 * stride_zb, cols64 * stride_zn, dv, exists, DV, stride_zd,
               BLOCK_DV, EVEN)  # fmt: skip


@triton.jit
def gradient_of_queries(pid, query, key, value, grad_0, out1, delta, grad_query, kv_counts, kv_indices, full_counts,
                        full_indices, kv_lengths, B, H, M, N, D, DV, group, scale,
                        stride_qb, stride_qh, stride_qm, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
                        stride_vb, stride_vh, stride_vn, stride_vd, stride_gb, stride_gh, stride_gm, stride_gd,
                        stride_xb, stride_xh, stride_xm, stride_xd, stride_lb, stride_lh, stride_lm,
                        stride_cb, stride_ch, stride_cn, stride_ib, stride_ih, stride_in, stride_ii, mask_b, mask_h,
                        stride_fcb, stride_fch, stride_fcn, stride_fib, stride_fih, stride_fin, stride_fii, full_b,
                        full_h, stride_length, has_lengths, q_block, kv_block, band_left, band_right, band_exact,
                        captures, grads, SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, SCORE_GRAD: tl.constexpr,
                        HAS_SCORE: tl.constexpr, HAS_MASK: tl.constexpr, WITH_CAPTURES: tl.constexpr,
                        EVEN: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                        BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """dQ of one tile, and what it adds to captured tensors' gradients."""
    n_tiles = tl.cdiv(M, q_block) * tl.cdiv(tl.minimum(q_block, M), BLOCK_M)
    tile = n_tiles - 1 - pid % n_tiles  # under a causal mask the last have the most to do
    h = pid // n_tiles % H
    b = pid // n_tiles // H
    number, row0, row_end = tile_in_blocks(tile, q_block, M, BLOCK_M)
    rows = row0 + tl.arange(0, BLOCK_M)
    row_inside = rows < row_end
    rows64 = rows.to(tl.int64)
    b64 = tl.cast(b, tl.int64)
    h64 = tl.cast(h, tl.int64)
    h_kv64 = (h // group).to(tl.int64)
    q = load_rows(query + b64 * stride_qb + h64 * stride_qh, rows64 * stride_qm, row_inside, D, stride_qd, BLOCK_D,
                  EVEN)  # fmt: skip
    grad = load_rows(grad_0 + b64 * stride_gb + h64 * stride_gh, rows64 * stride_gm, row_inside, DV, stride_gd,
                     BLOCK_DV, EVEN)  # fmt: skip
    row_lse, row_delta = rows_of(out1, delta, b, h, H, M, rows, row_inside, stride_lb, stride_lh, stride_lm)
    kv_end = length_of(kv_lengths, stride_length, b, N, has_lengths)
    has_lists = ((mask_b > 0) & (mask_h > 0)).to(tl.int32)
    lo, full_lo, full_hi, hi = band_tiles(row0, tl.minimum(row0 + BLOCK_M, row_end) - 1, kv_end, band_left, band_right,
                                          band_exact, HAS_MASK, BLOCK_N)  # fmt: skip
    partial = count_tiles(b, h, number, kv_counts, stride_cb, stride_ch, stride_cn, mask_b, mask_h, kv_block, BLOCK_N)
    full = count_tiles(b, h, number, full_counts, stride_fcb, stride_fch, stride_fcn, full_b, full_h, kv_block,
                       BLOCK_N)  # fmt: skip
    if has_lists == 0:
        partial = full_lo - lo + hi - full_hi
        full = full_hi - full_lo
    k_head = key + b64 * stride_kb + h_kv64 * stride_kh
    v_head = value + b64 * stride_vb + h_kv64 * stride_vh
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    at = kv_indices + b64 * stride_ib + h64 * stride_ih + number * stride_in
    full_at = full_indices + b64 * stride_fib + h64 * stride_fih + number * stride_fin
    if WITH_CAPTURES:
        row_grad_lse = tl.load(delta + ((B + b64) * H + h) * M + rows, mask=row_inside, other=0.0)
        row_delta = exact_delta(
            -row_grad_lse, q, grad, row_lse, partial, partial + full, b, h, rows, row_inside, k_head, v_head, kv_end,
            captures, scale, at, stride_ii, full_at, stride_fii, kv_block, has_lists, lo, full_lo, full_hi, D, DV,
            stride_kn, stride_kd, stride_vn, stride_vd, SCORE_MOD, MASK_MOD, HAS_SCORE, HAS_MASK, EVEN, PRECISION,
            BLOCK_N, BLOCK_D, BLOCK_DV)  # fmt: skip
    dq = walk_keys(
        dq, q, grad, row_lse, row_delta, partial, partial + full, b, h, rows, row_inside, k_head, v_head, kv_end,
        captures, grads, scale, at, stride_ii, full_at, stride_fii, kv_block, has_lists, lo, full_lo, full_hi, D, DV,
        stride_kn, stride_kd, stride_vn, stride_vd, SCORE_MOD, MASK_MOD, SCORE_GRAD, HAS_SCORE, HAS_MASK,
        WITH_CAPTURES, EVEN, PRECISION, BLOCK_N, BLOCK_D, BLOCK_DV)  # fmt: skip
    store_rows(grad_query + b64 * stride_xb + h64 * stride_xh, rows64 * stride_xm, dq * scale, row_inside, D, stride_xd,
               BLOCK_D, EVEN)  # fmt: skip


@triton.jit
def attention_backward(query, key, value, grad_0, out1, delta, grad_query, grad_key, grad_value,
                       q_counts, q_indices, full_q_counts, full_q_indices, kv_counts, kv_indices, full_counts,
                       full_indices, kv_lengths, B, B_kv, H, H_kv, M, N, D, DV, group, scale, kv_programs,
                       stride_qb, stride_qh, stride_qm, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
                       stride_vb, stride_vh, stride_vn, stride_vd, stride_gb, stride_gh, stride_gm, stride_gd,
                       stride_xb, stride_xh, stride_xm, stride_xd, stride_yb, stride_yh, stride_yn, stride_yd,
                       stride_zb, stride_zh, stride_zn, stride_zd, stride_lb, stride_lh, stride_lm,
                       stride_qcb, stride_qch, stride_qcn, stride_qib, stride_qih, stride_qin, stride_qii, q_mask_b,
                       q_mask_h, stride_fqcb, stride_fqch, stride_fqcn, stride_fqib, stride_fqih, stride_fqin,
                       stride_fqii, full_q_b, full_q_h,
                       stride_cb, stride_ch, stride_cn, stride_ib, stride_ih, stride_in, stride_ii, mask_b, mask_h,
                       stride_fcb, stride_fch, stride_fcn, stride_fib, stride_fih, stride_fin, stride_fii, full_b,
                       full_h, stride_length, has_lengths, q_block, kv_block, band_left, band_right, band_exact,
                       captures, grads, SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, SCORE_GRAD: tl.constexpr,
                       HAS_SCORE: tl.constexpr, HAS_MASK: tl.constexpr, WITH_CAPTURES: tl.constexpr,
                       EVEN: tl.constexpr, PRECISION: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr,
                       BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """A program has LONG keys and walks queries by SHORT, or has LONG queries and walks keys by SHORT."""
    pid = tl.program_id(0)
    if pid < kv_programs:
        gradient_of_keys(
            pid, query, key, value, grad_0, out1, delta, grad_key, grad_value, q_counts, q_indices, full_q_counts,
            full_q_indices, kv_lengths, B, B_kv, H, H_kv, M, N, D, DV, group, scale, stride_qb, stride_qh, stride_qm,
            stride_qd, stride_kb, stride_kh, stride_kn, stride_kd, stride_vb, stride_vh, stride_vn, stride_vd,
            stride_gb, stride_gh, stride_gm, stride_gd, stride_yb, stride_yh, stride_yn, stride_yd, stride_zb,
            stride_zh, stride_zn, stride_zd, stride_lb, stride_lh, stride_lm, stride_qcb, stride_qch, stride_qcn,
            stride_qib, stride_qih, stride_qin, stride_qii, q_mask_b, q_mask_h, stride_fqcb, stride_fqch, stride_fqcn,
            stride_fqib, stride_fqih, stride_fqin, stride_fqii, full_q_b, full_q_h, stride_length, has_lengths,
            q_block, kv_block, band_left, band_right, band_exact, captures, SCORE_MOD, MASK_MOD, SCORE_GRAD, HAS_SCORE,
            HAS_MASK, EVEN, PRECISION, SHORT, LONG, BLOCK_D, BLOCK_DV)  # fmt: skip
    else:
        gradient_of_queries(
            pid - kv_programs, query, key, value, grad_0, out1, delta, grad_query, kv_counts, kv_indices, full_counts,
            full_indices, kv_lengths, B, H, M, N, D, DV, group, scale, stride_qb, stride_qh, stride_qm, stride_qd,
            stride_kb, stride_kh, stride_kn, stride_kd, stride_vb, stride_vh, stride_vn, stride_vd, stride_gb,
            stride_gh, stride_gm, stride_gd, stride_xb, stride_xh, stride_xm, stride_xd, stride_lb, stride_lh,
            stride_lm, stride_cb, stride_ch, stride_cn, stride_ib, stride_ih, stride_in, stride_ii, mask_b, mask_h,
            stride_fcb, stride_fch, stride_fcn, stride_fib, stride_fih, stride_fin, stride_fii, full_b, full_h,
            stride_length, has_lengths, q_block, kv_block, band_left, band_right, band_exact, captures, grads,
            SCORE_MOD, MASK_MOD, SCORE_GRAD, HAS_SCORE, HAS_MASK, WITH_CAPTURES, EVEN, PRECISION, LONG, SHORT, BLOCK_D,
            BLOCK_DV)  # fmt: skip


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
    size = max(point.head.qk, point.head.v)
    if point.dtype == "fp32":
        return _config(*_32[size])
    # A table of scores: with large tiles the compiler for Ampere keeps none of its addresses in registers.
    has_table = point.arch < 90 and any(c.rank > 2 for c in problem.grad_captures)
    if point.layout == "strided" or point.captures != "none" or has_table:
        return _config(*_SMALL[size])
    return _config(*_16[80 if point.arch < 90 else 90][size])


def _configs(heads: tuple[Head, ...], arch: int) -> tuple[Config, ...]:
    tables = (_16[arch], _SMALL, _32)
    found = [_config(*table[size]) for table in tables for h in heads if (size := max(h.qk, h.v)) in table]
    return tuple({c.name: c for c in found}.values())


def kernel(problem: Problem, fn: object, with_captures: object, heads: tuple[Head, ...],
           layouts: tuple[str, ...] = LAYOUTS) -> Kernel:  # fmt: skip
    """The printed entries in front of `attention_backward`, without and with gradients of captured tensors."""
    op = problem.backward_op
    grads = problem.grad_captures

    def plan(point: Point) -> Plan | None:
        c = point.config
        if not problem.makes_sense(point) or not takes_layout(point.layout, point.head, heads):
            return None
        if c.name != _setting(problem, point).name:
            return None
        names = ("query", "key", "value", "grad_0", "out0", "grad_query", "grad_key", "grad_value")
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
            launches=tuple(_launches(problem, point, fn if point.captures == "none" else with_captures)),
            cost=8_000_000 + steps * time,
            buffers=tuple(_buffers(problem, point)),
            general=point.layout == "strided",
        )

    dtypes = problem.dtypes
    axes = {
        "dtype": dtypes,
        "precision": PRECISIONS if "fp32" in dtypes else PRECISIONS[:1],
        "head": heads,
        "layout": layouts,
        "captures": ("none", "wanted") if grads else ("none",),
    }
    configs = {arch: _configs(heads, arch) for arch in (80, 90)}
    return Kernel(f"{problem.name}_backward", op, axes, configs, plan)


def kv_programs(problem: Problem, long: int) -> Expr:
    op = problem.backward_op
    N, block = op.local("N"), op.int("kv_block")
    return ceil_div(N, block) * ceil_div(minimum(block, N), long) * op.local("H_kv") * tensor(op, "key").size(0)


def q_programs(problem: Problem, long: int) -> Expr:
    op = problem.backward_op
    return query_tiles(problem, op, long) * op.local("B") * op.local("H")


def _buffers(problem: Problem, point: Point) -> list[Buffer]:
    op = problem.backward_op
    rows = op.local("B") * op.local("H") * op.local("M") * 4
    if point.captures == "none":
        return [Buffer(rows)]
    return [Buffer(rows * 2), Buffer(4), *(Buffer(_numel(op, c) * WORDS * 8) for c in problem.grad_captures)]


def _numel(op: object, c: Capture) -> Expr:
    size = as_expr(1)
    for d in range(c.rank):
        size = size * tensor(op, c.name).size(d)  # type: ignore[arg-type]
    return size


def _launches(problem: Problem, point: Point, fn: object) -> list[Launch]:
    c, op = point.config, problem.backward_op
    B, H, M = op.local("B"), op.local("H"), op.local("M")
    shared = arguments(problem, point)
    rows = 8 if point.head.is_wide else 32
    args = pick(attention_delta, shared | {"BLOCK_M": Const(rows)})
    delta = Launch(attention_delta, args, (ceil_div(M, rows), B * H, 1))
    sink = Launch(
        attention_sink_gradient,
        pick(attention_sink_gradient, shared | {"padded": Int(M), "BLOCK_M": Const(1024)}),
        (tensor(op, "sinks").size(0), 1, 1),
    )
    main = Launch(
        fn,
        {k: v for k, v in shared.items() if k not in _ONLY_BEFORE and (k != "largest" or point.captures != "none")},
        (kv_programs(problem, c.long) + q_programs(problem, c.long), 1, 1),
        num_warps=c.num_warps,
        num_stages=c.num_stages,
        max_spill_bytes=8192 if point.layout == "strided" else 4096,
        options={} if point.captures == "none" else {"enable_fp_fusion": False},
    )
    before, after = capture_launches(problem, point)
    return [*before, delta, sink, main, *after]


_ONLY_BEFORE = ("out0", "grad_1", "stride_ob", "stride_oh", "stride_om", "stride_od", "stride_grad_lse_b",
                "stride_grad_lse_h", "stride_grad_lse_m", "grad_sinks", "sinks", "stride_sink")  # fmt: skip


def pick(fn: Any, args: dict[str, Arg]) -> dict[str, Arg]:
    return {n: args[n] for n in fn.arg_names}


def capture_launches(problem: Problem, point: Point) -> tuple[list[Launch], list[Launch]]:
    """Zeros, before; and from the sums to the gradients, after."""
    op = problem.backward_op
    before, after = [], []
    block = Const(_BLOCK)
    if point.captures != "none":
        before.append(
            Launch(zero_gradient, {"buffer": Scratch(1, "i32"), "size": Int(1, "i64"), "BLOCK": block}, (1, 1, 1))
        )
    for i, c in enumerate(problem.grad_captures):
        size = _numel(op, c)
        grid = (ceil_div(size, _BLOCK), 1, 1)
        common: dict[str, Arg] = {"size": Int(size, "i64"), "BLOCK": block}
        out = Pointer(tensor(op, f"grad_{c.name}"), c.dtype, aligned=False)
        if point.captures == "none":
            before.append(Launch(zero_gradient, {"buffer": out} | common, grid))
            continue
        buffer = Scratch(2 + i, "i64")
        words = {"buffer": buffer, "size": Int(size * WORDS, "i64"), "BLOCK": block}
        before.append(Launch(zero_gradient, words, (ceil_div(size * WORDS, _BLOCK), 1, 1)))
        after.append(
            Launch(finish_gradient, {"buffer": buffer, "largest": Scratch(1, "i32"), "out": out} | common, grid)
        )
    return before, after


def arguments(problem: Problem, point: Point) -> dict[str, Arg]:
    op, c = problem.backward_op, point.config
    rows = {"query": "qm", "key": "kn", "value": "vn", "grad_0": "gm", "out0": "om", "grad_query": "xm",
            "grad_key": "yn", "grad_value": "zn"}  # fmt: skip
    lse, grad_lse = tensor(op, "out1"), tensor(op, "grad_1")
    optional = problem.optional_args(op)
    found = {
        **problem.size_args(op, point),
        **problem.row_args(op, rows, point),
        **problem.list_args(op, "kv"),
        **problem.list_args(op, "q"),
        **{n: optional[n] for n in ("kv_lengths", "stride_length", "has_lengths", "sinks", "stride_sink")},
        **problem.capture_args(op),
        "B": Int(op.local("B")),
        "B_kv": Int(maximum(tensor(op, "key").size(0), 1)),
        "H_kv": Int(op.local("H_kv")),
        "out1": Pointer(lse, "fp32", aligned=False),
        "grad_1": Pointer(grad_lse, "fp32", aligned=False),
        "grad_sinks": Pointer(tensor(op, "grad_sinks"), "fp32", aligned=False),
        "delta": Scratch(0, "fp32"),
        "kv_programs": Int(kv_programs(problem, c.long)),
        **{f"stride_l{x}": Int(lse.stride(d), "i64") for d, x in enumerate("bhm")},
        **{f"stride_grad_lse_{x}": Int(grad_lse.stride(d), "i64") for d, x in enumerate("bhm")},
        "largest": Scratch(0 if point.captures == "none" else 1, "i32"),
        "WITH_CAPTURES": Const(point.captures != "none"),
        "EVEN": Const(point.head.exact),
        "PRECISION": Const(point.precision),
        "SHORT": Const(c.short),
        "LONG": Const(c.long),
        "BLOCK_D": Const(point.head.qk),
        "BLOCK_DV": Const(point.head.v),
    }
    if point.captures != "none":
        found |= {f"grad_{c.name}": Scratch(2 + i, "i64") for i, c in enumerate(problem.grad_captures)}
    return found
