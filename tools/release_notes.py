"""Prints the notes of a release: what CHANGELOG.md has of its version.

    python tools/release_notes.py v0.1.0

Fails where the tag is not of the version in python/tk/_version.py, or CHANGELOG.md does not say that it is released.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def notes(tag: str, version: str, changelog: str) -> str:
    """Raises ValueError with what is to be done first."""
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, and python/tk/_version.py says {version}; the tag must be v{version}")
    heading = re.search(rf"^## {re.escape(version)} \((.*)\)\n", changelog, re.M)
    if heading is None or not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[1]):
        given = f"says ({heading[1]})" if heading else "has no section"
        raise ValueError(f"CHANGELOG.md {given} for {version}; write the day of the release: ## {version} (2026-01-31)")
    return changelog[heading.end() :].partition("\n## ")[0].strip() + "\n"


if __name__ == "__main__":
    _version = re.findall(r'__version__ = "(.*)"', (ROOT / "python/tk/_version.py").read_text())[0]
    try:
        print(notes(sys.argv[1], _version, (ROOT / "CHANGELOG.md").read_text()), end="")
    except ValueError as error:
        sys.exit(f"release_notes.py: {error}")
