"""``tk list``: the table of everything compiled."""

from __future__ import annotations

import argparse
import difflib
import sys
from typing import Any

import tk
from tk.inspect import Coverage


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("list", help="everything compiled, by architecture, kernel and config")
    parser.add_argument("--op", help="only this op")
    parser.add_argument("--arch", help="only this architecture: 80, 90, ptx80, …")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    everything = tk.coverage()
    found = everything.only(op=args.op, arch=args.arch)
    if not found and (args.op or args.arch):
        print(f"tk list: {_why_nothing(everything, args.op, args.arch)}", file=sys.stderr)
        return 2
    print(found)
    return 0


def _why_nothing(everything: Coverage, op: str | None, arch: str | None) -> str:
    ops = sorted({row.op for row in everything})
    archs = sorted({row.arch for row in everything})
    if not everything:
        return "no pack is loaded"
    if op is not None and op not in ops:
        nearest = difflib.get_close_matches(op, ops, 3, 0.4)
        named = f"did you mean {' or '.join(nearest)}? " if nearest else ""
        return f"there is no kernel of an op {op!r}; {named}there are {', '.join(ops)}"
    if arch is not None and not everything.only(arch=arch):
        return f"no pack is for {arch!r}; there are packs for {', '.join(archs)}"
    of_op = sorted({row.arch for row in everything.only(op=op)})
    return f"{op} was compiled for {', '.join(of_op)}, not for {arch}"
