"""Index arithmetic: quotients and remainders that are known to vanish do, by the ranges of the axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod

from tk.codegen.ir import values_in

Ranges = Mapping[sympy.Symbol, sympy.Expr]  # axis -> size: 0 <= axis < size


def same(a: sympy.Expr, b: sympy.Expr) -> bool:
    return a == b or sympy.expand(a - b) == 0


def product(sizes: Sequence[sympy.Expr]) -> sympy.Expr:
    return sympy.Mul(*sizes)


def floor_div(expr: sympy.Expr, divisor: sympy.Expr, ranges: Ranges) -> sympy.Expr:
    """expr // divisor, for expr >= 0."""
    if divisor == 1:
        return expr
    whole, rest = _parts(expr, divisor, ranges)
    if rest == 0 or is_below(rest, divisor, ranges):
        return whole
    return whole + FloorDiv(rest, divisor)


def modulo(expr: sympy.Expr, divisor: sympy.Expr, ranges: Ranges) -> sympy.Expr:
    if divisor == 1:
        return sympy.Integer(0)
    _, rest = _parts(expr, divisor, ranges)
    return rest if rest == 0 or is_below(rest, divisor, ranges) else Mod(rest, divisor)


def _parts(expr: sympy.Expr, divisor: sympy.Expr, ranges: Ranges) -> tuple[sympy.Expr, sympy.Expr]:
    """Quotient and remainder as :func:`_split` gives them, or the whole as remainder where that would leave one below
    0, whose quotient would not be the hardware's."""
    whole, rest = _split(expr, divisor)
    keeps = is_never_negative(rest, ranges) or not is_never_negative(expr, ranges)
    return (whole, rest) if keeps else (sympy.Integer(0), sympy.expand(expr))


def _split(expr: sympy.Expr, divisor: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """(q, r) with expr = q * divisor + r, where every term of q is a multiple seen by its factors alone."""
    whole: list[sympy.Expr] = []
    rest: list[sympy.Expr] = []
    for term in sympy.Add.make_args(sympy.expand(expr)):
        quotient = sympy.cancel(term / divisor) if not term.has(FloorDiv, Mod) or term.is_Mul else term / divisor
        is_multiple = sympy.fraction(sympy.together(quotient))[1] == 1
        (whole if is_multiple else rest).append(quotient if is_multiple else term)
    return sympy.Add(*whole), sympy.Add(*rest)


def is_below(expr: sympy.Expr, bound: sympy.Expr, ranges: Ranges) -> bool:
    """Whether 0 <= expr < bound whatever the sizes."""
    highest = _highest(expr, ranges)
    return highest is not None and bool(sympy.expand(bound - 1 - highest).is_nonnegative)


def _highest(expr: sympy.Expr, ranges: Ranges) -> sympy.Expr | None:
    """An upper bound free of axes; None where there is none, or where the expression may be negative."""
    total = sympy.Integer(0)
    for term in sympy.Add.make_args(sympy.expand(expr)):
        most = _highest_of_term(term, ranges) if term.is_nonnegative else None
        if most is None:
            return None
        total += most
    return total


def _highest_of_term(term: sympy.Expr, ranges: Ranges) -> sympy.Expr | None:
    if term.is_Symbol:
        # A value that is read from memory has no bound.
        return None if values_in(term) else ranges[term] - 1 if term in ranges else term
    if term.is_Mul or (term.is_Pow and term.args[1].is_Integer):
        bounds = [_highest(factor, ranges) for factor in (term.args if term.is_Mul else term.args[:1])]
        if any(bound is None for bound in bounds):
            return None
        return product(bounds) if term.is_Mul else bounds[0] ** term.args[1]
    if isinstance(term, FloorDiv | Mod):
        dividend, divisor = term.args
        if not divisor.is_positive or any(s in ranges for s in divisor.free_symbols):
            return None
        if isinstance(term, Mod):
            return divisor - 1
        most = _highest(dividend, ranges)
        return None if most is None else FloorDiv(most, divisor)
    return term if term.is_Integer else None


def is_never_negative(expr: sympy.Expr, ranges: Ranges) -> bool:
    """Whether expr >= 0 whatever the sizes, as far as terms show it: flip's M * N - 1 - r is, for r below M * N."""
    lowest = sympy.Integer(0)
    for term in sympy.Add.make_args(sympy.expand(expr)):
        if term.is_nonnegative:
            lowest += 0 if term.has(FloorDiv, Mod, *ranges) else term
        elif not term.has(FloorDiv, Mod) and (most := _highest(-term, ranges)) is not None:
            lowest -= most
        else:
            return False
    return bool(sympy.expand(lowest).is_nonnegative)


def reshape(index: Sequence[sympy.Expr], shape: Sequence[sympy.Expr], target: Sequence[sympy.Expr],
            ranges: Ranges) -> tuple[sympy.Expr, ...]:  # fmt: skip
    """The place, in the `target` that was viewed, of a view's element at `index` in `shape`."""
    found: list[sympy.Expr] = []
    for left, right in _groups(shape, target):
        sizes = [target[d] for d in right]
        if len(left) == len(right) == 1:
            found.append(index[left[0]])
            continue
        flat = sympy.Integer(0)
        for d in left:
            flat = flat * shape[d] + index[d]
        for i, size in enumerate(sizes):
            if size == 1:
                found.append(sympy.Integer(0))
                continue
            inner = floor_div(flat, product(sizes[i + 1 :]), ranges)
            is_first = all(s == 1 for s in sizes[:i])
            found.append(inner if is_first else modulo(inner, size, ranges))
    return tuple(found)


def _groups(shape: Sequence[sympy.Expr], target: Sequence[sympy.Expr]) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions of both with equal products, as short as possible."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(shape) or j < len(target):
        left, right = _shortest(shape, target, i, j)
        groups.append((list(range(i, left)), list(range(j, right))))
        i, j = left, right
    return groups


def _shortest(shape: Sequence[sympy.Expr], target: Sequence[sympy.Expr], i: int, j: int) -> tuple[int, int]:
    ends = [(a, b) for a in range(i, len(shape) + 1) for b in range(j, len(target) + 1) if (a, b) != (i, j)]
    for a, b in sorted(ends, key=sum):
        if same(product(shape[i:a]), product(target[j:b])) and _rest_fits(shape, target, a, b):
            return a, b
    return len(shape), len(target)


def _rest_fits(shape: Sequence[sympy.Expr], target: Sequence[sympy.Expr], a: int, b: int) -> bool:
    """What is left of one may not be nothing while the other has a size that is not 1."""
    return (a < len(shape) or all(s == 1 for s in target[b:])) and (b < len(target) or all(s == 1 for s in shape[a:]))
