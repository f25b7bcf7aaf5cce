"""Functions of lists of tensors: one place, lowered, and what goes over all places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tk.codegen import ir, passes
from tk.codegen.errors import TraceError, where
from tk.codegen.lowering.lazy import Lazy, Reduction, reduction, stored
from tk.codegen.lowering.lower import lower
from tk.codegen.lowering.runs import by_sums
from tk.codegen.tracing.arguments import letter
from tk.codegen.tracing.lists import PLACES
from tk.codegen.tracing.trace import Trace


@dataclass(frozen=True)
class ListGraph:
    """One choice of dtypes and flags, lowered."""

    trace: Trace
    kernels: tuple[ir.Kernel, ...]
    per_place: frozenset[str]  # the buffers that hold a value for each place

    @property
    def label(self) -> str:
        return self.trace.label


def is_of(kernel: ir.Kernel, size: str) -> bool:
    """Whether it reduces what has this size."""
    return any(a.size == letter(size) for a in kernel.reduced)


def lowered_places(fn: Callable[..., Any], trace: Trace, name: str, lists: frozenset[str]) -> ListGraph:
    try:
        kernels = passes.run_all(lower(trace, name, _EachStored()))
    except TraceError as error:
        raise TraceError(f"{where(fn)}: {error}") from None
    for kernel in kernels:
        reads = [v for v in kernel.values if v.op in ("load", "store")]
        own = [str(a.symbol) for a in kernel.axes]
        at_own_place = all([str(i) for i in v.index] in ([], own) and v.data is None for v in reads)
        if any(v.op in ("scan", "sort", "search", "random") for v in kernel.values) or not at_own_place or len(own) > 1:
            raise TraceError(
                f"{where(fn)}: a function of lists works element by element, or reduces whole tensors and what "
                "they come to; this one reads a tensor at other places than it writes, or along it"
            )
    per_place = _per_place(kernels, lists)
    return ListGraph(trace, tuple(part for k in kernels for part in _apart(k, per_place)), per_place)


def _apart(kernel: ir.Kernel, per_place: frozenset[str]) -> list[ir.Kernel]:
    """What each place has is not stored by the one program that goes over all places."""
    if not is_of(kernel, PLACES):
        return [kernel]
    of_place = [v.number for v in kernel.values if v.op == "store" and v.buffer in per_place]
    others = [v.number for v in kernel.values if v.op == "store" and v.buffer not in per_place]
    if not of_place or not others:
        return [kernel]
    return [_with(kernel, others, kernel.name, kernel.axes), _with(kernel, of_place, f"{kernel.name}_each", ())]


def _with(kernel: ir.Kernel, stores: Sequence[int], name: str, axes: tuple[ir.Axis, ...]) -> ir.Kernel:
    """The kernel with these of its stores alone, and what they store."""
    needed = set(stores)
    for v in reversed(kernel.values):
        if v.number in needed:
            needed.update(v.args)
    number = {old: new for new, old in enumerate(sorted(needed))}
    values = tuple(replace(kernel.value(old), number=new, args=tuple(number[a] for a in kernel.value(old).args))
                   for old, new in number.items())  # fmt: skip
    used = {v.buffer for v in values}
    return ir.verify(ir.Kernel(name, axes, tuple(b for b in kernel.buffers if b.name in used), values))


def _per_place(kernels: Sequence[ir.Kernel], lists: frozenset[str]) -> frozenset[str]:
    """The buffers with a value for each place: 0-d tensors of lists, and what is worked out of any list's but by going
    over all of them."""
    found = {b.name for k in kernels for b in k.buffers if b.name in lists and not b.sizes}
    for kernel in kernels:
        of_place: set[int] = set()
        for v in kernel.values:
            is_read = v.op == "load" and (v.buffer in lists or v.buffer in found)
            goes_over = v.op == "reduce" and is_of(kernel, PLACES)
            if (is_read or of_place & set(v.args)) and not goes_over:
                of_place.add(v.number)
            sizes = kernel.buffer(v.buffer).sizes if v.buffer else ()
            if v.op == "store" and sizes in ((), (letter(PLACES),)) and v.number in of_place:
                found.add(v.buffer)
            if sizes == (letter(PLACES),):
                found.add(v.buffer)
    return frozenset(found)


class _EachStored:
    """Every reduction is left in memory, so that a launch has one pass over the elements. As a splitter of the
    lowering: means and variances are sums."""

    def __init__(self) -> None:
        self.known: dict[int, Lazy] = {}
        self.own: list[Reduction] = []

    def of(self, node: Reduction) -> Lazy | None:
        if any(node is x for x in self.own):
            return None
        if id(node) not in self.known:
            self.known[id(node)] = self._found(node)
        return self.known[id(node)]

    def _found(self, node: Reduction) -> Lazy:
        if node.kind in ("mean", "m2"):
            return by_sums(node, lambda x: self._stored(x, node.dims, node.dtype, "sum"))
        if node.kind not in ("sum", "prod", "max", "min", "any", "all", "xor"):
            raise TraceError(f"{node.kind} of the tensors of a list: there are sums, products, extremes, any and all")
        assert node.operand is not None
        return self._stored(node.operand, node.dims, node.dtype, node.kind)

    def _stored(self, operand: Lazy, dims: Sequence[int], dtype: str, kind: str) -> Lazy:
        made = reduction(kind, operand, dims, dtype)
        self.own.append(made)
        return stored(made)
