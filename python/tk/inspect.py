"""What would run and why, what there is, and loading more of it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tk import _library, capi, errors
from tk._table import table
from tk.generated import register
from tk.heuristics.problem import Described, describe

__all__ = ["Coverage", "CoverageRow", "Explanation", "Pack", "Support"]
__all__ += ["coverage", "explain", "load_pack", "packs", "preload", "supports"]


@dataclass(frozen=True)
class Explanation:
    """problem: None where no kernel is launched. choice: None also where no variant fits. reason: why it is so.
    candidates: every variant of the problem's bucket, the fastest first, with the constraint that keeps it out."""

    op: str
    problem: capi.Problem | None
    choice: capi.Choice | None
    candidates: tuple[capi.Candidate, ...]
    reason: str

    def __str__(self) -> str:
        lines = [f"tk.{self.op}: {self.reason}"]
        if self.candidates:
            header = ("kernel", "config", "number", "predicted us", "why not")
            rows = [
                (c.kernel_name, c.config_name, c.config, _microseconds(c.cost), c.failed_constraint or "")
                for c in self.candidates
            ]
            lines.append(table(header, rows))
        return "\n".join(lines)


@dataclass(frozen=True)
class Support:
    """True where the call would run. reason: what would run it, or what fails and what is accepted."""

    is_supported: bool
    reason: str

    def __bool__(self) -> bool:
        return self.is_supported

    def __str__(self) -> str:
        return f"{'yes' if self.is_supported else 'no'}: {self.reason}"


@dataclass(frozen=True)
class Pack:
    """arch: "sm_90", "ptx80" for PTX that serves what is newer, or "any" for definitions of ops without kernels. size:
    of the file, bytes. problem: why it cannot be used, "" when it can."""

    path: str
    arch: str
    compiler: str
    ops: tuple[str, ...]
    variants: int
    images: int
    size: int
    is_builtin: bool
    problem: str

    def __str__(self) -> str:
        if self.problem:
            return f"{self.path}: not used: {self.problem}"
        return (
            f"{self.path}: {self.arch}, {', '.join(self.ops)}, {self.variants} variants, {self.images} images, "
            f"{self.size / 1e6:.1f} MB, {self.compiler}"
        )


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


@dataclass(frozen=True)
class Coverage:
    """Everything compiled, as far as packs are loaded or belong to the package."""

    rows: tuple[CoverageRow, ...]

    def only(self, op: str | None = None, arch: str | None = None) -> Coverage:
        """The rows of an op, of an architecture ("90", "sm_90", "ptx80")."""
        wanted = f"sm_{arch}" if arch and arch.isdigit() else arch
        return Coverage(tuple(r for r in self.rows if op in (None, r.op) and wanted in (None, r.arch)))

    def __str__(self) -> str:
        header = ("arch", "op", "kernel", "config", "number", "variants", "images", "kB")
        rows = [
            (r.arch, r.op, r.kernel, r.config, r.number, r.variants, r.images, round(r.size / 1000)) for r in self.rows
        ]
        return table(header, rows)


def packs() -> tuple[Pack, ...]:
    """The packs that are loaded or belong to the package, whatever GPUs there are."""
    return tuple(_pack(p) for p in _library.native().packs())


def _pack(p: Any) -> Pack:
    ops = tuple(op.name for op in p.ops)
    variants = sum(op.n_variants for op in p.ops)
    return Pack(p.path, _arch(p), p.compiler, ops, variants, p.n_images, p.file_size, p.builtin, p.problem)


def coverage() -> Coverage:
    """The table of everything compiled, per architecture."""
    native = _library.native()
    rows: list[CoverageRow] = []
    for pack in native.packs():
        for op in pack.ops:
            by_config: dict[tuple[str, int, str], list[Any]] = {}
            for v in native.variants(pack.path, op.name):
                by_config.setdefault((v.kernel, v.config, v.config_name), []).append(v)
            rows += [_coverage_row(_arch(pack), op.name, *key, variants) for key, variants in sorted(by_config.items())]
    return Coverage(tuple(sorted(rows, key=lambda r: (r.arch, r.op))))


def _coverage_row(arch: str, op: str, kernel: str, number: int, config: str, variants: list[Any]) -> CoverageRow:
    images = {launch.image: launch.size for v in variants for launch in v.launches}
    return CoverageRow(arch, op, kernel, config, number, len(variants), len(images), sum(images.values()))


def _arch(pack: Any) -> str:
    if not pack.arch:  # definitions of ops, without kernels
        return "any"
    return f"ptx{pack.arch}" if pack.ptx else f"sm_{pack.arch}"


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Which variant and config ``tk.<op>(*args, **kwargs)`` would run and why, and what keeps out the rest.

    Takes the arguments of the wrapper; nothing is launched. Raises what the call itself would raise for wrong
    arguments; that no variant fits is not an error here but a ``choice`` of None.
    """
    described = describe(_wrapper(op), *args, **kwargs)
    if described is None:
        return Explanation(op, None, None, (), _NO_LAUNCH)
    try:
        choice = capi.choose(described.problem, described.config)
    except (errors.UnsupportedError, errors.VariantNotFoundError, ValueError) as error:
        return Explanation(op, described.problem, None, _candidates(described), str(error))
    return Explanation(op, described.problem, choice, _candidates(described), _why(choice))


def supports(op: str, *args: Any, **kwargs: Any) -> Support:
    """Whether ``tk.<op>(*args, **kwargs)`` would run, and if not, which constraint fails and what is nearest."""
    try:
        explanation = explain(op, *args, **kwargs)
    except (errors.UnsupportedError, ValueError, TypeError) as error:
        return Support(False, str(error))
    return Support(explanation.problem is None or explanation.choice is not None, explanation.reason)


def load_pack(path: str | os.PathLike[str]) -> None:
    """Brings the kernels of a pack in, for the life of the process. Its generated ops become ``torch.ops.tk.<name>``.

    Raises:
        tk.PackError: the file is missing, damaged, of another version, or holds an op that a loaded pack of the same
            architecture holds as well, or one whose name means something else.
    """
    status = ctypes.c_int()
    error = _library.ops().tk_ops_load_pack(os.fsencode(path), status)
    if error is not None:
        raise errors.from_status(status.value, error.decode(errors="replace"))
    register.register_new()


def preload(ops: str | Iterable[str] | None = None, device: torch.device | int | str | None = None) -> int:
    """Loads the kernels of some ops (all by default) on a CUDA device (the current one by default) now, so that the
    first call does not, and so that graph capture can begin. Returns how many modules that were.

    Raises:
        tk.UnsupportedError: no GPU, or no pack for it.
        tk.DriverError: the driver refused a module.
    """
    names = [ops] if isinstance(ops, str) else ops
    core = _library.core()
    numbers = [_library.ALL_OPS] if names is None else [core.tk_intern_op(name.encode()) for name in names]
    index = _device_index(device)
    total = 0
    for number in numbers:
        loaded = ctypes.c_uint32()
        _library.check(core.tk_preload(number, index, loaded))
        total += loaded.value
    return total


def _device_index(device: torch.device | int | str | None) -> int:
    if isinstance(device, int):
        return device
    found = torch.device("cuda" if device is None else device)
    if found.type != "cuda":
        raise ValueError(f"tk.preload: device is {found}, must be a CUDA device")
    if not torch.cuda.is_available():
        raise errors.UnsupportedError("tk.preload: torch sees no CUDA device")
    return torch.cuda.current_device() if found.index is None else found.index


_NO_LAUNCH = "no kernel is launched: computed with ATen ops (on the CPU, or with nothing to multiply)"
_REASONS = (
    "has the lowest predicted time of what fits",
    "was measured fastest for this size",
    "is what the caller named",
)


def _wrapper(op: str) -> Callable[..., Any]:
    import tk

    own = [name for name in tk.__all__ if hasattr(torch.ops.tk, name)]
    if op in own:
        return getattr(tk, op)
    if register.find(op) is None:
        raise ValueError(f"tk has no op {op!r}; there are {', '.join([*own, *register.names()])}")
    return register.wrapper(op)


def _why(choice: capi.Choice) -> str:
    return f"{choice.kernel_name}/{choice.config_name} of {choice.pack_path} {_REASONS[choice.pinned]}"


def _microseconds(picoseconds: int) -> float | None:
    return None if picoseconds < 0 else picoseconds * 1e-6


def _candidates(described: Described) -> tuple[capi.Candidate, ...]:
    """Those that fit first, the fastest first."""
    try:
        rows = capi.candidates(described.problem)
    except errors.Error:  # no pack for this GPU, or no such bucket: the reason says so
        return ()
    return tuple(sorted(rows, key=lambda r: (not r.fits, r.cost, r.variant)))
