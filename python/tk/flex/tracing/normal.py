"""One spelling for what is equal: ``k <= q``, ``q >= k``, ``~(k > q)`` and ``q - k >= 0`` are one graph.

- Sums of integers are collected: atoms with their factors in one order, and one number. So are comparisons of them, as
  ``what is added <= what is taken away``, or ``difference <= number``. (They may differ from what was written where
  that passes 32 bits.)
- A size, ``abs(x) <= n``, is compared as ``x <= n`` and ``-x <= n``.
- Of bools, negations stand at what is compared, and ``&`` and ``|`` have their operands once and in one order, with one
  bound of a sum: ``x < n | x == n`` is ``x <= n``.
- Of floats, operands of ``+`` and ``*`` stand in one order and signs in front. No sum is put together in another way.
- What is made of captured numbers alone is one number, which the call works out: kernels are given ``height - kernel``.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

Expression = Any
"""Of a number: ("leaf", i), ("size", i, dimension), (function, *expressions), or a number."""

_INTS = (torch.int32, torch.int64)
_ORDER = {"lt": (1, 1), "le": (1, 0), "gt": (-1, 1), "ge": (-1, 0)}  # the sign, and what is added for "<= 0"
_OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}
_INDICES = ("b", "h", "q_idx", "kv_idx")


@dataclass
class Sum:
    """factor * atom, and numbers: factor * expression, and a constant."""

    atoms: dict[fx.Node, int] = field(default_factory=dict)
    numbers: dict[Expression, int] = field(default_factory=dict)
    constant: int = 0

    def add(self, other: Sum, factor: int = 1) -> Sum:
        for mine, theirs in ((self.atoms, other.atoms), (self.numbers, other.numbers)):
            for x, n in theirs.items():
                mine[x] = mine.get(x, 0) + factor * n
                if not mine[x]:
                    del mine[x]
        self.constant += factor * other.constant
        return self


class Normal:
    """make: a node of (target, args, kwargs, meta), where equal ones are one. number: a placeholder for an expression
    of a kind."""

    def __init__(self, make: Callable[..., fx.Node], number: Callable[[Expression, str], fx.Node]):
        self.make, self.number = make, number
        self.made: dict[fx.Node, Any] = {}
        self.keys: dict[fx.Node, tuple[str, str]] = {}

    def rewrite(self, nodes: Iterable[fx.Node]) -> None:
        """Rewrites nodes in order; what comes of each is in `made`."""
        for node in nodes:
            self.made[node] = self._rewritten(node) if node.op == "call_function" and _is_tensor(node) else node

    def _rewritten(self, node: fx.Node) -> fx.Node:
        name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
        meta = dict(node.meta)
        args = [self._given(a) for a in node.args]
        if (folded := self._folded(node, args, meta)) is not None:
            return folded
        if node.target is aten.index.Tensor:
            at = [i if _is_tensor(i) else self._number(i, "int") for i in args[1]]
            return self.make(aten.index.Tensor, (args[0], at), {}, meta)
        if node.target is aten.full.default:
            return self._full(node.args[1], meta)
        if node.target is aten.where.self:
            return self._where(args, meta)
        if not node.kwargs:
            dtypes = [a.meta["dtype"] for a in args if _is_tensor(a)]
            found = None
            if meta["dtype"] == torch.bool:
                found = self._bool(name, args, dtypes, meta)
            elif meta["dtype"] in _INTS:
                found = self._int(node, meta)
            elif meta["dtype"].is_floating_point:
                found = self._float(name, args, meta)
            if found is not None:
                return found
        kind = "float" if meta["dtype"].is_floating_point else ""
        args = [self._numbers(a, kind if name in ("mul", "add", "sub", "div", "rsub") else "") for a in args]
        kwargs = {k: self._numbers(self._given(v), "") for k, v in node.kwargs.items()}
        return self.make(node.target, tuple(args), kwargs, meta)

    def _given(self, x: Any) -> Any:
        if isinstance(x, fx.Node):
            return self.made[x]
        return [self._given(y) for y in x] if isinstance(x, list | tuple) else x

    # --- Numbers ---

    def _numbers(self, x: Any, kind: str) -> Any:
        """kind: what they are converted to, if any."""
        if isinstance(x, list):
            return [self._numbers(y, kind) for y in x]
        if isinstance(x, fx.Node) and not _is_tensor(x):
            return self._number(x, kind or x.meta["kind"])
        is_int = isinstance(x, int) and not isinstance(x, bool)
        return float(x) if kind == "float" and is_int else x

    def _number(self, x: Any, kind: str) -> Any:
        if not isinstance(x, fx.Node):
            return x
        expression = _expression(x)
        if kind == "float" and x.meta["kind"] == "int":
            expression = (float, expression)
        return self.number(expression, kind)

    def _full(self, value: Any, meta: dict[str, Any]) -> fx.Node:
        return self.make(aten.full.default, ([], self._numbers(value, "")), {"dtype": meta["dtype"]}, meta)

    # --- Constants ---

    def _folded(self, node: fx.Node, args: Sequence[Any], meta: dict[str, Any]) -> fx.Node | None:
        """What is made of constants alone, and what a constant decides."""
        tensors = [a for a in _flat(args) if isinstance(a, fx.Node)]
        if node.target is aten.where.self and _is_constant(args[0]):
            chosen = args[1] if args[0].args[1] else args[2]
            return _cast(self.make, chosen, meta["dtype"])
        if node.target is aten.full.default or not tensors or not all(map(_is_constant, tensors)):
            return None
        given = [_value(a) if isinstance(a, fx.Node) else a for a in args]
        if any(isinstance(x, fx.Node) for x in _flat([node.kwargs.values()])):
            return None
        value = node.target(*given, **node.kwargs)  # type: ignore[operator]
        return self._full(value.to(meta["dtype"]).item(), meta)

    # --- Integers ---

    def _int(self, node: fx.Node, meta: dict[str, Any]) -> fx.Node | None:
        found = self._collected(node)
        if found.atoms.keys() == {node} or not found.atoms:
            return None
        return _cast(self.make, self._sum(found, meta["dtype"]), meta["dtype"])

    def _sum_of(self, x: Any) -> Sum:
        """The sum that something rewritten, or a number, is."""
        if not isinstance(x, fx.Node):
            return Sum(constant=int(x))
        if not _is_tensor(x):
            return _linear(_expression(x))
        return self._collected(x)

    def _collected(self, x: fx.Node) -> Sum:
        args: list[Any] = [self.made.get(a, a) if isinstance(a, fx.Node) else a for a in x.args]
        if x.op != "call_function" or x.meta["dtype"] not in _INTS or not all(map(_is_int, args)):
            return Sum(atoms={x: 1})
        name = x.target.overloadpacket.__name__  # type: ignore[union-attr]
        if x.target is aten.full.default:
            return self._sum_of(x.args[1])
        if name == "_to_copy" and args[0].meta["dtype"] in _INTS and x.meta["dtype"] == torch.int64:
            return self._sum_of(args[0])
        if x.kwargs or name not in ("add", "sub", "rsub", "neg", "mul"):
            return Sum(atoms={x: 1})
        if name == "neg":
            return Sum().add(self._sum_of(args[0]), -1)
        if name == "mul":
            factors = [a for a in args if isinstance(a, int)]
            if len(factors) != 1:
                return Sum(atoms={x: 1})
            return Sum().add(self._sum_of(args[0] if args[1] is factors[0] else args[1]), factors[0])
        if len(args) != 2:
            return Sum(atoms={x: 1})
        first, second = (args[1], args[0]) if name == "rsub" else (args[0], args[1])
        return Sum().add(self._sum_of(first)).add(self._sum_of(second), 1 if name == "add" else -1)

    def _total(self, of: Sum, factor: int = 1) -> Any:
        """Its numbers alone: a number, or a placeholder of one."""
        if not of.numbers:
            return factor * of.constant
        parts = sorted(((n * factor, x) for x, n in of.numbers.items()), key=repr)
        parts.sort(key=lambda p: p[0] < 0)
        total: Expression = None
        for n, x in parts:
            if total is None:
                total = x if n == 1 else (operator.neg, x) if n == -1 else (operator.mul, n, x)
                continue
            term = x if abs(n) == 1 else (operator.mul, abs(n), x)
            total = (operator.add if n > 0 else operator.sub, total, term)
        constant = factor * of.constant
        if constant:
            total = (operator.add if constant > 0 else operator.sub, total, abs(constant))
        return self.number(total, "int")

    def _sum(self, of: Sum, dtype: torch.dtype, with_numbers: bool = True) -> Any:
        """A sum as a node: what is added comes before what is taken away."""
        made: Any = None
        atoms = sorted(of.atoms, key=lambda x: (of.atoms[x] < 0, self._key(x)))
        for x in atoms:
            n = of.atoms[x]
            wide = x if x.meta["dtype"] in _INTS else _cast(self.make, x, dtype)
            term = wide if abs(n) == 1 else self._op(aten.mul.Tensor, wide, abs(n))
            if made is None:
                made = term if n > 0 else self._op(aten.neg.default, term)
            else:
                made = self._op(aten.add.Tensor if n > 0 else aten.sub.Tensor, made, term)
        total = self._total(of) if with_numbers else 0
        if isinstance(total, int) and total == 0:
            return made
        return self._op(aten.add.Tensor, made, total)

    def _op(self, target: Any, *args: Any) -> fx.Node:
        """A node of an op of integers."""
        dtypes = [a.meta["dtype"] for a in args if _is_tensor(a)]
        dtype = torch.int64 if torch.int64 in dtypes else torch.int32
        return self.make(target, args, {}, {"kind": "tensor", "dtype": dtype})

    # --- Bools ---

    def _bool(self, name: str, args: list[Any], dtypes: Sequence[torch.dtype], meta: dict[str, Any]) -> fx.Node | None:
        is_logic = all(d == torch.bool for d in dtypes) and all(_is_tensor(a) for a in args)
        if name in ("bitwise_and", "logical_and", "__and__", "bitwise_or", "logical_or", "__or__") and is_logic:
            return self._joined("and" if "and" in name else "or", args)
        if name in ("bitwise_not", "logical_not") and is_logic:
            return self._not(args[0])
        if name not in _OPPOSITE or len(args) != 2:
            return None
        if name in ("eq", "ne") and dtypes == [torch.bool] and isinstance(args[1], bool | int) and args[1] in (0, 1):
            return args[0] if (name == "eq") == bool(args[1]) else self._not(args[0])
        if all(map(_is_int, args)):
            return self._compared(name, self._sum_of(args[0]), self._sum_of(args[1]))
        if any(not _is_tensor(a) for a in args):
            return None
        if name in ("gt", "ge"):
            name, args = {"gt": "lt", "ge": "le"}[name], args[::-1]
        elif name in ("eq", "ne"):
            args = sorted(args, key=self._key)
        return self._truth(getattr(aten, name).Tensor, *args)

    def _truth(self, target: Any, *args: Any) -> fx.Node:
        return self.make(target, args, {}, {"kind": "tensor", "dtype": torch.bool})

    def _compared(self, name: str, a: Sum, b: Sum) -> fx.Node | None:
        d = Sum().add(a).add(b, -1)
        if not d.atoms:
            if d.numbers:
                return None
            value = getattr(operator, name)(d.constant, 0)
            return self.make(
                aten.full.default, ([], value), {"dtype": torch.bool}, {"kind": "tensor", "dtype": torch.bool}
            )
        if name in ("eq", "ne"):
            first = min(d.atoms, key=self._key)
            if d.atoms[first] < 0:
                d = Sum().add(d, -1)
            return self._sides(name, d)
        sign, more = _ORDER[name]
        d = Sum().add(d, sign)
        d.constant += more
        return self._by_signs(d) or self._sides("le", d)

    def _by_signs(self, d: Sum) -> fx.Node | None:
        """``abs(x) <= n`` as ``x <= n`` and ``-x <= n``, which is a band where x is a distance."""
        found = [x for x in d.atoms if x.target is aten.abs.default and abs(d.atoms[x]) == 1]
        if len(found) != 1 or not _is_int(found[0].args[0]):
            return None
        size = found[0]
        which = "and" if d.atoms[size] == 1 else "or"
        rest = Sum().add(d).add(Sum(atoms={size: 1}), -d.atoms[size])
        inside = self._sum_of(size.args[0])
        sides = [self._compared("le", Sum().add(rest).add(inside, sign), Sum()) for sign in (1, -1)]
        return None if None in sides else self._joined(which, sides)  # type: ignore[arg-type]

    def _sides(self, name: str, d: Sum) -> fx.Node:
        """d name 0"""
        dtype = torch.int64 if any(x.meta["dtype"] == torch.int64 for x in d.atoms) else torch.int32
        plus = Sum({x: n for x, n in d.atoms.items() if n > 0})
        minus = Sum({x: -n for x, n in d.atoms.items() if n < 0})
        is_zero = not d.numbers and d.constant == 0
        packet = getattr(aten, name)
        if is_zero and plus.atoms and minus.atoms:
            return self._truth(packet.Tensor, self._sum(plus, dtype), self._sum(minus, dtype))
        if not plus.atoms:
            packet = aten.ge if name == "le" else packet
            return self._truth(packet.Scalar, self._sum(minus, dtype), self._total(d))
        if not minus.atoms or all(x.op == "placeholder" and x.name in _INDICES for x in d.atoms):
            both = Sum(dict(d.atoms))
            return self._truth(packet.Scalar, self._sum(both, dtype), self._total(d, -1))
        right = Sum(minus.atoms).add(Sum(numbers=d.numbers, constant=d.constant), -1)
        return self._truth(packet.Tensor, self._sum(plus, dtype), self._sum(right, dtype))

    def _joined(self, which: str, args: Sequence[fx.Node]) -> fx.Node:
        target = aten.bitwise_and.Tensor if which == "and" else aten.bitwise_or.Tensor
        decisive = which == "or"
        found: dict[fx.Node, None] = {}
        pending = list(args)
        while pending:
            x = pending.pop(0)
            if x.target is target:
                pending = [*x.args, *pending]  # type: ignore[list-item]
            elif x.target is aten.full.default and isinstance(x.args[1], bool):
                if x.args[1] is decisive:
                    return x
                neutral = x
            else:
                found[x] = None
        if not found:
            return neutral
        first, *rest = sorted(self._absorbed(list(found), is_or=decisive), key=self._key)
        for x in rest:
            first = self._truth(target, first, x)
        return first

    def _absorbed(self, conditions: list[fx.Node], is_or: bool) -> list[fx.Node]:
        """What bounds one sum as one bound, with the points that it has or ends at: ``x < n | x == n`` is ``x <= n``,
        and ``x <= n & x != n`` is ``x < n``."""
        given: dict[Any, fx.Node] = {}
        bounds: dict[Any, Sum] = {}
        points, found = [], []
        for x in conditions:
            name, d = self._difference(x)
            if name == "le":
                key = _but_constant(d)
                given[key, d.constant] = x
                held = bounds.setdefault(key, d)
                held.constant = (min if is_or else max)(held.constant, d.constant)
            elif name == ("eq" if is_or else "ne"):
                points.append((x, d))
            else:
                found.append(x)
        n_points = -1
        while n_points != len(points):  # where one was absorbed, another one may stand next
            n_points = len(points)
            points = [(x, d) for x, d in points if not _absorbs(bounds, d, is_or)]
        found += [x for x, _ in points]
        for key, d in bounds.items():
            bound = given.get((key, d.constant)) or self._compared("le", d, Sum())
            assert bound is not None  # it is None of a sum without atoms, which is no comparison
            found.append(bound)
        return found

    def _difference(self, x: fx.Node) -> tuple[str, Sum]:
        """What a comparison of integers asks: "le", "eq" or "ne", and what is compared with 0; else ""."""
        name = x.target.overloadpacket.__name__ if x.op == "call_function" else ""  # type: ignore[union-attr]
        if name not in ("le", "ge", "eq", "ne") or not all(map(_is_int, x.args)):
            return "", Sum()
        a, b = (self._sum_of(y) for y in (x.args[::-1] if name == "ge" else x.args))
        return "le" if name == "ge" else name, Sum().add(a).add(b, -1)

    def _not(self, x: fx.Node) -> fx.Node:
        name = x.target.overloadpacket.__name__ if x.op == "call_function" else ""  # type: ignore[union-attr]
        if x.target is aten.full.default and isinstance(x.args[1], bool):
            return self.make(x.target, ([], not x.args[1]), x.kwargs, {"kind": "tensor", "dtype": torch.bool})
        if name == "bitwise_not":
            return x.args[0]  # type: ignore[return-value]
        if name in ("bitwise_and", "bitwise_or"):
            return self._joined("or" if name == "bitwise_and" else "and", [self._not(a) for a in x.args])  # type: ignore[arg-type]
        if name in ("eq", "ne"):
            target = getattr(getattr(aten, _OPPOSITE[name]), x.target._overloadname)  # type: ignore[union-attr]
            return self._truth(target, *x.args)
        if name in _ORDER and all(map(_is_int, x.args)):
            a, b = (self._sum_of(y) for y in x.args)
            return self._compared(_OPPOSITE[name], a, b) or self._truth(aten.bitwise_not.default, x)
        return self._truth(aten.bitwise_not.default, x)

    def _where(self, args: Sequence[Any], meta: dict[str, Any]) -> fx.Node:
        """A choice by whichever of a condition and its opposite comes first."""
        condition, x, y = args
        opposite = self._not(condition)
        if self._key(opposite) < self._key(condition):
            condition, x, y = opposite, y, x
        return self.make(aten.where.self, (condition, x, y), {}, meta)

    # --- Masks ---

    def without_mask(self, x: fx.Node) -> tuple[fx.Node, fx.Node | None]:
        """A score without the condition under which it is another thing than -inf; and this condition."""
        conditions: list[fx.Node] = []
        while (found := self._allowed(x)) is not None:
            x, condition = found
            conditions.append(condition)
        return x, self._joined("and", conditions) if conditions else None

    def _allowed(self, x: Any) -> tuple[fx.Node, fx.Node] | None:
        if x.target is aten.where.self:
            condition, *choices = x.args
            for score, other, allowed in ((*choices, condition), (*choices[::-1], self._not(condition))):
                if _is_full_of(other, -math.inf) and _is_tensor(score) and not _depends_on_score(condition):
                    return (score, allowed) if score.meta["dtype"] == x.meta["dtype"] else None
        if x.target in (aten.add.Tensor, aten.sub.Tensor) and all(map(_is_tensor, x.args)):
            sign = 1 if x.target is aten.add.Tensor else -1
            for score, mask in ((x.args[0], x.args[1]), (x.args[1], x.args[0]))[: 2 if sign == 1 else 1]:
                if score.meta["dtype"] != x.meta["dtype"] or mask.target is not aten.where.self:
                    continue
                condition, one, other = mask.args
                if _depends_on_score(condition):
                    continue
                if _is_full_of(one, 0) and _is_full_of(other, -sign * math.inf):
                    return score, condition
                if _is_full_of(other, 0) and _is_full_of(one, -sign * math.inf):
                    return score, self._not(condition)
        return None

    # --- Floats ---

    def _float(self, name: str, args: list[Any], meta: dict[str, Any]) -> fx.Node | None:
        """A sign is taken out of products: it changes no digit."""
        if name not in ("mul", "div", "add", "sub", "neg", "exp2", "pow") or len(args) > 2:
            return None
        if name == "pow":
            is_base = isinstance(args[0], int | float) and args[0] == 2
            return self.make(aten.exp2.default, (args[1],), {}, meta) if is_base else None
        args = [self._numbers(self._plain(a, args, meta), "float") for a in args]
        if name == "exp2":
            return None
        if name == "neg":
            return self._signed(*_without_sign(args[0]), meta, -1)
        if name in ("add", "sub"):
            return self._added(args, -1 if name == "sub" else 1, meta)
        (a, sign), (b, other) = (self._positive(x) for x in args)
        if name == "mul":
            a, b = self._in_order(a, b)
        target = aten.mul.Tensor if name == "mul" else aten.div.Tensor
        return self._signed(self.make(target, (a, b), {}, meta), sign * other, meta)

    def _plain(self, x: Any, others: Sequence[Any], meta: dict[str, Any]) -> Any:
        """An operand without a conversion that the op does itself; a constant as a number."""
        if not _is_tensor(x) or x.op != "call_function":
            return x
        rest = [y for y in others if y is not x and _is_tensor(y)]
        if not any(y.meta["dtype"] == meta["dtype"] for y in rest):
            return x
        if x.target is aten.full.default and x.meta["dtype"] == meta["dtype"]:
            return x.args[1]
        is_cast = x.target is aten._to_copy.default and x.meta["dtype"] == meta["dtype"]
        if is_cast and x.args[0].meta["dtype"] in (torch.int8, torch.int16, torch.uint8, *_INTS):
            return x.args[0]
        return x

    def _added(self, args: Sequence[Any], factor: int, meta: dict[str, Any]) -> fx.Node:
        (a, sign), (b, other) = (_without_sign(x) for x in args)
        other *= factor
        if sign == other:
            return self._signed(self.make(aten.add.Tensor, self._in_order(a, b), {}, meta), sign, meta)
        a, b = (a, b) if sign > 0 else (b, a)
        if not _is_tensor(a):
            return self.make(aten.rsub.Scalar, (b, a), {}, meta)
        return self.make(aten.sub.Tensor, (a, b), {}, meta)

    def _signed(self, x: fx.Node, sign: int, meta: dict[str, Any], factor: int = 1) -> fx.Node:
        return x if sign * factor > 0 else self.make(aten.neg.default, (x,), {}, meta)

    def _positive(self, x: Any) -> tuple[Any, int]:
        """A factor, and its sign: of a difference of integers by what stands first in it."""
        if _is_tensor(x) and x.meta["dtype"] in _INTS:
            found = self._collected(x)
            if found.atoms and found.atoms[min(found.atoms, key=self._key)] < 0:
                turned = Sum().add(found, -1)
                return _cast(self.make, self._sum(turned, x.meta["dtype"]), x.meta["dtype"]), -1
        return _without_sign(x)

    def _in_order(self, a: Any, b: Any) -> tuple[Any, Any]:
        """A number comes last, as torch has it."""
        if not _is_tensor(a):
            return b, a
        if not _is_tensor(b) or self._key(a) <= self._key(b):
            return a, b
        return b, a

    # --- Order ---

    def _key(self, x: Any) -> tuple[str, str]:
        """The same for whatever a thing captures: numbers are all alike, and so are tensors of a rank. Their dtypes
        come last: what a pair of wider tensors serves stands in its order."""
        if not isinstance(x, fx.Node):
            return "#" if isinstance(x, int | float) else repr(x), ""
        if not _is_tensor(x):
            return "#", ""
        if x not in self.keys:
            if x.op == "placeholder":
                is_captured = "leaf" in x.meta
                key = f"~{x.meta.get('rank', 0)}" if is_captured else x.name
                self.keys[x] = key, f"{x.meta['dtype']} " if is_captured else ""
            else:
                parts = [self._key(a) for a in _flat((x.args, tuple(x.kwargs.values())))]
                text = f"{x.target.overloadpacket.__name__}({','.join(key for key, _ in parts)})"  # type: ignore[union-attr]
                self.keys[x] = _short(text), _short("".join(dtypes for _, dtypes in parts))
        return self.keys[x]


def _but_constant(of: Sum) -> Any:
    return frozenset(of.atoms.items()), frozenset(of.numbers.items())


def _absorbs(bounds: Mapping[Any, Sum], point: Sum, is_or: bool) -> bool:
    """Whether a bound, ``d <= 0``, has the point, or is moved by one so that it has."""
    for p in (point, Sum().add(point, -1)):
        d = bounds.get(_but_constant(p))
        if d is None:
            continue
        at = d.constant - p.constant  # what d is there
        if at == int(is_or):
            d.constant += -1 if is_or else 1
            return True
        if (at <= 0) == is_or:
            return True
    return False


def _short(text: str) -> str:
    """The short form of a long graph's text: its beginning, and which it is."""
    return text if len(text) <= 400 else f"{text[:300]}{hashlib.sha256(text.encode()).hexdigest()}"


def _is_constant(x: Any) -> bool:
    return isinstance(x, fx.Node) and x.target is aten.full.default and not isinstance(x.args[1], fx.Node)


def _value(constant: Any) -> torch.Tensor:
    return torch.full((), constant.args[1], dtype=constant.meta["dtype"])


def _is_full_of(x: Any, value: float) -> bool:
    x = x.args[1] if _is_constant(x) else x
    return isinstance(x, int | float) and not isinstance(x, bool) and x == value


def _depends_on_score(x: Any) -> bool:
    seen, pending = set(), [x]
    while pending:
        node = pending.pop()
        if isinstance(node, fx.Node) and node not in seen:
            seen.add(node)
            pending += node.all_input_nodes
    return any(n.op == "placeholder" and n.name == "score" for n in seen)


def _flat(x: Any) -> list[Any]:
    return [z for y in x for z in _flat(y)] if isinstance(x, list | tuple) else [x]


def _is_tensor(x: Any) -> bool | None:
    """None of what is no node."""
    return x.meta["kind"] == "tensor" if isinstance(x, fx.Node) else None


def _is_int(x: Any) -> bool:
    """A tensor, or a number."""
    if isinstance(x, fx.Node):
        dtype = x.meta["dtype"]
        return not dtype.is_floating_point and dtype != torch.bool and x.meta.get("rank", 0) == 0
    return (isinstance(x, int) and not isinstance(x, bool)) or x == []


def _without_sign(x: Any) -> tuple[Any, int]:
    if _is_tensor(x):
        return (x.args[0], -1) if x.target is aten.neg.default else (x, 1)
    if isinstance(x, int | float) and math.copysign(1, x) < 0 and x == x:
        return -x, -1
    return x, 1


def _cast(make: Callable[..., fx.Node], x: fx.Node, dtype: torch.dtype) -> fx.Node:
    if x.meta["dtype"] == dtype:
        return x
    return make(aten._to_copy.default, (x,), {"dtype": dtype}, {"kind": "tensor", "dtype": dtype})


# --- Expressions of numbers ---


def _expression(x: Any) -> Expression:
    if not isinstance(x, fx.Node):
        return x
    if "leaf" in x.meta:
        leaf = x.meta["leaf"]
        return leaf if isinstance(leaf, tuple) else ("leaf", leaf)
    if x.target is aten.sym_size.int:
        return ("size", x.args[0].meta["leaf"], x.args[1])  # type: ignore[union-attr]
    return (x.target, *map(_expression, x.args))


def _linear(expression: Expression) -> Sum:
    """An integer as a sum: what was put together is taken apart, so that ``n + 1 - 1`` is n."""
    if not isinstance(expression, tuple):
        return Sum(constant=int(expression))
    function, *parts = expression
    if function in (operator.add, operator.sub):
        first, second = map(_linear, parts)
        return first.add(second, 1 if function is operator.add else -1)
    if function is operator.neg:
        return Sum().add(_linear(parts[0]), -1)
    if function is operator.mul and (factors := [p for p in parts if isinstance(p, int)]):
        return Sum().add(_linear(parts[1] if parts[0] is factors[0] else parts[0]), factors[0])
    return Sum(numbers={expression: 1})


def leaves_of(expression: Expression) -> list[int]:
    if not isinstance(expression, tuple):
        return []
    if expression[0] in ("leaf", "size"):
        return [expression[1]]
    return [leaf for part in expression[1:] for leaf in leaves_of(part)]


def evaluator(expression: Expression) -> Callable[[Sequence[Any]], Any]:
    """A function of the leaves' values."""
    if not isinstance(expression, tuple):
        return lambda values: expression
    head, *parts = expression
    if head == "leaf":
        return operator.itemgetter(parts[0])
    if head == "size":
        leaf, d = parts
        return lambda values: values[leaf].shape[d]
    of = [evaluator(p) for p in parts]
    return lambda values: head(*[f(values) for f in of])


NAMED: Mapping[Any, str] = {operator.add: "+", operator.sub: "-", operator.mul: "*"}


def described(expression: Expression, names: Sequence[str]) -> str:
    if not isinstance(expression, tuple):
        return str(expression)
    if expression[0] == "leaf":
        return names[expression[1]]
    if expression[0] == "size":
        return f"{names[expression[1]]}.shape[{expression[2]}]"
    parts = [described(p, names) for p in expression[1:]]
    if expression[0] in NAMED and len(parts) == 2:
        return f"({parts[0]} {NAMED[expression[0]]} {parts[1]})"
    return f"{getattr(expression[0], '__name__', expression[0])}({', '.join(parts)})"
