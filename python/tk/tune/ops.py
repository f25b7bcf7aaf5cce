"""Times a generated op: the config that would run, all that fit, and ATen's own kernels for the same graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from tk import capi, timing
from tk.generated import interpret, lists
from tk.generated.inputs import Example, bytes_moved, listed, overwritten
from tk.generated.problem import Call
from tk.heuristics.problem import describe
from tk.tune.operations import count

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
    """One call, timed. bytes: read and written. operations: of its arithmetic (tk.tune.operations). config, us: what
    runs when none is asked for. torch_us: the recorded graph by ATen, op by op. error: our largest deviation from fp64
    over ATen's. configs: the fastest first, if they were asked for."""

    example: Example
    bytes: int
    operations: int
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
    def tflops(self) -> float:
        return self.operations / self.us * 1e-6

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
            "operations": self.operations,
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
    """Times an example on the current GPU, with arguments that rotate through more memory than L2 holds. What is
    written in place is written again with every call.

    Raises ValueError where nothing is launched."""
    prepared = prepare(example)
    args, sets = prepared.sets[0], prepared.sets
    error = worst_error(example, args)
    captures = {
        "tk": timing.capture([partial(call, example, a) for a in sets]),
        "torch": timing.capture([partial(_aten, example, a) for a in sets]),
    }
    times = timing.device_times(captures, rounds=5, ms=4.0, warm_ms=4.0)
    chosen = capi.choose(prepared.problem).config_name
    moved = bytes_moved(_read(example, args), results(example, args))
    operations = sum(map(count, _calls(example, args)))
    result = OpTimes(example, moved, operations, chosen, times["tk"].us, times["torch"].us, error)
    if all_configs:
        _time_configs(result, prepared)
    return result


@dataclass(frozen=True)
class Prepared:
    """A call that can be timed. sets: arguments, as often as it takes for each to come from memory."""

    example: Example
    problem: capi.Problem
    sets: Sequence[Sequence[Any]]

    def fitting(self) -> dict[str, capi.Candidate]:
        """The configs that fit, by name, the one that is predicted to be the fastest first."""
        # A config has a variant for each class of strides; the engine says which it runs.
        rows = [
            row
            for row in capi.candidates(self.problem)
            if row.fits and capi.choose(self.problem, row.config).variant == row.variant
        ]
        return {row.config_name: row for row in sorted(rows, key=lambda row: row.cost)}

    def capture(self, row: capi.Candidate) -> timing.Capture:
        """Calls with a config. Raises RuntimeError where its result is wrong: a fast wrong kernel must not win."""
        if not (error := worst_error(self.example, self.sets[0], row.config)) <= 2.0:
            raise RuntimeError(f"wrong result: {error:.3g} times ATen's error")
        return timing.capture([partial(call, self.example, a, row.config) for a in self.sets], at_least_us=300)


def prepare(example: Example) -> Prepared:
    """Raises ValueError where nothing is launched."""
    args = example.arguments("cuda")
    described = describe(call, example, args)
    if described is None:
        raise ValueError(f"{example}: nothing is launched for it")
    copies = timing.copies_to_rotate(bytes_moved(args, ()), most=MOST_COPIES)
    return Prepared(example, described.problem, [args, *(_copied(args) for _ in range(copies - 1))])


def _read(example: Example, args: Sequence[Any]) -> list[Any]:
    written = overwritten(example.op)
    return [x for p, x in zip(example.op.params, args, strict=True) if p.name not in written]


def _copied(args: Sequence[Any]) -> list[Any]:
    return [_cloned(x) for x in args]


def _cloned(x: Any) -> Any:
    if isinstance(x, list):
        return [y.clone() for y in x]
    return x.clone() if isinstance(x, Tensor) else x


def _calls(example: Example, args: Sequence[Any]) -> list[Call]:
    """One, or of lists one for each place."""
    given = [*args, -1, 0]
    return lists.calls(example.op, given) if example.op.takes_lists else [Call(example.op, given)]


_SCANS = ("aten.cumsum", "aten.cumprod", "aten.logcumsumexp", "tk.associative_scan")


def _is_scan(call: Call) -> bool:
    return any(node["op"].startswith(_SCANS) for node in interpret.graph_of(call)["nodes"])


_SHORT_FLOATS = (torch.bfloat16, torch.float16)
_ADDS = ("aten.scatter_add", "aten.index_add", "aten.index_put")


def _adds_at_indices(call: Call) -> bool:
    return any(node["op"].startswith(_ADDS) for node in interpret.graph_of(call)["nodes"])


def _aten(example: Example, args: Sequence[Any], exact: bool = False) -> list[Tensor]:
    """The results of ATen, op by op; of lists place by place, and the results list by list, as :func:`results` has
    them."""
    found = [interpret.aten(one, exact=exact) for one in _calls(example, args)]
    return [x for column in zip(*found, strict=True) for x in column]


def results(example: Example, args: Sequence[Any], config: int = -1) -> list[Tensor]:
    """The outputs, then what is written in place, of which the arguments given are left alone."""
    args = [_cloned(x) if p.mutated else x for p, x in zip(example.op.params, args, strict=True)]
    found = listed(call(example, args, config))
    return [*found, *lists.tensors_of(x for p, x in zip(example.op.params, args, strict=True) if p.mutated)]


def units_of_sum(terms: int) -> float:
    """What another order of summation may cost where torch happens to be exact, in units in the last place of fp32,
    times the size of what is summed: one by one the roundings of n terms grow with their root, and torch may split
    them."""
    return max(16.0, math.sqrt(terms))


@dataclass(frozen=True)
class Reference:
    """What one result is judged by: ATen's and the same in fp64. terms: of the last element of a scan, whose running
    result is carried from block to block; blocks may be of a few elements, where torch's are of a whole row.
    is_of_atomics: it has sums of 16 bits in any order, each of whose additions is rounded."""

    torchs: Tensor
    exact: Tensor
    terms: int = 1
    is_of_atomics: bool = False

    @cached_property
    def allowed(self) -> float:
        """The largest error of ATen, plus what fp32 rounds away."""
        return float((self.torchs.double() - self.exact).abs().max() + self._slack)

    @cached_property
    def _slack(self) -> Tensor:
        units = units_of_sum(self.terms) * torch.finfo(torch.float32).eps
        if self.is_of_atomics:
            units += torch.finfo(self.torchs.dtype).eps
        return units * self.exact.abs().max() + torch.finfo(torch.float64).tiny  # where all are zeros

    def error_of(self, found: Tensor) -> float:
        """Over ATen's; infinite where integers differ."""
        found = found.reshape(self.exact.shape)
        if not found.is_floating_point():
            return 0.0 if torch.equal(found, self.exact) else math.inf
        error = float((found.double() - self.exact).abs().max() + self._slack) / self.allowed
        return math.inf if math.isnan(error) else error


class References:
    """What the results of a call are judged by; computed when first asked for."""

    def __init__(self, example: Example, args: Sequence[Any]):
        self.example, self.args = example, args

    @cached_property
    def of_each(self) -> list[Reference]:
        both = (_aten(self.example, self.args, exact=exact) for exact in (False, True))
        calls = _calls(self.example, self.args)
        scans, adds = any(map(_is_scan, calls)), any(map(_adds_at_indices, calls))
        return [
            Reference(torchs, exact, exact.shape[-1] if scans else 1, adds and torchs.dtype in _SHORT_FLOATS)
            for torchs, exact in zip(*both, strict=True)
        ]


def worst_error(example: Example, args: Sequence[Any], config: int = -1) -> float:
    """The largest error of any output over ATen's, both against fp64, each plus what fp32 rounds away; infinite where
    integers differ."""
    ours, references = results(example, args, config), References(example, args).of_each
    return max((one.error_of(x) for x, one in zip(ours, references, strict=True)), default=0.0)


def _time_configs(result: OpTimes, prepared: Prepared) -> None:
    """The likely best first: it sets the bar. A config that fails or is wrong is a failure."""
    fitting = prepared.fitting()
    captures: dict[str, timing.Capture] = {}
    best = math.inf
    for name, row in fitting.items():
        try:
            found = prepared.capture(row)
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
