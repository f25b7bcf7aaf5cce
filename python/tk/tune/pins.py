"""The user's file: what was measured on this machine, and its way into the engine.

Read before the first call on a GPU, so this imports little.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tk import _cache, capi, errors
from tk.tune import files

_log = logging.getLogger("tk")

FILE_VERSION = 1
_NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4m3fn", torch.float8_e5m2: "fp8e5m2", torch.int8: "i8", torch.int16: "i16",
    torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def user_file(device: int = 0) -> Path:
    """The file of this machine's measurements of a GPU: ``tuned-<gpu>-sm<arch>.json`` in the user's cache."""
    properties = torch.cuda.get_device_properties(device)
    name = f"tuned-{_cache.slug(properties.name)}-sm{properties.major}{properties.minor}.json"
    return _cache.directory() / name


def load_user_pins() -> int:
    """Pins what the user's files hold for the visible GPUs; returns how many pins. Those whose config no pack has any
    more are left out.

    Raises OSError or ValueError for a file that cannot be used."""
    return sum(pin_all(user_file(device), device) for device in range(torch.cuda.device_count()))


def pin_all(path: Path, device: int) -> int:
    """Pins what one file holds on one device; 0 when there is no such file. Left out is what no loaded pack has, or
    what cannot run any more."""
    if not path.is_file():
        return 0
    numbers: dict[str, dict[str, int]] = {}
    count = 0
    for entry in read(path):
        problem, config = problem_of(entry, path, device), entry["config"]
        known = numbers.setdefault(problem.op, {})
        try:
            if config not in known:  # one question answers for all configs of a bucket
                known |= {c.config_name: c.config for c in capi.candidates(problem)}
            if config not in known:
                _log.info("%s: the packs have no config %s of %s any more", path, config, problem.op)
                continue
            capi.pin(problem, known[config])
        except (errors.Error, ValueError) as error:  # an op of a pack that is not loaded, or has changed since
            _log.info("%s: %s %s is left out: %s", path, problem.op, config, error)
            continue
        count += 1
    return count


def read(path: Path) -> list[dict[str, Any]]:
    """The entries of a file. Raises ValueError when it is damaged or of another version."""
    advice = "delete it, or run tk tune again"
    try:
        table = json.loads(path.read_text())
    except ValueError as e:
        raise ValueError(f"{path} is damaged ({e}): {advice}") from e
    if not isinstance(table, dict) or table.get("version") != FILE_VERSION or not isinstance(table.get("pins"), list):
        raise ValueError(f"{path} is not a tuning file of version {FILE_VERSION}: {advice}")
    return table["pins"]


def write(path: Path, entries: Iterable[dict[str, Any]], record: Mapping[str, Any]) -> None:
    """Adds entries; those of a problem that was there replace it. A file that cannot be read is replaced. record: what
    was measured on what."""
    old: list[dict[str, Any]] = []
    if path.is_file():
        try:
            old = read(path)
        except ValueError as e:
            _log.warning("%s; it is replaced", e)
    _cache.write_json(path, {"version": FILE_VERSION, **record, "pins": files.merge(old, entries)})


def entry_of(problem: capi.Problem, config: str, us: float) -> dict[str, Any]:
    """A problem and its choice, as the file holds it."""
    return {**problem_entry(problem), "config": config, "us": round(us, 3)}


def problem_entry(problem: capi.Problem) -> dict[str, Any]:
    """A problem, without addresses."""
    tensors = [None if t is None else [_NAMES[t.dtype], list(t.sizes), list(t.strides)] for t in problem.tensors]
    ints, floats = list(problem.ints), list(problem.floats)
    return {"op": problem.op, "tensors": tensors, "ints": ints, "floats": floats, "mode": problem.mode}


def problem_of(entry: Mapping[str, Any], path: Path, device: int = 0) -> capi.Problem:
    """The problem of such an entry of the file at `path`. Raises ValueError where there is none."""
    try:
        tensors = [
            None if t is None else capi.Matrix(_DTYPES[t[0]], tuple(t[1]), tuple(t[2])) for t in entry["tensors"]
        ]
        ints, floats = tuple(entry["ints"]), tuple(entry["floats"])
        return capi.Problem(str(entry["op"]), tensors, ints, floats, int(entry["mode"]), device)
    except (KeyError, IndexError, TypeError) as e:
        raise ValueError(f"{path}: this entry cannot be read: {entry}") from e
