"""A user's function between two products: traced as attention's mods are, and announced to ``tk build``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tk import errors
from tk.flex import source
from tk.flex.tracing import evaluate, trace
from tk.flex.tracing.trace import Traced
from tk.generated import files, refusals

__all__ = ["Registered", "register", "registered"]

_DTYPES = (torch.bfloat16, torch.float16)
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Registered:
    """What :func:`register` announced. file: the one that it belongs to."""

    name: str
    traced: Traced
    dtypes: tuple[torch.dtype, ...]
    file: str


_registered: list[Registered] = []


def register(f: Function, *, dtypes: Sequence[torch.dtype] = (torch.bfloat16,)) -> None:
    """Announces a function, which ``tk build`` on this file then compiles into :func:`tk.b2b_gemm`'s kernel.

    Args:
        f: of one tensor, to one of its shape, number by number. Numbers that it captures are arguments of the kernel.
        dtypes: of the products' operands: bfloat16 and float16.

    Raises:
        ValueError, TypeError: an argument that is none of these.
        tk.UnsupportedError: a function that no kernel can have.
    """
    try:
        if not isinstance(dtypes, list | tuple):
            raise TypeError(f"tk.b2b.register: dtypes must be a list or a tuple, is {dtypes!r}")
        for dtype in dtypes:
            if dtype not in _DTYPES:
                raise ValueError(f"tk.b2b.register: {dtype} in dtypes; they are {', '.join(map(str, _DTYPES))}")
        traced, _ = traced_function(f, "tk.b2b.register")
    except (errors.UnsupportedError, TypeError, ValueError) as error:
        return refusals.refuse(error)
    made = Registered(getattr(f, "__name__", type(f).__name__), traced, tuple(dtypes), files.declaring())
    if made not in _registered:
        _registered.append(made)


def registered(file: str | None = None) -> list[Registered]:
    """What was announced, by one file or all."""
    return [r for r in _registered if file is None or files.is_same(r.file, file)]


def op_name(traced: Traced) -> str:
    return f"b2b_{traced.fingerprint[:16]}"


def traced_function(f: Any, caller: str) -> tuple[Traced, tuple[Any, ...]]:
    """f as the score_mod of a pair, which takes positions too, and what it captures."""
    if not callable(f):
        raise TypeError(f"{caller}: f must be the name of an activation or a function, is {type(f).__name__}")

    def of_score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return f(score)

    name = getattr(f, "__name__", type(f).__name__)
    try:
        pair = trace.pair(of_score, None, whole=True)
    except (TypeError, errors.UnsupportedError) as error:
        raise type(error)(f"{caller}: f is {name}: {error}") from None
    for capture in pair.traced.captures:
        if capture.kind == "tensor":
            raise errors.UnsupportedError(
                f"{caller}: f is {name}, which captures the tensor {capture.name}; it may capture numbers"
            )
    _check_numbers_alone(f, name, pair.traced, caller)
    return pair.traced, pair.values


_checked: set[tuple[str, Any]] = set()  # a trace's fingerprint, and the code that it is of


def _check_numbers_alone(f: Function, name: str, traced: Traced, caller: str) -> None:
    """Raises tk.UnsupportedError for a function that does not do to each number of a matrix what it does to the number
    alone: a trace, which has one number, cannot tell, and a kernel has a tile."""
    key = traced.fingerprint, getattr(f, "__code__", type(f))
    if key in _checked:
        return
    with _disable_current_modes(), torch.no_grad():
        x = torch.tensor([[0.25, 1.5, -0.75], [2.0, 0.5, -1.25]], device="cpu")
        try:
            whole = f(x.clone())
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise errors.UnsupportedError(f"{caller}: f is {name}, which fails on a matrix: {error}") from None
        each = torch.stack([f(number.clone()) for number in x.flatten()]).reshape(x.shape)
    if whole.shape != x.shape or not torch.allclose(whole, each.to(whole.dtype), rtol=1e-3, equal_nan=True):
        raise errors.UnsupportedError(
            f"{caller}: f is {name}, which does to a matrix what it does not do to each of its numbers alone, as a sum "
            "or a size does; a kernel has one tile of the matrix at a time"
        )
    _checked.add(key)


def apply(text: str, numbers: Sequence[Any], x: Tensor) -> Tensor:
    """f of every number of a matrix, in the matrix' dtype, by ATen ops."""
    graph = trace.parse(text).score
    if graph is None:  # f returns its argument
        return x
    index = x.new_zeros((1, 1, 1, 1), dtype=torch.int32)
    result = evaluate.evaluate(graph, (x[None, None], index, index, index, index), numbers)
    return result.to(x.dtype).expand(1, 1, *x.shape)[0, 0]


def source_of(traced: Traced, dtype: torch.dtype) -> str:
    """A file that announces the function: one of the same graph, with stand-ins for the numbers that it captures."""
    parts = [source.SOURCE_HEAD]
    f = "lambda x: x"
    if traced.score is not None:
        parts.append(source.factory_source("f", traced.score, arguments=1))
        f = source.factory_call("f", traced.score, traced)
    return "\n\n".join([*parts, f"tk.b2b.register({f}, dtypes=({dtype},))\n"])
