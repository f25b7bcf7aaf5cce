"""Carries out a plan with Triton's interpreter: what the core does on a GPU, on CPU tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from tk.aot.expr import Problem, TensorValue, as_expr, evaluate_locals
from tk.aot.spec import Arg, Bundle, Const, Float, Int, Op, Plan, Pointer, Scratch

H200 = {"sm_count": 132, "arch": 90, "shared_optin": 227 * 1024, "l2_bytes": 60 << 20}
DTYPES = {
    torch.uint8: 0, torch.int32: 3, torch.float16: 5, torch.float32: 6, torch.bfloat16: 15,
    torch.float8_e5m2: 23, torch.float8_e4m3fn: 24,
}  # fmt: skip


def describe(op: Op, tensors: Sequence[torch.Tensor | None], ints: Sequence[int]) -> Problem:
    """A problem as expressions see it, the op's locals worked out."""
    values = [None if t is None else TensorValue(t.shape, t.stride(), DTYPES[t.dtype], _alignment(t)) for t in tensors]
    problem = Problem(values, tuple(ints), 0, H200)
    return replace(problem, locals=evaluate_locals(op.locals.values(), problem))


def _alignment(t: torch.Tensor) -> int:
    return math.gcd(t.data_ptr(), 256)


def failed_constraint(plan: Plan, problem: Problem) -> str | None:
    """The first constraint that does not hold."""
    return next((c.message for c in plan.constraints if not c.holds.evaluate(problem)), None)


def run(
    op: Op, plan: Plan, tensors: Sequence[torch.Tensor | None], ints: Sequence[int], floats: Sequence[float]
) -> None:
    """Launches the plan's launches in turn. tensors: in the op's order, outputs too; an absent one is None."""
    problem = describe(op, tensors, ints)
    assert (failed := failed_constraint(plan, problem)) is None, failed
    problem = replace(problem, locals=evaluate_locals(plan.locals, problem))

    def number(x: object) -> int:
        return as_expr(x).evaluate(problem)

    # Scratch memory holds anything: NaN shows what is read before it is written.
    buffers = [torch.full((number(b.bytes) // 4,), math.nan) for b in plan.buffers]

    def value(arg: Arg | Bundle) -> object:
        if isinstance(arg, tuple):
            return type(arg)(*map(value, arg))
        match arg:
            case Const():
                return arg.value
            case Int():
                return number(arg.value)
            case Float():
                return floats[arg.index]
            case Pointer():
                return _pointer(tensors[arg.tensor.index], arg.dtype)
            case Scratch():
                return buffers[arg.buffer]
        raise NotImplementedError(f"{arg}: the interpreter has no tensor maps")

    for launch in plan.launches:
        if number(launch.when):
            grid = tuple(number(extent) for extent in launch.grid)
            launch.fn[grid](**{name: value(arg) for name, arg in launch.args.items()})


def _pointer(t: torch.Tensor | None, dtype: str) -> torch.Tensor:
    """An absent tensor must not be read: NaN shows if it is. A kernel may read words where the tensor has elements."""
    if t is None:
        t = torch.full((2,), math.nan)
    if t.dtype == _WORDS.get(dtype, t.dtype):
        return t
    storage = t.untyped_storage()
    first = (t.data_ptr() - storage.data_ptr()) // _WORDS[dtype].itemsize
    return torch.empty(0, dtype=_WORDS[dtype]).set_(storage, first, (1,), (1,))


_WORDS = {"u8": torch.uint8, "i32": torch.int32, "i64": torch.int64}
