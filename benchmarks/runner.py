"""Runs the benchmarks and writes what they found.

    python -m benchmarks [FAMILY …] --out benchmarks/results [--quick] [--seconds 480] [--only REGEX]

Each family is a module with ``run(options, report)``. Correctness comes first: a row whose result is wrong is a failure
and is not timed. Results are written after every family, and a family that fails loses only itself.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks import report as reports

FAMILIES = ("mm", "other_products", "int4", "b2b", "conv", "generated", "losses", "attention", "models", "zoo",
            "everywhere", "anywhere")  # fmt: skip
ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Options:
    """out: where results go. quick: a part of the shapes. compiled: also the peer that autotunes, minutes. only: rows
    whose group and label match. seconds: no row is begun after that many. jobs: processes that compile the peers of
    several rows at once; what runs on the GPU takes turns. draws, seed: of anywhere; without a
    seed it is a fresh one."""

    out: Path
    quick: bool = False
    compiled: bool = False
    only: str = ""
    seconds: float = float("inf")
    jobs: int = 1
    draws: int = 3000
    seed: int | None = None
    begun: float = field(default_factory=time.monotonic)
    left_out: int = 0

    def wants(self, label: str) -> bool:
        return re.search(self.only, label) is not None

    @property
    def seconds_left(self) -> float:
        return self.seconds - (time.monotonic() - self.begun)

    def has_time(self) -> bool:
        if self.seconds_left > 0:
            return True
        self.left_out += 1
        return False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help=f"of {', '.join(FAMILIES)} (all)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for JSON, table, plot"
    )
    parser.add_argument("--quick", action="store_true", help="a sixth of the shapes")
    parser.add_argument("--compiled", action="store_true", help="also time torch.compile with max-autotune (minutes)")
    parser.add_argument("--only", default="", help="only rows whose group and label match this regular expression")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after so many seconds")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile peers (generated)")
    parser.add_argument("--draws", type=int, default=3000, help="how many calls to draw at most (anywhere)")
    parser.add_argument("--seed", type=int, help="of the draws; by default a fresh one, which is printed (anywhere)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print the report of an anywhere.jsonl, and end")
    parser.add_argument(
        "--commit", default=os.environ.get("TK_COMMIT", ""), help="for the record, where git is missing"
    )
    parser.add_argument(
        "--date", default=os.environ.get("TK_DATE", ""), help="for the record, where the clock is wrong"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code: 1 when a row failed."""
    if args.report is not None:
        print(importlib.import_module("benchmarks.anywhere").reprinted(args.report))
        return 0
    if not torch.cuda.is_available():
        print("the benchmarks need a CUDA GPU", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    options = Options(args.out, args.quick, args.compiled, args.only, args.seconds, args.jobs, args.draws, args.seed)
    finished = [_run_family(name, options, environment(args.commit, args.date)) for name in args.families]
    for report in finished:
        print(f"\n### {report.family}\n{report.markdown()}", flush=True)
    if options.left_out:
        print(f"\n{options.left_out} rows left out: {options.seconds:g} seconds were over")
    return 1 if any(report.failures for report in finished) else 0


def _run_family(name: str, options: Options, record: dict[str, Any]) -> reports.Report:
    report = reports.Report(name, record)
    begun = time.monotonic()
    report.attempt(name, lambda: importlib.import_module(f"benchmarks.{name}").run(options, report))
    record["seconds"] = time.monotonic() - begun
    path = report.write(options.out)
    reports.write_atomically(path.with_suffix(".md"), report.markdown() + "\n")
    report.attempt(f"{name} plot", lambda: _plot(report, path))
    return report


def _plot(report: reports.Report, path: Path) -> None:
    reports.plot(report.to_json(), path.with_suffix(".svg"))


def environment(commit: str = "", date: str = "") -> dict[str, Any]:
    """What was measured, on what. `commit` and `date` win over what can be found here."""
    from tk.tune.record import driver_version, pack_compiler

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "driver": driver_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "compiler": pack_compiler(),
        "python": platform.python_version(),
        "commit": commit or _commit(),
        "date": date or datetime.now(timezone.utc).date().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
    }


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
