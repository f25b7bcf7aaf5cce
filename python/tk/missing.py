"""Built when asked for: a pair of attention's mods, a function between b2b_gemm's products or one under ``@tk.op`` that
no loaded pack has, once, into a pack of the user's. It takes ``tk.config.build_missing()`` or ``TK_BUILD_MISSING=1``,
and the ``build`` extra.

The packs are in ``packs`` under ``TK_CACHE_DIR``, else in ``tk/packs`` under ``XDG_CACHE_HOME`` or ``~/.cache``. A
file's name says what it holds, with a digest of the source that it was built from. It is built by a child process,
under a lock against others that want the same, and appears whole or not at all. Without the switch nothing here is
called, and nothing is written.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tk import _cache, _library, config, errors
from tk._version import __version__

__all__ = ["build", "directory", "is_for", "is_lack", "is_wanted", "load", "op"]

_log = logging.getLogger("tk.missing")
_failed: set[str] = set()  # of this process: a build that failed is not tried at every call


def is_wanted() -> bool:
    return config.builds_missing() and all(map(importlib.util.find_spec, ("triton", "zstandard")))


def directory() -> Path:
    return _cache.directory() / "packs"


def target(arch: int) -> str:
    """What ``tk build`` makes for a GPU: an sm_80 cubin serves all of 8.x, PTX what is newer than 9.0.

    Raises tk.UnsupportedError for a GPU older than sm_80."""
    if arch < 80:
        raise errors.UnsupportedError(f"tk build makes no kernels for sm_{arch}, which is older than sm_80")
    return "80" if arch < 90 else "90" if arch == 90 else "ptx80"


def build(name: str, source: str, arch: int) -> Path:
    """The pack of a source file's text for GPUs of ``arch`` (90 for 9.0), built if it is not there yet.

    Raises tk.VariantNotFoundError where it does not build, with what the build said."""
    built = target(arch)
    digest = hashlib.sha256(f"{__version__}\n{source}".encode()).hexdigest()[:16]
    path = directory() / f"{name}_{digest}.{built if built.startswith('ptx') else f'sm{built}'}.tkpack"
    if path.exists():
        return path
    if str(path) in _failed:
        raise errors.VariantNotFoundError(
            f"tk: building {name} failed before, in this process; the first call that needed it said why"
        )
    with _cache.locked(path):
        if not path.exists():
            _log.info("building %s for sm_%d into %s", name, arch, path)
            _build(name, source, built, path)
    return path


def _build(name: str, source: str, arch: str, path: Path) -> None:
    """Builds in a child process: Triton's compiler needs none of this process's state, and must not change any."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{name}_") as folder:
        file, made = Path(folder) / f"{name}.py", Path(folder) / "made.tkpack"
        file.write_text(source)
        command = [sys.executable, "-m", "tk", "build", str(file), "-o", str(made), "--arch", arch]
        environment = {k: v for k, v in os.environ.items() if k not in ("TK_BUILD_MISSING", "TK_PACK_PATH")}
        environment["PYTHONPATH"] = os.pathsep.join(x for x in sys.path if x)
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            _failed.add(str(path))
            raise errors.VariantNotFoundError(f"tk: {name} could not be built:\n{done.stderr.strip()[-4000:]}")
        os.replace(made, path)


def load(name: str, source: str, device: int) -> None:
    """Builds for a CUDA device, as the core numbers them, and loads. Raises as :func:`build`."""
    import ctypes

    from tk.inspect import load_pack

    arch = ctypes.c_int64()
    _library.check(_library.core().tk_device_arch(device, ctypes.byref(arch)))
    load_pack(build(name, source, arch.value))


# --- Attention's mods, and functions between products ---


def is_lack(error: Exception) -> bool:
    """Whether this is what their ops raise where a build would help. A pack that has them for other dtypes says so as a
    wrong argument."""
    return isinstance(errors.typed(error), errors.VariantNotFoundError) or "must be of dtype" in str(error)


def is_for(error: Exception) -> bool:
    """Whether it is, and one is wanted."""
    return is_lack(error) and is_wanted()


# --- Functions under @tk.op ---


def op(declared: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """``torch.ops.tk.<name>`` of a declared function that is called with CUDA tensors, its file built and loaded if
    need be; None where it is not for kernels to serve."""
    import torch
    from torch.utils._pytree import tree_leaves

    from tk.generated import register

    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return None
    device = next((x.device for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)), None)
    if device is None or device.type != "cuda" or not is_wanted():
        return None
    if register.find(declared.name) is None:
        load_declared(declared, device.index)
    return register.wrapper(declared.name)


def load_declared(declared: Any, device: int) -> None:
    """Builds and loads the file that declares the function: all that it declares. Raises as :func:`build`."""
    import inspect

    source = None
    with suppress(OSError, TypeError):
        source = Path(inspect.getsourcefile(declared.fn) or "").read_text()
    if source is None:
        raise errors.VariantNotFoundError(
            f"tk.{declared.name}: its source file is not there to be built; declare it in a file"
        )
    load(declared.name, source, device)
