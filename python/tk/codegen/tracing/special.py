"""Functions that neither Triton nor torch takes apart, in arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from tk.codegen.errors import TraceError

aten, prims = torch.ops.aten, torch.ops.prims

# Of the asymptotic series of digamma and trigamma in 1/x²: Bernoulli numbers, over 2k and as they are.
_DIGAMMA = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
_TRIGAMMA = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66)
_SHIFTS = 10  # the series is used from here on


def _wide(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        return x
    return x.float() if x.is_floating_point() else x.to(torch.get_default_dtype())


def _polynomial(z: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    found = torch.full_like(z, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        found = found * z + c
    return found


def digamma(x: Tensor) -> Tensor:
    """digamma by the recurrence up to where the asymptotic series holds, and by the reflection of negative numbers."""
    given, x = x, _wide(x)
    is_negative = x < 0
    fraction = x - torch.round(x)  # near a pole almost 0, where its product with pi has all digits
    reflected = torch.where(fraction == 0, math.nan, -math.pi / torch.tan(math.pi * fraction))
    result = torch.where(is_negative, reflected, 0.0)
    at = torch.where(is_negative, 1 - x, x)
    for _ in range(_SHIFTS):
        is_small = at < _SHIFTS
        result = torch.where(is_small, result - 1 / at, result)
        at = torch.where(is_small, at + 1, at)
    z = 1 / (at * at)
    result = result + torch.log(at) - 0.5 / at - z * _polynomial(z, _DIGAMMA)
    result = torch.where(x == 0, torch.copysign(torch.full_like(x, math.inf), -x), result)
    return result.to(given.dtype if given.is_floating_point() else x.dtype)


def polygamma(n: int, x: Tensor) -> Tensor:
    if n == 0:
        return digamma(x)
    if n != 1:
        raise TraceError(f"polygamma of order {n}: there are 0 (digamma) and 1")
    given, x = x, _wide(x)
    is_negative = x < 0.5
    sine = torch.sin(math.pi * (x - torch.round(x)))
    result = torch.where(is_negative, -(math.pi**2) / (sine * sine), 0.0)
    at = torch.where(is_negative, 1 - x, x)
    for _ in range(_SHIFTS):
        is_small = at < _SHIFTS
        result = torch.where(is_small, result + 1 / (at * at), result)
        at = torch.where(is_small, at + 1, at)
    z = 1 / (at * at)
    result = result + 1 / at + 0.5 * z + z / at * _polynomial(z, _TRIGAMMA)
    result = torch.where(is_negative, -result, result)
    return result.to(given.dtype if given.is_floating_point() else x.dtype)


# So many steps Euclid's algorithm takes at most, for two neighbours of Fibonacci's numbers.
_STEPS: Mapping[torch.dtype, int] = {torch.uint8: 13, torch.int8: 11, torch.int16: 23, torch.int32: 46, torch.int64: 92}


def gcd(a: Tensor, b: Tensor) -> Tensor:
    dtype = torch.promote_types(a.dtype, b.dtype)
    a, b = torch.broadcast_tensors(a.to(dtype).abs(), b.to(dtype).abs())
    for _ in range(_STEPS[dtype]):
        is_done = b == 0
        rest = torch.fmod(a, torch.where(is_done, 1, b))
        a, b = torch.where(is_done, a, b), torch.where(is_done, b, rest)
    return a


def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    """Each against all: torch's own asks whether there are so many that sorting them would pay."""
    dtype = torch.result_type(elements, test_elements)
    elements, tests = (x.to(dtype) if isinstance(x, Tensor) else x for x in (elements, test_elements))
    if not isinstance(tests, Tensor):
        return torch.ne(elements, tests) if invert else torch.eq(elements, tests)
    each = elements.unsqueeze(-1) if isinstance(elements, Tensor) else elements
    found = torch.eq(tests.reshape(-1), each).any(-1)
    return torch.logical_not(found) if invert else found


def scalar_tensor(number: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    return torch.full((), number, dtype=dtype, device=device)


class FrontDims(TorchDispatchMode):
    """Norms get their dimensions counted from the front. Where torch 2.11 works out shapes, it keeps one of size 1 that
    is counted from the end."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.linalg_vector_norm.default and len(args) > 2 and args[2] is not None:
            args = (*args[:2], [d % max(args[0].dim(), 1) for d in args[2]], *args[3:])
        return func(*args, **(kwargs or {}))


def shapes_of_norms() -> AbstractContextManager[Any]:
    """A context in which a function is traced with the shapes of norms."""
    is_needed = TorchVersion(torch.__version__) < TorchVersion("2.12")
    return FrontDims() if is_needed else nullcontext()


DECOMPOSITIONS: Mapping[Any, Callable[..., Tensor]] = {
    aten.digamma.default: digamma, prims.digamma.default: digamma, aten.polygamma.default: polygamma,
    aten.gcd.default: gcd, prims.gcd.default: gcd, prims.scalar_tensor.default: scalar_tensor,
    aten.isin.Tensor_Tensor: isin, aten.isin.Tensor_Scalar: isin, aten.isin.Scalar_Tensor: isin,
}  # fmt: skip
