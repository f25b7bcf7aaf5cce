"""Sorts as source: a row in a block, or blocks of it one by one and then merged in pairs, pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tk.aot.expr import Expr, as_expr, ceil_div
from tk.aot.spec import Arg, Const, Int, Launch, Scratch
from tk.codegen import device, ir

if TYPE_CHECKING:
    from tk.codegen.print import Printer

TILE = 2048  # elements that one program merges: not more than the shortest run
PASSES = 20  # runs of 2048 elements and 20 passes: rows of 2^31


def sorts(kernel: ir.Kernel) -> list[ir.Value]:
    return [v for v in kernel.values if v.op == "sort"]


def sorts_runs(kernel: ir.Kernel) -> bool:
    return any(v.data.runs for v in sorts(kernel))


def print_sort(p: Printer, v: ir.Value) -> None:
    """Past the row's end stands the largest number, which sorts last."""
    from tk.codegen.print import TL_DTYPES

    together = [w for w in sorts(p.kernel) if w.args == v.args]
    if v is not together[0]:
        return
    assert p.reduced_dim is not None
    shape = p.shape_of({*p.dims_of(v), p.reduced_dim})
    operands = []
    for i, a in enumerate(v.args):
        largest = 2 ** (31 if p.kernel.value(a).dtype == "i32" else 63) - 1
        dtype = TL_DTYPES[p.kernel.value(a).dtype]
        masked = f"tl.where({p.reduced_dim}_mask, {p.name(a)}, tl.full((), {largest}, {dtype}))"
        operands.append(f"k{v.number}_{i}")
        p.out(f"{operands[-1]} = tl.broadcast_to({masked}, {shape})")
    names = [f"v{w.number}" for w in sorted(together, key=lambda w: w.data.part)]
    if len(operands) == 1:
        p.out(f"{names[0]} = tl.sort({operands[0]})")
        return
    results = [next((f"v{w.number}" for w in together if w.data.part == i), f"unused{i}") for i in range(2)]
    p.out(f"{', '.join(results)} = device.sort_pairs({', '.join(operands)})")


def passes(n: Expr) -> Expr:
    """How many merges a row of n elements needs."""
    total = as_expr(0)
    for j in range(PASSES):
        total = total + (n > TILE << j)
    return total


def merges(buffers: Mapping[int, tuple[int, str]], rows: Expr, n: Expr, half: Callable[[str], Expr]) -> list[Launch]:
    """The launches that merge runs of TILE elements. buffers: of each operand its scratch buffer and dtype; a buffer is
    twice as large as what is sorted (half: bytes, of a dtype), and each pass goes from one half to the other."""
    found = []
    for j in range(PASSES):
        args: dict[str, Arg] = {}
        for i, (number, dtype) in buffers.items():
            at = [as_expr(0), half(dtype)]
            args[f"source_{i}"] = Scratch(number, dtype, at[j % 2])
            args[f"target_{i}"] = Scratch(number, dtype, at[(j + 1) % 2])
        args |= {"n": Int(n, "i32"), "run": Int(TILE << j, "i64"), "TILE": Const(TILE)}
        fn = device.merge_pairs if len(buffers) == 2 else device.merge
        found.append(Launch(fn, args, (rows * ceil_div(n, TILE), 1, 1), num_warps=4, num_stages=1, when=n > TILE << j))
    return found
