"""Sorts as source: a row in a block, or blocks of it one by one and then merged in pairs, pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import sympy

from tk.aot.expr import Expr, as_expr, ceil_div
from tk.aot.spec import ITEMSIZE, Arg, Const, Int, Launch, Scratch
from tk.codegen import device, ir, radix

if TYPE_CHECKING:
    from tk.codegen.printing.printer import Printer

TILE = 2048  # elements that one program merges: not more than the shortest run
REGISTERS = 64  # of a thread of `digits`: as many as 32 warps may have
PASSES = 20  # runs of 2048 elements and 20 passes: rows of 2^31


def sorts(kernel: ir.Kernel) -> list[ir.Value]:
    return [v for v in kernel.values if v.op == "sort"]


def sorts_runs(kernel: ir.Kernel) -> bool:
    return any(v.data.runs for v in sorts(kernel))


def is_narrow(kernel: ir.Kernel) -> bool:
    return any(v.data.narrow for v in sorts(kernel))


def by_digits(kernel: ir.Kernel) -> bool:
    return any(v.data.digits for v in sorts(kernel))


def limits(kernel: ir.Kernel) -> list[sympy.Expr]:
    """How much of each row is stored, where that is the first part of what one sort of single numbers gives and nothing
    else needs a whole row: then as much is kept while the row is run through. Else nothing. The numbers are of 64
    bits, or their rows are not long."""
    found: list[sympy.Expr] = []
    if len({v.args for v in sorts(kernel)}) != 1 or any(v.op in ("reduce", "scan") for v in kernel.values):
        return []
    for v in kernel.values:
        if v.op == "store":
            size = _limit(kernel, v)
            if size is None:
                return []
            found.append(size)
    first = sorts(kernel)[0]
    return found if len(first.args) == 1 and (first.dtype == "i64" or first.data.narrow) else []


def _limit(kernel: ir.Kernel, store: ir.Value) -> sympy.Expr | None:
    """What the reduced axis stays below where there is a store."""
    mask = kernel.value(store.args[1]) if len(store.args) == 2 else None
    if mask is None or mask.op != "lt" or kernel.value(mask.args[0]).data != kernel.reduced[0].symbol:
        return None
    size = kernel.value(mask.args[1])
    return sympy.sympify(size.data) if size.op in ("index", "constant") else None


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


def stages(n: int, looped: bool) -> int:
    """Exchanges for each element of a block of n: a bitonic sort's, and in a loop those that merge it with the best."""
    depth = n.bit_length() - 1
    return depth * (depth + 1) // 2 + (depth + 1 if looped else 0)


def passes(n: Expr) -> Expr:
    """How many merges a row of n elements needs."""
    total = as_expr(0)
    for j in range(PASSES):
        total = total + (n > TILE << j)
    return total


def digits(number: int, dtype: str, rows: Expr, n: Expr, half: Expr, block: int, warps: int) -> Launch:
    """The launch that sorts rows of up to `block` elements by digits, into the half of the buffer that merges of as
    long ones would have left them in. Every second bit of a number is below the key (rules/sorts.py)."""
    bits = 8 * ITEMSIZE[dtype]
    args: dict[str, Arg] = {
        "source": Scratch(number, dtype, as_expr(0)), "target": Scratch(number, dtype, passes(n) % 2 * half),
        "n": Int(n, "i32"), "LOW": Const(bits // 2), "HIGH": Const(bits), "BLOCK": Const(block), "TWICE": Const(True),
    }  # fmt: skip
    return Launch(radix.sort_rows, args, (rows, 1, 1), num_warps=warps, num_stages=1, maxnreg=REGISTERS)


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
