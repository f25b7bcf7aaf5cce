"""Every pointwise op of ATen that can be generated, with arguments that show its edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

FLOAT = ("fp32", "bf16", "fp16", "fp64")
INT = ("i32", "i64", "i8", "u8", "i16")
BOOL = ("bool",)


@dataclass(frozen=True)
class Case:
    """A function of one, two or three tensors of one dtype. low, high: what the arguments lie between."""

    name: str
    fn: Callable[..., torch.Tensor]
    dtypes: tuple[str, ...]
    low: float = -4.0
    high: float = 4.0
    special: bool = True  # NaN, infinities and zeros of both signs are among the arguments

    @property
    def arity(self) -> int:
        return self.fn.__code__.co_argcount


def neighbour(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """To the bit, but for which NaN it is. Of 16 bits; of others zeros."""
    found = torch.nextafter(x, y)
    return torch.where(found.isnan(), 0, found.view(torch.int16)) if x.itemsize == 2 else found.to(torch.int16) * 0


def _cases() -> list[Case]:
    one = lambda name, dtypes=FLOAT, **k: Case(name, eval(f"lambda x: torch.{name}(x)"), dtypes, **k)  # noqa: E731
    two = lambda name, dtypes=FLOAT, **k: Case(name, eval(f"lambda x, y: torch.{name}(x, y)"), dtypes, **k)  # noqa: E731
    number = (*FLOAT, *INT)
    found = [
        *(one(n) for n in ("sqrt", "rsqrt", "exp", "exp2", "expm1", "sin", "cos", "tan", "sinh", "cosh", "tanh",
                           "asinh", "atan", "erf", "erfc", "sigmoid", "reciprocal", "log", "log2", "log10", "log1p",
                           "lgamma",
                           "frac", "i0", "sinc", "nan_to_num", "isneginf", "isposinf", "signbit")),
        *(one(n, low=-1, high=1) for n in ("asin", "acos", "atanh", "erfinv")),
        one("acosh", low=1, high=9),
        *(one(n, number) for n in ("neg", "abs", "sign", "square", "positive", "isnan", "isinf", "isfinite")),
        *(one(n, (*FLOAT, "i32")) for n in ("floor", "ceil", "trunc", "round")),
        *(one(n, ("i32", "i64", "u8")) for n in ("sqrt", "sin", "sigmoid", "reciprocal")),
        *(one(n, (*FLOAT, *INT, "bool")) for n in ("logical_not",)),
        one("bitwise_not", (*INT, "bool")),
        *(two(n, number) for n in ("add", "sub", "mul", "maximum", "minimum", "fmax", "fmin", "eq", "ne", "lt", "le",
                                   "gt", "ge")),
        *(two(n, (*FLOAT, *INT, "bool")) for n in ("logical_and", "logical_or", "logical_xor")),
        *(two(n, (*INT, "bool")) for n in ("bitwise_and", "bitwise_or", "bitwise_xor")),
        *(two(n, ("i32", "i64", "i16")) for n in ("bitwise_left_shift", "bitwise_right_shift")),
        *(two(n, ("fp32", "fp64", "bf16")) for n in ("div", "atan2", "fmod", "remainder", "floor_divide", "copysign",
                                                     "logaddexp", "logaddexp2", "xlogy", "heaviside")),
        *(two(n, ("fp32", "fp64")) for n in ("hypot", "nextafter")),
        *(two(n, ("i32", "i64", "i8"), low=1) for n in ("fmod", "remainder", "floor_divide", "div")),
        Case("nextafter_bits", neighbour, ("fp16",)),
        # Triton's interpreter flushes what bf16 has below its normal numbers.
        Case("nextafter_bits", neighbour, ("bf16",), low=0.5, special=False),
        two("pow", ("fp32", "fp64"), low=0.1),
        two("pow", ("i32", "i64"), low=0),
        Case("pow_int", lambda x: x**3, number),
        Case("pow_half", lambda x: x**0.5, FLOAT),
        Case("pow_negative", lambda x: x**-2, FLOAT),
        Case("scalar_pow", lambda x: 2**x, ("fp32", "fp64", "i32")),
        Case("div_trunc", lambda x, y: torch.div(x, y, rounding_mode="trunc"), ("fp32", "fp64")),
        Case("div_floor", lambda x, y: torch.div(x, y, rounding_mode="floor"), ("fp32", "fp64")),
        Case("div_trunc_int", lambda x, y: torch.div(x, y, rounding_mode="trunc"), ("i32", "i64"), low=1),
        Case("floor_negative", lambda x, y: torch.div(x - 9, y, rounding_mode="floor"), ("i32", "i64"), low=1),
        Case("remainder_negative", lambda x, y: torch.remainder(x - 9, -y), ("i32", "i64"), low=1),
        Case("round_decimals", lambda x: torch.round(x, decimals=1), ("fp32",), special=False),
        Case("clamp", lambda x: x.clamp(-1, 2), (*FLOAT, "i32", "u8")),
        Case("clamp_min", lambda x: x.clamp(min=1), (*FLOAT, "i32")),
        Case("clamp_max", lambda x: x.clamp_max(1), FLOAT),
        Case("clamp_tensors", lambda x, y, z: x.clamp(y, z), ("fp32", "i32")),
        Case("where", lambda x, y: torch.where(x > y, x, y), (*FLOAT, *INT)),
        Case("where_number", lambda x: torch.where(x > 0, x, 0.5), FLOAT),
        Case("bits_of_fp32", lambda x: x.view(torch.int32) ^ 5, ("fp32",), special=False),
        Case("bits_of_bf16", lambda x: x.view(torch.int16) + 1, ("bf16",), special=False),
        Case("bits_to_bf16", lambda x: x.view(torch.bfloat16) * 2, ("i16",)),
        Case("bits_of_i64", lambda x: x.view(torch.float64) * 2, ("i64",)),
        Case("masked_fill", lambda x: x.masked_fill(x > 0, -1), (*FLOAT, "i32")),
        Case("add_alpha", lambda x, y: torch.add(x, y, alpha=3), (*FLOAT, "i32")),
        Case("rsub", lambda x: 3 - x, (*FLOAT, "i32")),
        Case("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), ("fp32", "bf16")),
        Case("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z, value=0.5), ("fp32",)),
        Case("lerp", lambda x, y: torch.lerp(x, y, 0.3), ("fp32", "bf16"), special=False),
        Case("int_plus_float", lambda x: x + 0.5, (*INT, "bool")),
        Case("bool_times_int", lambda x: x * 3, BOOL),
        Case("bool_arithmetic", lambda x, y: (x * y) + y, BOOL),
        Case("mixed", lambda x: x.to(torch.float32) + x * torch.ones((), dtype=torch.float64), ("bf16", "i32")),
        # Multiples that need no rounding: Triton's interpreter rounds to fp8 in its own way.
        Case("to_fp8e4", lambda x: (x.round() * 16).to(torch.float8_e4m3fn), ("fp32", "bf16"), special=False),
        Case("to_fp8e5", lambda x: (x.round() * 16384).to(torch.float8_e5m2), ("fp32", "bf16"), special=False),
        Case("through_fp8", lambda x: x.round().to(torch.float8_e4m3fn).float() + x, ("fp32",), special=False),
        *(Case(f"to_{d}", eval(f"lambda x: x.to(torch.{d})"), (*FLOAT, "i32", "bool"), low=0, special=False)
          for d in ("float64", "bfloat16", "float16", "int32", "int64", "int8", "uint8", "bool")),
        *(Case(n, eval(f"lambda x: F.{n}(x)", {"F": F}), FLOAT)
          for n in ("relu", "silu", "gelu", "elu", "selu", "celu", "leaky_relu", "softplus", "mish", "hardtanh",
                    "relu6", "hardswish", "hardsigmoid", "logsigmoid", "softsign", "tanhshrink", "softshrink",
                    "hardshrink")),
        Case("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), FLOAT),
        Case("threshold", lambda x: F.threshold(x, 0.5, 2.0), FLOAT),
        Case("deg2rad", lambda x: torch.rad2deg(torch.deg2rad(x)), ("fp32",)),
        Case("logit", lambda x: torch.logit(x, eps=1e-3), FLOAT, low=0, high=1),
        Case("tril", lambda x: x.reshape(-1, 4).tril(), ("fp32",)),
        Case("arange", lambda x: x + torch.arange(x.shape[0], device=x.device), ("fp32", "i32")),
        Case("full_like", lambda x: torch.full_like(x, 2.5) + torch.zeros_like(x) + x, ("fp32",)),
        Case("frexp_mantissa", lambda x: torch.frexp(x)[0], FLOAT),
        Case("frexp_exponent", lambda x: torch.frexp(torch.cat([x, x * 1e-39]))[1], ("fp32", "fp64")),
        Case("bessel", lambda x: torch.special.bessel_y0(x) + torch.special.bessel_y1(x) + torch.special.i1(x),
             ("fp32", "fp64"), low=0.5, special=False),
        Case("special", lambda x: torch.special.bessel_j0(x) + torch.special.ndtri(x), ("fp32",), low=0.1, high=0.9,
             special=False),
    ]  # fmt: skip
    return found


CASES = _cases()
