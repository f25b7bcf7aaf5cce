"""``tk build``: kernels and architectures in, packs out. Needs the ``build`` extra (Triton), and no GPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Compile kernels ahead of time into packs, one file for each architecture.

With FILE: the functions that the user's file puts under @tk.op, the mods that it registers, and its FAMILY or
FAMILIES, into OUT (default FILE's name with .tkpack), or OUT.sm80.tkpack and so on when there are several
architectures. With --all: the kernels that ship with tk, into the folder OUT, as sm80.tkpack and so on; --sample and
--only choose some of them. The same inputs and compiler give the same bytes.

TK_CACHE_DIR: where compiled launches are kept (default ~/.cache/tk). TK_JOBS: how many are compiled at once.
"""

OLDEST_TRITON = (3, 8)  # pyproject.toml's build extra; its Gluon has what attention's kernels are written in
TOO_OLD = """\
tk build needs Triton {}.{} or newer, and this is {}. Each torch asks for one Triton exactly, but a pack serves every
torch: build in an environment of its own, with a newer torch:
  python3 -m venv build_env && build_env/bin/pip install "torch-tk[build]"
  build_env/bin/tk build FILE.py"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", metavar="FILE.py", nargs="*", type=Path, help="files with functions under @tk.op, or FAMILY"
    )
    parser.add_argument("-o", "--out", type=Path, help="the pack, or the folder for the package's own packs")
    parser.add_argument(
        "--arch",
        default="80,90",
        help="architectures: 80, 90, …, 100f for a family, ptx80 for PTX (default %(default)s)",
    )
    parser.add_argument("--all", action="store_true", help="without FILE: the kernels that ship with tk, all of them")
    parser.add_argument("--sample", action="store_true", help="only the sample that tests compile")
    parser.add_argument("--only", metavar="REGEX", help="only variants whose name matches (--dry-run counts them)")
    parser.add_argument("--jobs", type=positive, help="compilations at once (default TK_JOBS, else the cores)")
    parser.add_argument("--roots", type=Path, help="write the packs' hashes here, for libtk_core's roots.inc")
    parser.add_argument(
        "--show",
        nargs=2,
        metavar=("STAGE", "FILE.py:FUNCTION"),
        help="print a stage of a generated op, and compile nothing: ir, schedule or source",
    )
    parser.add_argument(
        "--debug",
        action="store_true",
        help="the debug variant of generated ops: bounds of indices are asserted on the GPU, NaN and infinities in "
        "results printed, with the op's name",
    )
    parser.add_argument("--dry-run", action="store_true", help="list what would be compiled, its size and time")
    parser.set_defaults(run=run)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def add_parser(subparsers: Any) -> None:
    """Adds ``tk build``."""
    parser = subparsers.add_parser(
        "build",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """The exit status. Raises SystemExit with what to install when Triton or zstandard is not there, or too old."""
    try:
        import triton
        import zstandard  # noqa: F401
    except ImportError:
        raise SystemExit('tk build needs Triton and zstandard: pip install "torch-tk[build]"') from None
    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST_TRITON:
        raise SystemExit(TOO_OLD.format(*OLDEST_TRITON, triton.__version__))
    from tk.build.command import run as build

    return build(args)
