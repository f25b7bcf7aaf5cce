"""From a declared function to the family that the build enumerates, compiles and packs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv

from tk.aot.errors import BuildError, Refused
from tk.aot.expr import Expr, Tensor, as_expr, ceil_div, const, device, maximum, minimum, select, tensors
from tk.aot.spec import (
    DTYPES,
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
from tk.codegen import along, comparisons, ir
from tk.codegen import index as ix
from tk.codegen.choice import dtype_number, graph_number
from tk.codegen.errors import TraceError, reported, where
from tk.codegen.ir import IR_DTYPES
from tk.codegen.lists import GeneratedLists, generate_lists
from tk.codegen.lowering.rules import RULED
from tk.codegen.scheduling import combo
from tk.codegen.scheduling.context import Context, scratch_buffers
from tk.codegen.scheduling.kinds import choices, has_secondary_setting, kind_of, schedule, secondary_setting
from tk.codegen.scheduling.schedule import Scheduled
from tk.codegen.scheduling.settings import GENERAL, GENERAL_DTYPES, SELDOM_CALLED, Setting
from tk.codegen.tile import ALIGNED, LAYOUTS, ROWS, Layout, choose_tile
from tk.codegen.tracing import derivatives, random
from tk.codegen.tracing.arguments import LEADING, letter
from tk.codegen.tracing.trace import Trace, flag_values, trace_all, trace_backward
from tk.codegen.ways import WAYS, Graph, depends_on_order, lowered_graph
from tk.generated.declare import Declared
from tk.generated.interpret import references
from tk.generated.signature import DTYPES as TORCH_DTYPES
from tk.generated.signature import MAX_RANK, MAX_RANK_BESIDE, Signature, Size, TensorSpec

ARCHITECTURES = (80, 90)
MOST_SPILLED_GENERAL = 1 << 16  # of what serves every call: slow is better than nothing
LAYOUT_BY_NAME: Mapping[str, Layout] = {layout.name: layout for layout in LAYOUTS}


@dataclass(frozen=True)
class Generated:
    """A traced function under a name: all that its records are made of."""

    name: str
    signature: Signature
    graphs: tuple[Graph, ...]
    doc: str = ""
    backward: Generated | None = None
    debug: bool = False
    differentiable: bool = False  # ATen may differentiate its recorded graph

    @property
    def families(self) -> list[Family]:
        with reported(self.name):
            return [self.family, *(self.backward.families if self.backward else [])]

    # --- The op ---

    @cached_property
    def op(self) -> Op:
        inputs, outputs = list(self.signature.tensors), [f"out{i}" for i in range(len(self.first.new))]
        named = tensors(*inputs, *outputs)
        by_name = {t.name: t for t in named}
        ints = tuple(n for n, s in self.signature.numbers.items() if s.kind in ("int", "bool"))
        floats = tuple(n for n, s in self.signature.numbers.items() if s.kind == "float")
        locals_ = self._locals(by_name, ints)
        letters = [n for n in locals_ if n in (*self.signature.letters, LEADING)]
        bare = Op(
            self.name, named, ints, floats, locals_, {"graph": Selector(const(0), len(self.graphs))}, tuple(letters[:4])
        )
        bare = replace(bare, locals=self._with_parts(bare))
        context = Context(bare, by_name, {})
        selectors = {"graph": Selector(bare.local("graph"), len(self.graphs))}
        return replace(
            bare, selectors=selectors, outputs=self._outputs(context), params=self._params(),
            checks=self._checks(context, by_name), meta=self._meta(),
        )  # fmt: skip

    @property
    def first(self) -> Trace:
        return self.graphs[0].trace

    def _locals(self, by_name: Mapping[str, Tensor], ints: Sequence[str]) -> dict[str, Expr]:
        found: dict[str, Expr] = {"graph": graph_number([g.trace for g in self.graphs], self.signature, by_name, ints)}
        for name, spec in self.signature.tensors.items():
            t = by_name[name]
            if spec.leading:
                found.setdefault(LEADING, t.size(0) * t.size(1) * t.size(2))
                found.setdefault(f"{LEADING}_1", t.size(1))
                found.setdefault(f"{LEADING}_2", t.size(2))
            for d, size in enumerate(spec.sizes):
                if isinstance(size, str):
                    found.setdefault(size, t.size(d + 3 * spec.leading))
        for unknown, name, d, factor, rest in self.signature.solved():
            size = by_name[name].size(d + 3 * self.signature.tensors[name].leading)
            values = {x: as_expr(e) for x, e in found.items()}
            found[unknown] = as_expr((size - rest.evaluate(values)) // maximum(as_expr(factor.evaluate(values)), 1))
        return found

    def _with_parts(self, bare: Op) -> dict[str, Expr]:
        """The op's locals and, of split reductions, the numbers of parts: enough programs to fill the GPU a few times,
        each with enough to do. Of programs that walk, as many as are resident."""
        found = dict(bare.locals)
        context = Context(bare, {}, {})
        for p in (p for g in self.graphs for p in g.parts):
            rows, reduced, kept = (context.expr(e) for e in (p.rows, p.reduced, p.kept))
            columns = p.kept != 1
            wanted = 4 * device.sm_count // maximum(ceil_div(kept, 64), 1)
            most = ceil_div(reduced, 64 if columns else 8192)
            found[p.name] = maximum(minimum(rows, most, wanted), 1)
        for w in (g.walk for g in self.graphs if g.walk):
            found[w.name] = maximum(minimum(context.expr(w.rows), 4 * device.sm_count), 1)
        return found

    def _params(self) -> tuple[Param, ...]:
        found = []
        for name, spec in self.signature.params.items():
            if isinstance(spec, TensorSpec):
                kind = "tensors" if spec.is_list else "tensor"
                in_order = spec.leading and self._counts_leading()
                found.append(Param(name, kind, spec.leading, len(spec.sizes), name in self.first.mutated, in_order))
            else:
                found.append(Param(name, spec.kind))
        return tuple(found)

    def _counts_leading(self) -> bool:
        """Random numbers go by the place in the result, so its dimensions may not be seen in another order."""
        return any(v.op == "random" for g in self.graphs for k in g.kernels for v in k.values)

    def _outputs(self, context: Context) -> tuple[Output, ...]:
        leading = next((i for i, s in enumerate(self.signature.tensors.values()) if s.leading), None)
        found = []
        for i, node in enumerate(self.first.new):
            shape = tuple(self.first.size(s) for s in node.meta["val"].shape)
            dtypes = [DTYPES[IR_DTYPES[g.trace.new[i].meta["val"].dtype]] for g in self.graphs]
            has_leading = _has_leading(shape)
            declared = shape[1:] if has_leading else shape
            if len(declared) > (most := MAX_RANK_BESIDE if has_leading else MAX_RANK):
                raise TraceError(f"{self.name}: result {i} has {len(shape)} dimensions, it may have {most}")
            found.append(
                Output(
                    _by_graph(context.op, dtypes),
                    tuple(context.expr(s) for s in declared),
                    tuple(context.expr(ix.product(declared[d + 1 :])) for d in range(len(declared))),
                    leading if has_leading else None,
                )
            )
        return tuple(found)

    def _checks(self, context: Context, by_name: Mapping[str, Tensor]) -> tuple[Constraint, ...]:
        found: list[Constraint] = []
        owner: dict[str, str] = {}
        for name, spec in self.signature.tensors.items():
            t = by_name[name]
            found.append(self._dtype_check(name, spec, t, owner, by_name))
            for d, size in enumerate(spec.sizes):
                at = t.size(d + 3 * spec.leading)
                where = f"dimension {d - len(spec.sizes)} of {name}"
                if isinstance(size, int):
                    found.append(require(at == size, f"{where} must have size {size}"))
                elif not isinstance(size, str):
                    found.append(require(at == context.expr(_as_sympy(size)), f"{where} must have size {size}"))
                elif size in owner:
                    found.append(
                        require(at == context.op.local(size), f"{where} must be as large as {owner[size]} ({size})")
                    )
                else:
                    owner[size] = where
        zeros = {str(c.zero): c for g in self.graphs for c in g.trace.checks}
        for check in sorted(zeros.values(), key=lambda c: sympy.count_ops(c.zero)):
            found.append(require(context.expr(check.zero) == 0, check.message))
        for i, node in enumerate(self.first.new):
            for size in (sympy.sympify(self.first.size(s)) for s in node.meta["val"].shape):
                if not size.is_Symbol and not size.is_nonnegative:  # as of a piece that is what others leave
                    holds = context.expr(sympy.Max(0, -size)) == 0
                    found.append(require(holds, f"result {i} would have a size of {size}"))
        return tuple(c for c in found if c.holds.value is None)

    def _dtype_check(
        self, name: str, spec: TensorSpec, t: Tensor, owner: dict[str, str], by_name: Mapping[str, Tensor]
    ) -> Constraint:
        if spec.dtype in owner:
            return require(
                t.dtype == by_name[owner[spec.dtype]].dtype, f"{name} must have the dtype of {owner[spec.dtype]}"
            )
        allowed = self.signature.variables.get(spec.dtype, (spec.dtype,))
        if spec.dtype in self.signature.variables:
            owner[spec.dtype] = name
        holds = as_expr(0)
        for dtype in allowed:
            holds = holds | (t.dtype == dtype_number(dtype))
        names = " or ".join(str(TORCH_DTYPES[d]).removeprefix("torch.") for d in allowed)
        return require(holds, f"{name} must be of dtype {names}")

    def _meta(self) -> str:
        graphs = [
            dict(dtypes=dict(g.trace.dtypes), flags=dict(g.trace.flags), nodes=g.trace.recorded) for g in self.graphs
        ]
        signature = {name: str(spec) for name, spec in self.signature.params.items()}
        variables = {name: list(dtypes) for name, dtypes in self.signature.variables.items()}
        structure = self.first.structure
        return json.dumps(
            dict(
                doc=self.doc,
                signature=signature,
                variables=variables,
                returns=structure,
                graphs=graphs,
                backward=self._backward_meta(),
                differentiable=self.differentiable,
            ),
            sort_keys=True,
        )

    def _backward_meta(self) -> dict[str, Any] | None:
        """The backward takes the gradients of the floating-point results, the saved inputs, then all numbers."""
        if self.backward is None:
            return None
        params = list(self.signature.params)
        of = self.backward.signature.params
        grads = [n for n, s in self.signature.tensors.items() if is_float(s, self.first.dtypes)]
        return dict(
            op=self.backward.name,
            saved_inputs=[params.index(n) for n in self.signature.tensors if n in of],
            saved_outputs=[],
            extra_outputs=0,
            grads=[params.index(n) for n in grads],
        )

    # --- The kernels ---

    def _context(self, kernels: Sequence[ir.Kernel]) -> Context:
        scratch = {b.name: None for k in kernels for b in k.buffers if b.kind == "scratch"}
        by_name = {t.name: t for t in self.op.tensors}
        return Context(self.op, by_name, {name: i for i, name in enumerate(scratch)}, self.debug)

    def main(self, kernels: Sequence[ir.Kernel]) -> int:
        """The launch whose setting is the plan's: of those that sort, or else reduce, the one that does most, else the
        last."""
        sorting = [i for i, k in enumerate(kernels) if along.sorts(k)]
        reducing = sorting or [i for i, k in enumerate(kernels) if k.reduced]
        return max(reducing, key=lambda i: len(kernels[i].values)) if reducing else len(kernels) - 1

    def scheduled(
        self, kernels: Sequence[ir.Kernel], layout: Layout, setting: Setting
    ) -> list[tuple[Scheduled, Setting]]:
        """Every launch with its setting: the main one's is given, the others have the first of their kind."""
        context = self._context(kernels)
        main = kernels[self.main(kernels)]
        found = []
        for kernel in kernels:
            own_layout = layout if kernel is main else _layout_beside(main, layout, kernel)
            own_setting = setting if kernel is main else secondary_setting(kernel, own_layout)
            found.append((schedule(kernel, own_layout, context), own_setting))
        return found

    def launches(self, parts: Sequence[tuple[Scheduled, Setting]]) -> Iterator[Launch]:
        """Of each level what can share a launch does, with the warps of the part that has most."""
        for level in combo.levels([one.kernel for one, _ in parts]):
            together = [parts[i] for i in level if combo.can_share(parts[i][0].kernel, parts[i][1])]
            alone = [parts[i] for i in level if not combo.can_share(parts[i][0].kernel, parts[i][1])]
            if len(together) == 1:
                alone, together = together + alone, []
            if together:
                warps = max(s.warps for _, s in together)
                yield combo.launch([one.printed(replace(s, warps=warps), i > 0) for i, (one, s) in enumerate(together)])
            for one, s in alone:
                yield from one.launches(s)

    def choices(self, graph: Graph, layout: Layout, way: str) -> tuple[Setting, ...]:
        """The settings that a way to compute a graph has in a layout."""
        kernels = graph.kernels_of(way)
        if not kernels:
            return ()
        main = kernels[self.main(kernels)]
        if any(k is not main and not has_secondary_setting(k, _layout_beside(main, layout, k)) for k in kernels):
            return ()
        kind = WAYS[way].kind(graph, self._kind(kernels, layout), self._kind(graph.kernels, layout), layout)
        if kind is None:
            return ()
        found = choices(main, layout, kind)
        return found[:1] if WAYS[way].has_one_setting else found

    def _kind(self, kernels: Sequence[ir.Kernel], layout: Layout) -> str:
        main = kernels[self.main(kernels)]
        return kind_of(main, choose_tile(main, layout)).name

    def plan(self, graph: Graph, layout: Layout, setting: Setting, way: str = "whole") -> Plan | None:
        """way: the name of one of WAYS."""
        with reported(f"{self.name}, {graph.label}, {layout.name}"):
            return self._plan(graph, layout, setting, way)

    def _plan(self, graph: Graph, layout: Layout, setting: Setting, way: str) -> Plan | None:
        kernels = graph.kernels_of(way)
        settings = self.choices(graph, layout, way)
        if setting not in settings:
            return None
        parts = self.scheduled(kernels, layout, setting)
        is_first = setting == settings[0]
        launches = tuple(self.launches(parts))
        if way in graph.compared:
            launches = tuple(map(comparisons.uncontracted, launches))
        if not is_first:
            launches = tuple(replace(x, max_spill_bytes=WAYS[way].most_spilled) for x in launches)
        elif not layout.merged:
            launches = tuple(replace(x, max_spill_bytes=MOST_SPILLED_GENERAL) for x in launches)
        constraints = {c.holds.encode(): c for one, _ in parts for c in one.constraints}
        cost = as_expr(0)
        for one, s in parts:
            cost = cost + one.cost(s)
        return Plan(
            tuple(constraints.values()),
            {"graph": (self.graphs.index(graph),)},
            launches,
            cost,
            buffers=(*scratch_buffers(kernels, self._context(kernels)), *(b for one, _ in parts for b in one.buffers)),
            general=not layout.merged,
            deterministic=not any(depends_on_order(k) for k in kernels),
            droppable=not is_first,
        )

    @cached_property
    def _fastest_layouts(self) -> dict[str, Layout]:
        """By graph: the first layout in which it may run at all."""
        return {graph.label: self._fastest_layout(graph) for graph in self.graphs}

    def _fastest_layout(self, graph: Graph) -> Layout:
        for layout in LAYOUTS:
            if layout == ALIGNED and self._is_general(graph):
                continue
            found = ((way, s) for way in WAYS for s in self.choices(graph, layout, way))
            plan = next((p for way, s in found if (p := self.plan(graph, layout, s, way))), None)
            if plan is not None and not any(c.holds.value == 0 for c in plan.constraints):
                return layout
        return LAYOUTS[-1]

    def settings(self, way: str = "whole") -> tuple[Setting, ...]:
        found = [s for g in self.graphs for x in LAYOUTS for s in self.choices(g, x, way)]
        return tuple(dict.fromkeys(found))

    def ways(self) -> list[tuple[Config, Setting, str]]:
        """(config, setting, way). A split reduction is a config of its own, and a walk: of the variants of one config
        the engine takes the first that fits, whatever is predicted, and the others never came to be."""
        found = [(s.config, s, "whole") for s in self.settings()]
        for way in list(WAYS)[1:]:
            found += [(Config(f"{way}_{s.name}", {**s.config.params, way: True}), s, way) for s in self.settings(way)]
        return found

    def _is_everywhere(self, graph: Graph, point: Point, setting: Setting, way: str, place: int) -> bool:
        """Whether an architecture on which nothing was measured has it, and fp16, and an op that is seldom called: the
        wheel has no room for all, nor for twice all. A reduction that is split there is so in every merged layout."""
        has_split = bool(graph.parts) and LAYOUT_BY_NAME[point.layout].merged and way == "whole"
        return (place == 0 or setting.everywhere) and not has_split

    def _is_general(self, graph: Graph) -> bool:
        """Whether it has a single setting of each layout that asks for no alignment."""
        dtypes = set(graph.trace.dtypes.values())
        return self.name in GENERAL and not (dtypes and GENERAL_DTYPES.isdisjoint(dtypes))

    @cached_property
    def family(self) -> Family:
        by_label = {g.label: g for g in self.graphs}
        ways = {config.name: (setting, way) for config, setting, way in self.ways()}

        def place(point: Point) -> int:
            """The place of the point's setting among those that its launches may have; -1: it has none."""
            setting, way = ways[point.config.name]
            choices = self.choices(by_label[point.graph], LAYOUT_BY_NAME[point.layout], way)
            return choices.index(setting) if setting in choices else -1

        def can_run(graph: Graph, arch: int) -> bool:
            return arch >= 89 or not _has_fp8e4(graph)

        def plan(point: Point) -> Plan | None:
            setting, way = ways[point.config.name]
            if not can_run(by_label[point.graph], point.arch):
                return None
            graph = by_label[point.graph]
            if self._is_general(graph) and (point.layout == ALIGNED.name or place(point) > 0):
                return None
            has_few = point.arch < 90 or "fp16" in graph.trace.dtypes.values() or self.name in SELDOM_CALLED
            if has_few and not self._is_everywhere(graph, point, setting, way, place(point)):
                return None
            return self.plan(graph, LAYOUT_BY_NAME[point.layout], setting, way)

        axes = {"graph": tuple(by_label), "layout": tuple(LAYOUT_BY_NAME)}
        configs = tuple(config for config, _, _ in self.ways())
        kernel = Kernel(self.name, self.op, axes, dict.fromkeys(ARCHITECTURES, configs), plan)

        def sample(kernel: Kernel, point: Point) -> bool:
            """The first setting of every graph in the first layout that it has, and of the first graph in every
            layout. Of older architectures the first graph alone: they differ in what is compiled, not in the source."""
            first = next((g for g in self.graphs if can_run(g, point.arch)), None)
            is_first, is_newest = by_label[point.graph] is first, point.arch == ARCHITECTURES[-1]
            is_fastest = point.layout == self._fastest_layouts[point.graph].name
            return place(point) == 0 and ((is_first or is_fastest) if is_newest else (is_first and is_fastest))

        def portable(kernel: Kernel, point: Point) -> bool:
            """One setting of the layout that serves every call, and one of the fastest layout, there split where it
            can be."""
            _, way = ways[point.config.name]
            graph, layout = by_label[point.graph], LAYOUT_BY_NAME[point.layout]
            can_split, can_be_whole = (bool(self.choices(graph, layout, w)) for w in ("split", "whole"))
            is_split = can_split and (layout.merged or not can_be_whole)
            is_usual = way == ("split" if is_split else "whole")
            return (
                place(point) == 0 and is_usual and (layout == self._fastest_layouts[point.graph] or not layout.merged)
            )

        return Family(self.op, (kernel,), sample, portable=portable)


def _has_fp8e4(graph: Graph) -> bool:
    """Triton converts to and from it from sm_89 on."""
    return any(v.dtype == "fp8e4nv" for k in graph.kernels for v in k.values)


def _layout_beside(main: ir.Kernel, layout: Layout, kernel: ir.Kernel) -> Layout:
    """Of a launch beside the main one. What adds up rows of partial results asks nothing of how many there are: as rows
    of a multiple of 16 they would keep the whole plan from most calls."""
    is_of_parts = all(kernel.buffer(v.buffer).kind == "scratch" for v in kernel.accesses if v.op == "load")
    if not layout.aligned or not is_of_parts:
        return layout
    tile, of_main = (choose_tile(k, layout) for k in (kernel, main))
    is_as_long = ix.same(*(ix.product([a.size for a in t.q]) for t in (tile, of_main)))
    return ROWS if tile.reduced == "q" and not is_as_long else layout


def _by_graph(op: Op, values: Sequence[int]) -> Expr:
    result = as_expr(values[0])
    if len(set(values)) == 1:
        return result
    for n, value in enumerate(values[1:], 1):
        result = select(op.local("graph") == n, value, result)
    return result


def _has_leading(shape: Sequence[sympy.Expr]) -> bool:
    return bool(shape) and shape[0] == sympy.Symbol(LEADING, integer=True, positive=True)


def is_float(spec: TensorSpec, dtypes: Mapping[str, str]) -> bool:
    return TORCH_DTYPES[dtypes.get(spec.dtype, spec.dtype)].is_floating_point


def generate_any(
    fn: Callable[..., Any], signature: Signature, name: str, grad: bool = False, debug: bool = False
) -> Generated | GeneratedLists:
    """:func:`generate`, of functions of lists too."""
    if any(spec.is_list for spec in signature.tensors.values()):
        with reported(where(fn)):
            return generate_lists(fn, signature, name, grad, debug)
    return generate(fn, signature, name, grad, debug)


def generate_all(functions: Sequence[Declared], debug: bool = False) -> list[Family]:
    """The families of declared functions. Raises Refused for all that are refused at once."""
    families: list[Family] = []
    refused: list[Exception] = []
    for one in functions:
        try:
            families += generate_any(one.fn, one.signature, one.name, one.grad, debug).families
        except BuildError as error:
            refused.append(error)
    if refused:
        raise Refused(refused)
    return families


def generate(
    fn: Callable[..., Any], signature: Signature, name: str, grad: bool = False, debug: bool = False
) -> Generated:
    """Trace and lower; with `grad` the backward too. debug: the variant that checks indices and results on the device.

    Raises TraceError for what cannot be generated."""
    if not name.isidentifier():
        raise TraceError(f"{where(fn)}: an op needs a name; declare a function that has one")
    with reported(where(fn)):
        return _generated(fn, signature, name, grad, debug)


def _generated(fn: Callable[..., Any], signature: Signature, name: str, grad: bool, debug: bool) -> Generated:
    try:
        traces = trace_all(fn, signature, RULED)
    except random.NeedsSeed:
        signature = random.with_seed(signature)
        traces = trace_all(fn, signature, RULED)
    doc = (fn.__doc__ or "").strip()
    try:
        graphs = _lowered(traces, name)
        backward = _backward(fn, signature, name) if grad else None
    except TraceError as error:
        at = where(fn)
        raise TraceError(str(error) if at in str(error) else f"{at}: {error}") from None
    if backward is None:
        return Generated(name, signature, graphs, doc, None, debug)
    pairs = zip(graphs, backward.graphs, strict=True)
    differentiable = all(derivatives.agree(graph.trace, of_it.trace) for graph, of_it in pairs)
    backward = replace(backward, debug=debug, differentiable=differentiable)
    return Generated(name, signature, graphs, doc, backward, debug, differentiable)


def _lowered(traces: Sequence[Trace], name: str) -> tuple[Graph, ...]:
    shapes = {tuple(tuple(map(str, t.size_list(n))) for n in t.new) for t in traces}
    changed = {tuple(t.mutated) for t in traces}
    if len(shapes) > 1 or len(changed) > 1:
        raise TraceError(f"{name}: the results' shapes, or what is changed in place, differ between dtypes or flags")
    return tuple(lowered_graph(t, name) for t in traces)


def _backward(fn: Callable[..., Any], signature: Signature, name: str) -> Generated:
    choices = [(d, f) for d in signature.assignments() for f in flag_values(signature)]
    traces = _declared_alike([trace_backward(fn, signature, dtypes, flags, RULED) for dtypes, flags in choices], name)
    full = traces[0].signature
    read = {n for t in traces for n in (*t.arguments_read(), *_read_by_recorded(t.recorded))}
    kept = {n: s for n, s in full.params.items() if n in read or n.startswith("grad_") or n in full.numbers}
    for n, spec in signature.tensors.items():  # what is not read may still be where a size or a dtype is known from
        of_others = {x for s in kept.values() if isinstance(s, TensorSpec) for x in (s.dtype, *_sizes(s))}
        if not _sizes(spec) | ({spec.dtype} & signature.variables.keys()) <= of_others:
            kept[n] = spec
    ordered = {n: s for n, s in full.params.items() if n in kept}
    reduced = Signature(ordered, full.variables)
    traces = [replace(t, signature=reduced, recorded=_without(t.recorded, ordered, full.params)) for t in traces]
    return Generated(f"{name}_backward", reduced, _lowered(traces, f"{name}_backward"), f"Gradients of {name}.")


def _declared_alike(traces: Sequence[Trace], name: str) -> list[Trace]:
    """With one signature for all. A gradient's dtype, which each trace has by name, is that of a variable, the same for
    all, or one of its own: a result of ``x.float()`` is fp32 whatever x is."""
    specs, variables = dict(traces[0].signature.params), dict(traces[0].signature.variables)
    own: list[dict[str, str]] = [{} for _ in traces]
    for grad in (n for n in specs if n.startswith("grad_")):
        found = [t.signature.tensors[grad] for t in traces]
        if len({(spec.sizes, spec.leading) for spec in found}) > 1:
            raise TraceError(
                f"{name}: a result's shape is not the same expression for all dtypes and flags, so that its gradient "
                "cannot be declared; reshape the results alike"
            )
        dtypes = [spec.dtype for spec in found]
        same = [v for v in traces[0].dtypes if all(t.dtypes[v] == d for t, d in zip(traces, dtypes, strict=True))]
        variable = same[0] if same else dtypes[0]
        if not same and len(set(dtypes)) > 1:
            variable = f"{grad}_dtype"
            variables[variable] = tuple(dict.fromkeys(dtypes))
            for one, dtype in zip(own, dtypes, strict=True):
                one[variable] = dtype
        specs[grad] = replace(found[0], dtype=variable)
    signature = Signature(specs, variables)
    return [replace(t, signature=signature, dtypes={**t.dtypes, **more}) for t, more in zip(traces, own, strict=True)]


def _as_sympy(size: Any) -> sympy.Expr:
    return size.evaluate({x: letter(x) for x in size.letters}, FloorDiv) if isinstance(size, Size) else size


def _sizes(spec: TensorSpec) -> set[Any]:
    return {s for s in spec.sizes if isinstance(s, str | Size)} | ({LEADING} if spec.leading else set())


_SIZE = "aten.sym_size.int"


def _read_by_recorded(nodes: Sequence[Mapping[str, Any]]) -> set[str]:
    """The arguments of which the recorded graph reads more than sizes."""
    param_of = {n["name"]: n["args"][0] for n in nodes if n["op"] == "input"}
    readers = (n for n in nodes if n["op"] not in ("input", _SIZE))
    return {param_of[name] for n in readers for name in references((n["args"], n["kwargs"])) if name in param_of}


def _without(
    nodes: Sequence[Mapping[str, Any]], kept: Mapping[str, Any], specs: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The recorded graph less the inputs that are not kept. Their sizes are read of those that are. specs: of all."""
    name_of = {n["args"][0]: n["name"] for n in nodes if n["op"] == "input"}
    dropped = {name_of[param]: _dims(spec) for param, spec in specs.items() if param in name_of and param not in kept}
    known = {
        size: (name_of[param], d)
        for param, spec in kept.items() if isinstance(spec, TensorSpec)
        for d, size in enumerate(_dims(spec))
    }  # fmt: skip
    found = []
    for n in nodes:
        if n["op"] == _SIZE and n["args"][0]["ref"] in dropped:
            source, d = known[dropped[n["args"][0]["ref"]][n["args"][1]]]
            found.append({**n, "args": [{"ref": source}, d]})
        elif n["name"] not in dropped:
            found.append(dict(n))
    return found


def _dims(spec: Any) -> tuple[Any, ...]:
    """The sizes as the graph sees them; none of a number."""
    return ((LEADING,) * spec.leading + tuple(spec.sizes)) if isinstance(spec, TensorSpec) else ()
