"""A pair of mods that a pack has, and a call's pair that it serves.

A pair of the wheel takes more than its own calls: what is absent from a call is bound so that it changes nothing.

- ``torch.compile`` spells out numbers that the pair takes as arguments: ``sliding_window(128)`` has 128 in it. Where
  one is negative, its sign stands elsewhere in what is spelled out: ``score - 0.5 * x`` is the pair of
  ``score + a * x``.
- A mask is a conjunction. A bound of a difference, ``q - k <= n``, that the call has not is bound to UNBOUNDED, and an
  offset that it has not, ``q + n``, to 0. So one band, ``(k - q <= m) & (q - k <= n)``, serves causal masks at an
  offset, windows, and no mask at all.
- Operands stand in any order. A pair that captures fp32 serves 16-bit floats; ids ``[B, S]`` serve ``[S]``; and
  ``slopes[h]`` serves what a mod works out of h and numbers (:class:`Computed`).

:func:`numbers` tells whether the one serves the other, and what it captures then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tk.flex.tracing.canonical import Graph
from tk.flex.tracing.evaluate import evaluate, indices
from tk.flex.tracing.trace import Traced

aten = torch.ops.aten

UNBOUNDED = 1 << 30  # more than two positions differ by, and in 32 bits with a position added
MANY = 1 << 29  # of a dimension that is repeated without memory: more than batch entries or heads


# --- What is bound to a capture besides the call's own values ---


@dataclass(frozen=True)
class Symbol:
    """Stands for a number that the call captures, whatever it is: its place, and whether negated."""

    place: int
    kind: str
    is_negated: bool = False

    def __neg__(self) -> Symbol:
        return Symbol(self.place, self.kind, not self.is_negated)

    def of(self, values: Sequence[Any]) -> Any:
        return -values[self.place] if self.is_negated else values[self.place]


@dataclass(frozen=True)
class Repeated:
    """A captured tensor of the call, the same for every index of further dimensions in front."""

    value: Any
    dims: int


def repeated(x: Tensor, dims: int) -> Tensor:
    """The tensor as a capture of so many dimensions more. It takes no memory; any batch entry and head is in it."""
    return x.expand(*(MANY,) * dims, *x.shape)


@dataclass(frozen=True, eq=False)
class Computed:
    """A tensor ``[H]`` of what a mod works out of h and numbers."""

    graph: Graph

    def of(self, values: Sequence[Any], n_heads: int, device: Any) -> Tensor:
        """values: of the call's captures."""
        _, h, _, _ = indices([0], range(n_heads), (0, 1), (0, 1), device)
        return evaluate(self.graph, (h,), values).expand(1, n_heads, 1, 1).reshape(n_heads).contiguous()


def numbers(general: Traced, given: Traced, values: Sequence[Any]) -> list[Any] | None:
    """The captures of `general` with which it is `given` with the captures `values`; None where it cannot be. Tensors
    may be given of fewer bits than it captures: they are `values`' all the same. Numbers may be :class:`Symbol`\\ s."""
    for match in (_Match(values), _Signed(values)):
        if match.pair(general, given):
            found = [match.found.get(i) for i in range(len(general.captures))]
            return None if any(x is None for x in found) else found
    return None


_MAX_STEPS = 10_000
_COMMUTATIVE = {
    aten.add.Tensor, aten.mul.Tensor, aten.eq.Tensor, aten.ne.Tensor, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor,
    aten.bitwise_xor.Tensor,
}  # fmt: skip


class _Match:
    """found: by the number of the general pair's capture. What was bound on the way to a no is free again."""

    def __init__(self, values: Sequence[Any]):
        self.values = values
        self.found: dict[int, Any] = {}
        self.seen: set[tuple[fx.Node, fx.Node]] = set()
        self.steps = 0

    def pair(self, general: Traced, given: Traced) -> bool:
        if (general.score is None) != (given.score is None):
            return False
        one, other = general.score, given.score
        if one is not None and other is not None and not self.value(one.result, other.result):
            return False
        return self._masks(conjuncts(general.mask), conjuncts(given.mask))

    def _tried(self, attempt: Callable[[], bool]) -> bool:
        self.steps += 1
        if self.steps > _MAX_STEPS:
            return False
        held, seen = dict(self.found), set(self.seen)
        if attempt():
            return True
        self.found, self.seen = held, seen
        return False

    # --- Masks ---

    def _masks(self, general: Sequence[fx.Node], given: Sequence[fx.Node]) -> bool:
        """Each of the given conditions is another one of the general pair's, and what is left over always holds."""
        if not given:
            return all(self._holds_always(g) for g in general)

        def is_first(i: int) -> bool:
            return self.value(general[i], given[0]) and self._masks([*general[:i], *general[i + 1 :]], given[1:])

        return any(self._tried(lambda i=i: is_first(i)) for i in range(len(general)))  # type: ignore[misc]

    def _holds_always(self, condition: fx.Node) -> bool:
        """``difference <= n`` and ``x <= y + n``, n bound to nothing yet."""
        if condition.target is aten.le.Scalar and _is_difference(condition.args[0]):
            return self._is_bound_first(condition.args[1], UNBOUNDED)
        if condition.target is aten.le.Tensor and _is_call(condition.args[1], aten.add.Tensor):
            return self._is_bound_first(condition.args[1].args[1], UNBOUNDED)  # type: ignore[union-attr]
        return False

    def _is_bound_first(self, number: Any, value: int) -> bool:
        """Whether it is an integer that the general pair captures, and was not bound before."""
        if not isinstance(number, fx.Node) or number.meta["kind"] != "int" or "capture" not in number.meta:
            return False
        held = self.found.setdefault(number.meta["capture"], value)
        return type(held) is int and held == value

    # --- Values ---

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
        ways = (self._call, self._difference, self._without_offset, self._repeated, self._computed)
        if any(self._tried(lambda way=way: way(general, given)) for way in ways):  # type: ignore[misc]
            self.seen.add((general, given))
            return True
        return False

    def _call(self, general: fx.Node, given: fx.Node) -> bool:
        if general.target != given.target or general.kwargs.keys() != given.kwargs.keys():
            return False
        if not all(self.value(x, given.kwargs[k]) for k, x in general.kwargs.items()):
            return False
        if self._tried(lambda: self.value(general.args, given.args)):
            return True
        return general.target in _COMMUTATIVE and self._tried(lambda: self.value(general.args[::-1], given.args))

    def _difference(self, general: fx.Node, given: fx.Node) -> bool:
        """``a - b <= n`` of ``a <= b``, where n is 0."""
        if general.target is not aten.le.Scalar or given.target is not aten.le.Tensor:
            return False
        difference, n = general.args
        is_one = isinstance(difference, fx.Node) and difference.target is aten.sub.Tensor and isinstance(n, fx.Node)
        return is_one and self.value(difference.args, given.args) and self._bind(n, 0)  # type: ignore[union-attr, arg-type]

    def _without_offset(self, general: fx.Node, given: fx.Node) -> bool:
        """``x + n`` of x, where n is 0: of integers, as nothing is rounded."""
        number = self._offset(general)
        return number is not None and self.value(general.args[0], given) and self._bind(number, 0)

    def _offset(self, general: Any) -> fx.Node | None:
        """n of ``x + n``."""
        if not _is_call(general, aten.add.Tensor) or general.kwargs or general.meta["dtype"].is_floating_point:
            return None
        number = general.args[1]
        is_one = isinstance(number, fx.Node) and number.meta["kind"] == "int" and "capture" in number.meta
        return number if is_one else None

    def _repeated(self, general: fx.Node, given: fx.Node) -> bool:
        """``c[b, i]`` of ``c[i]``. Not of what may have a gradient, which would be as large as what is repeated."""
        if general.target is not aten.index.Tensor or given.target is not aten.index.Tensor:
            return False
        (whole, at), (part, part_at) = _read_at(general), _read_at(given)
        dims = len(at) - len(part_at)
        is_alike = dims > 0 and not part.meta["dtype"].is_floating_point
        if not is_alike or not _holds(whole.meta["dtype"], part.meta["dtype"]):
            return False
        if not all(_is_argument(i, "b", "h") for i in at[:dims]) or not self.value(at[dims:], part_at):
            return False
        return self._bind(whole, Repeated(self.values[part.meta["capture"]], dims))

    def _computed(self, general: fx.Node, given: fx.Node) -> bool:
        """``c[h]`` of what is worked out of h and numbers alone."""
        if general.target is not aten.index.Tensor or given.op != "call_function":
            return False
        table, at = _read_at(general)
        if len(at) != 1 or not _is_argument(at[0], "h") or table.meta["dtype"] != given.meta["dtype"]:
            return False
        graph = _of_heads(given)
        return graph is not None and self._bind(table, Computed(graph))

    def _number(self, general: fx.Node, given: Any) -> bool:
        if isinstance(given, fx.Node):
            if "capture" not in given.meta:  # an expression: of equal ones
                return general.target == given.target and self.value(general.args, given.args)
            given = self.values[given.meta["capture"]]
        return _kind(given) == general.meta["kind"] and "capture" in general.meta and self._bind(general, given)

    def _bind(self, general: fx.Node, value: Any) -> bool:
        held = self.found.setdefault(general.meta["capture"], value)
        if isinstance(held, Repeated) and isinstance(value, Repeated):
            return held.value is value.value and held.dims == value.dims
        return held is value or (general.meta["kind"] != "tensor" and held == value)


_SUMS = {aten.add.Tensor: 1, aten.sub.Tensor: -1}  # and the sign of the second operand
_PRODUCTS = (aten.mul.Tensor, aten.div.Tensor)


class _Signed(_Match):
    """The same up to signs, which are moved without rounding: through sums, products, quotients and `where`."""

    def _call(self, general: fx.Node, given: fx.Node) -> bool:
        return self.with_sign(general, given, 1)

    def with_sign(self, general: Any, given: Any, sign: int) -> bool:
        """Whether `general` is `given` times `sign`."""
        return self._tried(lambda: self._with_sign(general, given, sign))

    def _with_sign(self, general: Any, given: Any, sign: int) -> bool:
        if _is_call(general, aten.neg.default):
            return self.with_sign(general.args[0], given, -sign)
        if _is_call(given, aten.neg.default):
            return self.with_sign(general, given.args[0], -sign)
        if not _is_tensor(given):
            return self._number_with_sign(general, given, sign)
        if not _is_tensor(general) or general.op != "call_function":
            return sign == 1 and self.value(general, given)
        if self._signed_call(general, given, sign):
            return True
        number = self._offset(general)
        if number is not None and self.with_sign(general.args[0], given, sign) and self._bind(number, 0):
            return True
        return sign == 1 and (self._repeated(general, given) or self._computed(general, given))

    def _signed_call(self, general: fx.Node, given: fx.Node, sign: int) -> bool:
        if given.op != "call_function":
            return False
        if general.target in _SUMS and given.target in _SUMS and not general.kwargs and not given.kwargs:
            return self._sum(general, given, sign)
        if general.target != given.target or general.kwargs.keys() != given.kwargs.keys():
            return False
        if general.target in _PRODUCTS and not general.kwargs:
            return self._product(general, given, sign)
        if general.target is aten.where.self:
            (is_one, *one), (is_other, *other) = general.args, given.args
            return self._all([(is_one, is_other, 1), *((x, y, sign) for x, y in zip(one, other, strict=True))])
        return sign == 1 and super()._call(general, given)

    def _product(self, general: fx.Node, given: fx.Node, sign: int) -> bool:
        orders = [given.args, given.args[::-1]] if general.target is aten.mul.Tensor else [given.args]
        rows = [list(zip(general.args, args, strict=True)) for args in orders]
        return any(self._all([(*a, s), (*b, s * sign)]) for a, b in rows for s in (1, -1))

    def _sum(self, general: fx.Node, given: fx.Node, sign: int) -> bool:
        (a, b), (x, y) = general.args, given.args
        first, second = _SUMS[general.target], _SUMS[given.target] * sign  # type: ignore[index]
        return self._all([(a, x, sign), (b, y, first * second)]) or self._all([(a, y, second), (b, x, first * sign)])

    def _all(self, rows: Sequence[tuple[Any, Any, int]]) -> bool:
        return self._tried(lambda: all(self.with_sign(*row) for row in rows))

    def _number_with_sign(self, general: Any, given: Any, sign: int) -> bool:
        if isinstance(given, fx.Node) and "capture" in given.meta:
            given = self.values[given.meta["capture"]]
        if sign == 1 or not _kind(given):
            return sign == 1 and self.value(general, given)
        return self.value(general, -given)


# --- Graphs ---


def conjuncts(mask: Graph | None) -> list[fx.Node]:
    """The conditions that a mask's ``&`` joins."""
    found: list[fx.Node] = []
    pending = [] if mask is None else [mask.result]
    while pending:
        x = pending.pop()
        if x.target is aten.bitwise_and.Tensor and x.meta["dtype"] == torch.bool:
            pending += [a for a in reversed(x.args) if isinstance(a, fx.Node)]
        else:
            found.append(x)
    return found


def difference_of(condition: Any) -> tuple[str, Any] | None:
    """What ``first - second <= n`` of positions says: which is the first, and n, a number or a captured one."""
    if condition.target is aten.le.Scalar and _is_difference(condition.args[0]):
        difference, n = condition.args
        is_known = not isinstance(n, fx.Node) or "capture" in n.meta
        return (difference.args[0].target, n) if is_known else None
    if condition.target is aten.le.Tensor and all(_is_argument(a, "q_idx", "kv_idx") for a in condition.args):
        return condition.args[0].target, 0
    return None


def _of_heads(result: fx.Node) -> Graph | None:
    """A graph of h and numbers, if what is worked out reads no more."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    needed, pending = set[fx.Node](), [result]
    while pending:
        x = pending.pop()
        needed.add(x)
        if x.op == "placeholder" and not _is_argument(x, "h") and ("capture" not in x.meta or _is_tensor(x)):
            return None
        pending += [y for y in x.all_input_nodes if y not in needed]
    for node in result.graph.nodes:
        if node in needed or _is_argument(node, "h"):
            made[node] = graph.node_copy(node, lambda n: made[n])
            made[node].meta = dict(node.meta)
    graph.output(made[result])
    return Graph(graph, ())


def _read_at(read: Any) -> tuple[fx.Node, Sequence[Any]]:
    """The tensor and the indices of a read of a captured one."""
    return read.args


def _is_difference(x: Any) -> bool:
    """Whether it is the difference of two positions."""
    return _is_call(x, aten.sub.Tensor) and all(_is_argument(a, "q_idx", "kv_idx") for a in x.args)


def _is_argument(x: Any, *names: str) -> bool:
    """Whether it is one of these arguments of the mod."""
    return isinstance(x, fx.Node) and x.op == "placeholder" and "capture" not in x.meta and x.target in names


def _is_call(x: Any, target: Any) -> bool:
    return isinstance(x, fx.Node) and x.op == "call_function" and x.target is target


def _is_tensor(x: Any) -> bool:
    return isinstance(x, fx.Node) and x.meta["kind"] == "tensor"


def _kind(x: Any) -> str:
    """The kind of a number: "int" or "float"."""
    if isinstance(x, Symbol):
        return x.kind
    return "" if isinstance(x, bool) else "int" if isinstance(x, int) else "float" if isinstance(x, float) else ""


_WIDER = {torch.float16: (torch.float32,), torch.bfloat16: (torch.float32,)}


def _holds(wide: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether every number of `dtype` is one of `wide`, and mods reckon with both alike."""
    return wide == dtype or wide in _WIDER.get(dtype, ())
