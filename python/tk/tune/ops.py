"""Times a generated op: the config that would run, all that fit, and ATen's own kernels for the same graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tk import capi, timing
from tk.generated import interpret
from tk.generated.inputs import Example, bytes_moved, listed
from tk.generated.problem import Call
from tk.heuristics.problem import describe

HOPELESS = 8.0  # a config so much slower than the best so far is timed no longer
MOST_COPIES = 16


@dataclass(frozen=True)
class ConfigTime:
    """us: median of one call. predicted_us: what the cost model says."""

    config: str
    kernel: str
    us: float
    predicted_us: float


@dataclass
class OpTimes:
    """One call, timed. config, us: what runs when none is asked for. torch_us: the recorded graph by ATen, op by op.
    error: our largest deviation from fp64 over ATen's. configs: the fastest first, if they were asked for."""

    example: Example
    bytes: int
    config: str
    us: float
    torch_us: float
    error: float
    configs: list[ConfigTime] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def gbps(self) -> float:
        return self.bytes / self.us * 1e-3

    @property
    def is_right(self) -> bool:
        """No more than twice as far off as ATen."""
        return self.error <= 2.0

    def to_json(self) -> dict[str, Any]:
        e = self.example
        return {
            "op": e.op.name,
            "shapes": {name: list(e.shape(name)) for name in e.signature.tensors},
            "dtypes": dict(e.dtypes),
            "flags": dict(e.flags),
            "bytes": self.bytes,
            "config": self.config,
            "us": round(self.us, 3),
            "torch_us": round(self.torch_us, 3),
            "error": round(self.error, 4),
            "configs": {c.config: [c.kernel, round(c.us, 3), round(c.predicted_us, 3)] for c in self.configs},
            "failures": self.failures,
        }


def call(example: Example, args: Sequence[Any], config: int = -1) -> Any:
    """What is timed."""
    return getattr(torch.ops.tk, example.op.name)(*args, config=config)


def measure(example: Example, all_configs: bool = False) -> OpTimes:
    """On the current GPU, with arguments that rotate through more memory than L2 holds.

    Raises ValueError where nothing is launched, and for an op that writes its arguments: timing would change them."""
    if any(p.mutated for p in example.op.params):
        raise ValueError(f"tk.{example.op.name} writes its arguments: it cannot be timed again and again")
    args = example.arguments("cuda")
    described = describe(call, example, args)
    if described is None:
        raise ValueError(f"{example}: nothing is launched for it")
    copies = timing.copies_to_rotate(bytes_moved(args, ()), most=MOST_COPIES)
    sets = [args, *(_copied(args) for _ in range(copies - 1))]
    error = worst_error(example, args)
    captures = {
        "tk": timing.capture([partial(call, example, a) for a in sets]),
        "torch": timing.capture([partial(_aten, example, a) for a in sets]),
    }
    times = timing.device_times(captures, rounds=5, ms=4.0, warm_ms=4.0)
    chosen = capi.choose(described.problem).config_name
    moved = bytes_moved(args, listed(call(example, args)))
    result = OpTimes(example, moved, chosen, times["tk"].us, times["torch"].us, error)
    if all_configs:
        _time_configs(result, sets, described.problem)
    return result


def _copied(args: Sequence[Any]) -> list[Any]:
    return [x.clone() if isinstance(x, Tensor) else x for x in args]


def _aten(example: Example, args: Sequence[Any]) -> Any:
    return interpret.aten(Call(example.op, [*args, -1, 0]))


def worst_error(example: Example, args: Sequence[Any], config: int = -1) -> float:
    """The largest error of any output over ATen's, both against fp64, each plus what fp32 rounds away; infinite where
    integers differ."""
    ours, theirs = listed(call(example, args, config)), _aten(example, args)
    exact = interpret.aten(Call(example.op, [*args, -1, 0]), exact=True)
    worst = 0.0
    for mine, torchs, reference in zip(ours, theirs, exact, strict=True):
        mine = mine.reshape(reference.shape)
        if not mine.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(mine, reference) else math.inf)
            continue
        slack = 16 * torch.finfo(torch.float32).eps * reference.abs().max()
        deviation = ((mine.double() - reference).abs().max() + slack) / (
            (torchs.double() - reference).abs().max() + slack
        )
        worst = max(worst, deviation.item()) if not deviation.isnan() else math.inf
    return worst


def _time_configs(result: OpTimes, sets: Sequence[Sequence[Any]], problem: capi.Problem) -> None:
    """The likely best first: it sets the bar. A config that fails or is wrong is a failure."""
    example = result.example
    # A config has a variant for each class of strides; the engine says which it runs.
    fitting = {
        c.config_name: c
        for c in capi.candidates(problem)
        if c.fits and capi.choose(problem, c.config).variant == c.variant
    }
    captures: dict[str, timing.Capture] = {}
    best = math.inf
    for name, row in sorted(fitting.items(), key=lambda item: item[1].cost):
        try:
            if not (error := worst_error(example, sets[0], row.config)) <= 2.0:
                raise RuntimeError(f"wrong result: {error:.3g} times ATen's error")
            found = timing.capture([partial(call, example, a, row.config) for a in sets], at_least_us=300)
        except (RuntimeError, ValueError) as e:
            result.failures[name] = f"{type(e).__name__}: {e}"
            continue
        us = found.us / found.calls
        best = min(best, us)
        if us <= HOPELESS * best:
            captures[name] = found
        else:
            result.configs.append(ConfigTime(name, row.kernel_name, us, row.cost * 1e-6))
    for name, t in timing.device_times(captures, rounds=3, ms=3.0, warm_ms=2.0).items():
        row = fitting[name]
        result.configs.append(ConfigTime(name, row.kernel_name, t.us, row.cost * 1e-6))
    result.configs.sort(key=lambda c: c.us)
