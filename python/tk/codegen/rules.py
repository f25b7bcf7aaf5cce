"""A rule for every core op: how it is read at an index. What is not here is refused by name."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy

from tk.aot.spec import ITEMSIZE
from tk.codegen import index as ix
from tk.codegen.errors import TraceError
from tk.codegen.ir import COMPARE, FLOATS, INTS, TEST, value_symbol
from tk.codegen.lower import Call, Emitter, Index, Lazy, operand, reduction, scan

RULES: dict[str, Callable[..., Any]] = {}
Rule = Callable[..., Any]


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(fn: Rule) -> Rule:
        for name in names:
            RULES[name] = fn
        return fn

    return register


def elementwise(call: Call, dtype: str, args: Sequence[Any], make: Callable[..., int],
                read_as: str | None = None) -> Lazy:  # fmt: skip
    """`make(emitter, *values)` of the arguments, each read as `read_as` (by default `dtype`)."""
    readers = [operand(a, call.shape, read_as or dtype) for a in args]
    return Lazy(call.shape, dtype, lambda e, i: make(e, *(r(e, i) for r in readers)))


def _plain(name: str) -> Rule:
    return lambda call, *args, **_: elementwise(call, call.dtype, args, lambda e, *v: e.op(name, call.dtype, *v))


# --- Arithmetic. By the name of ours, those of torch's ---

_SAME = {
    "neg": ["neg"], "sqrt": ["sqrt"], "rsqrt": ["rsqrt"], "exp": ["exp"], "exp2": ["exp2"], "expm1": ["expm1"],
    "log": ["log"], "log2": ["log2"], "log10": ["log10"], "log1p": ["log1p"], "sin": ["sin"], "cos": ["cos"],
    "tan": ["tan"], "asin": ["asin"], "acos": ["acos"], "atan": ["atan"], "sinh": ["sinh"], "cosh": ["cosh"],
    "tanh": ["tanh"], "asinh": ["asinh"], "acosh": ["acosh"], "atanh": ["atanh"], "erf": ["erf", "special_erf"],
    "erfc": ["erfc"], "erfinv": ["erfinv"], "lgamma": ["lgamma"], "atan2": ["atan2"], "hypot": ["hypot"],
    "nextafter": ["nextafter"], "copysign": ["copysign"], "fmod": ["fmod"], "sigmoid": ["sigmoid"],
    "reciprocal": ["reciprocal"], "mul": ["mul"], "pow": ["pow"], "maximum": ["maximum", "fmax_nan"],
    "minimum": ["minimum"], "remainder": ["remainder"], "i0": ["i0"],
}  # fmt: skip
for _ours, _torchs in _SAME.items():
    for _name in _torchs:
        for _namespace in ("aten", "prims"):
            RULES[f"{_namespace}.{_name}"] = _plain(_ours)
for _name in ("erfcx", "bessel_j0", "bessel_j1", "ndtri"):
    RULES[f"aten.special_{_name}"] = RULES[f"prims.{_name}"] = _plain(_name)


@rule("aten.mul", "prims.mul")
def _mul(call: Call, a: Any, b: Any) -> Lazy:
    name = "and" if call.dtype == "i1" else "mul"
    return elementwise(call, call.dtype, (a, b), lambda e, *v: e.op(name, call.dtype, *v))


@rule("aten.add", "aten.sub", "prims.add", "prims.sub")
def _add(call: Call, a: Any, b: Any, alpha: Any = 1) -> Lazy:
    name = "sub" if call.node.target.__name__.startswith("sub") else "add"  # type: ignore[union-attr]
    dtype = call.dtype

    def make(e: Emitter, x: int, y: int) -> int:
        if alpha != 1:
            y = e.op("mul", dtype, y, operand(alpha, (), dtype)(e, ()))
        return e.op("or" if dtype == "i1" else name, dtype, x, y)

    return elementwise(call, dtype, (a, b), make)


@rule("aten.div", "aten.true_divide", "prims.div")
def _div(call: Call, a: Any, b: Any, rounding_mode: str | None = None) -> Lazy:
    name = {None: "div", "trunc": "trunc_div", "floor": "floor_div"}[rounding_mode]
    if call.dtype not in FLOATS and name == "div":  # prims.div of integers
        name = "trunc_div"
    return elementwise(call, call.dtype, (a, b), lambda e, *v: e.op(name, call.dtype, *v))


@rule("aten.floor_divide")
def _floor_divide(call: Call, a: Any, b: Any) -> Lazy:
    return elementwise(call, call.dtype, (a, b), lambda e, *v: e.op("floor_div", call.dtype, *v))


@rule("aten.abs", "prims.abs", "aten.sign", "aten.sgn", "prims.sign", "aten.floor", "aten.ceil", "aten.trunc",
      "aten.fix", "prims.floor", "prims.ceil", "prims.trunc")  # fmt: skip
def _maybe_identity(call: Call, x: Any) -> Lazy:
    """Integers have no fraction; bools no sign."""
    name = {"fix": "trunc", "sgn": "sign"}.get(found := _base_name(call), found)
    is_same = call.dtype == "i1" or (call.dtype in INTS and name not in ("abs", "sign"))
    is_same = is_same or (call.dtype == "u8" and name == "abs")
    return elementwise(call, call.dtype, (x,), lambda e, v: v if is_same else e.op(name, call.dtype, v))


def _base_name(call: Call) -> str:
    return str(call.node.target._schema.name.split("::")[1])  # type: ignore[union-attr]


@rule("aten.round", "prims.round")
def _round(call: Call, x: Any, decimals: int = 0) -> Lazy:
    dtype = call.dtype

    def make(e: Emitter, v: int) -> int:
        if dtype in INTS:
            return v
        if decimals == 0:
            return e.op("round", dtype, v)
        scale = e.constant(10.0 ** abs(decimals), dtype)
        up, down = ("mul", "div") if decimals > 0 else ("div", "mul")
        return e.op(down, dtype, e.op("round", dtype, e.op(up, dtype, v, scale)), scale)

    return elementwise(call, dtype, (x,), make)


@rule("aten.relu")
def _relu(call: Call, x: Any) -> Lazy:
    return elementwise(call, call.dtype, (x,), lambda e, v: e.op("maximum", call.dtype, v, e.constant(0, call.dtype)))


@rule("aten.clamp", "aten.clamp_min", "aten.clamp_max")
def _clamp(call: Call, x: Any, low: Any = None, high: Any = None, **bounds: Any) -> Lazy:
    low, high = bounds.get("min", low), bounds.get("max", high)
    if _base_name(call) == "clamp_max":
        low, high = None, low if high is None else high
    given = [("maximum", low)] * (low is not None) + [("minimum", high)] * (high is not None)

    def make(e: Emitter, v: int, *limits: int) -> int:
        for (name, _), limit in zip(given, limits, strict=True):
            v = e.op(name, call.dtype, v, limit)
        return v

    return elementwise(call, call.dtype, (x, *(b for _, b in given)), make)


@rule("aten.fmax", "aten.fmin", "prims.fmax", "prims.fmin")
def _ignoring_nan(call: Call, a: Any, b: Any) -> Lazy:
    name = "maximum" if _base_name(call) == "fmax" else "minimum"

    def make(e: Emitter, x: int, y: int) -> int:
        both = e.op(name, call.dtype, x, y)
        if call.dtype not in FLOATS:
            return both
        without_x = e.op("where", call.dtype, e.op("isnan", "i1", x), y, both)
        return e.op("where", call.dtype, e.op("isnan", "i1", y), x, without_x)

    return elementwise(call, call.dtype, (a, b), make)


@rule("aten.frexp")
def _refuse_frexp(call: Call, x: Any) -> Any:
    raise TraceError("aten.frexp cannot be generated yet")


@rule("aten.pow")
def _pow(call: Call, x: Any, exponent: Any) -> Lazy:
    """The powers that ATen writes out itself differ from a general one at infinities."""
    dtype = call.dtype

    def make(e: Emitter, v: int) -> int:
        if exponent == 0.5:
            return e.op("sqrt", dtype, v)
        if exponent == -0.5:
            return e.op("rsqrt", dtype, v)
        square = e.op("mul", dtype, v, v)
        if exponent == 2:
            return square
        if exponent == 3:
            return e.op("mul", dtype, square, v)
        return e.op("reciprocal", dtype, v if exponent == -1 else square)

    is_integer = dtype in INTS
    if not isinstance(exponent, Lazy) and exponent in ((2, 3) if is_integer else (0.5, -0.5, 2, 3, -1, -2)):
        return elementwise(call, dtype, (x,), make)
    return elementwise(call, dtype, (x, exponent), lambda e, *v: e.op("pow", dtype, *v))


# --- Comparisons, logic, bits ---


def _compare(name: str) -> Rule:
    def lowered(call: Call, a: Any, b: Any) -> Lazy:
        dtype = call.promoted(*call.node.args)
        return elementwise(call, "i1", (a, b), lambda e, *v: e.op(name, "i1", *v), read_as=dtype)

    return lowered


for _name in COMPARE:
    RULES[f"aten.{_name}"] = RULES[f"prims.{_name}"] = _compare(_name)


def _test(name: str) -> Rule:
    def lowered(call: Call, x: Lazy) -> Lazy:
        def make(e: Emitter, v: int) -> int:
            if x.dtype in FLOATS:
                return e.op(name, "i1", v)
            zero = e.constant(0, x.dtype)
            return e.op("lt", "i1", v, zero) if name == "signbit" and x.dtype != "i1" else e.constant(False, "i1")

        return elementwise(call, "i1", (x,), make, read_as=x.dtype)

    return lowered


for _name in TEST:
    RULES[f"aten.{_name}"] = RULES[f"prims.{_name}"] = _test(_name)


def _logical(name: str) -> Rule:
    return lambda call, *args: elementwise(call, "i1", args, lambda e, *v: e.op(name, "i1", *v))


RULES["aten.logical_and"], RULES["aten.logical_or"] = _logical("and"), _logical("or")
RULES["aten.logical_xor"], RULES["aten.logical_not"] = _logical("xor"), _logical("not")


def _bitwise(name: str) -> Rule:
    return lambda call, a, b: elementwise(call, call.dtype, (a, b), lambda e, *v: e.op(name, call.dtype, *v))


for _name, _ours in (("and", "and"), ("or", "or"), ("xor", "xor"), ("left_shift", "shl"), ("right_shift", "shr")):
    RULES[f"aten.bitwise_{_name}"] = RULES[f"prims.bitwise_{_name}"] = _bitwise(_ours)
RULES["aten.__lshift__"] = RULES["prims.shift_left"] = _bitwise("shl")
RULES["aten.__rshift__"] = RULES["prims.shift_right_arithmetic"] = _bitwise("shr")


@rule("aten.bitwise_not", "prims.bitwise_not")
def _bitwise_not(call: Call, x: Any) -> Lazy:
    name = "not" if call.dtype == "i1" else "bitwise_not"
    return elementwise(call, call.dtype, (x,), lambda e, v: e.op(name, call.dtype, v))


@rule("aten.where", "prims.where")
def _where(call: Call, condition: Any, a: Any, b: Any) -> Lazy:
    cond, yes, no = (
        operand(condition, call.shape, "i1"),
        operand(a, call.shape, call.dtype),
        operand(b, call.shape, call.dtype),
    )
    return Lazy(call.shape, call.dtype, lambda e, i: e.op("where", call.dtype, cond(e, i), yes(e, i), no(e, i)))


@rule("aten.masked_fill")
def _masked_fill(call: Call, x: Any, mask: Any, value: Any) -> Lazy:
    return _where(call, mask, value, x)


# --- Conversions and copies ---


@rule("aten._to_copy", "prims.convert_element_type")
def _cast(call: Call, x: Any, dtype: Any = None, **_: Any) -> Lazy:
    target, rounding = call.dtype, call.is_cast or call.dtype.startswith("fp8")
    read = operand(x, call.shape, x.dtype)
    return Lazy(call.shape, target, lambda e, i: e.cast(read(e, i), target, rounding))


@rule("aten.clone", "aten.alias", "aten.detach", "aten.lift_fresh_copy", "aten.contiguous", "prims.clone",
      "prims.view_of", "aten.copy", "aten.positive", "prims.copy_strided", "aten.lift_fresh")  # fmt: skip
def _same(call: Call, x: Any, source: Any = None, *_: Any, **__: Any) -> Lazy:
    read = operand(x if source is None else source, call.shape, call.dtype)
    return Lazy(call.shape, call.dtype, read)


# --- Views: index arithmetic ---


def _dim(d: int, rank: int) -> int:
    return d + rank if d < 0 else d


@rule("aten.view", "aten._unsafe_view", "aten.reshape", "prims.reshape", "prims.collapse_view", "aten._reshape_alias")
def _view(call: Call, x: Any, *_: Any) -> Lazy:
    if call.val.dtype != call.node.args[0].meta["val"].dtype:  # type: ignore[union-attr]
        return _bitcast(call, x)
    return Lazy(call.shape, x.dtype, lambda e, i: e.read(x, ix.reshape(i, call.shape, x.shape, e.ranges)))


def _bitcast(call: Call, x: Lazy) -> Lazy:
    if ITEMSIZE[x.dtype] != ITEMSIZE[call.dtype] or "i1" in (x.dtype, call.dtype):
        raise TraceError(f"a view of {x.dtype} as {call.dtype}: only dtypes of one size can be viewed as each other")
    return Lazy(call.shape, call.dtype, lambda e, i: e.builder.add("bitcast", call.dtype, e.read(x, i), data=x.dtype))


@rule("aten.expand", "prims.broadcast_in_dim")
def _expand(call: Call, x: Any, shape: Any, dims: Sequence[int] | None = None, **_: Any) -> Lazy:
    if isinstance(dims, bool) or dims is None:
        return Lazy(call.shape, x.dtype, operand(x, call.shape, x.dtype))
    at = list(dims)
    return Lazy(
        call.shape,
        x.dtype,
        lambda e, i: e.read(x, tuple(sympy.Integer(0) if s == 1 else i[d] for d, s in zip(at, x.shape, strict=True))),
    )


@rule("aten.permute", "prims.transpose")
def _permute(call: Call, x: Any, dims: Sequence[int]) -> Lazy:
    inverse = [0] * len(dims)
    for position, d in enumerate(dims):
        inverse[_dim(d, len(dims))] = position
    return Lazy(call.shape, x.dtype, lambda e, i: e.read(x, tuple(i[p] for p in inverse)))


@rule("aten.transpose")
def _transpose(call: Call, x: Any, a: int, b: int) -> Lazy:
    order = list(range(len(x.shape)))
    if order:
        a, b = _dim(a, len(order)), _dim(b, len(order))
        order[a], order[b] = order[b], order[a]
    return _permute(call, x, order)


@rule("aten.t")
def _t(call: Call, x: Any) -> Lazy:
    return _permute(call, x, list(reversed(range(len(x.shape)))))


@rule("aten.squeeze", "prims.squeeze", "aten.unsqueeze")
def _squeeze(call: Call, x: Any, *_: Any) -> Lazy:
    if _base_name(call) == "unsqueeze":
        at = _dim(int(call.node.args[1]), len(call.shape))  # type: ignore[arg-type]
        return Lazy(call.shape, x.dtype, lambda e, i: e.read(x, (*i[:at], *i[at + 1 :])))
    return Lazy(call.shape, x.dtype, lambda e, i: e.read(x, ix.reshape(i, call.shape, x.shape, e.ranges)))


@rule("aten.select")
def _select(call: Call, x: Any, dim: int, at: Any) -> Lazy:
    d = _dim(dim, len(x.shape))
    at = call.size(at)
    at = at + x.shape[d] if at.is_negative else at
    return Lazy(call.shape, x.dtype, lambda e, i: e.read(x, (*i[:d], at, *i[d:])))


@rule("aten.slice")
def _slice(call: Call, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Lazy:
    d = _dim(dim, len(x.shape))
    start = call.size(0 if start is None else start)
    start = start + x.shape[d] if start.is_negative else start
    return Lazy(call.shape, x.dtype, lambda e, i: e.read(x, (*i[:d], i[d] * step + start, *i[d + 1 :])))


@rule("aten.split", "aten.split_with_sizes", "aten.unbind")
def _split(call: Call, x: Any, sizes: Any = None, dim: int = 0) -> list[Lazy]:
    if _base_name(call) == "unbind":
        d = _dim(0 if sizes is None else sizes, len(x.shape))
        return [_part(x, tuple(s for j, s in enumerate(x.shape) if j != d), d, sympy.Integer(n), True)
                for n in range(len(call.val))]  # fmt: skip
    d, offset, parts = _dim(dim, len(x.shape)), sympy.Integer(0), []
    for val in call.val:
        shape = call.graph.shape(val)
        parts.append(_part(x, shape, d, offset, False))
        offset = offset + shape[d]
    return parts


def _part(x: Lazy, shape: Index, d: int, offset: sympy.Expr, is_single: bool) -> Lazy:
    if is_single:
        return Lazy(shape, x.dtype, lambda e, i: e.read(x, (*i[:d], offset, *i[d:])))
    return Lazy(shape, x.dtype, lambda e, i: e.read(x, (*i[:d], i[d] + offset, *i[d + 1 :])))


@rule("operator.getitem")
def _getitem(call: Call, x: Any, at: int) -> Any:
    return x[at]


@rule("aten.flip", "prims.rev")
def _flip(call: Call, x: Any, dims: Sequence[int]) -> Lazy:
    at = {_dim(d, len(x.shape)) for d in dims}
    return Lazy(
        call.shape,
        x.dtype,
        lambda e, i: e.read(
            x, tuple(x.shape[d] - 1 - v if d in at and x.shape[d] != 1 else v for d, v in enumerate(i))
        ),
    )


@rule("aten.diagonal")
def _diagonal(call: Call, x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Lazy:
    a, b = _dim(dim1, len(x.shape)), _dim(dim2, len(x.shape))

    def read(e: Emitter, index: Index) -> int:
        rest, last = iter(index[:-1]), index[-1]
        at = {a: last + max(-offset, 0), b: last + max(offset, 0)}
        return e.read(x, tuple(at[d] if d in at else next(rest) for d in range(len(x.shape))))

    return Lazy(call.shape, x.dtype, read)


@rule("aten.cat", "prims.cat")
def _cat(call: Call, tensors: Sequence[Lazy], dim: int = 0) -> Lazy:
    d = _dim(dim, len(call.shape))
    parts = [t for t in tensors if len(t.shape) == len(call.shape)]  # ATen passes over empty 1-D ones

    def read(e: Emitter, index: Index) -> int:
        return _piece(e, index, list(parts), sympy.Integer(0))

    def _piece(e: Emitter, index: Index, left: list[Lazy], offset: sympy.Expr) -> int:
        first, end = left[0], offset + left[0].shape[d]
        own = (*index[:d], sympy.expand(index[d] - offset), *index[d + 1 :])
        if len(left) == 1:
            return e.cast(e.read(first, own), call.dtype)
        inside = e.op("lt", "i1", e.index(index[d]), e.index(end))
        with e.where(inside):
            value = e.cast(e.read(first, own), call.dtype)
        with e.where(e.op("not", "i1", inside)):
            other = _piece(e, index, left[1:], end)
        return e.op("where", call.dtype, inside, value, other)

    return Lazy(call.shape, call.dtype, read)


@rule("aten.slice_scatter", "aten.select_scatter")
def _scatter_slice(call: Call, x: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None,
                   step: int = 1) -> Lazy:  # fmt: skip
    d = _dim(dim, len(x.shape))
    size = x.shape[d]
    first = call.size(0 if start is None else start)
    first = first + size if first.is_negative else first
    is_select = _base_name(call) == "select_scatter"
    length = sympy.Integer(1) if is_select else source.shape[d]

    def read(e: Emitter, index: Index) -> int:
        away = sympy.expand(index[d] - first)
        place = e.index(away)
        inside = e.op("ge", "i1", place, e.constant(0, "i64"))
        inside = e.op("and", "i1", inside, e.op("lt", "i1", place, e.index(length * step)))
        if step != 1:
            rest = e.op("fmod", "i64", place, e.constant(step, "i64"))
            inside = e.op("and", "i1", inside, e.op("eq", "i1", rest, e.constant(0, "i64")))
        # A multiple of the step, so dividing is exact; but it is no expression of axes that a class of shapes knows.
        at = away if step == 1 else value_symbol(e.op("trunc_div", "i64", place, e.constant(step, "i64")))
        own = (*index[:d], *([] if is_select else [at]), *index[d + 1 :])
        with e.where(inside):
            new = e.cast(e.read(source, own), call.dtype)
        return e.op("where", call.dtype, inside, new, e.cast(e.read(x, index), call.dtype))

    return Lazy(call.shape, call.dtype, read)


# --- Tensors out of nothing ---


@rule("aten.full", "aten.full_like", "aten.scalar_tensor", "prims.full", "prims.full_like", "aten.new_full")
def _full(call: Call, *args: Any, **kwargs: Any) -> Lazy:
    value = kwargs.get("fill_value", args[0] if _base_name(call) == "scalar_tensor" else args[-1])
    if _base_name(call) in ("full", "full_like", "new_full") and "fill_value" not in kwargs:
        value = args[2] if _base_name(call) == "new_full" else args[1]
    return Lazy(call.shape, call.dtype, operand(value, (), call.dtype))


@rule("aten.fill")
def _fill(call: Call, x: Any, value: Any) -> Lazy:
    return Lazy(call.shape, call.dtype, operand(value, call.shape, call.dtype))


def _filled(value: int) -> Rule:
    return lambda call, *_, **__: Lazy(call.shape, call.dtype, lambda e, i: e.constant(value, call.dtype))


for _name in (
    "zeros",
    "zeros_like",
    "new_zeros",
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "empty_permuted",
):
    RULES[f"aten.{_name}"] = _filled(0)
for _name in ("ones", "ones_like", "new_ones"):
    RULES[f"aten.{_name}"] = _filled(1)
RULES["prims.empty_strided"] = _filled(0)


@rule("prims.iota")
def _iota(call: Call, length: Any, *, start: Any, step: Any, **_: Any) -> Lazy:
    first, by = call.size(start), call.size(step)
    return Lazy(call.shape, call.dtype, lambda e, i: e.cast(e.index(first + by * i[0]), call.dtype))


@rule("aten.arange")
def _arange(call: Call, *args: Any, **_: Any) -> Lazy:
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else 1)

    def read(e: Emitter, index: Index) -> int:
        if call.dtype in FLOATS:
            at = e.cast(e.index(index[0]), "fp64")
            by = e.op("mul", "fp64", at, operand(step, (), "fp64")(e, ()))
            return e.cast(e.op("add", "fp64", by, operand(start, (), "fp64")(e, ())), call.dtype)
        return e.cast(e.index(call.size(start) + call.size(step) * index[0]), call.dtype)

    return Lazy(call.shape, call.dtype, read)


# --- Reductions ---


def _dims(x: Lazy, dims: Any) -> tuple[int, ...]:
    rank = len(x.shape)
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return tuple(range(rank))
    return tuple(sorted({_dim(d, rank) for d in ([dims] if isinstance(dims, int) else dims)}))


def _reduce(kind: str, x: Lazy, dims: Any, keepdim: bool, dtype: str, accumulate: str) -> Lazy:
    """Reduce what is read as `accumulate`, and give it as `dtype`. With nothing to reduce the element is the result."""
    at = _dims(x, dims)
    wide = Lazy(x.shape, accumulate, lambda e, i: e.cast(e.read(x, i), accumulate))
    if all(x.shape[d] == 1 for d in at):
        result: Lazy = Lazy(
            tuple(s for d, s in enumerate(x.shape) if d not in at),
            accumulate,
            lambda e, i: e.read(wide, _with_ones(i, at, len(x.shape))),
        )
    else:
        result = reduction(kind, wide, at, accumulate)
    kept = tuple(sympy.Integer(1) if d in at else s for d, s in enumerate(x.shape)) if keepdim else result.shape

    def read(e: Emitter, index: Index) -> int:
        own = tuple(v for d, v in enumerate(index) if d not in at) if keepdim else index
        return e.cast(e.read(result, own), dtype)

    return Lazy(kept, dtype, read)


def _with_ones(index: Index, at: Sequence[int], rank: int) -> Index:
    rest = iter(index)
    return tuple(sympy.Integer(0) if d in at else next(rest) for d in range(rank))


def _wide(dtype: str) -> str:
    """What sums are accumulated in."""
    return dtype if dtype == "fp64" else "fp32" if dtype in FLOATS else "i64"


@rule("aten.sum", "prims.sum")
def _sum(call: Call, x: Any, dims: Any = None, keepdim: bool = False, *, dtype: Any = None, **_: Any) -> Lazy:
    return _reduce("sum", x, dims, bool(keepdim), call.dtype, _wide(call.dtype))


@rule("aten.prod", "prims.prod")
def _prod(call: Call, x: Any, dims: Any = None, keepdim: bool = False, *, dtype: Any = None, **_: Any) -> Lazy:
    return _reduce("prod", x, dims, bool(keepdim), call.dtype, _wide(call.dtype))


@rule("aten.mean")
def _mean(call: Call, x: Any, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Lazy:
    wide = _wide(call.dtype)
    total = _reduce("sum", x, dims, bool(keepdim), wide, wide)
    count = ix.product([x.shape[d] for d in _dims(x, dims)])

    def read(e: Emitter, index: Index) -> int:
        return e.cast(e.op("div", wide, e.read(total, index), e.cast(e.index(count), wide)), call.dtype)

    return Lazy(total.shape, call.dtype, read)


@rule("aten.amax", "aten.amin", "prims.amax", "prims.amin")
def _extreme(call: Call, x: Any, dims: Any = None, keepdim: bool = False) -> Lazy:
    kind = "max" if _base_name(call) == "amax" else "min"
    if x.dtype == "i1":
        kind = "any" if kind == "max" else "all"
    return _reduce(kind, x, dims, bool(keepdim), x.dtype, "fp32" if x.dtype in ("bf16", "fp16") else x.dtype)


@rule("aten.max", "aten.min")
def _max(call: Call, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    if isinstance(dim, Lazy):
        return RULES[f"aten.{_base_name(call)}imum"](call, x, dim)
    kind = _base_name(call)
    wide = "fp32" if x.dtype in ("bf16", "fp16") else "i32" if x.dtype == "i1" else x.dtype
    value = _reduce(kind, x, dim, keepdim, x.dtype, wide)
    if dim is None:
        return value
    return [value, _position(f"arg{kind}", x, dim, keepdim)]


def _position(kind: str, x: Lazy, dim: Any, keepdim: bool) -> Lazy:
    at = _dims(x, dim)
    if all(x.shape[d] == 1 for d in at):
        shape = tuple(sympy.Integer(1) if d in at else s for d, s in enumerate(x.shape) if keepdim or d not in at)
        return Lazy(shape, "i64", lambda e, i: e.constant(0, "i64"))
    wide = "fp32" if x.dtype in ("bf16", "fp16") else "i32" if x.dtype == "i1" else x.dtype
    read_wide = Lazy(x.shape, wide, lambda e, i: e.cast(e.read(x, i), wide))
    result = reduction(kind, read_wide, at, "i64")
    if not keepdim:
        return result
    kept = tuple(sympy.Integer(1) if d in at else s for d, s in enumerate(x.shape))
    return Lazy(kept, "i64", lambda e, i: e.read(result, tuple(v for d, v in enumerate(i) if d not in at)))


@rule("aten.argmax", "aten.argmin")
def _arg(call: Call, x: Any, dim: Any = None, keepdim: bool = False) -> Lazy:
    return _position(_base_name(call), x, dim, keepdim)


@rule("aten.any", "aten.all", "prims.xor_sum")
def _any(call: Call, x: Any, dim: Any = None, keepdim: bool = False) -> Lazy:
    kind = {"xor_sum": "xor"}.get(name := _base_name(call), name)
    inner = x.dtype if kind == "xor" else "i1"
    return _reduce(kind, x, dim, keepdim, call.dtype, inner)


def _variance(call: Call, x: Any, dims: Any, correction: Any, keepdim: bool) -> tuple[Lazy, Lazy]:
    wide = _wide(x.dtype)
    mean = _reduce("mean", x, dims, keepdim, wide, wide)
    squares = _reduce("m2", x, dims, keepdim, wide, wide)
    count = ix.product([x.shape[d] for d in _dims(x, dims)])
    if all(x.shape[d] == 1 for d in _dims(x, dims)):  # a single element deviates by nothing
        squares = Lazy(mean.shape, wide, lambda e, i: e.op("sub", wide, e.read(mean, i), e.read(mean, i)))
    by = 1.0 if correction is None else float(correction)

    def read(e: Emitter, index: Index) -> int:
        n = e.op("sub", wide, e.cast(e.index(count), wide), e.constant(by, wide))
        n = e.op("maximum", wide, n, e.constant(0, wide))
        return e.cast(e.op("div", wide, e.read(squares, index), n), x.dtype)

    dtype = x.dtype
    as_mean = Lazy(mean.shape, dtype, lambda e, i: e.cast(e.read(mean, i), dtype))
    return Lazy(mean.shape, dtype, read), as_mean


@rule("aten.var")
def _var(call: Call, x: Any, dims: Any = None, correction: Any = None, keepdim: bool = False) -> Lazy:
    return _variance(call, x, dims, correction, keepdim)[0]


@rule("aten.var_mean")
def _var_mean(call: Call, x: Any, dims: Any = None, correction: Any = None, keepdim: bool = False) -> tuple[Lazy, Lazy]:
    return _variance(call, x, dims, correction, keepdim)


# --- Scans ---


@rule("aten.cumsum", "aten.cumprod")
def _cumulative(call: Call, x: Any, dim: int, *, dtype: Any = None) -> Lazy:
    wide = _wide(call.dtype)
    operand_ = Lazy(x.shape, wide, lambda e, i: e.cast(e.read(x, i), wide))
    if not x.shape or x.shape[_dim(dim, len(x.shape))] == 1:
        result: Lazy = operand_
    else:
        result = scan(_base_name(call).removeprefix("cum"), operand_, _dim(dim, len(x.shape)))
    return Lazy(call.shape, call.dtype, lambda e, i: e.cast(e.read(result, i), call.dtype))


# --- Indirect reads ---


def _wrapped(e: Emitter, value: int, size: sympy.Expr, may_be_negative: bool) -> sympy.Expr:
    """The index that a value read from memory stands for."""
    value = e.cast(value, "i64")
    if may_be_negative:
        from_end = e.op("add", "i64", value, e.index(size))
        value = e.op("where", "i64", e.op("lt", "i1", value, e.constant(0, "i64")), from_end, value)
    return value_symbol(value)


@rule("aten.embedding")
def _embedding(call: Call, weight: Any, indices: Any, *_: Any, **__: Any) -> Lazy:
    def read(e: Emitter, index: Index) -> int:
        row = _wrapped(e, e.read(indices, index[:-1]), weight.shape[0], False)
        return e.read(weight, (row, index[-1]))

    return Lazy(call.shape, weight.dtype, read)


@rule("aten.gather")
def _gather(call: Call, x: Any, dim: int, at: Any, **_: Any) -> Lazy:
    d = _dim(dim, len(x.shape))

    def read(e: Emitter, index: Index) -> int:
        row = _wrapped(e, e.read(at, index), x.shape[d], False)
        return e.read(x, (*index[:d], row, *index[d + 1 :]))

    return Lazy(call.shape, x.dtype, read)


@rule("aten.index_select")
def _index_select(call: Call, x: Any, dim: int, at: Any) -> Lazy:
    d = _dim(dim, len(x.shape))

    def read(e: Emitter, index: Index) -> int:
        row = _wrapped(e, e.read(at, (index[d],) if at.shape else ()), x.shape[d], False)
        return e.read(x, (*index[:d], row, *index[d + 1 :]))

    return Lazy(call.shape, x.dtype, read)


@rule("aten.index", "aten._unsafe_index")
def _index(call: Call, x: Any, indices: Sequence[Any]) -> Lazy:
    given = [d for d, t in enumerate(indices) if t is not None]
    if any(indices[d].dtype in ("i1", "u8") for d in given):
        raise TraceError("indexing with a mask has a size that depends on its contents; use torch.where")
    rank = max(len(indices[d].shape) for d in given)
    shape = torch_broadcast([indices[d].shape for d in given])
    together = given == list(range(given[0], given[-1] + 1))
    at = given[0] if together else 0
    readers = {d: operand(indices[d], shape, "i64") for d in given}

    def read(e: Emitter, index: Index) -> int:
        chosen = index[at : at + rank]
        rest = iter((*index[:at], *index[at + rank :]))
        own = [
            _wrapped(e, readers[d](e, chosen), x.shape[d], True) if d in readers else next(rest)
            for d in range(len(x.shape))
        ]
        return e.read(x, tuple(own))

    return Lazy(call.shape, x.dtype, read)


def torch_broadcast(shapes: Sequence[Index]) -> Index:
    rank = max(map(len, shapes))
    padded = [(sympy.Integer(1),) * (rank - len(s)) + tuple(s) for s in shapes]
    return tuple(next((s for s in column if s != 1), sympy.Integer(1)) for column in zip(*padded, strict=True))


RULES[f"{operator.getitem.__module__.lstrip('_')}.getitem"] = _getitem
