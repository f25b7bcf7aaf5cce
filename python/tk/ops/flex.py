"""Defines ``torch.ops.tk.flex_attention`` and its gradient.

They are defined with ``import tk``, because a program such as a loaded export may hold calls of them.
:class:`Request` is the one list of their arguments. tk.flex implements them, and is imported by the first call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.library import Library

from tk.ops import _register

__all__ = ["LISTS", "N_OPERANDS", "OPTIONAL", "Request", "backward", "forward"]


class Request(NamedTuple):
    """A call of attention: the arguments of ``torch.ops.tk.flex_attention`` in their order.

    The op's schema is made from these fields. The last two belong to the forward pass alone. The gradient's op takes
    all others, without defaults.

    pair is the text of the mods (tk.flex.tracing.trace.Traced.text). tensors, floats and ints are what they capture.
    With max_scores lse is [B, H, 2 M]: the log-sum-exps of a head are followed by its rows' largest scores. tile says
    what the config must have (tk.flex.kernel_options). "" stands for the fastest of all configs. caller is the function
    of tk that errors name, whenever they are raised.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    pair: str
    tensors: list[Tensor]
    floats: list[float]
    ints: list[int]
    kv_num_blocks: Tensor | None
    kv_indices: Tensor | None
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    q_num_blocks: Tensor | None
    q_indices: Tensor | None
    full_q_num_blocks: Tensor | None
    full_q_indices: Tensor | None
    kv_lengths: Tensor | None
    page_table: Tensor | None
    sinks: Tensor | None
    scale: float
    q_block: int
    kv_block: int
    caller: str = "flex_attention"
    max_scores: bool = False
    tile: str = ""

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """query, key and value."""
        return self[_OPERANDS]  # type: ignore[return-value]

    @property
    def optional(self) -> tuple[Tensor | None, ...]:
        """:data:`OPTIONAL`: the block lists, kv_lengths, page_table and sinks."""
        return self[_OPTIONAL]  # type: ignore[return-value]

    @property
    def for_gradient(self) -> tuple[Any, ...]:
        """What the gradient's op takes."""
        return self[_FOR_GRADIENT]  # type: ignore[return-value]

    @property
    def all_tensors(self) -> tuple[Tensor | None, ...]:
        return (*self[_OPERANDS], *self[_OPTIONAL], *self.tensors)  # type: ignore[misc]

    def with_tensors(self, tensors: Sequence[Any]) -> Request:
        """The request with others in the place of :attr:`all_tensors`."""
        n, captured = N_OPERANDS, N_OPERANDS + len(OPTIONAL)
        numbers: Any = self[_NUMBERS]
        given = (self.pair, list(tensors[captured:]), self.floats, self.ints, *tensors[n:captured], *numbers)
        return Request._make((*tensors[:n], *given))

    def without_tensors(self) -> Request:
        """The request without its tensors, to be kept where no tensor may be, until :meth:`with_tensors`."""
        numbers: Any = self[_NUMBERS]
        return Request._make((*_NO_OPERANDS, self.pair, [], self.floats, self.ints, *_NO_OPTIONAL, *numbers))


_FIELDS = Request._fields
N_OPERANDS = _FIELDS.index("pair")
_OPERANDS = slice(0, N_OPERANDS)
_OPTIONAL = slice(_FIELDS.index("kv_num_blocks"), _FIELDS.index("scale"))
_NUMBERS = slice(_FIELDS.index("scale"), None)
_FOR_GRADIENT = slice(0, _FIELDS.index("max_scores"))
OPTIONAL = _FIELDS[_OPTIONAL]
_NO_OPERANDS, _NO_OPTIONAL = (None,) * N_OPERANDS, (None,) * len(OPTIONAL)
LISTS = OPTIONAL[: OPTIONAL.index("kv_lengths")]  # the blocks of a block mask

_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", list[Tensor]: "Tensor[]", list[float]: "float[]", list[int]: "SymInt[]",
    float: "float", int: "SymInt", bool: "bool", str: "str",
}  # fmt: skip


def _schema(names: Sequence[str], defaults: Mapping[str, Any]) -> str:
    hints = get_type_hints(Request)
    given = (f"{name}={defaults[name]!r}" if name in defaults else name for name in names)
    return ", ".join(f"{_TYPES[hints[name]]} {text}" for name, text in zip(names, given, strict=True))


_library = Library("tk", "FRAGMENT")  # keeps what is registered alive
_library.define(f"flex_attention({_schema(_FIELDS, Request._field_defaults)}) -> (Tensor, Tensor)")
_library.define(
    "flex_attention_backward(Tensor grad_out, Tensor grad_lse, Tensor out, Tensor lse, "
    f"{_schema(_FIELDS[_FOR_GRADIENT], {})}, bool of_captures) -> Tensor[]"
)

forward = torch.ops.tk.flex_attention.default
backward = torch.ops.tk.flex_attention_backward.default


def _of_flex(module: str, name: str) -> Callable[..., Any]:
    found: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        if not found:
            found.append(getattr(importlib.import_module(f"tk.flex.{module}"), name))
        return found[0](*args)

    return call


for _op, _suffix in (("flex_attention", ""), ("flex_attention_backward", "_backward")):
    _register.register_fake(_op, _of_flex("ops", f"fake{_suffix}"), _library)
    _library.impl(_op, _of_flex("ops", f"cpu{_suffix}"), "CPU")
    _library.impl(_op, _of_flex("ops", f"cuda{_suffix}"), "CUDA")
    _library.impl(_op, _of_flex("autograd", f"autograd{_suffix}"), "Autograd", with_keyset=True)
    torch.library.register_vmap(f"tk::{_op}", _of_flex("ops", f"vmap{_suffix}"), lib=_library)
