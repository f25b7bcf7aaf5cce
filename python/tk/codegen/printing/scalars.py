"""Scalars as source: operations are rows of a table, one template each for floats and integers; constants; and what
reductions begin with and combine by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tk.codegen.errors import IRError
from tk.codegen.ir import FLOATS, Value

TL_DTYPES: Mapping[str, str] = {
    "bf16": "tl.bfloat16", "fp16": "tl.float16", "fp32": "tl.float32", "fp64": "tl.float64", "i8": "tl.int8",
    "i16": "tl.int16", "i32": "tl.int32", "i64": "tl.int64", "u8": "tl.uint8", "i1": "tl.int1",
    "fp8e4nv": "tl.float8e4nv", "fp8e5": "tl.float8e5",
}  # fmt: skip

# op -> source. {0}, {1}, … are the operands. "fast" templates serve where the result is rounded to 16 bits anyway.
_LIBDEVICE = (
    "expm1", "log10", "log1p", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erfc",
    "erfinv", "lgamma", "hypot", "copysign", "nextafter", "atan2", "erfcx", "exp", "exp2", "log", "log2", "sin", "cos",
    "pow", "fmod",
)  # fmt: skip
_LIBDEVICE_NAMES = {
    "lgamma": "lgamma",
    "bessel_j0": "j0",
    "bessel_j1": "j1",
    "i0": "cyl_bessel_i0",
    "ndtri": "normcdfinv",
    "bessel_y0": "y0",
    "bessel_y1": "y1",
    "i1": "cyl_bessel_i1",
}
FLOAT_RULES: Mapping[str, str] = {
    **{name: f"libdevice.{name}({{0}})" for name in _LIBDEVICE},
    **{name: f"libdevice.{name}({{0}}, {{1}})"
       for name in ("hypot", "copysign", "nextafter", "atan2", "pow", "fmod")},
    **{name: f"libdevice.{theirs}({{0}})" for name, theirs in _LIBDEVICE_NAMES.items()},
    "neg": "-{0}", "abs": "tl.abs({0})", "sqrt": "tl.sqrt_rn({0})", "rsqrt": "libdevice.rsqrt({0})",
    "erf": "tl.erf({0})", "floor": "tl.floor({0})", "ceil": "tl.ceil({0})", "trunc": "libdevice.trunc({0})",
    "round": "libdevice.rint({0})", "reciprocal": "tl.div_rn(tl.full((), 1.0, {0}.dtype), {0})",
    "sign": "({0} > 0).to({0}.dtype) - ({0} < 0).to({0}.dtype)",
    "sigmoid": "tl.div_rn(tl.full((), 1.0, {0}.dtype), 1.0 + libdevice.exp(-{0}))",
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "tl.div_rn({0}, {1})",
    "trunc_div": "libdevice.trunc(tl.div_rn({0}, {1}))", "floor_div": "device.float_floor_div({0}, {1})",
    "remainder": "device.float_remainder({0}, {1})",
    "maximum": "device.maximum({0}, {1})", "minimum": "device.minimum({0}, {1})",
    "isnan": "{0} != {0}", "isinf": 'tl.abs({0}) == float("inf")', "signbit": "libdevice.signbit({0}) != 0",
}  # fmt: skip
FP64_RULES: Mapping[str, str] = {
    **FLOAT_RULES, "div": "{0} / {1}", "reciprocal": "1.0 / {0}", "sqrt": "libdevice.sqrt({0})",
    "sigmoid": "1.0 / (1.0 + libdevice.exp(-{0}))", "trunc_div": "libdevice.trunc({0} / {1})",
    "floor": "libdevice.floor({0})", "ceil": "libdevice.ceil({0})", "erf": "libdevice.erf({0})",
}  # fmt: skip
FAST_RULES: Mapping[str, str] = {
    **FLOAT_RULES, "exp": "tl.exp({0})", "exp2": "tl.exp2({0})", "log": "tl.log({0})", "log2": "tl.log2({0})",
    "div": "{0} / {1}", "sqrt": "tl.sqrt({0})", "rsqrt": "tl.rsqrt({0})", "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",
    "reciprocal": "1.0 / {0}", "erfc": "device.erfc({0})",
}  # fmt: skip
INT_RULES: Mapping[str, str] = {
    "neg": "-{0}", "abs": "tl.abs({0})", "sign": "({0} > 0).to({0}.dtype) - ({0} < 0).to({0}.dtype)",
    "bitwise_not": "~{0}", "not": "{0} == 0",
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "trunc_div": "{0} // {1}",
    "floor_div": "device.floor_div({0}, {1})", "fmod": "{0} % {1}", "remainder": "device.remainder({0}, {1})",
    "pow": "device.int_pow({0}, {1})", "maximum": "tl.maximum({0}, {1})", "minimum": "tl.minimum({0}, {1})",
    "shl": "device.shift_left({0}, {1})", "shr": "device.shift_right({0}, {1})",
}  # fmt: skip
ANY_RULES: Mapping[str, str] = {
    "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "eq": "{0} == {1}", "ne": "{0} != {1}",
    "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}", "where": "tl.where({0}, {1}, {2})",
}  # fmt: skip
BOOL_RULES: Mapping[str, str] = {
    "not": "{0} == 0", "maximum": "{0} | {1}", "minimum": "{0} & {1}", "mul": "{0} & {1}", "add": "{0} | {1}",
}  # fmt: skip


def expression(v: Value, operands: list[str], dtype: str) -> str:
    """The source of a scalar operation on operands of `dtype`. Raises IRError where there is no rule."""
    if v.op in ANY_RULES:
        return ANY_RULES[v.op].format(*operands)
    if dtype in FLOATS:
        rules = FP64_RULES if dtype == "fp64" else FAST_RULES if v.fast else FLOAT_RULES
    else:
        rules = BOOL_RULES if dtype == "i1" else INT_RULES
    if v.op not in rules:
        raise IRError(f"{v}: there is no rule for {v.op} of {dtype}")
    return rules[v.op].format(*operands)


def literal(value: Any, dtype: str, plain: bool = True) -> str:
    """A constant that has exactly this dtype and value. plain: it may be a Python number."""
    if plain and dtype == "fp32" and math.isfinite(value) and _is_fp32_literal(value):
        return repr(value)
    text = f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)
    return f"tl.full((), {text}, {TL_DTYPES[dtype]})"


def _is_fp32_literal(value: float) -> bool:
    """Triton makes fp32 of a Python float of ordinary size."""
    return (value == 0.0 and math.copysign(1, value) > 0) or 2.0**-126 <= abs(value) <= (2 - 2**-23) * 2.0**127


IDENTITY = {"sum": 0, "prod": 1, "any": 0, "all": 1, "xor": 0, "mean": 0, "m2": 0}
COMBINE = {"prod": "multiply", "any": "bit_or", "all": "bit_and", "xor": "bit_xor", "max": "maximum", "min": "minimum"}


def identity(kind: str, dtype: str) -> str:
    if kind in IDENTITY:
        value: Any = IDENTITY[kind]
        return literal(float(value) if dtype in FLOATS else bool(value) if dtype == "i1" else value, dtype)
    is_low = kind in ("max", "argmax")
    if dtype in FLOATS:
        return literal(-math.inf if is_low else math.inf, dtype)
    bits = {"u8": 8, "i8": 7, "i16": 15, "i32": 31, "i64": 63}[dtype]
    low = 0 if dtype == "u8" else -(2**bits)
    return literal(low if is_low else 2**bits - 1, dtype)
