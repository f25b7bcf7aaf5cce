"""Build side: a traced function becomes the family of its op. Nothing at run time imports this."""

from __future__ import annotations

from typing import Any

from tk.aot.spec import Family
from tk.b2b.function import Registered, op_name
from tk.codegen import source
from tk.flex import printing
from tk.kernels.attention.entry import parameters
from tk.kernels.b2b import fused
from tk.kernels.b2b.family import portable, sample
from tk.kernels.b2b.op import Problem

_IDENTITY = "@triton.jit\ndef score_mod(score, b, h, q_idx, kv_idx, captures):\n    return score\n"


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
    mods = printing.mods_of(registered.traced, False)
    names = [name for name, _ in problem.numbers]
    captures = f"({', '.join(names)}{',' if len(names) == 1 else ''})"
    passed = [{"captures": captures, "F": "score_mod"}.get(p, p) for p in parameters(fused.b2b_fused)]
    declared = [f"{p}: tl.constexpr" if p.startswith("BLOCK") else p
                for p in parameters(fused.b2b_fused) if p not in ("captures", "F")]  # fmt: skip
    kernel = f"{problem.name}_kernel"
    head = "\n".join(["import triton", "import triton.language as tl", *mods.imports, "",
                      "from tk.kernels.b2b.fused import b2b_fused as body"])  # fmt: skip
    entry = f"@triton.jit\ndef {kernel}({', '.join([*declared, *names])}):\n    body({', '.join(passed)})\n"
    text = f'"""{kernel}: two products with a function between them, printed by tk.b2b.family."""\n\n{head}\n\n\n'
    return source.function(kernel, text + "\n\n".join([mods.score or _IDENTITY, entry]))
