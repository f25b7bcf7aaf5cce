"""Functions over lists of tensors: one launch for all of them, each tensor of its own size.

The function is traced with lists of one tensor, and must do to every place of its lists the same. So what is lowered is
a function of the tensors of a place. Its kernels find their place in a table in memory (csrc/ops/lists.h): a program
has a chunk of one place's elements. What has one value a place (0-d tensors, such as a step, and what a tensor is
reduced to) is worked out by a lane for each place, in a launch of its own.

A tensor is reduced by two launches: what each chunk comes to, in scratch memory, and then, by a program for each place,
what its chunks do, in their order. ``torch.stack`` of a number for each tensor goes over the places
(``tk_trace::over_places``): a vector in scratch memory, as long as the lists, which one program reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tk.aot.expr import Tensor as OpTensor
from tk.aot.expr import const, maximum, tensors
from tk.aot.spec import (
    DTYPES,
    ITEMSIZE,
    Buffer,
    Config,
    Constraint,
    Family,
    Kernel,
    Launch,
    Op,
    Output,
    Param,
    Plan,
    Point,
    Selector,
    require,
)
from tk.codegen import ir
from tk.codegen.choice import graph_number
from tk.codegen.comparisons import uncontracted
from tk.codegen.errors import TraceError, where
from tk.codegen.ir import IR_DTYPES
from tk.codegen.lowering.lists import ListGraph, is_of, lowered_places
from tk.codegen.lowering.rules import RULED
from tk.codegen.records import by_graph, dtype_check, meta_text
from tk.codegen.scheduling.lists import BLOCK, CHUNK, ListLaunch, parts_of
from tk.codegen.tracing.arguments import LEADING
from tk.codegen.tracing.lists import PLACES, trace_places
from tk.codegen.tracing.trace import Trace
from tk.generated.signature import Signature, TensorSpec

ALIGNED, ANY = "aligned", "any"
EACH, PLACE, ALL = "each", "place", "all"
ARCHITECTURES = (80, 90)
_CONFIG = Config("chunks", {"block": BLOCK, "chunk": CHUNK, "num_warps": 4})


@dataclass(frozen=True)
class GeneratedLists:
    """A traced function of lists under a name."""

    name: str
    signature: Signature  # as declared
    graphs: tuple[ListGraph, ...]
    doc: str = ""
    debug: bool = False

    @property
    def families(self) -> list[Family]:
        return [self.family]

    @property
    def first(self) -> Trace:
        return self.graphs[0].trace

    # --- The op ---

    @cached_property
    def op(self) -> Op:
        named = tensors(*self.signature.tensors, *(f"out{i}" for i in range(len(self.first.new))))
        by_name = {t.name: t for t in named}
        first = by_name[self.lists[0]]
        ints = tuple(n for n, s in self.signature.numbers.items() if s.kind in ("int", "bool"))
        floats = tuple(n for n, s in self.signature.numbers.items() if s.kind == "float")
        traces = [g.trace for g in self.graphs]
        locals_ = {
            "graph": graph_number(traces, self.signature, by_name, ints),
            "places": first.size(0),
            "chunks": first.size(1),
        }
        bare = Op(self.name, named, ints, floats, locals_, {}, ("places", "chunks"))
        return replace(
            bare,
            selectors={"graph": Selector(bare.local("graph"), len(self.graphs))},
            outputs=self._outputs(bare),
            params=self._params(),
            checks=self._checks(by_name),
            # The graphs are of the tensors of one place. DTensor takes no lists of tensors.
            meta=meta_text(self.doc, self.signature, traces, [[]] * len(traces), backward=None),
        )

    @property
    def lists(self) -> tuple[str, ...]:
        return tuple(name for name, spec in self.signature.tensors.items() if spec.is_list)

    @property
    def columns(self) -> tuple[str, ...]:
        """The table's columns: the lists, those of the results last."""
        return (*self.lists, *(f"out{i}" for i, kind in enumerate(self.results) if kind != ALL))

    @property
    def results(self) -> tuple[str, ...]:
        """What each result is: a list of tensors as large as those given (EACH), one of a number for each (PLACE), or
        one tensor (ALL)."""
        per_place = self.graphs[0].per_place
        return tuple(
            EACH if node.meta["val"].dim() else PLACE if f"out{i}" in per_place else ALL
            for i, node in enumerate(self.first.new)
        )

    def _outputs(self, bare: Op) -> tuple[Output, ...]:
        """A list follows the first list of tensors that have sizes (leading). Without sizes of its own it is as large
        as these; one of numbers has the size 0."""
        like = next((i for i, s in enumerate(self.signature.tensors.values()) if s.is_list and s.leading),
                    next(i for i, s in enumerate(self.signature.tensors.values()) if s.is_list))  # fmt: skip
        sizes = {EACH: ((), (), like), PLACE: ((0,), (1,), like), ALL: ((), (), None)}
        found = []
        for i, kind in enumerate(self.results):
            dtypes = [DTYPES[IR_DTYPES[g.trace.new[i].meta["val"].dtype]] for g in self.graphs]
            found.append(Output(by_graph(bare, dtypes), *sizes[kind]))
        return tuple(found)

    def _params(self) -> tuple[Param, ...]:
        return tuple(
            Param(name, "tensors" if spec.is_list else "tensor", spec.leading, 0, name in self.first.mutated)
            if isinstance(spec, TensorSpec)
            else Param(name, spec.kind, default=spec.default)
            for name, spec in self.signature.params.items()
        )

    def _checks(self, by_name: Mapping[str, OpTensor]) -> tuple[Constraint, ...]:
        owner: dict[str, str] = {}
        return tuple(dtype_check(self.signature, name, owner, by_name) for name in self.signature.tensors)

    # --- The kernels ---

    def plan(self, graph: ListGraph, layout: str) -> Plan:
        scratch = {b.name: b for k in graph.kernels for b in k.buffers if b.kind == "scratch"}
        partial = [v for k in graph.kernels if is_of(k, LEADING) for v in k.values if v.op == "reduce"]
        names = [*scratch, *(f"partial{i}" for i in range(len(partial)))]
        made: list[Launch] = []
        parts = iter(names[len(scratch) :])
        for kernel in graph.kernels:
            own = list(parts_of(kernel, parts))
            made += self._launch(kernel, graph, layout, names, own).launches()
        made = list(map(uncontracted, made))
        sized = [t for t, (name, spec) in zip(self.op.tensors, self.signature.tensors.items(), strict=False)
                 if spec.is_list and spec.leading]  # fmt: skip
        aligned = [require(t.stride(0) == 16, f"tensors of {t.name} on 16 bytes") for t in sized if layout == ALIGNED]
        table = next(t for t in self.op.tensors if t.name == self.lists[0])
        itemsize = sum(ITEMSIZE[b.dtype] for k in graph.kernels for b in k.buffers)
        cost = self.op.local("chunks") * (CHUNK * itemsize * (16 if layout == ALIGNED else 24)) // 64
        sizes = [self.op.local(PLACES) * ITEMSIZE[b.dtype] for b in scratch.values()]
        sizes += [self.op.local("chunks") * max(ITEMSIZE[v.dtype], 4) for v in partial]
        return Plan(
            (*aligned, require(table.alignment >= 16, "a table on 16 bytes")),
            {"graph": (self.graphs.index(graph),)},
            tuple(made),
            maximum(cost, const(1)) + 4_000_000 * len(made),
            buffers=tuple(Buffer(maximum(size, 16)) for size in sizes),
            general=layout != ALIGNED,
        )

    def _launch(
        self, kernel: ir.Kernel, graph: ListGraph, layout: str, scratch: Sequence[str], partial: Sequence[str]
    ) -> ListLaunch:
        return ListLaunch(
            kernel, self.op, self.lists, self.columns, graph.per_place, layout == ALIGNED, scratch, partial, self.debug
        )

    @cached_property
    def family(self) -> Family:
        by_label = {g.label: g for g in self.graphs}

        def plan(point: Point) -> Plan:
            return self.plan(by_label[point.graph], point.layout)

        axes = {"graph": tuple(by_label), "layout": (ALIGNED, ANY)}
        kernel = Kernel(self.name, self.op, axes, dict.fromkeys(ARCHITECTURES, (_CONFIG,)), plan)

        def sample(kernel: Kernel, point: Point) -> bool:
            return by_label[point.graph] is self.graphs[0] or point.layout == ANY

        def portable(kernel: Kernel, point: Point) -> bool:
            return bool(point.layout == ANY)

        return Family(self.op, (kernel,), sample, portable=portable)


# --- From a function ---


def generate_lists(
    fn: Callable[..., Any], signature: Signature, name: str, grad: bool, debug: bool = False
) -> GeneratedLists:
    """Raises TraceError for what cannot be generated. debug: the variant that reports what is not finite; there is no
    index to check, since every tensor is read and written at one place."""
    if grad:
        raise TraceError(f"{where(fn)}: a function of lists has no gradient; leave out grad=True")
    traces = trace_places(fn, signature, RULED)
    lists = frozenset(n for n, s in signature.tensors.items() if s.is_list)
    if len({tuple(t.mutated) for t in traces}) > 1:
        raise TraceError(f"{where(fn)}: what is changed in place differs between dtypes or flags")
    if shared := [n for n in traces[0].mutated if n not in lists]:
        raise TraceError(
            f"{where(fn)}: {shared[0]}, which all places of the lists share, is changed: return it instead"
        )
    graphs = tuple(lowered_places(fn, t, name, lists) for t in traces)
    return GeneratedLists(name, signature, graphs, (fn.__doc__ or "").strip(), debug)
