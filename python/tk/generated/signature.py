"""The texts of ``@tk.op``, parsed: what a generated op says of its arguments.

x="T[..., N]"   a tensor: dtype (a name or a variable) and sizes (letters, numbers, a leading ``...``)
xs="T[...]*"    a list of tensors
alpha="float"   a number: float, int or bool
T=("bf16",)     the dtypes that a variable may stand for
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4m3fn": torch.float8_e4m3fn,
    "fp8e5m2": torch.float8_e5m2,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
    "bool": torch.bool,
}
NUMBERS = ("float", "int", "bool")
MAX_RANK = 5  # a tensor of the core has 8 dimensions, of which "..." takes three

_TENSOR = re.compile(r"\s*(\w+)\s*\[([^\]]*)\]\s*(\*?)\s*")


class SignatureError(ValueError):
    """A decorator's text that cannot be read, or that does not fit its function."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor argument. sizes: a letter or a number for each declared dimension (of a backward's argument also an
    expression of letters, as sympy has it). leading: "..." stands in front.

    dtype: a dtype's name, or that of a variable. is_list: any number of such tensors."""

    dtype: str
    sizes: tuple[Any, ...]
    leading: bool = False
    is_list: bool = False

    def __str__(self) -> str:
        sizes = ", ".join([*(["..."] if self.leading else []), *map(str, self.sizes)])
        return f"{self.dtype}[{sizes}]{'*' if self.is_list else ''}"


@dataclass(frozen=True)
class NumberSpec:
    """A number, given at run time. kind: "float", "int" or "bool"."""

    kind: str

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True)
class Signature:
    """params: in the order of the function. variables: the dtypes that each variable may stand for."""

    params: Mapping[str, TensorSpec | NumberSpec]
    variables: Mapping[str, tuple[str, ...]]

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        return {name: spec for name, spec in self.params.items() if isinstance(spec, TensorSpec)}

    @property
    def numbers(self) -> Mapping[str, NumberSpec]:
        return {name: spec for name, spec in self.params.items() if isinstance(spec, NumberSpec)}

    @property
    def letters(self) -> tuple[str, ...]:
        """In order of first appearance."""
        found = [s for spec in self.tensors.values() for s in spec.sizes if isinstance(s, str)]
        return tuple(dict.fromkeys(found))

    @property
    def flags(self) -> tuple[str, ...]:
        """The bool parameters: a graph is traced for each of their values."""
        return tuple(name for name, spec in self.numbers.items() if spec.kind == "bool")

    def assignments(self) -> Iterator[dict[str, str]]:
        """Every choice of a dtype for each variable, in the order of the declaration."""
        for values in product(*self.variables.values()):
            yield dict(zip(self.variables, values, strict=True))


def parse(texts: Mapping[str, str | Sequence[str]], parameters: Sequence[str]) -> Signature:
    """texts: the decorator's keywords. parameters: the function's, in order.

    Raises SignatureError, which says of which keyword it is and what would be read."""
    variables = {name: _dtypes(name, value) for name, value in texts.items() if not isinstance(value, str)}
    if both := [name for name in parameters if name in variables]:
        raise SignatureError(f"{both[0]} is a parameter: give it a text such as 'T[M, N]' or 'float'")
    if missing := [name for name in parameters if name not in texts]:
        raise SignatureError(f"parameter {missing[0]} is not declared: give {missing[0]}='T[M, N]' or 'float'")
    single = {name: text for name, text in texts.items() if name not in parameters and name not in variables}
    for name, text in single.items():
        if text not in DTYPES:
            raise SignatureError(
                f"{name}={text!r}: the function has no parameter {name}, and {text!r} is no dtype that a variable "
                f"could stand for ({', '.join(DTYPES)})"
            )
        variables[name] = (str(text),)
    params = {name: _param(name, str(texts[name]), variables) for name in parameters}
    signature = Signature(params, variables)
    _check(signature)
    return signature


def _dtypes(name: str, values: Sequence[str]) -> tuple[str, ...]:
    if not values or (unknown := [v for v in values if v not in DTYPES]) or len(set(values)) != len(values):
        what = f"{unknown[0]!r} is no dtype" if values and unknown else "give each dtype once, and at least one"
        raise SignatureError(f"{name}={tuple(values)!r}: {what}; there are {', '.join(DTYPES)}")
    return tuple(values)


def _param(name: str, text: str, variables: Mapping[str, Sequence[str]]) -> TensorSpec | NumberSpec:
    if text.strip() in NUMBERS:
        return NumberSpec(text.strip())
    match = _TENSOR.fullmatch(text)
    if match is None:
        raise SignatureError(
            f"{name}={text!r} is neither a tensor such as 'T[M, N]', 'T[..., N]' or 'bf16[]' nor one of "
            f"{', '.join(NUMBERS)}"
        )
    dtype, inside, star = match.groups()
    if dtype not in DTYPES and dtype not in variables:
        raise SignatureError(
            f"{name}={text!r}: {dtype} is neither a dtype ({', '.join(DTYPES)}) nor a variable of this decorator; "
            f"declare it with {dtype}=('bf16', 'fp16')"
        )
    sizes = [s.strip() for s in inside.split(",")] if inside.strip() else []
    leading = bool(sizes) and sizes[0] == "..."
    declared = tuple(_size(name, text, s) for s in sizes[leading:])
    if len(declared) > MAX_RANK:
        raise SignatureError(f"{name}={text!r}: {len(declared)} declared dimensions, there may be {MAX_RANK}")
    return TensorSpec(dtype, declared, leading, bool(star))


def _size(name: str, text: str, size: str) -> str | int:
    if size.isdigit() and int(size) > 0:
        return int(size)
    if re.fullmatch(r"[A-Za-z]\w*", size):
        return size
    raise SignatureError(f"{name}={text!r}: size {size!r} is neither a letter, a number above 0, nor '...' in front")


def _check(signature: Signature) -> None:
    if not signature.tensors:
        raise SignatureError("an op needs a tensor among its parameters")
    used = {spec.dtype for spec in signature.tensors.values()}
    if unused := [v for v in signature.variables if v not in used]:
        raise SignatureError(f"{unused[0]} is neither a parameter of the function nor the dtype of one")
    taken = [n for n in signature.letters if n in signature.params or n in signature.variables]
    if taken:
        raise SignatureError(f"{taken[0]} is a size and something else: give it another letter")
