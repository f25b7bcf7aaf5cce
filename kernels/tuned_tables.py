"""Measured choices: ``kernels/tuned/sm<arch>/<stem>.json``.

    {"gpu": "NVIDIA H200", "driver": "580.65", "compiler": "triton 3.9.0, ptxas 13.4.59", "date": "2026-01-31",
     "coefficients": {...},
     "pins": [{"key": {"dtype": 0, ...}, "dims": [16, 4096, 4096], "config": "tma_128x256x64"}, ...]}

``coefficients`` belong to the kernel file, which reads them for its predicted times. A pin says which config was
fastest for one problem: `key` gives the value of every selector axis of the op, `dims` the values of ``Op.dims``.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import tk.kernels
from tk.aot.errors import BuildError

FIELDS = frozenset({"gpu", "driver", "compiler", "date", "coefficients", "pins"})


@functools.cache
def load(stem: str, arch: int) -> dict[str, Any]:
    """The table of `stem` for `arch` (90 for sm_90); empty when there is none. Read once per process: do not change it.

    Raises BuildError when the file is there but cannot be used."""
    for folder in tk.kernels.__path__:
        path = Path(folder) / "tuned" / f"sm{arch}" / f"{stem}.json"
        if path.is_file():
            return read(path)
    return {}


def read(path: Path) -> dict[str, Any]:
    """One table, checked as far as can be done without the op. Raises BuildError."""
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise BuildError(f"{path}: {e}") from e
    if not isinstance(table, dict) or (unknown := set(table) - FIELDS):
        what = "not a table" if not isinstance(table, dict) else f"unknown fields {sorted(unknown)}"
        raise BuildError(f"{path}: {what}; a tuned table has {sorted(FIELDS)}")
    for i, pin in enumerate(table.get("pins", ())):
        if not isinstance(pin, dict) or set(pin) != {"key", "dims", "config"}:
            raise BuildError(f"{path}: pin {i} must have exactly key, dims and config")
    return table
