"""A pair whose numbers are spelled out, as torch.compile records them, and the pair that takes them as arguments.

A compiler sees ``sliding_window(128)`` with 128 in it; the pack has the kernel of ``sliding_window(size)``. And a pair
that captures fp32 serves for 16-bit floats. :func:`numbers` tells whether the one is the other, and
what it captures then. Where a number is negative, its sign stands elsewhere in what is spelled out: ``score - 0.5 * x``
is the pair of ``score + a * x``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tk.flex.tracing.trace import Traced

aten = torch.ops.aten


def numbers(general: Traced, given: Traced, values: Sequence[Any]) -> list[Any] | None:
    """The captures of `general` with which it is `given` with the captures `values`; None where it cannot be. Tensors
    may be given of fewer bits than it captures: they are `values`' all the same."""
    for match in (_Match(values), _Signed(values)):
        if match.pair(general, given):
            found = [match.found.get(i) for i in range(len(general.captures))]
            return None if any(x is None for x in found) else found
    return None


class _Match:
    """found: by the number of the general pair's capture."""

    def __init__(self, values: Sequence[Any]):
        self.values = values
        self.found: dict[int, Any] = {}
        self.seen: set[tuple[fx.Node, fx.Node]] = set()

    def pair(self, general: Traced, given: Traced) -> bool:
        for one, other in ((general.score, given.score), (general.mask, given.mask)):
            if (one is None) != (other is None):
                return False
            if one is not None and other is not None and not self.value(one.result, other.result):
                return False
        return True

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


_SUMS = {aten.add.Tensor: 1, aten.sub.Tensor: -1}  # and the sign of the second operand
_PRODUCTS = (aten.mul.Tensor, aten.div.Tensor)
_MAX_STEPS = 10_000


class _Signed(_Match):
    """The same up to signs, which are moved without rounding: through sums, products, quotients and `where`."""

    steps = 0

    def _call(self, general: fx.Node, given: fx.Node) -> bool:
        return self.with_sign(general, given, 1)

    def with_sign(self, general: Any, given: Any, sign: int) -> bool:
        """Whether `general` is `given` times `sign`. What was bound on the way to a no is free again."""
        self.steps += 1
        if self.steps > _MAX_STEPS:
            return False
        held, seen = dict(self.found), set(self.seen)
        if self._with_sign(general, given, sign):
            return True
        self.found, self.seen = held, seen
        return False

    def _with_sign(self, general: Any, given: Any, sign: int) -> bool:
        if _is_call(general, aten.neg.default):
            return self.with_sign(general.args[0], given, -sign)
        if _is_call(given, aten.neg.default):
            return self.with_sign(general, given.args[0], -sign)
        if not _is_tensor(given):
            return self._number_with_sign(general, given, sign)
        if not _is_tensor(general) or general.op != "call_function":
            return sign == 1 and self.value(general, given)
        if given.op != "call_function":
            return False
        if general.target in _SUMS and given.target in _SUMS and not general.kwargs and not given.kwargs:
            return self._sum(general, given, sign)
        if general.target != given.target or general.kwargs.keys() != given.kwargs.keys():
            return False
        if general.target in _PRODUCTS and not general.kwargs:
            pairs = list(zip(general.args, given.args, strict=True))
            return any(self._all([(*pairs[0], s), (*pairs[1], s * sign)]) for s in (1, -1))
        if general.target is aten.where.self:
            (is_one, *one), (is_other, *other) = general.args, given.args
            return self._all([(is_one, is_other, 1), *((x, y, sign) for x, y in zip(one, other, strict=True))])
        return sign == 1 and super()._call(general, given)

    def _sum(self, general: fx.Node, given: fx.Node, sign: int) -> bool:
        (a, b), (x, y) = general.args, given.args
        first, second = _SUMS[general.target], _SUMS[given.target] * sign  # type: ignore[index]
        return self._all([(a, x, sign), (b, y, first * second)]) or self._all([(a, y, second), (b, x, first * sign)])

    def _all(self, rows: Sequence[tuple[Any, Any, int]]) -> bool:
        held, seen = dict(self.found), set(self.seen)
        if all(self.with_sign(*row) for row in rows):
            return True
        self.found, self.seen = held, seen
        return False

    def _number_with_sign(self, general: Any, given: Any, sign: int) -> bool:
        if isinstance(given, fx.Node) and "capture" in given.meta:
            given = self.values[given.meta["capture"]]
        if sign == 1 or isinstance(given, bool) or not isinstance(given, int | float):
            return sign == 1 and self.value(general, given)
        return self.value(general, -given)


def _is_call(x: Any, target: Any) -> bool:
    return isinstance(x, fx.Node) and x.op == "call_function" and x.target is target


def _is_tensor(x: Any) -> bool:
    return isinstance(x, fx.Node) and x.meta["kind"] == "tensor"


_WIDER = {torch.float16: (torch.float32,), torch.bfloat16: (torch.float32,)}


def _holds(wide: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether every number of `dtype` is one of `wide`, and mods reckon with both alike."""
    return wide == dtype or wide in _WIDER.get(dtype, ())
