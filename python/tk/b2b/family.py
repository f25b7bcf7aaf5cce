"""Build side: a traced function becomes the family of its op. Nothing at run time imports this."""

from __future__ import annotations

from tk.aot.spec import Family
from tk.b2b.function import Registered, op_name
from tk.flex.codegen import printing
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
    mods = printing.mods_of(registered.traced, False)
    f = mods.functions(f"{problem.name}_f").SCORE
    kernels = (fused.kernel(problem, fused.unchanged if f is None else f),)
    return Family(problem.op, kernels, sample, portable=portable)
