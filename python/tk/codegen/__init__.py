"""The generator: a plain torch function -> kernels, at build time.

    trace ─► lower ─► passes ─► schedule ─► print ─► a Family, on the road of every other kernel

docs/codegen.md is its guide.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tk.aot.spec import Family, Op
    from tk.generated.declare import Declared

__all__ = ["families_of", "op_of", "show"]


def families_of(module: ModuleType, debug: bool = False) -> list[Family]:
    """Those of the functions that `module` itself declares, in its order. debug: their debug variants. Of the package's
    own, choices may have been measured (kernels/tuned/sm*/<op>.json).

    Raises tk.aot.errors.Refused with everything that is refused, of all functions, and the families of the others."""
    from tk.codegen.family import generate_all
    from tk.generated.declare import Declared

    found = [x for x in vars(module).values() if isinstance(x, Declared) and x.fn.__module__ == module.__name__]
    families = generate_all(list(dict.fromkeys(found)), debug)
    is_own = module.__name__.startswith("tk.kernels.") and not debug
    return [replace(f, tuned=f.op.name) for f in families] if is_own else families


def op_of(declared: Declared) -> Op:
    """The op that a function under ``@tk.op`` is: schema, fake, CPU path and checks, for kernels written by hand. A
    FAMILY of this op in the function's file takes the place of the generated one (docs/add-a-kernel.md)."""
    from tk.codegen.family import generate_any

    op: Op = generate_any(declared.fn, declared.signature, declared.name, declared.grad).op
    return op


def show(path: Path | str, name: str, stage: str) -> str:
    """A stage of the function `name` of the file: "ir", "schedule" or "source". Raises BuildError."""
    from tk.codegen import stages

    return stages.show(Path(path), name, stage)
