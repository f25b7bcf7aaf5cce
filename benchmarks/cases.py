"""Calls of an op beside their peers, in groups with a goal each: listed ones, and ones drawn at random.

Results are checked before anything is timed. What is timed is replayed from CUDA graphs; inputs that fit into L2
rotate, and variants take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest

import torch

from benchmarks.report import Goal, Group, Report, Row
from benchmarks.runner import Options
from tk import timing
from tk.heuristics.problem import describe

RANDOM = 200  # of each group
Call = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """make() gives the arguments of ours and of every peer. read: how many of them ours reads, the first ones; as many
    sets take turns as make these come from memory."""

    label: str
    make: Callable[[], tuple[torch.Tensor, ...]]
    ours: Call
    peers: dict[str, Call]
    flops: int
    read: int | None = None


@dataclass(frozen=True)
class Kind:
    """A group of cases: those listed, and those drawn with a seed that no table was made from. peer: what stands in its
    heading."""

    goal: Goal | None
    peer: str
    listed: Sequence[Case]
    drawn: Sequence[Case] = ()


def run(options: Options, report: Report, kinds: Mapping[str, Kind]) -> None:
    """All listed cases; then the drawn ones, a case of each kind in turn, so that time that runs out is missed by all
    alike."""
    for name, kind in kinds.items():
        group = report.group(name, name, kind.peer, kind.goal)
        for case in _part(kind.listed, options):
            _attempt(options, report, group, case)
    turns = []
    for name, kind in kinds.items():
        group = report.group(f"{name}_random", f"{name}, random", kind.peer, kind.goal)
        turns.append([(group, case) for case in _part(kind.drawn, options)])
    for found in chain.from_iterable(zip_longest(*turns)):
        if found is not None:
            _attempt(options, report, *found)


def _part(cases: Sequence[Case], options: Options) -> Sequence[Case]:
    return cases[::6] if options.quick else cases


def _attempt(options: Options, report: Report, group: Group, case: Case) -> None:
    label = f"{group.name} {case.label}"
    if options.wants(label) and options.has_time():
        report.attempt(label, partial(_measure, group, case))
        torch.cuda.empty_cache()


def _measure(group: Group, case: Case) -> None:
    first = case.make()
    _check(case, first)
    read = sum(x.numel() * x.element_size() for x in first[: case.read])
    sets = [first, *(case.make() for _ in range(timing.copies_to_rotate(read, most=8) - 1))]
    with torch.no_grad():
        captures = {"tk": timing.capture([partial(case.ours, *x) for x in sets])} | {
            name: timing.capture([partial(peer, *x) for x in sets]) for name, peer in case.peers.items()
        }
        times = timing.device_times(captures, rounds=5, ms=4, warm_ms=4)
    us = {name: t.us for name, t in times.items()}
    best = min(case.peers, key=us.__getitem__)
    more = {
        "peer": best,
        "config": _config(case, first),
        "tflops": case.flops / us["tk"] * 1e-6,
        "read_gbps": read / us["tk"] * 1e-3,
    }
    group.rows.append(Row(case.label, us[best] / us["tk"], us, more))
    rest = "  ".join(f"{name} {t:.1f}" for name, t in us.items())
    print(f"{group.name:18} {case.label:44} {us[best] / us['tk']:6.3f}  us: {rest}  {more['config']}", flush=True)


def _config(case: Case, arguments: tuple[torch.Tensor, ...]) -> str:
    from tk import capi

    described = describe(case.ours, *arguments)
    return "" if described is None else capi.choose(described.problem).config_name


def _check(case: Case, arguments: tuple[torch.Tensor, ...]) -> None:
    """Against the first peer, in bfloat16: what is off by more than both may round is wrong."""
    ours = case.ours(*arguments).float()
    theirs = next(iter(case.peers.values()))(*arguments).float()
    error = ((ours - theirs).norm() / theirs.norm()).item()
    if not error < 1e-2:
        raise AssertionError(f"{case.label}: off by {error:.3g}")


# --- What cases are made of ---


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()
