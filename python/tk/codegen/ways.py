"""The ways to compute a graph, and a choice of dtypes and flags as kernels in each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from tk.codegen import along, ir, passes
from tk.codegen.interleaved import steps_of
from tk.codegen.lowering.lower import lower
from tk.codegen.lowering.named import Names
from tk.codegen.lowering.rules.scatter import NotDeterministic
from tk.codegen.lowering.split import Parts, Splitter
from tk.codegen.lowering.walk import Walk, Walker
from tk.codegen.scheduling.settings import SHORT_ROWS
from tk.codegen.tile import ALIGNED, COLUMNS, GATHERED, Layout
from tk.codegen.tracing.trace import Trace

Kernels = tuple[ir.Kernel, ...]

# Ops of the package that keep the last of several elements for one place in every mode.
IN_ORDER = frozenset({"put", "put_rows"})

MOST_SPILLED = 64  # bytes a thread. A setting that spills more is left out: one with smaller blocks is faster
MOST_SPILLED_WALKING = 128  # instead of a walk everything would be read twice


@dataclass(frozen=True)
class Graph:
    """One choice of dtypes and flags, lowered. by_way: its kernels in each of WAYS, none where it is no way for it.
    parts: of split reductions. walk: of sums over rows that are added up where the rows are."""

    trace: Trace
    by_way: Mapping[str, Kernels]
    parts: tuple[Parts, ...] = ()
    walk: Walk | None = None

    @property
    def kernels(self) -> Kernels:
        return self.by_way["whole"]

    def kernels_of(self, way: str) -> Kernels:
        """way: the name of one of WAYS."""
        return self.by_way[way]

    @property
    def label(self) -> str:
        return self.trace.label


def lowered_graph(trace: Trace, name: str, names: Names) -> Graph:
    """Lowers a trace in every way. names: of the op's locals. Raises TraceError."""
    making = _Making(trace, name, names)
    for way in WAYS.values():
        making.by_way[way.name] = way.lower(making)
    return Graph(trace, making.by_way, tuple(making.parts), making.walk)


def depends_on_order(kernel: ir.Kernel) -> bool:
    """Whether results depend on the order of programs: a sum of floats does, and which of several elements stays at one
    place."""
    puts = [v for v in kernel.values if v.op == "store" and v.data]
    return any(v.data == "set" or (v.data == "add" and v.dtype in ir.FLOATS) for v in puts)


@dataclass
class _Making:
    """A graph that is lowered in one way after the other. by_way: what came of those before."""

    trace: Trace
    name: str
    names: Names
    by_way: dict[str, Kernels] = field(default_factory=dict)
    parts: list[Parts] = field(default_factory=list)
    walk: Walk | None = None

    def __post_init__(self) -> None:
        self.splitter = Splitter(self.names)


# --- The ways ---


def _whole(making: _Making) -> Kernels:
    """The graph as it is; of IN_ORDER without what depends on the order of programs."""
    return passes.run_all(lower(making.trace, making.name, deterministic=making.name in IN_ORDER))


def _split(making: _Making) -> Kernels:
    """The graph with split reductions, and sorts in runs that are merged, where there are any."""
    splitter = making.splitter
    made = passes.run_all(lower(making.trace, f"{making.name}_split", splitter))
    making.parts += splitter.parts
    return _shared(made, making.by_way["whole"]) if splitter.parts or splitter.has_runs else ()


def _long(making: _Making) -> Kernels:
    """The graph with rows split over programs, for a few long ones."""
    if making.name.removesuffix("_backward") in SHORT_ROWS:
        return ()
    splitter = Splitter(making.names, rows=True)
    made = passes.run_all(lower(making.trace, f"{making.name}_long", splitter))
    making.parts += splitter.parts
    return _shared(made, making.by_way["whole"]) if splitter.parts else ()


def _interleaved(making: _Making, rows: bool = False) -> Kernels:
    """The graph with columns split into interleaved parts, where no launch reads anything but in such parts. rows: with
    rows, which then lie as columns do."""
    way = "long_interleaved" if rows else "interleaved"
    splitter = Splitter(making.names, rows, interleaved=True)
    made = passes.run_all(lower(making.trace, f"{making.name}_{way}", splitter))
    is_interleaved = splitter.parts and not splitter.has_runs
    if not is_interleaved or not all(steps_of(k) or k.is_of_scratch for k in made):
        return ()
    making.parts += splitter.parts
    return made


def _long_interleaved(making: _Making) -> Kernels:
    return _interleaved(making, rows=True)


def _walked(making: _Making) -> Kernels:
    """The graph with sums over rows in the launch that has the rows."""
    whole = making.by_way["whole"]
    walker = Walker(whole, making.names)
    made = _shared(passes.run_all(lower(making.trace, f"{making.name}_walk", walker)), whole)
    if walker.walk is None or any(k.walk and (along.scans(k) or along.sorts(k)) for k in made):
        return ()
    making.walk = walker.walk
    return made


def _deterministic(making: _Making) -> Kernels:
    """The graph without atomic sums, where the others have any."""
    if any(map(depends_on_order, making.by_way["whole"])):
        with suppress(NotDeterministic):
            return passes.run_all(lower(making.trace, f"{making.name}_deterministic", deterministic=True))
    return ()


def _rounded(making: _Making) -> Kernels:
    """The graph with sums of 16-bit floats at indices in their own dtype: for few additions a place, where a pass over
    all places in fp32 takes longest. What is written in place may end where another tensor begins, which they would
    touch too."""
    if making.trace.mutated:
        return ()
    made = passes.run_all(lower(making.trace, f"{making.name}_rounded", rounded=True))
    return made if any(map(_adds_16, made)) else ()


def _adds_16(kernel: ir.Kernel) -> bool:
    return any(v.op == "store" and v.data == "add" and v.dtype in ir.ROUNDED_SUMS for v in kernel.values)


def _sorted(making: _Making, way: str) -> Kernels:
    """The graph with its one sort `way`: by digits, in one program or in many, or narrow, of which the first few are
    read."""
    if not making.splitter.has_runs:
        return ()
    splitter = Splitter(making.names, sorts=way)
    made = passes.run_all(lower(making.trace, f"{making.name}_{way}", splitter))
    shared = _shared(made, (*making.by_way["whole"], *making.by_way["split"]))
    return shared if _has_one_sort(shared, way) else ()


def _has_one_sort(kernels: Sequence[ir.Kernel], way: str) -> bool:
    """Whether they sort one operand, in this way, and nothing else goes along rows."""
    going = {(v.op, v.args) for k in kernels for v in k.values if v.op in ("sort", "scan", "reduce")}
    sorting = [k for k in kernels if along.sorts(k)]
    is_first_few = way != "narrow" or all(map(along.limits, sorting))
    return len(going) == 1 and any(getattr(v.data, way) for k in sorting for v in along.sorts(k)) and is_first_few


def _shared(kernels: Sequence[ir.Kernel], others: Sequence[ir.Kernel]) -> Kernels:
    """The kernels, each of which is one of the others where these differ in their names alone: then it is compiled
    once."""
    return tuple(next((o for o in others if replace(o, name=k.name) == k), k) for k in kernels)


# --- The settings that they have ---


def _own_kind(graph: Graph, kind: str, of_whole: str, layout: Layout) -> str | None:
    return kind


def _kind_of_whole(graph: Graph, kind: str, of_whole: str, layout: Layout) -> str | None:
    """No kind of its own for rows that are reduced: the split way is as good where there is little to split."""
    return None if kind == "inner" and graph.kernels_of("split") and layout.merged else kind


def _kind_of_split(graph: Graph, kind: str, of_whole: str, layout: Layout) -> str | None:
    """Rows that only the split way has are its parts."""
    return "parts" if kind == "inner" and (graph.walk or of_whole != "inner") else kind


def _kind_of_long(graph: Graph, kind: str, of_whole: str, layout: Layout) -> str | None:
    """A kind in the layouts that take every pitch and step alone: what is seldom called has no more."""
    return None if layout not in (GATHERED, COLUMNS) else "parts" if kind == "inner" else kind


def _kind_of_interleaved(graph: Graph, kind: str, of_whole: str, layout: Layout) -> str | None:
    """A kind in the layout with vectors alone, which is what it is for."""
    return kind if layout is ALIGNED else None


@dataclass(frozen=True)
class Way:
    """name: the prefix of a config's name, but for the first. lower: to kernels, none where it is no way for the graph.
    kind: the row of the table of settings, of (graph, the kind of its main launch, that of the whole way's, layout);
    None where it has no settings there. most_spilled: bytes a thread, of all settings but the first.
    is_batch_invariant: what a row gives does not depend on how many came with it. costs: as measured, in sixteenths of
    what its launches are predicted to take. least_arch: whose instructions its kernels have."""

    name: str
    lower: Callable[[_Making], Kernels]
    kind: Callable[[Graph, str, str, Layout], str | None] = _own_kind
    most_spilled: int = MOST_SPILLED
    is_batch_invariant: bool = True
    costs: int = 16
    has_one_setting: bool = False
    least_arch: int = 0


WAYS: Mapping[str, Way] = {
    way.name: way
    for way in (
        Way("whole", _whole, _kind_of_whole),
        Way("split", _split, _kind_of_split),
        Way("long", _long, _kind_of_long, is_batch_invariant=False, costs=20, has_one_setting=True),
        Way("interleaved", _interleaved, _kind_of_interleaved, has_one_setting=True),
        Way(
            "long_interleaved", _long_interleaved, _kind_of_interleaved, is_batch_invariant=False, has_one_setting=True
        ),
        Way("walk", _walked, most_spilled=MOST_SPILLED_WALKING),
        Way("deterministic", _deterministic, has_one_setting=True),
        Way("rounded", _rounded, least_arch=90),
        Way("digits", lambda making: _sorted(making, "digits")),
        Way("radix", lambda making: _sorted(making, "radix")),
        Way("narrow", lambda making: _sorted(making, "narrow")),
    )
}
