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

import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from tk.aot.expr import Expr, as_expr, ceil_div, const, maximum, select, tensors
from tk.aot.expr import Tensor as OpTensor
from tk.aot.spec import (
    DTYPES,
    ITEMSIZE,
    Arg,
    Buffer,
    Config,
    Constraint,
    Family,
    Int,
    Kernel,
    Launch,
    Op,
    Output,
    Param,
    Plan,
    Point,
    Pointer,
    Scratch,
    Selector,
    require,
)
from tk.codegen import comparisons, ir, passes, source
from tk.codegen import index as ix
from tk.codegen.choice import dtype_number, graph_number
from tk.codegen.errors import TraceError, where
from tk.codegen.ir import IR_DTYPES
from tk.codegen.lowering.lazy import Emitter, Index, Lazy, Reduction, reduction, stored
from tk.codegen.lowering.lower import lower
from tk.codegen.lowering.rules import RULED
from tk.codegen.printing import debug as debug_variant
from tk.codegen.printing.body import Body
from tk.codegen.printing.scalars import COMBINE, TL_DTYPES, identity, literal
from tk.codegen.tile import STRIDED, Access, Tile
from tk.codegen.tracing.arguments import LEADING, letter
from tk.codegen.tracing.trace import Trace, trace_all
from tk.generated.lists import evaluate
from tk.generated.signature import DTYPES as TORCH_DTYPES
from tk.generated.signature import Signature, TensorSpec

CHUNK = 4096  # elements that a program has: csrc/ops/lists.h
BLOCK = 1024
LANES = 256  # places of a program that has one value of each
ALIGNED, ANY = "aligned", "any"
EACH, PLACE, ALL = "each", "place", "all"
ARCHITECTURES = (80, 90)
_CONFIG = Config("chunks", {"block": BLOCK, "chunk": CHUNK, "num_warps": 4})


PLACES = "places"  # the size of what torch.stack makes of a number for each tensor
_PLACES: ContextVar[Any] = ContextVar("places")

_library = torch.library.Library("tk_trace", "FRAGMENT")
_library.define("over_places(Tensor x) -> Tensor")
torch.library.impl(_library, "over_places", "CompositeExplicitAutograd")(lambda x: x.reshape(1).clone())
torch.library.register_fake("tk_trace::over_places", lambda x: x.new_empty([_PLACES.get()]), lib=_library)


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
            assert node.operand is not None
            x, dtype = node.operand, node.dtype
            mean = self._mean(x, node.dims, dtype)
            if node.kind == "mean":
                return mean
            kept = [d for d in range(len(x.shape)) if d not in node.dims]

            def square(e: Emitter, index: Index) -> int:
                away = e.op("sub", dtype, e.read(x, index), e.read(mean, tuple(index[d] for d in kept)))
                return e.op("mul", dtype, away, away)

            return self._stored(Lazy(x.shape, dtype, square), node.dims, dtype, "sum")
        if node.kind not in ("sum", "prod", "max", "min", "any", "all", "xor"):
            raise TraceError(f"{node.kind} of the tensors of a list: there are sums, products, extremes, any and all")
        assert node.operand is not None
        return self._stored(node.operand, node.dims, node.dtype, node.kind)

    def _stored(self, operand: Lazy, dims: Sequence[int], dtype: str, kind: str) -> Lazy:
        made = reduction(kind, operand, dims, dtype)
        self.own.append(made)
        return stored(made)

    def _mean(self, x: Lazy, dims: Sequence[int], dtype: str) -> Lazy:
        total, count = self._stored(x, dims, dtype, "sum"), ix.product([x.shape[d] for d in dims])
        return Lazy(
            total.shape, dtype, lambda e, i: e.op("div", dtype, e.read(total, i), e.cast(e.index(count), dtype))
        )


@dataclass(frozen=True)
class ListGraph:
    """One choice of dtypes and flags, lowered."""

    trace: Trace
    kernels: tuple[ir.Kernel, ...]
    per_place: frozenset[str]  # the buffers that hold a value for each place

    @property
    def label(self) -> str:
        flags = [f"{'' if on else 'not_'}{name}" for name, on in self.trace.flags.items()]
        return "_".join([*self.trace.dtypes.values(), *flags]) or "only"


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
        locals_ = {
            "graph": graph_number([g.trace for g in self.graphs], self.signature, by_name, ints),
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
            meta=self._meta(),
        )

    @property
    def lists(self) -> tuple[str, ...]:
        return tuple(name for name, spec in self.signature.tensors.items() if spec.is_list)

    @property
    def columns(self) -> tuple[str, ...]:
        """Of the table: the lists, those of the results last."""
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
            dtype = as_expr(dtypes[0])
            for n, value in enumerate(dtypes[1:], 1):
                dtype = select(bare.local("graph") == n, value, dtype) if len(set(dtypes)) > 1 else dtype
            found.append(Output(dtype, *sizes[kind]))
        return tuple(found)

    def _params(self) -> tuple[Param, ...]:
        return tuple(
            Param(name, "tensors" if spec.is_list else "tensor", spec.leading, 0, name in self.first.mutated)
            if isinstance(spec, TensorSpec)
            else Param(name, spec.kind)
            for name, spec in self.signature.params.items()
        )

    def _checks(self, by_name: Mapping[str, OpTensor]) -> tuple[Constraint, ...]:
        found: list[Constraint] = []
        owner: dict[str, str] = {}
        for name, spec in self.signature.tensors.items():
            t = by_name[name]
            if spec.dtype in owner:
                same = t.dtype == by_name[owner[spec.dtype]].dtype
                found.append(require(same, f"{name} must have the dtype of {owner[spec.dtype]}"))
                continue
            allowed = self.signature.variables.get(spec.dtype, (spec.dtype,))
            if spec.dtype in self.signature.variables:
                owner[spec.dtype] = name
            holds = as_expr(0)
            for dtype in allowed:
                holds = holds | (t.dtype == dtype_number(dtype))
            names = " or ".join(str(TORCH_DTYPES[d]).removeprefix("torch.") for d in allowed)
            found.append(require(holds, f"{name} must be of dtype {names}"))
        return tuple(found)

    def _meta(self) -> str:
        """graphs: of the tensors of one place."""
        graphs = [
            dict(dtypes=dict(g.trace.dtypes), flags=dict(g.trace.flags), nodes=g.trace.recorded) for g in self.graphs
        ]
        signature = {name: str(spec) for name, spec in self.signature.params.items()}
        variables = {name: list(dtypes) for name, dtypes in self.signature.variables.items()}
        return json.dumps(
            dict(
                doc=self.doc,
                signature=signature,
                variables=variables,
                returns=self.first.structure,
                graphs=graphs,
                backward=None,
            ),
            sort_keys=True,
        )

    # --- The kernels ---

    def plan(self, graph: ListGraph, layout: str) -> Plan:
        scratch = {b.name: b for k in graph.kernels for b in k.buffers if b.kind == "scratch"}
        partial = [v for k in graph.kernels if is_of(k, LEADING) for v in k.values if v.op == "reduce"]
        names = [*scratch, *(f"partial{i}" for i in range(len(partial)))]
        made: list[Launch] = []
        parts = iter(names[len(scratch) :])
        for kernel in graph.kernels:
            own = list(parts_of(kernel, parts))
            made += ListLaunch(kernel, self, graph, layout == ALIGNED, names, own).launches()
        if comparisons.any_compared(graph.kernels):
            made = list(map(comparisons.uncontracted, made))
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


# --- Launches ---


def is_of(kernel: ir.Kernel, size: str) -> bool:
    """Whether it reduces what has this size."""
    return any(a.size == letter(size) for a in kernel.reduced)


def parts_of(kernel: ir.Kernel, names: Iterator[str]) -> Iterator[str]:
    """Scratch memory for what the chunks come to."""
    if is_of(kernel, LEADING):
        yield from (next(names) for v in kernel.values if v.op == "reduce")


@dataclass
class ListLaunch:
    """A kernel's launches: a program for each chunk of each place; where that reduces, one for each place behind; a
    lane for each place where nothing has a size; or one program for all places, which reduces over them.

    scratch: the names of the plan's buffers. partial: those of the kernel's own for what its chunks come to."""

    kernel: ir.Kernel
    of: GeneratedLists
    graph: ListGraph
    aligned: bool
    scratch: Sequence[str]
    partial: Sequence[str]

    @property
    def op(self) -> Op:
        return self.of.op

    @property
    def reduces(self) -> list[ir.Value]:
        return [v for v in self.kernel.values if v.op == "reduce"]

    @property
    def is_per_place(self) -> bool:
        return not any(a.size == letter(LEADING) for a in self.kernel.axes)

    def launches(self) -> Iterator[Launch]:
        per_chunk = self.op.local("chunks")
        if is_of(self.kernel, PLACES):
            yield self._launch("", self._over_places, as_expr(1))
        elif self.is_per_place:
            yield self._launch("", self._per_place, ceil_div(self.op.local(PLACES), LANES))
        elif self.reduces:
            yield self._launch("_chunks", self._chunk_parts, per_chunk)
            yield self._launch("_places", self._place_parts, self.op.local(PLACES))
        else:
            yield self._launch("", self._per_chunk, per_chunk)

    def _launch(self, suffix: str, body: Callable[[dict[str, Arg]], list[str]], grid: Expr) -> Launch:
        ints: dict[str, Arg] = {}
        lines = body(ints)
        text_of_body = "\n".join(lines)
        numbers = {f"arg_{v.data}": self.op.float(v.data, "fp64") for v in self.kernel.values if v.op == "number"}
        table = next(t for t in self.op.tensors if t.name == self.of.lists[0])
        by_name = {t.name: t for t in self.op.tensors}
        plain: dict[str, Arg] = {}
        for b in self.kernel.buffers:
            if b.name in self.scratch:
                plain[b.name] = Scratch(self.scratch.index(b.name), b.dtype)
            elif b.name not in self.of.columns:
                plain[b.name] = Pointer(by_name[b.name], b.dtype, aligned=False)
        for name, v in zip(self.partial, self.reduces, strict=bool(self.partial)):
            plain[name] = Scratch(self.scratch.index(name), _stored_as(v.dtype))
        args: dict[str, Arg] = {
            "table": Pointer(table, "i64"),
            **numbers,
            "places": Int(self.op.local(PLACES), "i32"),
            **ints,
            **{name: arg for name, arg in plain.items() if re.search(rf"\b{name}\b", text_of_body)},
        }
        name = self.kernel.name + suffix
        params = textwrap.fill(", ".join(args), 110, initial_indent="    ", subsequent_indent="    ")
        head = f"@triton.jit\ndef {name}(\n{params},\n):"
        text = source.module_text(name, "\n".join([head, *lines]) + "\n")
        options = debug_variant.OPTIONS if self.of.debug else {}
        return Launch(source.function(name, text), args, (grid, 1, 1), num_warps=4, num_stages=1, options=options)

    # --- Where things lie ---

    def _address(self, dtype: str) -> str:
        return f".to(tl.pointer_type({TL_DTYPES[dtype]}))"

    def _pointers(self, place: str, mask: str) -> list[str]:
        """Of all buffers, at a place, or at a lane's."""
        return [line for b in self.kernel.buffers for line in self._pointer(b, place, mask)]

    def _pointer(self, b: ir.Buffer, place: str, mask: str) -> list[str]:
        if b.name in self.of.columns:
            at = f"tl.load(table + {2 + self.of.columns.index(b.name)} * places + {place}{mask})"
            is_vector = self.aligned and bool(b.sizes) and not mask and b.name in self.of.lists
            address = f"{at}{self._address(b.dtype)}"
            return [f"ptr_{b.name} = {f'tl.multiple_of({address}, 16)' if is_vector else address}"]
        return [f"ptr_{b.name} = {b.name} + {place}" if b.name in self.graph.per_place else f"ptr_{b.name} = {b.name}"]

    def _find_place(self) -> list[str]:
        """The place is the last that begins at this chunk or before; those without elements begin where the next
        does."""
        return [
            "pid = tl.program_id(0).to(tl.int64)",
            "before = tl.zeros([1024], tl.int32)",
            "for start in range(0, places, 1024):",
            "    lanes = start + tl.arange(0, 1024)",
            "    first = tl.load(table + lanes, mask=lanes < places, other=9223372036854775807)",
            "    before += (first <= pid).to(tl.int32)",
            "place = tl.sum(before, 0) - 1",
            f"begin = (pid - tl.load(table + place)) * {CHUNK}",
            "size = tl.load(table + places + place)",
        ]

    # --- Bodies ---

    def _per_place(self, ints: dict[str, Arg]) -> list[str]:
        out = [
            f"q = tl.program_id(0) * {LANES} + tl.arange(0, {LANES})",
            "q_mask = q < places",
            *self._pointers("q", ", mask=q_mask, other=0"),
        ]
        values = self._values(self.kernel.values, ints, ", mask=q_mask", "", 1, LANES)
        if any(re.search(r"\bsize\b", line) for line in values):
            out.append("size = tl.load(table + places + q, mask=q_mask, other=0)")
        return [*(f"    {line}" for line in out), *values]

    def _per_chunk(self, ints: dict[str, Arg]) -> list[str]:
        """A whole chunk needs no masks, so that its loads are vectors."""
        once = [v for v in self.kernel.values if not v.axes and v.op != "store"]
        each = [v for v in self.kernel.values if v not in once]
        return [
            *(f"    {line}" for line in (*self._find_place(), *self._pointers("place", ""))),
            *self._values(once, ints, "", "", 1, BLOCK),
            *self._blocks(lambda mask: self._values(each, ints, mask, " + q", 3, BLOCK)),
        ]

    def _blocks(self, inside: Callable[[str], list[str]]) -> list[str]:
        loop = f"for start in range(0, {CHUNK}, {BLOCK}):"
        position = f"q = begin + start + tl.arange(0, {BLOCK})"
        return [
            f"    if begin + {CHUNK} <= size:",
            f"        {loop}",
            f"            {position}",
            *inside(""),
            "    else:",
            f"        {loop}",
            f"            {position}",
            "            q_mask = q < size",
            *inside(", mask=q_mask"),
        ]

    def _split(self) -> tuple[list[ir.Value], list[ir.Value], list[ir.Value]]:
        """What is worked out once before, for every element, and of what they come to."""
        behind: set[int] = {v.number for v in self.reduces}
        for v in self.kernel.values:
            if v.op == "store" or behind & set(v.args):
                behind.add(v.number)
        once = [v for v in self.kernel.values if not v.axes and v.number not in behind]
        each = [v for v in self.kernel.values if v.axes]
        after = [v for v in self.kernel.values if v.number in behind and v.op != "reduce"]
        if any(v.axes for v in after):
            raise TraceError("a result for every element of a list, in the launch that reduces it")
        return once, each, after

    def _accumulate(self, mask: str, depth: int) -> list[str]:
        lines = []
        for v in self.reduces:
            operand, acc = self.kernel.value(v.args[0]), f"acc{v.number}"
            x = _literal_or_name(operand)
            step = f"{acc} + {x}" if v.data == "sum" else f"device.{COMBINE[v.data]}({acc}, {x})"
            lines.append(f"{acc} = tl.where(q_mask, {step}, {acc})" if mask else f"{acc} = {step}")
        return ["    " * depth + line for line in lines]

    def _start(self, lanes: int) -> list[str]:
        return [
            f"acc{v.number} = tl.full([{lanes}], {identity(v.data, self._reduced_dtype(v))}, "
            f"{TL_DTYPES[self._reduced_dtype(v)]})"
            for v in self.reduces
        ]

    def _reduced_dtype(self, v: ir.Value) -> str:
        return self.kernel.value(v.args[0]).dtype

    def _chunk_parts(self, ints: dict[str, Arg]) -> list[str]:
        once, each, _ = self._split()
        stores = [
            f"tl.store({name} + pid, {_combined(v.data, f'acc{v.number}')}.to({TL_DTYPES[_stored_as(v.dtype)]}))"
            for name, v in zip(self.partial, self.reduces, strict=True)
        ]
        return [
            *(f"    {line}" for line in (*self._find_place(), *self._pointers("place", ""), *self._start(BLOCK))),
            *self._values(once, ints, "", "", 1, BLOCK),
            *self._blocks(lambda mask: [*self._values(each, ints, mask, " + q", 3, BLOCK), *self._accumulate(mask, 3)]),
            *(f"    {line}" for line in stores),
        ]

    def _place_parts(self, ints: dict[str, Arg]) -> list[str]:
        """A place's chunks, in their order."""
        once, _, after = self._split()
        loads, steps = [], []
        for name, v in zip(self.partial, self.reduces, strict=True):
            dtype, acc = self._reduced_dtype(v), f"acc{v.number}"
            loads.append(f"        x{v.number} = tl.load({name} + q, mask=q_mask, other=0).to({TL_DTYPES[dtype]})")
            step = f"{acc} + x{v.number}" if v.data == "sum" else f"device.{COMBINE[v.data]}({acc}, x{v.number})"
            steps.append(f"        {acc} = tl.where(q_mask, {step}, {acc})")
        found = [f"    v{v.number} = {_combined(v.data, f'acc{v.number}')}" for v in self.reduces]
        head = [
            "place = tl.program_id(0).to(tl.int64)",
            "size = tl.load(table + places + place)",
            "first = tl.load(table + place)",
            f"last = first + (size + {CHUNK - 1}) // {CHUNK}",
            *self._pointers("place", ""),
            *self._start(BLOCK),
        ]
        return [
            *(f"    {line}" for line in head),
            *self._values(once, ints, "", "", 1, BLOCK),
            f"    for start in range(first, last, {BLOCK}):",
            f"        q = start + tl.arange(0, {BLOCK})",
            "        q_mask = q < last",
            *loads,
            *steps,
            *found,
            *self._values(after, ints, "", "", 1, BLOCK),
        ]

    def _over_places(self, ints: dict[str, Arg]) -> list[str]:
        once, each, after = self._split()
        found = [f"    v{v.number} = {_combined(v.data, f'acc{v.number}')}" for v in self.reduces]
        of_all = [b for b in self.kernel.buffers if b.name not in self.graph.per_place]
        of_lanes = [b for b in self.kernel.buffers if b.name in self.graph.per_place]
        at_lanes = [f"        {x}" for b in of_lanes for x in self._pointer(b, "q", ", mask=q_mask, other=0")]
        head = [line for b in of_all for line in self._pointer(b, "0", "")]
        return [
            *(f"    {line}" for line in (*head, *self._start(BLOCK))),
            *self._values(once, ints, "", "", 1, BLOCK),
            f"    for start in range(0, places, {BLOCK}):",
            f"        q = start + tl.arange(0, {BLOCK})",
            "        q_mask = q < places",
            *at_lanes,
            *self._values(each, ints, ", mask=q_mask", "", 2, BLOCK),
            *self._accumulate(", mask=q_mask", 2),
            *found,
            *self._values(after, ints, "", "", 1, BLOCK),
        ]

    def _values(
        self, values: Sequence[ir.Value], ints: dict[str, Arg], mask: str, at: str, depth: int, lanes: int
    ) -> list[str]:
        body = _ListBody(self.kernel, self.op, ints, mask, at, self.graph.per_place, lanes)
        body.debug = self.op.name if self.of.debug else ""
        body.out.depth = depth
        for v in values:
            body.value(v)
        return body.out.text


def _stored_as(dtype: str) -> str:
    """Truth is a number in memory."""
    return "i32" if dtype == "i1" else dtype


def _literal_or_name(v: ir.Value) -> str:
    return literal(v.data, v.dtype, plain=False) if v.op == "constant" else f"v{v.number}"


def _combined(kind: str, x: str) -> str:
    if kind == "sum":
        return f"tl.sum({x}, 0)"
    if kind in ("any", "all"):
        return f"(tl.{'max' if kind == 'any' else 'min'}({x}.to(tl.int32), 0) != 0)"
    return f"tl.reduce({x}, 0, device.{COMBINE[kind]})"


class _ListBody(Body):
    """Prints values; where they lie is what the caller says. at: what is added to the address of a tensor that has
    sizes. mask: of what is loaded and stored there, and, with a lane for each place, of what each place has."""

    def __init__(
        self, kernel: ir.Kernel, op: Op, ints: dict[str, Arg], mask: str, at: str, per_place: frozenset[str], lanes: int
    ):
        tile = Tile((), kernel.axes)
        accesses = {v.number: Access(True) for v in kernel.accesses}
        super().__init__(kernel, tile, STRIDED, accesses, self._argument)
        self.op, self.ints, self.guard, self.at, self.lanes = op, ints, mask, at, lanes
        self.guarded = per_place if not at else frozenset()

    def _argument(self, name: str, expr: sympy.Expr, is_narrow: bool) -> str:
        if expr in (letter(LEADING), letter(PLACES)):
            return "size" if expr == letter(LEADING) else "places"
        if not (expr.is_Symbol and expr.name in self.op.ints):
            raise TraceError(f"{self.kernel.name}: a function of lists cannot compute with {expr}")
        self.ints[f"int_{expr.name}"] = Int(self.op.int(expr.name), "i64")
        return f"int_{expr.name}"

    def _is_per_element(self, v: ir.Value) -> bool:
        return any(s == letter(LEADING) for s in self.kernel.buffer(v.buffer).sizes)

    def pointer(self, v: ir.Value) -> str:
        return f"ptr_{v.buffer}{self.at if self._is_per_element(v) else ''}"

    def mask(self, v: ir.Value) -> str:
        return self.guard if self._is_per_element(v) or v.buffer in self.guarded else ""

    def mask_text(self, v: ir.Value) -> str:
        return self.mask(v).removeprefix(", mask=")

    def shape_of(self, dims: Iterable[str], of_q: str = "") -> str:
        return f"[{self.lanes}]"


# --- From a function ---


@dataclass(frozen=True)
class _OfOnePlace:
    """The function of the tensors of one place. Errors are about the function itself."""

    fn: Callable[..., Any]
    lists: frozenset[str]

    def __post_init__(self) -> None:
        for name in ("__code__", "__globals__", "__name__", "__doc__"):
            vars(self)[name] = getattr(self.fn, name)
        vars(self)["__signature__"] = inspect.signature(self.fn)
        vars(self)["__wrapped__"] = self.fn

    def see(self, sizes: Mapping[str, Any]) -> None:
        """The sizes of the trace that follows."""
        _PLACES.set(sizes[PLACES])

    @property
    def sizes(self) -> tuple[str, ...]:
        return (PLACES,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = self.fn.__code__.co_varnames[: self.fn.__code__.co_argcount]
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        given = {name: [x] if name in self.lists else x for name, x in named.items()}
        with _OfLists():
            found = self.fn(**given)
        if isinstance(found, tuple):
            return tuple(map(self._of_place, found))
        return self._of_place(found)

    def _of_place(self, result: Any) -> Any:
        if isinstance(result, list | tuple):
            if len(result) != 1:
                raise TraceError(f"{where(self.fn)}: a result that is a list has a tensor for each place of the lists")
            return result[0]
        return result


class _OfLists(TorchFunctionMode):
    """What torch does with whole lists."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.stack and len(args[0]) == 1:
            (x,) = args[0]
            if x.dim():
                raise TraceError(
                    "torch.stack of tensors with sizes: of a list stack a number for each, such as x.sum()"
                )
            return torch.ops.tk_trace.over_places(x)
        name = getattr(func, "__name__", "")
        if name.startswith("_foreach_") and args and isinstance(args[0], list | tuple):
            return self._each(name.removeprefix("_foreach_"), args, kwargs)
        return func(*args, **kwargs)

    def _each(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A function of lists, for one place."""
        of = getattr(Tensor, name, None) or getattr(torch, name, None)
        if of is None:
            raise TraceError(f"torch._foreach_{name}: write it as a loop over the list")
        found = of(*(x[0] if isinstance(x, list | tuple) else x for x in args), **kwargs)
        return None if name.endswith("_") else [found]


def generate_lists(
    fn: Callable[..., Any], signature: Signature, name: str, grad: bool, debug: bool = False
) -> GeneratedLists:
    """Raises TraceError for what cannot be generated. debug: the variant that reports what is not finite; there is no
    index to check, since every tensor is read and written at one place."""
    _check_signature(fn, signature, grad)
    element = Signature(
        {n: replace(s, is_list=False) if isinstance(s, TensorSpec) else s for n, s in signature.params.items()},
        signature.variables,
    )
    lists = frozenset(n for n, s in signature.tensors.items() if s.is_list)
    traces = trace_all(_OfOnePlace(fn, lists), element, RULED)
    _check_places(fn, signature, traces[0])
    if len({tuple(t.mutated) for t in traces}) > 1:
        raise TraceError(f"{where(fn)}: what is changed in place differs between dtypes or flags")
    if shared := [n for n in traces[0].mutated if n not in lists]:
        raise TraceError(
            f"{where(fn)}: {shared[0]}, which all places of the lists share, is changed: return it instead"
        )
    graphs = tuple(_graph(fn, t, name, lists) for t in traces)
    return GeneratedLists(name, signature, graphs, (fn.__doc__ or "").strip(), debug)


def _check_signature(fn: Callable[..., Any], signature: Signature, grad: bool) -> None:
    if grad:
        raise TraceError(f"{where(fn)}: a function of lists has no gradient; leave out grad=True")
    for name, spec in signature.tensors.items():
        if not spec.is_list and (spec.sizes or spec.leading):
            raise TraceError(
                f"{where(fn)}: {name}={str(spec)!r} is no list beside others that are; what all of their tensors share "
                f"is '{spec.dtype}[]', a tensor without dimensions, or a number: make it '{spec}*'"
            )
        if spec.is_list and spec.sizes:
            raise TraceError(f"{where(fn)}: {name}={str(spec)!r}: the tensors of a list are 'T[...]*' or 'T[]*'")


def _graph(fn: Callable[..., Any], trace: Trace, name: str, lists: frozenset[str]) -> ListGraph:
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
    """Of the kernel's stores these alone, and what they store."""
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


def _check_places(fn: Callable[..., Any], signature: Signature, trace: Trace) -> None:
    """The function does to each place what it does to lists of one: seen on small numbers, with two places. What goes
    over all places is worked out by the recorded graph."""
    generator = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {}
    for name, spec in signature.params.items():
        if not isinstance(spec, TensorSpec):
            given[name] = trace.flags.get(name, 1 if spec.kind == "int" else 0.5)
            continue
        dtype = TORCH_DTYPES[trace.dtypes.get(spec.dtype, spec.dtype)]
        shapes = ([(3,), (2, 2)] if spec.leading else [(), ()])[: 2 if spec.is_list else 1]
        values = [torch.rand(s, generator=generator).mul(4).add(1).to(dtype) for s in shapes]
        given[name] = values if spec.is_list else values[0]
    own = {n: [x.clone() for x in v] if isinstance(v, list) else v for n, v in given.items()}
    expected = fn(**own)
    try:
        seen = {n: [x.flatten() if x.dim() else x for x in v] if isinstance(v, list) else v for n, v in given.items()}
        found = evaluate(trace.recorded, seen, "lists")
    except (RuntimeError, ValueError):
        return  # the CPU has no such op for this dtype
    pairs = [(tree_flatten(expected)[0], tree_flatten(found)[0]), (tree_flatten(own)[0], tree_flatten(given)[0])]
    for one, other in pairs:
        tensors = [[x.double().flatten().nan_to_num() for x in xs if isinstance(x, Tensor)] for xs in (one, other)]
        if [x.shape for x in tensors[0]] != [x.shape for x in tensors[1]] or not all(
            torch.allclose(a, b, rtol=1e-2, atol=1e-2) for a, b in zip(*tensors, strict=True)
        ):
            raise TraceError(
                f"{where(fn)}: what it does to one place of its lists depends on the others, but for torch.stack of a "
                "number for each tensor, such as torch.stack([x.sum() for x in xs]).sum()"
            )
