"""``tk list``: the table of everything compiled."""

from __future__ import annotations

import argparse
import re
from typing import Any

import tk
from tk.cli._shown import OF_A_PACK, Usage, add_json, as_json, unknown
from tk.heuristics.described import runs_on
from tk.inspect import Coverage


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("list")
    parser.add_argument("--op", help="only this op")
    parser.add_argument("--arch", help="only this architecture: 80, 90, ptx80, …")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    everything = tk.coverage()
    found = everything.only(op=args.op, arch=args.arch)
    if not found and (args.op is not None or args.arch is not None):
        raise _nothing(everything, args.op, args.arch)
    print(as_json(found) if args.json else found)
    return 0


def _nothing(everything: Coverage, op: str | None, arch: str | None) -> Usage:
    ops = sorted({row.op for row in everything})
    archs = sorted({row.arch for row in everything})
    if not everything:
        return Usage("no pack is loaded")
    if op is not None and op not in ops:
        return unknown("kernel of an op", op, ops, more=OF_A_PACK)
    if arch is not None and not everything.only(arch=arch):
        cubins = [int(name.removeprefix("sm_")) for name in archs if re.fullmatch(r"sm_\d+", name)]
        hint = runs_on(arch, cubins) if cubins else ""
        return Usage("; ".join(filter(None, (f"there is no pack for {arch!r}", hint, f"there are {', '.join(archs)}"))))
    of_op = sorted({row.arch for row in everything.only(op=op)})
    return Usage(f"{op} was compiled for {', '.join(of_op)}, not for {arch}")
