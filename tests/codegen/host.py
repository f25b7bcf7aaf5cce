"""What the generic C++ op and the core do on a GPU, on CPU tensors with Triton's interpreter.

A call is made canonical, checked, its outputs are allocated, and *every* variant whose constraints hold is run: each
must give the result.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import math
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.language.extra.cuda import libdevice
from triton.runtime import interpreter

from tk.aot.expr import Problem, TensorValue, as_expr, evaluate_locals
from tk.aot.spec import Config, Const, Float, Int, Launch, Plan, Pointer, Scratch
from tk.codegen import device, radix
from tk.codegen.family import Generated
from tk.codegen.scheduling.settings import Setting
from tk.codegen.tile import LAYOUTS, Layout
from tk.codegen.ways import Graph
from tk.generated.signature import DTYPES as TORCH_DTYPES

sys.path.append(str(Path(__file__).parents[1] / "kernels" / "interpreted"))
import gluon_emulator

H200 = {"sm_count": 132, "arch": 90, "shared_optin": 227 * 1024, "l2_bytes": 60 << 20}
NUMBERS = {torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5,
           torch.float32: 6, torch.float64: 7, torch.bool: 11, torch.bfloat16: 15, torch.float8_e5m2: 23,
           torch.float8_e4m3fn: 24}  # fmt: skip
DTYPES = {number: dtype for dtype, number in NUMBERS.items()}

# --- libdevice, which the interpreter has not ---

_LIBDEVICE = {
    "rint": torch.round, "lgamma": torch.lgamma, "pow": torch.pow, "atan2": torch.atan2, "hypot": torch.hypot,
    "copysign": torch.copysign, "nextafter": torch.nextafter, "fmod": torch.fmod, "j0": torch.special.bessel_j0,
    "j1": torch.special.bessel_j1, "y0": torch.special.bessel_y0, "y1": torch.special.bessel_y1,
    "cyl_bessel_i1": torch.special.i1, "cyl_bessel_i0": torch.special.i0, "normcdfinv": torch.special.ndtri,
    "erfcx": torch.special.erfcx, "signbit": lambda x: torch.signbit(x).to(torch.int32),
}  # fmt: skip


def _extern_elementwise(
    self: Any, lib: str, path: str, symbol: str, args: Sequence[Any], result: Any, pure: bool
) -> Any:
    name = symbol.removeprefix("__nv_")
    arrays = np.broadcast_arrays(*(a.data for a in args))
    if arrays[0].dtype == np.float32:
        name = name.removesuffix("f") if name != "erf" else name
    name = {"signbitd": "signbit"}.get(name, name)
    fn = _LIBDEVICE.get(name) or getattr(torch, name)
    out = fn(*map(_whole_vectors, arrays)).numpy()
    return interpreter.TensorHandle(out[: arrays[0].size].reshape(arrays[0].shape), result.scalar)


def _whole_vectors(x: Any) -> torch.Tensor:
    """The elements one after the other, and ones up to a multiple of 64. Torch's vectors and what it does with the rest
    of an array do not give the same last bits (atan2, pow, sinh); on a GPU all elements are alike."""
    return torch.from_numpy(np.pad(x.reshape(-1), (0, -x.size % 64), constant_values=1))


interpreter.InterpreterBuilder.create_extern_elementwise = _extern_elementwise
for _name, _fn in list(vars(libdevice).items()):
    if inspect.isfunction(_fn) and _fn.__module__ in (libdevice.__name__, "triton.language.core"):
        setattr(libdevice, _name, functools.partial(_fn, _semantic=interpreter.interpreter_semantic))


def _is_true(name: str) -> Any:
    """A comparison's result is a bool. The interpreter calls it what it compared, and a scalar is then made that."""
    theirs = getattr(interpreter.InterpreterBuilder, name)

    def compare(self: Any, a: Any, b: Any) -> Any:
        return interpreter.TensorHandle(np.asarray(theirs(self, a, b).data).astype(np.bool_), tl.int1)

    return compare


for _name in dir(interpreter.InterpreterBuilder):
    if _name.startswith(("create_icmp", "create_fcmp")):
        setattr(interpreter.InterpreterBuilder, _name, _is_true(_name))


def _reduce_by_halves(self: Any, input: Any) -> Any:
    """The interpreter goes element by element, in Python; this puts halves together, as the hardware does."""
    parts, axis = self.unravel(input, self.axis)
    arrays = [np.array(x.handle.data) for x in parts]
    while (n := arrays[0].shape[axis]) > 1:
        halves = [np.split(a, 2, axis) for a in arrays]
        first = [self.to_tensor(h[0], x.dtype) for h, x in zip(halves, parts, strict=True)]
        second = [self.to_tensor(h[1], x.dtype) for h, x in zip(halves, parts, strict=True)]
        assert n % 2 == 0
        found = self.combine_fn.fn(*first, *second)
        found = found if isinstance(found, tuple) else (found,)
        arrays = [np.broadcast_to(f.handle.data, h[0].shape) for f, h in zip(found, halves, strict=True)]
    if not self.keep_dims:
        arrays = [np.squeeze(a, axis) for a in arrays]
    return [self.to_tensor(a, x.dtype) for a, x in zip(arrays, parts, strict=True)]


interpreter.ReduceOps.generic_reduce = _reduce_by_halves


def _sum_by_halves(self: Any, input: Any) -> Any:
    """Likewise: numpy adds the rows of a block up one by one, with a larger error than a GPU's."""
    x = input.handle.data
    for axis in range(x.ndim) if self.axis is None else (self.axis,):
        while x.shape[axis] > 1:
            x = np.add(*np.split(x, 2, axis))
    if not self.keep_dims:
        x = x.reshape(()) if self.axis is None else np.squeeze(x, self.axis)
    return self.to_tensor(x, input.dtype)


interpreter.ReduceOps.sum = _sum_by_halves


def _scan_by_doubling(self: Any, input: Any) -> Any:
    """The same for scans: every element takes in the one 1, 2, 4, … places before it."""
    parts, axis = list(input), self.axis
    n = parts[0].handle.data.shape[axis]
    place = np.arange(n).reshape([n if d == axis else 1 for d in range(parts[0].handle.data.ndim)])
    step = 1
    while step < n:
        before = [self.to_tensor(np.roll(x.handle.data, step, axis), x.dtype) for x in parts]
        found = self.combine_fn.fn(*before, *parts)
        found = found if isinstance(found, tuple) else (found,)
        arrays = [np.where(place < step, x.handle.data, f.handle.data) for x, f in zip(parts, found, strict=True)]
        parts = [self.to_tensor(a, x.dtype) for a, x in zip(arrays, parts, strict=True)]
        step *= 2
    return parts


interpreter.ScanOps.generic_scan = _scan_by_doubling

# --- Inline assembly: what asks for a line to be brought into the L2 cache is noted, a trap is an IndexError ---

FETCHED: list[int] = []  # addresses
TRAPS = [True]  # False: as if each took its time


class _Asked:
    def __init__(self, like: Any):
        self.result = interpreter.TensorHandle(np.zeros(like.data.shape, np.int32), tl.int32)

    def get_result(self, _: int) -> Any:
        return self.result


def _inline_asm(self: Any, asm: str, constraints: str, values: Sequence[Any], *_: Any) -> _Asked:
    if "@p trap;" in asm:
        if TRAPS[0] and values[0].data.any():
            raise IndexError("index out of bounds: a trap")
        return _Asked(values[0])
    if "red.relaxed.gpu.global.add.noftz" in asm:
        _add_pairs(asm, *np.broadcast_arrays(*(v.data for v in values)))
        return _Asked(values[0])
    if "prefetch.global.L2" not in asm:
        raise NotImplementedError(asm)
    addresses, wanted = np.broadcast_arrays(*(v.data for v in values))
    FETCHED.extend(addresses[wanted != 0].tolist())
    return _Asked(values[0])


def _add_pairs(asm: str, addresses: Any, pairs: Any, wanted: Any) -> None:
    """Two elements of 16 bits, of which -0.0 changes nothing."""
    dtype = torch.bfloat16 if "bf16x2" in asm else torch.float16
    for address, pair, on in zip(addresses.ravel(), pairs.ravel(), wanted.ravel(), strict=True):
        assert address % 4 == 0
        for half in (0, 1) if on else ():
            bits = int(pair) >> 16 * half & 0xFFFF
            if bits != 0x8000:
                at = interpreter.TensorHandle(
                    np.array([int(address) + 2 * half], np.uint64), tl.pointer_type(tl.uint16)
                )
                if MEMORY[0] is not None:
                    MEMORY[0].check(at, None, False)
                place = np.ctypeslib.as_array((ctypes.c_uint16 * 1).from_address(int(at.data[0])))
                both = [torch.from_numpy(x.view(np.int16)).view(dtype) for x in (place, np.array([bits], np.uint16))]
                place[:] = (both[0] + both[1]).view(torch.int16).numpy().view(np.uint16)


interpreter.InterpreterBuilder.create_inline_asm = _inline_asm

# --- Memory: what a launch touches outside of its arguments is an IndexError; on a GPU it may be an illegal access ---

VECTOR = 16  # bytes, of which all may be read where some are an argument's


@dataclass
class Memory:
    """The storages that a launch was given, in order of their addresses."""

    starts: np.ndarray[Any, Any]
    ends: np.ndarray[Any, Any]

    def check(self, pointers: Any, mask: Any, is_read: bool) -> None:
        addresses = pointers.data if mask is None else pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        if not addresses.size:
            return
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        least, most = addresses.min(), addresses.max()
        if self._holds(least, size, is_read) == self._holds(most, size, is_read) >= 0:
            return
        outside = sum(self._holds(a, size, is_read) < 0 for a in addresses.ravel())
        if outside:
            what = "read" if is_read else "written"
            raise IndexError(f"{outside} of {addresses.size} addresses that are {what} belong to no argument")

    def _holds(self, address: Any, size: int, is_read: bool) -> int:
        """The number of the storage that has these bytes, or -1."""
        at = int(np.searchsorted(self.starts, address, "right")) - 1
        if at < 0 or self.starts[at] == self.ends[at]:
            return -1
        end = -(-int(self.ends[at]) // VECTOR) * VECTOR if is_read else int(self.ends[at])
        return at if int(address) + size <= end else -1


MEMORY: list[Memory | None] = [None]  # None: unknown, so nothing is checked


def _memory_of(tensors: Sequence[torch.Tensor]) -> Memory:
    found = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    starts = sorted(start for start, size in found.items() if size)
    return Memory(np.array(starts, np.uint64), np.array([s + found[s] for s in starts], np.uint64))


def _checked(name: str, mask_at: int | None) -> Any:
    """An access of the interpreter's; its arguments are the pointers first, and the mask at a place."""
    theirs = getattr(interpreter.InterpreterBuilder, name)

    def access(self: Any, *args: Any, **kwargs: Any) -> Any:
        if MEMORY[0] is not None:
            pointers = args[1] if name == "create_atomic_rmw" else args[0]
            MEMORY[0].check(pointers, None if mask_at is None else args[mask_at], name == "create_masked_load")
        return theirs(self, *args, **kwargs)

    return access


for _name, _mask_at in (("create_masked_load", 1), ("create_masked_store", 2), ("create_atomic_cas", None),
                        ("create_atomic_rmw", 3)):  # fmt: skip
    setattr(interpreter.InterpreterBuilder, _name, _checked(_name, _mask_at))

# --- Canonical problems ---


def _merged(tensors: list[torch.Tensor], count: int, in_order: bool) -> list[torch.Tensor]:
    """The first `count` dimensions of all, ordered unless the op counts them, merged, and made three."""
    first = next((t for t in tensors if 0 not in t.stride()[:count]), tensors[0])
    order = list(range(count)) if in_order else sorted(range(count), key=lambda d: -first.stride(d))
    tensors = [t.permute([*order, *range(count, t.dim())]) for t in tensors]
    dims = [d for d in range(count) if tensors[0].size(d) != 1]
    groups: list[list[int]] = []
    for d in dims:
        joins = bool(groups) and all(t.stride(groups[-1][-1]) == t.stride(d) * t.size(d) for t in tensors)
        groups[-1].append(d) if joins else groups.append([d])
    assert len(groups) <= 3, "more than three leading dimensions are left: the host copies them first"
    found = []
    for t in tensors:
        sizes = [math.prod(t.size(d) for d in g) for g in groups]
        strides = [t.stride(g[-1]) for g in groups]
        pad = 3 - len(groups)
        shape = [1] * pad + sizes + list(t.shape[count:])
        stride = [0] * pad + strides + list(t.stride()[count:])
        stride = [0 if size == 1 else s for s, size in zip(stride, shape, strict=True)]
        found.append(t.as_strided(shape, stride))
    return found


def _in_order(op: Generated) -> bool:
    return any(p.in_order for p in op.op.params)


def sort_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call: sorting networks take half a second a row in the interpreter, and have tests of their own."""

    def like(x: Any, data: Any) -> Any:
        return tl.tensor(interpreter.TensorHandle(np.ascontiguousarray(data), x.handle.dtype), x.type)

    def sort(x: Any, descending: bool = False) -> Any:
        data = np.sort(x.handle.data, -1)
        return like(x, data[..., ::-1] if descending else data)

    def sort_pairs(a: Any, b: Any) -> tuple[Any, Any]:
        order = np.lexsort((b.handle.data, a.handle.data), -1)
        return tuple(like(x, np.take_along_axis(x.handle.data, order, -1)) for x in (a, b))

    monkeypatch.setattr(tl, "sort", sort)
    monkeypatch.setattr(device, "sort_pairs", sort_pairs)


def canonical(op: Generated, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], Problem, int, list[int]]:
    """(tensors as the core sees them, the problem, how many leading dimensions, which tensors have them).

    Raises ValueError with the message of the first check that fails."""
    params = [p for p in op.op.params if p.kind == "tensor"]
    leading = [t.dim() - p.rank for t, p in zip(inputs, params, strict=True) if p.leading]
    count = leading[0] if leading else 0
    plain = [_as_is(t) for t in inputs]
    with_leading = [i for i, p in enumerate(params) if p.leading]
    seen = list(plain)
    if with_leading:
        for i, t in zip(with_leading, _merged([inputs[i] for i in with_leading], count, _in_order(op)), strict=True):
            seen[i] = t
    problem = describe(op, seen, [])
    for check in op.op.checks:
        if not check.holds.evaluate(problem):
            raise ValueError(f"tk.{op.name}: {check.message}")
    return seen, problem, count, with_leading


def _as_is(t: torch.Tensor) -> torch.Tensor:
    return t.as_strided(t.shape, [0 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)])


def describe(op: Generated, tensors: Sequence[torch.Tensor], ints: Sequence[int]) -> Problem:
    values = [TensorValue(t.shape, t.stride(), NUMBERS[t.dtype], math.gcd(t.data_ptr(), 256) or 256) for t in tensors]
    values += [None] * (len(op.op.tensors) - len(values))  # type: ignore[list-item]
    ints = tuple(ints) + (0,) * (len(op.op.ints) - len(ints))
    problem = Problem(values, ints, 0, H200)
    return replace(problem, locals=evaluate_locals(op.op.locals.values(), problem))


def _allocate(op: Generated, inputs: list[torch.Tensor], problem: Problem, count: int) -> list[torch.Tensor]:
    """Dense, and in memory ordered as the leading dimensions of the tensor that they follow."""
    found = []
    for output in op.op.outputs:
        sizes = [as_expr(s).evaluate(problem) for s in output.sizes]
        strides = [as_expr(s).evaluate(problem) for s in output.strides]
        dtype = DTYPES[as_expr(output.dtype).evaluate(problem)]
        inner = torch.empty_strided(sizes, strides, dtype=dtype)
        if output.leading is None:
            found.append(inner)
            continue
        like = inputs[output.leading]
        order = sorted(range(count), key=lambda d: -like.stride(d))
        dense = torch.empty([like.size(d) for d in order] + sizes, dtype=dtype)
        back = [order.index(d) for d in range(count)] + list(range(count, dense.dim()))
        found.append(dense.permute(back))
    return found


def run_all(op: Generated, *args: Any, only: str | None = None) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """(name, results) of every variant that may run; without `only` of those that a run needs (Enough). Tensors changed
    in place are changed anew in copies; their new contents come after the results."""
    call = Call.of(op, args)
    enough = Enough(os.environ.get("TK_DRAWN", "all"))
    for layout, (config, setting, way) in product(LAYOUTS, op.ways() if only else enough.in_order(op)):
        name = f"{layout.name} {config.name}"
        if only in name if only else enough.lacks(layout, setting, way):
            found = call.run((layout, setting, way))
            if found is not None:
                enough.ran(layout, setting, way)
                yield name, found


def variants(op: Generated, *args: Any) -> list[str]:
    """The names of all that may run."""
    call = Call.of(op, args)
    every = product(LAYOUTS, op.ways())
    return [f"{layout.name} {c.name}" for layout, (c, *which) in every if call.prepared((layout, *which)) is not None]


@dataclass
class Enough:
    """Which variants of a call a run needs. Where rows run together each layout that is for others has one: calls that
    need that layout run more. Of settings that differ in their blocks' shape alone one is drawn (TK_DRAWN), and all run
    where it is "all"."""

    drawn: str
    seen: set[tuple[object, ...]] = field(default_factory=set)

    def in_order(self, op: Generated) -> list[tuple[Config, Setting, str]]:
        ways = op.ways()
        if self.drawn != "all":
            random.Random(f"{self.drawn} {op.name}").shuffle(ways)
        return ways

    def lacks(self, layout: Layout, setting: Setting, way: str) -> bool:
        if layout.pitched and {("rows", way), (layout.name, way)} <= self.seen:
            return False
        return self.drawn == "all" or (layout.name, way, _form(setting)) not in self.seen

    def ran(self, layout: Layout, setting: Setting, way: str) -> None:
        self.seen |= {(layout.name, way), (layout.name, way, _form(setting))}


def _form(setting: Setting) -> Setting:
    return replace(setting, p=1, q=1, warps=1, segments=min(setting.segments, 2), registers=0)


@dataclass(frozen=True)
class Call:
    """An op and what it is called with."""

    op: Generated
    given: dict[str, Any]

    @classmethod
    def of(cls, op: Generated, args: Sequence[Any]) -> Call:
        return cls(op, dict(zip(op.signature.params, args, strict=True)))

    def run(self, variant: tuple[Layout, Setting, str]) -> list[torch.Tensor] | None:
        """The results, None where the variant may not run."""
        prepared = self.prepared(variant)
        if prepared is None:
            return None
        plan, problem, tensors, results = prepared
        launch(plan, problem, tensors, [float(self.given[n]) for n in self.op.op.floats])
        return results

    def prepared(
        self, variant: tuple[Layout, Setting, str]
    ) -> tuple[Plan, Problem, list[torch.Tensor], list[torch.Tensor]] | None:
        """(plan, problem, tensors as the core sees them, results), None where the variant may not run."""
        graph, seen = self.seen
        plan = self.op.plan(graph, *variant)
        # Tensors are made for what runs. Whether it may is asked of them again: where they begin differs.
        if plan is None or not _holds(plan, seen):
            return None
        problem, tensors, results = self.placed()
        return (plan, problem, tensors, results) if _holds(plan, problem) else None

    @functools.cached_property
    def seen(self) -> tuple[Graph, Problem]:
        """The graph of these dtypes and the problem, which are the same for all variants."""
        problem, _, _ = self.placed()
        assert problem.locals[0] >= 0, "no graph has these dtypes"
        return self.op.graphs[problem.locals[0]], problem

    def placed(self) -> tuple[Problem, list[torch.Tensor], list[torch.Tensor]]:
        """(problem, tensors as the core sees them, results) in new memory but for what is only read."""
        op = self.op
        ints = [int(self.given[n]) for n in op.op.ints]
        changed = [n for n in op.signature.tensors if n in op.first.mutated]
        inputs = [_copy(self.given[n]) if n in changed else self.given[n] for n in op.signature.tensors]
        seen, problem, count, with_leading = canonical(op, inputs)
        if ints:
            problem = describe(op, seen, ints)
        outputs = _allocate(op, inputs, problem, count)
        for t in outputs:
            t.copy_(torch.full_like(t, 77))
        everything = list(seen) + [_as_is(t) for t in outputs]
        follow = [len(seen) + i for i, o in enumerate(op.op.outputs) if o.leading is not None]
        joint = [*with_leading, *follow]
        if joint:
            raw = [*inputs, *outputs]
            for i, t in zip(joint, _merged([raw[i] for i in joint], count, _in_order(op)), strict=True):
                everything[i] = t
        results = [*outputs, *(t for n, t in zip(op.signature.tensors, inputs, strict=True) if n in changed)]
        return describe(op, everything, ints), everything, results


def _holds(plan: Plan, problem: Problem) -> bool:
    return all(c.holds.evaluate(problem) for c in plan.constraints)


def _copy(t: torch.Tensor) -> torch.Tensor:
    """With the same strides."""
    if 0 in t.stride():
        return t.clone()
    out = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    return out.copy_(t)


def launch(plan: Plan, problem: Problem, tensors: Sequence[torch.Tensor], floats: Sequence[float],
           in_tables: Sequence[torch.Tensor] = ()) -> None:  # fmt: skip
    """in_tables: tensors whose addresses others hold."""

    def number(x: object) -> int:
        return as_expr(x).evaluate(problem)  # type: ignore[arg-type]

    buffers = [torch.full((number(b.bytes),), 255, dtype=torch.uint8) for b in plan.buffers]  # NaN, to be seen
    memory = _memory_of([*tensors, *buffers, *in_tables])

    def value(arg: Any) -> Any:
        match arg:
            case Const():
                return arg.value
            case Int():
                found = number(arg.value)
                assert arg.dtype == "i64" or -(2**31) <= found < 2**31
                return found
            case Float():
                return _float(floats[arg.index], arg.dtype)
            case Pointer():
                t = tensors[arg.tensor.index]
                assert not arg.aligned or t.data_ptr() % 16 == 0
                return t
            case Scratch():
                return buffers[arg.buffer][number(arg.offset) :].view(_torch_dtype(arg.dtype))
        raise NotImplementedError(arg)

    for one in plan.launches:
        if number(one.when):
            grid = tuple(number(g) for g in one.grid)
            if one.fn in (radix.sort_rows, radix.scatter_digits):
                _emulate(one, {name: value(arg) for name, arg in one.args.items()}, grid[0])
                continue
            options = {name: x for name, x in one.options.items() if name != "enable_fp_fusion"}  # numpy has none
            interpreter.interpreter_builder.options = interpreter.InterpreterOptions(**options)
            args = {name: value(arg) for name, arg in one.args.items()}
            MEMORY[0] = memory
            try:
                one.fn[grid](**args)
            finally:
                MEMORY[0] = None


def _emulate(one: Launch, args: dict[str, Any], programs: int) -> None:
    """A Gluon kernel, which the interpreter does not take."""

    def given(name: str) -> Any:
        x, arg = args[name], one.args[name]
        if isinstance(arg, Const):
            return x
        return gluon_emulator.Pointer(x.numpy()) if isinstance(arg, Scratch) else gluon_emulator.T(x)

    gluon_emulator.GRID.warps = one.num_warps
    gluon_emulator.run(one.fn, {name: given(name) for name in args}, programs)


def _float(x: float, dtype: str) -> Any:
    """The interpreter leaves Python's floats as they are, which cannot be converted."""
    kinds = {"fp32": (np.float32, tl.float32), "fp64": (np.float64, tl.float64)}
    of_numpy, of_triton = kinds[dtype]
    return tl.tensor(interpreter.TensorHandle(np.array([x], of_numpy), of_triton), of_triton)


def _torch_dtype(name: str) -> torch.dtype:
    spelled = {"fp8e4nv": "fp8e4m3fn", "fp8e5": "fp8e5m2", "i1": "bool"}.get(name, name)
    return TORCH_DTYPES[spelled]
