"""Random numbers in a function that is traced.

Every call — ``torch.rand_like``, dropout, ``Tensor.bernoulli_``, … — becomes arithmetic on ``tk_random::bits``, the one
op that kernels draw with and that :mod:`tk.generated.random` computes on the CPU. Its key comes with the call of the
op: the parameters ``seed`` ("i64[]", a 0-d tensor, so that a captured graph may draw it anew) and ``offset`` ("int"),
which a function declares itself or else gains after its own. Calls are told apart by a stream, their number in the
function, so that a backward, which works the forward out again, draws the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode

from tk.codegen.errors import TraceError
from tk.generated import random
from tk.generated.signature import NumberSpec, Signature, TensorSpec

aten = torch.ops.aten

_library = Library("tk_random", "DEF")
_library.define("bits(Tensor seed, SymInt offset, int stream, SymInt[] size) -> Tensor")
_library.impl("bits", random.bits, "CPU")
torch.library.register_fake(
    "tk_random::bits",
    lambda seed, offset, stream, size: torch.empty(size, dtype=torch.int32, device=seed.device),
    lib=_library,
)
if not torch._C._dispatch_has_kernel_for_dispatch_key("tk_random::bits", "Meta"):  # up to 2.12 the fake one is it, too
    _library.impl("bits", lambda seed, offset, stream, size: seed.new_empty(size, dtype=torch.int32), "Meta")


class NeedsSeed(TraceError):
    """The function draws random numbers and has no parameters that say which."""


SEED, OFFSET = TensorSpec("i64", ()), NumberSpec("int")


def with_seed(signature: Signature) -> Signature:
    """The signature with `seed` and `offset` after the function's own parameters. Raises TraceError where it has others
    so called."""
    for name, spec in (("seed", SEED), ("offset", OFFSET)):
        if signature.params.get(name, spec) != spec:
            raise TraceError(
                f"the function draws random numbers, which come of its parameters seed='i64[]' and offset='int'; "
                f"{name}={str(signature.params[name])!r} is something else: rename it"
            )
    return replace(signature, params={**signature.params, "seed": SEED, "offset": OFFSET, **signature.params})


def own(fn: Callable[..., Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the op's arguments that the function itself takes."""
    params = inspect.signature(fn).parameters
    if any(p.kind is p.VAR_KEYWORD for p in params.values()):
        return dict(named)
    return {name: value for name, value in named.items() if name in params}


# --- What a call draws from ---


class _Traced(random.Draws):
    def _bits(self, stream: int, size: Sequence[Any]) -> Tensor:
        return torch.ops.tk_random.bits(self.seed, self.offset, stream, list(size))


_current: ContextVar[random.Draws | None] = ContextVar("draws", default=None)


@contextmanager
def drawing(signature: Signature, named: Mapping[str, Any]) -> Iterator[None]:
    """Random calls draw from these arguments of the op."""
    is_seeded = signature.params.get("seed") == SEED and signature.params.get("offset") == OFFSET
    token = _current.set(_Traced(named["seed"], named["offset"]) if is_seeded else None)
    try:
        yield
    finally:
        _current.reset(token)


def _draws() -> random.Draws:
    draws = _current.get()
    if draws is None:
        raise NeedsSeed("random numbers without a seed")
    return draws


def uniform(size: Sequence[Any], dtype: torch.dtype = torch.float32) -> Tensor:
    return _draws().uniform(size, dtype)


def normal(size: Sequence[Any], dtype: torch.dtype = torch.float32) -> Tensor:
    return _draws().normal(size, dtype)


def integers(low: Any, high: Any, size: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
    return _draws().integers(low, high, size, dtype)


def bernoulli(p: Any, size: Sequence[Any]) -> Tensor:
    """True with probability p."""
    return uniform(size) < p


def dropout(input: Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """torch.nn.functional.dropout."""
    if isinstance(p, float | int) and not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if inplace:
        raise ValueError("dropout in place: assign its result instead")
    return _draws().dropout(input, p) if training else input


# --- In place of ATen's ---


def _float(dtype: torch.dtype | None) -> torch.dtype:
    return dtype or torch.get_default_dtype()


def _native_dropout(x: Tensor, p: Any, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False:
        return x, torch.ones_like(x, dtype=torch.bool)
    keep = uniform(x.shape) >= p
    return torch.where(keep, x * (1 / (1 - p)) if p != 1 else x, 0.0), keep


_TABLE: Mapping[Any, Callable[..., Any]] = {
    aten.rand.default: lambda size, *, dtype=None, **_: uniform(size, _float(dtype)),
    aten.rand_like.default: lambda x, *, dtype=None, **_: uniform(x.shape, dtype or x.dtype),
    aten.randn.default: lambda size, *, dtype=None, **_: normal(size, _float(dtype)),
    aten.randn_like.default: lambda x, *, dtype=None, **_: normal(x.shape, dtype or x.dtype),
    aten.randint.default: lambda high, size, *, dtype=torch.int64, **_: integers(0, high, size, dtype),
    aten.randint.low: lambda low, high, size, *, dtype=torch.int64, **_: integers(low, high, size, dtype),
    aten.randint_like.default: lambda x, high, *, dtype=None, **_: integers(0, high, x.shape, dtype or x.dtype),
    aten.randint_like.low_dtype:
        lambda x, low, high, *, dtype=None, **_: integers(low, high, x.shape, dtype or x.dtype),
    aten.bernoulli.default: lambda x, **_: bernoulli(x, x.shape).to(x.dtype),
    aten.bernoulli.p: lambda x, p, **_: bernoulli(p, x.shape).to(x.dtype),
    aten.bernoulli_.float: lambda x, p=0.5, **_: x.copy_(bernoulli(p, x.shape)),
    aten.bernoulli_.Tensor: lambda x, p, **_: x.copy_(bernoulli(p, x.shape)),
    aten.uniform_.default: lambda x, low=0.0, high=1.0, **_: x.copy_(uniform(x.shape, x.dtype) * (high - low) + low),
    aten.normal_.default: lambda x, mean=0.0, std=1.0, **_: x.copy_(normal(x.shape, x.dtype) * std + mean),
    aten.exponential_.default: lambda x, rate=1.0, **_: x.copy_(-torch.log(1 - uniform(x.shape)) / rate),
    aten.random_.to: lambda x, high, **_: x.copy_(integers(0, high, x.shape)),
    aten.random_.__getattr__("from"): lambda x, low, high, **_: x.copy_(integers(low, high, x.shape)),
    aten.native_dropout.default: _native_dropout,
}  # fmt: skip


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    return _TABLE


class Eager(TorchDispatchMode):
    """The same on real tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TABLE:
            with self:
                return _TABLE[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
