"""Tiles and addresses: which axes a program covers with a block, and how a buffer's address follows from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import sympy

from tk.codegen import index as ix
from tk.codegen.interleaved import Steps, steps_of
from tk.codegen.ir import Axis, Kernel, Value, values_in


@dataclass(frozen=True)
class Tile:
    """A program covers BLOCK_P x BLOCK_Q; `q` runs along memory. Each dimension merges some axes. batch: axes of which
    a program has one point. reduced: the dimension that is reduced, "p" or "q". walk: a program runs through many
    blocks of rows; the axis that numbers programs is the one of `batch`."""

    p: tuple[Axis, ...]
    q: tuple[Axis, ...]
    batch: tuple[Axis, ...] = ()
    reduced: str | None = None
    walk: bool = False


@dataclass(frozen=True)
class Layout:
    """What is taken for granted of strides.

    merged: along q what is in a tensor at all runs together, so that one stride does, and 32 bits count it. pitched:
    every axis of p has a stride of its own, and each dimension of "..."; else they run together as well. dense: rows
    have no gaps. aligned: they begin at 16 bytes and are vectors of 16 bytes to the end. across: memory runs along what
    is kept where the kernel is written to be read along what is reduced, or the other way round.

    What is not merged has a stride for every axis, and indices of 64 bits."""

    name: str
    merged: bool = True
    dense: bool = False
    aligned: bool = False
    pitched: bool = False
    across: bool = False

    @property
    def wide(self) -> bool:
        return not self.merged


ALIGNED = Layout("aligned", dense=True, aligned=True)
ROWS = Layout("rows", dense=True)
PITCHED = Layout("pitched", dense=True, aligned=True, pitched=True)
GATHERED = Layout("gathered", pitched=True)
COLUMNS = Layout("columns", pitched=True, across=True)
STRIDED = Layout("strided", merged=False)
LAYOUTS = (ALIGNED, ROWS, PITCHED, GATHERED, COLUMNS, STRIDED)


@dataclass(frozen=True)
class Access:
    """The source of an address. elementwise: put together from every dimension's index. Else base + p + q * q_step;
    q_step: empty for 1, None where q has no part in it. axes: those of p that `p` is put together from; none where it
    counts p itself. realigned: p is that of the 16 bytes in which the row begins, and q counts from there."""

    elementwise: bool
    base: tuple[str, ...] = ()
    p: str = ""
    axes: frozenset[str] = frozenset()
    q_step: str | None = None
    strides: tuple[Callable[[str], str], ...] = field(default=())
    realigned: bool = False


def coefficients(v: Value, axes: Sequence[Axis]) -> list[dict[int, sympy.Expr]] | None:
    """The factors of dimensions, by axis, where every index of the access is linear in all axes; else None."""
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


@dataclass(frozen=True)
class LinearParts:
    """A linear index as ``rest + p * row + q``. rows: whether p is in it as a whole."""

    rest: sympy.Expr
    rows: bool
    row: sympy.Expr


def linear_parts(kernel: Kernel, tile: Tile, v: Value) -> LinearParts | None:
    """The parts of a random value's index; None where it does not count the tile's q one by one."""
    (expr,) = v.index
    if values_in(expr) or not tile.q:
        return None
    row = ix.product([a.size for a in tile.q])
    counted = _counted(expr, tile.q, sympy.Integer(1))
    if counted is None:
        return None
    rest = counted
    by_rows = _counted(rest, tile.p, row) if tile.p else None
    return LinearParts(rest, False, row) if by_rows is None else LinearParts(by_rows, True, row)


def _counted(expr: sympy.Expr, axes: Sequence[Axis], step: sympy.Expr) -> sympy.Expr | None:
    """`expr` less these axes, where they stand in it as one dimension that is counted by `step`."""
    left = expr
    for a in reversed(axes):
        left = sympy.expand(left - a.symbol * step)
        step = step * a.size
    return None if left.free_symbols & {a.symbol for a in axes} else left


def laid_out(kernel: Kernel, layout: Layout) -> tuple[Kernel, Tile]:
    """The kernel as a layout has it, and its tile."""
    if layout.pitched:
        kernel = kernel.opened
    tile = choose_tile(kernel, layout)
    return kernel, _turned(kernel, tile) if layout.across else tile


def is_for(kernel: Kernel, layout: Layout) -> bool:
    """Whether a layout says anything of the kernel that those before it do not."""
    opened, tile = laid_out(kernel, layout)
    if layout.across:
        return tile != choose_tile(opened, layout)
    if layout.pitched and layout.dense:
        return len(tile.p) > 1
    return not layout.pitched or bool(tile.p)


def _turned(kernel: Kernel, tile: Tile) -> Tile:
    """Read along the other dimension; itself where nothing of it can be."""
    is_sorted = any(v.op == "sort" for v in kernel.values)
    if tile.walk or is_sorted or tile.reduced is None or not kernel.kept:
        return tile
    if tile.reduced == "q":
        return Tile(kernel.reduced, kernel.kept[-1:], kernel.kept[:-1], "p")
    return Tile(kernel.kept, kernel.reduced, (), "q")


def choose_tile(kernel: Kernel, layout: Layout) -> Tile:
    """The reduced axes are one dimension; of the kept ones those that every access has entirely or not at all run
    along memory together."""
    if not kernel.reduced:
        q = _suffix(kernel, kernel.kept, layout)
        return Tile(tuple(a for a in kernel.kept if a not in q), q)
    if kernel.walk:
        return Tile(kernel.kept, kernel.reduced, (kernel.walk,), "q", True)
    if interleaved(kernel, layout):
        return Tile(kernel.reduced, kernel.kept, (), "p")
    if not kernel.kept or _is_inner(kernel) or any(v.op == "sort" for v in kernel.values):
        return Tile(kernel.kept, kernel.reduced, (), "q")
    q = _suffix(kernel, kernel.kept, layout)
    return Tile(kernel.reduced, q, tuple(a for a in kernel.kept if a not in q), "p")


def interleaved(kernel: Kernel, layout: Layout) -> Steps | None:
    """The steps of a program that has columns of interleaved parts: all that is kept runs together along q."""
    return steps_of(kernel) if layout.aligned and not layout.pitched else None


def _suffix(kernel: Kernel, axes: tuple[Axis, ...], layout: Layout) -> tuple[Axis, ...]:
    """The longest suffix of the axes that every access takes together. Where others have strides of their own it is
    one: places along them are then worked out once a row."""
    count = min(1, len(axes))
    while layout.merged and not layout.pitched and count < len(axes) and _run_together(kernel, axes[-count - 1 :]):
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
    """Whether most of what is read along the reduced axes has them last, where memory is contiguous. Of what varies
    over the most axes: what has fewer is small beside it."""
    reduced = {a.name for a in kernel.reduced}
    kept = {a.name for a in kernel.kept}
    scores: dict[int, int] = {}
    for v in kernel.accesses:
        names = [{s.name for s in e.free_symbols} & (reduced | kept) for e in v.index]
        touched = set().union(*names) if names else set()
        if not (touched & reduced and touched & kept):
            continue
        last = next(n for n in reversed(names) if n)
        scores[len(touched)] = scores.get(len(touched), 0) + (1 if last & reduced else -1)
    return scores[max(scores)] >= 0 if scores else True
