"""What every op registers besides its own formulas: fakes, vmap, autocast, and how ``out`` behaves.

The ops are defined in C++; an op ``f`` has an ``out`` overload and a twin ``_f`` without autograd, which a wrapper calls
when nothing needs a gradient. What is registered here holds for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

_library = Library("tk", "IMPL")  # keeps what is registered alive


def overloads(name: str) -> tuple[Any, Any]:
    """``torch.ops.tk.<name>`` and its ``out``."""
    packet = getattr(torch.ops.tk, name)
    return packet.default, packet.out


def fake(name: str, allocate: Callable[..., Tensor]) -> None:
    """``allocate`` makes an empty result from an op's arguments; it serves the op, its twin and their ``out``."""

    def fake_out(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        expected = allocate(*args, **kwargs)
        torch._check_value(
            expected.shape == out.shape and expected.dtype == out.dtype,
            lambda: f"tk.{name}: out is {list(out.shape)} {out.dtype}, must be {list(expected.shape)} {expected.dtype}",
        )
        return out

    for twin in (name, f"_{name}"):
        torch.library.register_fake(f"tk::{twin}", allocate)
        torch.library.register_fake(f"tk::{twin}.out", fake_out)


def vmap(name: str, rule: Callable[..., tuple[Tensor, int]]) -> None:
    """``rule(op, info, in_dims, *args)`` for the op and its twin."""
    for twin in (name, f"_{name}"):
        op, _ = overloads(twin)

        def bound(info: Any, in_dims: Any, *args: Any, op: Any = op) -> tuple[Tensor, int]:
            return rule(op, info, in_dims, *args)

        torch.library.register_vmap(f"tk::{twin}", bound)


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    is_eligible = (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.device.type == device_type
        and value.dtype is not torch.float64
    )
    return value.to(dtype) if is_eligible else value


def autocast(name: str) -> None:
    """Runs the op in autocast's dtype, as ATen's products do. Like theirs, an ``out`` form is left alone."""
    for twin in (name, f"_{name}"):
        for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
            _register_autocast(twin, device_type, key)


def _register_autocast(name: str, device_type: str, key: str) -> None:
    op, _ = overloads(name)
    own_key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast_then_call(*args: Any, **kwargs: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(own_key):
            return op(
                *(_cast(x, device_type, dtype) for x in args),
                **{k: _cast(x, device_type, dtype) for k, x in kwargs.items()},
            )

    _library.impl(name, cast_then_call, key)


def out_form(name: str) -> None:
    """``out`` under autograd (refused, as ATen does) and under functionalization (the op, whose result replaces out)."""
    for twin in (name, f"_{name}"):
        _functionalize_out(twin)
    _, op_out = overloads(name)

    def refuse_gradients(*args: Any, **kwargs: Any) -> Tensor:
        if torch.is_grad_enabled() and any(
            isinstance(x, Tensor) and x.requires_grad for x in (*args, *kwargs.values())
        ):
            raise RuntimeError(
                f"tk.{name}: functions with out=... arguments don't support automatic differentiation, but one of the "
                "arguments requires grad."
            )
        with torch._C._AutoDispatchBelowAutograd():
            return op_out(*args, **kwargs)

    _library.impl(f"{name}.out", refuse_gradients, "Autograd")


def _functionalize_out(name: str) -> None:
    """What code generation does for ATen's out forms; ``py_functionalize_impl`` would import all of torch.compile."""
    op, _ = overloads(name)
    own_key = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)

    def unwrapped(x: Any) -> Any:
        if not isinstance(x, Tensor) or not torch._is_functional_tensor(x):
            return x
        torch._sync(x)
        return torch._from_functional_tensor(x)

    def functional(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(own_key):
            result = op(*map(unwrapped, args), **{k: unwrapped(x) for k, x in kwargs.items()})
        torch._functionalize_replace(out, result)
        torch._functionalize_commit_update(out)
        torch._functionalize_sync(out)
        return out

    _library.impl(f"{name}.out", functional, "Functionalize")
