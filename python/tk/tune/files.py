"""How tuning is written down: entries of JSON, one for each problem."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

OUTCOME = ("config", "us", "configs")  # what an entry says of its problem; the rest is the problem


def merge(old: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of both; where both have a problem, the new one."""
    merged = {_problem(entry): entry for entry in (*old, *new)}
    return [merged[problem] for problem in sorted(merged)]


def _problem(entry: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in entry.items() if name not in OUTCOME}, sort_keys=True)
