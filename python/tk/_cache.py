"""The user's folder of what was made on this machine, and files there that several processes write."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["directory", "locked", "write_json"]


def directory() -> Path:
    """``TK_CACHE_DIR``, else ``tk`` under ``XDG_CACHE_HOME`` or ``~/.cache``."""
    if cache := os.environ.get("TK_CACHE_DIR"):
        return Path(cache)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tk"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Against other processes that write this file. The lock goes with the process that holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_json(path: Path, table: Mapping[str, Any]) -> None:
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
