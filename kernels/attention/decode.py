"""Few query rows, many keys: the keys are split over programs, and a second launch puts the parts together.

A tile's rows are the query rows of all heads that share a key head, so that keys and values are read once. How many
parts there are depends on the GPU and on the sizes of the tensors alone, not on lengths that lie in memory: a captured
graph stays right when those change.
"""

import triton
import triton.language as tl

from tk.aot.expr import Expr, ceil_div, device, local, maximum, minimum, mode, select
from tk.aot.spec import ITEMSIZE, Arg, Buffer, Config, Const, Int, Kernel, Launch, Plan, Point, Scratch, require
from tk.kernels.attention.forward import arguments, attend, length_of
from tk.kernels.attention.operands import load_rows, store_rows
from tk.kernels.attention.problem import PRECISIONS, Head, Problem, tensor, tile_time
from tk.kernels.attention.softmax import add_sink, end_of_row
from tk.kernels.attention.walk import band_tiles, count_tiles

MAX_SPLITS = 256
CHUNK, COLUMNS = 128, 32  # of attention_combine

# --- The device functions ---


@triton.jit
def attention_decode(query, key, value, kv_counts, kv_indices, full_counts, full_indices, kv_lengths, page_table,
                     sinks, out, lse, part_out, part_max, part_sum, H, M, N, D, DV, group, scale, splits,
                     stride_qb, stride_qh, stride_qm, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
                     stride_vb, stride_vh, stride_vn, stride_vd, stride_ob, stride_oh, stride_om, stride_od,
                     stride_cb, stride_ch, stride_cn, stride_ib, stride_ih, stride_in, stride_ii, mask_b, mask_h,
                     stride_fcb, stride_fch, stride_fcn, stride_fib, stride_fih, stride_fin, stride_fii, full_b,
                     full_h, stride_length, stride_sink, stride_pb, stride_pp, page_size,
                     has_lengths, has_pages, has_sinks, q_block, kv_block, band_left, band_right, band_exact, captures,
                     SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, HAS_SCORE: tl.constexpr, HAS_MASK: tl.constexpr,
                     PAGED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
                     BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """A program: one part of the keys, for a tile of the rows of one key head."""
    part = tl.program_id(0) % splits
    tile = tl.program_id(0) // splits
    h_kv = tl.program_id(1)
    b = tl.program_id(2)
    b64 = tl.cast(b, tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_inside = rows < group * M
    rows = tl.where(row_inside, rows, 0)
    h = h_kv * group + rows // M
    m = rows % M
    q_at = b64 * stride_qb + h.to(tl.int64) * stride_qh + m.to(tl.int64) * stride_qm
    q = load_rows(query, q_at, row_inside, D, stride_qd, BLOCK_D, EVEN)
    kv_end = length_of(kv_lengths, stride_length, b, N, has_lengths)

    # Of this part of the tiles, partial ones first.
    has_lists = ((mask_b > 0) & (mask_h > 0)).to(tl.int32)
    lo, full_lo, full_hi, hi = band_tiles(0, M - 1, kv_end, band_left, band_right, band_exact, HAS_MASK, BLOCK_N)
    partial = count_tiles(b, 0, 0, kv_counts, stride_cb, stride_ch, stride_cn, mask_b, mask_h, kv_block, BLOCK_N)
    full = count_tiles(b, 0, 0, full_counts, stride_fcb, stride_fch, stride_fcn, full_b, full_h, kv_block, BLOCK_N)
    if has_lists == 0:
        partial = full_lo - lo + hi - full_hi
        full = full_hi - full_lo
    share = tl.cdiv(partial + full, splits)
    first = part * share
    last = tl.minimum(first + share, partial + full)

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    pages = (page_table, stride_pb, stride_pp, page_size, has_pages)
    k_head = key + tl.cast(h_kv, tl.int64) * stride_kh
    v_head = value + tl.cast(h_kv, tl.int64) * stride_vh
    acc, m_i, l_i = attend(
        acc, m_i, l_i, q, first, tl.minimum(last, partial), b, h[:, None], m[:, None], k_head, v_head, pages, kv_end,
        captures, scale, kv_indices + b64 * stride_ib, stride_ii, kv_block, has_lists, lo, full_lo, full_hi, D, DV,
        stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_vd, SCORE_MOD, MASK_MOD, HAS_SCORE, HAS_MASK,
        PAGED, EVEN, PRECISION, BLOCK_N, BLOCK_D, BLOCK_DV)  # fmt: skip
    acc, m_i, l_i = attend(
        acc, m_i, l_i, q, tl.maximum(first - partial, 0), last - partial, b, h[:, None], m[:, None], k_head, v_head,
        pages, kv_end, captures, scale, full_indices + b64 * stride_fib, stride_fii, kv_block, has_lists, full_lo,
        full_hi, full_hi, D, DV, stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_vd, SCORE_MOD, MASK_MOD,
        HAS_SCORE, False, PAGED, EVEN, PRECISION, BLOCK_N, BLOCK_D, BLOCK_DV)  # fmt: skip

    flat = (b64 * H + h) * M + m
    if splits == 1:
        if has_sinks != 0:
            sink = tl.load(sinks + h.to(tl.int64) * stride_sink)
            m_i, l_i, alpha = add_sink(m_i, l_i, sink)
            acc = acc * alpha[:, None]
        factor, row_lse = end_of_row(m_i, l_i)
        o_at = b64 * stride_ob + h.to(tl.int64) * stride_oh + m.to(tl.int64) * stride_om
        store_rows(out, o_at, acc * factor[:, None], row_inside, DV, stride_od, BLOCK_DV, EVEN)
        tl.store(lse + flat, row_lse, mask=row_inside)
    else:
        at = flat * splits + part
        tl.store(part_max + at, m_i, mask=row_inside)
        tl.store(part_sum + at, l_i, mask=row_inside)
        columns = tl.arange(0, BLOCK_DV)
        tl.store(part_out + at[:, None] * BLOCK_DV + columns[None, :], acc, mask=row_inside[:, None])


@triton.jit
def attention_combine(part_out, part_max, part_sum, sinks, out, lse, H, M, DV, splits, stride_ob, stride_oh, stride_om,
                      stride_od, stride_sink, has_sinks, EVEN: tl.constexpr, BLOCK_DV: tl.constexpr,
                      COLUMNS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """A program: COLUMNS columns of one row, all parts. What it takes is latency: CHUNK parts are read at a time."""
    flat = tl.program_id(0).to(tl.int64)
    b = flat // M // H
    h = flat // M % H
    m = flat % M
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_i = tl.full((), float("-inf"), tl.float32)
    l_i = tl.full((), 0.0, tl.float32)
    acc = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, splits, CHUNK):
        parts = start + tl.arange(0, CHUNK)
        inside = parts < splits
        at = flat * splits + parts
        x = tl.load(part_out + at[:, None] * BLOCK_DV + columns[None, :], mask=inside[:, None], other=0.0)
        x_max = tl.load(part_max + at, mask=inside, other=float("-inf"))
        x_sum = tl.load(part_sum + at, mask=inside, other=0.0)
        m_new = tl.maximum(m_i, tl.max(x_max, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - base)
        weight = tl.exp2(x_max - base)
        l_i = l_i * alpha + tl.sum(x_sum * weight, 0)
        acc = acc * alpha + tl.sum(x * weight[:, None], 0)
        m_i = m_new
    if has_sinks != 0:
        m_i, l_i, alpha = add_sink(m_i, l_i, tl.load(sinks + h * stride_sink))
        acc = acc * alpha
    factor, row_lse = end_of_row(m_i, l_i)
    o_at = out + b * stride_ob + h * stride_oh + m * stride_om + columns * stride_od
    tl.store(o_at, (acc * factor).to(out.dtype.element_ty), mask=columns < (BLOCK_DV if EVEN else DV))
    if tl.program_id(1) == 0:
        tl.store(lse + flat, row_lse)


# --- Plans ---

# head size -> (columns, stages); fp32's columns are half.
_COLUMNS = {64: (64, 4), 128: (64, 3), 256: (32, 3)}
_ROWS = 16  # the least that a product takes


def _config(rows: int, cols: int, stages: int, warps: int) -> Config:
    shape = dict(block_m=rows, block_n=cols, num_stages=stages, num_warps=warps)
    return Config(f"decode_{rows}x{cols}_s{stages}_w{warps}", shape)


def _setting(head: Head, dtype: str) -> Config:
    cols, stages = _COLUMNS[max(head.qk, head.v)]
    if dtype == "fp32":
        cols, stages = 32 if max(head.qk, head.v) == 64 else 16, 2  # unrolled whole, without tensor cores
    return _config(_ROWS, cols, stages, 4)


def kernel(problem: Problem, fn: object, heads: tuple[Head, ...]) -> Kernel:
    """`fn`: the printed entry in front of `attention_decode`."""
    op = problem.op
    B, H, M, N, H_kv, group = (op.local(n) for n in ("B", "H", "M", "N", "H_kv", "group"))
    splits = local(len(op.locals))

    def plan(point: Point) -> Plan | None:
        c = point.config
        if not problem.makes_sense(point) or point.precision == "tf32":
            return None
        if c.name != _setting(point.head, point.dtype).name:
            return None
        row_tiles = ceil_div(group * M, c.block_m)
        programs = B * H_kv * row_tiles
        buffers = tuple(Buffer(B * H * M * splits * 4 * n) for n in (point.head.v, 1, 1))
        time = tile_time(c.block_m, c.block_n, point.head, ITEMSIZE[point.dtype])
        tiles = ceil_div(ceil_div(N, c.block_n), splits)
        waves = ceil_div(programs * splits, 2 * device.sm_count)
        first = Launch(
            fn,
            arguments(problem, point) | _parts(point) | {"splits": Int(splits)},
            grid=(splits * row_tiles, H_kv, B),
            num_warps=c.num_warps,
            num_stages=c.num_stages,
            max_spill_bytes=2048,
        )
        second = Launch(
            attention_combine,
            _combine_arguments(problem, point, splits),
            grid=(B * H * M, point.head.v // COLUMNS, 1),
            when=splits > 1,
        )
        return Plan(
            constraints=(
                *problem.constraints(op, point, ("query", "key", "value", "out")),
                require(~mode("batch_invariant"), "batch_invariant mode off, since keys are split"),
                require(_one_row_of_blocks(problem), "one row of mask blocks, the same for all heads"),
                require(group * M <= 256, "few query rows"),
            ),
            serves=problem.serves(point),
            launches=(first, second),
            cost=6_000_000 + waves * tiles * 2 * time,
            locals=(_splits(op_size=N, block_n=c.block_n, programs=programs),),
            buffers=buffers,
        )

    axes = {"dtype": problem.dtypes, "precision": PRECISIONS[:1], "head": heads, "layout": ("aligned", "paged")}
    found = {_setting(h, d).name: _setting(h, d) for h in heads for d in problem.dtypes}
    return Kernel(f"{problem.name}_decode", op, axes, dict.fromkeys((80, 90), tuple(found.values())), plan)


def _splits(op_size: Expr, block_n: int, programs: Expr) -> Expr:
    """Enough programs for two on every multiprocessor, each with two tiles or more."""
    wanted = 2 * device.sm_count // maximum(programs, 1)
    return maximum(minimum(minimum(wanted, ceil_div(op_size, 2 * block_n)), MAX_SPLITS), 1)


def _one_row_of_blocks(problem: Problem) -> Expr:
    op = problem.op
    counts, full = tensor(op, "kv_num_blocks"), tensor(op, "full_kv_num_blocks")
    fits = (op.local("M") <= op.int("q_block")) & (counts.size(1) == 1) & (full.size(1) <= 1)
    return select(op.local("has_lists"), fits, 1)


def _parts(point: Point) -> dict[str, Arg]:
    return {name: Scratch(i, "fp32") for i, name in enumerate(("part_out", "part_max", "part_sum"))}


def _combine_arguments(problem: Problem, point: Point, splits: Expr) -> dict[str, Arg]:
    shared = arguments(problem, point) | _parts(point) | {"splits": Int(splits)}
    names = ("part_out", "part_max", "part_sum", "sinks", "out", "lse", "H", "M", "DV", "splits", "stride_ob",
             "stride_oh", "stride_om", "stride_od", "stride_sink", "has_sinks", "EVEN", "BLOCK_DV")  # fmt: skip
    return {n: shared[n] for n in names} | {"COLUMNS": Const(COLUMNS), "CHUNK": Const(CHUNK)}
