"""``tk bench``: tk's functions and generated ops on this machine's GPU, or the benchmarks of a source tree."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tk
from tk import inspect
from tk.cli import bench_calls, bench_ops
from tk.cli._shown import OF_A_PACK, Usage, unknown
from tk.generated import register


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        add_help=False,
    )
    parser.set_defaults(run=run, takes_rest=True)


USAGE = """\
tk bench FUNCTION [SHAPE|NAME=VALUE …]   a function of tk beside torch's: tk bench linear 512x4096 14336x4096
tk bench OP [SHAPE …]                    a generated op, also of your own (TK_PACK_PATH=my.tkpack): every config with
                                         --configs, a picture with --plot FILE.svg
tk bench all [SHAPE …]                   every generated op
tk bench FAMILY …                        in a checkout: python -m benchmarks FAMILY, such as mm, conv, attention

`tk bench linear --help` has the options of functions, `tk bench softmax --help` those of ops. All of them measure on a
CUDA GPU; --device cpu times the reference of a function or an op."""


# Of benchmarks/ (its runner.FAMILIES).
FAMILIES = ("mm", "other_products", "int4", "b2b", "conv", "generated", "losses", "attention", "models", "zoo",
            "everywhere", "anywhere")  # fmt: skip


def _source_tree() -> Path | None:
    for folder in (Path(tk.__file__).resolve().parents[2], Path.cwd()):
        if (folder / "benchmarks" / "__main__.py").is_file():
            return folder
    return None


def run(args: argparse.Namespace) -> int:
    """``tk bench OP…`` times functions and ops; anything else goes to benchmarks/ of the source tree that tk, or the
    current folder, lies in."""
    is_function = bench_calls.is_meant(args.rest)
    if bench_ops.is_meant(args.rest) and not (is_function and any("=" in x for x in args.rest if x[:2] != "--")):
        return bench_ops.run(args.rest)
    if is_function:
        return bench_calls.run(args.rest)
    if not args.rest or set(args.rest) & {"-h", "--help"}:
        print(USAGE)
        return 0 if args.rest else 2
    first = args.rest[0]
    if first.startswith("-"):
        raise Usage(f"{first}: a function, an op or a family comes first\n{USAGE}")
    if first not in FAMILIES:
        known = (*inspect.functions(), *register.names(), *FAMILIES)
        if any(text in known for text in args.rest[1:]):
            raise Usage(f"{first!r} is no function or op; that comes first, as in tk bench linear 512x4096 14336x4096")
        raise unknown("function, op or family of benchmarks", first, known, more=OF_A_PACK)
    root = _source_tree()
    if root is None:
        raise Usage(f"{first}: benchmarks lie in a checkout of tk's sources, which is not here")
    path = os.pathsep.join(p for p in (str(root), os.environ.get("PYTHONPATH", "")) if p)
    command = [sys.executable, "-m", "benchmarks", *args.rest]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode
