"""What tk.aot.spec will say of generated ops, until it does: Param, and the further fields of Op and Output."""

from __future__ import annotations

from dataclasses import dataclass

from tk.aot import spec
from tk.aot.spec import Constraint


@dataclass(frozen=True)
class Param:
    """One argument of the op's schema. kind: "tensor", "tensors", "float", "int" or "bool". leading: "..." stands in
    front of the `rank` declared dimensions. mutated: written in place."""

    name: str
    kind: str
    leading: bool = False
    rank: int = 0
    mutated: bool = False


@dataclass(frozen=True)
class Output(spec.Output):
    """leading: the tensor argument whose leading dimensions come before these sizes."""

    leading: int | None = None


@dataclass(frozen=True)
class Op(spec.Op):
    """checks: evaluated first; the first that fails is the call's ValueError. meta: JSON, for Python alone."""

    params: tuple[Param, ...] = ()
    checks: tuple[Constraint, ...] = ()
    meta: str = ""
