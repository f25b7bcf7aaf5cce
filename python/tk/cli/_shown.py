"""What commands share in showing what they found: as a table or as JSON, and what a mistyped name was meant to be."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from tk import _dtypes
from tk._names import did_you_mean


class Usage(ValueError):
    """An argument that chooses nothing. The exit status is 2."""


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def as_json(found: Any) -> str:
    """Of records (dataclasses), and of lists, dicts and texts of them. What JSON has no form for is shown as text."""
    return json.dumps(found, default=_plain, indent=2)


def _plain(x: Any) -> Any:
    return {f.name: getattr(x, f.name) for f in dataclasses.fields(x)} if dataclasses.is_dataclass(x) else str(x)


def dtype_name(text: str) -> str:
    """For argparse: "bf16" of that, "bfloat16" or "torch.bfloat16"."""
    if (name := _dtypes.named(text)) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no dtype; there are {_dtypes.there_are()}{_dtypes.hint(text)}")
    return name


def unknown(kind: str, name: str, known: Iterable[str], most: int = 12) -> Usage:
    """What to raise for a name that nothing has: the nearest names, or some of what there is."""
    names: Sequence[str] = list(dict.fromkeys(known))
    if question := did_you_mean(name, names, 0.4):
        return Usage(f"there is no {kind} {name!r}; {question}")
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return Usage(f"there is no {kind} {name!r}; there are {', '.join(names[:most])}{more}")
