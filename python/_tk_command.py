"""The console script ``tk``. It stands outside of the package, since importing that takes torch, which takes a second:
what needs neither torch nor the libraries (``tk --version``, ``tk --help``, a mistyped command) is answered here."""

from __future__ import annotations

import argparse
import io
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["COMMANDS", "main", "parser"]

# In the order of --help: the module of each command, and what the command does.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "info": ("tk.cli.info", "versions, GPUs, libraries and packs"),
    "packs": ("tk.cli.packs", "the packs that are loaded: for which GPUs, with how many kernels"),
    "list": ("tk.cli.coverage", "everything compiled, by architecture, kernel and config"),
    "explain": ("tk.cli.explain", "which kernel a call would run, and why"),
    "build": ("tk.cli.build", "compile kernels into packs"),
    "bench": ("tk.cli.bench", "time functions and generated ops, or run the benchmarks of a source tree"),
    "tune": ("tk.tune.command", "measure which configs are fastest on this GPU"),
    "verify": ("tk.cli.verify", "re-hash packs and run every kernel against torch"),
    "demo": ("tk.cli.demo", "a Llama-3-8B layer's projections, and generated ops"),
}


def _add_name(subparsers: Any, name: str) -> None:
    """A command without its arguments: a line of --help."""
    subparsers.add_parser(name, help=COMMANDS[name][1])


class _Parser(argparse.ArgumentParser):
    """The parser of the whole command line, which tells a mistyped command the nearest one."""

    def error(self, message: str) -> NoReturn:
        if mistyped := re.match(r"argument COMMAND: invalid choice: '(.*?)'", message):
            nearest = get_close_matches(mistyped[1], COMMANDS, 1)
            message += f"; did you mean {nearest[0]}?" if nearest else ""
        super().error(message)


def parser(
    commands: Iterable[str] = tuple(COMMANDS), add: Callable[[Any, str], None] = _add_name
) -> argparse.ArgumentParser:
    """The parser of the command line. add(subparsers, name) adds one of the commands."""
    top = _Parser(prog="tk", description="Triton for PyTorch without the JIT.")
    top.add_argument("--version", action="version", version=f"tk {version()}")
    subparsers = top.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True, parser_class=argparse.ArgumentParser
    )
    for name in commands:
        add(subparsers, name)
    return top


def version() -> str:
    """The version of the package tk, which is found and not imported."""
    spec = find_spec("tk")
    if spec is None or spec.origin is None:
        sys.exit("tk: the package tk is not there; reinstall torch-tk")
    return re.findall(r'__version__ = "(.*)"', Path(spec.origin).with_name("_version.py").read_text())[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr is: a terminal may have neither × nor a path's ü
    if not arguments:
        parser().print_help(sys.stderr)
        return 2
    if arguments[0] not in COMMANDS:
        found = parser().parse_args(arguments)  # ends the process with the answer, or with what is wrong
        arguments = arguments[arguments.index(found.command) :]  # of `tk -- info`
    # torch says this once a process where NumPy is not installed, and no command uses it.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    try:
        try:
            from tk import cli
        except ImportError as error:  # no torch, or a library that does not load into it
            print(f"tk: {error}", file=sys.stderr)
            return 1
        return cli.run(arguments)
    except KeyboardInterrupt:
        print("\ntk: interrupted", file=sys.stderr)
        return 130
