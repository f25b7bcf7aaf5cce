"""What a benchmark leaves behind: rows with ratios, figures with limits, JSON, Markdown, a plot.

A results file holds

    {"family": "mm",
     "environment": {"gpu", "driver", "torch", "triton", "compiler", "commit", "date", "command", …},
     "groups": [{"name", "title", "peer", "goal": {"geomean", "worst"} or null,
                 "geomean", "worst", "worst_label",
                 "rows": [{"label", "ratio", "us": {variant: µs}, …}]}],
     "figures": [{"name", "title", "value", "unit", "limit", "at_most": bool}],
     "failures": [{"label", "error"}]}

A ratio is the peer's time over ours: more is better.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Goal:
    """The least ratio wanted, as the geometric mean of a group and of its worst row."""

    geomean: float
    worst: float


@dataclass(frozen=True)
class Row:
    """us: microseconds of every variant timed. more: what else is worth keeping (config, error, TFLOP/s, GB/s)."""

    label: str
    ratio: float
    us: dict[str, float]
    more: dict[str, Any] = field(default_factory=dict)


@dataclass
class Group:
    """Rows that share a peer and a goal."""

    name: str
    title: str
    peer: str
    goal: Goal | None = None
    rows: list[Row] = field(default_factory=list)

    @property
    def geomean(self) -> float:
        return math.exp(sum(math.log(row.ratio) for row in self.rows) / len(self.rows)) if self.rows else math.nan

    @property
    def worst(self) -> Row:
        return min(self.rows, key=lambda row: row.ratio)

    @property
    def met(self) -> bool | None:
        if self.goal is None or not self.rows:
            return None
        return self.geomean >= self.goal.geomean and self.worst.ratio >= self.goal.worst


@dataclass(frozen=True)
class Figure:
    """One number with a limit, e.g. the host's time of a call. limit None: for information."""

    name: str
    title: str
    value: float
    unit: str
    limit: float | None = None
    at_most: bool = True

    @property
    def met(self) -> bool | None:
        if self.limit is None:
            return None
        return self.value <= self.limit if self.at_most else self.value >= self.limit


class Report:
    """Collects; a row that fails is kept as a failure and costs no other row."""

    def __init__(self, family: str, environment: dict[str, Any]):
        self.family = family
        self.environment = environment
        self.groups: dict[str, Group] = {}
        self.figures: list[Figure] = []
        self.failures: list[dict[str, str]] = []

    def group(self, name: str, title: str, peer: str, goal: Goal | None = None) -> Group:
        return self.groups.setdefault(name, Group(name, title, peer, goal))

    def attempt(self, label: str, measure: Callable[[], None]) -> None:
        try:
            measure()
        except Exception as e:  # whatever it is: the other rows are worth having
            self.failures.append({"label": label, "error": f"{type(e).__name__}: {e}"})
            print(f"FAILED {label}: {type(e).__name__}: {str(e)[:300]}", flush=True)
            if os.environ.get("TK_BENCH_TRACEBACK"):
                traceback.print_exc()

    def attempt_part(self, name: str, measure: Callable[[], None]) -> None:
        """``attempt``, and how many seconds it took goes into the environment."""
        begun = time.monotonic()
        self.attempt(name, measure)
        self.environment.setdefault("part_seconds", {})[name] = time.monotonic() - begun

    def to_json(self) -> dict[str, Any]:
        groups = []
        for g in self.groups.values():
            if not g.rows:
                continue
            summary = {"geomean": g.geomean, "worst": g.worst.ratio, "worst_label": g.worst.label}
            goal = asdict(g.goal) if g.goal else None
            groups.append(
                {"name": g.name, "title": g.title, "peer": g.peer, "goal": goal}
                | summary
                | {"rows": [{"label": r.label, "ratio": r.ratio, "us": r.us} | r.more for r in g.rows]}
            )
        return {
            "family": self.family,
            "environment": self.environment,
            "groups": groups,
            "figures": [asdict(f) for f in self.figures],
            "failures": self.failures,
        }

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.family}.json"
        write_atomically(path, json.dumps(rounded(self.to_json()), indent=1) + "\n")
        return path

    def markdown(self) -> str:
        """The summary: a line for each group and figure."""
        lines = []
        if any(g.rows for g in self.groups.values()):
            lines += ["| products | against | rows | geomean | goal | worst | goal | worst row | |"]
            lines += ["|---|---|---|---|---|---|---|---|---|"]
        for g in self.groups.values():
            if g.rows:
                goals = (f"{g.goal.geomean:.2f}", f"{g.goal.worst:.2f}") if g.goal else ("", "")
                lines.append(
                    f"| {g.title} | {g.peer} | {len(g.rows)} | {g.geomean:.3f} | {goals[0]} | {g.worst.ratio:.3f} "
                    f"| {goals[1]} | {g.worst.label} | {_mark(g.met)} |"
                )
        if self.figures:
            lines += ["", "| figure | value | goal | |", "|---|---|---|---|"]
        for f in self.figures:
            limit = "" if f.limit is None else f"{'≤' if f.at_most else '≥'} {f.limit:g} {f.unit}"
            lines.append(f"| {f.title} | {f.value:.4g} {f.unit} | {limit} | {_mark(f.met)} |")
        if self.failures:
            lines += ["", f"{len(self.failures)} rows failed: " + "; ".join(f["label"] for f in self.failures[:20])]
        return "\n".join(lines)


def _mark(met: bool | None) -> str:
    return {None: "", True: "met", False: "**missed**"}[met]


def rounded(value: Any) -> Any:
    """Floats to five digits: the rest is noise that would fill the files."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    return value


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never a part."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as f:
        f.write(text)
    os.replace(f.name, path)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Of a file of JSON lines, which holds whatever ends the process next."""
    with path.open("a") as f:
        f.write(json.dumps(rounded(record)) + "\n")


def plot(results: dict[str, Any], path: Path) -> bool:
    """The ratio of every row, a column of dots for each group. False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print(f"matplotlib is not installed: no {path.name}")
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = results["groups"]
    if not groups:
        return False
    figure, axes = pyplot.subplots(figsize=(1.5 + 1.4 * len(groups), 4.5))
    for x, group in enumerate(groups):
        ratios = [row["ratio"] for row in group["rows"]]
        spread = [x + 0.25 * (i / max(len(ratios) - 1, 1) - 0.5) for i in range(len(ratios))]
        axes.scatter(spread, ratios, s=10, alpha=0.6)
        axes.plot([x - 0.3, x + 0.3], [group["geomean"]] * 2, color="black")
        axes.annotate(f"{group['geomean']:.2f}", (x + 0.32, group["geomean"]), fontsize=8, va="center")
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set_yscale("log")
    ticks = [0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_xticks(range(len(groups)), [f"{g['title']}\nvs {g['peer']}" for g in groups], fontsize=7)
    axes.set_ylabel("peer's time / ours")
    environment = results["environment"]
    axes.set_title(f"{results['family']}: {environment.get('gpu')}, torch {environment.get('torch')}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True
