"""The generated ops of the loaded packs, as ``tk_generated_op`` of ``tk.h`` tells of them."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tk import _library, errors
from tk.expr import Expr

KINDS = ("tensor", "tensors", "float", "int", "bool", "optional_tensor")  # tk_param_kind
LEADING_DIMS = 3
MAX_DIMS = 8


class _Code(ctypes.Structure):
    _fields_ = [("words", ctypes.POINTER(ctypes.c_int64)), ("count", ctypes.c_size_t)]

    def decode(self) -> Expr:
        return Expr.decode(self.words[: self.count])


class _Param(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("kind", ctypes.c_int),
        ("leading", ctypes.c_int32),
        ("mutated", ctypes.c_int32),
        ("rank", ctypes.c_uint32),
        ("default_value", ctypes.c_char_p),
    ]


class _Check(ctypes.Structure):
    _fields_ = [("holds", _Code), ("message", ctypes.c_char_p)]


class _Result(ctypes.Structure):
    _fields_ = [
        ("dtype", _Code),
        ("leading", ctypes.c_int32),
        ("ndim", ctypes.c_uint32),
        ("sizes", _Code * MAX_DIMS),
        ("strides", _Code * MAX_DIMS),
    ]


class _GeneratedOp(ctypes.Structure):
    _fields_ = [
        ("op", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("schema", ctypes.c_char_p),
        ("meta", ctypes.c_char_p),
        ("backward", ctypes.c_char_p),
        ("twin_schema", ctypes.c_char_p),
        ("pack_path", ctypes.c_char_p),
        ("n_params", ctypes.c_uint32),
        ("n_locals", ctypes.c_uint32),
        ("n_checks", ctypes.c_uint32),
        ("n_results", ctypes.c_uint32),
        ("n_saved", ctypes.c_uint32),
        ("params", ctypes.POINTER(_Param)),
        ("locals", ctypes.POINTER(_Code)),
        ("checks", ctypes.POINTER(_Check)),
        ("results", ctypes.POINTER(_Result)),
    ]


@dataclass(frozen=True)
class Param:
    """An argument, as tk.aot.spec.Param."""

    name: str
    kind: str
    leading: bool
    mutated: bool
    rank: int


@dataclass(frozen=True)
class Check:
    holds: Expr
    message: str


@dataclass(frozen=True)
class Result:
    """leading: the tensor whose leading dimensions come first; None: there are none."""

    dtype: Expr
    leading: int | None
    sizes: tuple[Expr, ...]
    strides: tuple[Expr, ...]


class GeneratedOp:
    """One op. What a first call needs is read then, so that many ops cost little to register."""

    def __init__(self, record: _GeneratedOp):
        self._record = record
        self.name: str = record.name.decode()
        self.backward: str = record.backward.decode()
        self.n_saved: int = record.n_saved
        self.n_results: int = record.n_results

    @cached_property
    def params(self) -> tuple[Param, ...]:
        rows = self._record.params[: self._record.n_params]
        return tuple(Param(r.name.decode(), KINDS[r.kind], bool(r.leading), bool(r.mutated), r.rank) for r in rows)

    @cached_property
    def tensors(self) -> tuple[Param, ...]:
        """The tensor arguments, lists and optional ones too, in order: what expressions count."""
        return tuple(p for p in self.params if p.kind in ("tensor", "optional_tensor", "tensors"))

    @cached_property
    def takes_lists(self) -> bool:
        return any(p.kind == "tensors" for p in self.params)

    @cached_property
    def of_one_place(self) -> GeneratedOp:
        """What an op of lists does to the tensors at one place of them, as an op of tensors. Its checks are about
        dtypes alone."""
        found = copy(self)
        vars(found)["params"] = tuple(replace(p, kind="tensor" if p.kind == "tensors" else p.kind) for p in self.params)
        vars(found).pop("tensors", None)
        return found

    @cached_property
    def draws(self) -> bool:
        """Whether what it computes of an element depends on the place of the element, as random numbers do."""
        return any(node["op"] == "tk_random.bits.default" for graph in self.meta["graphs"] for node in graph["nodes"])

    @property
    def is_of_package(self) -> bool:
        """Whether the op is tk's own, and not of a user's pack."""
        return Path(self._record.pack_path.decode()).parent == _library.directory().parent / "packs"

    @cached_property
    def locals(self) -> tuple[Expr, ...]:
        return tuple(code.decode() for code in self._record.locals[: self._record.n_locals])

    @cached_property
    def checks(self) -> tuple[Check, ...]:
        return tuple(Check(c.holds.decode(), c.message.decode()) for c in self._record.checks[: self._record.n_checks])

    @cached_property
    def results(self) -> tuple[Result, ...]:
        return tuple(map(_result, self._record.results[: self._record.n_results]))

    @cached_property
    def meta(self) -> Mapping[str, Any]:
        """Raises tk.PackError where it is not what docs/packs.md says."""
        try:
            meta = json.loads(self._record.meta)
            _check_meta(meta, [p.name for p in self.tensors])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            path = self._record.pack_path.decode()
            raise errors.PackError(f"pack {path}: what it says of {self.name} cannot be read: {error!r}") from None
        return meta


def _check_meta(meta: Any, tensors: Sequence[str]) -> None:
    for name in tensors:
        meta["signature"][name].partition("[")
    for graph in meta["graphs"]:
        graph["dtypes"].items()
        for node in graph["nodes"]:
            if not isinstance(node["op"], str) or not isinstance(node["name"], str):
                raise TypeError(f"node {node}")
            list(node.get("args", ())), node.get("kwargs", {}).items()


def _result(row: _Result) -> Result:
    sizes, strides = (tuple(code.decode() for code in codes[: row.ndim]) for codes in (row.sizes, row.strides))
    return Result(row.dtype.decode(), None if row.leading < 0 else row.leading, sizes, strides)


@cache
def _at() -> Any:
    function = _library.core().tk_generated_op_at
    function.argtypes = [ctypes.c_uint32]
    function.restype = ctypes.POINTER(_GeneratedOp)
    return function


def read(first: int) -> list[GeneratedOp]:
    """The ops from the `first`-th on; they are only ever added to."""
    found: list[GeneratedOp] = []
    while record := _at()(first + len(found)):
        found.append(GeneratedOp(record.contents))
    return found
