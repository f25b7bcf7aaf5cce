"""Losses of a language model, forward and backward: ``tk.linear_cross_entropy`` against what else computes the loss of
a linear layer, and ``tk.cross_entropy`` of logits that are there.

Peers are eager torch, which has all logits in memory; Liger's fused loss where it is installed; and, with
``--compiled``, torch.compile of the eager loss, also with inductor's chunking of what is large. Beside the times stands
the peak of memory, without the inputs. A loss or a gradient that is further from float32's than twice eager torch's is
a failure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

import tk
from benchmarks.layouts import log_uniform
from benchmarks.report import Goal, Report, Row
from benchmarks.runner import Options
from tk import timing

Loss = Callable[..., Tensor]
EAGER = "eager torch"
GOAL = Goal(1.0, 0.9)
# Rows, columns of the input, classes: the last layers of Llama-3, Qwen3, Gemma 2, Mistral and GPT-2.
LISTED = ((8192, 4096, 128256), (8192, 2048, 151936), (4096, 3584, 256000), (16384, 4096, 32768), (8192, 768, 50257))
DRAWN = 6
LOGITS = ((8192, 128256), (16384, 32000), (4096, 50257), (65536, 1024))
ROUNDS = 5


@dataclass(frozen=True)
class Size:
    rows: int
    columns: int
    classes: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.classes}"


def eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


@cache
def ligers() -> dict[str, Loss]:
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError:
        print("Liger is not installed, and left out", flush=True)
        return {}
    return {"Liger": liger_fused_linear_cross_entropy}


def peers(compiled: bool) -> dict[str, Loss]:
    """By name, those that are installed; fresh ones for each size."""
    found: dict[str, Loss] = {EAGER: eager, **ligers()}
    if compiled:
        torch._dynamo.reset()  # each size is compiled for itself
        found["torch.compile"] = torch.compile(eager, dynamic=False)
        found["torch.compile, chunked"] = torch.compile(eager, dynamic=False, options={"auto_chunker.enable": True})
    return found


def step(loss: Loss, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and its two gradients."""
    value = loss(hidden, weight, target)
    return (value.detach(), *torch.autograd.grad(value, (hidden, weight)))


def reference(hidden: Tensor, weight: Tensor, target: Tensor, most: int = 1 << 28) -> tuple[Tensor, ...]:
    """In float32, by parts of the rows."""
    hidden, weight = (x.detach().float().requires_grad_() for x in (hidden, weight))
    parts = max(1, len(hidden) * len(weight) // most)
    total = torch.zeros((), device=hidden.device)
    for x, t in zip(hidden.chunk(parts), target.chunk(parts), strict=True):
        value = F.cross_entropy(F.linear(x, weight), t, reduction="sum") / len(target)
        value.backward()
        total += value.detach()
    assert hidden.grad is not None and weight.grad is not None
    return total, hidden.grad, weight.grad


def errors(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[float]:
    """Of each result, relative to its norm."""
    return [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


def check(found: tuple[Tensor, ...], torchs: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(errors(found, expected), errors(torchs, expected), strict=True):
        if not ours <= 2 * theirs + 1e-6:
            raise AssertionError(f"off by {ours:.2e}, where eager torch is off by {theirs:.2e}")


def peak_mb(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def linear(options: Options, report: Report) -> None:
    sizes = [("", Size(*x)) for x in LISTED] + [(", random", size) for size in drawn(DRAWN)]
    for kind, size in sizes[::6] if options.quick else sizes:
        label = f"linear_cross_entropy{kind} {size}"
        if options.wants(label) and options.has_time():
            report.attempt(label, partial(_linear, report, kind, size, options.compiled))
            torch.cuda.empty_cache()


def drawn(count: int) -> list[Size]:
    """Log-uniform sizes of an odd number of rows as often as not, and of any number of classes."""
    size = partial(log_uniform, random.Random(3705))
    return [Size(size(256, 16384), 64 * size(8, 128), size(4096, 262144)) for _ in range(count)]


def _linear(report: Report, kind: str, size: Size, compiled: bool) -> None:
    hidden = torch.randn(size.rows, size.columns, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(size.classes, size.columns, device="cuda", dtype=torch.bfloat16)
    weight = weight.mul_(size.columns**-0.5).requires_grad_()
    target = torch.randint(size.classes, (size.rows,), device="cuda")
    steps = {
        name: partial(step, loss, hidden, weight, target)
        for name, loss in {"tk": tk.linear_cross_entropy, **peers(compiled)}.items()
    }
    found = {name: run() for name, run in steps.items()}
    check(found["tk"], found[EAGER], reference(hidden, weight, target))
    del found
    memory = {name: peak_mb(run) for name, run in steps.items()}
    times = timing.eager_times({name: [run] for name, run in steps.items()}, rounds=ROUNDS, calls=1)
    _add(report, "linear_cross_entropy", kind, str(size), {name: t.us for name, t in times.items()}, memory)


def _add(
    report: Report, name: str, kind: str, label: str, us: Mapping[str, float], memory: Mapping[str, float]
) -> None:
    """A row against each peer."""
    suffix = "_random" if kind else ""
    for peer in us:
        if peer != "tk":
            group = report.group(
                f"{name}_{peer.replace(',', '').replace(' ', '_')}{suffix}", f"{name}{kind}", peer, GOAL
            )
            group.rows.append(Row(label, us[peer] / us["tk"], dict(us), {"peak_mb": dict(memory)}))
    ways = ", ".join(f"{way} {1e-3 * us[way]:.2f} ms {memory[way]:.0f} MB" for way in us)
    print(f"{name}{kind} {label}: {ways}", flush=True)


def logits(options: Options, report: Report) -> None:
    ways: dict[str, Loss] = {"tk": tk.cross_entropy, EAGER: F.cross_entropy}
    if options.compiled:
        ways["torch.compile"] = torch.compile(F.cross_entropy, dynamic=False)
    for shape in LOGITS[::6] if options.quick else LOGITS:
        label = f"cross_entropy {'x'.join(map(str, shape))}"
        if options.wants(label) and options.has_time():
            report.attempt(label, partial(_logits, report, shape, ways))
            torch.cuda.empty_cache()


def _logits(report: Report, shape: tuple[int, int], ways: Mapping[str, Loss]) -> None:
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(shape[1], shape[:1], device="cuda")

    def run(loss: Loss) -> tuple[Tensor, Tensor]:
        value = loss(x, target)
        return value.detach(), *torch.autograd.grad(value, x)

    wide = x.detach().float().requires_grad_()
    value = F.cross_entropy(wide, target)
    expected = (value.detach(), *torch.autograd.grad(value, wide))
    check(run(ways["tk"]), run(ways[EAGER]), expected)
    del wide, value, expected
    memory = {name: peak_mb(partial(run, loss)) for name, loss in ways.items()}
    steps = {name: [partial(run, loss)] for name, loss in ways.items()}
    times = timing.eager_times(steps, rounds=ROUNDS, calls=5)
    _add(report, "cross_entropy", "", "x".join(map(str, shape)), {name: t.us for name, t in times.items()}, memory)


def run(options: Options, report: Report) -> None:
    for measure in (linear, logits):
        report.attempt_part(measure.__name__, partial(measure, options, report))
