"""A pair whose numbers are spelled out, as torch.compile records them, and the pair that takes them as arguments.

A compiler sees ``sliding_window(128)`` with 128 in it; the pack has the kernel of ``sliding_window(size)``. And a pair
that captures int64 or fp32 serves for int32 and 16-bit floats. :func:`numbers` tells whether the one is the other, and
what it captures then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tk.flex.trace import Traced

aten = torch.ops.aten


def numbers(general: Traced, given: Traced, values: Sequence[Any]) -> list[Any] | None:
    """The captures of `general` with which it is `given` with the captures `values`; None where it cannot be. Tensors
    may be given of fewer bits than it captures: they are `values`' all the same."""
    match = _Match(values)
    for one, other in ((general.score, given.score), (general.mask, given.mask)):
        if (one is None) != (other is None):
            return None
        if one is not None and other is not None and not match.value(one.result, other.result):
            return None
    found = [match.found.get(i) for i in range(len(general.captures))]
    return None if any(x is None for x in found) else found


class _Match:
    """found: by the number of the general pair's capture."""

    def __init__(self, values: Sequence[Any]):
        self.values = values
        self.found: dict[int, Any] = {}
        self.seen: set[tuple[fx.Node, fx.Node]] = set()

    def value(self, general: Any, given: Any) -> bool:
        if isinstance(general, fx.Node):
            return self._node(general, given)
        if isinstance(general, list | tuple):
            return (
                isinstance(given, list | tuple)
                and len(general) == len(given)
                and all(self.value(a, b) for a, b in zip(general, given, strict=True))
            )
        return type(general) is type(given) and (general == given or (general != general and given != given))

    def _node(self, general: fx.Node, given: Any) -> bool:
        if general.meta["kind"] != "tensor":
            return self._number(general, given)
        if not isinstance(given, fx.Node) or given.meta["kind"] != "tensor":
            return False
        if "capture" in general.meta:
            is_alike = general.meta.get("rank") == given.meta.get("rank")
            is_alike = is_alike and _holds(general.meta["dtype"], given.meta["dtype"])
            return is_alike and "capture" in given.meta and self._bind(general, self.values[given.meta["capture"]])
        if general.op == "placeholder":
            return given.op == "placeholder" and general.target == given.target
        if (general, given) in self.seen:
            return True
        self.seen.add((general, given))
        return self._call(general, given) or self._difference(general, given)

    def _call(self, general: fx.Node, given: fx.Node) -> bool:
        return (
            general.target == given.target
            and self.value(general.args, given.args)
            and general.kwargs.keys() == given.kwargs.keys()
            and all(self.value(x, given.kwargs[k]) for k, x in general.kwargs.items())
        )

    def _difference(self, general: fx.Node, given: fx.Node) -> bool:
        """``a - b <= n`` of ``a <= b``, where n is 0."""
        if general.target is not aten.le.Scalar or given.target is not aten.le.Tensor:
            return False
        difference, n = general.args
        is_one = isinstance(difference, fx.Node) and difference.target is aten.sub.Tensor and isinstance(n, fx.Node)
        return is_one and self.value(difference.args, given.args) and self._bind(n, 0)  # type: ignore[union-attr, arg-type]

    def _number(self, general: fx.Node, given: Any) -> bool:
        if isinstance(given, fx.Node):
            if "capture" not in given.meta:  # an expression: of equal ones
                return general.target == given.target and self.value(general.args, given.args)
            given = self.values[given.meta["capture"]]
        if isinstance(given, bool) or not isinstance(given, float if general.meta["kind"] == "float" else int):
            return False
        return "capture" in general.meta and self._bind(general, given)

    def _bind(self, general: fx.Node, value: Any) -> bool:
        held = self.found.setdefault(general.meta["capture"], value)
        return held is value or (general.meta["kind"] != "tensor" and held == value)


_WIDER = {
    torch.float16: (torch.float32,), torch.bfloat16: (torch.float32,), torch.int32: (torch.int64,),
}  # fmt: skip


def _holds(wide: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether every number of `dtype` is one of `wide`, and mods reckon with both alike."""
    return wide == dtype or wide in _WIDER.get(dtype, ())
