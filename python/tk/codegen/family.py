"""Makes of a declared function the family that the build enumerates, compiles and packs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tk.aot.errors import BuildError, Refused
from tk.aot.expr import as_expr, mode
from tk.aot.spec import (
    Config,
    Family,
    Kernel,
    Launch,
    Plan,
    Point,
    require,
)
from tk.codegen import along, ir
from tk.codegen import index as ix
from tk.codegen.comparisons import uncontracted
from tk.codegen.errors import TraceError, of_function, reported, where
from tk.codegen.lists import GeneratedLists, generate_lists
from tk.codegen.lowering.named import Names
from tk.codegen.lowering.rules import RULED
from tk.codegen.records import OpRecord
from tk.codegen.scheduling import combo
from tk.codegen.scheduling.context import Context, scratch_buffers
from tk.codegen.scheduling.kinds import Beside, choices, kind_of, schedule, secondary_settings
from tk.codegen.scheduling.schedule import Scheduled
from tk.codegen.scheduling.settings import FOR_SMALL, GENERAL, GENERAL_DTYPES, SELDOM_CALLED, Setting, kept
from tk.codegen.tile import ALIGNED, GATHERED, LAYOUTS, ROWS, STRIDED, Layout, is_for, laid_out
from tk.codegen.tracing import derivatives, random
from tk.codegen.tracing.backward import backward_traces
from tk.codegen.tracing.trace import Trace, trace_all
from tk.codegen.ways import WAYS, Graph, depends_on_order, lowered_graph
from tk.generated.declare import Declared
from tk.generated.signature import Signature

ARCHITECTURES = (80, 90)
LAYOUT_BY_NAME: Mapping[str, Layout] = {layout.name: layout for layout in LAYOUTS}


@dataclass(frozen=True)
class Generated(OpRecord):
    """A traced function under a name: all that its records are made of."""

    backward: Generated | None = None

    @property
    def families(self) -> list[Family]:
        with reported(self.name):
            return [self.family, *(self.backward.families if self.backward else [])]

    # --- The kernels ---

    def _context(self, kernels: Sequence[ir.Kernel]) -> Context:
        scratch = {b.name: None for k in kernels for b in k.buffers if b.kind == "scratch"}
        by_name = {t.name: t for t in self.op.tensors}
        numbers = {name: i for i, name in enumerate(scratch)}
        return Context(self.op, by_name, numbers, self.debug, _read_after(kernels))

    def main(self, kernels: Sequence[ir.Kernel]) -> int:
        """The launch whose setting is the plan's: of those that sort, or else reduce, the one that runs through most
        dimensions of what is given, and of several the one that does most; else the last."""
        sorting = [i for i, k in enumerate(kernels) if along.sorts(k)]
        reducing = sorting or [i for i, k in enumerate(kernels) if k.reduced]
        does = {i: (_dimensions_read(kernels[i]), len(kernels[i].values)) for i in reducing}
        return max(does, key=does.__getitem__) if does else len(kernels) - 1

    def scheduled(
        self, kernels: Sequence[ir.Kernel], layout: Layout, setting: Setting
    ) -> list[tuple[Scheduled, Setting]]:
        """Every launch with its setting: the main one's is given, the others have the first of their kind, or several,
        of which a call takes one."""
        context = self._context(kernels)
        main = kernels[self.main(kernels)]
        found = []
        for kernel in kernels:
            if kernel is main:
                found.append((schedule(kernel, layout, context), setting))
                continue
            own_layout = _layout_beside(main, layout, kernel)
            settings = _settings_beside(kernel, own_layout, main, layout, setting)
            assert settings, "a way that has a launch without a setting has none itself"
            least = 0
            for one in settings:
                beside = schedule(kernel, own_layout, context)
                size = beside.sizes["p" if beside.tile.reduced == "p" else "q"]
                if len(settings) > 1:
                    beside.only = (size >= least) & (size <= one.most) if one.most is not None else size >= least
                if one.most is not None:
                    beside.suffix, least = f"_{one.setting.p}x{one.setting.row}", one.most + 1
                found.append((beside, one.setting))
        return found

    def launches(self, parts: Sequence[tuple[Scheduled, Setting]]) -> Iterator[Launch]:
        """The launches, in order. Of each level what can share one does, with the warps of the part that has most."""
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

    @kept
    def choices(self, graph: Graph, layout: Layout, way: str) -> tuple[Setting, ...]:
        """The settings that a way to compute a graph has in a layout."""
        kernels = graph.kernels_of(way)
        if not kernels:
            return ()
        main = kernels[self.main(kernels)]
        beside = (secondary_settings(k, _layout_beside(main, layout, k), main) for k in kernels if k is not main)
        if not all(beside):
            return ()
        kind = WAYS[way].kind(graph, self._kind(kernels, layout), self._kind(graph.kernels, layout), layout)
        if kind is None:
            return ()
        found = choices(main, layout, kind)
        return found[:1] if WAYS[way].has_one_setting else found

    def _kind(self, kernels: Sequence[ir.Kernel], layout: Layout) -> str:
        return kind_of(*laid_out(kernels[self.main(kernels)], layout)).name

    @kept
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
        launches = tuple(map(uncontracted, self.launches(parts)))
        if not is_first:
            launches = tuple(replace(x, max_spill_bytes=WAYS[way].most_spilled) for x in launches)
        constraints = {c.holds.encode(): c for one, _ in parts for c in one.constraints}
        if not WAYS[way].is_batch_invariant:
            off = require(~mode("batch_invariant"), "batch_invariant mode off, since rows are split")
            constraints[off.holds.encode()] = off
        cost = as_expr(0)
        for one, s in parts:
            cost = cost + one.cost(s)
        if (sixteenths := WAYS[way].costs) != 16:
            cost = cost * sixteenths // 16
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
        """For each graph, the first layout in which it may run at all."""
        return {graph.label: self._fastest_layout(graph) for graph in self.graphs}

    def _fastest_layout(self, graph: Graph) -> Layout:
        for layout in LAYOUTS:
            if layout.aligned and self._is_general(graph):
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
        wheel has no room for all, nor for twice all. A reduction that is split there is so in every merged layout but
        the one that takes most: of few elements one launch is faster."""
        has_split = any(not p.are_rows for p in graph.parts) and way == "whole"
        is_left_out = has_split and LAYOUT_BY_NAME[point.layout].merged and point.layout != ROWS.name
        return (place == 0 or setting.everywhere) and not is_left_out

    def _is_general(self, graph: Graph) -> bool:
        """Whether it has a single setting of each layout that asks for no alignment, and those that are everywhere."""
        dtypes = set(graph.trace.dtypes.values())
        return self.name in GENERAL and not (dtypes and GENERAL_DTYPES.isdisjoint(dtypes))

    @cached_property
    def family(self) -> Family:
        by_label = {g.label: g for g in self.graphs}
        ways = {config.name: (setting, way) for config, setting, way in self.ways()}

        def choices(point: Point) -> tuple[Setting, ...]:
            """The settings that the launches of the point's way may have in its layout."""
            return self.choices(by_label[point.graph], LAYOUT_BY_NAME[point.layout], ways[point.config.name][1])

        def place(point: Point) -> int:
            """The place of the point's setting among those; -1: it is none of them."""
            setting, _ = ways[point.config.name]
            found = choices(point)
            return found.index(setting) if setting in found else -1

        def can_run(graph: Graph, arch: int) -> bool:
            return arch >= 89 or not _has_fp8e4(graph)

        def plan(point: Point) -> Plan | None:
            _, way = ways[point.config.name]
            graph, at = by_label[point.graph], place(point)
            if at < 0 or not can_run(graph, point.arch) or point.arch < WAYS[way].least_arch:
                return None
            setting = choices(point)[at]  # as its layout has it: in another it may not be everywhere
            is_more = LAYOUT_BY_NAME[point.layout].aligned or (at > 0 and not setting.everywhere)
            if (self._is_general(graph) and is_more) or (setting.narrow and _is_wide(graph)):
                return None
            has_few = point.arch < 90 or "fp16" in graph.trace.dtypes.values() or self.name in SELDOM_CALLED
            has_few |= self.name in FOR_SMALL and not setting.is_for_small
            if has_few and not self._is_everywhere(graph, point, setting, way, at):
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


def _is_wide(graph: Graph) -> bool:
    return not {"fp32", "fp64"}.isdisjoint(graph.trace.dtypes.values())


def _dimensions_read(kernel: ir.Kernel) -> int:
    """The most that the axes run through of a tensor. What is read at an index, as the logits of the targets are, and
    what other launches have left is little."""
    read = [v.index for v in kernel.accesses if v.op == "load" and kernel.buffer(v.buffer).kind != "scratch"]
    axes = {a.name for a in kernel.axes}
    return max((sum(any(s.name in axes for s in at.free_symbols) for at in index) for index in read
                if not any(map(ir.values_in, index))), default=0)  # fmt: skip


def _puts_into_scratch(kernel: ir.Kernel) -> bool:
    """Whether a kernel puts into scratch memory along a single axis, as the one does that finds which of several
    elements stays."""
    return len(kernel.axes) == 1 and any(
        v.op == "store" and v.data and kernel.buffer(v.buffer).kind == "scratch" for v in kernel.values
    )


def _read_after(kernels: Sequence[ir.Kernel]) -> dict[str, frozenset[str]]:
    """For each kernel, the buffers that one behind it reads."""
    found, read = dict[str, frozenset[str]](), frozenset[str]()
    for kernel in reversed(kernels):
        found[kernel.name] = read
        read |= {v.buffer for v in kernel.accesses if v.op == "load"}
    return found


def _settings_beside(
    kernel: ir.Kernel, own: Layout, main: ir.Kernel, layout: Layout, setting: Setting
) -> tuple[Beside, ...]:
    """The settings of a launch beside the main one, which has `setting`: that as well where neither reduces anything,
    for their rows are as short."""
    is_alike = not (kernel.reduced or main.reduced) and kind_of(*laid_out(main, layout)) is kind_of(
        *laid_out(kernel, own)
    )
    return (Beside(setting),) if is_alike and setting in choices(kernel, own) else secondary_settings(kernel, own, main)


def _layout_beside(main: ir.Kernel, layout: Layout, kernel: ir.Kernel) -> Layout:
    """The layout of a launch beside the main one. What adds up partial results, or puts something into scratch memory,
    asks nothing of how many there are, unless the main one has rows as long: a multiple of 16 would keep the whole plan
    from most calls. Scratch memory and tensors of one dimension lie as they are read, whatever runs across in the main
    one."""
    if layout.across and _dimensions_read(kernel) < 2:
        layout = GATHERED
    if not is_for(kernel, layout):
        opened, tile = laid_out(kernel, layout)
        if not tile.p:
            layout = STRIDED
        elif not any(b.leading for b in opened.buffers):  # "..." keeps its three strides
            layout = ALIGNED if layout.dense else GATHERED
    if not layout.aligned or not (kernel.is_of_scratch or _puts_into_scratch(kernel)):
        return layout
    tile, of_main = (laid_out(k, layout)[1] for k in (kernel, main))
    is_as_long = ix.same(*(ix.product([a.size for a in t.q]) for t in (tile, of_main)))
    return layout if is_as_long else GATHERED if layout.pitched else ROWS


def generate_any(
    fn: Callable[..., Any], signature: Signature, name: str, grad: bool = False, debug: bool = False
) -> Generated | GeneratedLists:
    """:func:`generate`, of functions of lists too."""
    if any(spec.is_list for spec in signature.tensors.values()):
        with reported(where(fn)):
            return generate_lists(fn, signature, name, grad, debug)
    return generate(fn, signature, name, grad, debug)


def generate_all(functions: Sequence[Declared], debug: bool = False) -> list[Family]:
    """The families of declared functions. Raises Refused, of all that are refused, with the others' families."""
    families: list[Family] = []
    refused: list[Exception] = []
    for one in functions:
        try:
            families += generate_any(one.fn, one.signature, one.name, one.grad, debug).families
        except BuildError as error:
            refused.append(error)
    if refused:
        raise Refused(refused, families)
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
        backward = _backward(fn, signature, name, traces) if grad else None
    except TraceError as error:
        raise TraceError(str(error) if of_function(fn) in str(error) else f"{where(fn)}: {error}") from None
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
    names = Names()
    return tuple(lowered_graph(t, name, names) for t in traces)


def _backward(fn: Callable[..., Any], signature: Signature, name: str, forward: Sequence[Trace]) -> Generated:
    if any(trace.mutated for trace in forward):
        raise TraceError(f"{where(fn)}: a function that changes its arguments has no gradient; leave out grad=True")
    own, traces = backward_traces(fn, signature, name, RULED)
    return Generated(f"{name}_backward", own, _lowered(traces, f"{name}_backward"), f"Gradients of {name}.")
