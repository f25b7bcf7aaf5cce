"""Parts of everything that run together in memory: all that a split reduction reduces lies between two addresses.

A part's elements that are there come before those that are not. So a program runs through whole blocks, without masks,
and one block with masks behind them. Where the first element does not lie on 16 bytes, the parts are counted from the
16 bytes that hold it, and the first one begins with a block with masks.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from tk.codegen import index as ix
from tk.codegen.ir import PLACES, Kernel, Value
from tk.codegen.tile import Layout, Tile, coefficients

# Ops and reductions that ask where an element is, or how many there are.
_WITH_PLACES = {"index", "random", "scan", "sort", "search", "store", *PLACES, "mean", "m2"}


@dataclass(frozen=True)
class Piece:
    """guard: the value that says whether an element is there; place: the one that it compares. count: how many there
    are. buffers: what is read."""

    guard: int
    place: int
    count: sympy.Expr
    buffers: tuple[str, ...]


def piece_of(kernel: Kernel, tile: Tile, layout: Layout) -> Piece | None:
    """The piece of a kernel whose rows are parts of everything; None for others, and where elements may have gaps."""
    is_along = layout.dense and not layout.pitched and tile.reduced == "q" and not tile.batch and not tile.walk
    if not is_along or len(tile.p) != 1:
        return None
    q = {a.name for a in tile.q}
    along_q = [v for v in kernel.values if v.axes & q]
    guards = [v for v in along_q if v.op == "lt" and _bounds_parts(kernel, tile, v)]
    if len(guards) != 1:
        return None
    guard, place = guards[0], guards[0].args[0]
    inner = ix.product([a.size for a in tile.q[1:]])
    count = kernel.value(guard.args[1]).data * inner
    loads = [v for v in along_q if v.op == "load"]
    buffers = tuple(dict.fromkeys(v.buffer for v in loads))
    others = [v for v in along_q if v.op in _WITH_PLACES and v.number != place]
    kinds = {v.data for v in kernel.values if v.op == "reduce"}
    is_one = len(buffers) == 1 or layout.aligned
    fits = loads and is_one and not others and len(kinds) == 1 and _WITH_PLACES.isdisjoint(kinds)
    if not fits or not all(v.args == (guard.number,) and _runs_together(kernel, tile, v) for v in loads):
        return None
    return Piece(guard.number, place, count, buffers)


def has_parts(kernel: Kernel) -> bool:
    """Whether what is kept are parts of everything, which have thousands of elements."""
    if len(kernel.kept) != 1 or not kernel.reduced:
        return False
    tile = Tile(kernel.kept, kernel.reduced, (), "q")
    return any(v.op == "lt" and _bounds_parts(kernel, tile, v) for v in kernel.values)


def _bounds_parts(kernel: Kernel, tile: Tile, v: Value) -> bool:
    """Whether it is ``part * chunk + row < rows``."""
    row, rows = (kernel.value(a) for a in v.args)
    if row.op != "index" or rows.op != "index" or rows.axes:
        return False
    return ix.same(row.data, _row(tile))


def _row(tile: Tile) -> sympy.Expr:
    """The row of everything, by the part and the row in it."""
    return tile.p[0].symbol * tile.q[0].size + tile.q[0].symbol


def _runs_together(kernel: Kernel, tile: Tile, v: Value) -> bool:
    factors = coefficients(v, kernel.axes)
    if factors is None:
        return False
    of = dict(zip((a.name for a in kernel.axes), factors, strict=True))
    first = v.index[0] if len(tile.q) == len(v.index) else None
    is_whole = first is not None and ix.same(first, _row(tile))
    return is_whole and all(of[a.name] == {d: sympy.Integer(1)} for d, a in enumerate(tile.q))
