"""Attention against what a user of torch has: scaled_dot_product_attention by each of its backends and, with
``--compiled``, torch's own flex_attention compiled with max-autotune (some 40 seconds a row: see ``--jobs``).

Forward and backward in TFLOP/s, masked scores not counted; decoding in GB/s of keys and values. Everything is replayed
from CUDA graphs, on random data, variants in turns; a row whose result is wrong is a failure and is not timed.

Beside the rows stand figures of what there is no row for: a mod's first call, and the host's time of a hundred lengths.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import tk
from benchmarks import parallel
from benchmarks.report import Figure, Goal, Report, Row
from benchmarks.runner import Options
from tk import timing
from tk.flex import mods

WINDOW = 1024
DOCUMENTS = 4
RANDOM = 30  # of a kind
Call = Callable[[], Any]


@dataclass(frozen=True)
class Task:
    """kind: "forward", "backward", "decode" or "sdpa". mask: "full", "causal", "window", "document", and of sdpa
    "bool" or "additive"; score: "", "alibi", or "soft_cap". Decoding has one row, and `length` keys. compiled: whether
    compiled flex_attention is among its peers."""

    kind: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    mask: str = "full"
    score: str = ""
    compiled: bool = False
    drawn: bool = False

    @property
    def is_plain(self) -> bool:
        return self.mask in ("full", "causal") and not self.score

    @property
    def label(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return " ".join(filter(None, (self.kind, f"{self.batch}x{heads}x{self.length}x{self.head_dim}", self.mask,
                                      self.score)))  # fmt: skip

    @property
    def flops(self) -> float:
        full = 4.0 * self.batch * self.heads * self.length**2 * self.head_dim
        share = {"causal": 0.5, "document": 0.5 / DOCUMENTS, "window": min(1.0, WINDOW / self.length)}
        return full * share.get(self.mask, 1.0) * (2.5 if self.kind == "backward" else 1.0)

    @property
    def kv_bytes(self) -> int:
        return 2 * self.batch * self.kv_heads * self.length * self.head_dim * 2


def listed() -> Iterator[Task]:
    """16k tokens of 2,048 features; groups of heads; mods; decoding; masks as scaled_dot_product_attention has them."""
    for kind in ("forward", "backward"):
        for d in (64, 128, 256):
            for length in (512, 1024, 2048, 4096, 8192, 16384):
                for mask in ("full", "causal"):
                    compiled = length == 8192 and d < 256
                    yield Task(kind, 16384 // length, 2048 // d, 2048 // d, length, d, mask, compiled=compiled)
        for heads, kv_heads in ((16, 4), (32, 8)):
            for length in (2048, 8192, 32768):
                yield Task(kind, 4 if length < 32768 else 1, heads, kv_heads, length, 128, "causal")
        for mask, score in (("window", ""), ("document", ""), ("full", "alibi"), ("causal", "alibi"),
                            ("full", "soft_cap"), ("causal", "soft_cap")):  # fmt: skip
            for d in (64, 128):
                yield Task(kind, 2, 2048 // d, 2048 // d, 8192, d, mask, score, compiled=True)
    for batch, length in ((8, 8192), (1, 65536), (64, 4096), (1, 1024), (1, 131072), (16, 2048)):
        for heads, kv_heads in ((32, 8), (16, 2), (16, 1)):
            yield Task("decode", batch, heads, kv_heads, length, 128, compiled=kv_heads == 8 and batch * length > 60000)
    for mask in ("full", "causal", "bool", "additive"):
        for length in (1024, 4096):
            yield Task("sdpa", 16384 // length, 16, 16, length, 128, mask)


def drawn() -> Iterator[Task]:
    """Lengths that are multiples of nothing in particular, and batches that make for as many tokens."""
    rng = random.Random("attention")

    def length(low: int, high: int) -> int:
        n = round(low * (high / low) ** rng.random())
        return max(1, n // (by := rng.choice((1, 8, 128))) * by)

    for kind in ("forward", "backward"):
        for i in range(RANDOM):
            n, d = length(256, 16384), rng.choice((64, 128))
            heads, kv_heads = rng.choice(((16, 16), (16, 4), (32, 8)))
            mods_of = (
                (("full", ""), ("causal", "")) if i % 3 else (("window", ""), ("causal", "alibi"), ("document", ""))
            )
            mask, score = rng.choice(mods_of)
            yield Task(kind, max(1, 16384 // n), heads, kv_heads, n, d, mask, score, i % 3 == 0, True)
    for _ in range(RANDOM):
        heads, kv_heads = rng.choice(((32, 8), (16, 2), (16, 1), (64, 8)))
        n = length(1024, 131072)
        yield Task("decode", max(1, min(64, round(2 ** rng.uniform(0, 18 - n.bit_length())))), heads, kv_heads, n, 128,
                   drawn=True)  # fmt: skip


# --- What is called ---


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    block_mask: Any
    score_mod: Any
    bias: Tensor | None

    @staticmethod
    def random(task: Task) -> Inputs:
        rows = 1 if task.kind == "decode" else task.length
        shapes = ((task.heads, rows), (task.kv_heads, task.length), (task.kv_heads, task.length))
        q, k, v = (torch.randn(task.batch, h, n, task.head_dim, device="cuda", dtype=torch.bfloat16).requires_grad_(
            task.kind == "backward") for h, n in shapes)  # fmt: skip
        bias = None
        if task.mask in ("bool", "additive"):
            bias = torch.randn(task.batch, 1, rows, task.length, device="cuda", dtype=torch.bfloat16)
            bias = bias > -1 if task.mask == "bool" else bias
        return Inputs(q, k, v, torch.randn_like(q), mask_of(task), score_of(task), bias)


def mask_mod_of(task: Task) -> Any:
    if task.mask == "document":
        ids = (torch.arange(task.length, device="cuda") * DOCUMENTS // task.length).int()
        return mods.and_masks(mods.causal, mods.document(ids.expand(task.batch, -1).contiguous()))
    return {"causal": mods.causal, "window": mods.sliding_window(WINDOW)}.get(task.mask)


def mask_of(task: Task) -> Any:
    mask = mask_mod_of(task)
    if mask is None:
        return None
    return tk.flex.create_block_mask(mask, task.batch, None, task.length, task.length, device="cuda")


def score_of(task: Task) -> Any:
    if task.score == "alibi":
        return mods.alibi(2.0 ** (-8 * torch.arange(1, task.heads + 1, device="cuda") / task.heads))
    return mods.soft_cap(30.0) if task.score == "soft_cap" else None


def ours(task: Task, x: Inputs) -> Tensor:
    if task.kind == "sdpa":
        return tk.sdpa(x.q, x.k, x.v, attn_mask=x.bias, is_causal=task.mask == "causal", enable_gqa=True)
    return tk.flex_attention(x.q, x.k, x.v, x.score_mod, x.block_mask, enable_gqa=True)


def sdpa(backend: SDPBackend, task: Task, x: Inputs) -> Tensor:
    causal = task.mask == "causal"
    with sdpa_kernel(backend), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # why a backend does not take it
        return F.scaled_dot_product_attention(x.q, x.k, x.v, x.bias, is_causal=causal, enable_gqa=True)


def with_backward(forward: Callable[[Inputs], Tensor], x: Inputs) -> Call:
    """The gradients alone, of a forward pass that is done."""
    stream = timing.capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = forward(x)
    torch.cuda.current_stream().wait_stream(stream)
    return lambda: torch.autograd.grad(out, (x.q, x.k, x.v), x.grad, retain_graph=True)


BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION}  # fmt: skip


def backends(task: Task) -> dict[str, Callable[[Inputs], Tensor]]:
    if not (task.is_plain or task.kind == "sdpa"):
        return {}
    return {name: partial(sdpa, backend, task) for name, backend in BACKENDS.items()}


def compiled_flex(task: Task) -> Callable[[Inputs], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    function = torch.compile(flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs")
    mask = mask_mod_of(task)
    theirs = None
    if mask is not None:
        theirs = create_block_mask(mask, task.batch, None, task.length, task.length, device="cuda")
    return lambda x: function(x.q, x.k, x.v, x.score_mod, theirs, enable_gqa=True)


# --- Measuring ---

LEAST_BYTES = 32 << 20
COPY = Goal(0.85, 0.75)


@dataclass(frozen=True)
class Peer:
    """Of a group of rows: which variants' best time counts, and the goal."""

    title: str
    variants: tuple[str, ...]
    goal: Goal


CUDNN, FLEX = ("cudnn",), ("flex",)
PEERS = {
    "forward": (Peer("cuDNN", CUDNN, Goal(1.05, 0.97)), Peer("compiled flex", FLEX, Goal(1.40, 1.15))),
    "backward": (Peer("cuDNN", CUDNN, Goal(0.95, 0.85)), Peer("compiled flex", FLEX, Goal(1.30, 1.10))),
    "decode": (Peer("the better of SDPA and compiled flex", (*BACKENDS, "flex"), Goal(1.1, 1.0)),),
    "sdpa": (Peer("the best of torch's backends", tuple(BACKENDS), Goal(1.0, 0.95)),),
}


def measure(task: Task, compiled: bool) -> dict[str, float]:
    """Microseconds of every variant; checked first."""
    with parallel.gpu():
        copies = timing.copies_to_rotate(3 * task.kv_bytes, most=8)
        sets = [Inputs.random(task) for _ in range(copies)]
        check(task, sets[0])
        torch.cuda.synchronize()
    ways = {"tk": partial(ours, task)} | backends(task)
    if compiled and task.compiled:
        ways["flex"] = compiled_flex(task)
        _call(task, ways["flex"], sets[0])()  # compiles and tunes
    captures, calls = {}, {}  # a backward pass reads what its call holds
    with parallel.gpu():
        for name, way in ways.items():
            try:
                calls[name] = [_call(task, way, x) for x in sets]
                captures[name] = timing.capture(calls[name])
            except RuntimeError:  # a backend without a kernel for it
                if name not in BACKENDS:
                    raise
        times = timing.device_times(captures, rounds=5, ms=6, warm_ms=6)
        del captures, calls, sets
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return {name: t.us for name, t in times.items()}


def _call(task: Task, way: Callable[[Inputs], Tensor], x: Inputs) -> Call:
    return with_backward(way, x) if task.kind == "backward" else partial(way, x)


def check(task: Task, x: Inputs) -> None:
    """Against float64, some rows of the first head."""
    with torch.no_grad():
        out = ours(task, x)
    rows = torch.arange(0, x.q.shape[2], max(1, x.q.shape[2] // 16), device="cuda")
    q, k, v = x.q[0, 0, rows].detach().double(), x.k[0, 0].detach().double(), x.v[0, 0].detach().double()
    s = q @ k.T * task.head_dim**-0.5
    zero, keys = torch.zeros((), dtype=torch.int64, device="cuda"), torch.arange(task.length, device="cuda")
    if x.score_mod is not None:
        s = x.score_mod(s, zero, zero, rows[:, None], keys[None, :])
    if x.bias is not None:
        of_rows = x.bias[0, 0, rows]
        s = s.masked_fill(~of_rows, float("-inf")) if task.mask == "bool" else s + of_rows
    mask = mask_mod_of(task)
    if mask is not None:
        s = s.masked_fill(~mask(zero, zero, rows[:, None], keys[None, :]), float("-inf"))
    torch.testing.assert_close(out[0, 0, rows].double(), torch.softmax(s, -1) @ v, atol=2e-2, rtol=2e-2)


def add_rows(report: Report, task: Task, us: dict[str, float]) -> None:
    suffix, said = ("_random", ", random") if task.drawn else ("", "")
    if task.kind == "decode":
        unit, rate = "GB/s", lambda t: task.kv_bytes / t * 1e-3
    else:
        unit, rate = "TFLOP/s", lambda t: task.flops / t * 1e-6
    more = {unit: rate(us["tk"])}
    ratios = []
    for i, peer in enumerate(PEERS[task.kind]):
        found = [us[name] for name in peer.variants if name in us]
        if not found:
            continue
        group = report.group(f"{task.kind}{i or ''}{suffix}", f"{task.kind}{said}", peer.title, peer.goal)
        group.rows.append(Row(task.label, min(found) / us["tk"], us, more))
        ratios.append(min(found) / us["tk"])
    if task.kind == "decode" and task.kv_bytes >= LEAST_BYTES:
        share = rate(us["tk"]) / report.environment["copy_gbps"]
        group = report.group(f"copy{suffix}", f"decode, share of a copy{said}", "copy", COPY)
        group.rows.append(Row(task.label, share, us, more))
        ratios.append(share)
    rates = "  ".join(f"{name} {rate(t):.0f}" for name, t in us.items())
    print(f"{task.label:44} {' '.join(f'{r:.2f}' for r in ratios):12} {unit}: {rates}", flush=True)


# --- Figures ---


def first_call(report: Report, compiled: bool) -> None:
    """A mod that this process has not called, from the call to its result: the first of all, and a further one."""
    tasks = [Task("forward", 1, 16, 16, 1024, 128, "causal", score) for score in ("soft_cap", "alibi")]
    sets = [Inputs.random(task) for task in tasks]
    x = sets[0]
    torch.ops.tk.mm(x.q[0, 0], x.k[0, 0].T)  # the GPU is in use
    for name, task, x in zip(("first", "further"), tasks, sets, strict=True):
        what = "first call of a process" if name == "first" else "first call of a further mod"
        figure(report, f"call_{name}", what, partial(ours, task, x), 5.0)
        if compiled:
            theirs = partial(compiled_flex(task), x)
            figure(report, f"call_{name}_flex", f"{what}, compiled flex_attention", theirs)


def figure(report: Report, name: str, title: str, call: Call, limit: float | None = None) -> None:
    """How long one call takes."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize()
    report.figures.append(Figure(name, title, (time.perf_counter() - begun) * 1e3, "ms", limit))


def lengths(report: Report) -> None:
    """The host's time of a call of each of a hundred lengths, all met for the first time, once modules are loaded."""
    rng = random.Random("lengths")
    worst = 0.0
    for i, length in enumerate((1, 100, 1000, 8192, *(rng.randint(1, 8192) for _ in range(100)))):
        task = Task("forward", 1, 8, 8, length, 64, "causal")
        x = Inputs.random(task)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        ours(task, x)
        worst = max(worst, (time.perf_counter() - begun) * 1e3 if i >= 4 else 0.0)
    title = "host time of a call, the longest of 100 lengths, each new"
    report.figures.append(Figure("lengths_host", title, worst, "ms", 1.0))


class Recorded(TorchDispatchMode):
    """The calls of ops that are made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(partial(op, *args, **(kwargs or {})))
        return self.calls[-1]()


def host(report: Report) -> None:
    """What tk.flex_attention costs, and its op, which it passes by where nothing but the kernel would be called."""
    task = Task("forward", 1, 4, 4, 64, 64, "causal")
    wrapper = partial(ours, task, Inputs.random(task))
    with torch.no_grad():
        with Recorded() as recorded:
            wrapper()
        [op] = recorded.calls
        times = timing.host_times({"wrapper": wrapper, "op": op})
    report.figures.append(Figure("attention_host_op", "host time of attention's op", times["op"].us, "us"))
    report.figures.append(Figure("attention_host", "host time of tk.flex_attention", times["wrapper"].us, "us"))
    beyond = times["wrapper"].us - times["op"].us
    report.figures.append(
        Figure("attention_host_beyond", "host time of tk.flex_attention beyond its op", beyond, "us", 10.0)
    )


def run(options: Options, report: Report) -> None:
    report.environment["copy_gbps"] = timing.copy_bandwidth()
    print(f"copy {report.environment['copy_gbps']:.0f} GB/s", flush=True)
    if options.wants("figures"):
        report.attempt("first call", partial(first_call, report, options.compiled))
        report.attempt("lengths", partial(lengths, report))
        report.attempt("host", partial(host, report))
    wanted = [t for t in (*listed(), *drawn()) if options.wants(t.label)][:: 6 if options.quick else 1]

    def add(task: Task, row: Callable[[], dict[str, float]]) -> None:
        add_rows(report, task, row())

    for task, row in parallel.rows(wanted, options, measure):
        report.attempt(task.label, partial(add, task, row))
