"""Integer expressions over a problem: what a pack's guards, grids, sizes and predicted times are written in.

An expression is built with Python's operators from the symbols below, folded as far as its operands are known, and
encoded as the postfix words of ``csrc/core/expr.h``. A constraint that folds to false removes a combination before it
is compiled; what is left of it travels in the pack and is checked before every launch. So there is one predicate.

    a, b = tensors("a", "b")
    K = a.size(1)
    (K % 64 == 0) & (b.size(0) == K)

``==`` builds an expression; compare expressions as objects with ``same``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "MODE_BITS",
    "Expr",
    "Problem",
    "Tensor",
    "TensorValue",
    "as_expr",
    "ceil_div",
    "const",
    "device",
    "divisor",
    "evaluate_locals",
    "int_arg",
    "local",
    "maximum",
    "minimum",
    "mode",
    "select",
    "shared",
    "tensors",
]

MAX_STACK = 64  # csrc/core/expr.h
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# Mode bits of a call, as in tk.h.
MODE_BITS = {"deterministic": 1, "batch_invariant": 2, "strict": 4, "static_weights": 8}
DEVICE_FIELDS = ("sm_count", "arch", "shared_optin", "l2_bytes")

# The order is the encoding: csrc/core/expr.h.
OPCODES = (
    "const", "size", "stride", "dtype", "ndim", "alignment", "int", "mode", "device", "local",
    "add", "sub", "mul", "floordiv", "mod", "ceildiv", "min", "max", "neg",
    "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "bitand", "shl", "shr", "select",
)  # fmt: skip
_NUMBER = {name: i for i, name in enumerate(OPCODES)}


def _floor_div(a: int, b: int) -> int:
    return a // b if b else 0


def _mod(a: int, b: int) -> int:
    return a % b if b else 0


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b) if b else 0


def _shift(a: int, b: int, left: bool) -> int:
    if not 0 <= b < 64:
        raise OverflowError(f"shift by {b}")
    return a << b if left else a >> b


_FOLD: Mapping[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": _floor_div,
    "mod": _mod,
    "ceildiv": _ceil_div,
    "min": min,
    "max": max,
    "neg": lambda a: -a,
    "eq": lambda a, b: int(a == b),
    "ne": lambda a, b: int(a != b),
    "lt": lambda a, b: int(a < b),
    "le": lambda a, b: int(a <= b),
    "gt": lambda a, b: int(a > b),
    "ge": lambda a, b: int(a >= b),
    "and": lambda a, b: int(bool(a) and bool(b)),
    "or": lambda a, b: int(bool(a) or bool(b)),
    "not": lambda a: int(not a),
    "bitand": lambda a, b: a & b,
    "shl": lambda a, b: _shift(a, b, True),
    "shr": lambda a, b: _shift(a, b, False),
    "select": lambda c, a, b: a if c else b,
}
_ARITY = {op: 3 if op == "select" else 1 if op in ("neg", "not") else 2 for op in _FOLD}
_TRUTH = {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not"}


def _operator(op: str) -> Callable[[Expr, Expr | int], Expr]:
    return lambda a, b: _make(op, a, b)


def _reflected(op: str) -> Callable[[Expr, Expr | int], Expr]:
    return lambda a, b: _make(op, b, a)


@dataclass(frozen=True, eq=False)
class Expr:
    """A node: an opcode, its operand (of a leaf) or its operands."""

    op: str
    operand: int = 0
    args: tuple[Expr, ...] = ()

    @property
    def value(self) -> int | None:
        """The number, if it is known."""
        return self.operand if self.op == "const" else None

    def same(self, other: Expr) -> bool:
        return self.encode() == other.encode()

    def encode(self) -> tuple[int, ...]:
        """Postfix words."""
        words: list[int] = []
        stack: list[tuple[Expr, bool]] = [(self, False)]
        while stack:
            node, ready = stack.pop()
            if ready or not node.args:
                words.append(_NUMBER[node.op] | node.operand << 8)
                continue
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.args))
        return tuple(words)

    @staticmethod
    def decode(words: Sequence[int]) -> Expr:
        """Reads postfix words; no words are the constant 0. Raises ValueError for what the core would refuse."""
        stack: list[Expr] = []
        for word in words:
            number, operand = word & 0xFF, word >> 8
            if number >= len(OPCODES):
                raise ValueError(f"there is no opcode {number}")
            op = OPCODES[number]
            n = _ARITY.get(op, 0)
            if n > len(stack) or (n and operand):
                raise ValueError(f"{op} lacks operands" if n > len(stack) else f"{op} takes no immediate operand")
            args = tuple(stack[len(stack) - n :])
            del stack[len(stack) - n :]
            stack.append(Expr(op, operand, args))
            if len(stack) > MAX_STACK:
                raise ValueError(f"an expression needs more than {MAX_STACK} places of stack")
        if len(stack) > 1:
            raise ValueError(f"an expression leaves {len(stack)} values")
        return stack[0] if stack else const(0)

    def walk(self) -> Iterator[Expr]:
        """This node and all below it."""
        pending = [self]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.args)

    def evaluate(self, problem: Problem) -> int:
        """The value, as the core works it out. Raises OverflowError where the core reports an overflow."""
        return _evaluate(self, problem)

    def __bool__(self) -> bool:
        raise TypeError("an expression has no truth value while it is built: use & | ~ and select()")

    __hash__ = object.__hash__

    __add__, __radd__ = _operator("add"), _reflected("add")
    __sub__, __rsub__ = _operator("sub"), _reflected("sub")
    __mul__, __rmul__ = _operator("mul"), _reflected("mul")
    __floordiv__, __rfloordiv__ = _operator("floordiv"), _reflected("floordiv")
    __mod__, __rmod__ = _operator("mod"), _reflected("mod")
    __and__, __rand__ = _operator("and"), _reflected("and")
    __or__, __ror__ = _operator("or"), _reflected("or")
    __lshift__, __rshift__ = _operator("shl"), _operator("shr")
    __eq__, __ne__ = _operator("eq"), _operator("ne")  # type: ignore[assignment]
    __lt__, __le__, __gt__, __ge__ = _operator("lt"), _operator("le"), _operator("gt"), _operator("ge")

    def __neg__(self) -> Expr:
        return _make("neg", self)

    def __invert__(self) -> Expr:
        return _make("not", self)

    def has_bit(self, bit: int) -> Expr:
        return _make("ne", _make("bitand", self, bit), 0)


def as_expr(x: Expr | int | bool) -> Expr:
    return x if isinstance(x, Expr) else const(x)


def const(value: int) -> Expr:
    value = int(value)
    if not -(2**55) <= value < 2**55:
        raise ValueError(f"constant {value} does not fit in 56 bits")
    return Expr("const", value)


def _make(op: str, *operands: Expr | int | bool) -> Expr:
    args = tuple(as_expr(x) for x in operands)
    values = [a.value for a in args]
    known = [v for v in values if v is not None]
    folded = _fold_constants(op, known) if len(known) == len(values) else _identities(op, args, values)
    return Expr(op, 0, args) if folded is None else folded


def _fold_constants(op: str, values: Sequence[int]) -> Expr | None:
    """None where the result is no constant of 56 bits: then the core computes it, or reports the overflow."""
    try:
        return const(_FOLD[op](*values))
    except (OverflowError, ValueError):
        return None


def _identities(op: str, args: tuple[Expr, ...], values: list[int | None]) -> Expr | None:
    """What one known operand already decides."""
    if op == "select" and values[0] is not None:
        return args[1] if values[0] else args[2]
    if len(args) != 2:
        return None
    (a, b), (x, y) = args, values
    if op in ("and", "or"):
        decisive = op == "or"
        for known, other in ((x, b), (y, a)):
            if known is not None:
                return const(decisive) if bool(known) == decisive else (other if other.op in _TRUTH else None)
    if (op == "add" and x == 0) or (op == "mul" and x == 1):
        return b
    if (op in ("add", "sub") and y == 0) or (op in ("mul", "floordiv", "ceildiv") and y == 1):
        return a
    if op == "mul" and 0 in (x, y):
        return const(0)
    if op == "mod" and y == 1:
        return const(0)
    return None


def ceil_div(a: Expr | int, b: Expr | int) -> Expr:
    return _make("ceildiv", a, b)


def minimum(first: Expr | int, *rest: Expr | int) -> Expr:
    for x in rest:
        first = _make("min", first, x)
    return as_expr(first)


def maximum(first: Expr | int, *rest: Expr | int) -> Expr:
    for x in rest:
        first = _make("max", first, x)
    return as_expr(first)


def select(condition: Expr | bool, then: Expr | int, otherwise: Expr | int) -> Expr:
    return _make("select", condition, then, otherwise)


def divisor(x: Expr | int) -> int:
    """A number that is known to divide `x` whatever the problem; 0 for the constant 0, which everything divides."""
    x = as_expr(x)
    if x.value is not None:
        return abs(x.value)
    if x.op == "mul":
        return divisor(x.args[0]) * divisor(x.args[1])
    if x.op in ("add", "sub", "min", "max"):
        return math.gcd(divisor(x.args[0]), divisor(x.args[1]))
    if x.op == "select":
        return math.gcd(divisor(x.args[1]), divisor(x.args[2]))
    return divisor(x.args[0]) if x.op == "neg" else 1


@dataclass(frozen=True)
class Tensor:
    """The n-th tensor argument of an op."""

    name: str
    index: int

    def size(self, d: int) -> Expr:
        return Expr("size", self.index | d << 8)

    def stride(self, d: int) -> Expr:
        """The stride of a dimension, in elements."""
        return Expr("stride", self.index | d << 8)

    @property
    def dtype(self) -> Expr:
        """torch's ScalarType number; -1 when the tensor is absent."""
        return Expr("dtype", self.index)

    @property
    def ndim(self) -> Expr:
        return Expr("ndim", self.index)

    @property
    def present(self) -> Expr:
        return self.ndim >= 0

    @property
    def alignment(self) -> Expr:
        """The largest power of two, up to 256, that divides the address."""
        return Expr("alignment", self.index)


def tensors(*names: str) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, i) for i, name in enumerate(names))


def int_arg(index: int) -> Expr:
    return Expr("int", index)


def local(index: int) -> Expr:
    return Expr("local", index)


def mode(bit: str) -> Expr:
    """Whether the caller asked for ``deterministic``, ``batch_invariant``, ``strict`` or ``static_weights``."""
    return Expr("mode").has_bit(MODE_BITS[bit])


class _Device:
    """Attributes of the device: ``sm_count``, ``arch`` (90 for 9.0), ``shared_optin`` and ``l2_bytes``."""

    def __getattr__(self, name: str) -> Expr:
        if name not in DEVICE_FIELDS:
            raise AttributeError(name)
        return Expr("device", DEVICE_FIELDS.index(name))


device = _Device()


@dataclass(frozen=True)
class TensorValue:
    sizes: Sequence[int]
    strides: Sequence[int]
    dtype: int
    alignment: int = 256


@dataclass(frozen=True)
class Problem:
    """A concrete problem, to evaluate expressions without the core. An absent tensor is None."""

    tensors: Sequence[TensorValue | None]
    ints: Sequence[int] = ()
    mode: int = 0
    device: Mapping[str, int] | None = None
    locals: Sequence[int] = ()


def _leaf(node: Expr, p: Problem) -> int:
    if node.op == "const":
        return node.operand
    if node.op == "int":
        return p.ints[node.operand]
    if node.op == "mode":
        return p.mode
    if node.op == "local":
        return p.locals[node.operand]
    if node.op == "device":
        if p.device is None:
            raise ValueError("this problem names no device")
        return p.device[DEVICE_FIELDS[node.operand]]
    t = p.tensors[node.operand & 0xFF]
    if node.op in ("size", "stride"):
        d = node.operand >> 8
        if t is None or d >= len(t.sizes):
            return 0
        return (t.sizes if node.op == "size" else t.strides)[d]
    if t is None:
        return 256 if node.op == "alignment" else -1
    return {"dtype": t.dtype, "ndim": len(t.sizes), "alignment": t.alignment}[node.op]


def _evaluate(node: Expr, p: Problem) -> int:
    if not node.args:
        return _leaf(node, p)
    result = _FOLD[node.op](*(_evaluate(a, p) for a in node.args))
    if not INT64_MIN <= result <= INT64_MAX:
        raise OverflowError(f"{node.op} leaves 64 bits")
    return result


def shared(expr: Expr, first: int, most: int) -> tuple[list[Expr], Expr]:
    """(locals, expression) that together say the same, in fewer words: what stands in `expr` more than once becomes a
    local, at most `most` of them, numbered from `first`. Each may read those before it."""
    nodes: list[Expr] = []  # of equal ones the first, operands before what they are in
    found: dict[tuple[str, int, tuple[int, ...]], int] = {}
    numbers: dict[int, int] = {}  # by id: trees of shared objects are gone through once
    stack = [(expr, False)]
    while stack:
        node, is_ready = stack.pop()
        if id(node) in numbers:
            continue
        if not is_ready:
            stack += [(node, True), *((a, False) for a in node.args)]
            continue
        key = (node.op, node.operand, tuple(numbers[id(a)] for a in node.args))
        numbers[id(node)] = found.setdefault(key, len(nodes))
        if found[key] == len(nodes):
            nodes.append(node)
    uses = Counter(numbers[id(a)] for node in nodes for a in node.args)

    def words(among: Collection[int]) -> list[int]:
        """The number of words of each node, where those among these are locals."""
        lengths: list[int] = []
        for node in nodes:
            of = (numbers[id(a)] for a in node.args)
            lengths.append(1 + sum(1 if n in among else lengths[n] for n in of))
        return lengths

    is_often = {n for n, node in enumerate(nodes) if node.args and uses[n] > 1}
    # A local takes two words beside its own: what reads it, and where it is found.
    saved = {n: (uses[n] - 1) * length - uses[n] - 1 for n, length in enumerate(words(is_often)) if n in is_often}
    among = sorted(sorted((n for n in saved if saved[n] > 0), key=lambda n: -saved[n])[:most])
    at = {n: first + i for i, n in enumerate(among)}
    made: list[Expr] = []
    for node in nodes:
        of = (numbers[id(a)] for a in node.args)
        made.append(Expr(node.op, node.operand, tuple(local(at[n]) if n in at else made[n] for n in of)))
    return [made[n] for n in among], made[numbers[id(expr)]]


def evaluate_locals(exprs: Iterable[Expr], p: Problem) -> list[int]:
    """Each may read the ones before it."""
    values = list(p.locals)
    for e in exprs:
        values.append(e.evaluate(Problem(p.tensors, p.ints, p.mode, p.device, values)))
    return values
