"""How tuning is written down: JSON with a line for each entry, replaced in one step."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

OUTCOME = ("config", "us", "configs")  # what an entry says of its problem; the rest is the problem


def write(path: Path, table: Mapping[str, Any]) -> None:
    """`table` as JSON, what it holds many of line by line, so that a diff shows what changed. Readers see the old file
    or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = ",\n".join(f" {json.dumps(name)}: {_dump(value)}" for name, value in table.items())
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}", delete=False) as f:
        f.write(f"{{\n{text}\n}}\n")
        f.flush()
        os.fsync(f.fileno())
    os.chmod(f.name, 0o644)
    os.replace(f.name, path)


def _dump(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n ]"
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n }"
    return json.dumps(value)


def merge(old: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of both; where both have a problem, the new one."""
    merged = {_problem(entry): entry for entry in (*old, *new)}
    return [merged[problem] for problem in sorted(merged)]


def _problem(entry: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in entry.items() if name not in OUTCOME}, sort_keys=True)
