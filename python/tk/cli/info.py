"""``tk info``: versions, the GPU, where things are."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import tk
from tk import _cache, _library
from tk.cli._shown import add_json, as_json
from tk.inspect import Pack

VARIABLES = ("TK_PACK_PATH", "TK_LOG", "TK_LIBRARY_DIR", "TK_CACHE_DIR")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("info", description=__doc__)
    parser.add_argument("--all", action="store_true", help="the names of the ops of every pack, too")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    rows = list(_rows(args.all))
    if args.json:
        packs = list(tk.packs())
        print(as_json({**{name: value for name, value in rows if name != "pack"}, "packs": packs}))
        return 0
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0


def _rows(with_ops: bool) -> Iterator[tuple[str, str]]:
    yield "tk", f"{tk.__version__} in {Path(tk.__file__).parent}"
    yield "libraries", str(_library.directory())
    with suppress(FileNotFoundError):  # there is none, and what needs it says so
        yield "cache", str(_cache.directory())
    yield "cmake", str(Path(tk.__file__).parent / "share" / "cmake")
    yield "python", platform.python_version()
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    if not torch.cuda.is_available():
        yield "gpu", "none: ops run on the CPU, with ATen"
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        yield f"gpu {i}", f"{p.name}, {p.major}.{p.minor}, {p.multi_processor_count} SMs, {p.total_memory >> 30} GiB"
    for pack in tk.packs():
        yield "pack", str(pack) if with_ops else _short(pack)
    for name in VARIABLES:
        if name in os.environ:
            yield name, os.environ[name]


def _short(pack: Pack) -> str:
    if pack.problem:
        return str(pack)
    kernels = f"{pack.variants} variants, {pack.size / 1e6:.1f} MB, {pack.compiler}" if pack.variants else "no kernels"
    shared = f"; {pack.served_first()}" if pack.shared else ""
    return f"{pack.path}: {pack.arch}, {len(pack.ops)} ops, {kernels}{shared}"
