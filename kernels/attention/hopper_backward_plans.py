"""When Hopper's kernels for gradients run, and with which arguments."""

from collections.abc import Mapping, Sequence
from itertools import chain

from tk.aot.expr import Expr, ceil_div, device, maximum, minimum, select
from tk.aot.spec import (
    Arg,
    Buffer,
    Config,
    Const,
    Constraint,
    Int,
    Kernel,
    Launch,
    Op,
    Plan,
    Point,
    Pointer,
    Scratch,
    require,
)
from tk.kernels.attention.backward import attention_sink_gradient, capture_launches, pick
from tk.kernels.attention.hopper_backward import attention_statistics
from tk.kernels.attention.hopper_tiles import descriptor, no_repeats
from tk.kernels.attention.problem import Head, Problem, tensor, tile_time

_TILE = 128  # rows that a program keeps: of both consumers
_L2_BYTES = 16 << 20  # what is walked at a time, as in the forward pass


# Settings that are tried beside those that ship, by the larger head size: tools/attention_candidates.py.
CANDIDATES: Mapping[int, tuple[Config, ...]] = {}


def config(step: int, stages: int, regs: int, producer_regs: int) -> Config:
    shape = dict(step=step, num_stages=stages, consumer_regs=regs, producer_regs=producer_regs)
    return Config(f"hopper_{_TILE}x{step}_s{stages}", shape)


_CONFIGS = {64: config(128, 2, 240, 24), 128: config(64, 3, 240, 32)}  # by the larger head size
_WITH_SCORE = config(64, 4, 240, 24)  # head size 64, where derivatives take registers


def kernel(problem: Problem, of_keys: object, of_queries: object, heads: tuple[Head, ...], has_mask: bool,
           has_score: bool) -> Kernel:  # fmt: skip
    """The printed entries in front of `attention_hopper_keys` and `attention_hopper_queries`. Smaller heads are served
    too. Gradients of captured tensors are the plain kernel's."""
    op = problem.backward_op

    def config_of(head: Head) -> Config:
        size = max(head.qk, head.v)
        return _WITH_SCORE if size == 64 and has_score else _CONFIGS[size]

    def plan(point: Point) -> Plan | None:
        c = point.config
        is_tried = c in CANDIDATES.get(max(point.head.qk, point.head.v), ())
        if point.dtype == "fp32" or (c.name != config_of(point.head).name and not is_tried):
            return None
        names = ("query", "key", "value", "grad_0", "grad_query", "grad_key", "grad_value")
        ways = {} if not problem.grad_captures else {"captures": (0,)}
        return Plan(
            constraints=(*problem.constraints(op, point, (*names, "out0")), *_constraints(problem, names)),
            serves=problem.serves(point) | ways,
            launches=tuple(_launches(problem, point, of_keys, of_queries, has_mask)),
            cost=_cost(problem, point),
            buffers=_buffers(problem, has_mask),
            droppable=True,  # the plain kernel serves the mods whose derivatives leave no registers
        )

    axes = {"dtype": problem.dtypes, "precision": ("ieee",), "head": heads, "layout": ("aligned",),
            "captures": ("none",)}  # fmt: skip
    configs = {c.name: c for c in (*_CONFIGS.values(), _WITH_SCORE, *chain(*CANDIDATES.values()))}
    return Kernel(f"{problem.name}_backward_hopper", op, axes, {90: tuple(configs.values())}, plan)


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
    """Of the statistics."""
    op = problem.backward_op
    return op.local("B") * op.local("H") + 1


def _buffers(problem: Problem, has_mask: bool) -> tuple[Buffer, ...]:
    size = _rows(problem) * _padded(problem) * 4
    return Buffer(size), Buffer(size), Buffer(4, zeroed=True) if has_mask else Buffer(4)


def _tiles(problem: Problem) -> tuple[Expr, Expr, Expr, Expr]:
    """Of keys, of one head and in all; of queries, the same."""
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


def _launches(problem: Problem, point: Point, of_keys: object, of_queries: object, has_mask: bool) -> list[Launch]:
    op = problem.backward_op
    shared = _arguments(problem, point, has_mask)
    n_tiles, key_tiles, m_tiles, query_tiles = _tiles(problem)
    B, H, N, D = op.local("B"), op.local("H"), op.local("N"), point.head.qk + point.head.v
    H_kv, B_kv = op.local("H_kv"), tensor(op, "key").size(0)
    statistics = Launch(
        attention_statistics,
        pick(attention_statistics, shared | {"BLOCK_M": Const(32)}),
        (_padded(problem) // 32, _rows(problem), 1),
    )
    sinks = tensor(op, "sinks")
    sink = Launch(
        attention_sink_gradient,
        pick(attention_sink_gradient, shared | {"BLOCK_M": Const(1024)}),
        (sinks.size(0), 1, 1),
    )
    walked = maximum(_L2_BYTES // maximum(op.local("M") * op.local("group") * D * 2, 1), 1)
    of_key_tiles = {
        **_descriptors(op, point, kept=("key", "value", "grad_key", "grad_value"), walked=("query", "grad_0")),
        "n_tiles": Int(n_tiles),
        "tiles": Int(key_tiles),
        "heads": Int(minimum(walked, B_kv * H_kv)),
        **problem.list_args(op, "q", "i32"),
    }
    walked = maximum(_L2_BYTES // maximum(N * D * 2, 1), 1) * maximum(op.local("group"), 1)
    of_query_tiles = {
        **_descriptors(op, point, kept=("query", "grad_0", "grad_query"), walked=("key", "value")),
        "m_tiles": Int(m_tiles),
        "tiles": Int(query_tiles),
        "heads": Int(minimum(walked, B * H)),
        **problem.list_args(op, "kv", "i32"),
    }
    found = [*capture_launches(problem, point)[0], statistics, sink]
    for fn, args, tiles in ((of_keys, of_key_tiles, key_tiles), (of_queries, of_query_tiles, query_tiles)):
        grid = (minimum(tiles, device.sm_count), 1, 1)
        found.append(Launch(fn, pick(fn, shared | args), grid, num_warps=4, num_stages=1, max_spill_bytes=4096))
    return found


def _descriptors(op: Op, point: Point, kept: Sequence[str], walked: Sequence[str]) -> dict[str, Arg]:
    def columns(name: str) -> int:
        return point.head.v if name in ("value", "grad_0", "grad_value") else point.head.qk

    rows = dict.fromkeys(kept, 64) | dict.fromkeys(walked, point.config.step)
    return {"grad_out" if n == "grad_0" else n: descriptor(op, n, point.dtype, r, columns(n)) for n, r in rows.items()}


def _arguments(problem: Problem, point: Point, has_mask: bool) -> dict[str, Arg]:
    """What the launches have in common, by name."""
    op, c = problem.backward_op, point.config
    lse, grad_lse, optional = tensor(op, "out1"), tensor(op, "grad_1"), problem.optional_args(op)
    return {
        **problem.size_args(op, point),
        **problem.row_args(op, {"out0": "om", "grad_0": "gm"}, point),
        **{n: optional[n] for n in ("kv_lengths", "stride_length", "has_lengths", "sinks", "stride_sink")},
        **problem.capture_args(op),
        "B": Int(op.local("B")),
        "B_kv": Int(maximum(tensor(op, "key").size(0), 1)),
        "H_kv": Int(op.local("H_kv")),
        "out1": Pointer(lse, "fp32", aligned=False),
        "grad_1": Pointer(grad_lse, "fp32", aligned=False),
        "grad_sinks": Pointer(tensor(op, "grad_sinks"), "fp32", aligned=False),
        **{f"stride_l{x}": Int(lse.stride(d), "i64") for d, x in enumerate("bhm")},
        **{f"stride_grad_lse_{x}": Int(grad_lse.stride(d), "i64") for d, x in enumerate("bhm")},
        "lse": Scratch(0, "fp32"),
        "delta": Scratch(1, "fp32"),
        "counter": Scratch(2, "i32"),
        "padded": Int(_padded(problem)),
        "EVEN": Const(point.head.exact),
        "BLOCK_DV": Const(point.head.v),
        "STAGES": Const(c.num_stages),
        "DYNAMIC": Const(has_mask),
        "CONSUMER_REGS": Const(c.consumer_regs),
        "PRODUCER_REGS": Const(c.producer_regs),
    }
