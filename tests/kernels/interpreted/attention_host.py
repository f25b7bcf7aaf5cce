"""Calls of attention ops on CPU tensors with Triton's interpreter: every variant that may run must give the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from tk.aot.expr import Problem, TensorValue, as_expr, evaluate_locals
from tk.aot.grid import Variant, enumerate_grid
from tk.aot.spec import Const, Family, Float, Int, Launch, Op, Plan, Pointer, Scratch
from tk.kernels.attention.problem import BLOCK_LISTS, MAX_LENGTH, TENSORS

SMALL_GPU = {"sm_count": 6, "arch": 90, "shared_optin": 227 * 1024, "l2_bytes": 60 << 20}
NUMBERS = {torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6, torch.bool: 11, torch.bfloat16: 15}
DTYPES = {number: dtype for dtype, number in NUMBERS.items()}
TORCH = {"fp32": torch.float32, "fp16": torch.float16, "i32": torch.int32, "i64": torch.int64, "bf16": torch.bfloat16}


def _create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
    """The interpreter's own makes int32 of the result of a comparison, which carries its operands' dtype."""
    value = arg.data[0] if isinstance(arg.dtype, tl.block_type) else arg.data
    dtype = np.bool_ if np.asarray(value).dtype == np.bool_ else interpreter._get_np_dtype(arg.dtype)
    return interpreter.TensorHandle(np.full(ret_ty.shape, value, dtype=dtype), arg.dtype.scalar)


interpreter.InterpreterBuilder.create_splat = _create_splat


@dataclass
class Call:
    """The arguments of a forward call. lists: of a block mask, by name. captured: by name, in the op's order."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    lists: dict[str, torch.Tensor] = field(default_factory=dict)
    kv_lengths: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    captured: dict[str, Any] = field(default_factory=dict)
    scale: float | None = None
    q_block: int = 128
    kv_block: int = 128
    band: tuple[int, int, int] = (MAX_LENGTH, MAX_LENGTH, 0)
    precision: int = 0
    max_scores: int = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        empty = {n: torch.empty([0] * rank, dtype=torch.int32) for n, rank in TENSORS.items() if rank}
        found = empty | self.lists | dict(query=self.query, key=self.key, value=self.value)
        found["sinks"] = torch.empty(0) if self.sinks is None else self.sinks
        for name in ("kv_lengths", "page_table"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        return found | {n: x for n, x in self.captured.items() if isinstance(x, torch.Tensor)}

    def ints(self, op: Op) -> list[int]:
        left, right, exact = self.band
        known: dict[str, Any] = dict(q_block=self.q_block, kv_block=self.kv_block, precision=self.precision)
        known |= dict(band_left=left, band_right=right, band_exact=exact, grad_captures=0)
        known |= {"negative_scale": (self.scale or 0) < 0, "max_scores": self.max_scores} | self.captured
        return [int(known[n]) for n in op.ints]

    def floats(self, op: Op) -> list[float]:
        scale = self.query.shape[3] ** -0.5 if self.scale is None else self.scale
        return [float(({"scale": scale} | self.captured)[n]) for n in op.floats]


def as_seen(t: torch.Tensor) -> torch.Tensor:
    """The stride of a dimension of size 1 is 0, as the host has it."""
    return t.as_strided(t.shape, [0 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)])


def as_words(t: torch.Tensor, dtype: str) -> torch.Tensor:
    """int64 where a kernel takes the address of words of 32 bits."""
    if t.dtype != torch.int64 or dtype != "i32":
        return t
    memory = torch.empty(0, dtype=torch.int32).set_(t.untyped_storage())
    return memory[2 * t.storage_offset() :]


def alignment(t: torch.Tensor) -> int:
    return math.gcd(t.data_ptr(), 256) or 256


def describe(op: Op, tensors: Sequence[torch.Tensor | None], ints: Sequence[int]) -> Problem:
    values = [None if t is None else TensorValue(t.shape, t.stride(), NUMBERS[t.dtype], alignment(t)) for t in tensors]
    problem = Problem(values, tuple(ints), 0, SMALL_GPU)
    return replace(problem, locals=evaluate_locals(op.locals.values(), problem))


def run_all(family: Family, named: dict[str, torch.Tensor], ints: Sequence[int], floats: Sequence[float],
            only: Callable[[Variant], bool] = lambda v: True) -> Iterator[tuple[str, list[torch.Tensor]]]:  # fmt: skip
    """(name, outputs) of every variant whose constraints hold. Raises ValueError with the first check that fails."""
    for variant, seen, tensors in _fitting(family, named, ints, only):
        launch(variant.plan, seen, tensors, floats)
        yield variant.name, list(tensors[-len(family.op.outputs) :])


def scratch_bytes(family: Family, named: dict[str, torch.Tensor], ints: Sequence[int],
                  only: Callable[[Variant], bool] = lambda v: True) -> Iterator[int]:  # fmt: skip
    """What every variant whose constraints hold asks for."""
    for variant, seen, _ in _fitting(family, named, ints, only):
        problem = replace(seen, locals=evaluate_locals(variant.plan.locals, seen))
        yield sum(as_expr(b.bytes).evaluate(problem) for b in variant.plan.buffers)


def _fitting(family: Family, named: dict[str, torch.Tensor], ints: Sequence[int],
             only: Callable[[Variant], bool]) -> Iterator[tuple[Variant, Problem, list[torch.Tensor]]]:  # fmt: skip
    """Variants whose constraints hold, with the call as they see it, and its tensors, outputs last."""
    op = family.op
    inputs = [as_seen(named[p.name]) for p in op.params if p.kind == "tensor"]
    absent = [None] * len(op.outputs)
    problem = describe(op, [*inputs, *absent], ints)
    for check in op.checks:
        if not check.holds.evaluate(problem):
            raise ValueError(check.message)
    axes = {name: s.value.evaluate(problem) for name, s in op.selectors.items()}
    for variant in enumerate_grid(family, 90).variants:
        if (
            not only(variant)
            or "hopper" in variant.kernel.name
            or any(  # Gluon has no interpreter
                axes[n] not in v for n, v in variant.plan.serves.items()
            )
        ):
            continue
        everything = [*inputs, *(as_seen(_allocate(o, problem)) for o in op.outputs)]
        seen = describe(op, everything, ints)
        if all(c.holds.evaluate(seen) for c in variant.plan.constraints):
            yield variant, seen, everything


def _allocate(output: Any, problem: Problem) -> torch.Tensor:
    sizes, strides = ([as_expr(s).evaluate(problem) for s in x] for x in (output.sizes, output.strides))
    out = torch.empty_strided(sizes, strides, dtype=DTYPES[as_expr(output.dtype).evaluate(problem)])
    return out.fill_(77)


def launch(plan: Plan, problem: Problem, tensors: Sequence[torch.Tensor], floats: Sequence[float]) -> None:
    problem = replace(problem, locals=evaluate_locals(plan.locals, problem))
    assert as_expr(plan.cost).evaluate(problem) > 0

    def number(x: object) -> int:
        return as_expr(x).evaluate(problem)  # type: ignore[arg-type]

    buffers = [torch.full((number(b.bytes),), 255, dtype=torch.uint8) for b in plan.buffers]  # NaN, to be seen

    for one in plan.launches:
        launch_one(one, problem, tensors, floats, buffers)


def launch_one(one: Launch, problem: Problem, tensors: Sequence[torch.Tensor], floats: Sequence[float],
               buffers: Sequence[torch.Tensor]) -> None:  # fmt: skip
    """With the plan's locals in `problem`."""

    def number(x: object) -> int:
        return as_expr(x).evaluate(problem)  # type: ignore[arg-type]

    def value(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return type(arg)(*map(value, arg))
        match arg:
            case Const():
                return arg.value
            case Int():
                found = number(arg.value)
                assert arg.dtype == "i64" or -(2**31) <= found < 2**31, (arg, found)
                assert not arg.divisible or found % 16 == 0
                return found
            case Float():
                x = np.array([floats[arg.index]], np.float32)
                return tl.tensor(interpreter.TensorHandle(x, tl.float32), tl.float32)
            case Pointer():
                t = as_words(tensors[arg.tensor.index], arg.dtype)
                assert not arg.aligned or t.data_ptr() % 16 == 0
                return t if t.numel() else torch.zeros(1, dtype=t.dtype)
            case Scratch():
                return buffers[arg.buffer][number(arg.offset) :].view(TORCH[arg.dtype])
        raise NotImplementedError(arg)

    grid = tuple(number(g) for g in one.grid)
    if number(one.when) and all(grid):
        arguments = {name: value(arg) for name, arg in one.args.items()}
        if "DEPENDENT" in arguments:
            arguments["DEPENDENT"] = False  # the interpreter has no such instructions; launches follow one another
        one.fn[grid](**arguments)


# --- The reference, in fp64 ---


def gather_pages(x: torch.Tensor, page_table: torch.Tensor) -> torch.Tensor:
    """[batch, heads, pages * page_size, D] of a paged tensor."""
    picked = x[page_table.long()]  # [B, P, H, page, D]
    return picked.permute(0, 2, 1, 3, 4).flatten(2, 3)


def reference(call: Call, score_mod: Any = None, mask_mod: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Differentiable: out and natural log-sum-exp in fp64, behind it the largest scores where they are wanted."""
    q, k, v = (x if x.dtype == torch.float64 else x.double() for x in (call.query, call.key, call.value))
    if call.page_table is not None:
        k, v = gather_pages(k, call.page_table), gather_pages(v, call.page_table)
    B, H, M, D = q.shape
    N = k.shape[2]
    k, v = (x.expand(B, *x.shape[1:]).repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    scale = D**-0.5 if call.scale is None else call.scale
    s = q @ k.transpose(-1, -2) * scale
    b, h, i, j = (torch.arange(n).view([-1 if d == e else 1 for e in range(4)]) for d, n in enumerate((B, H, M, N)))
    if score_mod is not None:
        s = score_mod(s, b, h, i, j).double().expand(B, H, M, N)
    keep = torch.ones((), dtype=torch.bool) if mask_mod is None else mask_mod(b, h, i, j)
    if call.kv_lengths is not None:
        keep = keep & (j < call.kv_lengths.view(-1, 1, 1, 1))
    s = s.masked_fill(~keep.expand(B, H, M, N), -math.inf)
    largest = s.amax(-1) if N else torch.full((B, H, M), -math.inf, dtype=torch.float64)
    if call.sinks is not None:
        s = torch.cat([s, call.sinks.double().view(1, H, 1, 1).expand(B, H, M, 1)], -1)
    lse = torch.logsumexp(s, -1)
    weights = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])[..., :N]
    return weights @ v, torch.cat([lse, largest], -1) if call.max_scores else lse


def block_lists(keep: torch.Tensor, q_block: int, kv_block: int) -> dict[str, torch.Tensor]:
    """The lists of a block mask from the dense mask [B or 1, H or 1, M, N]."""
    B, H, M, N = keep.shape
    rows, cols = -(-M // q_block), -(-N // kv_block)
    padded = torch.zeros(B, H, rows * q_block, cols * kv_block, dtype=torch.bool)
    padded[:, :, :M, :N] = keep
    exists = torch.zeros(rows * q_block, cols * kv_block, dtype=torch.bool)
    exists[:M, :N] = True
    blocks = padded.view(B, H, rows, q_block, cols, kv_block)
    some = blocks.any(5).any(3)
    every = (blocks | ~exists.view(rows, q_block, cols, kv_block)).all(5).all(3)
    found = {}
    for full, chosen in (("", some & ~every), ("full_", every)):
        for side, c in (("kv", chosen), ("q", chosen.transpose(-1, -2))):
            found[f"{full}{side}_num_blocks"] = c.sum(-1).int()
            found[f"{full}{side}_indices"] = (~c).int().argsort(dim=-1, stable=True).int()
    assert set(found) == set(BLOCK_LISTS)
    return found
