"""The loop-level IR: what one launch computes, element by element, in single assignment.

A :class:`Kernel` runs over *axes*. Kept axes are spread over the grid, reduced ones are run through by each program. A
:class:`Value` is a scalar at every point of the axes that it varies over. Buffers are read and written at one index per
dimension — sympy expressions of axes (``a0``, ``r0``), sizes (letters) and other values (``v7``) — so that strides,
tiles and masks stay the schedule's.

Values are made by a :class:`Builder`, which gives equal ones the same number: common subexpressions never exist twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sympy
import torch

from tk.aot.spec import REDUCED_FLOATS
from tk.codegen.errors import IRError

FLOATS = ("fp8e4nv", "fp8e5", "fp16", "bf16", "fp32", "fp64")
INTS = ("u8", "i8", "i16", "i32", "i64")
DTYPES = (*FLOATS, *INTS, "i1")
NARROW = ("fp8e4nv", "fp8e5", "fp16", "bf16")  # computed in fp32
IR_DTYPES: Mapping[torch.dtype, str] = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5", torch.int8: "i8", torch.int16: "i16",
    torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip

# Scalar operations. All operands have the dtype of the result, but for COMPARE and TEST.
UNARY = (
    "neg", "abs", "sign", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan",
    "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "lgamma",
    "floor", "ceil", "trunc", "round", "not", "bitwise_not", "sigmoid", "reciprocal",
    "i0", "i1", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "ndtri", "erfcx",
)  # fmt: skip
BINARY = (
    "add", "sub", "mul", "div", "trunc_div", "floor_div", "fmod", "remainder", "pow", "atan2", "hypot", "copysign",
    "nextafter", "maximum", "minimum", "and", "or", "xor", "shl", "shr",
)  # fmt: skip
COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")  # result i1
TEST = ("isnan", "isinf", "signbit")  # one operand, result i1
SCAN: Mapping[str, int] = {"sum": 1, "prod": 1, "logaddexp": 1, "max": 2, "min": 2}  # kind -> results
ACCESSES = ("load", "store", "search")
# A store at indices that are themselves values: "same" where all elements for one place are equal, so that their order
# is no matter. The last three are atomic.
PUT = ("set", "same", "add", "max", "min")
ROUNDED_SUMS = REDUCED_FLOATS  # what every addition rounds
ATOMIC = {"add": (*ROUNDED_SUMS, "fp32", "fp64", "i32", "i64"), "max": ("i32", "i64"), "min": ("i32", "i64")}
# How many elements "..." has, and the three dimensions that it is at run time.
LEADING = sympy.Symbol("leading", integer=True, positive=True)
LEADING_SIZES = tuple(sympy.Symbol(f"leading_{d}", integer=True, positive=True) for d in range(3))
PLACES = ("argmax", "argmin")
REDUCE = ("sum", "prod", "max", "min", "any", "all", "xor", *PLACES, "mean", "m2")
ARITY: Mapping[str, int] = {
    **dict.fromkeys(UNARY, 1), **dict.fromkeys(BINARY, 2), **dict.fromkeys(COMPARE, 2), **dict.fromkeys(TEST, 1),
    "random": 2, "where": 3, "cast": 1, "bitcast": 1, "reduce": 1, "fold": 1, "constant": 0, "number": 0, "index": 0,
    "store": 1,
}  # fmt: skip


_TORCH_DTYPES = {name: dtype for dtype, name in IR_DTYPES.items()}


def rounded(number: float, dtype: str) -> float:
    """The number as a tensor of the dtype holds it."""
    return float(torch.tensor(number, dtype=torch.float64).to(_TORCH_DTYPES[dtype]))


@dataclass(frozen=True)
class Axis:
    """One loop. symbol: what index expressions call it. walk: it numbers the programs, each of which runs through many
    points of the kept axes."""

    name: str
    size: sympy.Expr
    reduced: bool = False
    walk: bool = False

    @property
    def symbol(self) -> sympy.Symbol:
        return axis_symbol(self.name)


def axis_symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, nonnegative=True)


def value_symbol(number: int) -> sympy.Symbol:
    """A value inside an index expression: an indirect read."""
    return sympy.Symbol(f"v{number}", integer=True)


def values_in(expr: sympy.Expr) -> list[int]:
    return sorted(int(s.name[1:]) for s in expr.free_symbols if re.fullmatch(r"v\d+", s.name))


@dataclass(frozen=True)
class Buffer:
    """Memory. kind: "input", "output", "mutated" or "scratch". sizes: of the dimensions as traced; leading: the first
    stands for "...", which at run time is three. merged: it is left with sorted runs along the last dimension, and they
    are merged before it is read."""

    name: str
    kind: str
    dtype: str
    sizes: tuple[sympy.Expr, ...]
    leading: bool = False
    merged: bool = False


@dataclass(frozen=True)
class Scanned:
    """One result of a scan along the one reduced axis, in its order. kind: a name of SCAN, or "combine": then `combine`
    is the kernel that puts what the rows before have come to (its buffers a0, a1, …) and a row (b0, b1, …) together.
    Of "max" and "min" the second result is the row of the first. backwards: from the last row to the first."""

    kind: str
    part: int = 0
    combine: Kernel | None = None
    backwards: bool = False

    def __str__(self) -> str:
        name = (self.combine.name if self.combine else self.kind) + ("_backwards" if self.backwards else "")
        return name if SCAN.get(self.kind) == 1 else f"{name}.{self.part}"


@dataclass(frozen=True)
class Sorted:
    """One of the operands of a sort along the one reduced axis: integers, in the order of the first and where that is
    equal of the second. runs: each block of the axis by itself, to be merged. digits: not at all, a launch of its own
    sorts whole rows by digits. radix: the bits of the key of what programs share rows of: not at all either, launches
    of their own sort it, digit by digit. narrow: numbers of 32 bits of a row that may be too long for them, but for a
    constraint."""

    part: int = 0
    runs: bool = False
    digits: bool = False
    radix: int = 0
    narrow: bool = False

    def __str__(self) -> str:
        how = "digits" if self.digits else "radix" if self.radix else "runs" if self.runs else "sorted"
        return f"{how}.{self.part}"


@dataclass(frozen=True)
class Value:
    """op: a name of ARITY, or "load", "scan" or "sort". args: numbers of values; of a load at most one, the mask
    outside of which nothing is read and the value is 0; of a store perhaps a second one, the mask. data: the constant,
    the number's name, the index expression, the reduction's kind, what is Scanned or Sorted.

    search: how many elements of the row of a buffer at index, whose last entry is 0, come before the operand; data:
    equal ones too.

    put: a store with data, one of PUT, of every element of the kernel's axes; its second operand, if any, is a mask.

    random: 32 bits by (seed, offset, the element's linear index) and data, the number of the call in its function.

    fast: the result is rounded to 16 bits anyway, so an approximation in fp32 does."""

    number: int
    op: str
    dtype: str
    args: tuple[int, ...] = ()
    buffer: str = ""
    index: tuple[sympy.Expr, ...] = ()
    data: Any = None
    axes: frozenset[str] = frozenset()
    fast: bool = False

    def __str__(self) -> str:
        inside = [f"v{a}" for a in self.args]
        if self.buffer:
            inside = [f"{self.buffer}[{', '.join(map(str, self.index))}]", *inside]
        if self.data is not None:
            inside.append(str(self.data))
        over = f"  over {', '.join(sorted(self.axes))}" if self.axes else ""
        return f"v{self.number}: {self.dtype} = {self.op}({', '.join(inside)}){over}"


@dataclass(frozen=True)
class Kernel:
    """One launch."""

    name: str
    axes: tuple[Axis, ...]
    buffers: tuple[Buffer, ...]
    values: tuple[Value, ...]

    @property
    def kept(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if not a.reduced and not a.walk)

    @property
    def walk(self) -> Axis | None:
        return next((a for a in self.axes if a.walk), None)

    @property
    def reduced(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a.reduced)

    def buffer(self, name: str) -> Buffer:
        return next(b for b in self.buffers if b.name == name)

    def value(self, number: int) -> Value:
        return self.values[number]

    @property
    def accesses(self) -> Iterator[Value]:
        return (v for v in self.values if v.op in ACCESSES)

    @property
    def is_of_scratch(self) -> bool:
        """Whether all that it reads is what other launches have left."""
        return all(self.buffer(v.buffer).kind == "scratch" for v in self.accesses if v.op == "load")

    @cached_property
    def opened(self) -> Kernel:
        """The same with an axis for each of the three dimensions of "...", which then need not run together. The kernel
        itself where it has no such axis, or reads "..." in another order than along it."""
        return _opened(self)

    def __str__(self) -> str:
        axes = ", ".join(
            f"{a.name} < {a.size}{' reduced' if a.reduced else ' walk' if a.walk else ''}" for a in self.axes
        )
        lines = [f"kernel {self.name}({axes})"]
        for b in self.buffers:
            sizes = ["..."] * b.leading + [str(s) for s in b.sizes[b.leading :]]
            lines.append(f"    {b.kind} {b.name}: {b.dtype}[{', '.join(sizes)}]")
        return "\n".join([*lines, *(f"  {v}" for v in self.values)]) + "\n"


@dataclass
class Builder:
    """Makes the values of a kernel. Each equal value exists once."""

    axes: Mapping[str, Axis]
    buffers: dict[str, Buffer] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    known: dict[Any, int] = field(default_factory=dict)

    def add(self, op: str, dtype: str, *args: int, buffer: str = "", index: tuple[sympy.Expr, ...] = (),
            data: Any = None, fast: bool = False) -> int:  # fmt: skip
        # 0.0 and -0.0 are equal to Python, and so are 1, 1.0 and True.
        key = (op, dtype, args, buffer, index, type(data), repr(data), fast)
        if op != "store" and key in self.known:
            return self.known[key]
        number = len(self.values)
        axes = self._axes(op, args, index, data)
        self.values.append(Value(number, op, dtype, tuple(args), buffer, index, data, axes, fast))
        self.known[key] = number
        return number

    def _axes(self, op: str, args: tuple[int, ...], index: tuple[sympy.Expr, ...], data: Any) -> frozenset[str]:
        axes: set[str] = set()
        for a in args:
            axes |= self.values[a].axes
        for expr in (*index, *([data] if op == "index" else [])):
            axes |= {s.name for s in expr.free_symbols if s.name in self.axes}
            for n in values_in(expr):
                axes |= self.values[n].axes
        reduced = {name for name, axis in self.axes.items() if axis.reduced}
        if op == "reduce":
            axes -= reduced
        if op in ("scan", "sort"):
            axes |= reduced
        if op == "fold":
            axes = axes & reduced | {name for name, axis in self.axes.items() if axis.walk}
        return frozenset(axes)

    def finish(self, name: str) -> Kernel:
        return Kernel(name, tuple(self.axes.values()), tuple(self.buffers.values()), tuple(self.values))


def rebuild(kernel: Kernel, rule: Callable[[Builder, Value, tuple[int, ...]], int | None]) -> Kernel:
    """The kernel with every value made anew by `rule(builder, value, args)`; None leaves a value as it is, with its
    operands replaced."""
    builder = Builder({a.name: a for a in kernel.axes}, {b.name: b for b in kernel.buffers})
    new: dict[int, int] = {}
    for v in kernel.values:
        args = tuple(new[a] for a in v.args)
        replaced = {value_symbol(n): value_symbol(new[n]) for e in v.index for n in values_in(e)}
        moved = replace(v, index=tuple(e.xreplace(replaced) for e in v.index))
        made = rule(builder, moved, args)
        if made is None:
            made = builder.add(v.op, v.dtype, *args, buffer=v.buffer, index=moved.index, data=v.data, fast=v.fast)
        new[v.number] = made
    return builder.finish(kernel.name)


def _opened(kernel: Kernel) -> Kernel:
    leading = [a for a in kernel.axes if a.size == LEADING]
    symbols = {a.symbol for a in leading}
    is_along = all(v.index[0] in symbols for v in kernel.accesses if kernel.buffer(v.buffer).leading)
    has_order = any(v.op in ("scan", "sort") for v in kernel.values) and any(a.reduced for a in leading)
    if not leading or not is_along or has_order:
        return kernel
    parts = {a.symbol: [replace(a, name=f"{a.name}_{d}", size=n) for d, n in enumerate(LEADING_SIZES)] for a in leading}
    replaced: dict[sympy.Expr, sympy.Expr] = {LEADING: sympy.Mul(*LEADING_SIZES)}
    for symbol, axes in parts.items():
        replaced[symbol] = sympy.Integer(0)
        for a in axes:
            replaced[symbol] = replaced[symbol] * a.size + a.symbol

    def moved(expr: sympy.Expr) -> sympy.Expr:
        return sympy.expand(expr.xreplace(replaced)) if expr.free_symbols & replaced.keys() else expr

    axes = [one for a in kernel.axes for one in parts.get(a.symbol, [replace(a, size=moved(a.size))])]
    builder = Builder({a.name: a for a in axes})
    for b in kernel.buffers:
        sizes = tuple(map(moved, b.sizes[b.leading :]))
        builder.buffers[b.name] = replace(b, sizes=(*LEADING_SIZES, *sizes) if b.leading else sizes, leading=False)
    for v in kernel.values:
        index = tuple(map(moved, v.index))
        if v.buffer and kernel.buffer(v.buffer).leading:
            index = (*(a.symbol for a in parts[v.index[0]]), *index[1:])
        data = moved(v.data) if isinstance(v.data, sympy.Expr) else v.data
        number = builder.add(v.op, v.dtype, *v.args, buffer=v.buffer, index=index, data=data, fast=v.fast)
        assert number == v.number, "values that differed have become equal"
    return builder.finish(kernel.name)


# --- The verifier ---


def verify(kernel: Kernel) -> Kernel:
    """The kernel itself. Raises IRError for anything malformed, with the value."""
    axes = {a.name: a for a in kernel.axes}
    buffers = {b.name: b for b in kernel.buffers}
    if len(axes) != len(kernel.axes) or len(buffers) != len(kernel.buffers):
        raise IRError(f"kernel {kernel.name}: two axes or two buffers have one name")
    for position, v in enumerate(kernel.values):
        problem = _problem(kernel, position, v, axes, buffers)
        if problem:
            raise IRError(f"kernel {kernel.name}: {v}: {problem}\n{kernel}")
    if not any(v.op == "store" for v in kernel.values):
        raise IRError(f"kernel {kernel.name} stores nothing")
    return kernel


def _problem(kernel: Kernel, position: int, v: Value, axes: Mapping[str, Axis], buffers: Mapping[str, Buffer]) -> str:
    if v.number != position:
        return f"is at place {position}"
    if v.dtype not in DTYPES:
        return "no such dtype"
    used = [*v.args, *(n for e in v.index for n in values_in(e))]
    if any(not 0 <= n < position for n in used):
        return "uses a value that does not come before it"
    args = [kernel.values[n] for n in v.args]
    if any(a.op == "store" for a in args):
        return "uses a store"
    if v.op in ACCESSES:
        return _access_problem(v, args, axes, buffers)
    if v.op == "asm":
        return _asm_problem(v, args)
    if v.op in ("scan", "sort"):
        return _along_problem(v, [a.dtype for a in args]) or _axes_problem(v, args, axes)
    if v.op not in ARITY:
        return "no such op"
    if len(args) != ARITY[v.op]:
        return f"takes {ARITY[v.op]} operands"
    return _dtype_problem(v, [a.dtype for a in args]) or _axes_problem(v, args, axes)


def _access_problem(v: Value, args: list[Value], axes: Mapping[str, Axis], buffers: Mapping[str, Buffer]) -> str:
    buffer = buffers.get(v.buffer)
    if buffer is None:
        return "no such buffer"
    if len(v.index) != len(buffer.sizes):
        return f"the buffer has {len(buffer.sizes)} dimensions"
    if v.op == "load":
        if len(args) > 1 or (args and args[0].dtype != "i1"):
            return "a load takes at most a mask"
        return "" if v.dtype == buffer.dtype else f"the buffer is {buffer.dtype}"
    if v.op == "search":
        is_right = len(args) == 1 and v.dtype == "i64" and isinstance(v.data, bool) and v.index and v.index[-1] == 0
        return "" if is_right else "no search for one value in a row"
    if buffer.kind == "input":
        return "stores into an input"
    if [a.dtype for a in args[1:]] not in ([], ["i1"]):
        return "a store takes at most a mask"
    if not args or args[0].dtype != buffer.dtype or v.dtype != buffer.dtype:
        return f"stores something else than {buffer.dtype}"
    if v.data is not None:
        return _put_problem(v, axes)
    touched = {s.name for e in v.index for s in e.free_symbols if s.name in axes}
    return "varies over an axis that its index does not name" if args[0].axes - touched else ""


def _asm_problem(v: Value, args: list[Value]) -> str:
    """data: (assembly, constraints, pack, dtypes of the operands)."""
    over = frozenset().union(*(a.axes for a in args))
    return "" if len(v.data[3]) == len(args) and v.axes == over else "assembly of other operands"


def _put_problem(v: Value, axes: Mapping[str, Axis]) -> str:
    if v.data not in PUT or v.dtype not in ATOMIC.get(v.data, (v.dtype,)):
        return f"puts {v.dtype} by {v.data}"
    return "a put in a kernel that reduces" if any(a.reduced for a in axes.values()) else ""


def _along_problem(v: Value, dtypes: list[str]) -> str:
    if v.op == "sort":
        fits = isinstance(v.data, Sorted) and len(dtypes) in (1, 2) and v.data.part < len(dtypes)
        return "" if fits and set(dtypes) <= {"i32", "i64"} and v.dtype == dtypes[v.data.part] else f"sorts {dtypes}"
    if not isinstance(v.data, Scanned):
        return "no scan"
    if v.data.kind == "combine":
        fits = v.data.combine is not None and v.data.part < len(dtypes)
        return "" if fits and v.dtype == dtypes[v.data.part] else f"scans {dtypes} as {v.dtype}"
    if v.data.part >= SCAN.get(v.data.kind, 0) or len(dtypes) != 1:
        return "no such scan"
    return "" if v.dtype == ("i64" if v.data.part else dtypes[0]) else f"scans {dtypes[0]} as {v.dtype}"


def _dtype_problem(v: Value, dtypes: list[str]) -> str:
    if v.op == "where":
        return "" if dtypes == ["i1", v.dtype, v.dtype] else f"where of {dtypes}"
    if v.op in COMPARE or v.op in TEST:
        return "" if v.dtype == "i1" and len(set(dtypes)) == 1 else f"{v.op} of {dtypes}"
    if v.op in UNARY or v.op in BINARY:
        return "" if set(dtypes) == {v.dtype} else f"{v.op} of {dtypes} is {v.dtype}"
    if v.op == "reduce":
        if v.data not in REDUCE:
            return "no such reduction"
        is_position = v.data in PLACES
        return "" if v.dtype == ("i64" if is_position else dtypes[0]) else f"reduces {dtypes[0]}"
    if v.op == "fold":
        return "" if v.data == "sum" and v.dtype == dtypes[0] else f"adds up {dtypes[0]} by {v.data}"
    if v.op == "random":
        is_right = v.dtype == "i32" and dtypes == ["i64", "i64"] and len(v.index) == 1 and isinstance(v.data, int)
        return "" if is_right else f"random bits of {dtypes}"
    if v.op == "constant":
        return "" if isinstance(v.data, bool | int | float) else "no number"
    if v.op == "index":
        return "" if isinstance(v.data, sympy.Expr) and v.dtype == "i64" else "no index expression of i64"
    return ""


def _axes_problem(v: Value, args: list[Value], axes: Mapping[str, Axis]) -> str:
    over = frozenset().union(*(a.axes for a in args)) if args else frozenset()
    if v.op == "reduce":
        reduced = {name for name, a in axes.items() if a.reduced}
        return "" if reduced and v.axes == over - reduced else "varies over what it reduces"
    if v.op in ("scan", "sort"):
        reduced = {name for name, a in axes.items() if a.reduced}
        return "" if len(reduced) == 1 and v.axes == over | reduced else "does not run along one reduced axis"
    if v.op == "fold":
        walk = {name for name, a in axes.items() if a.walk}
        reduced = {name for name, a in axes.items() if a.reduced}
        return "" if walk and v.axes == over & reduced | walk else "does not add up over what its program walks through"
    if v.op == "index":
        return "" if v.axes == {s.name for s in v.data.free_symbols if s.name in axes} else "varies over other axes"
    if v.op == "random":
        return "" if v.axes >= over else "varies over other axes"
    return "" if v.axes == over else "varies over other axes than its operands"
