"""Values that are held against each other, where one of them comes by way of another launch or of a whole row.

In ``y == y.amax()`` the same ``y`` is worked out twice: for the maximum, and for the comparison. Only where both times
have the same bits does one of them equal the other. So in a graph that has such a comparison

- no launch approximates, which depends on what else a launch does with a value;
- a sum that what is compared is made of is worked out by one launch, which leaves it in memory for the others: the
  order of its terms is that of the launch's blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tk.aot.spec import Launch
from tk.codegen.ir import COMPARE, FLOATS, NARROW, Kernel, Value

# Of floats: the same bits however they are compiled. All others may be approximated, or depend on an order.
_EXACT = ("load", "store", "cast", "bitcast", "constant", "number", "neg", "abs", "where", "maximum", "minimum", "sort",
          "argmax", "argmin", "max", "min")  # fmt: skip
_CHOICES = ("where", "maximum", "minimum")
_REMAINDERS = ("fmod", "remainder")
_COMPARISONS = (*COMPARE, "search")
_FROM_AFAR = ("reduce", "scan", "sort", "fold", "search")


def compared(kernel: Kernel) -> list[tuple[Value, tuple[int, ...]]]:
    """What compares such values, with the places of those among its operands. A difference that is compared with 0
    stands for its operands."""
    found: list[tuple[Value, tuple[int, ...]]] = []
    for v in kernel.values:
        if v.op in COMPARE and v.args[0] == v.args[1]:
            continue  # whether it is NaN
        if v.op in COMPARE and (one := _of_difference(kernel, v)) is not None:
            found.append((one, (0, 1)))
        elif v.op in COMPARE or v.op == "search":
            found.append((v, tuple(range(len(v.args)))))
    return [(v, places) for v, places in found if _is_held_together(kernel, v)]


def _of_difference(kernel: Kernel, v: Value) -> Value | None:
    a, b = (kernel.value(n) for n in v.args)
    for one, other in ((a, b), (b, a)):
        if one.op == "sub" and other.op == "constant" and other.data == 0:
            return one
    return None


def _is_held_together(kernel: Kernel, v: Value) -> bool:
    """Whether both come of one tensor, one of them by way of a whole row, and of arithmetic with floats."""
    if kernel.value(v.args[0]).dtype not in FLOATS:
        return False
    sides = [_reached(kernel, n) for n in v.args]
    sides += [[v]] if v.op == "search" else []
    scratch = {b.name for b in kernel.buffers if b.kind == "scratch"}  # which may be made of anything
    one, other = ({x.buffer for x in side if x.op in ("load", "search")} for side in sides)
    is_one_tensor = bool(one & other) or bool(one and other and (one | other) & scratch)
    everything = [v, *(x for side in sides for x in side)]
    is_from_afar = any(x.op in _FROM_AFAR or x.buffer in scratch for x in everything)
    return is_one_tensor and is_from_afar and any(_is_inexact(x) for x in everything)


def _is_inexact(v: Value) -> bool:
    """16-bit arithmetic is rounded where it is stored, and not before; that of fp32 has the same bits everywhere."""
    is_exact = _kind(v) in _EXACT or (v.op in ("add", "sub", "mul") and v.dtype not in NARROW)
    return v.dtype in FLOATS and not is_exact


def _kind(v: Value) -> Any:
    return v.op if v.op not in ("reduce", "scan") else getattr(v.data, "kind", v.data)


def _reached(kernel: Kernel, number: int, through: Callable[[Value], bool] = lambda v: True) -> list[Value]:
    """The value and all that it is made of, as far as `through` goes on."""
    found: dict[int, Value] = {}
    pending = [number]
    while pending:
        if (n := pending.pop()) not in found:
            found[n] = kernel.value(n)
            pending += found[n].args if through(found[n]) else ()
    return list(found.values())


def any_compared(kernels: Sequence[Kernel]) -> bool:
    return any(map(compared, kernels))


def uncontracted(launch: Launch) -> Launch:
    """Every launch: a product that is contracted into a sum is another than the one that is stored or compared, so that
    even ``x - x`` would not be 0."""
    return replace(launch, options={**launch.options, "enable_fp_fusion": False})


def sums_compared(kernel: Kernel) -> Iterator[int]:
    """The reductions and scans of the kernel that what it compares is made of, but for those that have the same bits in
    any order."""
    for v, places in compared(kernel):
        for place in places:
            reached = _reached(kernel, v.args[place])
            yield from (x.number for x in reached if x.op in _FROM_AFAR and _is_inexact(x))


def narrow_operands(kernel: Kernel) -> dict[tuple[int, int], str]:
    """(value, place) -> the 16-bit dtype in which that operand is compared, may be chosen, or leaves a remainder.

    All operands of a comparison that torch makes in 16 bits are rounded to them, numbers too. What is chosen is rounded
    where it is a number, or converted to what it competes with: the rest is a result of arithmetic, of which the choice
    among unrounded values is the same. So are the operands of a remainder, which jumps where the quotient passes an
    integer: of 3.0 by 0.1 it is 0.1 or 0, by the digits of 0.1."""
    found = {}
    for v in kernel.values:
        for place, n in enumerate(v.args):
            operand = kernel.value(n)
            if v.op in _COMPARISONS:
                operand = _before_widening(kernel, operand)
            elif v.op not in (*_CHOICES, *_REMAINDERS) or not _is_converted(kernel, operand):
                continue
            if operand.dtype in NARROW:
                found[v.number, place] = operand.dtype
    return found


def _before_widening(kernel: Kernel, v: Value) -> Value:
    while v.op == "cast" and v.dtype in FLOATS and v.dtype not in NARROW:
        v = kernel.value(v.args[0])
    return v


def any_widened(kernels: Sequence[Kernel]) -> bool:
    """Whether what is compared, in any of them, is 16-bit arithmetic that the function converts to more bits, or chosen
    among such values. Those then have 16 bits in all kernels: a maximum that another kernel has chosen must be one of
    what it is compared with."""
    compared = ((k, n) for k in kernels for v in k.values if v.op in _COMPARISONS for n in v.args)
    return any(is_widening(k, v) for k, n in compared for v in _reached(k, n, lambda v: _kind(v) in _EXACT))


def is_widening(kernel: Kernel, v: Value) -> bool:
    """What is only loaded has no more digits than its dtype."""
    if v.op != "cast" or v.data != "round" or v.dtype not in FLOATS or v.dtype in NARROW:
        return False
    source = kernel.value(v.args[0])
    return source.dtype in NARROW and source.op != "load"


def _is_converted(kernel: Kernel, v: Value) -> bool:
    """A number, or a tensor without dimensions."""
    return not v.axes and (v.op == "constant" or (v.op == "cast" and kernel.value(v.args[0]).dtype not in NARROW))
