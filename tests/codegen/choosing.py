"""Which setting an op's call has on a described H100, without a GPU or the library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from tk.aot.expr import Problem, TensorValue, evaluate_locals
from tk.aot.grid import enumerate_grid
from tk.aot.spec import DTYPES, Plan
from tk.codegen.family import Generated, generate
from tk.generated import Declared

H100 = {"sm_count": 132, "arch": 90, "shared_optin": 232448, "l2_bytes": 50 << 20}


@dataclass(frozen=True)
class Chosen:
    layout: str
    config: str
    plan: Plan
    problem: Problem

    @property
    def programs(self) -> int:
        """Of all launches."""
        return sum(math.prod(n if isinstance(n, int) else n.evaluate(self.problem) for n in launch.grid)
                   for launch in self.plan.launches)  # fmt: skip


@cache
def generated(declared: Declared) -> Generated:
    return generate(declared.fn, declared.signature, declared.name, declared.grad)


def backward(declared: Declared) -> Generated:
    found = generated(declared).backward
    assert found is not None
    return found


def dense(sizes: Sequence[int], dtype: str) -> TensorValue:
    """As the core has it: a dimension of size 1 has the stride 0."""
    strides = [0 if n == 1 else math.prod(sizes[d + 1 :]) for d, n in enumerate(sizes)]
    return TensorValue(sizes, strides, DTYPES[dtype])


def turned(sizes: Sequence[int], dtype: str) -> TensorValue:
    """[..., M, N] whose columns lie in a run."""
    found = dense([*sizes[:-2], sizes[-1], sizes[-2]], dtype)
    return TensorValue(sizes, [*found.strides[:-2], found.strides[-1], found.strides[-2]], DTYPES[dtype])


def chosen(op: Generated, tensors: Sequence[TensorValue], ints: Sequence[int] = (), arch: int = 90) -> Chosen:
    """What is predicted to be the fastest of the whole grid. Of a config the first variant that fits counts."""
    problem = Problem(tensors, ints, 0, H100)
    problem = replace(problem, locals=evaluate_locals(op.op.locals.values(), problem))
    keys = {name: selector.value.evaluate(problem) for name, selector in op.op.selectors.items()}
    found: dict[str, tuple[int, Chosen]] = {}
    for variant in enumerate_grid(op.family, arch).variants:
        plan, config = variant.plan, variant.point.config.name
        is_its = all(keys[name] in among for name, among in plan.serves.items())
        if config not in found and is_its and all(c.holds.evaluate(problem) for c in plan.constraints):
            found[config] = plan.cost.evaluate(problem), Chosen(variant.point.layout, config, plan, problem)
    return min(found.values(), key=lambda one: one[0])[1]
