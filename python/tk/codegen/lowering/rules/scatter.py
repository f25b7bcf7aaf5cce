"""Writes at indices that are themselves read.

Sums of floats are atomic, in fp32 or fp64, so that their last bits depend on the order of the programs; the
deterministic variant adds integers instead (:func:`_exact_sum`), and the rounded one has sums of 16-bit floats in their
own dtype. Extremes are of integers, ordered as the floats are.
Where one place is written twice, the deterministic variant keeps the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from tk.codegen import index as ix
from tk.codegen.errors import TraceError
from tk.codegen.ir import FLOATS, ROUNDED_SUMS, value_symbol
from tk.codegen.lowering.graph import Call, operand
from tk.codegen.lowering.lazy import Emitter, Index, Lazy, scatter
from tk.codegen.lowering.rules.indirect import torch_broadcast, wrapped
from tk.codegen.lowering.rules.table import base_name, normal_dim, rule

Place = Callable[[Emitter, Index], Index]
Keep = Callable[[Emitter, Index], int] | None


class NotDeterministic(TraceError):
    """Has no variant that is."""


@dataclass(frozen=True)
class Indexed:
    """The dimensions of a base that are indexed, as a tensor of their own.

    sizes: theirs. shape: of the indices. place: in these dimensions, for an index into the indices. first: the
    dimension of the source where those of the indices begin."""

    sizes: Index
    shape: Index
    place: Place
    first: int = 0

    @property
    def last(self) -> int:
        return self.first + len(self.shape)


def scattered(call: Call, kind: str, base: Lazy, source: Lazy, place: Place, keep: Keep = None,
              indexed: Indexed | None = None) -> Lazy:  # fmt: skip
    """`base` with `source` put into it. kind: "set", "add", "max" or "min". indexed: where every dimension of the
    source but those of the indices is one of the base; None where each element has an index of its own."""
    dtype = base.dtype
    if kind == "set":
        source = _as(source, dtype)
        if call.graph.deterministic:
            return _last(base, source, place, indexed or Indexed(base.shape, source.shape, place))
        return scatter("set", base, source, place, keep)
    if kind == "add" and dtype in FLOATS and call.graph.deterministic:
        return _exact_sum(base, source, place, keep)
    if kind == "add" and dtype != "i1":
        is_rounded = call.graph.rounded and dtype in ROUNDED_SUMS
        wide = dtype if dtype in ("fp64", "i64") or is_rounded else "fp32" if dtype in FLOATS else "i32"
        return _as(scatter("add", _as(base, wide), _as(source, wide), place, keep), dtype)
    kind = "max" if kind == "add" else kind
    wide = "i64" if dtype in ("fp64", "i64") else "i32"
    node = scatter(kind, _keys(base, wide, kind), _keys(_as(source, dtype), wide, kind), place, keep)
    return _of_keys(node, dtype)


def _as(x: Lazy, dtype: str) -> Lazy:
    return x if x.dtype == dtype else Lazy(x.shape, dtype, lambda e, i: e.cast(e.read(x, i), dtype))


def _filled(shape: Index, dtype: str, value: Any) -> Lazy:
    return Lazy(shape, dtype, lambda e, i: e.constant(value, dtype))


# --- Extremes: floats as integers of the same order ---

_BITS = {"fp32": 31, "fp64": 63}


def _keys(x: Lazy, wide: str, kind: str) -> Lazy:
    """NaN is the largest for a maximum and the smallest for a minimum, so that it stays."""
    if x.dtype not in FLOATS:
        return _as(x, wide)
    real = "fp64" if wide == "i64" else "fp32"
    mask = 2 ** _BITS[real] - 1

    def read(e: Emitter, index: Index) -> int:
        value = e.cast(e.read(x, index), real)
        bits = e.builder.add("bitcast", wide, value, data=real)
        turned = e.op("xor", wide, bits, e.constant(mask, wide))
        key = e.op("where", wide, e.op("lt", "i1", bits, e.constant(0, wide)), turned, bits)
        nan = e.constant(mask if kind == "max" else -mask - 1, wide)
        return e.op("where", wide, e.op("isnan", "i1", value), nan, key)

    return Lazy(x.shape, wide, read)


def _of_keys(x: Lazy, dtype: str) -> Lazy:
    if dtype not in FLOATS:
        return _as(x, dtype)
    real = "fp64" if x.dtype == "i64" else "fp32"

    def read(e: Emitter, index: Index) -> int:
        key = e.read(x, index)
        mask = e.constant(2 ** _BITS[real] - 1, x.dtype)
        is_negative = e.op("lt", "i1", key, e.constant(0, x.dtype))
        bits = e.op("where", x.dtype, is_negative, e.op("xor", x.dtype, key, mask), key)
        return e.cast(e.builder.add("bitcast", real, bits, data=x.dtype), dtype)

    return Lazy(x.shape, dtype, read)


# --- Without regard to order ---


def _last(base: Lazy, source: Lazy, place: Place, indexed: Indexed) -> Lazy:
    """Puts elements so that the last in the source stays of several for one place. The largest number of each place is
    found first, in scratch memory of which no more is written than is read. Then every element for a place writes what
    that one has."""

    def number(e: Emitter, index: Index) -> int:
        linear = sum((i * ix.product(indexed.shape[d + 1 :]) for d, i in enumerate(index)), sympy.Integer(0))
        return e.index(sympy.expand(linear))

    numbers = Lazy(indexed.shape, "i64", number)
    winners = scatter("max", _filled(indexed.sizes, "i64", -1), numbers, indexed.place, is_read_there=True)

    def read(e: Emitter, index: Index) -> int:
        left = e.read(winners, indexed.place(e, index[indexed.first : indexed.last]))
        own: list[sympy.Expr] = []
        for d, size in reversed(list(enumerate(indexed.shape))):
            own.append(value_symbol(left if d == 0 else e.op("fmod", "i64", left, e.index(size))))
            left = left if d == 0 else e.op("trunc_div", "i64", left, e.index(size))
        return e.read(source, (*index[: indexed.first], *reversed(own), *index[indexed.last :]))

    return scatter("same", base, Lazy(source.shape, base.dtype, read), place)


_INF = 0x7F800000  # fp32's
_NEGATIVE = 2**31  # counts of -inf, beside those of +inf


def _exact_sum(base: Lazy, source: Lazy, place: Place, keep: Keep) -> Lazy:
    """The largest magnitude of each place is found first. It sets the place's unit: so small that 62 bits hold the sum
    of as many elements as the source has. In that unit the elements are integers, whose sum knows no order. What is
    infinite or NaN is counted instead."""
    if base.dtype == "fp64":
        raise NotDeterministic("sums of fp64 at indices have no deterministic variant")
    wide = _as(source, "fp32")

    def magnitude(e: Emitter, index: Index) -> int:
        bits = e.builder.add("bitcast", "i32", e.read(wide, index), data="fp32")
        return e.op("and", "i32", bits, e.constant(0x7FFFFFFF, "i32"))

    largest = scatter("max", _filled(base.shape, "i32", 0), Lazy(source.shape, "i32", magnitude), place, keep)

    def exponent(e: Emitter, top: int) -> int:
        """The exponent of the unit's reciprocal, i64: 2^exponent times the largest is below 2^60 / the number of
        elements."""
        bound = e.op("shr", "i64", e.cast(top, "i64"), e.constant(23, "i64"))  # below 2^(bound - 126)
        bound = e.op("maximum", "i64", bound, e.constant(1, "i64"))
        count = e.op("maximum", "fp64", e.cast(e.index(ix.product(source.shape)), "fp64"), e.constant(1.0, "fp64"))
        digits = e.cast(e.op("ceil", "fp64", e.op("log2", "fp64", count)), "i64")
        room = e.op("sub", "i64", e.constant(60 + 126, "i64"), digits)
        return e.op("sub", "i64", room, bound)

    def power(e: Emitter, exponent: int) -> int:
        biased = e.op("add", "i64", exponent, e.constant(1023, "i64"))
        return e.builder.add("bitcast", "fp64", e.op("shl", "i64", biased, e.constant(52, "i64")), data="i64")

    def whole(e: Emitter, index: Index) -> int:
        top, value = e.read(largest, place(e, index)), e.read(wide, index)
        scaled = e.op("mul", "fp64", e.cast(value, "fp64"), power(e, exponent(e, top)))
        is_finite = e.op("lt", "i1", top, e.constant(_INF, "i32"))
        rounded = e.op("round", "fp64", e.op("where", "fp64", is_finite, scaled, e.constant(0.0, "fp64")))
        one, many, none = (e.constant(n, "i64") for n in (1, _NEGATIVE, 0))
        sign = e.op("where", "i64", e.op("lt", "i1", value, e.constant(0.0, "fp32")), many, one)
        counted = e.op("where", "i64", e.op("isinf", "i1", value), sign, none)
        return e.op("where", "i64", is_finite, e.cast(rounded, "i64"), counted)

    total = scatter("add", _filled(base.shape, "i64", 0), Lazy(source.shape, "i64", whole), place, keep)

    def read(e: Emitter, index: Index) -> int:
        top, sum_ = e.read(largest, index), e.read(total, index)
        negated = e.op("neg", "i64", exponent(e, top))
        finite = e.op("mul", "fp64", e.cast(sum_, "fp64"), power(e, negated))
        zero, inf, nan = (e.constant(x, "fp64") for x in (0.0, float("inf"), float("nan")))
        low = e.op("and", "i64", sum_, e.constant(_NEGATIVE - 1, "i64"))
        none = e.constant(0, "i64")
        up = e.op("where", "fp64", e.op("gt", "i1", low, none), inf, zero)
        high = e.op("shr", "i64", sum_, e.constant(31, "i64"))
        down = e.op("where", "fp64", e.op("gt", "i1", high, none), e.constant(-float("inf"), "fp64"), zero)
        infinite = e.op("add", "fp64", up, down)  # NaN of both
        is_nan = e.op("gt", "i1", top, e.constant(_INF, "i32"))
        other = e.op("where", "fp64", is_nan, nan, infinite)
        found = e.op("where", "fp64", e.op("lt", "i1", top, e.constant(_INF, "i32")), finite, other)
        return e.cast(e.op("add", "fp64", e.cast(e.read(base, index), "fp64"), found), base.dtype)

    return Lazy(base.shape, base.dtype, read)


# --- The ops ---


def _along(x: Lazy, dim: int, at: Lazy) -> Place:
    d = normal_dim(dim, len(x.shape))

    def place(e: Emitter, index: Index) -> Index:
        own = index if at.shape else ()
        row = wrapped(e, e.read(at, own), x.shape[d] if x.shape else sympy.Integer(1), False)
        return (*index[:d], row, *index[d + 1 :]) if x.shape else ()

    return place


def _source(call: Call, x: Lazy, at: Lazy, source: Any) -> Lazy:
    """The elements of a source that go with an index's; a number is one for all."""
    if isinstance(source, Lazy):
        return Lazy(at.shape, source.dtype, lambda e, i: e.read(source, i if source.shape else ()))
    return Lazy(at.shape, x.dtype, operand(source, at.shape, x.dtype))


_KINDS = {"sum": "add", "add": "add", "amax": "max", "amin": "min"}


@rule("aten.scatter", "aten.scatter_add")
def _scatter(call: Call, x: Any, dim: int, at: Any, source: Any = None, *, reduce: str | None = None,
             value: Any = None) -> Lazy:  # fmt: skip
    if reduce == "multiply":
        raise TraceError("scatter with reduce='multiply': there are no atomic products; there are sums (reduce='add')")
    kind = "add" if reduce == "add" or base_name(call) == "scatter_add" else "set"
    if call.graph.is_backward and _is_one_of_each_row(call, x, dim, at):
        return _put_back(x, normal_dim(dim, len(x.shape)), at, source)
    return scattered(call, kind, x, _source(call, x, at, value if source is None else source), _along(x, dim, at))


def _is_one_of_each_row(call: Call, x: Lazy, dim: int, at: Lazy) -> bool:
    """Whether the node is the gradient of a gather that takes one element of each row."""
    base = call.node.args[0]
    d = normal_dim(dim, len(x.shape))
    return (
        base_name(call) == "scatter_add"
        and isinstance(base, fx.Node)
        and base.target is torch.ops.aten.full.default
        and bool(base.args[1] == 0)
        and len(at.shape) == len(x.shape) > 0
        and all(size == (1 if i == d else x.shape[i]) for i, size in enumerate(at.shape))
    )


def _put_back(zeros: Lazy, d: int, at: Lazy, source: Lazy) -> Lazy:
    """Each element of the result asks whether it is the one: a row is written anyway, and nothing has to be added up in
    memory. The gather that this is the gradient of has held the index against the row's size."""

    def read(e: Emitter, index: Index) -> int:
        own = (*index[:d], sympy.Integer(0), *index[d + 1 :])
        is_here = e.op("eq", "i1", e.cast(e.read(at, own), "i64"), e.index(index[d]))
        return e.op("where", zeros.dtype, is_here, e.cast(e.read(source, own), zeros.dtype), e.read(zeros, index))

    return Lazy(zeros.shape, zeros.dtype, read)


@rule("aten.scatter_reduce")
def _scatter_reduce(call: Call, x: Any, dim: int, at: Any, source: Any, reduce: str, *,
                    include_self: bool = True) -> Lazy:  # fmt: skip
    if reduce not in (*_KINDS, "mean"):
        raise TraceError(
            f"scatter_reduce by {reduce!r}: there are no atomic products; there are {', '.join((*_KINDS, 'mean'))}"
        )
    place, values, dtype = _along(x, dim, at), _source(call, x, at, source), x.dtype
    kind = _KINDS.get(reduce, "add")
    counts = scatter("add", _filled(x.shape, "i32", int(include_self)), _filled(at.shape, "i32", 1), place)
    base = x if include_self else _filled(x.shape, dtype, _neutral(kind, dtype))
    found = scattered(call, kind, base, values, place)

    def read(e: Emitter, index: Index) -> int:
        value = e.read(found, index)
        if include_self and reduce != "mean":
            return value
        count = e.read(counts, index)
        if reduce == "mean":
            n = e.cast(e.op("maximum", "i32", count, e.constant(1, "i32")), dtype)
            value = e.op("div" if dtype in FLOATS else "floor_div", dtype, value, n)
        touched = e.op("gt", "i1", count, e.constant(0, "i32"))
        return e.op("where", dtype, touched, value, e.read(x, index))

    return Lazy(x.shape, dtype, read)


def _neutral(kind: str, dtype: str) -> Any:
    if kind == "add" or dtype == "i1":
        return kind == "min" if dtype == "i1" else 0
    if dtype in FLOATS:
        return float("-inf") if kind == "max" else float("inf")
    bits = {"u8": 8, "i8": 7, "i16": 15, "i32": 31, "i64": 63}[dtype]
    low = 0 if dtype == "u8" else -(2**bits)
    return low if kind == "max" else 2**bits - 1


@rule("aten.index_put", "aten._unsafe_index_put", "aten._index_put_impl")
def _index_put(call: Call, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, *_: Any) -> Lazy:
    given = [d for d, t in enumerate(indices) if t is not None]
    if any(indices[d].dtype in ("i1", "u8") for d in given):
        return _masked_put(call, x, [indices[d] for d in given], given, values, accumulate)
    shape = torch_broadcast([indices[d].shape for d in given])
    together = given == list(range(given[0], given[-1] + 1))
    first = given[0] if together else 0
    rest = [d for d in range(len(x.shape)) if d not in given]
    before = [d for d in rest if together and d < first]
    after = [d for d in rest if d not in before]
    full = (*(x.shape[d] for d in before), *shape, *(x.shape[d] for d in after))
    readers = {d: operand(indices[d], shape, "i64") for d in given}

    def chosen(e: Emitter, index: Index) -> Index:
        return tuple(wrapped(e, readers[d](e, index), x.shape[d], True) for d in given)

    def place(e: Emitter, index: Index) -> Index:
        behind = len(before) + len(shape)
        own = dict(zip((*before, *after), (*index[: len(before)], *index[behind:]), strict=True))
        own |= dict(zip(given, chosen(e, index[len(before) : behind]), strict=True))
        return tuple(own[d] for d in range(len(x.shape)))

    source = Lazy(full, x.dtype, operand(values, full, x.dtype))
    indexed = Indexed(tuple(x.shape[d] for d in given), tuple(shape), chosen, len(before))
    return scattered(call, "add" if accumulate else "set", x, source, place, indexed=indexed)


@rule("aten.index_add", "aten.index_copy")
def _index_add(call: Call, x: Any, dim: int, at: Any, source: Any, *, alpha: Any = 1) -> Lazy:
    """What stands at a place of `dim` in the source is put at the place that `at` has there."""
    kind = "add" if base_name(call) == "index_add" else "set"
    if not x.shape:  # one element, as of a dimension of size 1
        row = Lazy((sympy.Integer(1),), x.dtype, lambda e, i: e.read(x, ()))
        found = _index_add(call, row, 0, at, source, alpha=alpha)
        return Lazy((), x.dtype, lambda e, i: e.read(found, (sympy.Integer(0),)))
    d = normal_dim(dim, len(x.shape))
    shape = (*x.shape[:d], at.shape[0] if at.shape else sympy.Integer(1), *x.shape[d + 1 :])
    factor = operand(alpha, shape, x.dtype)

    def read(e: Emitter, index: Index) -> int:
        value = e.cast(e.read(source, index if source.shape else ()), x.dtype)
        return value if alpha == 1 else e.op("mul", x.dtype, value, factor(e, index))

    def chosen(e: Emitter, index: Index) -> Index:
        return (wrapped(e, e.read(at, index if at.shape else ()), x.shape[d], False),)

    def place(e: Emitter, index: Index) -> Index:
        return (*index[:d], *chosen(e, index[d : d + 1]), *index[d + 1 :])

    indexed = Indexed((x.shape[d],), shape[d : d + 1], chosen, d)
    return scattered(call, kind, x, Lazy(shape, x.dtype, read), place, indexed=indexed)


def _masked_put(call: Call, x: Lazy, masks: Sequence[Lazy], given: Sequence[int], values: Lazy,
                accumulate: bool) -> Lazy:  # fmt: skip
    """One value for all that a mask selects; several would be counted out by its contents."""
    if len(masks) > 1 or list(given) != [0] or any(s != 1 for s in values.shape[:1]) or len(values.shape) > 1:
        raise TraceError("several values put through a mask: which goes where depends on its contents; use torch.where")
    mask = masks[0]
    value = operand(values, (sympy.Integer(1),), x.dtype)

    def read(e: Emitter, index: Index) -> int:
        inside = e.cast(e.read(mask, index[: len(mask.shape)]), "i1")
        old, new = e.read(x, index), value(e, (sympy.Integer(0),))
        new = e.op("or" if x.dtype == "i1" else "add", x.dtype, old, new) if accumulate else new
        return e.op("where", x.dtype, inside, new, old)

    return Lazy(call.shape, x.dtype, read)


@rule("aten.embedding_dense_backward")
def _embedding_backward(call: Call, grad: Any, indices: Any, n: Any, padding_idx: Any, by_frequency: bool) -> Lazy:
    """Rows are added up in fp32."""
    if by_frequency:
        raise TraceError("embedding with scale_grad_by_freq=True has no gradient in a kernel: leave it out")
    padding = operand(padding_idx, (), "i64")

    def row(e: Emitter, index: Index) -> int:
        return e.cast(e.read(indices, index[:-1]), "i64")

    def place(e: Emitter, index: Index) -> Index:
        return (wrapped(e, row(e, index), call.shape[0], False), index[-1])

    def keep(e: Emitter, index: Index) -> int:
        return e.op("ne", "i1", row(e, index), padding(e, ()))

    return scattered(call, "add", _filled(call.shape, call.dtype, 0), grad, place, keep)
