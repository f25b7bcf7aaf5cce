"""``tk list``: the table of everything compiled."""

from __future__ import annotations

import argparse
from typing import Any

import tk


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("list", help="everything compiled, by architecture, kernel and config")
    parser.add_argument("--op", help="only this op")
    parser.add_argument("--arch", help="only this architecture: 80, 90, ptx80, …")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(tk.coverage().only(op=args.op, arch=args.arch))
    return 0
