"""Interleaved parts of columns: what makes rows of any width whole vectors.

Rows without gaps run together, so that the same columns of several rows are neighbours in memory. Where a part of a
split reduction has every row whose number leaves the same remainder by the number of parts, parts and columns together
are one run of memory. The number of parts is a multiple of 16: then the run is whole vectors, and begins at 16 bytes in
every step, whether a row does or not.

Every part has a row in all steps but the last, which only the first parts may have. So a program runs through steps
whose masks cut no vector, and through one more behind them, whose mask may.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy
from torch.utils._sympy.functions import FloorDiv

from tk.codegen import index as ix
from tk.codegen.ir import Kernel, Value


@dataclass(frozen=True)
class Steps:
    """guard: the value that says whether a part has a row in a step; place: the row, which the guard compares. whole:
    how many steps all parts have a row in. left: how many elements there are in the one behind them."""

    guard: int
    place: int
    whole: sympy.Expr
    left: sympy.Expr


def steps_of(kernel: Kernel) -> Steps | None:
    """The steps of a kernel that reduces interleaved parts; None for others, and where anything but columns has a value
    for each row or part."""
    if len(kernel.reduced) != 1 or len(kernel.kept) < 2:
        return None
    (step,), (part, *columns) = kernel.reduced, kernel.kept
    row = step.symbol * part.size + part.symbol
    guards = [v for v in kernel.values if v.op == "lt" and kernel.value(v.args[0]).data == row]
    if len(guards) != 1:
        return None
    place, rows = guards[0].args
    of_parts = [v for v in kernel.values if v.op in ("index", "random") and v.axes & {step.name, part.name}]
    in_columns = [{at, *(a.symbol for a in columns)} for at in (row, part.symbol)]
    if [v.number for v in of_parts] != [place] or any(set(v.index) not in in_columns for v in _by_parts(kernel)):
        return None
    count = kernel.value(rows).data
    whole = FloorDiv(count, part.size)
    return Steps(guards[0].number, place, whole, (count - whole * part.size) * ix.product([a.size for a in columns]))


def _by_parts(kernel: Kernel) -> Iterator[Value]:
    """The accesses whose places vary over the parts or their steps."""
    names = {kernel.reduced[0].name, kernel.kept[0].name}
    return (v for v in kernel.accesses if any(s.name in names for e in v.index for s in e.free_symbols))
