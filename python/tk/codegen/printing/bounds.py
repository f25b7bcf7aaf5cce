"""Indices that are themselves read, as source: each is held against its dimension before it is used, as ATen asserts.

One that is out of bounds ends the kernel with a trap, and its lane touches no memory, so that nothing foreign is read
or written before the trap takes effect. What is known to lie within bounds — places that a kernel counts itself,
positions of an extreme — is not tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import sympy

from tk.codegen import index as ix
from tk.codegen.ir import INTS, PLACES, Kernel, Value, value_symbol, values_in
from tk.codegen.printing import debug


def tested(kernel: Kernel, v: Value) -> list[int]:
    """The dimensions of an access whose index must be tested."""
    sizes = kernel.buffer(v.buffer).sizes
    return [d for d, expr in enumerate(v.index) if values_in(expr) and not _is_within(kernel, expr, sizes[d])]


def name(v: Value) -> str:
    """The name of the mask of an access's lanes whose indices are within bounds."""
    return f"inside{v.number}"


def before(kernel: Kernel, v: Value, text: Callable[[sympy.Expr], str], asked: str, debug_op: str) -> Iterator[str]:
    """Lines before a load, store or search: which lanes are within bounds, and what ends the kernel where one is not;
    in the debug variant an assertion that names the op and the tensor.

    text: of an index expression. asked: the lanes whose indices are used, empty for all. debug_op: the op's name, in
    the debug variant."""
    dims = tested(kernel, v)
    if not dims:
        return
    buffer = kernel.buffer(v.buffer)
    held = []
    for d in dims:
        index, size = text(v.index[d]), text(buffer.sizes[d])
        held.append(f"device.is_within({index}, {size})")
    yield f"{name(v)} = {' & '.join(held)}"
    if not debug_op:
        yield f"device.trap_where({f'{asked} & ' if asked else ''}({name(v)} == 0))"
        return
    for d, holds in zip(dims, held, strict=True):
        yield debug.assertion(debug_op, buffer, d - len(v.index), v.op == "store", holds, asked)


def _is_within(kernel: Kernel, expr: sympy.Expr, size: sympy.Expr) -> bool:
    """Whether 0 <= expr < size follows from how the index is made."""
    values = values_in(expr)
    if len(values) != 1 or expr != value_symbol(values[0]):
        return False
    v = kernel.value(values[0])
    if v.op == "index":
        return ix.is_below(v.data, size, {a.symbol: a.size for a in kernel.axes})
    if v.op == "constant":
        return bool(size.is_Integer) and 0 <= v.data < size
    if v.op == "cast":
        return kernel.value(v.args[0]).dtype in INTS and _is_within(kernel, value_symbol(v.args[0]), size)
    if v.op == "where":
        return all(_is_within(kernel, value_symbol(a), size) for a in v.args[1:])
    is_position = v.op == "reduce" and v.data in PLACES
    is_position |= v.op == "scan" and v.data.kind in ("max", "min") and v.data.part == 1
    return is_position and ix.same(ix.product([a.size for a in kernel.reduced]), size)
