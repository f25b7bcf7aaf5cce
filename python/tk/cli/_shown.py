"""What commands share in showing what they found: as a table or as JSON, and what a mistyped name was meant to be."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tk import _dtypes
from tk._names import did_you_mean


class Usage(ValueError):
    """An argument that chooses nothing. The exit status is 2."""


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def as_json(found: Any) -> str:
    """JSON of records (dataclasses), and of lists, dicts and texts of them. What JSON has no form for is shown as
    text."""
    return json.dumps(found, default=_plain, indent=2)


def _plain(x: Any) -> Any:
    return {f.name: getattr(x, f.name) for f in dataclasses.fields(x)} if dataclasses.is_dataclass(x) else str(x)


def dtype_name(text: str) -> str:
    """A dtype's name for argparse: "bf16" of that, "bfloat16" or "torch.bfloat16"."""
    if (name := _dtypes.named(text)) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no dtype; there are {_dtypes.there_are()}{_dtypes.hint(text)}")
    return name


# A command line cannot call tk.load_pack.
OF_A_PACK = "An op of your own is there where TK_PACK_PATH names its pack: TK_PACK_PATH=my.tkpack tk ..."


def unrecognized(parser: argparse.ArgumentParser, rest: Sequence[str]) -> str:
    """What to say of options that a command does not have, with the nearest, or else all that it has."""
    options = [name for name in parser._option_string_actions if name.startswith("--")]
    given = next((text for text in rest if text.startswith("-")), "").partition("=")[0]
    hint = did_you_mean(given, options, 0.6) or f"the options are {', '.join(options)}"
    return f"unrecognized arguments: {' '.join(rest)}; {hint}"


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Options may stand before, between and behind the other arguments."""
    args, rest = parser.parse_known_intermixed_args(arguments)
    if rest:
        parser.error(unrecognized(parser, rest))
    return args


def check_device(text: str) -> None:
    """Checks --device. Raises Usage; that there is no GPU at all is the command's to say."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise Usage(f"--device {text}: it is cpu, cuda, or a GPU by its number, as cuda:1")
    count = torch.cuda.device_count()
    if count and text.startswith("cuda:") and int(text[5:]) >= count:
        raise Usage(f"--device {text}: torch sees {count}, cuda:0 to cuda:{count - 1}")


def unknown(kind: str, name: str, known: Iterable[str], most: int = 12, more: str = "") -> Usage:
    """What to raise for a name that nothing has: the nearest names, or some of what there is. more: a further line."""
    names: Sequence[str] = list(dict.fromkeys(known))
    others = f" and {len(names) - most} more" if len(names) > most else ""
    hint = did_you_mean(name, names, 0.4) or f"there are {', '.join(names[:most])}{others}"
    return Usage("\n".join(filter(None, (f"there is no {kind} {name!r}; {hint}", more))))
