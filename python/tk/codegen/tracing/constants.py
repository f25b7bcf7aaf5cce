"""Tensors that a traced function does not get as arguments: those that it makes of numbers (``torch.tensor``), and
small ones that it captures. They are part of the kernel: a value of its own for each element, chosen by the index."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_any, tree_flatten, tree_map_only

from tk.codegen.errors import TraceError

MOST_ELEMENTS = 256  # each costs an instruction for every element that is read

_library = torch.library.Library("tk_trace", "FRAGMENT")
_library.define("constant(int number) -> Tensor")
_KNOWN: list[Tensor] = []  # a node names its own by the place in here


def _like(number: int) -> Tensor:
    return torch.empty(_KNOWN[number].shape, dtype=_KNOWN[number].dtype, device="meta")


torch.library.impl(_library, "constant", "CompositeExplicitAutograd")(lambda number: _KNOWN[number].clone())
torch.library.register_fake("tk_trace::constant", _like, lib=_library)

_MAKERS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.tensor: torch.tensor, torch.as_tensor: torch.as_tensor, torch.scalar_tensor: torch.scalar_tensor,
}  # fmt: skip


def of(number: int) -> Tensor:
    return _KNOWN[number]


def record(number: int) -> list[Any]:
    """[values, sizes, dtype], as the arguments of a recorded node."""
    x = _KNOWN[number]
    return [x.flatten().tolist() if x.dtype != torch.bool else x.flatten().int().tolist(), list(x.shape), x.dtype]


def _node(x: Tensor) -> Tensor:
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise TraceError("torch.func or torch.vmap: apply them to the op, outside of the function")
    if x.numel() > MOST_ELEMENTS:
        raise TraceError(
            f"a tensor of {x.numel()} elements that is not among the function's parameters; one of up to "
            f"{MOST_ELEMENTS} becomes part of the kernel, make this one a parameter"
        )
    if x.requires_grad:
        raise TraceError("a tensor that needs a gradient and is not among the function's parameters: make it one")
    if x.is_complex() or x.layout != torch.strided:
        raise TraceError(f"a captured tensor of {x.dtype}, {x.layout}: no kernel has such")
    with _disable_current_modes():
        _KNOWN.append(x.detach().cpu().contiguous())
    return torch.ops.tk_trace.constant(len(_KNOWN) - 1)


def made(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What ``torch.tensor`` makes of numbers; None for other functions."""
    if func is Tensor.new_tensor:
        given = inspect.signature(lambda data, dtype=None, device=None, requires_grad=False: None)
        bound = given.bind(*args[1:], **kwargs).arguments
        return _made(torch.tensor, bound["data"], bound.get("dtype") or args[0].dtype)
    if func not in _MAKERS:
        return None
    data, *rest = args if args else (kwargs["data"],)
    return _made(func, data, kwargs.get("dtype", rest[0] if rest else None))


def _made(func: Callable[..., Any], data: Any, dtype: torch.dtype | None) -> Tensor | None:
    if isinstance(data, Tensor):
        return None
    if isinstance(data, torch.SymInt | torch.SymFloat):
        default = torch.int64 if isinstance(data, torch.SymInt) else torch.get_default_dtype()
        return torch.full((), data, dtype=dtype or default, device="meta")  # type: ignore[call-overload]
    if tree_any(lambda x: isinstance(x, torch.SymInt | torch.SymFloat | Tensor), data):
        raise TraceError("torch.tensor of several numbers, some of them given at run time; use torch.stack")
    with _disable_current_modes():
        found = torch.tensor(data, dtype=dtype)
    return _node(found)


def lifted(args: Any) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """The arguments of a call with captured tensors as part of the graph, and each of these with what stands for it."""
    if not any(_is_captured(x) for x in tree_flatten(args)[0]):
        return args, []
    found: list[tuple[Tensor, Tensor]] = []

    def lift(x: Tensor) -> Tensor:
        if not _is_captured(x):
            return x
        found.append((x, _node(x)))
        return found[-1][1]

    return tree_map_only(Tensor, lift, args), found


def _is_captured(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, FakeTensor) and type(x).__name__ != "FunctionalTensor"
