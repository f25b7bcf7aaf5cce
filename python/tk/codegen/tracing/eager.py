"""The function itself, on small tensors of the CPU. Where a trace fails, they say whose fault it is: what torch raises
of them, too, the function has wrong; what it computes there has no kernel."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from tk.codegen.errors import TraceError
from tk.codegen.tracing import combine, random
from tk.codegen.tracing.arguments import orders
from tk.generated.signature import DTYPES, NumberSpec, Signature

# By their contents alone: of other numbers torch may have a result.
_OF_CONTENTS = (torch.linalg.LinAlgError, ZeroDivisionError, NotImplementedError)


def numbers(
    signature: Signature, dtypes: Mapping[str, str], flags: Mapping[str, bool], sizes: Mapping[str, int],
    draw: Callable[..., Tensor] = torch.randn, leading: Sequence[int] = (2, 3),
) -> dict[str, Any]:  # fmt: skip
    """An argument for each parameter. leading: what "..." stands for. Integers are 0 and 1, so that they are indices
    of whatever they index. draw: the others."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    for name, spec in signature.params.items():
        if isinstance(spec, NumberSpec):
            found[name] = flags.get(name, 1 if spec.kind == "int" else 0.5)
            continue
        shape = [*(leading if spec.leading else []), *spec.shape(sizes)]
        dtype = DTYPES[dtypes.get(spec.dtype, spec.dtype)]
        if dtype.is_floating_point:
            found[name] = draw(shape, generator=generator).to(dtype)
        else:
            found[name] = torch.randint(0, 2, shape, generator=generator).to(dtype)
    return found


def error_of(
    fn: Callable[..., Any], signature: Signature, dtypes: Mapping[str, str], flags: Mapping[str, bool],
    is_differentiated: bool = False,
) -> Exception | None:  # fmt: skip
    """What torch raises whatever the sizes and numbers are; None where it has a result of some."""
    first: Exception | None = None
    for order, draw in itertools.product(orders(signature), (torch.randn, torch.rand)):
        sizes = {name: 4 * (i + 2) for i, name in enumerate(order)}
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")
                _call(fn, signature, numbers(signature, dtypes, flags, sizes, draw), is_differentiated)
            return None
        except (*_OF_CONTENTS, TraceError):
            return None
        except Exception as error:
            first = first or error
    return first


def _call(fn: Callable[..., Any], signature: Signature, named: dict[str, Any], is_differentiated: bool) -> None:
    if is_differentiated:
        for x in named.values():
            if isinstance(x, Tensor) and x.is_floating_point():
                x.requires_grad_()
    with random.drawing(signature, named), random.Eager(), combine.replaced(fn):
        results, _ = tree_flatten(fn(**random.own(fn, named)))
    if is_differentiated:
        sums = [r.double().sum() for r in results if isinstance(r, Tensor) and r.requires_grad]
        if sums:
            torch.stack(sums).sum().backward()
