"""A rule for every core op: how it is read at an index. What is not here is refused by name."""

from tk.codegen.lowering.rules import (
    creation,
    indirect,
    lists,
    pointwise,
    random,
    reductions,
    scans,
    scatter,
    search,
    sorts,
    views,
)
from tk.codegen.lowering.rules.table import RULES

RULED = frozenset(RULES)  # the names of the ops that have a rule

__all__ = [
    "RULED", "RULES", "creation", "indirect", "lists", "pointwise", "random", "reductions", "scans", "scatter",
    "search", "sorts", "views",
]  # fmt: skip
