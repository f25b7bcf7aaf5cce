"""What is in the packs, told by libtk_core through ctypes: it needs neither torch nor a GPU, and is the same for every
Python."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from tk import _library
from tk._table import Records

__all__ = [
    "OF_FUNCTIONS", "Coverage", "CoverageRow", "LaunchInfo", "Pack", "Packs", "config_numbers", "config_params",
    "coverage", "is_generated", "listed", "needs", "op_names", "packs", "verify",
]  # fmt: skip


# How the names of ops begin whose kernels hold a user's functions: attention's mods and what stands in b2b_gemm.
OF_FUNCTIONS = ("flex_", "b2b_")


# --- tk.h's structs ---


class PackInfo(ctypes.Structure):
    _fields_ = [
        ("pack", ctypes.c_void_p),
        ("path", ctypes.c_char_p),
        ("problem", ctypes.c_char_p),
        ("builtin", ctypes.c_int32),
        ("arch", ctypes.c_uint32),
        ("ptx", ctypes.c_int32),
        ("n_images", ctypes.c_uint32),
        ("family", ctypes.c_int32),
        ("file_size", ctypes.c_uint64),
        ("compiler", ctypes.c_char_p),
        ("hash", ctypes.c_char_p),
    ]


class OpInfo(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("schema", ctypes.c_char_p),
        ("n_tensors", ctypes.c_uint32),
        ("n_ints", ctypes.c_uint32),
        ("n_floats", ctypes.c_uint32),
        ("n_outputs", ctypes.c_uint32),
        ("n_buckets", ctypes.c_uint32),
        ("n_configs", ctypes.c_uint32),
        ("n_variants", ctypes.c_uint32),
        ("n_pins", ctypes.c_uint32),
        ("served_by", ctypes.c_char_p),
    ]


class ConfigInfo(ctypes.Structure):
    _fields_ = [("number", ctypes.c_uint32), ("name", ctypes.c_char_p), ("params", ctypes.c_char_p)]


class VariantInfo(ctypes.Structure):
    _fields_ = [
        ("number", ctypes.c_uint32),
        ("config", ctypes.c_uint32),
        ("config_name", ctypes.c_char_p),
        ("kernel", ctypes.c_char_p),
        ("general", ctypes.c_int32),
        ("deterministic", ctypes.c_int32),
    ]


class ConstraintInfo(ctypes.Structure):
    _fields_ = [("variant", ctypes.c_uint32), ("message", ctypes.c_char_p)]


class LaunchInfo(ctypes.Structure):
    _fields_ = [
        ("variant", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("size", ctypes.c_uint64),
        ("compressed_size", ctypes.c_uint64),
        ("image", ctypes.c_char_p),
        ("entry", ctypes.c_char_p),
    ]


Row = TypeVar("Row", bound=ctypes.Structure)


def listed(function: str, row: type[Row], *of: Any) -> ctypes.Array[Row]:
    """What one of tk.h's functions tells that fill rows: tk_list_…, tk_candidates, tk_launches."""
    call = getattr(_library.core(), function)
    count = ctypes.c_uint32()
    _library.check(call(*of, None, 0, ctypes.byref(count)))
    rows = (row * count.value)()
    _library.check(call(*of, rows, count, ctypes.byref(count)))
    return rows


def _open_packs() -> Iterator[tuple[PackInfo, ctypes.c_void_p]]:
    """Those that can be used."""
    for pack in listed("tk_list_packs", PackInfo):
        if pack.pack:
            yield pack, ctypes.c_void_p(pack.pack)


# --- What is shown of them ---


@dataclass(frozen=True)
class Pack:
    """arch: "sm_90", "sm_100f" for a family, "ptx80" for PTX that serves what is newer, "any" for ops defined without
    kernels; "" when it cannot be used. size: of the file, bytes. problem: why it cannot be used, "" when it can.
    shared: of its ops those that a pack loaded earlier serves, (name, that pack's path): this one serves what that has
    no kernel for."""

    path: str
    arch: str
    compiler: str
    ops: tuple[str, ...]
    variants: int
    images: int
    size: int
    is_builtin: bool
    problem: str
    shared: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        if self.problem:
            return f"{self.path}: not used: {self.problem}"
        text = (
            f"{self.path}: {self.arch}, {', '.join(self.ops)}, {self.variants} variants, {self.images} images, "
            f"{self.size / 1e6:.1f} MB, {self.compiler}"
        )
        return f"{text}; {self.served_first()}" if self.shared else text

    def served_first(self) -> str:
        """Which ops another pack serves first, in words; "" when none."""
        by_path: dict[str, list[str]] = {}
        for op, path in self.shared:
            by_path.setdefault(path, []).append(op)
        return "; ".join(f"{path} first serves {_few(tuple(ops))}" for path, ops in by_path.items())


class Packs(Records[Pack]):
    """Packs, the package's own first."""

    header = ("path", "arch", "ops", "variants", "images", "MB", "compiler", "shared")

    @staticmethod
    def cells(row: Pack) -> tuple[object, ...]:
        if row.problem:
            return row.path, *[None] * 5, f"not used: {row.problem}", ""
        counts = (row.variants, row.images, row.size / 1e6)
        return row.path, row.arch, _few(row.ops), *counts, row.compiler, row.served_first()


def _few(names: tuple[str, ...], most: int = 4) -> str:
    """All of them, or the first and how many more."""
    shown = " ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


@dataclass(frozen=True)
class CoverageRow:
    """A config of a kernel. variants: the points of the kernel's grid that were compiled with it. images: the distinct
    cubins (or PTX) that these launch. size: of the images, bytes."""

    arch: str
    op: str
    kernel: str
    config: str
    number: int
    variants: int
    images: int
    size: int


class Coverage(Records[CoverageRow]):
    """Everything compiled, as far as packs are loaded or belong to the package."""

    header = ("arch", "op", "kernel", "config", "number", "variants", "images", "kB")

    @staticmethod
    def cells(row: CoverageRow) -> tuple[object, ...]:
        return (
            *(row.arch, row.op, row.kernel, row.config, row.number, row.variants, row.images),
            round(row.size / 1000),
        )

    def only(self, op: str | None = None, arch: int | str | None = None) -> Coverage:
        """The rows of an op, of an architecture (90, "90", "sm_90", "100f", "ptx80"). There may be none.

        Raises TypeError for an op that is no str, and for an arch that is neither an int nor a str."""
        if not isinstance(op, str | None):
            raise TypeError(f"tk.coverage().only: op must be a str, is {op!r}")
        if isinstance(arch, bool) or not isinstance(arch, int | str | None):
            raise TypeError(f"tk.coverage().only: arch must be an int or a str, is {arch!r}")
        wanted = str(arch) if isinstance(arch, int) else arch
        wanted = f"sm_{wanted}" if wanted and wanted[0].isdigit() else wanted
        return Coverage(r for r in self if op in (None, r.op) and wanted in (None, r.arch))


def packs() -> Packs:
    """The packs that are loaded or belong to the package, whatever GPUs there are."""
    return Packs(map(_pack, listed("tk_list_packs", PackInfo)))


def _pack(info: PackInfo) -> Pack:
    is_builtin = bool(info.builtin)
    if not info.pack:
        return Pack(info.path.decode(), "", "", (), 0, 0, 0, is_builtin, info.problem.decode())
    ops = listed("tk_list_ops", OpInfo, ctypes.c_void_p(info.pack))
    return Pack(
        info.path.decode(),
        _arch(info),
        info.compiler.decode(),
        tuple(op.name.decode() for op in ops),
        sum(op.n_variants for op in ops),
        info.n_images,
        info.file_size,
        is_builtin,
        "",
        tuple((op.name.decode(), op.served_by.decode()) for op in ops if op.served_by),
    )


def _arch(info: PackInfo) -> str:
    if not info.arch:  # definitions of ops, without kernels
        return "any"
    return f"ptx{info.arch}" if info.ptx else f"sm_{info.arch}{'f' if info.family else ''}"


def coverage() -> Coverage:
    """The table of everything compiled, per architecture."""
    rows: list[CoverageRow] = []
    for info, pack in _open_packs():
        for op in listed("tk_list_ops", OpInfo, pack):
            rows += _coverage_of(_arch(info), pack, op.name)
    return Coverage(sorted(rows, key=lambda r: (r.arch, r.op)))


def _coverage_of(arch: str, pack: ctypes.c_void_p, op: bytes) -> list[CoverageRow]:
    """A row for each kernel and config of an op, in order."""
    configs: dict[int, tuple[bytes, int, bytes]] = {}  # by variant
    variants: dict[tuple[bytes, int, bytes], int] = {}
    for v in listed("tk_list_variants", VariantInfo, pack, op):
        configs[v.number] = key = (v.kernel, v.config, v.config_name)
        variants[key] = variants.get(key, 0) + 1
    images: dict[tuple[bytes, int, bytes], dict[bytes, int]] = {key: {} for key in variants}
    for launch in listed("tk_list_launches", LaunchInfo, pack, op):
        images[configs[launch.variant]][launch.image] = launch.size
    return [
        CoverageRow(
            *(arch, op.decode(), kernel.decode(), config.decode(), number, variants[key]),
            *(len(images[key]), sum(images[key].values())),
        )
        for key in sorted(variants)
        for kernel, number, config in [key]
    ]


def op_names() -> set[str]:
    """The ops that a pin may name, of all packs. Kernels of a user's mods and functions take none."""
    names = {op.name.decode() for _, pack in _open_packs() for op in listed("tk_list_ops", OpInfo, pack)}
    return {name for name in names if not name.startswith(OF_FUNCTIONS)}


def is_generated(op: str) -> bool:
    """Whether an op is one whose pack says what it takes and returns."""
    wanted = op.encode()
    return any(
        row.name == wanted and row.schema for _, pack in _open_packs() for row in listed("tk_list_ops", OpInfo, pack)
    )


def config_numbers(op: str) -> dict[str, int]:
    """The numbers of an op's configs by their names, each the same in every pack."""
    wanted = op.encode()
    return {
        config.name.decode(): config.number
        for _, pack in _open_packs()
        for found in listed("tk_list_ops", OpInfo, pack)
        if found.name == wanted
        for config in listed("tk_list_configs", ConfigInfo, pack, wanted)
    }


def config_params(op: str) -> dict[str, dict[str, Any]]:
    """What the packs say of each config of an op: its parameters, by its name."""
    wanted = op.encode()
    return {
        config.name.decode(): json.loads(config.params)
        for _, pack in _open_packs()
        for found in listed("tk_list_ops", OpInfo, pack)
        if found.name == wanted
        for config in listed("tk_list_configs", ConfigInfo, pack, wanted)
    }


def needs(op: str) -> list[tuple[str, ...]]:
    """What the kernels of an op need of a call, in all packs: the constraints of each in words, equal ones once."""
    wanted = op.encode()
    found: dict[tuple[str, ...], None] = {}
    for _, pack in _open_packs():
        if not any(row.name == wanted for row in listed("tk_list_ops", OpInfo, pack)):
            continue
        of_variant: dict[int, list[str]] = {}
        for row in listed("tk_list_constraints", ConstraintInfo, pack, wanted):
            of_variant.setdefault(row.variant, []).append(row.message.decode())
        found |= dict.fromkeys(map(tuple, of_variant.values()))
    return list(found)


def verify(path: str | os.PathLike[str]) -> int:
    """Holds every image of a pack's file against its hash; returns how many there are. Raises tk.PackError."""
    images = ctypes.c_uint32()
    _library.check(_library.core().tk_verify_pack(os.fsencode(path), images))
    return images.value
