"""Scores with the holes for the mods, and online softmax in base 2.

The mods of a pair are device functions that tk.flex.codegen.printing prints (bundles.Mods):

    SCORE(score, b, h, q_idx, kv_idx, captures) -> score
    MASK(b, h, q_idx, kv_idx, captures) -> which pairs of positions see each other

score is fp32 [rows, columns] after the scale; b is a number, h one or [rows, 1], q_idx [rows, 1], kv_idx [1, columns].
They read captured tensors within their bounds only, whatever the positions are.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def scores(s, scale, at, inside, mods, MASKED: tl.constexpr):
    """From products at some Positions to scores in units of base 2, -inf where a pair is not seen. MASKED: the mask is
    asked, if there is one."""
    if mods.SCORE is not None:
        s = mods.SCORE(s * scale, at.b, at.h, at.q_idx, at.kv_idx, mods.captures) * LOG2_E
    else:
        s = s * (scale * LOG2_E)
    if MASKED and mods.MASK is not None:
        inside = inside & mods.MASK(at.b, at.h, at.q_idx, at.kv_idx, mods.captures)
    return tl.where(inside, s, float("-inf"))


@triton.jit
def online_softmax(s, m_i, l_i):
    """One step: the weights of this tile, the new row maximum and sum, and the factor for what was summed so far."""
    m_new = tl.maximum(m_i, tl.max(s, 1))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
    p = tl.exp2(s - base[:, None])
    alpha = tl.exp2(m_i - base)
    return p, m_new, l_i * alpha + tl.sum(p, 1), alpha


@triton.jit
def add_sink(m_i, l_i, sink):
    """One more logit, of natural units, in a row's sum. Returns the factor for what was summed so far, too."""
    sink = sink * LOG2_E
    m_new = tl.maximum(m_i, sink)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m_i - base)
    return m_new, l_i * alpha + tl.exp2(sink - base), alpha


@triton.jit
def end_of_row(m_i, l_i):
    """The factor that makes a row's sum its output, and its natural log-sum-exp. A row that saw no key: 0 and -inf."""
    is_empty = l_i == 0.0
    l_safe = tl.where(is_empty, 1.0, l_i)
    return 1.0 / l_safe, tl.where(is_empty, float("-inf"), (m_i + tl.log2(l_safe)) * LN_2)


@triton.jit
def store_statistics(lse, max_at, head, rows, M, row_lse, row_max, inside):
    """Of some rows of a head of a batch entry: their log-sum-exp and, unless `max_at` is 0, so far behind it their
    largest score, given in units of base 2."""
    at = lse + head * (M + max_at) + rows
    tl.store(at, row_lse, mask=inside)
    if max_at != 0:
        tl.store(at + max_at, row_max * LN_2, mask=inside)
