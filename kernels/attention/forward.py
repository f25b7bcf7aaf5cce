"""The plain forward: a program has a tile of queries of one head, and walks the tiles of keys that it meets.

`attend` is its loop, and decoding's too.
"""

from collections.abc import Mapping

import triton
import triton.language as tl

from tk.aot.expr import Expr, ceil_div, device, minimum
from tk.aot.spec import ITEMSIZE, Arg, Config, Const, Int, Kernel, Launch, Op, Plan, Point, Pointer
from tk.kernels.attention.operands import load_rows, load_rows_transposed, row_offsets, store_rows
from tk.kernels.attention.problem import LAYOUTS, PRECISIONS, Head, Problem, takes_layout, tensor, tile_time
from tk.kernels.attention.softmax import add_sink, end_of_row, online_softmax, scores, store_statistics
from tk.kernels.attention.walk import band_tiles, count_tiles, tile_at, tile_in_blocks

# --- The device functions ---


@triton.jit
def attend(acc, m_i, l_i, q, first, last, b, h, q_idx, key, value, pages, kv_end, captures, scale,
           indices, stride_i, kv_block, has_lists, lo, gap_lo, gap_hi,
           D, DV, stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_vd,
           SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, HAS_SCORE: tl.constexpr, MASKED: tl.constexpr,
           PAGED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
           BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """Tiles [first, last) of one list. key and value: of the head."""
    page_table, stride_pb, stride_pp, page_size, has_pages = pages
    for i in range(first, last):
        start, end = tile_at(i, indices, stride_i, kv_block, kv_end, has_lists, lo, gap_lo, gap_hi, BLOCK_N)
        cols = start + tl.arange(0, BLOCK_N)
        inside = cols < end
        k_at = row_offsets(cols, inside, b, page_table, stride_pb, stride_pp, page_size, has_pages, stride_kb,
                           stride_kn, PAGED)  # fmt: skip
        k = load_rows_transposed(key, k_at, inside, D, stride_kd, BLOCK_D, EVEN)
        s = tl.dot(q, k, input_precision=PRECISION)
        s = scores(s, scale, b, h, q_idx, cols[None, :], inside[None, :], captures, SCORE_MOD, MASK_MOD, HAS_SCORE,
                   MASKED)  # fmt: skip
        p, m_i, l_i, alpha = online_softmax(s, m_i, l_i)
        v_at = row_offsets(cols, inside, b, page_table, stride_pb, stride_pp, page_size, has_pages, stride_vb,
                           stride_vn, PAGED)  # fmt: skip
        v = load_rows(value, v_at, inside, DV, stride_vd, BLOCK_DV, EVEN)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m_i, l_i


@triton.jit
def length_of(kv_lengths, stride, b, N, has_lengths):
    """How many keys entry b has."""
    length = tl.load(kv_lengths + tl.cast(b, tl.int64) * stride, mask=has_lengths != 0, other=N)
    return tl.maximum(tl.minimum(length, N), 0)


@triton.jit
def attention_forward(query, key, value, kv_counts, kv_indices, full_counts, full_indices, kv_lengths, page_table,
                      sinks, out, lse, max_at, H, M, N, D, DV, group, scale,
                      stride_qb, stride_qh, stride_qm, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
                      stride_vb, stride_vh, stride_vn, stride_vd, stride_ob, stride_oh, stride_om, stride_od,
                      stride_cb, stride_ch, stride_cn, stride_ib, stride_ih, stride_in, stride_ii, mask_b, mask_h,
                      stride_fcb, stride_fch, stride_fcn, stride_fib, stride_fih, stride_fin, stride_fii, full_b,
                      full_h, stride_length, stride_sink, stride_pb, stride_pp, page_size,
                      has_lengths, has_pages, has_sinks, q_block, kv_block, band_left, band_right, band_exact, captures,
                      SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, HAS_SCORE: tl.constexpr, HAS_MASK: tl.constexpr,
                      PAGED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
                      BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """out = softmax(SCORE_MOD(query key^T scale)) value over what MASK_MOD lets be seen, and its log-sum-exp; max_at as
    store_statistics has it."""
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    # The last tiles of queries first: under a causal mask they have the most to do.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    number, row0, row_end = tile_in_blocks(tile, q_block, M, BLOCK_M)
    rows = row0 + tl.arange(0, BLOCK_M)
    row_inside = rows < row_end
    h_kv = (h // group).to(tl.int64)
    q_at = tl.cast(b, tl.int64) * stride_qb + rows.to(tl.int64) * stride_qm
    q = load_rows(query + tl.cast(h, tl.int64) * stride_qh, q_at, row_inside, D, stride_qd, BLOCK_D, EVEN)
    kv_end = length_of(kv_lengths, stride_length, b, N, has_lengths)

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    has_lists = ((mask_b > 0) & (mask_h > 0)).to(tl.int32)
    lo, full_lo, full_hi, hi = band_tiles(row0, tl.minimum(row0 + BLOCK_M, row_end) - 1, kv_end, band_left, band_right,
                                          band_exact, HAS_MASK, BLOCK_N)  # fmt: skip
    partial = count_tiles(b, h, number, kv_counts, stride_cb, stride_ch, stride_cn, mask_b, mask_h, kv_block, BLOCK_N)
    full = count_tiles(b, h, number, full_counts, stride_fcb, stride_fch, stride_fcn, full_b, full_h, kv_block,
                       BLOCK_N)  # fmt: skip
    if has_lists == 0:
        partial = full_lo - lo + hi - full_hi
        full = full_hi - full_lo
    pages = (page_table, stride_pb, stride_pp, page_size, has_pages)
    k_head = key + h_kv * stride_kh
    v_head = value + h_kv * stride_vh
    b64 = tl.cast(b, tl.int64)
    h64 = tl.cast(h, tl.int64)
    at = kv_indices + b64 * stride_ib + h64 * stride_ih + number * stride_in
    acc, m_i, l_i = attend(
        acc, m_i, l_i, q, 0, partial, b, h, rows[:, None], k_head, v_head, pages, kv_end, captures, scale, at,
        stride_ii, kv_block, has_lists, lo, full_lo, full_hi, D, DV, stride_kb, stride_kn, stride_kd, stride_vb,
        stride_vn, stride_vd, SCORE_MOD, MASK_MOD, HAS_SCORE, HAS_MASK, PAGED, EVEN, PRECISION, BLOCK_N, BLOCK_D,
        BLOCK_DV)  # fmt: skip
    at = full_indices + b64 * stride_fib + h64 * stride_fih + number * stride_fin
    acc, m_i, l_i = attend(
        acc, m_i, l_i, q, 0, full, b, h, rows[:, None], k_head, v_head, pages, kv_end, captures, scale, at,
        stride_fii, kv_block, has_lists, full_lo, full_hi, full_hi, D, DV, stride_kb, stride_kn, stride_kd, stride_vb,
        stride_vn, stride_vd, SCORE_MOD, MASK_MOD, HAS_SCORE, False, PAGED, EVEN, PRECISION, BLOCK_N, BLOCK_D,
        BLOCK_DV)  # fmt: skip
    row_max = m_i
    if has_sinks != 0:
        m_i, l_i, alpha = add_sink(m_i, l_i, tl.load(sinks + h64 * stride_sink))
        acc = acc * alpha[:, None]
    factor, row_lse = end_of_row(m_i, l_i)
    o_at = tl.cast(b, tl.int64) * stride_ob + rows.to(tl.int64) * stride_om
    store_rows(out + h64 * stride_oh, o_at, acc * factor[:, None], row_inside, DV, stride_od, BLOCK_DV, EVEN)
    store_statistics(lse, max_at, tl.cast(bh, tl.int64), rows, M, row_lse, row_max, row_inside)


# --- Plans ---

_16 = {  # head size of query and key -> (rows, columns, stages, warps)
    90: {64: (128, 64, 3, 4), 128: (128, 64, 3, 8), 256: (64, 32, 3, 4)},
    80: {64: (128, 64, 3, 4), 128: (128, 64, 3, 8), 256: (32, 64, 2, 4)},
}
# Products of fp32: without tensor cores they are unrolled whole.
_32 = {
    "ieee": {64: (32, 32, 2, 4), 128: (32, 16, 2, 4), 256: (16, 16, 2, 4), 512: (16, 16, 1, 8)},
    "tf32": {64: (64, 32, 3, 4), 128: (64, 32, 2, 4), 256: (32, 16, 2, 4), 512: (16, 16, 1, 8)},
}
# Of any strides: an address for each element leaves fewer registers.
_STRIDED = {64: (64, 32, 2, 4), 128: (64, 32, 2, 4), 256: (32, 32, 2, 4), 512: (32, 16, 1, 8)}


def setting(point: Point) -> tuple[int, int, int, int]:
    if point.layout == "strided" and point.dtype != "fp32":
        return _STRIDED[max(point.head.qk, point.head.v)]
    table = _32[point.precision] if point.dtype == "fp32" else _16[80 if point.arch < 90 else 90]
    return table[max(point.head.qk, point.head.v)]


def config(rows: int, cols: int, stages: int, warps: int, prefix: str = "") -> Config:
    shape = dict(block_m=rows, block_n=cols, num_stages=stages, num_warps=warps)
    return Config(f"{prefix}{rows}x{cols}_s{stages}_w{warps}", shape)


def query_tiles(problem: Problem, op: Op, rows: int) -> Expr:
    """Tiles of one head: of blocks as the mask has them; without one there is one block."""
    M, q_block = op.local("M"), op.int("q_block")
    return ceil_div(M, q_block) * ceil_div(minimum(q_block, M), rows)


def kernel(problem: Problem, fn: object, heads: tuple[Head, ...], layouts: tuple[str, ...] = LAYOUTS) -> Kernel:
    """`fn`: the printed entry in front of `attention_forward`."""
    op = problem.op

    def plan(point: Point) -> Plan | None:
        c = point.config
        if not problem.makes_sense(point) or not takes_layout(point.layout, point.head, heads):
            return None
        if c.name != config(*setting(point)).name:
            return None
        tiles = query_tiles(problem, op, c.block_m)
        grid = (tiles, op.local("B") * op.local("H"), 1)
        waves = ceil_div(grid[0] * grid[1], device.sm_count)
        slowdown = {"aligned": 1, "paged": 2, "strided": 4}[point.layout]
        time = tile_time(c.block_m, c.block_n, point.head, ITEMSIZE[point.dtype], slowdown)
        launch = Launch(
            fn,
            arguments(problem, point),
            grid,
            num_warps=c.num_warps,
            num_stages=c.num_stages,
            max_spill_bytes=8192 if point.layout == "strided" else 2048,  # what takes everything is not fast
        )
        return Plan(
            constraints=problem.constraints(op, point, ("query", "key", "value", "out")),
            serves=problem.serves(point),
            launches=(launch,),
            cost=4_000_000 + waves * ceil_div(op.local("N"), c.block_n) * time,
            general=point.layout == "strided",
        )

    dtypes = problem.dtypes
    axes = {"dtype": dtypes, "precision": PRECISIONS if "fp32" in dtypes else PRECISIONS[:1], "head": heads,
            "layout": layouts}  # fmt: skip
    configs = {arch: _configs(heads, _16[arch], *_32.values(), _STRIDED) for arch in (80, 90)}
    return Kernel(f"{problem.name}_forward", op, axes, configs, plan)


def _configs(heads: tuple[Head, ...], *tables: Mapping[int, tuple[int, int, int, int]]) -> tuple[Config, ...]:
    found = [config(*table[size]) for table in tables for h in heads if (size := max(h.qk, h.v)) in table]
    return tuple({c.name: c for c in found}.values())


def arguments(problem: Problem, point: Point) -> dict[str, Arg]:
    op, c = problem.op, point.config
    rows = {"query": "qm", "key": "kn", "value": "vn", "out": "om"}
    return {
        **problem.size_args(op, point),
        **problem.row_args(op, rows, point),
        **problem.list_args(op, "kv"),
        **problem.optional_args(op),
        **problem.capture_args(op),
        "lse": Pointer(tensor(op, "lse"), "fp32", aligned=False),
        "max_at": Int(problem.max_at(op)),
        "PAGED": Const(point.layout != "aligned"),
        "EVEN": Const(point.head.exact),
        "PRECISION": Const(point.precision),
        "BLOCK_M": Const(c.block_m),
        "BLOCK_N": Const(c.block_n),
        "BLOCK_D": Const(point.head.qk),
        "BLOCK_DV": Const(point.head.v),
    }
