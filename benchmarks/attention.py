"""Attention against what a user of torch has: scaled_dot_product_attention with cuDNN's and FlashAttention's kernels
and, with ``--compiled``, torch's own flex_attention compiled with max-autotune (some 40 seconds a row).

Forward and backward in TFLOP/s, masked scores not counted; decoding in GB/s of keys and values. Everything is replayed
from CUDA graphs, on random data, variants in turns; a row whose result is wrong is a failure and is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tk
from benchmarks.report import Goal, Group, Report, Row
from benchmarks.runner import Options
from tk import timing
from tk.flex import mods

WINDOW = 1024
Call = Callable[[], Any]


@dataclass(frozen=True)
class Task:
    """kind: "forward", "backward" or "decode". mask: "full", "causal", "window", "document"; score: "", "alibi", or
    "soft_cap". Decoding has one row, and `length` keys."""

    kind: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    mask: str = "full"
    score: str = ""

    @property
    def label(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return " ".join(filter(None, (self.kind, f"{self.batch}x{heads}x{self.length}x{self.head_dim}", self.mask,
                                      self.score)))  # fmt: skip

    @property
    def flops(self) -> float:
        full = 4.0 * self.batch * self.heads * self.length**2 * self.head_dim
        share = {"full": 1.0, "causal": 0.5, "document": 0.5 / 4, "window": min(1.0, WINDOW / self.length)}[self.mask]
        return full * share * (2.5 if self.kind == "backward" else 1.0)

    @property
    def kv_bytes(self) -> int:
        return 2 * self.batch * self.kv_heads * self.length * self.head_dim * 2


def tasks(quick: bool) -> Iterator[Task]:
    """16k tokens of 2,048 features; and groups of heads."""
    for kind in ("forward", "backward"):
        for d in (64, 128, 256):
            for length in (1024, 8192) if quick else (512, 1024, 2048, 4096, 8192, 16384):
                for mask in ("full", "causal"):
                    yield Task(kind, 16384 // length, 2048 // d, 2048 // d, length, d, mask)
        for heads, kv_heads in ((16, 4), (32, 8)):
            for length in (8192,) if quick else (2048, 8192, 32768):
                yield Task(kind, 4 if length < 32768 else 1, heads, kv_heads, length, 128, "causal")
        for mask, score in (("window", ""), ("document", ""), ("full", "alibi"), ("causal", "alibi"),
                            ("full", "soft_cap"), ("causal", "soft_cap")):  # fmt: skip
            yield Task(kind, 2, 16, 16, 8192, 128, mask, score)
    for batch, length in ((8, 8192), (1, 65536), (64, 4096), *(() if quick else ((1, 1024), (1, 131072), (16, 2048)))):
        for heads, kv_heads in ((32, 8),) if quick else ((32, 8), (16, 2), (16, 1)):
            yield Task("decode", batch, heads, kv_heads, length, 128)


# --- What is called ---


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    block_mask: Any
    score_mod: Any

    @staticmethod
    def random(task: Task) -> Inputs:
        rows = 1 if task.kind == "decode" else task.length
        shapes = ((task.heads, rows), (task.kv_heads, task.length), (task.kv_heads, task.length))
        q, k, v = (torch.randn(task.batch, h, n, task.head_dim, device="cuda", dtype=torch.bfloat16).requires_grad_(
            task.kind == "backward") for h, n in shapes)  # fmt: skip
        return Inputs(q, k, v, torch.randn_like(q), mask_of(task), score_of(task))


def mask_mod_of(task: Task) -> Any:
    if task.mask == "document":
        ids = (torch.arange(task.length, device="cuda") * 4 // task.length).int().expand(task.batch, -1).contiguous()
        return mods.and_masks(mods.causal, mods.document(ids))
    return {"full": None, "causal": mods.causal, "window": mods.sliding_window(WINDOW)}[task.mask]


def mask_of(task: Task) -> Any:
    mask = mask_mod_of(task)
    if mask is None:
        return None
    return tk.flex.create_block_mask(mask, task.batch, None, task.length, task.length, device="cuda")


def score_of(task: Task) -> Any:
    if task.score == "alibi":
        return mods.alibi(2.0 ** (-8 * torch.arange(1, task.heads + 1, device="cuda") / task.heads))
    return mods.soft_cap(30.0) if task.score == "soft_cap" else None


def ours(x: Inputs) -> Tensor:
    return tk.flex_attention(x.q, x.k, x.v, x.score_mod, x.block_mask, enable_gqa=True)


def sdpa(backend: SDPBackend, causal: bool, x: Inputs) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=causal, enable_gqa=True)


def with_backward(forward: Callable[[Inputs], Tensor], x: Inputs) -> Call:
    """The gradients alone, of a forward pass that is done."""
    out = forward(x)
    return lambda: torch.autograd.grad(out, (x.q, x.k, x.v), x.grad, retain_graph=True)


def peers(task: Task, compiled: bool) -> dict[str, Callable[[Inputs], Tensor]]:
    found: dict[str, Callable[[Inputs], Tensor]] = {}
    if task.mask in ("full", "causal") and not task.score:
        backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
        for name, backend in backends.items():
            found[name] = partial(sdpa, backend, task.mask == "causal")
    if compiled:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()
        function = torch.compile(flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs")
        mask = mask_mod_of(task)
        theirs = None
        if mask is not None:
            theirs = create_block_mask(mask, task.batch, None, task.length, task.length, device="cuda")
        found["flex"] = lambda x: function(x.q, x.k, x.v, x.score_mod, theirs, enable_gqa=True)
    return found


# --- Measuring ---

GOALS = {
    "forward": Goal(1.0, 0.9),
    "backward": Goal(0.9, 0.8),
    "decode": Goal(1.0, 0.9),
}


def group_of(report: Report, task: Task, peer: str) -> Group:
    kind = f"{task.kind}_{task.score or task.mask}"
    return report.group(f"{kind}_{peer}", f"attention {task.kind}, {task.score or task.mask}", peer, GOALS[task.kind])


def measure(report: Report, task: Task, compiled: bool) -> None:
    size = 3 * task.kv_bytes
    sets = [Inputs.random(task) for _ in range(timing.copies_to_rotate(size, most=8))]
    ways = {"tk": ours} | peers(task, compiled)
    _check(task, sets[0], ways)
    captures = {}
    for name, way in ways.items():
        try:
            calls = [with_backward(way, x) if task.kind == "backward" else partial(way, x) for x in sets]
            captures[name] = timing.capture(calls)
        except RuntimeError as error:  # a peer without a kernel for it
            if name == "tk":
                raise
            print(f"{task.label:44} {name}: {str(error).splitlines()[0]}", flush=True)
    times = {name: t.us for name, t in timing.device_times(captures, rounds=5, ms=8, warm_ms=8).items()}
    rate = (lambda us: task.kv_bytes / us * 1e-3) if task.kind == "decode" else (lambda us: task.flops / us * 1e-6)
    unit = "GB/s" if task.kind == "decode" else "TF"
    for peer in times:
        if peer != "tk":
            row = Row(
                task.label,
                times[peer] / times["tk"],
                times,
                {unit: rate(times["tk"]), f"{peer} {unit}": rate(times[peer])},
            )
            group_of(report, task, peer).rows.append(row)
    print(f"{task.label:44} {unit}: " + "  ".join(f"{n} {rate(us):.0f}" for n, us in times.items()), flush=True)


def _check(task: Task, x: Inputs, ways: dict[str, Callable[[Inputs], Tensor]]) -> None:
    """Against float64, some rows of the first head."""
    out = ours(x)
    rows = torch.arange(0, x.q.shape[2], max(1, x.q.shape[2] // 16), device="cuda")
    q, k, v = x.q[0, 0, rows].double(), x.k[0, 0].double(), x.v[0, 0].double()
    s = q @ k.T * task.head_dim**-0.5
    zero, keys = torch.zeros((), dtype=torch.int64, device="cuda"), torch.arange(task.length, device="cuda")
    if x.score_mod is not None:
        s = x.score_mod(s, zero, zero, rows[:, None], keys[None, :])
    mask = mask_mod_of(task)
    if mask is not None:
        s = s.masked_fill(~mask(zero, zero, rows[:, None], keys[None, :]), float("-inf"))
    torch.testing.assert_close(out[0, 0, rows].double(), torch.softmax(s, -1) @ v, atol=2e-2, rtol=2e-2)


def run(options: Options, report: Report) -> None:
    for task in tasks(options.quick):
        if options.wants(task.label) and options.has_time():
            report.attempt(task.label, partial(measure, report, task, options.compiled))
            torch.cuda.empty_cache()
