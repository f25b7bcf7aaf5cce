"""``tk bench``: tk's functions and generated ops on this machine's GPU, or the benchmarks of a source tree."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tk
from tk.cli import bench_calls, bench_ops


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time functions and generated ops, or run the benchmarks of a source tree",
        add_help=False,
    )
    parser.set_defaults(run=run, takes_rest=True)


def _source_tree() -> Path | None:
    for folder in (Path(tk.__file__).resolve().parents[2], Path.cwd()):
        if (folder / "benchmarks" / "__main__.py").is_file():
            return folder
    return None


def run(args: argparse.Namespace) -> int:
    """``tk bench OP…`` times functions and ops; anything else goes to benchmarks/ of the source tree that tk, or the
    current folder, lies in."""
    if bench_ops.is_meant(args.rest):
        return bench_ops.run(args.rest)
    if bench_calls.is_meant(args.rest):
        return bench_calls.run(args.rest)
    root = _source_tree()
    if root is None:
        print(
            "tk: name a function (tk bench linear 512x4096 14336x4096) or an op of a loaded pack; the benchmarks of a "
            "checkout of tk's sources are not here",
            file=sys.stderr,
        )
        return 1
    path = os.pathsep.join(p for p in (str(root), os.environ.get("PYTHONPATH", "")) if p)
    command = [sys.executable, "-m", "benchmarks", *args.rest]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode
