"""Whether the recorded graphs of a function and of its gradient may be differentiated in their place.

What ATen differentiates is what was recorded: of a function with a gradient of its own (torch.autograd.Function), or
one that detaches where a trace does not see it, that is another function. So the gradient that was traced is held
against that of the recorded graph, and so are their derivatives, on small numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tk.codegen.tracing import saved
from tk.codegen.tracing.arguments import LEADING
from tk.codegen.tracing.trace import Trace
from tk.generated import interpret
from tk.generated.signature import DTYPES, NumberSpec


def agree(forward: Trace, backward: Trace) -> bool:
    """Whether the recorded graphs of a function and of its gradient are differentiated alike. False where that cannot
    be told: ATen has not the derivative, or takes none of the numbers that are made up here."""
    found = [_agree_at(forward, backward, values) for values in _points(forward)]
    return None not in found and any(found)


def _points(forward: Trace) -> list[dict[str, Any]]:
    """Two calls: with numbers of either sign, and with numbers from 0 to 1, for functions that have no others."""
    generator = torch.Generator().manual_seed(0)
    made = (
        lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64),
        lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1,
    )
    return [_call(forward, make, generator) for make in made]


def _call(forward: Trace, make: Any, generator: torch.Generator) -> dict[str, Any]:
    signature = forward.signature
    sizes = {name: 2 * (i + 2) for i, name in enumerate((*signature.letters, LEADING))}
    found: dict[str, Any] = {}
    for name, spec in signature.params.items():
        if isinstance(spec, NumberSpec):
            found[name] = forward.flags.get(name, 1 if spec.kind == "int" else 0.5)
            continue
        shape = [*([sizes[LEADING]] if spec.leading else []), *spec.shape(sizes)]
        dtype = DTYPES[forward.dtypes.get(spec.dtype, spec.dtype)]
        is_float = dtype.is_floating_point
        found[name] = make(shape) if is_float else torch.randint(0, 2, shape, generator=generator).to(dtype)
    return found


def _agree_at(forward: Trace, backward: Trace, values: Mapping[str, Any]) -> bool | None:
    """None: they do not. False: neither is a number here, or ATen cannot say."""
    names = [name for name, x in values.items() if isinstance(x, Tensor) and x.is_floating_point()]
    try:
        with torch.enable_grad():
            leaves = [values[name].clone().requires_grad_() for name in names]
            given = {**values, **dict(zip(names, leaves, strict=True))}
            results = _run(forward, given)
            outputs = [y for y in results if y.is_floating_point()]
            grads = [torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape).requires_grad_() for y in outputs]
            given |= {saved.name(i): y for i, y in enumerate(results)} | {f"grad_{i}": g for i, g in enumerate(grads)}
            mine = _run(backward, given)
            theirs = _vjp(outputs, leaves, grads)
            pairs = [*zip(mine, theirs, strict=True)]
            weights = [torch.linspace(1, 2, g.numel(), dtype=g.dtype).reshape(g.shape) for g in theirs]
            second = [_vjp(found, [*leaves, *grads], weights) for found in (mine, theirs)]
        pairs += zip(*second, strict=True)
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return False
    if not all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True) for a, b in pairs):
        return None
    return all(bool(a.isfinite().all()) for a, _ in pairs)


def _run(trace: Trace, values: Mapping[str, Any]) -> list[Tensor]:
    return interpret.evaluate(interpret.in_fp64(trace.recorded), values, "op", take_apart=True)


def _vjp(outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """The product of gradients with the Jacobian of outputs, which may be constant."""
    pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if y.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(
        [y for y, _ in pairs], inputs, [g for _, g in pairs], create_graph=True, materialize_grads=True
    )
    return list(found)
