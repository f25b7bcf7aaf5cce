"""Finds and loads the native libraries.

They lie in ``tk/lib`` beside this file, or in the folder that ``TK_LIBRARY_DIR`` names (a build tree). With
``TK_NO_LIBRARY=1`` nothing is loaded: that is how packs are built before there is a library.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from tk import errors

ALL_OPS = 2**32 - 1  # tk_preload's "every op"


def is_wanted() -> bool:
    return os.environ.get("TK_NO_LIBRARY", "") in ("", "0")


def directory() -> Path:
    """The folder in which the libraries are looked for."""
    return Path(os.environ.get("TK_LIBRARY_DIR") or Path(__file__).parent / "lib")


def load() -> None:
    """Loads libtk_ops (and with it libtk_core), which registers ``torch.ops.tk``. Does not touch CUDA."""
    import torch  # here, so that looking into packs and building them needs none

    path = directory() / "libtk_ops.so"
    if not path.exists():
        raise ImportError(
            f"tk's native library is not at {path}. Reinstall torch-tk, or point TK_LIBRARY_DIR at a build tree's "
            "libraries; TK_NO_LIBRARY=1 imports the build-time half of tk alone."
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(f"{path} does not load into torch {torch.__version__}: {error}") from error


@cache
def core() -> ctypes.CDLL:
    """libtk_core's C API (tk.h)."""
    library = ctypes.CDLL(str(directory() / "libtk_core.so"))
    library.tk_last_error.restype = ctypes.c_char_p
    library.tk_load_pack.argtypes = [ctypes.c_char_p]
    library.tk_verify_pack.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint32)]
    library.tk_op_name.argtypes = [ctypes.c_uint32]
    library.tk_op_name.restype = ctypes.c_char_p
    library.tk_intern_op.argtypes = [ctypes.c_char_p]
    library.tk_intern_op.restype = ctypes.c_uint32
    library.tk_preload.argtypes = [ctypes.c_uint32, ctypes.c_int32, ctypes.POINTER(ctypes.c_uint32)]
    return library


@cache
def ops() -> ctypes.CDLL:
    """libtk_ops, which torch has loaded: what it offers besides its ops."""
    library = ctypes.CDLL(str(directory() / "libtk_ops.so"))
    library.tk_ops_load_pack.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_int)]
    library.tk_ops_load_pack.restype = ctypes.c_char_p
    library.tk_ops_capture_device.argtypes = [ctypes.c_int32]
    return library


def check(status: int) -> None:
    """Raises the typed error of a failed call of the core."""
    if status:
        raise errors.from_status(status, core().tk_last_error().decode(errors="replace"))
