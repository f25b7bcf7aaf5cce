"""Generated ops: a call of one, run and judged; for benchmarks and GPU tests.

The reference is the op's recorded graph in fp64, torch's own error that of the same graph as ATen runs it at the
arguments' dtypes. The absolute term of the judgement (benchmarks/accuracy.py) is measured: it is what fp64 results
change by when every argument and every op's result is rounded to fp32, times the steps in which a sum may round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from benchmarks import accuracy
from tk.generated import interpret
from tk.generated.inputs import listed
from tk.generated.problem import Call
from tk.generated.records import GeneratedOp

Verdicts = list[accuracy.Verdict]
# Add by atomics where their argument `index` says, unless determinism is asked for.
IN_ANY_ORDER = ("embedding_backward", "scatter_add", "scatter_add_columns", "index_add")

OF_PRODUCTS = ("cumprod",)  # an element of a row is the product of all up to it


class WrongResult(Exception):
    """Says which output is wrong, and by how much."""


def run_tk(op: GeneratedOp, args: Sequence[Any], config: int = -1) -> list[Tensor]:
    """The outputs, then the tensors written in place (copies: the arguments are left alone)."""
    args = [x.clone() if p.mutated else x for p, x in zip(op.params, args, strict=True)]
    found = listed(getattr(torch.ops.tk, op.name)(*args, config=config))
    return [*found, *(x for p, x in zip(op.params, args, strict=True) if p.mutated)]


def judge(op: GeneratedOp, args: Sequence[Any], results: Sequence[Tensor]) -> Verdicts:
    """A verdict for every floating-point result. Raises WrongResult for the first that is not what it should be."""
    call = Call(op, [*args, -1, 0])
    exact, torchs = interpret.aten(call, exact=True), interpret.aten(call)
    few = min(x.numel() for x in exact) < 64  # of which one chance would say little
    noisy = [_noisy(call) for _ in range(4 if few else 1)]
    if not len(results) == len(exact) == len(torchs):
        raise WrongResult(f"{len(results)} results, the graph has {len(exact)}")
    verdicts = []
    for i, (ours, theirs, reference, *others) in enumerate(zip(results, torchs, exact, *noisy, strict=True)):
        if ours.dtype != theirs.dtype or ours.numel() != theirs.numel():
            raise WrongResult(f"output {i} is {ours.dtype} {list(ours.shape)}, not {theirs.dtype} {list(theirs.shape)}")
        ours = ours.reshape(reference.shape)
        if not ours.is_floating_point():
            if not torch.equal(ours, reference):
                different = int((ours != reference).sum())
                raise WrongResult(f"output {i}: {different} of {ours.numel()} elements differ")
            continue
        if call.op.name in OF_PRODUCTS:
            ours, theirs, reference = _in_factors(ours, theirs, reference)
            room = accuracy.FP32_ROUNDING
        else:
            room = slack(call, reference, others) + _rounded_additions(call, i, theirs.dtype)
        verdict = accuracy.judge(*_comparable(ours, theirs, reference), room)
        if not verdict.ok:
            raise WrongResult(f"output {i}: {verdict}")
        verdicts.append(verdict)
    return verdicts


def _in_factors(ours: Tensor, torchs: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All three over the reference and the number of its factors: in any order, a product of n of them is off by n
    roundings of itself at most. Large products, of which there are few, else outweigh all others."""
    factors = torch.arange(1, reference.shape[-1] + 1, device=reference.device)
    least = max(torch.finfo(torchs.dtype).tiny, 2.0**-100)  # below it, parts of a product lose digits
    unit = 1 / (factors * reference.abs() + least)
    unit = torch.where(reference.isfinite(), unit, 1.0)
    return ours.double() * unit, torchs.double() * unit, reference * unit


class _Rounding(TorchDispatchMode):
    """Every result of an op in fp64 is off as if rounded to fp32, at random: where the function cancels, it shows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree_map(_off, func(*args, **(kwargs or {})))


def _noisy(call: Call) -> list[Tensor]:
    """The reference, by arguments and intermediate results that are rounded to fp32."""
    arguments = {name: _off(interpret.wide(x)) for name, x in interpret.seen(call).items()}
    with _Rounding():
        return interpret.aten(call, exact=True, arguments=arguments)


def _off(x: Any) -> Any:
    if not isinstance(x, Tensor) or x.dtype != torch.float64:
        return x
    return x * torch.randn_like(x).mul_(accuracy.FP32_ROUNDING).add_(1.0)


def slack(call: Call, reference: Tensor, noisy: Sequence[Tensor]) -> float:
    """Of one output. noisy: what it would be if everything were rounded to fp32."""
    noise = max(_rms(x - reference) for x in noisy)
    if call.op.name in IN_ANY_ORDER:
        # One running sum of each element, which ATen's sorted one is not; most elements nothing is added to.
        steps = 4 + math.sqrt(interpret.seen(call)["index"].numel()) / 2
        reference = reference[reference != 0]
    else:
        steps = 4 + math.sqrt(_summed(call, reference)) / 8
    return steps * (noise + accuracy.FP32_ROUNDING * _rms(reference))


def _rounded_additions(call: Call, i: int, dtype: torch.dtype) -> float:
    """Sums of 16 bits at indices, in any order, each of whose additions is rounded as in ATen: one rounding of what a
    place's terms add up to without their signs, where ATen's order may have done with less."""
    if call.op.name not in IN_ANY_ORDER or dtype not in (torch.bfloat16, torch.float16):
        return 0.0
    sizes = {name: _size(interpret.wide(x)) for name, x in interpret.seen(call).items()}
    most = interpret.aten(call, exact=True, arguments=sizes)[i]
    finite = most[is_finite(most)]
    return torch.finfo(dtype).eps * float(finite.max()) / 16 if finite.numel() else 0.0  # of a mean: Verdict.ok


def _size(x: Any) -> Any:
    return x.abs() if isinstance(x, Tensor) and x.is_floating_point() else x


def _summed(call: Call, output: Tensor) -> float:
    """How many elements may go into one of the output."""
    largest = max(x.numel() for x in call.tensors)
    columns = max((x.shape[-1] for p, x in zip(call.op.tensors, call.tensors, strict=True) if p.rank), default=1)
    return max(1.0, columns, largest / max(1, output.numel()))


def _rms(x: Tensor) -> float:
    """Of what is finite."""
    finite = x[is_finite(x)]
    return finite.square().mean().sqrt().item() if finite.numel() else 0.0


def is_finite(x: Tensor) -> Tensor:
    """torch has no isfinite of fp8."""
    return (x.float() if x.dtype.itemsize == 1 else x).isfinite()


def _comparable(ours: Tensor, torchs: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Without the elements that ATen itself, at the dtype, makes NaN or infinite where fp64 does not, or the other way
    round: there the function has no one value."""
    if bool((is_finite(torchs) & is_finite(reference)).all()):
        return ours, torchs, reference
    found, rounded = torchs.double(), reference.to(torchs.dtype).double()
    agree = (found.isnan() == rounded.isnan()) & (found.isinf() == rounded.isinf())
    return tuple(torch.where(agree, x, torch.zeros_like(x)) for x in (ours, torchs, reference))  # type: ignore[return-value]


def same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """NaN is the same as NaN of the same bits."""
    return all(torch.equal(_bits(x), _bits(y)) for x, y in zip(a, b, strict=True))


def _bits(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)
