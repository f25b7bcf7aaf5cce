"""What a mistyped name was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], likeness: float) -> str:
    """A question with the nearest names, "" where none is near. likeness: how near, from 0 to 1."""
    nearest = difflib.get_close_matches(name, dict.fromkeys(known), 3, likeness)
    return f"did you mean {' or '.join(nearest)}?" if nearest else ""
