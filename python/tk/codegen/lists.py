"""Functions over lists of tensors: one launch for all of them, each tensor of its own size.

The function is traced with lists of one tensor, and must do to every place of its lists the same. So what is lowered is
an elementwise function of the tensors of a place. Its kernels find their place in a table in memory (csrc/ops/lists.h):
a program has a chunk of one place's elements. What is written per place only (0-d tensors, such as a step) is a launch
of its own behind, with a lane for each place.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sympy
import torch

from tk.aot.expr import Tensor, as_expr, ceil_div, const, maximum, tensors
from tk.aot.spec import (
    ITEMSIZE,
    Arg,
    Config,
    Constraint,
    Family,
    Int,
    Kernel,
    Launch,
    Op,
    Param,
    Plan,
    Point,
    Pointer,
    Selector,
    require,
)
from tk.codegen import debug as debug_variant
from tk.codegen import ir, passes, source
from tk.codegen.choice import dtype_number, graph_number
from tk.codegen.errors import TraceError, where
from tk.codegen.lower import lower
from tk.codegen.printing import Printer
from tk.codegen.scalars import TL_DTYPES
from tk.codegen.tile import STRIDED, Access, Tile
from tk.codegen.trace import LEADING, Trace, letter, trace_all
from tk.generated.signature import DTYPES as TORCH_DTYPES
from tk.generated.signature import Signature, TensorSpec

CHUNK = 4096  # elements that a program has: csrc/ops/lists.h
BLOCK = 1024
LANES = 256  # places of a program that has one value of each
ALIGNED, ANY = "aligned", "any"
ARCHITECTURES = (80, 90)
_CONFIG = Config("chunks", {"block": BLOCK, "chunk": CHUNK, "num_warps": 4})


@dataclass(frozen=True)
class ListGraph:
    """One choice of dtypes and flags, lowered."""

    trace: Trace
    kernels: tuple[ir.Kernel, ...]

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
        named = tensors(*self.signature.tensors)
        by_name = {t.name: t for t in named}
        ints = tuple(n for n, s in self.signature.numbers.items() if s.kind in ("int", "bool"))
        floats = tuple(n for n, s in self.signature.numbers.items() if s.kind == "float")
        locals_ = {
            "graph": graph_number([g.trace for g in self.graphs], self.signature, by_name, ints),
            "places": named[0].size(0),
            "chunks": named[0].size(1),
        }
        bare = Op(self.name, named, ints, floats, locals_, {}, ("places", "chunks"))
        return replace(
            bare,
            selectors={"graph": Selector(bare.local("graph"), len(self.graphs))},
            params=self._params(),
            checks=self._checks(by_name),
            meta=self._meta(),
        )

    def _params(self) -> tuple[Param, ...]:
        return tuple(
            Param(name, "tensors", spec.leading, 0, name in self.first.mutated)
            if isinstance(spec, TensorSpec)
            else Param(name, spec.kind)
            for name, spec in self.signature.params.items()
        )

    def _checks(self, by_name: Mapping[str, Tensor]) -> tuple[Constraint, ...]:
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
            dict(doc=self.doc, signature=signature, variables=variables, returns=None, graphs=graphs, backward=None),
            sort_keys=True,
        )

    # --- The kernels ---

    def plan(self, graph: ListGraph, layout: str) -> Plan:
        launches = [ListLaunch(k, self.op, layout == ALIGNED, self.debug) for k in graph.kernels]
        aligned = [require(t.stride(0) == 16, f"tensors of {t.name} on 16 bytes")
                   for t, spec in zip(self.op.tensors, self.signature.tensors.values(), strict=True)
                   if layout == ALIGNED and spec.leading]  # fmt: skip
        itemsize = sum(ITEMSIZE[b.dtype] for k in graph.kernels for b in k.buffers)
        cost = self.op.local("chunks") * (CHUNK * itemsize * (16 if layout == ALIGNED else 24)) // 64
        return Plan(
            (*aligned, require(self.op.tensors[0].alignment >= 16, "a table on 16 bytes")),
            {"graph": (self.graphs.index(graph),)},
            tuple(one.launch() for one in launches),
            maximum(cost, const(1)) + 4_000_000,
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


# --- One launch ---


@dataclass
class ListLaunch:
    """Either a program for each chunk of each place, or, where nothing has a size, a lane for each place."""

    kernel: ir.Kernel
    op: Op
    aligned: bool
    debug: bool = False
    lines: list[str] = field(default_factory=list)

    @property
    def is_per_place(self) -> bool:
        return not self.kernel.axes

    def launch(self) -> Launch:
        lists = [t.name for t in self.op.tensors]
        columns = {b.name: lists.index(b.name) for b in self.kernel.buffers}
        numbers = {f"arg_{v.data}": self.op.float(v.data, "fp64") for v in self.kernel.values if v.op == "number"}
        ints: dict[str, Arg] = {}
        body = self._per_place(columns, ints) if self.is_per_place else self._per_chunk(columns, ints)
        args: dict[str, Arg] = {
            "table": Pointer(self.op.tensors[0], "i64"),
            **numbers,
            "places": Int(self.op.local("places"), "i32"),
            **ints,
        }
        params = textwrap.fill(", ".join(args), 110, initial_indent="    ", subsequent_indent="    ")
        head = f"@triton.jit\ndef {self.kernel.name}(\n{params},\n):"
        text = source.module_text(self.kernel.name, "\n".join([head, *body]) + "\n")
        per_program, programs = (LANES, "places") if self.is_per_place else (1, "chunks")
        grid = ceil_div(self.op.local(programs), per_program)
        options = debug_variant.OPTIONS if self.debug else {}
        fn = source.function(self.kernel.name, text)
        return Launch(fn, args, (grid, 1, 1), num_warps=4, num_stages=1, options=options)

    def _address(self, dtype: str) -> str:
        return f".to(tl.pointer_type({TL_DTYPES[dtype]}))"

    def _per_place(self, columns: Mapping[str, int], ints: dict[str, Arg]) -> list[str]:
        out = [
            f"q = tl.program_id(0) * {LANES} + tl.arange(0, {LANES})",
            "q_mask = q < places",
        ]
        out += [
            f"ptr_{b.name} = tl.load(table + {2 + columns[b.name]} * places + q, mask=q_mask, other=0)"
            + self._address(b.dtype)
            for b in self.kernel.buffers
        ]
        return [f"    {line}" for line in out] + self._values(self.kernel.values, ints, ", mask=q_mask", "", 1)

    def _per_chunk(self, columns: Mapping[str, int], ints: dict[str, Arg]) -> list[str]:
        """The place is the last that begins at this chunk or before; those without elements begin where the next does.
        A whole chunk needs no masks, so that its loads are vectors."""
        out = [
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
        for b in self.kernel.buffers:
            address = f"tl.load(table + {2 + columns[b.name]} * places + place){self._address(b.dtype)}"
            is_vector = self.aligned and bool(b.sizes)
            out.append(f"ptr_{b.name} = {f'tl.multiple_of({address}, 16)' if is_vector else address}")
        loop = f"for start in range(0, {CHUNK}, {BLOCK}):"
        position = f"q = begin + start + tl.arange(0, {BLOCK})"
        once = [v for v in self.kernel.values if not v.axes and v.op != "store"]
        each = [v for v in self.kernel.values if v not in once]
        whole = self._values(each, ints, "", " + q", 3)
        cut = self._values(each, ints, ", mask=q_mask", " + q", 3)
        return [
            *(f"    {line}" for line in out),
            *self._values(once, ints, "", "", 1),
            f"    if begin + {CHUNK} <= size:",
            f"        {loop}",
            f"            {position}",
            *whole,
            "    else:",
            f"        {loop}",
            f"            {position}",
            "            q_mask = q < size",
            *cut,
        ]

    def _values(self, values: Sequence[ir.Value], ints: dict[str, Arg], mask: str, at: str, depth: int) -> list[str]:
        printer = _ListPrinter(self.kernel, self.op, ints, mask, at, self.is_per_place)
        printer.debug = self.op.name if self.debug else ""
        printer.out.depth = depth
        for v in values:
            printer._value(v)
        return printer.out.text


class _ListPrinter(Printer):
    """Prints values; where they lie is what the caller says. at: what is added to the address of a tensor that has
    sizes. mask: of what is loaded and stored there."""

    def __init__(self, kernel: ir.Kernel, op: Op, ints: dict[str, Arg], mask: str, at: str, per_place: bool):
        tile = Tile((), kernel.axes)
        accesses = {v.number: Access(True) for v in kernel.accesses}
        super().__init__(kernel, tile, STRIDED, accesses, False, self._argument)
        self.op, self.ints, self.guard, self.at, self.per_place = op, ints, mask, at, per_place

    def _argument(self, name: str, expr: sympy.Expr, is_narrow: bool) -> str:
        if expr == letter(LEADING):
            return "size"
        if not (expr.is_Symbol and expr.name in self.op.ints):
            raise TraceError(f"{self.kernel.name}: a function of lists cannot compute with {expr}")
        self.ints[f"int_{expr.name}"] = Int(self.op.int(expr.name), "i64")
        return f"int_{expr.name}"

    def _is_per_element(self, v: ir.Value) -> bool:
        return bool(self.kernel.buffer(v.buffer).sizes)

    def _pointer(self, v: ir.Value) -> str:
        return f"ptr_{v.buffer}{self.at if self._is_per_element(v) else ''}"

    def _mask(self, v: ir.Value) -> str:
        return self.guard if self._is_per_element(v) or self.per_place else ""

    def mask_text(self, v: ir.Value) -> str:
        return self._mask(v).removeprefix(", mask=")

    def shape_of(self, dims: Iterable[str]) -> str:
        return f"[{LANES if self.per_place else BLOCK}]"


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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = self.fn.__code__.co_varnames[: self.fn.__code__.co_argcount]
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        given = {name: [x] if name in self.lists else x for name, x in named.items()}
        if self.fn(**given) is not None:
            raise TraceError(
                f"{where(self.fn)}: a function of lists returns nothing: it writes into the tensors that it is given"
            )


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
    of_one = _OfOnePlace(fn, frozenset(signature.tensors))
    traces = trace_all(of_one, element)
    _check_places(fn, signature, traces[0])
    if len({tuple(t.mutated) for t in traces}) > 1:
        raise TraceError(f"{where(fn)}: what is changed in place differs between dtypes or flags")
    graphs = tuple(ListGraph(t, _lowered(fn, t, name)) for t in traces)
    return GeneratedLists(name, signature, graphs, (fn.__doc__ or "").strip(), debug)


def _check_signature(fn: Callable[..., Any], signature: Signature, grad: bool) -> None:
    if grad:
        raise TraceError(f"{where(fn)}: a function of lists has no gradient; leave out grad=True")
    for name, spec in signature.tensors.items():
        if not spec.is_list:
            raise TraceError(f"{where(fn)}: {name} is no list beside others that are; make it '{spec}*'")
        if spec.sizes:
            raise TraceError(f"{where(fn)}: {name}={str(spec)!r}: the tensors of a list are 'T[...]*' or 'T[]*'")


def _lowered(fn: Callable[..., Any], trace: Trace, name: str) -> tuple[ir.Kernel, ...]:
    kernels = tuple(passes.run(k) for k in lower(trace, name))
    for kernel in kernels:
        is_plain = all(v.op not in ("reduce", "scan") and "scratch" not in (b.kind for b in kernel.buffers)
                       for v in kernel.values)  # fmt: skip
        reads = [v for v in kernel.values if v.op in ("load", "store")]
        at_own_place = all(v.index == () or [str(i) for i in v.index] == [a.name and str(a.symbol) for a in kernel.axes]
                           for v in reads)  # fmt: skip
        if not is_plain or not at_own_place or len(kernel.axes) > 1:
            raise TraceError(
                f"{where(fn)}: a function of lists works element by element; this one reads a tensor at other places "
                "than it writes, or reduces"
            )
    return kernels


def _check_places(fn: Callable[..., Any], signature: Signature, trace: Trace) -> None:
    """The function does to each place what it does to lists of one: seen on small numbers, with two places."""
    generator = torch.Generator().manual_seed(0)
    numbers: dict[str, Any] = {
        n: trace.flags.get(n, 1 if s.kind == "int" else 0.5) for n, s in signature.numbers.items()
    }
    values: dict[str, list[torch.Tensor]] = {}
    for name, spec in signature.tensors.items():
        dtype = TORCH_DTYPES[trace.dtypes.get(spec.dtype, spec.dtype)]
        shapes = [(3,), (2, 2)] if spec.leading else [(), ()]
        values[name] = [torch.rand(s, generator=generator).mul(4).add(1).to(dtype) for s in shapes]
    together = {n: [x.clone() for x in xs] for n, xs in values.items()}
    fn(**together, **numbers)
    for i in range(2):
        alone = {n: [xs[i].clone()] for n, xs in values.items()}
        fn(**alone, **numbers)
        for name, xs in together.items():
            if not torch.equal(xs[i].double().nan_to_num(), alone[name][0].double().nan_to_num()):
                raise TraceError(f"{where(fn)}: what it does to one place of its lists depends on the others")
