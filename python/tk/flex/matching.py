"""A pair whose numbers are spelled out, as torch.compile records them, and the pair that takes them as arguments.

A compiler sees ``sliding_window(128)`` with 128 in it; the pack has the kernel of ``sliding_window(size)``.
:func:`numbers` tells whether the one is the other, and what the numbers are.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from tk.flex.trace import Traced


def numbers(general: Traced, given: Traced, values: Sequence[Any]) -> list[Any] | None:
    """The captures of `general` with which it is `given` with the captures `values`; None where it cannot be.

    Tensors must be captured in the same order."""
    match = _Match(values)
    for one, other in ((general.score, given.score), (general.mask, given.mask)):
        if (one is None) != (other is None):
            return None
        if one is not None and other is not None and not match.value(one.result, other.result):
            return None
    match.solve()
    found = [match.found.get(i) for i in range(len(general.captures))]
    is_tensor = [c.kind == "tensor" for c in general.captures]
    tensors = [v for v, c in zip(values, given.captures, strict=True) if c.kind == "tensor"]
    in_order = [v for v, is_one in zip(found, is_tensor, strict=True) if is_one]
    if len(tensors) != len(in_order) or any(a is not b for a, b in zip(tensors, in_order, strict=True)):
        return None
    return found if match.equations_hold() else None


class _Match:
    """found: by the number of the general pair's capture. equations: its expressions of numbers, and what they give."""

    def __init__(self, values: Sequence[Any]):
        self.values = values
        self.found: dict[int, Any] = {}
        self.equations: list[tuple[fx.Node, Any]] = []
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
            is_alike = all(general.meta.get(k) == given.meta.get(k) for k in ("dtype", "rank"))
            return is_alike and "capture" in given.meta and self._bind(general, self.values[given.meta["capture"]])
        if general.op == "placeholder":
            return given.op == "placeholder" and general.target == given.target
        if (general, given) in self.seen:
            return True
        self.seen.add((general, given))
        return (
            general.target == given.target
            and self.value(general.args, given.args)
            and general.kwargs.keys() == given.kwargs.keys()
            and all(self.value(x, given.kwargs[k]) for k, x in general.kwargs.items())
        )

    def _number(self, general: fx.Node, given: Any) -> bool:
        if isinstance(given, fx.Node):
            if "capture" not in given.meta:  # an expression: of equal ones
                return general.target == given.target and self.value(general.args, given.args)
            given = self.values[given.meta["capture"]]
        if isinstance(given, bool) or not isinstance(given, float if general.meta["kind"] == "float" else int):
            return False
        if "capture" in general.meta:
            return self._bind(general, given)
        self.equations.append((general, given))
        return True

    def _bind(self, general: fx.Node, value: Any) -> bool:
        held = self.found.setdefault(general.meta["capture"], value)
        return held is value or (general.meta["kind"] != "tensor" and held == value)

    def solve(self) -> None:
        """Finds numbers that are only read in a sum or difference with a known one (``height - kernel``)."""
        for node, value in self.equations:
            if node.target not in (operator.add, operator.sub) or len(node.args) != 2:
                continue
            left, right = (self._result(a) for a in node.args)
            is_sum = node.target is operator.add
            if left is None and right is not None:
                self._bind_unknown(node.args[0], value - right if is_sum else value + right)
            elif right is None and left is not None:
                self._bind_unknown(node.args[1], value - left if is_sum else left - value)

    def _bind_unknown(self, node: Any, value: Any) -> None:
        if isinstance(node, fx.Node) and "capture" in node.meta:
            self._bind(node, value)

    def equations_hold(self) -> bool:
        return all(self._result(node) == value for node, value in self.equations)

    def _result(self, node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        if "capture" in node.meta:
            return self.found.get(node.meta["capture"])
        args = [self._result(a) for a in node.args]
        if any(not isinstance(a, int | float) for a in args):  # of a size, or of a number that nothing else reads
            return None
        return node.target(*args)  # type: ignore[operator]
