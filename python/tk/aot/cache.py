"""What was compiled before, by content.

An entry is one file named by its key: a line of JSON (sizes, hashes, launch metadata), then the image, compressed; or
a SHA-256 and bytes: images as a pack has them. It is published by writing beside it, fsync and rename: a reader sees
all of it or nothing, and two builds may share a folder. A damaged entry counts as absent.

The folder is that of :func:`tk._cache.directory`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tk._cache import directory, write_atomically

# Part of the path: another meaning of an entry is another folder.
LAYOUT = "aot-1"


@dataclass(frozen=True)
class Artifact:
    """A compiled launch: the image, and what its launch needs to know of it.

    entry: the kernel's symbol. threads: of a block. shared, *_scratch: bytes. tensor_maps: one entry for each tensor
    map parameter, as the compiler's metadata has it. spill_bytes: stores and loads of registers that did not fit.
    seconds: of one core, to compile it."""

    entry: str
    threads: int
    shared: int
    cluster: int
    global_scratch: int
    global_scratch_alignment: int
    profile_scratch: int
    profile_scratch_alignment: int
    tensor_maps: tuple[Mapping[str, Any], ...]
    registers: int
    spill_bytes: int
    seconds: float
    size: int
    hash: str  # SHA-256 of the image
    compressed: bytes

    @property
    def image(self) -> bytes:
        return zlib.decompress(self.compressed)


def compress(image: bytes) -> bytes:
    return zlib.compress(image, 9)


class Cache:
    """A folder of artifacts."""

    def __init__(self, folder: Path):
        self.folder = folder / LAYOUT

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / key

    def failure_path(self, key: str) -> Path:
        """The file that keeps the text of a failed compilation."""
        return self.folder / key[:2] / f"{key}.error"

    def load(self, key: str) -> Artifact | None:
        try:
            data = self.path(key).read_bytes()
        except FileNotFoundError:
            return None
        header, _, compressed = data.partition(b"\n")
        try:
            fields = json.loads(header)
            if fields.pop("compressed_hash") != hashlib.sha256(compressed).hexdigest():
                return None
            fields["tensor_maps"] = tuple(fields["tensor_maps"])
            return Artifact(**fields, compressed=compressed)
        except (ValueError, KeyError, TypeError):
            return None

    def store(self, key: str, artifact: Artifact) -> None:
        fields = asdict(artifact)
        del fields["compressed"]
        fields["compressed_hash"] = hashlib.sha256(artifact.compressed).hexdigest()
        header = json.dumps(fields, sort_keys=True).encode()
        write_atomically(self.path(key), header + b"\n" + artifact.compressed)
        with contextlib.suppress(FileNotFoundError):
            self.failure_path(key).unlink()

    def load_bytes(self, key: str) -> bytes | None:
        """What `store_bytes` was given."""
        try:
            data = self.path(key).read_bytes()
        except FileNotFoundError:
            return None
        return data[32:] if data[:32] == hashlib.sha256(data[32:]).digest() else None

    def store_bytes(self, key: str, data: bytes) -> None:
        write_atomically(self.path(key), hashlib.sha256(data).digest() + data)

    def record_failure(self, key: str, text: str) -> Path:
        """Keeps what the compiler said, for people to read. A later build tries again, since a full disk or a killed
        process is no property of the kernel."""
        path = self.failure_path(key)
        write_atomically(path, text.encode())
        return path


@contextlib.contextmanager
def open_cache(warn: Callable[[str], object]) -> Iterator[Cache]:
    """The user's cache; where it cannot be written, one for this build alone, and `warn` is told."""
    try:
        folder = directory()
        (folder / LAYOUT).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder / LAYOUT):
            pass
    except OSError as e:
        with tempfile.TemporaryDirectory(prefix="tk-cache-") as temporary:
            warn(f"the cache cannot be written ({e}): what is compiled now is not kept; set TK_CACHE_DIR to a folder")
            yield Cache(Path(temporary))
        return
    yield Cache(folder)
