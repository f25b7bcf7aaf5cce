"""Few query rows, many keys: the keys are split over programs, and a second launch puts the parts together.

A tile's rows are the query rows of all heads that share a key head, so that keys and values are read once. How many
parts there are depends on the GPU and on the sizes of the tensors alone, not on lengths that lie in memory: a captured
graph stays right when those change.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tk.aot.expr import Expr, ceil_div, device, local, maximum, minimum, mode, select
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
    Scratch,
    require,
)
from tk.kernels.attention.bundles import Mods, Rows
from tk.kernels.attention.forward import arguments, attend, length_of, pages_of
from tk.kernels.attention.operands import load_rows, store_rows
from tk.kernels.attention.problem import Head, Problem, distinct, tensor, tile_time
from tk.kernels.attention.softmax import LOG2_E, UNFUSED, add_sink, end_of_row, store_statistics
from tk.kernels.attention.walk import TileList, lists_of, tiles_met

MAX_SPLITS = 256
CHUNK, COLUMNS = 128, 32  # of attention_combine

# --- The device functions ---


class Parts(NamedTuple):
    """Of each part of the keys: its output, and each row's maximum and sum; fp32 [B, H, M, parts] and, of the output,
    [B, H, M, parts, head size]."""

    out: Any
    max: Any
    sum: Any


@triton.jit
def attention_decode(tensors, max_at, parts, sizes, splits, strides, kv_strides, optional, mask, mods,
                     DEPENDENT: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """A program: one part of the keys, for a tile of the rows of one key head."""
    if DEPENDENT:
        gdc_launch_dependents()
    part = tl.program_id(0) % splits
    tile = tl.program_id(0) // splits
    h_kv = tl.program_id(1)
    b = tl.program_id(2)
    b64 = tl.cast(b, tl.int64)
    M = sizes.M
    rows = tile * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)
    row_inside = rows < sizes.group * M
    rows = tl.where(row_inside, rows, 0)
    h = h_kv * sizes.group + rows // M
    m = rows % M
    q_at = b64 * strides.query.b + h.to(tl.int64) * strides.query.h + m.to(tl.int64) * strides.query.n
    q = load_rows(tensors.query, q_at, row_inside, sizes.D, strides.query.d, TILE.BLOCK_D, TILE.EVEN)
    kv_end = length_of(tensors.kv_lengths, optional.stride_length, b, sizes.N, optional.has_lengths)

    # Of this part of the tiles, partial ones first.
    partial, full = lists_of(tensors.kv_lists, kv_strides)
    met = tiles_met(b, 0, 0, 0, M - 1, kv_end, partial, full, mask.kv_block, mask.band_left, mask.band_right,
                    mask.band_exact, mods.MASK is not None, TILE.BLOCK_N)  # fmt: skip
    share = tl.cdiv(met.partial + met.full, splits)
    first = part * share
    last = tl.minimum(first + share, met.partial + met.full)

    m_i = tl.full([TILE.BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([TILE.BLOCK_M], tl.float32)
    acc = tl.zeros([TILE.BLOCK_M, TILE.BLOCK_DV], tl.float32)
    pages = pages_of(tensors, optional)
    key = Rows(tensors.key + tl.cast(h_kv, tl.int64) * strides.key.h, strides.key)
    value = Rows(tensors.value + tl.cast(h_kv, tl.int64) * strides.value.h, strides.value)
    tiles = TileList(partial.indices + b64 * partial.strides.indices_b, partial.strides.indices_i, mask.kv_block,
                     kv_end, met.has_lists, met.lo, met.full_lo, met.full_hi)  # fmt: skip
    sums = attend((acc, m_i, l_i), q, first, tl.minimum(last, met.partial), b, h[:, None], m[:, None], key, value,
                  pages, tiles, sizes, mods, True, TILE)  # fmt: skip
    tiles = TileList(full.indices + b64 * full.strides.indices_b, full.strides.indices_i, mask.kv_block, kv_end,
                     met.has_lists, met.full_lo, met.full_hi, met.full_hi)  # fmt: skip
    acc, m_i, l_i = attend(sums, q, tl.maximum(first - met.partial, 0), last - met.partial, b, h[:, None], m[:, None],
                           key, value, pages, tiles, sizes, mods, False, TILE)  # fmt: skip

    flat = (b64 * sizes.H + h) * M + m
    if splits == 1:
        row_max = m_i
        if optional.has_sinks != 0:
            sink = tl.load(tensors.sinks + h.to(tl.int64) * optional.stride_sink)
            m_i, l_i, alpha = add_sink(m_i, l_i, sink)
            acc = acc * alpha[:, None]
        factor, row_lse = end_of_row(m_i, l_i)
        o_at = b64 * strides.out.b + h.to(tl.int64) * strides.out.h + m.to(tl.int64) * strides.out.n
        store_rows(tensors.out, o_at, acc * factor[:, None], row_inside, sizes.DV, strides.out.d, TILE.BLOCK_DV,
                   TILE.EVEN)  # fmt: skip
        store_statistics(tensors.lse, max_at, b64 * sizes.H + h, m, M, row_lse, row_max, row_inside)
    else:
        at = flat * splits + part
        tl.store(parts.max + at, m_i, mask=row_inside)
        tl.store(parts.sum + at, l_i, mask=row_inside)
        columns = tl.arange(0, TILE.BLOCK_DV)
        tl.store(parts.out + at[:, None] * TILE.BLOCK_DV + columns[None, :], acc, mask=row_inside[:, None])


@triton.jit
def attention_combine(parts, sinks, out, lse, max_at, H, M, DV, splits, out_strides, stride_sink, has_sinks,
                      EVEN: tl.constexpr, BLOCK_DV: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
                      DEPENDENT: tl.constexpr):  # fmt: skip
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
        chunk = start + tl.arange(0, CHUNK)
        inside = chunk < splits
        at = flat * splits + chunk
        x = tl.load(parts.out + at[:, None] * BLOCK_DV + columns[None, :], mask=inside[:, None], other=0.0)
        x_max = tl.load(parts.max + at, mask=inside, other=float("-inf"))
        x_sum = tl.load(parts.sum + at, mask=inside, other=0.0)
        m_new = tl.maximum(m_i, tl.max(x_max, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2((m_i - base) * LOG2_E)
        weight = tl.exp2((x_max - base) * LOG2_E)
        l_i = l_i * alpha + tl.sum(x_sum * weight, 0)
        acc = acc * alpha + tl.sum(x * weight[:, None], 0)
        m_i = m_new
    row_max = m_i
    if has_sinks != 0:
        m_i, l_i, alpha = add_sink(m_i, l_i, tl.load(sinks + h * stride_sink))
        acc = acc * alpha
    factor, row_lse = end_of_row(m_i, l_i)
    o_at = out + b * out_strides.b + h * out_strides.h + m * out_strides.n + columns * out_strides.d
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
    size = head.size
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


def kernel(problem: Problem, mods: Mods, heads: tuple[Head, ...]) -> Kernel:
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
        parts = Parts(*(Scratch(i, "fp32") for i in range(3)))
        own = {"parts": parts, "splits": Int(splits), "DEPENDENT": Const(c.dependent)}
        first = Launch(
            attention_decode,
            arguments(problem, mods, point) | own,
            grid=(splits * row_tiles, H_kv, B),
            num_warps=c.num_warps,
            num_stages=c.num_stages,
            max_spill_bytes=2048,
            options=UNFUSED,
        )
        second = Launch(
            attention_combine,
            _combine_arguments(problem, point) | own,
            grid=(B * H * M, point.head.v // COLUMNS, 1),
            when=splits > 1,
            dependent=int(c.dependent),
            options=UNFUSED,
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

    configs = {}
    for arch in (80, 90):
        settings = (c for h in heads for d in problem.dtypes for c in _settings(h, d, arch))
        configs[arch] = distinct((*settings, *CANDIDATES))
    return Kernel(f"{problem.name}_decode", op, problem.axes(heads, ("aligned", "paged")), configs, plan)


def _splits(N: Expr, c: Config, programs: Expr) -> Expr:
    """Enough programs for every multiprocessor, each with two tiles or more."""
    wanted = c.per_sm * device.sm_count // maximum(programs, 1)
    return maximum(minimum(minimum(wanted, ceil_div(N, 2 * c.block_n)), MAX_SPLITS), 1)


def _one_row_of_blocks(problem: Problem) -> Expr:
    op = problem.op
    counts, full = tensor(op, "kv_num_blocks"), tensor(op, "full_kv_num_blocks")
    fits = (op.local("M") <= op.int("q_block")) & (counts.size(1) == 1) & (full.size(1) <= 1)
    return select(op.local("has_lists"), fits, 1)


def _combine_arguments(problem: Problem, point: Point) -> dict[str, Arg | Bundle]:
    op, optional = problem.op, problem.optional(problem.op)
    return {
        "sinks": problem.pointer(op, "sinks"),
        "out": problem.rows(op, "out", point),
        "lse": problem.pointer(op, "lse"),
        "max_at": Int(problem.max_at(op)),
        **problem.sizes(op, ("H", "M", "DV"), point),
        "out_strides": problem.strides(op, "out", point),
        "stride_sink": optional["stride_sink"],
        "has_sinks": optional["has_sinks"],
        "EVEN": Const(point.head.exact),
        "BLOCK_DV": Const(point.head.v),
        "COLUMNS": Const(COLUMNS),
        "CHUNK": Const(CHUNK),
    }
