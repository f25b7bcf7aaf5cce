"""How much arithmetic a generated op does: one operation for each element of each op of its graph.

An op counts once for each element of its largest operand or result, whatever it costs: exp as much as an addition.
What only moves, creates or converts elements counts nothing. ATen's composite ops are counted by what they are made of,
so that a softmax is a maximum, a subtraction, an exp, a sum and a division.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tk.generated import interpret
from tk.generated.problem import Call

# Of these no element is worked out.
_FREE = frozenset(
    ("_to_copy", "alias", "arange", "as_strided", "cat", "clone", "constant_pad_nd", "copy", "copy_", "detach",
     "embedding", "empty", "empty_like", "expand", "fill", "flip", "full", "full_like", "gather", "index",
     "index_select", "iota", "lift_fresh_copy", "new_empty", "new_full", "new_zeros", "ones", "ones_like", "permute",
     "repeat", "reshape", "roll", "scalar_tensor", "select_scatter", "slice_scatter", "view_of", "zeros", "zeros_like")
)  # fmt: skip

_aten = torch.ops.aten
# What core ATen leaves whole and more than one operation goes into.
_COMPOSITE = (
    _aten._log_softmax, _aten._log_softmax_backward_data, _aten._softmax, _aten._softmax_backward_data, _aten.elu,
    _aten.gelu, _aten.gelu_backward, _aten.leaky_relu, _aten.logit, _aten.mse_loss, _aten.native_dropout,
    _aten.native_group_norm, _aten.native_layer_norm, _aten.sigmoid, _aten.silu, _aten.silu_backward, _aten.var,
    _aten.var_mean,
)  # fmt: skip


def count(call: Call) -> int:
    """Operations of a call, by the shapes of its arguments: nothing is computed."""
    arguments = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in interpret.seen(call).items()}
    counting = _Counting()
    with counting:
        interpret.evaluate(interpret.graph_of(call)["nodes"], arguments, call.op.name, torch.device("meta"))
    return counting.total


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.decompositions = {**core_aten_decompositions(), **get_decompositions(_COMPOSITE)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        made_of = self.decompositions.get(func)
        if made_of is not None:
            with self:
                if (found := made_of(*args, **kwargs)) is not NotImplemented:
                    return found
        found = func(*args, **kwargs)
        if not (func.is_view or func.__name__.split(".")[0] in _FREE):
            self.total += max(
                (x.numel() for x in tree_leaves((args, kwargs, found)) if isinstance(x, Tensor)), default=0
            )
        return found
