"""How libtk_core chooses, asked from Python by ctypes: the part of ``tk/tk.h`` that tuning, benchmarks and tests need.

``tk._native`` answers the same questions faster, but is built for one Python version; this works with all of them. Only
the argument structs of ``tk.h`` are repeated here.

    problem = product(a, b)                       # torch tensors, or Matrix records that stand for them
    [row.config_name for row in candidates(problem) if row.fits]
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from tk import _library

__all__ = ["Candidate", "Choice", "Matrix", "Problem", "candidates", "choose", "pin", "prepare", "product"]

MAX_DIMS = 8
# torch's ScalarType numbers (tk.h).
DTYPES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}


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
    library.tk_candidates.argtypes = [
        call,
        ctypes.POINTER(_Candidate),
        ctypes.c_uint32,
        ctypes.POINTER(ctypes.c_uint32),
    ]
    library.tk_launch.argtypes = [call, ctypes.c_void_p, ctypes.c_void_p]
    library.tk_pin.argtypes = [call, ctypes.c_int32]
    return library


@dataclass(frozen=True)
class Matrix:
    """A two-dimensional tensor argument; strides in elements. `address` need not exist: without one it counts as well
    aligned, which is enough for everything but a launch."""

    dtype: torch.dtype
    sizes: tuple[int, int]
    strides: tuple[int, int]
    address: int = 256

    @staticmethod
    def of(t: torch.Tensor | Matrix) -> Matrix:
        if isinstance(t, Matrix):
            return t
        return Matrix(t.dtype, (t.shape[0], t.shape[1]), (t.stride(0), t.stride(1)), t.data_ptr())

    def as_output(self) -> Matrix:
        """The stride of a dimension of size 1 says nothing; the ops library gives it the value that suits every test
        (normalized_output of csrc/ops/matrix.cpp), and so must whoever asks the core in its place."""
        (rows, cols), (row_stride, col_stride) = self.sizes, self.strides
        if cols == 1:
            col_stride = 1
        if rows == 1:
            row_stride = _round_up_16(cols) if col_stride == 1 else 1
        return replace(self, strides=(row_stride, col_stride))

    def as_operand(self) -> Matrix:
        """normalized_operand of csrc/ops/matrix.cpp."""
        if self.sizes[1] == 1 and self.strides[0] == 1 and self.sizes[0] != 1:
            return replace(self, strides=(1, _round_up_16(self.sizes[0])))
        return self.as_output()

    def as_bias(self) -> Matrix:
        """normalized_bias of csrc/ops/matrix.cpp."""
        row_stride = 0 if self.sizes[0] == 1 else self.strides[0]
        col_stride = 1 if self.sizes[1] == 1 else self.strides[1]
        return replace(self, strides=(row_stride, col_stride))


def _round_up_16(x: int) -> int:
    return -(-x // 16) * 16


@dataclass(frozen=True)
class Problem:
    """A call of an op of the core, as ``tk_call``. An absent tensor is None. mode: bits of ``tk.config.MODE_BITS``."""

    op: str
    tensors: Sequence[Matrix | None]
    ints: Sequence[int] = ()
    floats: Sequence[float] = ()
    mode: int = 0
    device: int = 0


def product(
    a: torch.Tensor | Matrix,
    b: torch.Tensor | Matrix,
    bias: torch.Tensor | Matrix | None = None,
    out: torch.Tensor | Matrix | None = None,
    *,
    activation: int = 0,
    precision: int = 0,
    alpha: float = 1.0,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
    mode: int = 0,
    device: int = 0,
) -> Problem:
    """The core's op ``mm``: out = activation(alpha · a @ b + beta · bias), a [M, K], b [K, N].

    bias: [M, N] with strides 0 where it repeats. out: row-major unless given. precision: of fp32, 0 ieee, 1 tf32."""
    a, b = Matrix.of(a), Matrix.of(b)
    rows, cols = a.sizes[0], b.sizes[1]
    if out is None:
        out = Matrix(out_dtype or a.dtype, (rows, cols), (cols, 1))
    return Problem(
        "mm",
        (
            a.as_operand(),
            b.as_operand(),
            None if bias is None else Matrix.of(bias).as_bias(),
            Matrix.of(out).as_output(),
        ),
        (activation, precision if a.dtype == torch.float32 else 0),
        (alpha, beta),
        mode,
        device,
    )


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
    return _Tensor(t.address, sizes, strides, DTYPES[t.dtype], 2)


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
    prepared = Prepared(problem)
    count = ctypes.c_uint32()
    _library.check(_core().tk_candidates(prepared.pointer, None, 0, count))
    rows = (_Candidate * count.value)()
    _library.check(_core().tk_candidates(prepared.pointer, rows, count.value, count))
    return [
        Candidate(
            row.variant,
            row.config,
            row.cost,
            row.config_name.decode(),
            row.kernel_name.decode(),
            row.failed_constraint.decode() if row.failed_constraint else None,
        )
        for row in rows
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


def pin(problem: Problem, config: int) -> None:
    """From now on this size of the problem runs `config`; -1 takes the pin away."""
    _library.check(_core().tk_pin(Prepared(problem).pointer, config))


def prepare(problem: Problem, config: int = -1) -> Prepared:
    """For ``launch``; the problem's addresses must be real."""
    return Prepared(problem, config)


def launch(prepared: Prepared, stream: int) -> None:
    """Launches on a CUDA stream; scratch memory comes from the driver's stream-ordered allocator."""
    _library.check(_core().tk_launch(prepared.pointer, stream, None))
