"""Makes the kernels of one plan of a graph's lazy tensors."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tk.codegen import passes
from tk.codegen.errors import TraceError
from tk.codegen.ir import Buffer, Kernel, Value
from tk.codegen.lowering.graph import LazyGraph, Rule
from tk.codegen.lowering.lazy import Lazy, Substitution
from tk.codegen.lowering.seeds import Seed, kernels
from tk.codegen.tracing.arguments import DTYPE_NAMES
from tk.codegen.tracing.combine import FUNCTIONS
from tk.codegen.tracing.trace import scalars


def lowered(graph: LazyGraph, name: str, splitter: Substitution | None = None) -> list[Kernel]:
    """The kernels that store the results of a graph, and what it changes in place."""
    trace = graph.trace
    seeds = [Seed(graph.tensor(node), graph.output_buffer(i, node)) for i, node in enumerate(trace.new)]
    changed = [Seed(graph.tensor(n), graph.mutated_buffer(p)) for p, n in trace.mutated.items()]
    found = kernels(name, [*seeds, *changed], splitter)
    if not trace.mutated or _in_place_is_safe(found):
        return found
    # What is still read elsewhere may not be overwritten: through scratch memory, and copied at the end.
    scratch = {p: Buffer(f"new_{p}", "scratch", graph.mutated_buffer(p).dtype, graph.mutated_buffer(p).sizes)
               for p in trace.mutated}  # fmt: skip
    first = kernels(name, [*seeds, *(Seed(graph.tensor(n), scratch[p]) for p, n in trace.mutated.items())], splitter)
    copies = [Seed(_stored(b), graph.mutated_buffer(p)) for p, b in scratch.items()]
    return [*first, *kernels(f"{name}_copy", copies)]


def _stored(buffer: Buffer) -> Lazy:
    return Lazy(buffer.sizes, buffer.dtype, lambda e, i: e.load(buffer, i))


def _in_place_is_safe(found: Sequence[Kernel]) -> bool:
    """Whether every argument that is written is read by earlier launches and the same only, and by that only at the
    place that it writes, in the pass over what is reduced that writes it."""
    for i, kernel in enumerate(found):
        for store in (v for v in kernel.values if v.op == "store" and kernel.buffer(v.buffer).kind == "mutated"):
            for other in found[i:]:
                reads = [v for v in other.values if v.op == "load" and v.buffer == store.buffer]
                if reads and (other is not kernel or any(r.index != store.index for r in reads)):
                    return False
                if reads and _has_pass_after(kernel, store):
                    return False
    return True


def _has_pass_after(kernel: Kernel, store: Value) -> bool:
    """Whether a launch that runs through what is reduced in blocks goes over it once more."""
    generation: dict[int, int] = {}  # how many reductions, one of the other, come before a value
    for v in kernel.values:
        generation[v.number] = max((generation[a] for a in v.args), default=0) + (v.op == "reduce")
    reduced = {a.symbol for a in kernel.reduced}
    passes = [generation[v.number] - 1 for v in kernel.values if v.op == "reduce"]
    passes += [generation[v.number] for v in kernel.values
               if v.op == "store" and any(i.free_symbols & reduced for i in v.index)]  # fmt: skip
    return any(p > generation[store.number] for p in passes)


# --- The combine function of a scan ---


def combine_kernel(number: int, dtypes: Sequence[str], rules: Mapping[str, Rule]) -> Kernel:
    """The kernel of scalars that combine function `number` is. Raises TraceError where it is more than arithmetic on
    what it is given."""
    trace = scalars(number, dtypes, frozenset(rules))
    found = lowered(LazyGraph(trace, rules), "combine")
    results = [DTYPE_NAMES[n.meta["val"].dtype] for n in trace.new]
    if len(found) != 1 or found[0].axes:
        raise TraceError("the combine function of a scan may hold pointwise operations only")
    if results != list(dtypes):
        raise TraceError(
            f"the combine function of {', '.join(dtypes)} returns {', '.join(results)}; it must be the same"
        )
    made = passes.run(found[0])
    digest = hashlib.sha256(str(made).encode()).hexdigest()[:6]
    word = re.sub(r"\W", "", FUNCTIONS[number].name)
    return replace(made, name=f"combine_{word}_{digest}")
