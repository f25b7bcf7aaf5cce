"""Builds of the package's own packs that are finished: asked for again with nothing changed they are left as they are.

To find out what a build would compile takes a trace of every generated function, half a minute, and most of that is
torch's. So what a build depends on — the sources of the kernels and of all that makes packs of them, the compilers'
versions, the arguments — has a digest, and under it the cache keeps the hashes of what was written. It is only looked
at: nothing is taken from it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import tk.kernels
from tk._cache import write_atomically
from tk.aot.cache import Cache

PACKAGE = Path(__file__).resolve().parent.parent
FOLDERS = ("aot", "build", "codegen", "generated")  # of the package; and every folder of kernels
SUFFIXES = (".py", ".json")
COMPILERS = ("torch", "triton", "sympy", "zstandard")
VARIABLES = ("TRITON_", "CUDA_", "TK_")  # of the environment, what may change a cubin begins with one of these
KEPT_OUT = ("TK_CACHE_DIR", "TK_JOBS", "TK_NO_LIBRARY", "TRITON_CACHE_DIR", "CUDA_VISIBLE_DEVICES")


def sources() -> Iterator[Path]:
    """Every file that a build of the package's packs reads."""
    folders = [*(PACKAGE / name for name in FOLDERS), *map(Path, tk.kernels.__path__)]
    files = [f for folder in folders for suffix in SUFFIXES for f in folder.rglob(f"*{suffix}")]
    yield from sorted({*files, *PACKAGE.glob("*.py")})


def digest(arguments: Sequence[str]) -> str:
    """A digest of all that a build with these arguments depends on. A file counts by its name in its folder and its
    content."""
    found = hashlib.sha256()
    versions = [f"{name} {metadata.version(name)}" for name in COMPILERS]
    variables = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES) and k not in KEPT_OUT]
    for text in (*arguments, *versions, *variables):
        found.update(text.encode() + b"\0")
    for path in sources():
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        found.update(f"{path.parent.name}/{path.name} {content}\n".encode())
    return found.hexdigest()


def _record(cache: Cache, key: str) -> Path:
    return cache.folder / "finished" / key


def is_finished(cache: Cache, key: str, outputs: Sequence[Path]) -> bool:
    """Whether a build with this digest has written these files, and they are still what it wrote."""
    try:
        written = json.loads(_record(cache, key).read_text())
        return bool(written == [_hash(path) for path in outputs])
    except (OSError, ValueError):
        return False


def record(cache: Cache, key: str, outputs: Sequence[Path]) -> None:
    """Records a build that is done. `outputs` are in the order in which they are asked for."""
    write_atomically(_record(cache, key), json.dumps([_hash(path) for path in outputs]).encode())


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
