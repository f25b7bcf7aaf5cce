"""Sorts as source: a row in a block, or the first few of a row that is run through in blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tk.codegen import ir
from tk.codegen.along import sorts

if TYPE_CHECKING:
    from tk.codegen.printing.printer import Printer


def print_loop(p: Printer) -> None:
    """Keeps as many of the smallest as a block holds: of those and of a sorted block, the smaller one of each pair."""
    v = sorts(p.kernel)[0]
    n, operand = p.reduced_dim, p.kernel.value(v.args[0])
    assert n is not None
    along = {w.number for w in p.kernel.values if n in p.dims_of(w)}
    for w in p.kernel.values:
        if w.number not in along:
            p._value(w)
    shape, largest = p.shape_of({*p.dims_of(v), n}), _largest(operand.dtype)
    p.out(f"best = tl.zeros({shape}, {'tl.int32' if operand.dtype == 'i32' else 'tl.int64'}) + {largest}")
    p.out(f"for start in range(0, {n}_size, BLOCK_{n.upper()}):")
    p.out.depth += 1
    p._range(n, "start")
    for number in sorted(p._needed_in_loop([v], along)):
        p._value(p.kernel.value(number))
    p.out(f"block = tl.broadcast_to(tl.where({n}_mask, {p.name(operand.number)}, {largest}), {shape})")
    p.out("best = tl.bitonic_merge(tl.minimum(best, tl.sort(block, descending=True)))")
    p.out.depth -= 1
    p._range(n, "0")
    p.out(f"v{v.number} = best")
    stores = [w for w in p.kernel.values if w.op == "store"]
    for number in sorted(p._needed_in_loop(stores, along, stop=v.number) - {v.number}):
        p._value(p.kernel.value(number))


def _largest(dtype: str) -> str:
    """Sorts last: no key and row make it."""
    return f"tl.full((), {2 ** (31 if dtype == 'i32' else 63) - 1}, tl.int{32 if dtype == 'i32' else 64})"


def print_sort(p: Printer, v: ir.Value) -> None:
    """Past the row's end stands the largest number, which sorts last."""
    if v.data.digits:
        p.out(f"v{v.number} = {p.name(v.args[0])}")
        return
    together = [w for w in sorts(p.kernel) if w.args == v.args]
    if v is not together[0]:
        return
    assert p.reduced_dim is not None
    shape = p.shape_of({*p.dims_of(v), p.reduced_dim})
    operands = []
    for i, a in enumerate(v.args):
        masked = f"tl.where({p.reduced_dim}_mask, {p.name(a)}, {_largest(p.kernel.value(a).dtype)})"
        operands.append(f"k{v.number}_{i}")
        p.out(f"{operands[-1]} = tl.broadcast_to({masked}, {shape})")
    names = [f"v{w.number}" for w in sorted(together, key=lambda w: w.data.part)]
    if len(operands) == 1:
        p.out(f"{names[0]} = tl.sort({operands[0]})")
        return
    results = [next((f"v{w.number}" for w in together if w.data.part == i), f"unused{i}") for i in range(2)]
    p.out(f"{', '.join(results)} = device.sort_pairs({', '.join(operands)})")
