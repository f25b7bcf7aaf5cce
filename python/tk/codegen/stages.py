"""Each stage as text, for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tk.aot.errors import BuildError
from tk.aot.files import import_file
from tk.codegen import source
from tk.codegen.errors import reported, where
from tk.codegen.family import Generated, generate_any
from tk.codegen.lists import ALIGNED, ANY, GeneratedLists
from tk.codegen.scheduling.kinds import choices
from tk.codegen.scheduling.lists import CHUNK, LANES
from tk.codegen.tile import LAYOUTS, Layout, is_for, laid_out
from tk.codegen.ways import WAYS, Graph
from tk.generated.declare import Declared

STAGES = ("ir", "schedule", "source")


def show(path: Path, name: str, stage: str) -> str:
    if stage not in STAGES:
        raise BuildError(f"there is no stage {stage!r}; there are {', '.join(STAGES)}")
    declared = getattr(import_file(path), name, None)
    if not isinstance(declared, Declared):
        raise BuildError(f"{path} declares no op {name}")
    with reported(where(declared.fn)):
        made = generate_any(declared.fn, declared.signature, declared.name, declared.grad)
        return text_of_lists(made, stage) if isinstance(made, GeneratedLists) else text(made, stage)


def text_of_lists(op: GeneratedLists, stage: str) -> str:
    """A stage of an op over lists."""
    parts: list[str] = []
    for graph in op.graphs:
        parts.append(f"# {op.name}, {graph.label}")
        if stage == "ir":
            parts += map(str, graph.kernels)
            continue
        for layout in (ALIGNED, ANY):
            for kernel, launch in zip(graph.kernels, op.plan(graph, layout).launches, strict=True):
                way = f"a chunk of {CHUNK} elements a program" if kernel.axes else f"{LANES} places a program"
                parts.append(f"# {layout}: {kernel.name}: {way}")
                if stage == "source":
                    parts.append(source.text_of(launch.fn) or "")
    return "\n".join(parts)


def text(op: Generated, stage: str, layouts: Sequence[Layout] = LAYOUTS) -> str:
    """A stage of an op and of its backward; the source for these layouts."""
    if op.backward:
        return f"{text(replace(op, backward=None), stage, layouts)}\n{text(op.backward, stage, layouts)}"
    stages: Mapping[str, Callable[[Generated, Graph], Iterator[str]]] = {
        "ir": _ir, "schedule": _schedule, "source": partial(_source, layouts=layouts),
    }  # fmt: skip
    parts = stages[stage]
    return "\n".join(line for graph in op.graphs for line in parts(op, graph))


def _ir(op: Generated, graph: Graph) -> Iterator[str]:
    yield f"# {op.name}, {graph.label}"
    yield from (str(k) for way in WAYS for k in graph.kernels_of(way))


def _schedule(op: Generated, graph: Graph) -> Iterator[str]:
    yield f"{op.name}, {graph.label}"
    for layout in LAYOUTS:
        for kernel in (k for way in WAYS for k in graph.kernels_of(way)):
            if not is_for(kernel, layout):
                continue
            _, tile = laid_out(kernel, layout)
            axes = {"batch": tile.batch, "p": tile.p, "q": tile.q}
            merged = ", ".join(f"{n} = {' '.join(f'{a.name}<{a.size}' for a in x)}" for n, x in axes.items() if x)
            settings = ", ".join(s.name for s in choices(kernel, layout))
            reduced = f", {tile.reduced} reduced" if tile.reduced else ""
            yield f"  {layout.name}: {kernel.name}: {merged or 'a single element'}{reduced}: {settings}"


def _source(op: Generated, graph: Graph, layouts: Sequence[Layout]) -> Iterator[str]:
    """Every distinct text."""
    seen = set()
    for way in WAYS:
        for layout in layouts:
            for setting in op.choices(graph, layout, way):
                for launch in op.launches(op.scheduled(graph.kernels_of(way), layout, setting)):
                    text = source.text_of(launch.fn)
                    if text is not None and text not in seen:
                        seen.add(text)
                        how = ", looped" if setting.looped else ", spread" if setting.spread else ""
                        yield f"# --- {op.name}, {graph.label}, {layout.name}{how}"
                        yield text
