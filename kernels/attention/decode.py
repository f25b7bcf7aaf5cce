"""Few query rows, many keys: the keys are split over programs, and a second launch puts the parts together.

A tile's rows are the query rows of all heads that share a key head, so that keys and values are read once. How many
parts there are depends on the GPU and on the sizes of the tensors alone, not on lengths that lie in memory: a captured
graph stays right when those change.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tk.aot.expr import Expr, ceil_div, device, local, maximum, minimum, mode, select
from tk.aot.spec import ITEMSIZE, Arg, Buffer, Config, Const, Int, Kernel, Launch, Plan, Point, Scratch, require
from tk.kernels.attention.forward import arguments, attend, length_of
from tk.kernels.attention.operands import load_rows, store_rows
from tk.kernels.attention.problem import PRECISIONS, Head, Problem, tensor, tile_time
from tk.kernels.attention.softmax import add_sink, end_of_row, store_statistics
from tk.kernels.attention.walk import band_tiles, count_tiles

MAX_SPLITS = 256
CHUNK, COLUMNS = 128, 32  # of attention_combine

# --- The device functions ---


@triton.jit
def attention_decode(query, key, value, kv_counts, kv_indices, full_counts, full_indices, kv_lengths, page_table,
                     sinks, out, lse, max_at, part_out, part_max, part_sum, H, M, N, D, DV, group, scale, splits,
                     stride_qb, stride_qh, stride_qm, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
                     stride_vb, stride_vh, stride_vn, stride_vd, stride_ob, stride_oh, stride_om, stride_od,
                     stride_cb, stride_ch, stride_cn, stride_ib, stride_ih, stride_in, stride_ii, mask_b, mask_h,
                     stride_fcb, stride_fch, stride_fcn, stride_fib, stride_fih, stride_fin, stride_fii, full_b,
                     full_h, stride_length, stride_sink, stride_pb, stride_pp, page_size,
                     has_lengths, has_pages, has_sinks, q_block, kv_block, band_left, band_right, band_exact, captures,
                     SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, HAS_SCORE: tl.constexpr, HAS_MASK: tl.constexpr,
                     PAGED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
                     BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                     BLOCK_DV: tl.constexpr):  # fmt: skip
    """A program: one part of the keys, for a tile of the rows of one key head."""
    if DEPENDENT:
        gdc_launch_dependents()
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
        row_max = m_i
        if has_sinks != 0:
            sink = tl.load(sinks + h.to(tl.int64) * stride_sink)
            m_i, l_i, alpha = add_sink(m_i, l_i, sink)
            acc = acc * alpha[:, None]
        factor, row_lse = end_of_row(m_i, l_i)
        o_at = b64 * stride_ob + h.to(tl.int64) * stride_oh + m.to(tl.int64) * stride_om
        store_rows(out, o_at, acc * factor[:, None], row_inside, DV, stride_od, BLOCK_DV, EVEN)
        store_statistics(lse, max_at, b64 * H + h, m, M, row_lse, row_max, row_inside)
    else:
        at = flat * splits + part
        tl.store(part_max + at, m_i, mask=row_inside)
        tl.store(part_sum + at, l_i, mask=row_inside)
        columns = tl.arange(0, BLOCK_DV)
        tl.store(part_out + at[:, None] * BLOCK_DV + columns[None, :], acc, mask=row_inside[:, None])


@triton.jit
def attention_combine(part_out, part_max, part_sum, sinks, out, lse, max_at, H, M, DV, splits, stride_ob, stride_oh,
                      stride_om, stride_od, stride_sink, has_sinks, EVEN: tl.constexpr, BLOCK_DV: tl.constexpr,
                      COLUMNS: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """A program: COLUMNS columns of one row, all parts. What it takes is latency: CHUNK parts are read at a time."""
    if DEPENDENT:
        gdc_wait()
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
    row_max = m_i
    if has_sinks != 0:
        m_i, l_i, alpha = add_sink(m_i, l_i, tl.load(sinks + h * stride_sink))
        acc = acc * alpha
    factor, row_lse = end_of_row(m_i, l_i)
    o_at = out + b * stride_ob + h * stride_oh + m * stride_om + columns * stride_od
    tl.store(o_at, (acc * factor).to(out.dtype.element_ty), mask=columns < (BLOCK_DV if EVEN else DV))
    if tl.program_id(1) == 0:
        store_statistics(lse, max_at, flat // M, m, M, row_lse, row_max, m < M)


# --- Plans ---

# head size -> (columns, stages); fp32's columns are half.
_COLUMNS = {64: (64, 4), 128: (64, 3), 256: (32, 3)}
_ROWS = 16  # the least that a product takes
STEP_PS, COMBINE_PS = 100_000, 2_000_000  # picoseconds of a loop's step beside its bytes, and of the second launch


# Settings that are tried beside those that ship: tools/attention_candidates.py.
CANDIDATES: tuple[Config, ...] = ()


def config(rows: int, cols: int, stages: int, warps: int, per_sm: int = 2, dependent: bool = False) -> Config:
    """per_sm: how many programs a multiprocessor is to have. dependent: the second launch begins before the first has
    ended (sm_90)."""
    shape = dict(block_m=rows, block_n=cols, num_stages=stages, num_warps=warps, per_sm=per_sm, dependent=dependent)
    name = f"decode_{rows}x{cols}_s{stages}_w{warps}" + (f"_p{per_sm}" if per_sm != 2 else "")
    return Config(name + ("_dependent" if dependent else ""), shape)


def _settings(head: Head, dtype: str, arch: int) -> tuple[Config, ...]:
    size = max(head.qk, head.v)
    dependent = arch >= 90
    if dtype == "fp32":
        return (config(_ROWS, 32 if size == 64 else 16, 2, 4, dependent=dependent),)  # unrolled, without tensor cores
    columns, stages = _COLUMNS[size]
    usual = config(_ROWS, columns, stages, 4, dependent=dependent)
    if not dependent or size == 256:
        return (usual,)
    # Fewer, longer walks, so that with many sequences none is split; and shorter ones, for little to read.
    long = config(_ROWS, 2 * columns, stages, 8, per_sm=1, dependent=True)
    return usual, long, config(_ROWS, columns // 2, 4, 4, per_sm=3, dependent=True)


def kernel(problem: Problem, fn: object, heads: tuple[Head, ...]) -> Kernel:
    """`fn`: the printed entry in front of `attention_decode`."""
    op = problem.op
    B, H, M, N, H_kv, group = (op.local(n) for n in ("B", "H", "M", "N", "H_kv", "group"))
    splits = local(len(op.locals))

    def plan(point: Point) -> Plan | None:
        c = point.config
        if not problem.makes_sense(point) or point.precision == "tf32":
            return None
        is_tried = c in CANDIDATES and point.arch == 90 and point.dtype != "fp32"
        if c.name not in [s.name for s in _settings(point.head, point.dtype, point.arch)] and not is_tried:
            return None
        row_tiles = ceil_div(group * M, c.block_m)
        programs = B * H_kv * row_tiles
        buffers = tuple(Buffer(B * H * M * splits * 4 * n) for n in (point.head.v, 1, 1))
        time = tile_time(c.block_m, c.block_n, point.head, ITEMSIZE[point.dtype]) + STEP_PS
        tiles = ceil_div(ceil_div(N, c.block_n), splits)
        waves = ceil_div(programs * splits, c.per_sm * device.sm_count)
        sharing = minimum(ceil_div(programs * splits, device.sm_count), c.per_sm)  # one multiprocessor's memory traffic
        first = Launch(
            fn,
            arguments(problem, point) | _parts(point) | {"splits": Int(splits), "DEPENDENT": Const(c.dependent)},
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
            dependent=int(c.dependent),
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
            cost=6_000_000 + select(splits > 1, COMBINE_PS, 0) + waves * tiles * sharing * time,
            locals=(_splits(N, c, programs),),
            buffers=buffers,
        )

    axes = {"dtype": problem.dtypes, "precision": PRECISIONS[:1], "head": heads, "layout": ("aligned", "paged")}
    configs = {}
    for arch in (80, 90):
        settings = (c for h in heads for d in problem.dtypes for c in _settings(h, d, arch))
        configs[arch] = tuple({c.name: c for c in (*settings, *CANDIDATES)}.values())
    return Kernel(f"{problem.name}_decode", op, axes, configs, plan)


def _splits(N: Expr, c: Config, programs: Expr) -> Expr:
    """Enough programs for every multiprocessor, each with two tiles or more."""
    wanted = c.per_sm * device.sm_count // maximum(programs, 1)
    return maximum(minimum(minimum(wanted, ceil_div(N, 2 * c.block_n)), MAX_SPLITS), 1)


def _one_row_of_blocks(problem: Problem) -> Expr:
    op = problem.op
    counts, full = tensor(op, "kv_num_blocks"), tensor(op, "full_kv_num_blocks")
    fits = (op.local("M") <= op.int("q_block")) & (counts.size(1) == 1) & (full.size(1) <= 1)
    return select(op.local("has_lists"), fits, 1)


def _parts(point: Point) -> dict[str, Arg]:
    return {name: Scratch(i, "fp32") for i, name in enumerate(("part_out", "part_max", "part_sum"))}


def _combine_arguments(problem: Problem, point: Point, splits: Expr) -> dict[str, Arg]:
    shared = arguments(problem, point) | _parts(point) | {"splits": Int(splits)}
    names = ("part_out", "part_max", "part_sum", "sinks", "out", "lse", "max_at", "H", "M", "DV", "splits", "stride_ob",
             "stride_oh", "stride_om", "stride_od", "stride_sink", "has_sinks", "EVEN", "BLOCK_DV")  # fmt: skip
    return {n: shared[n] for n in names} | {
        "COLUMNS": Const(COLUMNS),
        "CHUNK": Const(CHUNK),
        "DEPENDENT": Const(point.config.dependent),
    }
