"""``tk info``: versions, the GPU, where things are."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import tk
from tk import _library

VARIABLES = ("TK_PACK_PATH", "TK_LOG", "TK_LIBRARY_DIR", "TK_CACHE_DIR")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("info", help="versions, GPUs, libraries and packs", description=__doc__)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    rows = list(_rows())
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0


def _rows() -> Iterator[tuple[str, str]]:
    yield "tk", f"{tk.__version__} in {Path(tk.__file__).parent}"
    yield "libraries", str(_library.directory())
    yield "cmake", str(Path(tk.__file__).parent / "share" / "cmake")
    yield "python", platform.python_version()
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    if not torch.cuda.is_available():
        yield "gpu", "none: ops run on the CPU, with ATen"
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        yield f"gpu {i}", f"{p.name}, {p.major}.{p.minor}, {p.multi_processor_count} SMs, {p.total_memory >> 30} GiB"
    for pack in tk.packs():
        yield "pack", str(pack)
    for name in VARIABLES:
        if name in os.environ:
            yield name, os.environ[name]
