"""Sums over rows in the launch that has the rows anyway: the gradients of a norm's weight and bias.

A program walks through several rows, one block after another. What it adds up over them it keeps in registers, and
leaves in scratch memory, [programs, …], when it is done; a second launch adds these up. So everything is read once,
where a launch of its own would read it all again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import sympy

from tk.codegen import index as ix
from tk.codegen import ir
from tk.codegen.lowering.lazy import Fold, Lazy, Reduction, reduction
from tk.codegen.lowering.named import Names
from tk.codegen.tile import ALIGNED, choose_tile


@dataclass(frozen=True)
class Walk:
    """The number of programs that walk: a local of the op. rows: how many there are at most."""

    name: str
    rows: sympy.Expr

    @property
    def symbol(self) -> sympy.Symbol:
        return sympy.Symbol(self.name, integer=True, positive=True)


@dataclass
class Walker:
    """Replaces a graph's sums over rows by sums of what walking programs leave. kernels: the graph's own, of which one
    may have the rows. names: of the op's walks."""

    kernels: Sequence[ir.Kernel]
    names: Names
    walk: Walk | None = None
    known: dict[int, Lazy | None] = field(default_factory=dict)
    own: list[Lazy] = field(default_factory=list)  # made here: not to be replaced again, and kept alive

    def of(self, node: Reduction) -> Lazy | None:
        """What is read in place of `node`; None where it stays as it is."""
        if id(node) not in self.known:
            self.own.append(node)
            self.known[id(node)] = self._walked(node) if self._fits(node) else None
        return self.known[id(node)]

    def _fits(self, node: Reduction) -> bool:
        """A sum over the rows that one launch runs over, each of which is a row that it reduces."""
        assert node.operand is not None
        wide = [d for d, s in enumerate(node.operand.shape) if s != 1]
        rows = [d for d in wide if d in node.dims]
        if node.kind != "sum" or not rows or wide[: len(rows)] != rows or wide == rows:
            return False
        sizes = [[node.operand.shape[d] for d in dims] for dims in (rows, wide[len(rows) :])]
        return any(self._has(k, sizes) for k in self.kernels)

    def _has(self, kernel: ir.Kernel, sizes: Sequence[Sequence[sympy.Expr]]) -> bool:
        axes = (kernel.kept, kernel.reduced)
        if not kernel.kept or not kernel.reduced or choose_tile(kernel, ALIGNED).reduced != "q":
            return False
        return all(len(a) == len(s) and all(ix.same(x.size, y) for x, y in zip(a, s, strict=True))
                   for a, s in zip(axes, sizes, strict=True))  # fmt: skip

    def _walked(self, node: Reduction) -> Lazy:
        assert node.operand is not None
        if self.walk is None:
            rows = ix.product(node.sizes)
            self.walk = Walk(self.names.of("walks", rows), rows)
        partial = Fold((self.walk.symbol, *node.shape), node.dtype, lambda e, i: e.fold(partial, i), node)
        total = reduction("sum", partial, [0], node.dtype)
        self.own += [partial, total]
        self.known[id(total)] = None
        return total
