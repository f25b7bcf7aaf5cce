"""The ``tk`` command: a module per subcommand, with ``add_parser(subparsers)`` that sets ``run(args) -> status``
(and ``takes_rest`` where arguments it does not know, ``args.rest``, are for somebody else)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from tk import __version__, errors
from tk.cli._shown import Usage

__all__ = ["main"]

# In the order of --help. Only the module of the command at hand is imported.
COMMANDS: Mapping[str, str] = {
    "info": "tk.cli.info",
    "list": "tk.cli.coverage",
    "explain": "tk.cli.explain",
    "build": "tk.cli.build",
    "bench": "tk.cli.bench",
    "tune": "tk.tune",
    "verify": "tk.cli.verify",
    "demo": "tk.cli.demo",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(arguments)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    args, rest = parser.parse_known_args(arguments)
    args.rest = rest
    if args.rest and not getattr(args, "takes_rest", False):
        parser.error(f"unrecognized arguments: {' '.join(args.rest)}")
    try:
        return args.run(args)
    except Usage as error:
        print(f"tk {args.command}: {error}", file=sys.stderr)
        return 2
    except (errors.Error, ValueError, TypeError, IndexError) as error:
        print(f"tk: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `tk list | head`
        sys.stderr.close()
        return 1


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tk", description="Triton for PyTorch without the JIT.")
    parser.add_argument("--version", action="version", version=f"tk {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    named = [name for name in arguments[:1] if name in COMMANDS]
    for name in named or COMMANDS:
        import_module(COMMANDS[name]).add_parser(subparsers)
    return parser
