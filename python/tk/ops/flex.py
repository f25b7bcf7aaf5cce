"""Defines ``torch.ops.tk.flex_attention`` and its gradient.

They are defined with ``import tk``, because a program such as a loaded export may hold calls of them. tk.flex.ops
implements them, and is imported by the first call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

from tk.ops import _register

__all__ = ["LISTS", "backward", "forward"]

LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, str pair, Tensor[] tensors, float[] floats, SymInt[] ints, "
    + "".join(f"Tensor? {name}, " for name in LISTS)
    + "Tensor? kv_lengths, Tensor? page_table, Tensor? sinks, float scale, SymInt q_block, SymInt kv_block"
)

_library = Library("tk", "FRAGMENT")  # keeps what is registered alive
# With max_scores lse is [B, H, 2 M]: the log-sum-exps of a head are followed by its rows' largest scores. tile says
# what the config must have (tk.flex.kernel_options). "" stands for the fastest of all configs.
_library.define(f"flex_attention({_ARGUMENTS}, bool max_scores=False, str tile='') -> (Tensor, Tensor)")
_library.define(
    f"flex_attention_backward(Tensor grad_out, Tensor grad_lse, Tensor out, Tensor lse, {_ARGUMENTS}, "
    "bool of_captures) -> Tensor[]"
)

forward = torch.ops.tk.flex_attention.default
backward = torch.ops.tk.flex_attention_backward.default


def _of_flex(name: str) -> Callable[..., Any]:
    found: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        if not found:
            from tk.flex import ops

            found.append(getattr(ops, name))
        return found[0](*args)

    return call


for _op, _suffix in (("flex_attention", ""), ("flex_attention_backward", "_backward")):
    _register.register_fake(_op, _of_flex(f"fake{_suffix}"), _library)
    _library.impl(_op, _of_flex(f"cpu{_suffix}"), "CPU")
    _library.impl(_op, _of_flex(f"cuda{_suffix}"), "CUDA")
    _library.impl(_op, _of_flex(f"autograd{_suffix}"), "Autograd", with_keyset=True)
    torch.library.register_vmap(f"tk::{_op}", _of_flex(f"vmap{_suffix}"), lib=_library)
