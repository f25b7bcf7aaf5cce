"""The plain forward: a program has a tile of queries of one head, and walks the tiles of keys that it meets.

`attend` is its loop, and decoding's too.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tk.aot.expr import Expr, ceil_div, device, minimum
from tk.aot.spec import ITEMSIZE, Arg, Bundle, Config, Const, Int, Kernel, Launch, Op, Plan, Point
from tk.kernels.attention.bundles import Mods, Pages, Positions, Rows
from tk.kernels.attention.operands import load_rows, load_rows_transposed, row_offsets, store_rows
from tk.kernels.attention.problem import LAYOUTS, Head, Problem, distinct, of_heads, takes_layout, tile_time
from tk.kernels.attention.softmax import UNFUSED, add_sink, end_of_row, online_softmax, scores, store_statistics
from tk.kernels.attention.walk import TileList, indices_of, lists_of, tile_at, tile_in_blocks, tiles_met

# --- The device functions ---


class ForwardTensors(NamedTuple):
    """Addresses, of decoding too."""

    query: Any
    key: Any
    value: Any
    kv_lists: Any
    kv_lengths: Any
    page_table: Any
    sinks: Any
    out: Any
    lse: Any


class ForwardSizes(NamedTuple):
    """group: heads of queries that share one of keys."""

    H: Any
    M: Any
    N: Any
    D: Any
    DV: Any
    group: Any
    scale: Any


class ForwardStrides(NamedTuple):
    query: Any
    key: Any
    value: Any
    out: Any


class Optional(NamedTuple):
    """Of kv_lengths, sinks and page_table, and which of them are given."""

    stride_length: Any
    stride_sink: Any
    stride_page_b: Any
    stride_page_p: Any
    page_size: Any
    has_lengths: Any
    has_pages: Any
    has_sinks: Any


@dataclass(frozen=True)
class ForwardTile:
    """BLOCK_D and BLOCK_DV: head sizes; EVEN: which are the call's. PAGED: a page table may be given."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_DV: int
    PAGED: bool
    EVEN: bool
    PRECISION: str


@triton.jit
def attend(sums, q, first, last, b, h, q_idx, key, value, pages, tiles, sizes, mods, MASKED: tl.constexpr,
           TILE: tl.constexpr):  # fmt: skip
    """Tiles [first, last) of one list. sums: the output so far, and each row's maximum and sum. key and value: of the
    head."""
    acc, m_i, l_i = sums
    for i in range(first, last):
        start, end = tile_at(i, tiles, TILE.BLOCK_N)
        cols = start + tl.arange(0, TILE.BLOCK_N)
        inside = cols < end
        k_at = row_offsets(cols, inside, b, pages, key.strides, TILE.PAGED)
        k = load_rows_transposed(key.base, k_at, inside, sizes.D, key.strides.d, TILE.BLOCK_D, TILE.EVEN)
        s = tl.dot(q, k, input_precision=TILE.PRECISION)
        s = scores(s, sizes.scale, Positions(b, h, q_idx, cols[None, :]), inside[None, :], mods, MASKED)
        p, m_i, l_i, alpha = online_softmax(s, m_i, l_i)
        v_at = row_offsets(cols, inside, b, pages, value.strides, TILE.PAGED)
        v = load_rows(value.base, v_at, inside, sizes.DV, value.strides.d, TILE.BLOCK_DV, TILE.EVEN)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=TILE.PRECISION)
    return acc, m_i, l_i


@triton.jit
def length_of(kv_lengths, stride, b, N, has_lengths):
    """How many keys entry b has."""
    length = tl.load(kv_lengths + tl.cast(b, tl.int64) * stride, mask=has_lengths != 0, other=N)
    return tl.maximum(tl.minimum(length, N), 0)


@triton.jit
def pages_of(tensors, optional):
    return Pages(
        tensors.page_table, optional.stride_page_b, optional.stride_page_p, optional.page_size, optional.has_pages
    )


@triton.jit
def attention_forward(tensors, max_at, sizes, strides, kv_strides, optional, mask, mods, TILE: tl.constexpr):
    """out = softmax(SCORE(query key^T scale)) value over what MASK lets be seen, and its log-sum-exp; max_at as
    store_statistics has it."""
    bh = tl.program_id(1)
    b = bh // sizes.H
    h = bh % sizes.H
    # The last tiles of queries first: under a causal mask they have the most to do.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    number, row0, row_end = tile_in_blocks(tile, mask.q_block, sizes.M, TILE.BLOCK_M)
    rows = row0 + tl.arange(0, TILE.BLOCK_M)
    row_inside = rows < row_end
    h_kv = (h // sizes.group).to(tl.int64)
    q_at = tl.cast(b, tl.int64) * strides.query.b + rows.to(tl.int64) * strides.query.n
    q = load_rows(tensors.query + tl.cast(h, tl.int64) * strides.query.h, q_at, row_inside, sizes.D, strides.query.d,
                  TILE.BLOCK_D, TILE.EVEN)  # fmt: skip
    kv_end = length_of(tensors.kv_lengths, optional.stride_length, b, sizes.N, optional.has_lengths)

    m_i = tl.full([TILE.BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([TILE.BLOCK_M], tl.float32)
    acc = tl.zeros([TILE.BLOCK_M, TILE.BLOCK_DV], tl.float32)
    partial, full = lists_of(tensors.kv_lists, kv_strides)
    met = tiles_met(b, h, number, row0, tl.minimum(row0 + TILE.BLOCK_M, row_end) - 1, kv_end, partial, full,
                    mask.kv_block, mask.band_left, mask.band_right, mask.band_exact, mods.MASK is not None,
                    TILE.BLOCK_N)  # fmt: skip
    pages = pages_of(tensors, optional)
    key = Rows(tensors.key + h_kv * strides.key.h, strides.key)
    value = Rows(tensors.value + h_kv * strides.value.h, strides.value)
    h64 = tl.cast(h, tl.int64)
    tiles = TileList(indices_of(b, h, number, partial), partial.strides.indices_i, mask.kv_block, kv_end, met.has_lists,
                     met.lo, met.full_lo, met.full_hi)  # fmt: skip
    sums = attend((acc, m_i, l_i), q, 0, met.partial, b, h, rows[:, None], key, value, pages, tiles, sizes, mods, True,
                  TILE)  # fmt: skip
    tiles = TileList(indices_of(b, h, number, full), full.strides.indices_i, mask.kv_block, kv_end, met.has_lists,
                     met.full_lo, met.full_hi, met.full_hi)  # fmt: skip
    acc, m_i, l_i = attend(sums, q, 0, met.full, b, h, rows[:, None], key, value, pages, tiles, sizes, mods, False,
                           TILE)  # fmt: skip
    row_max = m_i
    if optional.has_sinks != 0:
        m_i, l_i, alpha = add_sink(m_i, l_i, tl.load(tensors.sinks + h64 * optional.stride_sink))
        acc = acc * alpha[:, None]
    factor, row_lse = end_of_row(m_i, l_i)
    o_at = tl.cast(b, tl.int64) * strides.out.b + rows.to(tl.int64) * strides.out.n
    store_rows(tensors.out + h64 * strides.out.h, o_at, acc * factor[:, None], row_inside, sizes.DV, strides.out.d,
               TILE.BLOCK_DV, TILE.EVEN)  # fmt: skip
    store_statistics(tensors.lse, max_at, tl.cast(bh, tl.int64), rows, sizes.M, row_lse, row_max, row_inside)


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
        return _STRIDED[point.head.size]
    table = _32[point.precision] if point.dtype == "fp32" else _16[80 if point.arch < 90 else 90]
    return table[point.head.size]


def config(rows: int, cols: int, stages: int, warps: int, prefix: str = "") -> Config:
    shape = dict(block_m=rows, block_n=cols, num_stages=stages, num_warps=warps)
    return Config(f"{prefix}{rows}x{cols}_s{stages}_w{warps}", shape)


def query_tiles(op: Op, rows: int) -> Expr:
    """Tiles of one head: of blocks as the mask has them; without one there is one block."""
    M, q_block = op.local("M"), op.int("q_block")
    return ceil_div(M, q_block) * ceil_div(minimum(q_block, M), rows)


def kernel(problem: Problem, mods: Mods, heads: tuple[Head, ...], layouts: tuple[str, ...] = LAYOUTS) -> Kernel:
    op = problem.op

    def plan(point: Point) -> Plan | None:
        c = point.config
        if not problem.makes_sense(point) or not takes_layout(point.layout, point.head, heads):
            return None
        if c.name != config(*setting(point)).name:
            return None
        tiles = query_tiles(op, c.block_m)
        grid = (tiles, op.local("B") * op.local("H"), 1)
        waves = ceil_div(grid[0] * grid[1], device.sm_count)
        slowdown = {"aligned": 1, "paged": 2, "strided": 4}[point.layout]
        time = tile_time(c.block_m, c.block_n, point.head, ITEMSIZE[point.dtype], slowdown)
        launch = Launch(
            attention_forward,
            arguments(problem, mods, point),
            grid,
            num_warps=c.num_warps,
            num_stages=c.num_stages,
            options=UNFUSED,
            max_spill_bytes=8192 if point.layout == "strided" else 2048,  # what takes everything is not fast
        )
        return Plan(
            constraints=problem.constraints(op, point, ("query", "key", "value", "out")),
            serves=problem.serves(point),
            launches=(launch,),
            cost=4_000_000 + waves * ceil_div(op.local("N"), c.block_n) * time,
            general=point.layout == "strided",
        )

    configs = {}
    for arch in (80, 90):
        tables = (_16[arch], *_32.values(), _STRIDED)
        configs[arch] = distinct(config(*setting) for table in tables for setting in of_heads(table, heads))
    return Kernel(f"{problem.name}_forward", op, problem.axes(heads, layouts, tf32=True), configs, plan)


def arguments(problem: Problem, mods: Mods, point: Point) -> dict[str, Arg | Bundle]:
    """The arguments by name; decoding has them too."""
    op, c = problem.op, point.config
    tensors = ForwardTensors(
        **{name: problem.rows(op, name, point) for name in ("query", "key", "value", "out")},
        kv_lists=problem.lists(op, "kv"),
        **{name: problem.pointer(op, name) for name in ("kv_lengths", "page_table", "sinks", "lse")},
    )
    return {
        "tensors": tensors,
        "max_at": Int(problem.max_at(op)),
        "sizes": ForwardSizes(**problem.sizes(op, ForwardSizes._fields, point)),
        "strides": ForwardStrides(**{name: problem.strides(op, name, point) for name in ForwardStrides._fields}),
        "kv_strides": problem.list_strides(op, "kv"),
        "optional": Optional(**{name: problem.optional(op)[name] for name in Optional._fields}),
        "mask": problem.mask(op),
        "mods": mods,
        "TILE": Const(
            ForwardTile(
                BLOCK_M=c.block_m,
                BLOCK_N=c.block_n,
                BLOCK_D=point.head.qk,
                BLOCK_DV=point.head.v,
                PAGED=point.layout != "aligned",
                EVEN=point.head.exact,
                PRECISION=point.precision,
            )
        ),
    }
