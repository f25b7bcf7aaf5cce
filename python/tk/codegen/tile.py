"""Tiles and addresses: which axes a program covers with a block, and how a buffer's address follows from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import sympy

from tk.codegen import index as ix
from tk.codegen.ir import Axis, Kernel, Value, values_in


@dataclass(frozen=True)
class Tile:
    """A program covers BLOCK_P x BLOCK_Q; `q` runs along memory. Each dimension merges some axes. batch: axes of which
    a program has one point. reduced: the dimension that is reduced, "p" or "q"."""

    p: tuple[Axis, ...]
    q: tuple[Axis, ...]
    batch: tuple[Axis, ...] = ()
    reduced: str | None = None


@dataclass(frozen=True)
class Layout:
    """What is taken for granted of strides.

    merged: the axes of a dimension of the tile run together in every tensor, so that one stride does. aligned: rows
    begin at 16 bytes and hold a multiple of 16 elements. What is not merged has a stride for every axis, and indices of
    64 bits."""

    name: str
    merged: bool
    aligned: bool

    @property
    def wide(self) -> bool:
        return not self.merged


ALIGNED, ROWS, STRIDED = Layout("aligned", True, True), Layout("rows", True, False), Layout("strided", False, False)
LAYOUTS = (ALIGNED, ROWS, STRIDED)


@dataclass(frozen=True)
class Access:
    """The source of an address. elementwise: put together from every dimension's index. Else base + p + q."""

    elementwise: bool
    base: tuple[str, ...] = ()
    p: str = ""
    q: str = ""
    strides: tuple[Callable[[str], str], ...] = field(default=())


def coefficients(v: Value, axes: Sequence[Axis]) -> list[dict[int, sympy.Expr]] | None:
    """For each axis, dimension -> factor, where every index of the access is linear in all axes; else None."""
    symbols = [a.symbol for a in axes]
    found: list[dict[int, sympy.Expr]] = [{} for _ in axes]
    for d, expr in enumerate(v.index):
        if values_in(expr):
            return None
        expr = sympy.expand(expr)
        for n, s in enumerate(symbols):
            if s not in expr.free_symbols:
                continue
            factor = sympy.expand(expr).coeff(s, 1)
            if factor.free_symbols & set(symbols) or not sympy.expand(expr - factor * s).free_symbols.isdisjoint({s}):
                return None
            found[n][d] = factor
    return found


def choose_tile(kernel: Kernel, layout: Layout) -> Tile:
    """The reduced axes are one dimension; of the kept ones those that every access has entirely or not at all run
    along memory together."""
    if not kernel.reduced:
        q = _suffix(kernel, kernel.kept, layout)
        return Tile(tuple(a for a in kernel.kept if a not in q), q)
    if not kernel.kept or _is_inner(kernel) or any(v.op == "sort" for v in kernel.values):
        return Tile(kernel.kept, kernel.reduced, (), "q")
    q = _suffix(kernel, kernel.kept, layout)
    return Tile(kernel.reduced, q, tuple(a for a in kernel.kept if a not in q), "p")


def _suffix(kernel: Kernel, axes: tuple[Axis, ...], layout: Layout) -> tuple[Axis, ...]:
    """As many of the last axes as every access takes together. In the strided layout one: its quotients and remainders
    are then worked out once a row."""
    count = min(1, len(axes))
    while layout.merged and count < len(axes) and _run_together(kernel, axes[-count - 1 :]):
        count += 1
    return axes[len(axes) - count :]


def _run_together(kernel: Kernel, axes: tuple[Axis, ...]) -> bool:
    for v in kernel.accesses:
        linear = coefficients(v, kernel.axes)
        if linear is None:
            return False
        parts = [linear[kernel.axes.index(a)] for a in axes]
        if not any(parts):
            continue
        if not all(len(part) == 1 for part in parts):
            return False
        dims = [next(iter(part)) for part in parts]
        buffer = kernel.buffer(v.buffer)
        for (d, e), inner in zip(itertools.pairwise(dims), axes[1:], strict=True):
            if e != d + 1 or not ix.same(buffer.sizes[e], inner.size):
                return False
        if any(v.index[d] != a.symbol for d, a in zip(dims, axes, strict=True)):
            return False
    return True


def _is_inner(kernel: Kernel) -> bool:
    """Whether most of what is read along the reduced axes has them last, where memory is contiguous."""
    reduced = {a.name for a in kernel.reduced}
    kept = {a.name for a in kernel.kept}
    score = 0
    for v in kernel.accesses:
        names = [{s.name for s in e.free_symbols} for e in v.index]
        touched = set().union(*names) if names else set()
        if not (touched & reduced and touched & kept):
            continue
        last: set[str] = next((n for n in reversed(names) if n & (reduced | kept)), set())
        score += 1 if last & reduced else -1
    return score >= 0
