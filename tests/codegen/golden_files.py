"""Texts that are held as files: what a change does to them shows as a diff."""

from __future__ import annotations

import difflib
import os
from pathlib import Path


def check(path: Path, text: str) -> None:
    """TK_REWRITE_GOLDEN=1 writes the file anew."""
    if os.environ.get("TK_REWRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.is_file(), f"{path.name} is missing; write it with TK_REWRITE_GOLDEN=1"
    difference = difflib.unified_diff(path.read_text().splitlines(), text.splitlines(), "golden", "now", lineterm="")
    assert not (found := "\n".join(difference)), found
