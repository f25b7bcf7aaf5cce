"""The ``tk`` command: a module per subcommand, with ``add_parser(subparsers)`` that sets ``run(args) -> status``
(and ``takes_rest`` where arguments it does not know, ``args.rest``, are for somebody else)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import _tk_command
from tk import errors
from tk.cli._shown import Usage, unrecognized

__all__ = ["COMMANDS", "main", "run"]

main = _tk_command.main

COMMANDS = _tk_command.COMMANDS


def run(arguments: Sequence[str]) -> int:
    """Runs a command line that begins with a command; returns the exit status."""
    parser = _tk_command.parser(arguments[:1], _add_command)
    args, rest = parser.parse_known_args(arguments)
    args.rest = rest
    if args.rest and not getattr(args, "takes_rest", False):
        args.parser.error(unrecognized(args.parser, args.rest))
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
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


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Shows a warning with its place in a file of the user's. A place in a library is of no use at a terminal."""
    is_library = "site-packages" in filename or Path(filename).is_relative_to(Path(__file__).parents[1])
    place = "" if is_library else f"{filename}:{lineno}: "
    print(f"{place}{category.__name__}: {message}", file=file or sys.stderr)


def _add_command(subparsers: Any, name: str) -> None:
    """Adds a command with its arguments. No other command's module is imported."""
    import_module(COMMANDS[name][0]).add_parser(subparsers)
    subparsers.choices[name].set_defaults(parser=subparsers.choices[name])
