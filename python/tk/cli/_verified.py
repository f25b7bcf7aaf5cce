"""Calls of every op of the loaded packs besides mm's, each with every config that fits, held against float64."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tk import capi, errors
from tk.cli import _calls
from tk.cli._calls import Call
from tk.flex.tracing import trace
from tk.flex.tracing.trace import Capture
from tk.generated import inputs, register
from tk.generated.inputs import Example
from tk.heuristics.problem import describe
from tk.ops import flex
from tk.ops.product import allows_tf32
from tk.tune import ops as generated

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Checked:
    """error: the largest deviation from float64 over what the precision that was asked for allows; problem: why there
    is none."""

    kernel: str
    config: str
    error: float = 0.0
    problem: str = ""

    @property
    def is_good(self) -> bool:
        return not self.problem and self.error <= 1.0


def functions(device: str) -> Iterator[Checked]:
    """Of tk's functions over kernels written by hand."""
    for dtype in DTYPES:
        for call, is_tf32 in _asked(_calls.calls(device, dtype), dtype):
            run = partial(call.function, *call.args, **call.kwargs)
            with torch.no_grad(), _named(f"what describes tk.{call.name}"):
                described = describe(call.function, *call.args, **call.kwargs)
            if described is None:
                if device == "cpu":
                    yield _held("ATen", "", run, call, False)
                continue
            if register.find(described.problem.op) is not None and described.problem.op in register.names():
                continue  # below, with every dtype that it has
            takes_config = "config" in inspect.signature(call.function).parameters
            for row in _fitting(described.problem):
                if takes_config:
                    yield _held(row.kernel_name, row.config_name, partial(run, config=row.config), call, is_tf32)
            if not takes_config:
                chosen = capi.choose(described.problem)
                yield _held(chosen.kernel_name, chosen.config_name, run, call, is_tf32)


def _asked(calls: Iterable[Call], dtype: torch.dtype) -> Iterator[tuple[Call, bool]]:
    """Of float32, where a call can name its precision, with either; and whether it may round to tf32."""
    for call in calls:
        if dtype is not torch.float32 or "precision" not in inspect.signature(call.function).parameters:
            yield call, dtype is torch.float32 and allows_tf32()
            continue
        for precision in ("ieee", "tf32"):
            yield replace(call, kwargs={**call.kwargs, "precision": precision}), precision == "tf32"


def _fitting(problem: capi.Problem) -> list[capi.Candidate]:
    return [row for row in capi.candidates(problem) if row.fits]


def _held(kernel: str, config: str, run: Any, call: Call, is_tf32: bool) -> Checked:
    try:
        with torch.no_grad(), _named(f"tk.{call.name} by {kernel}/{config}"):
            found = run()
        return Checked(kernel, config, _error(found, _exact(call), is_tf32))
    except (errors.Error, RuntimeError, ValueError) as error:
        return Checked(f"{kernel} ({call.name})", config, problem=str(error))


@contextmanager
def _named(what: str) -> Iterator[None]:
    """An error on the GPU ends the process's context, and all later calls: it is raised with what ran, at once."""
    try:
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except torch.AcceleratorError as error:
        raise SystemExit(f"tk verify: {what} ended the CUDA context: {error}") from error


def _exact(call: Call) -> Any:
    """On the CPU: by torch in float64; where torch has no such function, by tk's reference."""
    args, kwargs = tree_map_only(Tensor, lambda x: x.cpu(), (call.args, call.kwargs))
    if "device" in kwargs:
        kwargs["device"] = "cpu"
    with torch.no_grad():
        if call.torchs is None:
            return call.function(*args, **kwargs)
        return call.torchs(*tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, args))


def _error(found: Any, exact: Any, is_tf32: bool) -> float:
    pairs = zip(tree_leaves(found), tree_leaves(exact), strict=True)
    return max((_of_one(x, y, is_tf32) for x, y in pairs if isinstance(x, Tensor)), default=0.0)


def _of_one(found: Tensor, exact: Tensor, is_tf32: bool) -> float:
    """Integers must be equal."""
    found, exact = found.detach().cpu(), exact.detach().cpu()
    if not found.is_floating_point():
        return 0.0 if torch.equal(found, exact.to(found.dtype)) else float("inf")
    reference = exact.double()
    bound = unit(found.dtype, is_tf32) * float(reference.abs().max()) if reference.numel() else 1.0
    deviation = (found.double() - reference).abs().max() if reference.numel() else torch.zeros(())
    return float("inf") if bool(deviation.isnan()) else float(deviation) / (bound + 1e-30)


def unit(dtype: torch.dtype, is_tf32: bool) -> float:
    """Of the largest result what may be wrong in any: a few roundings of what products are made of and of the result.
    Sums of float32 have some in every step."""
    if dtype is torch.float32:
        return 2.0**-8 if is_tf32 else 2.0**-17
    return {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float64: 2.0**-40}.get(dtype, 2.0**-2)


# --- Generated ops ---

SIZE, LEADING = 40, (3, 5)


def generated_ops(device: str) -> Iterator[Checked]:
    """Of the package and of users: for every choice of dtypes and flags, against the recorded graph in float64."""
    for name in register.names():
        op = register.find(name)
        assert op is not None
        try:
            signature = inputs.signature_of(op)
        except (errors.Error, ValueError) as error:
            yield Checked(name, "", problem=f"not run: {error}")
            continue
        sizes = dict.fromkeys(signature.letters, SIZE)
        leading = LEADING if any(t.leading for t in signature.tensors.values()) else ()
        for dtypes, flags in inputs.kinds(op):
            yield from _example(Example(op, signature, dtypes, leading, sizes, flags, places=2), device)


def _example(example: Example, device: str) -> Iterator[Checked]:
    try:
        args = example.arguments(device)
        described = describe(generated.call, example, args)
    except (errors.Error, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        yield Checked(example.op.name, "", problem=f"not run: {example}: {error}")
        return
    rows = [] if described is None else _fitting(described.problem)
    numbers = {row.config: (row.kernel_name, row.config_name) for row in rows}
    if described is None and device == "cpu":
        numbers = {-1: (example.op.name, "ATen")}
    for number, (kernel, config) in numbers.items():
        try:  # of a larger error than ATen's by half
            with _named(f"{example} by {kernel}/{config}"):
                deviation = generated.worst_error(example, args, number) / 2
            yield Checked(kernel, config, deviation)
        except (errors.Error, RuntimeError, ValueError, NotImplementedError) as error:
            yield Checked(kernel, config, problem=f"{example}: {error}")


# --- Attention's mods ---

HEADS, ROWS, HEAD_SIZES = 2, 64, (64, 128)


def mods(device: str) -> Iterator[Checked]:
    """The pairs of all packs, forward, with what they capture made up."""
    for name in register.attention_names():
        op = register.find(name)
        text = op.meta.get("flex") if op is not None else None
        if name.endswith("_backward") or not isinstance(text, str):
            continue
        for dtype in DTYPES:
            for size in HEAD_SIZES:
                yield from _pair(name, text, dtype, size, device)


def _pair(name: str, text: str, dtype: torch.dtype, size: int, device: str) -> Iterator[Checked]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, ROWS, size, generator=generator).to(dtype) for _ in range(3))
    traced = trace.parse(text)
    values = [_captured(c) for c in traced.captures]
    config = f"{str(dtype).removeprefix('torch.')} {size}"

    def run(device: str, dtype: torch.dtype) -> Tensor:
        there = [x.to(device) if isinstance(x, Tensor) else x for x in values]
        operands: list[Any] = [x.to(device, dtype) for x in (q, k, v)]
        absent: list[Any] = [None] * len(flex.OPTIONAL)
        everywhere = 1 << 30
        request = (*operands, text, *traced.by_kind(there), *absent, size**-0.5, everywhere, everywhere)
        out, _ = flex.forward(*flex.Request(*request))
        return out

    try:
        exact = run("cpu", torch.float64)
    except (IndexError, RuntimeError, ValueError) as error:  # what was made up does not go together
        yield Checked(name, config, problem=f"not run: {error}")
        return
    try:
        with _named(f"{name} {config}"):
            found = run(device, dtype)
        yield Checked(name, config, _of_one(found, exact, allows_tf32()))
    except (errors.Error, RuntimeError, ValueError) as error:
        missing = isinstance(errors.typed(error), errors.VariantNotFoundError) or "must be of dtype" in str(error)
        if not missing:  # which dtypes and head sizes there are is the packs' choice
            yield Checked(name, config, problem=str(error))


def _captured(c: Capture) -> Any:
    if c.kind != "tensor":
        return 1 if c.kind == "int" else 1.0
    sizes = [ROWS] * c.rank if c.rank <= 3 else [*[HEADS] * (c.rank - 2), ROWS, ROWS]  # batch and heads first
    return torch.ones(sizes, dtype=c.dtype)
