"""Functions of lists of tensors: traced with lists of one tensor, which is the function of one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from tk.codegen.errors import TraceError, where
from tk.codegen.tracing.trace import Trace, trace_all
from tk.generated.lists import evaluate
from tk.generated.signature import DTYPES as TORCH_DTYPES
from tk.generated.signature import Signature, TensorSpec

PLACES = "places"  # the size of what torch.stack makes of a number for each tensor
_PLACES: ContextVar[Any] = ContextVar("places")

_library = torch.library.Library("tk_trace", "FRAGMENT")
_library.define("over_places(Tensor x) -> Tensor")
torch.library.impl(_library, "over_places", "CompositeExplicitAutograd")(lambda x: x.reshape(1).clone())
torch.library.register_fake("tk_trace::over_places", lambda x: x.new_empty([_PLACES.get()]), lib=_library)


def trace_places(fn: Callable[..., Any], signature: Signature, ruled: frozenset[str]) -> list[Trace]:
    """The traces of one place, for every choice of dtypes and flags. ruled: the names of the ops that the lowering has
    rules for. Raises TraceError."""
    _check_signature(fn, signature)
    element = Signature(
        {n: replace(s, is_list=False) if isinstance(s, TensorSpec) else s for n, s in signature.params.items()},
        signature.variables,
    )
    lists = frozenset(n for n, s in signature.tensors.items() if s.is_list)
    traces = trace_all(_OfOnePlace(fn, lists), element, ruled)
    _check_places(fn, signature, traces[0])
    return traces


def _check_signature(fn: Callable[..., Any], signature: Signature) -> None:
    for name, spec in signature.tensors.items():
        if not spec.is_list and (spec.sizes or spec.leading):
            raise TraceError(
                f"{where(fn)}: {name}={str(spec)!r} is no list beside others that are; what all of their tensors share "
                f"is '{spec.dtype}[]', a tensor without dimensions, or a number: make it '{spec}*'"
            )
        if spec.is_list and spec.sizes:
            raise TraceError(f"{where(fn)}: {name}={str(spec)!r}: the tensors of a list are 'T[...]*' or 'T[]*'")


@dataclass(frozen=True)
class _OfOnePlace:
    """The function of the tensors of one place. Errors are about the function itself."""

    fn: Callable[..., Any]
    lists: frozenset[str]

    def __post_init__(self) -> None:
        for name in ("__code__", "__globals__", "__name__", "__doc__"):
            vars(self)[name] = getattr(self.fn, name)
        vars(self)["__signature__"] = inspect.signature(self.fn)
        vars(self)["__wrapped__"] = self.fn

    def see(self, sizes: Mapping[str, Any]) -> None:
        """The sizes of the trace that follows."""
        _PLACES.set(sizes[PLACES])

    @property
    def sizes(self) -> tuple[str, ...]:
        return (PLACES,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = self.fn.__code__.co_varnames[: self.fn.__code__.co_argcount]
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        given = {name: [x] if name in self.lists else x for name, x in named.items()}
        with _OfLists():
            found = self.fn(**given)
        if isinstance(found, tuple):
            return tuple(map(self._of_place, found))
        return self._of_place(found)

    def _of_place(self, result: Any) -> Any:
        if isinstance(result, list | tuple):
            if len(result) != 1:
                raise TraceError(f"{where(self.fn)}: a result that is a list has a tensor for each place of the lists")
            return result[0]
        return result


class _OfLists(TorchFunctionMode):
    """What torch does with whole lists."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.stack and len(args[0]) == 1:
            (x,) = args[0]
            if x.dim():
                raise TraceError(
                    "torch.stack of tensors with sizes: of a list stack a number for each, such as x.sum()"
                )
            return torch.ops.tk_trace.over_places(x)
        name = getattr(func, "__name__", "")
        if name.startswith("_foreach_") and args and isinstance(args[0], list | tuple):
            return self._each(name.removeprefix("_foreach_"), args, kwargs)
        return func(*args, **kwargs)

    def _each(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A function of lists, for one place."""
        of = getattr(Tensor, name, None) or getattr(torch, name, None)
        if of is None:
            raise TraceError(f"torch._foreach_{name}: write it as a loop over the list")
        found = of(*(x[0] if isinstance(x, list | tuple) else x for x in args), **kwargs)
        return None if name.endswith("_") else [found]


def _check_places(fn: Callable[..., Any], signature: Signature, trace: Trace) -> None:
    """The function does to each place what it does to lists of one: seen on small numbers, with two places. What goes
    over all places is worked out by the recorded graph."""
    generator = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {}
    for name, spec in signature.params.items():
        if not isinstance(spec, TensorSpec):
            given[name] = trace.flags.get(name, 1 if spec.kind == "int" else 0.5)
            continue
        dtype = TORCH_DTYPES[trace.dtypes.get(spec.dtype, spec.dtype)]
        shapes = ([(3,), (2, 2)] if spec.leading else [(), ()])[: 2 if spec.is_list else 1]
        values = [torch.rand(s, generator=generator).mul(4).add(1).to(dtype) for s in shapes]
        given[name] = values if spec.is_list else values[0]
    own = {n: [x.clone() for x in v] if isinstance(v, list) else v for n, v in given.items()}
    expected = fn(**own)
    try:
        seen = {n: [x.flatten() if x.dim() else x for x in v] if isinstance(v, list) else v for n, v in given.items()}
        found = evaluate(trace.recorded, seen, "lists")
    except (RuntimeError, ValueError):
        return  # the CPU has no such op for this dtype
    pairs = [(tree_flatten(expected)[0], tree_flatten(found)[0]), (tree_flatten(own)[0], tree_flatten(given)[0])]
    for one, other in pairs:
        tensors = [[x.double().flatten().nan_to_num() for x in xs if isinstance(x, Tensor)] for xs in (one, other)]
        if [x.shape for x in tensors[0]] != [x.shape for x in tensors[1]] or not all(
            torch.allclose(a, b, rtol=1e-2, atol=1e-2) for a, b in zip(*tensors, strict=True)
        ):
            raise TraceError(
                f"{where(fn)}: what it does to one place of its lists depends on the others, but for torch.stack of a "
                "number for each tensor, such as torch.stack([x.sum() for x in xs]).sum()"
            )
