"""What the examples of whole models share: a step in eager torch, through tk and compiled; results and times."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import tk

Step = Callable[[], Tensor]
TURNS = 4  # of eager torch and tk


def compare(
    name: str, make: Callable[[Any], Step], model: nn.Module, settings: argparse.Namespace, as_graph: bool = False
) -> dict[str, float]:
    """Milliseconds of eager torch, of tk and, with ``--compile``, of both compiled; and how far tk's result is from
    torch's. as_graph: as one CUDA graph, but for what is compiled."""
    finish = graphed if as_graph else lambda step: step
    taken: dict[str, list[float]] = {}

    def timed(key: str, step: Step, rounds: int) -> None:
        taken.setdefault(key, []).extend(each_round(step, settings.device, rounds))

    through_tk = partial(tk.use, model, only_faster=not settings.all)
    torchs = finish(make(model))
    expected = torchs().clone()
    with through_tk():
        ours = finish(make(model))
        off = difference(ours(), expected)
    rounds = -(-settings.rounds // TURNS)
    for _ in range(TURNS):  # clocks and other processes change from second to second
        timed("torch", torchs, rounds)
        with through_tk():
            timed("tk", ours, rounds)
    if settings.compile and not as_graph:
        timed("compiled", make(torch.compile(model)), settings.rounds)
        torch._dynamo.reset()
        with through_tk():
            timed("tk compiled", make(torch.compile(model)), settings.rounds)
    found = {key: statistics.median(values) for key, values in taken.items()} | {"difference": off}
    torch._dynamo.reset()
    times = ", ".join(f"{key} {value:.2f} ms" for key, value in found.items() if key != "difference")
    print(f"{name}: {times}; {found['torch'] / found['tk']:.2f} × torch, off by {found['difference']:.1e}", flush=True)
    return found


def difference(a: Tensor, b: Tensor) -> float:
    """The largest, as a share of the largest value."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


def graphed(step: Step) -> Step:
    """The same step as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is set up by the first calls must not be recorded
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay(held: Step = step) -> Tensor:  # what the step reads has to stay where it is
        graph.replay()
        return out

    return replay


def milliseconds(step: Callable[[], object], device: str, rounds: int) -> float:
    """The median."""
    return statistics.median(each_round(step, device, rounds))


def each_round(step: Callable[[], object], device: str, rounds: int) -> list[float]:
    """Milliseconds, after some rounds that do not count."""
    for _ in range(3):
        step()
    taken = []
    for _ in range(rounds):
        _synchronize(device)
        start = time.perf_counter()
        step()
        _synchronize(device)
        taken.append((time.perf_counter() - start) * 1e3)
    return taken


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def parser(description: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument("--rounds", type=int, default=20)
    found.add_argument("--compile", action="store_true", help="time torch.compile as well")
    found.add_argument("--all", action="store_true", help="also what no measurement says is as fast")
    return found
