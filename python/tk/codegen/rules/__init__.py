"""A rule for every core op: how it is read at an index. What is not here is refused by name."""

from tk.codegen.rules import creation, indirect, pointwise, reductions, scans, sorts, views
from tk.codegen.rules.table import RULES

__all__ = ["RULES", "creation", "indirect", "pointwise", "reductions", "scans", "sorts", "views"]
