"""What a mistyped name was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], likeness: float) -> list[str]:
    """Up to three names, the nearest first. likeness: how near, from 0 to 1."""
    return difflib.get_close_matches(name, dict.fromkeys(known), 3, likeness)


def did_you_mean(name: str, known: Iterable[str], likeness: float) -> str:
    """A question with the :func:`nearest` names, "" where none is near."""
    found = nearest(name, known, likeness)
    return f"did you mean {' or '.join(found)}?" if found else ""
