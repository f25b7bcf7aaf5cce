"""The C++ reader takes what pack.py writes, and refuses what pack.py refuses. Needs libtk_core (see TK_LIBRARY_DIR)."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

import tk

TK_OK, TK_PACK_ERROR = 0, 4


def library_path() -> Path | None:
    folders = [os.environ.get("TK_LIBRARY_DIR"), Path(tk.__path__[0]) / "lib"]
    found = [Path(f) / "libtk_core.so" for f in folders if f]
    return next((p for p in found if p.is_file()), None)


pytestmark = pytest.mark.skipif(library_path() is None, reason="libtk_core is not built")


@pytest.fixture(scope="module")
def core() -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_path()))
    library.tk_last_error.restype = ctypes.c_char_p
    library.tk_load_pack.argtypes = [ctypes.c_char_p]
    return library


def status(core: ctypes.CDLL, path: Path) -> int:
    return core.tk_load_pack(os.fsencode(path))


@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "ptx80"])
def test_the_core_takes_what_was_written(core, built, target):
    assert status(core, built[target].path) == TK_OK, core.tk_last_error().decode()


def test_the_core_refuses_a_flipped_byte(core, built, tmp_path):
    data = bytearray(built["sm90"].path.read_bytes())
    data[1000] ^= 1
    path = tmp_path / "flipped.tkpack"
    path.write_bytes(data)
    assert status(core, path) == TK_PACK_ERROR
    assert str(path) in core.tk_last_error().decode()


def test_the_core_refuses_a_truncated_pack(core, built, tmp_path):
    path = tmp_path / "short.tkpack"
    path.write_bytes(built["sm90"].path.read_bytes()[:-1])
    assert status(core, path) == TK_PACK_ERROR
