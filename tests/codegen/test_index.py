"""Index arithmetic against counting: every element of small tensors, whatever is drawn."""

from __future__ import annotations

from itertools import product
from math import prod

import sympy
from hypothesis import example, given, note, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv, Mod

from tk.codegen import index as ix

M, N, K = (sympy.Symbol(name, integer=True, positive=True) for name in "MNK")
A, B = (sympy.Symbol(name, integer=True, nonnegative=True) for name in "ab")
SIZES = [dict(zip((M, N, K), sizes, strict=True)) for sizes in ((1, 1, 1), (2, 3, 1), (3, 2, 4), (5, 4, 3), (1, 6, 2))]

sizes = st.sampled_from([M, N, K, M * N, N * K, N + 1, 2 * M, sympy.Integer(1), sympy.Integer(2), sympy.Integer(3),
                         FloorDiv(N + 1, 2), M + N])  # fmt: skip


@st.composite
def expressions(draw: st.DrawFn, axes: tuple[sympy.Symbol, ...] = (A, B)) -> sympy.Expr:
    """Of axes and sizes, as views make them: never negative by construction."""

    def leaf() -> sympy.Expr:
        return draw(st.sampled_from([*axes, *axes, M, N, sympy.Integer(1), sympy.Integer(2)]))

    found = leaf()
    for _ in range(draw(st.integers(1, 4))):
        kind, size = draw(st.sampled_from(["add", "mul", "floor", "mod", "row"])), draw(sizes)
        found = {
            "add": lambda x, s: x + leaf(), "mul": lambda x, s: x * s, "floor": FloorDiv, "mod": Mod,
            "row": lambda x, s: x * s + leaf(),
        }[kind](found, size)  # fmt: skip
    return found


def places(ranges: ix.Ranges):
    """Every value of every symbol."""
    for given_sizes in SIZES:
        counts = [value(size, given_sizes) for size in ranges.values()]
        for at in product(*map(range, counts)):
            yield {**given_sizes, **dict(zip(ranges, map(sympy.Integer, at), strict=True))}


def value(expr: sympy.Expr, at: dict) -> int:
    """As kernels have it: quotients rounded down, remainders of the divisor's sign."""
    if expr.is_Symbol or expr.is_Integer:
        return int(at.get(expr, expr))
    parts = [value(x, at) for x in expr.args]
    if isinstance(expr, FloorDiv | Mod):
        return parts[0] // parts[1] if isinstance(expr, FloorDiv) else parts[0] % parts[1]
    return sum(parts) if expr.is_Add else prod(parts) if expr.is_Mul else parts[0] ** parts[1]


@given(expressions(), sizes, sizes, sizes)
@example(2 * Mod(A, N), N, N + 1, M)  # which is largest where A is not
@settings(deadline=None, max_examples=150)
def test_quotients_and_remainders(expr: sympy.Expr, divisor: sympy.Expr, of_a: sympy.Expr, of_b: sympy.Expr) -> None:
    ranges = {A: of_a, B: of_b}
    quotient, rest = ix.floor_div(expr, divisor, ranges), ix.modulo(expr, divisor, ranges)
    below = ix.is_below(expr, divisor, ranges)
    note(f"{expr} // {divisor} = {quotient}, % = {rest}, below: {below}")
    for at in places(ranges):
        dividend, by = value(expr, at), value(divisor, at)
        assert (value(quotient, at), value(rest, at)) == divmod(dividend, by), at
        assert not below or 0 <= dividend < by, at


@given(expressions(), expressions(), sizes, sizes)
@settings(deadline=None, max_examples=100)
def test_what_is_never_negative(one: sympy.Expr, other: sympy.Expr, of_a: sympy.Expr, of_b: sympy.Expr) -> None:
    ranges = {A: of_a, B: of_b}
    if ix.is_never_negative(one - other, ranges):
        assert all(value(one - other, at) >= 0 for at in places(ranges))


@given(st.permutations([M, N, K, sympy.Integer(2)]), st.data())
@settings(deadline=None, max_examples=60)
def test_views_of_views(shape: list[sympy.Expr], data: st.DataObject) -> None:
    """Dimensions joined at random: where an element of the view is, and backwards what is flipped."""
    joins = data.draw(st.lists(st.booleans(), min_size=3, max_size=3))
    target = [shape[0]]
    for size, joined in zip(shape[1:], joins, strict=True):
        target = [*target[:-1], target[-1] * size] if joined else [*target, size]
    flips = data.draw(st.lists(st.booleans(), min_size=4, max_size=4))
    axes = [sympy.Symbol(f"x{d}", integer=True, nonnegative=True) for d in range(4)]
    for view, source in ((shape, target), (target, shape)):
        own = axes[: len(view)]
        index = [s - 1 - x if flip else x for x, s, flip in zip(own, view, flips, strict=False)]
        ranges = dict(zip(own, view, strict=True))
        found = ix.reshape(index, view, source, ranges)
        note(f"{index} of {view} in {source}: {found}")
        for at in places(ranges):
            assert _linear([value(i, at) for i in found], source, at) == _linear(
                [value(i, at) for i in index], view, at
            ), at


def _linear(index: list[int], shape: list[sympy.Expr], at: dict) -> int:
    flat = 0
    for i, size in zip(index, shape, strict=True):
        assert 0 <= i < value(size, at)
        flat = flat * value(size, at) + i
    return flat
