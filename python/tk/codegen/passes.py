"""Passes over a kernel. Each is one line of :func:`run`; the verifier stands before, between and after them."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import sympy

from tk.aot.spec import ITEMSIZE
from tk.codegen.comparisons import any_compared, any_widened, is_widening, narrow_operands
from tk.codegen.ir import (
    COMPARE,
    FLOATS,
    NARROW,
    Builder,
    Kernel,
    Scanned,
    Value,
    rebuild,
    rounded,
    values_in,
    verify,
)


def run_all(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """Runs all passes over the kernels of one plan. What is compared with one another is not approximated."""
    if any_widened(kernels):
        kernels = [round_widened(k) for k in kernels]
    exact = any_compared(kernels)
    made: list[Kernel] = []
    approximate = {b.name for k in kernels for b in k.buffers if b.kind == "scratch"}
    for kernel in reversed(kernels):  # what a launch leaves is as exact as those behind it need it
        made.insert(0, run(kernel, exact, approximate))
        needed = _exact(made[0], approximate)
        approximate -= {v.buffer for v in made[0].accesses if v.op == "search" or v.number in needed}
    return share_scratch(made)


def run(kernel: Kernel, exact: bool = False, approximate: Collection[str] = ()) -> Kernel:
    """All passes, in order. exact: nothing is approximated. approximate: scratch memory of which all that comes is
    rounded to 16 bits."""
    kernel = verify(kernel)
    for one in PASSES:
        if one is not allow_approximations:
            kernel = verify(one(kernel))
        elif not exact:
            kernel = verify(allow_approximations(kernel, approximate))
    return kernel


def share_scratch(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """What two functions of one tensor both have left in memory, as a mean and a variance their sums: once."""
    n_stores = Counter(v.buffer for k in kernels for v in k.values if v.op == "store")
    same: dict[str, str] = {}  # the buffer that is read in its place

    def read_shared(b: Builder, v: Value, args: tuple[int, ...]) -> int | None:
        if v.buffer not in same:
            return None
        return b.add(v.op, v.dtype, *args, buffer=same[v.buffer], index=v.index, data=v.data, fast=v.fast)

    shared = []
    for kernel in kernels:
        buffers = {name: replace(b, name=name) for b in kernel.buffers for name in [same.get(b.name, b.name)]}
        kernel = replace(rebuild(kernel, read_shared), buffers=tuple(buffers.values()))
        first: dict[object, str] = {}
        again = set()
        for v in kernel.values:
            if v.op == "store" and kernel.buffer(v.buffer).kind == "scratch" and n_stores[v.buffer] == 1:
                left = (replace(kernel.buffer(v.buffer), name=""), v.args, v.index, repr(v.data))
                if (name := first.setdefault(left, v.buffer)) != v.buffer:
                    same[v.buffer] = name
                    again.add(v.number)
        shared.append(verify(drop_unused(_renumbered(kernel, [v for v in kernel.values if v.number not in again]))))
    return tuple(shared)


def round_widened(kernel: Kernel) -> Kernel:
    """16-bit arithmetic that is converted to more bits has 16 first, as where the function itself converts to them."""

    def rule(b: Builder, v: Value, args: tuple[int, ...]) -> int | None:
        if not is_widening(kernel, v):
            return None
        narrow = b.values[args[0]].dtype
        return b.add("cast", v.dtype, b.add("cast", narrow, b.add("cast", "fp32", args[0]), data="round"))

    return rebuild(kernel, rule)


def promote(kernel: Kernel) -> Kernel:
    """16-bit and 8-bit floats are computed in fp32, and rounded where they are stored or where the function itself
    converts to them, or compares them. Between the ops of one kernel nothing else is rounded: the result is nearer to
    the exact one."""
    narrow = narrow_operands(kernel)

    def rule(b: Builder, v: Value, args: tuple[int, ...]) -> int | None:
        args = tuple(
            _rounded_to(b, n, narrow[v.number, place])
            if (v.number, place) in narrow and b.values[n].dtype in ("fp32", "fp64")
            else n
            for place, n in enumerate(args)
        )
        if v.op == "store":
            value = args[0] if b.values[args[0]].dtype == v.dtype else _rounded(b, args[0], v.dtype)
            return b.add("store", v.dtype, value, *args[1:], buffer=v.buffer, index=v.index, data=v.data)
        if v.op == "load" and v.dtype in NARROW:
            return b.add("cast", "fp32", b.add("load", v.dtype, *args, buffer=v.buffer, index=v.index))
        if v.op == "cast":
            return _promoted_cast(b, v, args[0])
        if v.op == "asm":
            given = [a if b.values[a].dtype == d else _rounded(b, a, d) for a, d in zip(args, v.data[3], strict=True)]
            made = b.add("asm", v.dtype, *given, data=v.data)
            return b.add("cast", "fp32", made) if v.dtype in NARROW else made
        if v.op == "bitcast":
            bits = args[0] if b.values[args[0]].dtype == v.data else _rounded(b, args[0], v.data)
            made = b.add("bitcast", v.dtype, bits, data=v.data)
            return b.add("cast", "fp32", made) if v.dtype in NARROW else made
        dtype = "fp32" if v.dtype in NARROW else v.dtype
        return b.add(v.op, dtype, *args, buffer=v.buffer, index=v.index, data=v.data)

    return rebuild(kernel, rule)


def _promoted_cast(b: Builder, v: Value, arg: int) -> int:
    source = b.values[arg].dtype
    if v.dtype not in NARROW:
        return arg if source == v.dtype else b.add("cast", v.dtype, arg)
    if v.data == "round":
        return _rounded_to(b, arg if source == "fp32" else b.add("cast", "fp32", arg), v.dtype)
    return arg if source == "fp32" else b.add("cast", "fp32", arg)


def _rounded(b: Builder, arg: int, dtype: str) -> int:
    """Rounds by way of fp32, as torch does it: also from fp64 and integers."""
    if dtype in NARROW and b.values[arg].dtype != "fp32":
        arg = b.add("cast", "fp32", arg)
    return b.add("cast", dtype, arg)


def _rounded_to(b: Builder, arg: int, narrow: str) -> int:
    """Rounds within the dtype that it has, to no more digits than the narrow one has."""
    v = b.values[arg]
    if v.op == "constant":
        return b.add("constant", v.dtype, data=rounded(v.data, narrow))
    return b.add("cast", v.dtype, _rounded(b, arg, narrow))


def simplify(kernel: Kernel) -> Kernel:
    """What one constant operand decides, where that holds for every value, NaN and signed zeros included."""

    def rule(b: Builder, v: Value, args: tuple[int, ...]) -> int | None:
        known = [b.values[a].data if b.values[a].op == "constant" else None for a in args]
        if v.op in _FOLD and None not in known and b.values[args[0]].dtype not in FLOATS:
            return b.add("constant", v.dtype, data=_FOLD[v.op](*known))
        if v.dtype == "i1" and (found := _logic(b, v, args, known)) is not None:
            return found
        if v.op == "where" and known[0] is not None:
            return args[1] if known[0] else args[2]
        if v.op == "load" and known == [True]:
            return b.add("load", v.dtype, buffer=v.buffer, index=v.index)
        if v.op in ("mul", "div") and known[1] == 1:
            return args[0]
        if v.op == "mul" and known[0] == 1:
            return args[1]
        if v.op == "sub" and known[1] == 0:
            return args[0]
        if v.op == "cast" and known[0] is not None and v.dtype in ("fp32", "fp64"):
            return b.add("constant", v.dtype, data=float(known[0]))
        if v.op == "cast" and b.values[args[0]].op == "cast":
            inner = b.values[b.values[args[0]].args[0]]
            if inner.dtype == v.dtype and v.dtype in NARROW and b.values[args[0]].dtype == "fp32":
                return inner.number
        if v.op == "pow" and known[1] == 2:
            return b.add("mul", v.dtype, args[0], args[0])
        return None

    return rebuild(kernel, rule)


# Of integers and bools. What may leave 64 bits is no constant.
_FOLD: Mapping[str, Callable[..., bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "not": operator.not_,
}  # fmt: skip


def _logic(b: Builder, v: Value, args: tuple[int, ...], known: list[object]) -> int | None:
    """Conjunctions and disjunctions with a constant or with themselves, and an index that is not below 0."""
    if v.op in ("and", "or"):
        decisive = v.op == "or"
        for a, other in ((0, 1), (1, 0)):
            if known[a] is not None:
                return args[a] if known[a] == decisive else args[other]
        return args[0] if args[0] == args[1] else None
    if v.op == "lt" and known[0] == 0:
        right = b.values[args[1]]  # a size: of an empty tensor nothing is computed
        if right.op == "index" and right.data.is_positive:
            return b.add("constant", "i1", data=True)
    if v.op == "ge" and known[1] == 0:
        left = b.values[args[0]]
        if left.op == "index" and left.data.is_nonnegative:
            return b.add("constant", "i1", data=True)
    return None


def drop_unused(kernel: Kernel) -> Kernel:
    """Values that no store needs."""
    needed: set[int] = set()
    for v in reversed(kernel.values):
        if v.op == "store" or v.number in needed:
            needed.update(v.args)
            needed.update(n for e in v.index for n in values_in(e))
    keep = [v for v in kernel.values if v.op == "store" or v.number in needed]
    pruned = _renumbered(kernel, keep)
    used = {v.buffer for v in pruned.values if v.buffer}
    return replace(pruned, buffers=tuple(b for b in pruned.buffers if b.name in used))


def _renumbered(kernel: Kernel, keep: list[Value]) -> Kernel:
    kept = {v.number for v in keep}
    placeholder = -1

    def rule(b: Builder, v: Value, args: tuple[int, ...]) -> int | None:
        return None if v.number in kept else placeholder

    return rebuild(kernel, rule)


_NOT_APPROXIMATED = ("load", "store", "constant", "reduce", "fold", "scan", "sort")


def allow_approximations(kernel: Kernel, approximate: Collection[str] = ()) -> Kernel:
    """fp32 values of which everything that comes is rounded to 16 bits need no correctly rounded functions.
    approximate: scratch memory of which all that comes is."""
    exact = _exact(kernel, approximate)

    def rule(b: Builder, v: Value, args: tuple[int, ...]) -> int | None:
        if v.dtype != "fp32" or v.number in exact or v.op in _NOT_APPROXIMATED:
            return None
        return b.add(v.op, v.dtype, *args, index=v.index, data=v.data, fast=True)

    return rebuild(kernel, rule)


def _exact(kernel: Kernel, approximate: Collection[str]) -> set[int]:
    """Values that may not be approximated."""
    exact: set[int] = set()
    held: set[int] = set()  # what is compared as 16 bits: of an approximation these may be others
    for v in reversed(kernel.values):
        if v.op in (*COMPARE, "search") or (v.op == "cast" and v.number in held):
            held.update(v.args)
        is_rounding = v.op == "cast" and v.dtype in NARROW and v.number not in held
        demands = v.op == "store" or v.number in exact or v.dtype not in ("fp32", *NARROW) or v.op == "number"
        is_left = v.op == "store" and v.dtype == "fp32" and v.buffer in approximate and v.data is None
        if is_rounding or is_left or (v.op == "store" and v.dtype in NARROW):
            continue
        if demands:
            exact.update(v.args)
            exact.update(n for e in v.index for n in values_in(e))
    return exact


def merge_with_one(kernel: Kernel) -> Kernel:
    """1 + erf(x) as erfc(-x) and 1 + tanh(x) as 2 sigmoid(2x), where approximations do: shorter, and with digits left
    where the sum is small."""

    def rule(b: Builder, v: Value, args: tuple[int, ...]) -> int | None:
        if v.op != "add" or not v.fast:
            return None
        for one, other in (args, args[::-1]):
            inner = b.values[other]
            if b.values[one].data != 1 or b.values[one].op != "constant" or not inner.fast:
                continue
            if inner.op == "erf":
                return b.add("erfc", v.dtype, b.add("neg", v.dtype, *inner.args, fast=True), fast=True)
            if inner.op == "tanh":
                two = b.add("constant", v.dtype, data=2.0)
                twice = b.add("mul", v.dtype, *inner.args, two, fast=True)
                return b.add("mul", v.dtype, b.add("sigmoid", v.dtype, twice, fast=True), two, fast=True)
        return None

    return drop_unused(rebuild(kernel, rule))


def multiply_by_reciprocal(kernel: Kernel) -> Kernel:
    """Lets a softmax multiply, where approximations do, by the reciprocal of the sum of exponentials, which each row
    has once. (Another divisor may be so small that its reciprocal is infinite.)"""

    def is_exponentials(b: Builder, v: Value) -> bool:
        return v.op == "reduce" and v.data == "sum" and b.values[v.args[0]].op == "exp"

    def rule(b: Builder, v: Value, args: tuple[int, ...]) -> int | None:
        if v.op != "div" or not v.fast or len(args) < 2:
            return None
        divided, by = b.values[args[0]], b.values[args[1]]
        if not by.axes < divided.axes or not is_exponentials(b, by):
            return None
        return b.add("mul", v.dtype, args[0], b.add("reciprocal", v.dtype, args[1], fast=True), fast=True)

    return rebuild(kernel, rule)


def take_means(kernel: Kernel) -> Kernel:
    """The sum of what has a variance, divided by how many it is of, is the mean that the variance has."""
    moments = {v.args for v in kernel.values if v.op == "reduce" and v.data == "m2"}
    count = sympy.Mul(*(a.size for a in kernel.reduced))

    def is_count(v: Value) -> bool:
        return is_count(kernel.value(v.args[0])) if v.op == "cast" else v.op == "index" and v.data == count

    def rule(b: Builder, v: Value, args: tuple[int, ...]) -> int | None:
        if v.op != "div":
            return None
        total, by = (kernel.value(a) for a in v.args)
        if total.op != "reduce" or total.data != "sum" or total.args not in moments or not is_count(by):
            return None
        return b.add("reduce", v.dtype, *b.values[args[0]].args, data="mean")

    return rebuild(kernel, rule) if moments else kernel


# Those that have a value which changes nothing, and no positions that the order would change.
MIRRORED = ("sum", "prod", "logaddexp")


def scan_backwards(kernel: Kernel) -> Kernel:
    """A scan of what is read from the end, and stored so: from the end of what is read forwards, which is in vectors.

    Where all that is read and stored along the scanned axis has its mirror image as the last index."""
    found = [v for v in kernel.values if v.op in ("scan", "sort", "reduce")]
    if not found or not all(isinstance(v.data, Scanned) and v.data.kind in MIRRORED for v in found):
        return kernel
    (axis,) = (a for a in kernel.axes if a.reduced)
    mirror = {axis.symbol: axis.size - 1 - axis.symbol}
    along = [v for v in kernel.accesses if any(axis.symbol in e.free_symbols for e in v.index)]
    mirrored = [sympy.expand(v.index[-1].xreplace(mirror)) for v in along]
    others = [e for v in along for e in v.index[:-1]]
    if any(e != axis.symbol for e in mirrored) or any(axis.symbol in e.free_symbols for e in others):
        return kernel

    def rule(b: Builder, v: Value, args: tuple[int, ...]) -> int | None:
        index = tuple(sympy.expand(e.xreplace(mirror)) for e in v.index)
        data = v.data.xreplace(mirror) if isinstance(v.data, sympy.Expr) else v.data
        data = replace(data, backwards=not data.backwards) if isinstance(data, Scanned) else data
        return b.add(v.op, v.dtype, *args, buffer=v.buffer, index=index, data=data, fast=v.fast)

    return rebuild(kernel, rule)


AHEAD = 8  # bytes of an element that are held in registers while its random bits are worked out


def read_before_drawing(kernel: Kernel) -> Kernel:
    """What is read stands before the first random bits. Part of their work is under a condition (device.random_run),
    across which the compiler moves no load: a small call would wait for its key, and again for what it reads."""
    first = next((v for v in kernel.values if v.op == "random"), None)
    if first is None:
        return kernel
    stored: set[str] = set()
    moved: list[Value] = []
    for v in kernel.values[first.number :]:
        if v.op == "store":
            stored.add(v.buffer)
        if v.op != "load" or v.args or v.buffer in stored or any(map(values_in, v.index)):
            continue
        if sum(ITEMSIZE[m.dtype] for m in [*moved, v]) <= AHEAD:
            moved.append(v)

    def rule(b: Builder, v: Value, args: tuple[int, ...]) -> int | None:
        for m in moved if v.number == first.number else ():  # which it then has once, here
            b.add(m.op, m.dtype, buffer=m.buffer, index=m.index, data=m.data, fast=m.fast)
        return None

    return rebuild(kernel, rule)


PASSES: tuple[Callable[[Kernel], Kernel], ...] = (
    promote,
    simplify,
    take_means,
    drop_unused,
    allow_approximations,
    merge_with_one,
    multiply_by_reciprocal,
    scan_backwards,
    read_before_drawing,
)
