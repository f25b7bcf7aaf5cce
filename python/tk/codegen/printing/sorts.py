"""Sorts as source: a row in a block, or the first few of a row that is run through in blocks."""

from __future__ import annotations

from tk.codegen import ir
from tk.codegen.along import sorts
from tk.codegen.printing.body import Body
from tk.codegen.printing.loops import needed, roots_of


def print_loop(body: Body) -> None:
    """Keeps as many of the smallest as a block holds: of those and of a sorted block, the smaller one of each pair."""
    v = sorts(body.kernel)[0]
    n, operand = body.reduced_dim, body.kernel.value(v.args[0])
    assert n is not None
    varying = {w.number for w in body.kernel.values if n in body.dims_of(w)}
    for w in body.kernel.values:
        if w.number not in varying:
            body.value(w)
    shape, largest = body.shape_of({*body.dims_of(v), n}), _largest(operand.dtype)
    body.out(f"best = tl.zeros({shape}, {'tl.int32' if operand.dtype == 'i32' else 'tl.int64'}) + {largest}")
    with body.out.block(f"for start in range(0, {n}_size, {body.block(n)}):"):
        body.places(n, "start")
        for number in sorted(needed(body.kernel, v.args, varying)):
            body.value(body.kernel.value(number))
        inside = f"tl.where({body.reduced_mask}, {body.name(operand.number)}, {largest})"
        body.out(f"block = tl.broadcast_to({inside}, {shape})")
        body.out("best = tl.bitonic_merge(tl.minimum(best, tl.sort(block, descending=True)))")
    body.places(n, "0")
    body.out(f"v{v.number} = best")
    stores = [w for w in body.kernel.values if w.op == "store"]
    for number in sorted(needed(body.kernel, roots_of(body.kernel, stores, {}), varying, stop=v.number) - {v.number}):
        body.value(body.kernel.value(number))


def _largest(dtype: str) -> str:
    """Sorts last: no key and row make it."""
    return f"tl.full((), {2 ** (31 if dtype == 'i32' else 63) - 1}, tl.int{32 if dtype == 'i32' else 64})"


def print_sort(body: Body, v: ir.Value) -> None:
    """Past the row's end stands the largest number, which sorts last."""
    if v.data.digits or v.data.radix:
        body.out(f"v{v.number} = {body.name(v.args[0])}")
        return
    together = [w for w in sorts(body.kernel) if w.args == v.args]
    if v is not together[0]:
        return
    assert body.reduced_dim is not None
    shape = body.shape_of({*body.dims_of(v), body.reduced_dim})
    operands = []
    for i, a in enumerate(v.args):
        masked = f"tl.where({body.reduced_mask}, {body.name(a)}, {_largest(body.kernel.value(a).dtype)})"
        operands.append(f"k{v.number}_{i}")
        body.out(f"{operands[-1]} = tl.broadcast_to({masked}, {shape})")
    names = [f"v{w.number}" for w in sorted(together, key=lambda w: w.data.part)]
    if len(operands) == 1:
        body.out(f"{names[0]} = tl.sort({operands[0]})")
        return
    results = [next((f"v{w.number}" for w in together if w.data.part == i), f"unused{i}") for i in range(2)]
    body.out(f"{', '.join(results)} = device.sort_pairs({', '.join(operands)})")
