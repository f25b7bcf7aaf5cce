"""``tk packs``: the packs of kernels that are loaded, one line each."""

from __future__ import annotations

import argparse
from typing import Any

import tk
from tk._table import table
from tk.cli._shown import OF_A_PACK, add_json, as_json


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("packs", description=__doc__, epilog=OF_A_PACK)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    packs = list(tk.packs())
    if args.json:
        print(as_json(packs))
        return 0
    usable = [p for p in packs if not p.problem]
    rows = [(p.arch, len(p.ops), p.variants, f"{p.size / 1e6:.1f}", p.compiler, p.path) for p in usable]
    print(table(("arch", "ops", "variants", "MB", "compiler", "path"), rows) if rows else "no pack is loaded")
    for pack in packs:
        if pack.problem:
            print(pack)
        elif pack.shared:
            print(f"{pack.path}: {pack.served_first()}")
    return 0
