"""A rule for every core op: how it is read at an index. What is not here is refused by name."""

from tk.codegen.lowering.rules import (
    creation,
    indirect,
    pointwise,
    random,
    reductions,
    refused,
    scans,
    scatter,
    search,
    sorts,
    views,
)
from tk.codegen.lowering.rules.table import RULES

__all__ = [
    "RULES", "creation", "indirect", "pointwise", "random", "reductions", "refused", "scans", "scatter", "search",
    "sorts", "views",
]  # fmt: skip
