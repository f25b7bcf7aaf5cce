"""The texts of ``@tk.op``, parsed: what a generated op says of its arguments.

x="T[..., N]"   a tensor: dtype (a name or a variable) and sizes (letters, numbers, a leading ``...``)
y="T[2*N + 1]"  a size may be an expression of letters: + - * // and parentheses
xs="T[...]*"    a list of tensors
alpha="float"   a number: float, int or bool
T=("bf16",)     the dtypes that a variable may stand for: ours or torch's names, or torch.bfloat16 itself
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import torch

from tk import _dtypes
from tk._dtypes import DTYPES

NUMBERS = ("float", "int", "bool")
RESERVED_ARGUMENTS = ("config", "mode", "mode_bits")  # what the schema of every op has behind its own
# Of an argument or a result of an op that is sharded along a dimension: the dimension, counted from the last; "..." for
# any of its leading ones; "sum", "max" or "min" of partial results; None for what each GPU has whole.
Place: TypeAlias = int | str | None
Declaration: TypeAlias = str | torch.dtype | Sequence[str | torch.dtype]  # of a parameter or a variable
MAX_RANK = 8  # of a tensor of the core
MAX_RANK_BESIDE = 5  # "..." takes three of these

_TENSOR = re.compile(r"\s*((?:torch\.)?\w+)\s*\[([^\]]*)\]\s*(\*?)\s*")


class SignatureError(ValueError):
    """A decorator's text that cannot be read, or that does not fit its function."""


@dataclass(frozen=True)
class Size:
    """An expression of letters, such as ``2*N+1``. text: as Python reads it, without spaces."""

    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def letters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(n.id for n in ast.walk(self._tree) if isinstance(n, ast.Name)))

    @property
    def _tree(self) -> ast.expr:
        return ast.parse(self.text, mode="eval").body

    def evaluate(self, values: Mapping[str, Any], floordiv: Callable[[Any, Any], Any] = operator.floordiv) -> Any:
        """Its value for numbers, or for whatever else has the operators."""

        def of(node: ast.expr) -> Any:
            if isinstance(node, ast.Name):
                return values[node.id]
            if isinstance(node, ast.Constant):
                return node.value
            assert isinstance(node, ast.BinOp)
            rule = floordiv if isinstance(node.op, ast.FloorDiv) else _OPERATORS[type(node.op)]
            return rule(of(node.left), of(node.right))

        return of(self._tree)

    def solved(self, letter: str) -> tuple[Size, Size] | None:
        """(factor, rest) for which it is factor * letter + rest, neither with the letter in it; None: it has no such
        form."""

        def linear(node: ast.expr) -> tuple[str, str] | None:
            if not any(isinstance(n, ast.Name) and n.id == letter for n in ast.walk(node)):
                return "0", ast.unparse(node)
            if isinstance(node, ast.Name):
                return "1", "0"
            if not isinstance(node, ast.BinOp) or isinstance(node.op, ast.FloorDiv):
                return None
            left, right = linear(node.left), linear(node.right)
            if left is None or right is None:
                return None
            if isinstance(node.op, ast.Mult):
                if left[0] != "0" and right[0] != "0":
                    return None
                (factor, rest), by = (left, right[1]) if left[0] != "0" else (right, left[1])
                return f"({factor})*({by})", f"({rest})*({by})"
            sign = "+" if isinstance(node.op, ast.Add) else "-"
            return f"({left[0]}){sign}({right[0]})", f"({left[1]}){sign}({right[1]})"

        found = linear(self._tree)
        return None if found is None else (Size(found[0]), Size(found[1]))


_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
}  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """A tensor argument. sizes: a letter, a number or a Size for each declared dimension (of a backward's argument also
    an expression of letters as sympy has it). leading: "..." stands in front.

    dtype: a dtype's name, or that of a variable. is_list: any number of such tensors."""

    dtype: str
    sizes: tuple[Any, ...]
    leading: bool = False
    is_list: bool = False

    def shape(self, values: Mapping[str, Any]) -> list[Any]:
        """The declared sizes. values: of the letters."""
        return [values.get(s, s) if isinstance(s, str) else s.evaluate(values) if isinstance(s, Size) else s
                for s in self.sizes]  # fmt: skip

    def __str__(self) -> str:
        sizes = ", ".join([*(["..."] if self.leading else []), *map(str, self.sizes)])
        return f"{self.dtype}[{sizes}]{'*' if self.is_list else ''}"


@dataclass(frozen=True)
class NumberSpec:
    """A number, given at run time. kind: "float", "int" or "bool". default: what a call that leaves it out means."""

    kind: str
    default: float | int | bool | None = None

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
        """Its letters, in order of first appearance."""
        sizes = [s for spec in self.tensors.values() for s in spec.sizes]
        found = [x for s in sizes for x in ([s] if isinstance(s, str) else s.letters if isinstance(s, Size) else [])]
        return tuple(dict.fromkeys(found))

    def solved(self) -> Iterator[tuple[str, str, int, Size, Size]]:
        """(letter, tensor, dimension, factor, rest), for each letter that stands alone nowhere: the dimension is
        factor * letter + rest, of letters that are known by then. Raises SignatureError where one cannot be known."""
        known = {s for spec in self.tensors.values() for s in spec.sizes if isinstance(s, str)}
        places = [
            (n, d, s) for n, spec in self.tensors.items() for d, s in enumerate(spec.sizes) if isinstance(s, Size)
        ]
        while unknown := [x for x in self.letters if x not in known]:
            found = next(((x, n, d, parts) for x in unknown for n, d, s in places
                          if known.issuperset(set(s.letters) - {x}) and x in s.letters
                          and (parts := s.solved(x)) is not None), None)  # fmt: skip
            if found is None:
                raise SignatureError(
                    f"the size {unknown[0]} is known from no tensor: it stands only inside of "
                    + ", ".join(f"'{s}'" for _, _, s in places if unknown[0] in s.letters)
                )
            letter, name, d, (factor, rest) = found
            known.add(letter)
            yield letter, name, d, factor, rest

    @property
    def flags(self) -> tuple[str, ...]:
        """The bool parameters: a graph is traced for each of their values."""
        return tuple(name for name, spec in self.numbers.items() if spec.kind == "bool")

    def assignments(self) -> Iterator[dict[str, str]]:
        """Every choice of a dtype for each variable, in the order of the declaration."""
        for values in product(*self.variables.values()):
            yield dict(zip(self.variables, values, strict=True))


def parse(
    texts: Mapping[str, Declaration], parameters: Sequence[str], defaults: Mapping[str, Any] | None = None
) -> Signature:
    """texts: the decorator's keywords. parameters: the function's, in order. defaults: those of some of them.

    Raises SignatureError, which says of which keyword it is and what would be read."""
    for name, value in texts.items():
        if isinstance(value, torch.dtype) and name in parameters:
            word = _dtypes.named(value) or "fp32"
            raise SignatureError(f"{name}={value}: {name} is a parameter; its sizes belong to it: {name}='{word}[...]'")
        if not isinstance(value, str | tuple | list | torch.dtype):
            raise SignatureError(
                f"{name}={_said(value)}: give a text, such as 'T[M, N]', 'fp32[N]' or 'float', or, for a "
                f"variable, a tuple of dtypes; these are {_dtypes.there_are()}{_dtypes.hint(value)}"
            )
    variables = {name: _choice(name, value) for name, value in texts.items() if isinstance(value, tuple | list)}
    if both := [name for name in parameters if name in variables]:
        raise SignatureError(f"{both[0]} is a parameter: give it a text such as 'T[M, N]' or 'float'")
    for name in parameters:
        if name in RESERVED_ARGUMENTS:
            raise SignatureError(
                f"parameter {name}: every op has one, as it has {', '.join(RESERVED_ARGUMENTS)}; "
                f"call it something else, such as {name}_"
            )
        if not name.isascii():
            raise SignatureError(f"parameter {name}: a name is of ASCII letters; call it something else")
    if missing := [name for name in parameters if name not in texts]:
        raise SignatureError(f"parameter {missing[0]} is not declared: give {missing[0]}='T[M, N]' or 'float'")
    single = {name: text for name, text in texts.items() if name not in parameters and name not in variables}
    for name, text in single.items():
        if text in NUMBERS or "[" in str(text):
            raise SignatureError(
                f"{name}={text!r}: the function has no parameter {name}; its parameters are {', '.join(parameters)}"
            )
        if (named := _dtypes.named(text)) is None:
            raise SignatureError(
                f"{name}={text!r}: the function has no parameter {name}, and {text!r} is no dtype that a variable "
                f"could stand for; there are {_dtypes.there_are()}{_dtypes.hint(text)}"
            )
        variables[name] = (named,)
    params = {name: _param(name, str(texts[name]), variables) for name in parameters}
    params = _with_defaults(params, defaults or {})
    signature = Signature(params, variables)
    _check(signature)
    return signature


def _choice(name: str, values: Sequence[Any]) -> tuple[str, ...]:
    """The dtypes that a variable may stand for."""
    words = [_dtypes.named(value) for value in values]
    found = tuple(word for word in words if word is not None)
    if words and len(set(found)) == len(words):
        return found
    unknown = [value for value, word in zip(values, words, strict=True) if word is None]
    what = f"{_said(unknown[0])} is no dtype" if unknown else "give each dtype once, and at least one"
    raise SignatureError(
        f"{name}=({', '.join(map(_said, values))}): {what}; there are {_dtypes.there_are()}"
        + (_dtypes.hint(unknown[0]) if unknown else "")
    )


def _said(value: Any) -> str:
    """A value as a program writes it, in one short line: float, not <class 'float'>, and no tensor's contents."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} {list(value.shape)}"
    return value.__name__ if isinstance(value, type) else repr(value)


def _param(name: str, text: str, variables: Mapping[str, Sequence[str]]) -> TensorSpec | NumberSpec:
    if text.strip() in NUMBERS:
        return NumberSpec(text.strip())
    match = _TENSOR.fullmatch(text)
    if match is None:
        raise SignatureError(
            f"{name}={text!r} is neither a tensor such as 'T[M, N]', 'T[..., N]' or 'bf16[]' nor one of "
            f"{', '.join(NUMBERS)}"
        )
    written, inside, star = match.groups()
    dtype = written if written in variables else _dtypes.named(written)
    if dtype is None:
        raise SignatureError(
            f"{name}={text!r}: {written} is neither a dtype ({', '.join(DTYPES)}) nor a variable of this decorator"
            + (_dtypes.hint(written) or f"; declare it with {written}=('bf16', 'fp16')")
        )
    sizes = [s.strip() for s in inside.split(",")] if inside.strip() else []
    leading = bool(sizes) and sizes[0] == "..."
    declared = tuple(_size(name, text, s) for s in sizes[leading:])
    if len(declared) > (most := MAX_RANK_BESIDE if leading else MAX_RANK):
        beside = " beside '...'" if leading else ""
        raise SignatureError(
            f"{name}={text!r}: {len(declared)} declared dimensions, there may be {most}{beside}; merge some that lie "
            "behind each other (.flatten)"
        )
    return TensorSpec(dtype, declared, leading, bool(star))


_OF_KIND: Mapping[str, tuple[type, ...]] = {"float": (float, int), "int": (int,), "bool": (bool,)}


def _with_defaults(
    params: Mapping[str, TensorSpec | NumberSpec], defaults: Mapping[str, Any]
) -> dict[str, TensorSpec | NumberSpec]:
    found = dict(params)
    for name, value in defaults.items():
        spec = params[name]
        if isinstance(spec, TensorSpec):
            raise SignatureError(
                f"parameter {name} has the default {value!r}: no tensor of an op may be left out; take the default "
                f"away, and declare a second function without {name} if calls go without it"
            )
        if type(value) not in _OF_KIND[spec.kind] or not math.isfinite(value):
            raise SignatureError(f"parameter {name} is '{spec}', and its default {value!r} is no finite {spec}")
        found[name] = NumberSpec(spec.kind, float(value) if spec.kind == "float" else value)
    behind_a_default = False
    for name, spec in found.items():
        has_default = isinstance(spec, NumberSpec) and spec.default is not None
        if behind_a_default and not has_default:
            raise SignatureError(f"parameter {name} has no default and follows one that has: put it in front")
        behind_a_default |= has_default
    return found


def _size(name: str, text: str, size: str) -> str | int | Size:
    if size.isdigit() and int(size) > 0:
        return int(size)
    if re.fullmatch(r"[A-Za-z]\w*", size):
        return size
    if tree := _expression(size):
        found = Size(ast.unparse(tree).replace(" ", ""))
        value = None if found.letters else found.evaluate({})
        if value is None or value > 0:
            return found if value is None else int(value)
    raise SignatureError(
        f"{name}={text!r}: size {size!r} is neither a letter, a number above 0, an expression of such by + - * // nor "
        "'...' in front"
    )


def _expression(text: str) -> ast.expr | None:
    """Parses an expression of letters and numbers alone; None for another."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return None
    allowed = (ast.BinOp, ast.Name, ast.Constant, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Load)
    parts = list(ast.walk(tree))
    is_number = all(type(n.value) is int for n in parts if isinstance(n, ast.Constant))
    divides = [n.right for n in parts if isinstance(n, ast.BinOp) and isinstance(n.op, ast.FloorDiv)]
    is_divided = all(isinstance(n, ast.Constant) and isinstance(n.value, int) and n.value > 0 for n in divides)
    return tree if all(isinstance(n, allowed) for n in parts) and is_number and is_divided else None


def _check(signature: Signature) -> None:
    if not signature.tensors:
        raise SignatureError("an op needs a tensor among its parameters")
    used = {spec.dtype for spec in signature.tensors.values()}
    if unused := [v for v in signature.variables if v not in used]:
        raise SignatureError(f"{unused[0]} is neither a parameter of the function nor the dtype of one")
    list(signature.solved())
    taken = [n for n in signature.letters if n in signature.params or n in signature.variables]
    if taken:
        raise SignatureError(f"{taken[0]} is a size and something else: give it another letter")
