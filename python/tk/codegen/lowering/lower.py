"""Lower: a core graph -> the kernels of one plan.

Every node becomes a :class:`~tk.codegen.lowering.lazy.Lazy`, a tensor that can be read at an index (graph.py, by the
rules of rules/). What is to be stored of them becomes launches (seeds.py).
"""

from __future__ import annotations

from tk.codegen.ir import Kernel
from tk.codegen.lowering.graph import LazyGraph
from tk.codegen.lowering.kernels import lowered
from tk.codegen.lowering.lazy import Substitution
from tk.codegen.lowering.rules import RULES
from tk.codegen.tracing.trace import Trace


def lower(
    trace: Trace, name: str, splitter: Substitution | None = None, deterministic: bool = False, rounded: bool = False
) -> list[Kernel]:
    """Raises TraceError for an op without a rule, with the line that asked for it.

    splitter: what is read in place of some of the reductions. deterministic: no result depends on the order in which
    programs run. rounded: sums of 16-bit floats at indices are, by every addition."""
    return lowered(LazyGraph(trace, RULES, deterministic, rounded), name, splitter)
