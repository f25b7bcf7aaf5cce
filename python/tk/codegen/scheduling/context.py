"""What a launch can read of a problem: sizes, strides, and scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import sympy

from tk.aot.expr import Expr, Tensor, as_expr, ceil_div, maximum, minimum
from tk.aot.spec import ITEMSIZE, Buffer, Op
from tk.codegen import index as ix
from tk.codegen import ir
from tk.codegen.errors import IRError


@dataclass(frozen=True)
class Context:
    """The op's side: its tensors by the buffers' names, the sizes of "...", and letters as locals. read_after: by
    kernel, what those behind it in the plan read."""

    op: Op
    tensors: Mapping[str, Tensor]
    scratch: Mapping[str, int]  # the number of a scratch buffer in the plan
    debug: bool = False
    read_after: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def expr(self, e: sympy.Expr) -> Expr:
        """A size expression in the language of packs."""
        e = sympy.sympify(e)
        if e.is_Integer:
            return as_expr(int(e))
        if e.is_Symbol:
            return self.op.int(e.name) if e.name in self.op.ints else self.op.local(e.name)
        kind, args = type(e).__name__, [self.expr(a) for a in e.args]
        if kind in ("FloorDiv", "Mod", "PythonMod"):
            return args[0] // args[1] if kind == "FloorDiv" else args[0] % args[1]
        if kind == "Pow" and e.args[1].is_Integer and 0 < int(e.args[1]) < 5:
            args = [args[0]] * int(e.args[1])
            kind = "Mul"
        fold: Mapping[str, Callable[[Expr, Expr], Expr]] = {
            "Add": lambda a, b: a + b, "Mul": lambda a, b: a * b, "Max": maximum, "Min": minimum,
        }  # fmt: skip
        if kind not in fold:
            raise IRError(f"{e}: no expression for {kind}")
        result = args[0]
        for a in args[1:]:
            result = fold[kind](result, a)
        return result

    def extent(self, axes: Sequence[ir.Axis]) -> Expr:
        """How many points these have together."""
        return self.expr(ix.product([a.size for a in axes]))

    def dims(self, buffer: ir.Buffer, d: int) -> tuple[int, ...]:
        """The dimensions at run time of the `d`-th as traced."""
        if not buffer.leading:
            return (d,)
        return (0, 1, 2) if d == 0 else (d + 2,)

    def stride(self, buffer: ir.Buffer, d: int) -> Expr:
        """The stride of the last dimension that the traced one stands for."""
        if buffer.name in self.scratch:
            return self.expr(ix.product(buffer.sizes[d + 1 :]))
        return self.tensors[buffer.name].stride(self.dims(buffer, d)[-1])

    def step(self, buffer: ir.Buffer, factors: Mapping[int, sympy.Expr]) -> Expr:
        """How many elements lie between neighbours along an axis. factors: of its place in each dimension's index."""
        total = as_expr(0)
        for d, factor in factors.items():
            total = total + self.expr(factor) * self.stride(buffer, d)
        return total


# --- Scratch memory ---


def scratch_buffers(kernels: Sequence[ir.Kernel], context: Context) -> Iterator[Buffer]:
    """One for each name, in the order of `context.scratch`."""
    found = {b.name: b for k in kernels for b in k.buffers if b.kind == "scratch"}
    for name in context.scratch:
        b = found[name]
        elements = context.expr(ix.product(b.sizes))
        yield Buffer(half(elements, b.dtype) * 2 if b.merged else maximum(elements * ITEMSIZE[b.dtype], 16))


def half(elements: Expr, dtype: str) -> Expr:
    """Bytes, so that what comes after begins at an aligned address."""
    return ceil_div(elements * ITEMSIZE[dtype], 256) * 256
