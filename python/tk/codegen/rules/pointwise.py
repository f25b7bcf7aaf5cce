"""Arithmetic, comparisons, logic, bits and conversions."""

from __future__ import annotations

from typing import Any

from tk.codegen.errors import TraceError
from tk.codegen.ir import COMPARE, FLOATS, INTS, TEST
from tk.codegen.lower import Call, Emitter, Lazy, operand
from tk.codegen.rules.table import RULES, Rule, base_name, elementwise, plain, rule

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
            RULES[f"{_namespace}.{_name}"] = plain(_ours)
for _name in ("erfcx", "bessel_j0", "bessel_j1", "ndtri"):
    RULES[f"aten.special_{_name}"] = RULES[f"prims.{_name}"] = plain(_name)


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
    name = {"fix": "trunc", "sgn": "sign"}.get(found := base_name(call), found)
    is_same = call.dtype == "i1" or (call.dtype in INTS and name not in ("abs", "sign"))
    is_same = is_same or (call.dtype == "u8" and name == "abs")
    return elementwise(call, call.dtype, (x,), lambda e, v: v if is_same else e.op(name, call.dtype, v))


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
    if base_name(call) == "clamp_max":
        low, high = None, low if high is None else high
    given = [("maximum", low)] * (low is not None) + [("minimum", high)] * (high is not None)

    def make(e: Emitter, v: int, *limits: int) -> int:
        for (name, _), limit in zip(given, limits, strict=True):
            v = e.op(name, call.dtype, v, limit)
        return v

    return elementwise(call, call.dtype, (x, *(b for _, b in given)), make)


@rule("aten.fmax", "aten.fmin", "prims.fmax", "prims.fmin")
def _ignoring_nan(call: Call, a: Any, b: Any) -> Lazy:
    name = "maximum" if base_name(call) == "fmax" else "minimum"

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
