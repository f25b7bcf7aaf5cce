"""Build side: a traced function becomes the family of its op. Nothing at run time imports this."""

from __future__ import annotations

from typing import Any

from tk.aot.spec import Family
from tk.b2b.function import Registered, op_name
from tk.codegen import source
from tk.flex.codegen import printing
from tk.kernels.attention.entry import entry
from tk.kernels.b2b import fused
from tk.kernels.b2b.family import portable, sample
from tk.kernels.b2b.op import Problem


def registered_family(registered: Registered) -> Family:
    captures = printing.captures_of(registered.traced, False)
    problem = Problem(
        op_name(registered.traced),
        tuple(printing.NAMES[d] for d in registered.dtypes),
        tuple((c.name, c.kind) for c in captures),
        registered.traced.text,
    )
    return Family(problem.op, (fused.kernel(problem, _printed(problem, registered)),), sample, portable=portable)


def _printed(problem: Problem, registered: Registered) -> Any:
    """The kernel of this function: f, and an entry with flat parameters in front of `b2b_fused`."""
    name = f"{problem.name}_kernel"
    numbers = [name for name, _ in problem.numbers]
    mods = printing.mods_of(registered.traced, False)
    return source.function(name, entry(name, fused.b2b_fused, mods, numbers, what=_WHAT))


_WHAT = "two products with a function between them, printed by tk.b2b.family"
