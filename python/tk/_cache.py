"""The user's folder of what was made on this machine, and files there that several processes write."""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["directory", "locked", "slug", "write_atomically", "write_json"]


def directory() -> Path:
    """``TK_CACHE_DIR``, else ``tk`` under ``XDG_CACHE_HOME`` or ``~/.cache``. An empty variable is as if it were not
    set, and so is an XDG_CACHE_HOME that is no absolute path, as the XDG specification wants. A leading ``~`` of
    TK_CACHE_DIR is a home directory; another relative path is below the current folder.

    Raises FileNotFoundError when a home directory is needed and there is none, as in a container whose user has no
    entry."""
    cache = os.environ.get("TK_CACHE_DIR", "")
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        if cache:
            return Path(cache).expanduser()
        return (shared if shared.is_absolute() else Path.home() / ".cache") / "tk"
    except RuntimeError:
        wanted = f"TK_CACHE_DIR is {cache!r}, and" if cache else "no cache:"
        raise FileNotFoundError(f"{wanted} this user has no home directory; set TK_CACHE_DIR to a folder") from None


def slug(name: str) -> str:
    """A device's name as a part of a file's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Locks a file against other processes that write it. The lock goes with the process that holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_atomically(path: Path, data: bytes) -> None:
    """All or nothing, and on the disk before the name is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: Path, table: Mapping[str, Any]) -> None:
    """`table` as JSON, what it holds many of line by line, so that a diff shows what changed. Readers see the old file
    or the new one, never a part."""
    text = ",\n".join(f" {json.dumps(name)}: {_dump(value)}" for name, value in table.items())
    write_atomically(path, f"{{\n{text}\n}}\n".encode())


def _dump(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n ]"
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n }"
    return json.dumps(value)
