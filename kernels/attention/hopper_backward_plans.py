"""The plans of Hopper's kernels for gradients: when they run, and with which arguments."""

from collections.abc import Mapping, Sequence
from itertools import chain

from tk.aot.expr import Expr, ceil_div, device, maximum, minimum, select
from tk.aot.spec import (
    Arg,
    Buffer,
    Bundle,
    Config,
    Const,
    Constraint,
    Int,
    Kernel,
    Launch,
    Op,
    Plan,
    Point,
    Scratch,
    require,
)
from tk.kernels.attention.backward import Lengths, capture_launches, row_arguments, sink_launch
from tk.kernels.attention.bundles import Mods
from tk.kernels.attention.hopper_backward import (
    KeySizes,
    KeyTensors,
    Pace,
    QuerySizes,
    QueryTensors,
    attention_hopper_keys,
    attention_hopper_queries,
    attention_statistics,
)
from tk.kernels.attention.hopper_tiles import Schedule, descriptor, no_repeats
from tk.kernels.attention.problem import Head, Problem, distinct, tensor, tile_time
from tk.kernels.attention.softmax import UNFUSED

_TILE = 128  # rows that a program keeps: of both consumers
_L2_BYTES = 16 << 20  # what is walked at a time, as in the forward pass


# Settings that are tried beside those that ship, by the larger head size: tools/attention_candidates.py.
CANDIDATES: Mapping[int, tuple[Config, ...]] = {}


def config(step: int, stages: int, regs: int, producer_regs: int) -> Config:
    shape = dict(step=step, num_stages=stages, consumer_regs=regs, producer_regs=producer_regs)
    return Config(f"hopper_{_TILE}x{step}_s{stages}", shape)


_CONFIGS = {64: config(128, 2, 240, 24), 128: config(64, 3, 240, 32)}  # by the larger head size
_WITH_SCORE = config(64, 4, 240, 24)  # head size 64, where derivatives take registers


def kernel(problem: Problem, mods: Mods, heads: tuple[Head, ...]) -> Kernel:
    """Smaller heads are served too. Gradients of captured tensors are the plain kernel's."""
    op = problem.backward_op
    has_mask, has_score = mods.MASK.value is not None, mods.SCORE.value is not None

    def config_of(head: Head) -> Config:
        return _WITH_SCORE if head.size == 64 and has_score else _CONFIGS[head.size]

    def plan(point: Point) -> Plan | None:
        c = point.config
        is_tried = c in CANDIDATES.get(point.head.size, ())
        if point.dtype == "fp32" or (c.name != config_of(point.head).name and not is_tried):
            return None
        names = ("query", "key", "value", "grad_0", "grad_query", "grad_key", "grad_value")
        ways = {} if not problem.grad_captures else {"captures": (0,)}
        return Plan(
            constraints=(*problem.constraints(op, point, (*names, "result_0")), *_constraints(problem, names)),
            serves=problem.serves(point) | ways,
            launches=tuple(_launches(problem, mods, point)),
            cost=_cost(problem, point),
            buffers=_buffers(problem, has_mask),
            droppable=True,  # the plain kernel serves the mods whose derivatives leave no registers
        )

    axes = problem.axes(heads, ("aligned",)) | {"captures": ("none",)}
    configs = distinct((*_CONFIGS.values(), _WITH_SCORE, *chain(*CANDIDATES.values())))
    return Kernel(f"{problem.name}_backward_hopper", op, axes, {90: configs}, plan)


def _constraints(problem: Problem, names: tuple[str, ...]) -> tuple[Constraint, ...]:
    op = problem.backward_op
    has_lists, q_block, kv_block = op.local("has_lists"), op.int("q_block"), op.int("kv_block")
    fits = (q_block % _TILE == 0) & (kv_block % _TILE == 0)
    return (
        require(select(has_lists, fits, 1), f"mask blocks that are multiples of {_TILE}"),
        require((op.local("M") > 0) & (op.local("N") > 0), "queries and keys"),
        require(tensor(op, "kv_lengths").size(0) == 0, "no kv_lengths"),
        require(_rows(problem) * _padded(problem) < 2**31, "fewer rows"),
        *no_repeats(op, names),
    )


def _padded(problem: Problem) -> Expr:
    return ceil_div(problem.backward_op.local("M"), _TILE) * _TILE


def _rows(problem: Problem) -> Expr:
    """The rows of the statistics."""
    op = problem.backward_op
    return op.local("B") * op.local("H") + 1


def _buffers(problem: Problem, has_mask: bool) -> tuple[Buffer, ...]:
    size = _rows(problem) * _padded(problem) * 4
    return Buffer(size), Buffer(size), Buffer(4, zeroed=True) if has_mask else Buffer(4)


def _tiles(problem: Problem) -> tuple[Expr, Expr, Expr, Expr]:
    """The tiles of keys, of one head and in all; of queries, the same."""
    op = problem.backward_op
    B, H, M, N, H_kv = (op.local(n) for n in ("B", "H", "M", "N", "H_kv"))
    n_tiles, m_tiles = ceil_div(N, _TILE), ceil_div(M, _TILE)
    return n_tiles, n_tiles * H_kv * tensor(op, "key").size(0), m_tiles, m_tiles * B * H


def _cost(problem: Problem, point: Point) -> Expr:
    op, step = problem.backward_op, point.config.step
    _, key_tiles, _, query_tiles = _tiles(problem)
    shared = op.local("B") * op.local("H") // maximum(op.local("H_kv") * tensor(op, "key").size(0), 1)
    time = tile_time(_TILE, step, point.head, 2)  # of two products, at half of what wgmma reaches
    keys = ceil_div(key_tiles, device.sm_count) * ceil_div(op.local("M"), step) * shared * time
    queries = ceil_div(query_tiles, device.sm_count) * ceil_div(op.local("N"), step) * (time * 3 // 4)
    return 10_000_000 + keys + queries


def _launches(problem: Problem, mods: Mods, point: Point) -> list[Launch]:
    op = problem.backward_op
    n_tiles, key_tiles, m_tiles, query_tiles = _tiles(problem)
    B, H, N, D = op.local("B"), op.local("H"), op.local("N"), point.head.qk + point.head.v
    H_kv, B_kv = op.local("H_kv"), tensor(op, "key").size(0)
    walked = maximum(_L2_BYTES // maximum(op.local("M") * op.local("group") * D * 2, 1), 1)
    of_keys = Schedule(Int(n_tiles), Int(key_tiles), Int(minimum(walked, B_kv * H_kv)))
    walked = maximum(_L2_BYTES // maximum(N * D * 2, 1), 1) * maximum(op.local("group"), 1)
    of_queries = Schedule(Int(m_tiles), Int(query_tiles), Int(minimum(walked, B * H)))
    statistics = {
        **row_arguments(problem, point),
        "out_lse": problem.pointer(op, "result_1"),
        "lse_strides": problem.row_strides(op, "result_1"),
        "lse": _LSE,
        "delta": _DELTA,
        "padded": Int(_padded(problem)),
        "BLOCK_M": Const(32),
    }
    found = [
        *capture_launches(problem, point)[0],
        Launch(attention_statistics, statistics, (_padded(problem) // 32, _rows(problem), 1)),
        sink_launch(problem, point, _DELTA, _padded(problem)),
    ]
    for fn, args, tiles in (
        (attention_hopper_keys, _key_arguments(problem, mods, point, of_keys), key_tiles),
        (attention_hopper_queries, _query_arguments(problem, mods, point, of_queries), query_tiles),
    ):
        grid = (minimum(tiles, device.sm_count), 1, 1)
        found.append(Launch(fn, args, grid, num_warps=4, num_stages=1, max_spill_bytes=2048, options=UNFUSED))
    return found


_LSE, _DELTA, _COUNTER = Scratch(0, "fp32"), Scratch(1, "fp32"), Scratch(2, "i32")


def _key_arguments(problem: Problem, mods: Mods, point: Point, schedule: Schedule) -> dict[str, Arg | Bundle]:
    op = problem.backward_op
    maps = _descriptors(op, point, kept=("key", "value", "grad_key", "grad_value"), walked=("query", "grad_0"))
    tensors = KeyTensors(**maps, lse=_LSE, delta=_DELTA, q_lists=problem.lists(op, "q"), counter=_COUNTER)
    return {
        "tensors": tensors,
        "sizes": KeySizes(**problem.sizes(op, KeySizes._fields, point)),
        "schedule": schedule,
        "q_strides": problem.list_strides(op, "q", "i32"),
        **_shared_arguments(problem, mods, point),
    }


def _query_arguments(problem: Problem, mods: Mods, point: Point, schedule: Schedule) -> dict[str, Arg | Bundle]:
    op, optional = problem.backward_op, problem.optional(problem.backward_op)
    tensors = QueryTensors(
        **_descriptors(op, point, kept=("query", "grad_0", "grad_query"), walked=("key", "value")),
        lse=_LSE,
        delta=_DELTA,
        kv_lists=problem.lists(op, "kv"),
        kv_lengths=problem.pointer(op, "kv_lengths"),
        counter=_COUNTER,
    )
    return {
        "tensors": tensors,
        "sizes": QuerySizes(**problem.sizes(op, QuerySizes._fields, point)),
        "schedule": schedule,
        "kv_strides": problem.list_strides(op, "kv", "i32"),
        "lengths": Lengths(optional["stride_length"], optional["has_lengths"]),
        **_shared_arguments(problem, mods, point),
    }


def _shared_arguments(problem: Problem, mods: Mods, point: Point) -> dict[str, Arg | Bundle]:
    op, c = problem.backward_op, point.config
    return {
        "scale": op.float("scale"),
        "padded": Int(_padded(problem)),
        "mask": problem.mask(op),
        "mods": mods,
        "PACE": Const(Pace(c.num_stages, mods.MASK.value is not None, c.consumer_regs, c.producer_regs)),
    }


def _descriptors(op: Op, point: Point, kept: Sequence[str], walked: Sequence[str]) -> dict[str, Arg]:
    def columns(name: str) -> int:
        return point.head.v if name in ("value", "grad_0", "grad_value") else point.head.qk

    rows = dict.fromkeys(kept, 64) | dict.fromkeys(walked, point.config.step)
    return {"grad_out" if n == "grad_0" else n: descriptor(op, n, point.dtype, r, columns(n)) for n, r in rows.items()}
