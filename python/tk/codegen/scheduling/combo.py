"""Combo kernels: what needs nothing of each other is one launch, whose programs are shared out.

if tl.program_id(0) < first_1:
    the one
else:
    the other
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tk.aot.expr import Expr, as_expr
from tk.aot.spec import Arg, Const, Int, Launch
from tk.codegen import along, ir, source
from tk.codegen.scheduling.settings import Setting

PARAMS = "@PARAMS@"  # in a printed function, until they are known
FIRST = "first_program"


@dataclass(frozen=True)
class Printed:
    """A kernel's function without its parameters, and its launch."""

    name: str
    text: str
    args: Mapping[str, Arg]
    programs: Expr
    warps: int
    stages: int
    registers: int
    when: Expr | int
    options: Mapping[str, Any]

    def with_params(self, names: Sequence[str]) -> str:
        params = [f"{n}: tl.constexpr" if isinstance(self.args.get(n), Const) else n for n in names]
        return self.text.replace(PARAMS, f"\n{_wrapped(params)},\n")


def launch(parts: Sequence[Printed]) -> Launch:
    """The launch of one part or more. Those behind the first were printed to be."""
    head = parts[0]
    if len(parts) == 1:
        name, args, text = head.name, dict(head.args), head.with_params(list(head.args))
        programs, when = head.programs, head.when
    else:
        name = f"{head.name}_combo"
        programs, args, text = _together(name, parts)
        when = programs > 0  # one that has none is no reason not to run the others
    return Launch(
        source.function(name, source.module_text(name, text)), args, (programs, 1, 1), num_warps=head.warps,
        num_stages=max(part.stages for part in parts), when=when, maxnreg=head.registers or None,
        options=head.options,
    )  # fmt: skip


def _together(name: str, parts: Sequence[Printed]) -> tuple[Expr, dict[str, Arg], str]:
    """(programs, arguments, text)"""
    args: dict[str, Arg] = {}
    firsts: dict[str, Arg] = {}
    functions, branches = [], []
    programs = as_expr(0)
    for i, part in enumerate(parts):
        names = list(part.args)
        passed = [f"{n}_of_{i}" for n in names]
        args |= {of: part.args[n] for n, of in zip(names, passed, strict=True)}
        if i:
            names, passed = [*names, FIRST], [*passed, f"{FIRST}_{i}"]
            firsts[passed[-1]] = Int(programs, "i32")
        functions.append(part.with_params(names))
        keyword = "else" if i == len(parts) - 1 else f"{'el' if i else ''}if tl.program_id(0) < {FIRST}_{i + 1}"
        branches.append(f"    {keyword}:\n        {part.name}(\n{_wrapped(passed, 12)}\n        )")
        programs = programs + part.programs
    args = {n: x for n, x in args.items() if not isinstance(x, Const)} | firsts | {
        n: x for n, x in args.items() if isinstance(x, Const)
    }  # fmt: skip
    params = [f"{n}: tl.constexpr" if isinstance(x, Const) else n for n, x in args.items()]
    whole = f"@triton.jit\ndef {name}(\n{_wrapped(params)},\n):\n" + "\n".join(branches) + "\n"
    return programs, args, "\n\n".join([*functions, whole])


def _wrapped(names: Sequence[str], indent: int = 4) -> str:
    space = " " * indent
    return textwrap.fill(", ".join(names), 110, initial_indent=space, subsequent_indent=space)


# --- Which ---


def can_share(kernel: ir.Kernel, setting: Setting) -> bool:
    """Whether its launch is one of a plain grid, with what the compiler makes of it: not a sort, nor a scan whose
    programs wait for each other, nor a walk, which has as many programs as are resident."""
    return not (along.sorts(kernel) or setting.spread or kernel.walk or setting.registers)


def levels(kernels: Sequence[ir.Kernel]) -> list[list[int]]:
    """The numbers of those that need only what earlier levels leave. Of launches of one kernel a call takes one."""
    level: list[int] = []
    for i, kernel in enumerate(kernels):
        others = [j for j in range(i) if kernels[j].name != kernel.name]
        before = [level[j] for j in others if _conflict(kernels[j], kernel)]
        level.append(1 + max(before, default=-1))
    return [[i for i, of in enumerate(level) if of == n] for n in range(max(level, default=-1) + 1)]


def _conflict(one: ir.Kernel, other: ir.Kernel) -> bool:
    """Whether one writes what the other reads or writes."""
    (read, written), (others_read, others_written) = _buffers(one), _buffers(other)
    return bool(written & (others_read | others_written) or read & others_written)


def _buffers(kernel: ir.Kernel) -> tuple[set[str], set[str]]:
    """Those that it reads, and those that it writes."""
    written = {v.buffer for v in kernel.values if v.op == "store"}
    return {v.buffer for v in kernel.accesses if v.op != "store"}, written
