"""What would run and why, what there is, and loading more of it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tk import _library, capi, config, errors
from tk._names import did_you_mean
from tk._packs import Coverage, CoverageRow, Pack, Packs, coverage, packs
from tk._table import Records, table
from tk.heuristics import described
from tk.heuristics import problem as here
from tk.heuristics.problem import AtenCall, Described
from tk.tune import loading

__all__ = ["Candidates", "Coverage", "CoverageRow", "Explanation", "Pack", "Packs", "Step", "Steps", "Support"]
__all__ += ["coverage", "explain", "load_pack", "packs", "preload", "supports"]


class Candidates(Records[capi.Candidate]):
    """Variants that a problem might run: those that fit first, the fastest first. Of a config's variants the table has
    one, the first that fits; of a config without one, what each of its variants needs."""

    header = ("kernel", "config", "number", "predicted us", "needs")

    @staticmethod
    def cells(row: capi.Candidate) -> tuple[object, ...]:
        return row.kernel_name, row.config_name, row.config, _microseconds(row.cost), row.failed_constraint or ""

    def __str__(self) -> str:
        # A config has a variant for each class of strides, which the columns do not tell apart.
        fitting: dict[tuple[str, int], tuple[object, ...]] = {}
        for row in self:
            if row.fits:
                fitting.setdefault((row.kernel_name, row.config), self.cells(row))
        needing = [self.cells(row) for row in self if (row.kernel_name, row.config) not in fitting]
        return table(self.header, dict.fromkeys([*fitting.values(), *needing]))

    __repr__ = __str__


@dataclass(frozen=True)
class Step:
    """A part of a call: an op of tk's core, or one of ATen's ("aten.copy_"). choice: None for ATen's, and where no
    variant fits. launches: the kernels that it launches, in order, as a profiler names them; ATen's are not known.
    reason: what the step is for, and why this variant."""

    op: str
    choice: capi.Choice | None
    launches: tuple[str, ...]
    reason: str


class Steps(Records[Step]):
    """The steps of a call, in the order in which they run. The table has a row for each launch."""

    header = ("op", "kernel", "config", "launch", "predicted us", "why")

    @staticmethod
    def cells(row: Step) -> tuple[object, ...]:
        launch = next(iter(row.launches), None)
        if row.choice is None:
            return row.op, None, None, launch, None, row.reason
        return (
            row.op,
            row.choice.kernel_name,
            row.choice.config_name,
            launch,
            _microseconds(row.choice.cost),
            row.reason,
        )

    def __str__(self) -> str:
        rows = ((self.cells(row), *(("", "", "", launch, "", "") for launch in row.launches[1:])) for row in self)
        return table(self.header, chain.from_iterable(rows))

    __repr__ = __str__


@dataclass(frozen=True)
class Explanation:
    """problem: None where no kernel is launched. choice: None also where no variant fits. reason: why it is so.
    candidates: every variant of the problem's bucket, the fastest first, with the constraint that keeps it out.
    runs: whether the call would, with a kernel or without. steps: everything that it launches, copies of operands
    included; problem, choice and candidates are those of the step that computes the result."""

    op: str
    problem: capi.Problem | None
    choice: capi.Choice | None
    candidates: Candidates
    reason: str
    runs: bool = True
    steps: Steps = field(default_factory=Steps)

    def __str__(self) -> str:
        lines = [f"tk.{self.op}: {self.reason}"]
        if len(self.steps) > 1 or any(len(step.launches) > 1 for step in self.steps):
            lines += ["The call launches:", str(self.steps)]
            lines += ["What may compute the result:"] if self.candidates else []
        if self.candidates:
            lines.append(str(self.candidates))
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


def explain(op: str, *args: Any, arch: int | str | None = None, **kwargs: Any) -> Explanation:
    """Which variant and config ``tk.<op>(*args, **kwargs)`` would run and why, and what keeps out the rest.

    Takes the arguments of the function, any of tk's or an op of a loaded pack. Of a call that launches several kernels
    ``steps`` names all: copies of operands, each launch of a plan, and what ATen computes in between. The rest is about
    the step that computes the result. Where ATen computes the call on CUDA, since no kernel takes it, the reason says
    so. No kernel of tk's is launched, and no argument or random generator changes. Raises what the call itself would
    raise for wrong arguments; that no variant fits is not an error here but a ``choice`` of None.

    arch: 80 or 90, for what would run on an A100 or an H100, which this machine need not have; tensors may then be of
    any device, such as "meta". Raises ValueError for another, and TypeError for what is neither an int nor a str.
    """
    find = here.steps if arch is None else partial(described.steps, described.gpu(arch))
    function = _wrapper(op)
    try:
        with _leaving_no_trace(op, args, kwargs) as (args, kwargs):
            calls = find(function, *args, **kwargs)
    except errors.VariantNotFoundError as error:  # of attention: no pack has an op for these mods
        return Explanation(op, None, None, Candidates(), str(error), False)
    steps = Steps(map(_step, calls))
    found = here.last(calls)
    if found is None:
        return Explanation(op, None, None, Candidates(), _why_no_launch(find, op, args, kwargs), True, steps)
    lacking = [step for call, step in zip(calls, steps, strict=True) if isinstance(call, Described) and not step.choice]
    choice = None if lacking else steps[calls.index(found)].choice
    reason = _why(choice) if choice else lacking[0].reason
    return Explanation(op, found.problem, choice, _candidates(found), reason, not lacking, steps)


def _step(call: Described | AtenCall) -> Step:
    if isinstance(call, AtenCall):
        return Step(call.name, None, (), here.PURPOSES.get(call.name, "has no kernel of tk's"))
    op = call.problem.op
    try:
        choice = capi.choose(call.problem, call.config)
    except (errors.UnsupportedError, errors.VariantNotFoundError, ValueError) as error:
        return Step(op, None, (), str(error))
    reason = "; ".join(filter(None, (here.PURPOSES.get(op), _REASONS[choice.pinned])))
    return Step(op, choice, capi.launches(call.problem, call.config), reason)


def supports(op: str, *args: Any, **kwargs: Any) -> Support:
    """Whether ``tk.<op>(*args, **kwargs)`` would run, and if not, which constraint fails and what is nearest. No op of
    that name is an answer, too.

    Raises TypeError where op is no str, and what :func:`explain` raises for an arch that no GPU is described of."""
    if not isinstance(op, str):
        raise _no_name("supports", op)
    if (arch := kwargs.get("arch")) is not None:
        described.gpu(arch, "supports")
    try:
        explanation = explain(op, *args, **kwargs)
    except (errors.UnsupportedError, ValueError, TypeError, IndexError, RuntimeError) as error:  # torch's own too
        return Support(False, str(error))
    return Support(explanation.runs, explanation.reason)


def load_pack(path: str | os.PathLike[str]) -> None:
    """Brings the kernels of a pack in, for the life of the process. Its generated ops become ``torch.ops.tk.<name>``.

    Of a pack that was built for several architectures (my.sm80.tkpack, my.sm90.tkpack), ``my.tkpack`` stands for all of
    its files: each GPU is served by the one that suits it. An op that a loaded pack has as well, the same by its
    fingerprint or definition, is served by that pack where it has a kernel for the call, and by this one where not;
    ``tk.packs()`` says so.

    Raises:
        tk.PackError: the file is missing, damaged, of another version, or holds an op whose name means something else
            in a loaded pack.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(f"tk.load_pack: path must be a str or a path, is {path!r}")
    if not path or os.path.isdir(path):
        what = "is a folder" if path else "is empty"
        raise errors.PackError(f"tk.load_pack: path {str(path)!r} {what}; name a pack, such as 'my.tkpack'")
    status = ctypes.c_int()
    error = _library.ops().tk_ops_load_pack(os.fsencode(path), status)
    if error is not None:
        raise errors.from_status(status.value, error.decode(errors="replace"))
    loading.pack_was_loaded()


def preload(ops: str | Iterable[str] | None = None, device: torch.device | int | str | None = None) -> int:
    """Loads the kernels of some ops (all by default) on a CUDA device (the current one by default) now, so that the
    first call does not, and so that graph capture can begin. Returns how many modules that were.

    Raises:
        TypeError: ops is neither a name nor names, or device names none.
        ValueError: device is no CUDA device.
        tk.UnsupportedError: no GPU, or no pack for it.
        tk.DriverError: the driver refused a module.
    """
    names = None if ops is None else _names(ops)
    core = _library.core()
    numbers = [_library.ALL_OPS] if names is None else [core.tk_intern_op(name.encode()) for name in names]
    index = _device_index(device)
    total = 0
    for number in numbers:
        loaded = ctypes.c_uint32()
        _library.check(core.tk_preload(number, index, loaded))
        total += loaded.value
    return total


def _names(ops: Any) -> list[str]:
    if isinstance(ops, str):
        return [ops]
    names = list(ops) if isinstance(ops, Iterable) and not isinstance(ops, torch.Tensor) else [ops]
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise TypeError(f"tk.preload: ops must be the name of an op, or several, has {wrong[0]!r}")
    return names


def _device_index(device: torch.device | int | str | None) -> int:
    if isinstance(device, bool) or not isinstance(device, torch.device | int | str | None):
        raise TypeError(f"tk.preload: device must be a torch.device, a str, an int or None, is {device!r}")
    if isinstance(device, int):
        if device < 0:
            raise ValueError(f"tk.preload: device is {device}, must be a CUDA device")
        return device
    try:
        found = torch.device("cuda" if device is None else device)
    except RuntimeError:
        raise ValueError(f"tk.preload: device is {device!r}, must be a CUDA device") from None
    if found.type != "cuda":
        raise ValueError(f"tk.preload: device is {found}, must be a CUDA device")
    if not torch.cuda.is_available():
        raise errors.UnsupportedError("tk.preload: torch sees no CUDA device")
    return torch.cuda.current_device() if found.index is None else found.index


def _why_no_launch(find: Callable[..., Any], op: str, args: Any, kwargs: Any) -> str:
    """Says why nothing is launched. On a GPU a function leaves to ATen what no kernel takes; strict mode refuses it,
    and says what that is."""
    devices = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
    if find is here.steps and devices <= {"cpu"}:
        return _ON_THE_CPU if devices else _NO_LAUNCH
    try:
        with _leaving_no_trace(op, args, kwargs) as (args, kwargs), config.strict():
            find(_wrapper(op), *args, **kwargs)
    except errors.UnsupportedError as error:
        return f"no kernel takes it, so ATen computes it, but in strict mode, where it is refused: {error}"
    return _NO_LAUNCH


_NO_LAUNCH = (
    "no kernel is launched: computed with ATen ops (on the CPU, with nothing to compute, or since it is made of them)"
)
_ON_THE_CPU = (
    "no kernel is launched: the tensors are on the CPU, where ATen computes; with arch=90 tk.explain says what an H100 "
    "would run"
)
_REASONS = (
    "has the lowest predicted time of what fits",
    "was measured fastest for this size",
    "is what the caller named",
)


@contextmanager
def _leaving_no_trace(op: str, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Arguments for a call that may compute, on the CPU: what it writes are copies, what it draws is put back."""
    if op.endswith("_") or kwargs.get("out") is not None:
        args, kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
    devices = sorted({x.device.index for x in tensors if x.is_cuda})
    with torch.random.fork_rng(devices):
        yield args, kwargs


_FAMILIES = ("tk.ops.", "tk.functional.", "tk.flex.")


def functions() -> list[str]:
    """The names of tk's functions that compute, of those in a loaded pack."""
    import tk

    return [name for name in dir(tk) if getattr(getattr(tk, name), "__module__", "").startswith(_FAMILIES)]


def _wrapper(op: str) -> Callable[..., Any]:
    import tk

    if not isinstance(op, str):
        raise _no_name("explain", op)
    own = functions()
    if op in own:
        return getattr(tk, op)
    from tk.generated import register  # it takes longer to import than the rest of tk

    if register.find(op) is None:
        names = tuple(dict.fromkeys((*own, *register.names())))
        hint = did_you_mean(op, names, 0.5) or f"there are {', '.join(names)}"
        raise ValueError(f"tk has no op {op!r}, and no loaded pack has (tk.load_pack, TK_PACK_PATH); {hint}")
    return register.wrapper(op)


def _no_name(function: str, op: Any) -> TypeError:
    name = getattr(op, "__name__", "mm")
    return TypeError(f"tk.{function}: op must be the name of a function of tk or of an op, such as {name!r}, is {op!r}")


def _why(choice: capi.Choice) -> str:
    return f"{choice.kernel_name}/{choice.config_name} of {choice.pack_path} {_REASONS[choice.pinned]}"


def _microseconds(picoseconds: int) -> float | None:
    return None if picoseconds < 0 else picoseconds * 1e-6


def _candidates(described: Described) -> Candidates:
    try:
        rows = capi.candidates(described.problem)
    except errors.Error:  # no pack for this GPU, or no such bucket: the reason says so
        return Candidates()
    return Candidates(sorted(rows, key=lambda r: (not r.fits, r.cost, r.variant)))
