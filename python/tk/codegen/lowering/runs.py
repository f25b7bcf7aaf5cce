"""Reductions over dimensions that do not lie beside each other: [B, C, H, W] over B, H and W.

One launch would have no row in memory to run along. The last dimensions that lie beside each other are reduced first,
and what is left of the others then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sympy

from tk.codegen import index as ix
from tk.codegen.lowering.lazy import Emitter, Index, Lazy, Reduction, reduction


def reduced(kind: str, operand: Lazy, dims: Sequence[int], dtype: str) -> Lazy:
    """The reduction, run by run."""
    whole = reduction(kind, operand, dims, dtype)
    first, last = _runs(operand, dims)
    if not first:
        return whole
    if kind in ("mean", "m2"):
        return by_sums(whole)
    return reduced(kind, reduction(kind, operand, last, dtype), first, dtype)


def _runs(operand: Lazy, dims: Sequence[int]) -> tuple[list[int], list[int]]:
    """Those before the last dimension that is kept between two that are reduced, and those after it."""
    wide = [d for d, size in enumerate(operand.shape) if size != 1]
    kept = [d for d in wide if d not in dims and any(i in wide and i > d for i in dims)]
    between = kept[-1] if kept else -1
    first, last = ([d for d in dims if (d > between) == after] for after in (False, True))
    return (first, last) if any(d in wide for d in first) else ([], list(dims))


def by_sums(node: Reduction, summed: Callable[[Lazy], Lazy] | None = None) -> Lazy:
    """The mean, or the squared deviations from it, each of sums: parts of both would not simply add up. summed: a
    sum over the node's dimensions, which is worked out run by run if none is given."""
    operand, dtype = node.operand, node.dtype
    assert operand is not None
    of = summed or (lambda x: reduced("sum", x, node.dims, dtype))
    total, count = of(operand), ix.product(node.sizes)

    def rounded(e: Emitter, index: Index) -> int:
        return e.op("div", dtype, e.read(total, index), e.cast(e.index(count), dtype))

    def away(e: Emitter, index: Index) -> int:
        kept = tuple(i for d, i in enumerate(index) if d not in node.dims)
        return e.op("sub", dtype, e.read(operand, index), rounded(e, kept))

    deviations = Lazy(operand.shape, dtype, away)
    away_sum, squares = of(deviations), of(squared(deviations))
    if node.kind == "mean":
        return corrected(Lazy(node.shape, dtype, rounded), away_sum, squares, count)
    return centred(away_sum, squares, count)


def squared(x: Lazy) -> Lazy:
    def read(e: Emitter, index: Index) -> int:
        value = e.read(x, index)
        return e.op("mul", x.dtype, value, value)

    return Lazy(x.shape, x.dtype, read)


def centred(deviations: Lazy, squares: Lazy, count: sympy.Expr) -> Lazy:
    """The squared deviations from a mean, of the sums of those from what it was rounded to and of their squares: as
    device.centred."""
    dtype = squares.dtype

    def read(e: Emitter, index: Index) -> int:
        away, total = e.read(deviations, index), e.read(squares, index)
        share = e.op("div", dtype, away, e.cast(e.index(count), dtype))
        found = e.op("sub", dtype, total, e.op("mul", dtype, away, share))
        return e.op("maximum", dtype, found, e.constant(0.0, dtype))

    return Lazy(squares.shape, dtype, read)


def corrected(mean: Lazy, deviations: Lazy, squares: Lazy, count: sympy.Expr) -> Lazy:
    """A mean of rounded sums, by the deviations from it, where these are small: as device.corrected."""
    dtype = mean.dtype

    def read(e: Emitter, index: Index) -> int:
        around, away, total = (e.read(x, index) for x in (mean, deviations, squares))
        n = e.cast(e.index(count), dtype)
        size = e.op("mul", dtype, e.op("mul", dtype, around, around), n)
        is_far = e.op("ge", "i1", e.op("mul", dtype, total, e.constant(16.0, dtype)), size)
        moved = e.op("add", dtype, around, e.op("div", dtype, away, n))
        return e.op("where", dtype, is_far, around, moved)

    return Lazy(mean.shape, dtype, read)
