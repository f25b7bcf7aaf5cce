"""Generated ops against torch's own kernels, torch.compile and the copy ceiling.

Inputs rotate through 300 MB, everything is replayed from CUDA graphs, variants take turns. With ``--compiled`` the peer
is torch.compile with max-autotune, seconds for each row; without it rows are against eager torch alone, and no goal is
judged but the share of a copy.

Most of a row's time is its compilation: ``--jobs`` has several processes compile (benchmarks/parallel.py).

As in benchmarks/mm.py each line is met twice: by the shapes listed, and by shapes drawn at random, which are judged.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import ops, parallel
from benchmarks.report import Goal, Group, Report, Row
from benchmarks.runner import Options
from tk import capi, timing
from tk.codegen.scheduling.settings import FOR_SMALL
from tk.generated import inputs, register
from tk.generated.inputs import Example
from tk.heuristics.problem import describe

aten = torch.ops.aten

# --- What torch has for an op ---

Peer = tuple[Callable[..., Any], tuple[Any, ...]]  # a function, and what it is called with


def _approximation(tanh: bool) -> str:
    return "tanh" if tanh else "none"


def _layer_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> Peer:
    """With the statistics that autograd has from the forward pass."""
    shape = [x.shape[-1]]
    _, mean, rstd = aten.native_layer_norm(x, shape, weight, None, eps)

    def run(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> Any:
        return aten.native_layer_norm_backward(grad, x, shape, mean, rstd, weight, weight, [True, True, True])

    return run, (grad, x, mean, rstd, weight)


def _rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> Peer:
    shape = [x.shape[-1]]
    _, rstd = aten._fused_rms_norm(x, shape, weight, eps)

    def run(grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> Any:
        return aten._fused_rms_norm_backward(grad, x, shape, rstd, weight, [True, True])

    return run, (grad, x, rstd, weight)


def _with(function: Callable[..., Any]) -> Callable[..., Peer]:
    return lambda *args: (function, args)


def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> Any:
    return aten.silu_backward(grad * up, gate), grad * F.silu(gate)


# What prepares the peer's call from the op's arguments.
PEERS: Mapping[str, Callable[..., Peer]] = {
    "softmax": _with(lambda x: torch.softmax(x, -1)),
    "log_softmax": _with(lambda x: torch.log_softmax(x, -1)),
    "logsumexp": _with(lambda x: torch.logsumexp(x, -1)),
    "layer_norm": _with(lambda x, w, b, eps: F.layer_norm(x, (x.shape[-1],), w, b, eps)),
    "rms_norm": _with(lambda x, w, eps: F.rms_norm(x, (x.shape[-1],), w, eps)),
    "gelu": _with(lambda x, tanh: F.gelu(x, approximate=_approximation(tanh))),
    "silu": _with(F.silu),
    "swiglu": _with(lambda gate, up: F.silu(gate) * up),
    "row_sum": _with(lambda x: x.sum(-1)),
    "row_mean": _with(lambda x: x.mean(-1)),
    "row_amax": _with(lambda x, sign, mirror: x.amax(-1)),  # with sign and mirror 1
    "row_argmax": _with(lambda x, sign: x.argmax(-1)),
    "row_max": _with(lambda x, sign: torch.max(x, -1)),
    "cumsum": _with(lambda x: x.cumsum(-1)),
    "cumsum_backward": _with(lambda grad: grad.flip(-1).cumsum(-1).flip(-1)),
    "cumprod": _with(lambda x: x.cumprod(-1)),
    "cummax": _with(lambda x: torch.cummax(x, -1)),
    "cummin": _with(lambda x: torch.cummin(x, -1)),
    "logcumsumexp": _with(lambda x: torch.logcumsumexp(x, -1)),
    "sort": _with(lambda x, descending: torch.sort(x, -1, descending)),
    "topk": _with(lambda x, k, largest: torch.topk(x, k, -1, largest)),
    "row_var_mean": _with(lambda x, bessel, power: torch.var_mean(x, -1, correction=0)),  # with bessel and power 1
    "column_sum": _with(lambda x: x.sum(0)),
    "softmax_backward": _with(lambda grad, y: aten._softmax_backward_data(grad, y, -1, y.dtype)),
    "log_softmax_backward": _with(lambda grad, y: aten._log_softmax_backward_data(grad, y, -1, y.dtype)),
    "layer_norm_backward": _layer_norm_backward,
    "rms_norm_backward": _rms_norm_backward,
    "gelu_backward": _with(lambda g, x, tanh: aten.gelu_backward(g, x, approximate=_approximation(tanh))),
    "silu_backward": _with(aten.silu_backward),
    "swiglu_backward": _with(_swiglu_backward),
}

# --- Shapes ---

MAIN = (32768, 4096)
SMALL = (4096, 512)  # of ops that the public functions call for what is small alone
LISTED = ((131072, 1024), (4096, 32768))
LISTED_OPS = ("softmax", "layer_norm", "rms_norm", "row_argmax", "row_sum", "column_sum")
SWEEP_ELEMENTS = 1 << 27
SWEEP = tuple((SWEEP_ELEMENTS >> n, 1 << n) for n in range(10, 19))  # 2^10 to 2^18 columns
SWEEP_OPS = ("softmax", "rms_norm")
RANDOM, SEED = 200, 5101  # rows drawn at random; the seed is used by nothing that tunes
RANDOM_OPS = ("softmax", "log_softmax", "layer_norm", "rms_norm", "gelu", "swiglu", "row_sum", "row_argmax",
              "row_var_mean", "column_sum", "softmax_backward", "rms_norm_backward", "layer_norm_backward",
              "silu", "cumsum", "sort")  # fmt: skip
MORE = (
    ("sort", (65536, 512), "fp32"), ("sort", (65536, 512), "bf16"), ("sort", (65536, 2048), "fp32"),
    ("sort", (4096, 32768), "fp32"), ("sort", (64, 1 << 20), "fp32"), ("cumsum", (131072, 1024), "bf16"),
    ("cumsum", (4096, 32768), "bf16"), ("cumsum", (32, 1 << 22), "bf16"),
)  # fmt: skip
LEAST_BYTES = 64e6


@dataclass(frozen=True)
class Task:
    """A call to time. kind: "listed" or "random"."""

    op: str
    shape: tuple[int, int]
    dtype: str = "bf16"
    kind: str = "listed"

    @property
    def label(self) -> str:
        return f"{self.op} {'x'.join(map(str, self.shape))} {self.dtype}"

    def example(self) -> Example:
        op = register.find(self.op)
        if op is None:
            raise ValueError(f"tk has no op {self.op}; there are {', '.join(register.names())}")
        return inputs.of_shape(op, self.shape, self.dtype)


def tasks(quick: bool) -> list[Task]:
    """In the order of what is worth most, since time may be short: the listed shape of all, those drawn, the rest."""
    main = [Task(op, SMALL if op in FOR_SMALL else MAIN) for op in PEERS]
    main += [Task("row_sum", MAIN, "fp32"), Task("column_sum", MAIN, "fp32")]
    more = [Task(*one) for one in MORE] + [Task(op, shape) for shape in LISTED for op in LISTED_OPS]
    sweep = [Task(op, shape) for shape in SWEEP for op in SWEEP_OPS if shape not in (MAIN, *LISTED)]
    drawn = list(random_tasks(RANDOM))
    if quick:
        return [*main[::6], *drawn[::6], *more[::6], *sweep[::6]]
    return [*main, *drawn, *more, *sweep]


def random_tasks(count: int, seed: int = SEED) -> Iterator[Task]:
    """Rows of 128·(2…99) columns, or of an odd number, 64 MB to 512 MB of them; all ops in turn."""
    rng = random.Random(seed)
    for i in range(count):
        columns = 128 * rng.randint(2, 99)
        if i % 3 == 2:
            columns += rng.choice((-1, 1)) * (2 * rng.randint(0, 31) + 1)
        elements = LEAST_BYTES / 2 * 8 ** rng.random()
        yield Task(RANDOM_OPS[i % len(RANDOM_OPS)], (int(elements // columns) + 1, columns), kind="random")


# --- Groups ---

GOAL_MEMORY, GOAL_COPY = Goal(1.05, 0.97), Goal(0.90, 0.90)
LONG_SOFTMAX = 4096
SHORT_SORT = 2048
COMPILED, EAGER, BETTER = "max-autotune", "eager", "the better of eager and max-autotune"


@dataclass(frozen=True)
class Kind:
    """Rows that are judged together. peer: COMPILED, EAGER or BETTER."""

    title: str
    goal: Goal | None
    peer: str = COMPILED

    def time(self, us: Mapping[str, float]) -> float:
        """The peer's."""
        return min(us[EAGER], us[COMPILED]) if self.peer == BETTER else us[self.peer]


KINDS: Mapping[str, Kind] = {
    "softmax_long": Kind("softmax, rows ≥ 4096", Goal(1.6, 1.2)),
    "argmax": Kind("argmax", Goal(1.5, 1.2)),
    "gelu": Kind("gelu", Goal(1.25, 1.2)),
    "scan": Kind("scans", Goal(1.0, 0.95), BETTER),
    "sort_short": Kind("sort, rows ≤ 2048", Goal(2.0, 1.3), EAGER),
    "sort_long": Kind("sort, longer rows", Goal(1.0, 0.95), EAGER),
    "topk": Kind("topk", None, EAGER),
    "memory": Kind("pointwise, norms, softmax, reductions ≥ 64 MB", GOAL_MEMORY),
}
SCANS = ("cumsum", "cumsum_backward", "cumprod", "cummax", "cummin", "logcumsumexp")


def group_name(task: Task) -> str:
    if task.op in ("softmax", "log_softmax") and task.shape[1] >= LONG_SOFTMAX:
        return "softmax_long"
    if task.op == "sort":
        return "sort_short" if task.shape[1] <= SHORT_SORT else "sort_long"
    return {"row_argmax": "argmax", "gelu": "gelu", "topk": "topk", **dict.fromkeys(SCANS, "scan")}.get(
        task.op, "memory"
    )


def group_of(report: Report, task: Task, compiled: bool) -> Group:
    """Without compiled torch there are no goals but those against eager torch."""
    name = group_name(task)
    kind = KINDS[name]
    suffix, said = ("_random", ", random") if task.kind == "random" else ("", "")
    if not compiled:
        return report.group(f"{name}{suffix}_eager", kind.title + said, EAGER)
    return report.group(f"{name}{suffix}", kind.title + said, kind.peer, kind.goal)


def copy_group(report: Report, task: Task) -> Group:
    suffix, said = ("_random", ", random") if task.kind == "random" else ("", "")
    return report.group(f"copy{suffix}", f"share of a copy{said}", "copy", GOAL_COPY)


# --- Measuring ---


@dataclass(frozen=True)
class Measured:
    """us: of every variant. more: what else the row keeps."""

    us: dict[str, float]
    more: dict[str, Any]


def measure(task: Task, compiled: bool) -> Measured:
    """Checked first: a wrong result is a failure, and not timed."""
    with parallel.gpu():
        example = task.example()
        args = example.arguments("cuda")
        results = ops.run_tk(example.op, args)
        verdicts = ops.judge(example.op, args, results)
        moved = inputs.bytes_moved(args, results)
        config = chosen(example, args)
        peer, given = PEERS[task.op](*args)
        del results
        _leave_gpu()
    function = None
    if compiled:
        function = compile_fresh(peer)
        function(*given)  # compiles and tunes
    with parallel.gpu():
        copies = timing.copies_to_rotate(inputs.bytes_moved(args, ()), most=16)
        sets = [args, *(example.arguments("cuda") for _ in range(copies - 1))]
        peers = [PEERS[task.op](*a) for a in sets]
        captures = {"tk": timing.capture([partial(ops.run_tk, example.op, a) for a in sets])}
        captures["eager"] = timing.capture([partial(f, *given) for f, given in peers])
        if function is not None:
            captures["max-autotune"] = timing.capture([partial(function, *given) for _, given in peers])
        times = timing.device_times(captures, rounds=5, ms=4, warm_ms=4)
        del captures, sets, peers, args, given
        _leave_gpu()
    error = max((v.ratio for v in verdicts), default=0.0)
    return Measured(
        {label: t.us for label, t in times.items()}, {"config": config, "error_ratio": error, "bytes": moved}
    )


def _leave_gpu() -> None:
    """With nothing running, and no memory held but that of live tensors."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def compile_fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Nothing of the shapes before makes this one dynamic or reaches the recompile limit."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, fullgraph=True, mode="max-autotune-no-cudagraphs")


def chosen(example: Example, args: Sequence[Any]) -> str:
    described = describe(ops.run_tk, example.op, args)
    return "none" if described is None else capi.choose(described.problem).config_name


def add_rows(report: Report, task: Task, us: dict[str, float], more: Mapping[str, Any]) -> None:
    """Against the peer, against eager, and against a copy of as many bytes."""
    compiled = COMPILED in us
    peer = KINDS[group_name(task)].time(us) if compiled else us[EAGER]
    gbps = more["bytes"] / us["tk"] * 1e-3
    share = gbps / report.environment["copy_gbps"]
    extra = {"op": task.op, "shape": list(task.shape), "dtype": task.dtype, "gbps": gbps, "of_copy": share, **more}
    group_of(report, task, compiled).rows.append(Row(task.label, peer / us["tk"], us, extra))
    if compiled:
        group_of(report, task, False).rows.append(Row(task.label, us["eager"] / us["tk"], us))
    if more["bytes"] >= LEAST_BYTES:
        copy_us = more["bytes"] / report.environment["copy_gbps"] * 1e-3
        copy_group(report, task).rows.append(Row(task.label, share, us | {"copy": copy_us}))
    times = "  ".join(f"{label} {t:.1f}" for label, t in us.items())
    print(
        f"{task.label:36} {peer / us['tk']:6.3f}  {100 * share:4.0f} % of copy  us: {times}  {more['config']}",
        flush=True,
    )


def run(options: Options, report: Report) -> None:
    report.environment["copy_gbps"] = timing.copy_bandwidth()
    print(f"copy {report.environment['copy_gbps']:.0f} GB/s", flush=True)
    wanted = [t for t in tasks(options.quick) if options.wants(f"{group_name(t)} {t.label}")]

    def add(task: Task, row: Callable[[], Measured]) -> None:
        measured = row()
        add_rows(report, task, measured.us, measured.more)

    for task, row in parallel.rows(wanted, options, measure):
        report.attempt(task.label, partial(add, task, row))
