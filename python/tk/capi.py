"""How libtk_core chooses, asked from Python by ctypes: the part of ``tk/tk.h`` that tuning, benchmarks and tests need.

What is in the packs is asked in ``tk._packs``.

    problem = Problem("mm", (a, b, None, out), ints=(0, 0), floats=(1.0, 1.0))      # Matrix records
    [row.config_name for row in candidates(problem) if row.fits]

``tk.heuristics.problem.describe`` makes the Problem of a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from tk import _library
from tk._packs import LaunchInfo, listed

__all__ = ["Candidate", "Choice", "Matrix", "Problem"]
__all__ += ["candidates", "capture_id", "choose", "describe_device", "launch", "launches", "pin", "prepare"]

MAX_DIMS = 8
# torch's ScalarType numbers (tk.h).
DTYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.bool: 11, torch.bfloat16: 15, torch.float8_e5m2: 23, torch.float8_e4m3fn: 24,
}  # fmt: skip


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * MAX_DIMS),
        ("strides", ctypes.c_int64 * MAX_DIMS),
        ("dtype", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        ("op", ctypes.c_uint32),
        ("mode", ctypes.c_uint32),
        ("config", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("n_tensors", ctypes.c_uint32),
        ("n_ints", ctypes.c_uint32),
        ("n_floats", ctypes.c_uint32),
        ("tensors", ctypes.POINTER(_Tensor)),
        ("ints", ctypes.POINTER(ctypes.c_int64)),
        ("floats", ctypes.POINTER(ctypes.c_double)),
    ]


class _Choice(ctypes.Structure):
    _fields_ = [
        ("config", ctypes.c_int32),
        ("variant", ctypes.c_uint32),
        ("cost", ctypes.c_int64),
        ("pinned", ctypes.c_int32),
        ("n_launches", ctypes.c_uint32),
        ("config_name", ctypes.c_char_p),
        ("kernel_name", ctypes.c_char_p),
        ("pack_path", ctypes.c_char_p),
    ]


class _Candidate(ctypes.Structure):
    _fields_ = [
        ("variant", ctypes.c_uint32),
        ("config", ctypes.c_int32),
        ("cost", ctypes.c_int64),
        ("config_name", ctypes.c_char_p),
        ("kernel_name", ctypes.c_char_p),
        ("failed_constraint", ctypes.c_char_p),
    ]


@cache
def _core() -> ctypes.CDLL:
    library = _library.core()
    call = ctypes.POINTER(_Call)
    library.tk_choose.argtypes = [call, ctypes.POINTER(_Choice)]
    library.tk_launch.argtypes = [call, ctypes.c_void_p, ctypes.c_void_p]
    library.tk_pin.argtypes = [call, ctypes.c_int32]
    library.tk_describe_device.argtypes = [ctypes.c_int64] * 4 + [ctypes.POINTER(ctypes.c_int32)]
    return library


@dataclass(frozen=True)
class Matrix:
    """A tensor argument, of a product a matrix; strides in elements. `address` need not exist: without one it counts as
    well aligned, which is enough for everything but a launch."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    address: int = 256


@dataclass(frozen=True)
class Problem:
    """A call of an op of the core, as ``tk_call``. An absent tensor is None. mode: bits of ``tk.config.MODE_BITS``."""

    op: str
    tensors: Sequence[Matrix | None]
    ints: Sequence[int] = ()
    floats: Sequence[float] = ()
    mode: int = 0
    device: int = 0


class Prepared:
    """A ``tk_call`` together with the memory it points to."""

    def __init__(self, problem: Problem, config: int = -1):
        self.tensors = (_Tensor * len(problem.tensors))(*map(_to_core, problem.tensors))
        self.ints = (ctypes.c_int64 * len(problem.ints))(*problem.ints)
        self.floats = (ctypes.c_double * len(problem.floats))(*problem.floats)
        self.call = _Call(
            _core().tk_intern_op(problem.op.encode()),
            problem.mode,
            config,
            problem.device,
            len(self.tensors),
            len(self.ints),
            len(self.floats),
            self.tensors,
            self.ints,
            self.floats,
        )
        self.pointer = ctypes.pointer(self.call)


def _to_core(t: Matrix | None) -> _Tensor:
    if t is None:
        return _Tensor(dtype=-1, ndim=-1)
    sizes, strides = ((ctypes.c_int64 * MAX_DIMS)(*values) for values in (t.sizes, t.strides))
    return _Tensor(t.address, sizes, strides, DTYPES[t.dtype], len(t.sizes))


@dataclass(frozen=True)
class Candidate:
    """A config of the problem's bucket. cost: predicted picoseconds, -1 where it cannot run; failed_constraint: why."""

    variant: int
    config: int
    cost: int
    config_name: str
    kernel_name: str
    failed_constraint: str | None

    @property
    def fits(self) -> bool:
        return self.failed_constraint is None


@dataclass(frozen=True)
class Choice:
    """What would run. pinned: 0 predicted, 1 measured for this size, 2 given by the caller."""

    config: int
    variant: int
    cost: int
    pinned: int
    config_name: str
    kernel_name: str
    pack_path: str


def candidates(problem: Problem) -> list[Candidate]:
    """Every config of the problem's bucket, those that do not fit included. Raises as the op would."""
    return [
        Candidate(
            row.variant,
            row.config,
            row.cost,
            row.config_name.decode(),
            row.kernel_name.decode(),
            row.failed_constraint.decode() if row.failed_constraint else None,
        )
        for row in listed("tk_candidates", _Candidate, Prepared(problem).pointer)
    ]


def choose(problem: Problem, config: int = -1) -> Choice:
    """What a launch of the problem would run. Raises as the op would."""
    found = _Choice()
    _library.check(_core().tk_choose(Prepared(problem, config).pointer, found))
    return Choice(
        found.config,
        found.variant,
        found.cost,
        found.pinned,
        found.config_name.decode(),
        found.kernel_name.decode(),
        found.pack_path.decode(),
    )


def launches(problem: Problem, config: int = -1) -> tuple[str, ...]:
    """The kernels that a launch of the problem runs, in order, as a profiler names them: of the plan's launches those
    that have something to do. Raises as the op would."""
    rows = listed("tk_launches", LaunchInfo, Prepared(problem, config).pointer)
    return tuple(row.entry.decode() for row in rows)


def pin(problem: Problem, config: int) -> None:
    """Lets this size of the problem run `config` from now on; -1 takes the pin away."""
    _library.check(_core().tk_pin(Prepared(problem).pointer, config))


def capture_id(stream: int) -> int:
    """Which capture of a CUDA graph a stream of the current device takes part in: an id that no other capture of this
    process has, 0 for none.

    Args:
        stream: the handle, as ``torch.cuda.Stream.cuda_stream``.
    """
    found = ctypes.c_uint64()
    _library.check(_core().tk_capture_id(ctypes.c_void_p(stream), ctypes.byref(found)))
    return found.value


def describe_device(sm_count: int, arch: int, shared_optin: int, l2_bytes: int) -> int:
    """A device number for choosing, not launching, as on a GPU that this machine may not have.

    Args:
        arch: 90 for 9.0.
        shared_optin: the most shared memory of a block, bytes.

    Raises:
        tk.UnsupportedError: 64 of them were described already.
    """
    device = ctypes.c_int32()
    _library.check(_core().tk_describe_device(sm_count, arch, shared_optin, l2_bytes, device))
    return device.value


def prepare(problem: Problem, config: int = -1) -> Prepared:
    """Prepares a call for ``launch``; the problem's addresses must be real."""
    return Prepared(problem, config)


def launch(prepared: Prepared, stream: int) -> None:
    """Launches on a CUDA stream; scratch memory comes from the driver's stream-ordered allocator."""
    _library.check(_core().tk_launch(prepared.pointer, stream, None))
