"""Arithmetic, comparisons, logic, bits and conversions."""

from __future__ import annotations

from typing import Any

from tk.aot.spec import REDUCED_FLOATS
from tk.codegen.ir import COMPARE, FLOATS, INTS, TEST
from tk.codegen.lowering.graph import Call, Rule, operand
from tk.codegen.lowering.lazy import Emitter, Index, Lazy
from tk.codegen.lowering.rules.table import RULES, base_name, elementwise, plain, rule

_SAME = {
    "neg": ["neg"], "sqrt": ["sqrt"], "rsqrt": ["rsqrt"], "exp": ["exp"], "exp2": ["exp2"], "expm1": ["expm1"],
    "log": ["log"], "log2": ["log2"], "log10": ["log10"], "log1p": ["log1p"], "sin": ["sin"], "cos": ["cos"],
    "tan": ["tan"], "asin": ["asin"], "acos": ["acos"], "atan": ["atan"], "sinh": ["sinh"], "cosh": ["cosh"],
    "tanh": ["tanh"], "asinh": ["asinh"], "acosh": ["acosh"], "atanh": ["atanh"], "erf": ["erf", "special_erf"],
    "erfc": ["erfc"], "erfinv": ["erfinv"], "lgamma": ["lgamma"], "atan2": ["atan2"], "hypot": ["hypot"],
    "copysign": ["copysign"], "fmod": ["fmod"], "sigmoid": ["sigmoid"],
    "reciprocal": ["reciprocal"], "mul": ["mul"], "pow": ["pow"], "maximum": ["maximum", "fmax_nan"],
    "minimum": ["minimum"], "remainder": ["remainder"], "i0": ["i0", "special_modified_bessel_i0"],
    "i1": ["special_i1", "special_modified_bessel_i1"],
}  # fmt: skip
for _ours, _torchs in _SAME.items():
    for _name in _torchs:
        for _namespace in ("aten", "prims"):
            RULES[f"{_namespace}.{_name}"] = plain(_ours)
for _name in ("erfcx", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "ndtri"):
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


@rule("aten.nextafter", "prims.nextafter")
def _nextafter(call: Call, a: Any, b: Any) -> Lazy:
    """nextafter. In 16 bits the neighbour is that in 16 bits, not in the fp32 that other arithmetic is done in."""
    dtype = call.dtype
    if dtype not in REDUCED_FLOATS:
        return elementwise(call, dtype, (a, b), lambda e, *v: e.op("nextafter", dtype, *v))

    def make(e: Emitter, x: int, y: int) -> int:
        def either(condition: int, yes: int, no: int, of: str = "i32") -> int:
            return e.op("where", of, condition, yes, no)

        def bits_of(value: int) -> int:
            return e.cast(e.builder.add("bitcast", "i16", value, data=dtype), "i32")

        one, minus_one = e.constant(1, "i32"), e.constant(-1, "i32")
        grows = e.op("eq", "i1", e.op("lt", "i1", x, y), e.op("gt", "i1", x, e.constant(0.0, dtype)))
        next_to = e.op("add", "i32", bits_of(x), either(grows, one, minus_one))
        least = e.op("or", "i32", e.op("and", "i32", bits_of(y), e.constant(-(2**15), "i32")), one)
        found = either(e.op("eq", "i1", x, e.constant(0.0, dtype)), least, next_to)
        found = either(e.op("eq", "i1", x, y), bits_of(y), found)
        value = e.builder.add("bitcast", dtype, e.cast(found, "i16"), data="i16")
        is_nan = e.op("or", "i1", e.op("isnan", "i1", x), e.op("isnan", "i1", y))
        return either(is_nan, e.op("add", dtype, x, y), value, dtype)

    return elementwise(call, dtype, (a, b), make)


@rule("aten.frexp")
def _frexp(call: Call, x: Lazy) -> tuple[Lazy, Lazy]:
    """(mantissa of 0.5 to 1, exponent in int32), by the bits of an fp32 or fp64 number."""
    wide, bits, digits, bias = ("fp64", "i64", 52, 1022) if x.dtype == "fp64" else ("fp32", "i32", 23, 126)
    top = 2 * bias + 3  # the exponent of infinities and NaN

    def parts(e: Emitter, index: Index) -> tuple[int, int, int, int]:
        """(value, whether it has no exponent, bits of a normal number, exponent)."""
        value = e.cast(e.read(x, index), wide)
        tiny = e.op("lt", "i1", e.op("abs", wide, value), e.constant(2.0 ** (1 - bias), wide))
        scaled = e.op("where", wide, tiny, e.op("mul", wide, value, e.constant(2.0**64, wide)), value)
        found = e.builder.add("bitcast", bits, scaled, data=wide)
        exponent = e.op("and", bits, e.op("shr", bits, found, e.constant(digits, bits)), e.constant(top, bits))
        none = e.op("eq", "i1", value, e.constant(0.0, wide))
        none = e.op("or", "i1", none, e.op("eq", "i1", exponent, e.constant(top, bits)))
        back = e.op("where", bits, tiny, e.constant(64, bits), e.constant(0, bits))
        return value, none, found, e.op("sub", bits, e.op("sub", bits, exponent, e.constant(bias, bits)), back)

    def mantissa(e: Emitter, index: Index) -> int:
        value, none, found, _ = parts(e, index)
        kept = e.op("and", bits, found, e.constant(~(top << digits), bits))
        half = e.op("or", bits, kept, e.constant(bias << digits, bits))
        return e.cast(e.op("where", wide, none, value, e.builder.add("bitcast", wide, half, data=bits)), x.dtype)

    def exponent(e: Emitter, index: Index) -> int:
        _, none, _, found = parts(e, index)
        return e.cast(e.op("where", bits, none, e.constant(0, bits), found), "i32")

    return Lazy(x.shape, x.dtype, mantissa), Lazy(x.shape, "i32", exponent)


@rule("inline_asm_elementwise")
def _inline_asm(call: Call, *inputs: Any, asm_str: str, constraints: str, dtype: Any, is_pure: bool = True,
                pack: int = 1) -> Lazy:  # fmt: skip
    """torch's higher-order op: PTX for each element, its operands in the dtypes of the tensors."""
    dtypes = tuple(x.dtype for x in inputs)
    readers = [operand(x, call.shape, x.dtype) for x in inputs]

    def read(e: Emitter, index: Index) -> int:
        data = (asm_str, constraints, pack, dtypes)
        return e.builder.add("asm", call.dtype, *(r(e, index) for r in readers), data=data)

    return Lazy(call.shape, call.dtype, read)


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
      "prims.view_of", "aten.positive", "prims.copy_strided", "aten.lift_fresh")  # fmt: skip
def _same(call: Call, x: Any, *_: Any, **__: Any) -> Lazy:
    return Lazy(call.shape, call.dtype, operand(x, call.shape, call.dtype))


@rule("aten.copy")
def _copy(call: Call, _: Any, source: Any, *__: Any) -> Lazy:
    return _same(call, source)
