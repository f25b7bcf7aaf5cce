"""Scores with the holes for the mods, and online softmax.

Maxima, log-sum-exps and sinks are in units of the scores, rounded as torch rounds them, and a weight is
exp2((score - maximum) * LOG2_E): the difference comes first. Of two scores near each other it is exact, however large
they are, and that of a maximum and itself is 0. In units of base 2, score * LOG2_E - maximum, the product would be
rounded by 8 at scores of 10^8, and where it is fused into the difference it is compared with a maximum that was
rounded: exp2 of what then remains overflows from scores of 2^31 on. So that no product of a score_mod is fused into the
difference either, and the passes for gradients see the very scores of the forward pass, nothing is fused (UNFUSED).

The mods of a pair are device functions that tk.flex.codegen.printing prints (bundles.Mods):

    SCORE(score, b, h, q_idx, kv_idx, captures, PAIRS) -> score
    MASK(b, h, q_idx, kv_idx, captures, PAIRS) -> which pairs of positions see each other

score is fp32 [rows, columns] after the scale; b is a number, h one or [rows, 1], q_idx [rows, 1], kv_idx [1, columns].
They read captured tensors within their bounds only, whatever the positions are. PAIRS: two elements along keys at a
time (operands.load_pairs); without it whatever their strides are.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
UNFUSED = {"enable_fp_fusion": False}  # of launches


@triton.jit
def scores(s, scale, at, inside, mods, MASKED: tl.constexpr):
    """From products at some Positions to scores, -inf where a pair is not seen. MASKED: the mask is asked, if there is
    one."""
    s = s * scale
    if mods.SCORE is not None:
        s = mods.SCORE(s, at.b, at.h, at.q_idx, at.kv_idx, mods.captures)
    if MASKED and mods.MASK is not None:
        inside = inside & mods.MASK(at.b, at.h, at.q_idx, at.kv_idx, mods.captures)
    return tl.where(inside, s, float("-inf"))


@triton.jit
def online_softmax(s, m_i, l_i):
    """One step: the weights of this tile, the new row maximum and sum, and the factor for what was summed so far."""
    m_new = tl.maximum(m_i, tl.max(s, 1))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
    p = tl.exp2((s - base[:, None]) * LOG2_E)
    alpha = tl.exp2((m_i - base) * LOG2_E)
    return p, m_new, l_i * alpha + tl.sum(p, 1), alpha


@triton.jit
def add_sink(m_i, l_i, sink):
    """One more logit in a row's sum. Returns the factor for what was summed so far, too."""
    m_new = tl.maximum(m_i, sink)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2((m_i - base) * LOG2_E)
    return m_new, l_i * alpha + tl.exp2((sink - base) * LOG2_E), alpha


@triton.jit
def end_of_row(m_i, l_i):
    """The factor that makes a row's sum its output, and its natural log-sum-exp. A row that saw no key: 0 and -inf."""
    is_empty = l_i == 0.0
    l_safe = tl.where(is_empty, 1.0, l_i)
    return 1.0 / l_safe, tl.where(is_empty, float("-inf"), m_i + tl.log2(l_safe) * LN_2)


@triton.jit
def store_statistics(lse, max_at, head, rows, M, row_lse, row_max, inside):
    """Of some rows of a head of a batch entry: their log-sum-exp and, unless `max_at` is 0, so far behind it their
    largest score."""
    at = lse + head * (M + max_at) + rows
    tl.store(at, row_lse, mask=inside)
    if max_at != 0:
        tl.store(at + max_at, row_max, mask=inside)
