"""The arguments that a command line gives a function of tk, held against those that the function takes: what was given,
what is taken, and the line that would work."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import tk
from tk._dtypes import DTYPES, named
from tk._names import did_you_mean, nearest
from tk.cli._shown import Usage

__all__ = ["Arguments", "Shape", "argument", "parameters", "read"]


@dataclass(frozen=True)
class Shape:
    """The shape of a tensor argument. dtype: None for what --dtype says."""

    sizes: tuple[int, ...]
    is_transposed: bool = False
    dtype: torch.dtype | None = None

    def tensor(self, dtype: torch.dtype, device: str) -> torch.Tensor:
        stored = (*self.sizes[:-2], *self.sizes[:-3:-1]) if self.is_transposed else self.sizes
        try:
            tensor = torch.zeros(stored, dtype=self.dtype or dtype, device=device)
        except RuntimeError as error:  # more bytes than there are, or than can be counted
            sizes = "x".join(map(str, self.sizes))
            raise Usage(f"{sizes}: torch has no tensor of this size: {str(error).splitlines()[0]}") from None
        return tensor.mT if self.is_transposed else tensor


def argument(text: str) -> Shape | tuple[str, Any]:
    """Raises Usage."""
    name, separator, value = text.partition("=")
    if separator and name.isidentifier():
        return name, _value(value)
    sizes = text.removeprefix("int:").removesuffix("t")
    if re.fullmatch(r"\d+(x\d+)*", sizes):
        return Shape(tuple(map(int, sizes.split("x"))), text.endswith("t"), torch.int64 if text[0] == "i" else None)
    if re.fullmatch(r"-\d+(\.\d+)?|\d+\.\d+", text):
        raise Usage(f"{text!r} is no shape: write 512x4096; a number goes by its name, as dim=-1")
    if separator:
        meant = name.lstrip("-").replace("-", "_")
        written = f"{meant}={value}" if meant.isidentifier() else "dim=-1"
        raise Usage(f"{text!r} is no argument: an argument that is no tensor is written NAME=VALUE, as {written}")
    if re.fullmatch(r"[\[({]?\d+(\s*[,*xX×]\s*\d+)*,?[\])}]?", text):
        raise Usage(f"{text!r} is no shape: write {'x'.join(re.findall(r'[0-9]+', text))}")
    raise Usage(
        f"{text!r} is no argument: write the shape of a tensor, as 512x4096 (512x4096t: stored transposed; int:512: of "
        "indices), or NAME=VALUE, as dim=-1"
    )


def _value(text: str) -> Any:
    """A number, tuple, True, False or None; the name of a dtype; a shape of floats, as tensors are; else the text."""
    if (name := named(text)) is not None:
        return DTYPES[name]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return argument(text) if re.fullmatch(r"int:\d+(x\d+)*|\d+(x\d+)+t?", text) else text


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call: the shapes by their places, all else by name."""

    shapes: tuple[Shape, ...]
    keywords: dict[str, Any]


def read(function: str, texts: Sequence[str], before: str, options: Mapping[str, str], after: str = "") -> Arguments:
    """What the texts of a command line say. before, after: what else is in the line (``tk explain softmax``). options:
    arguments of the function that the command has options for, as they were written.

    Raises Usage for what the function does not take, or lacks."""
    return _Reader(function, texts, before, options, after).read()


@dataclass(frozen=True)
class Parameter:
    name: str
    is_required: bool
    is_tensor: bool
    is_number: bool  # or several
    has_place: bool


@dataclass
class _Reader:
    function: str
    texts: Sequence[str]
    before: str
    options: Mapping[str, str]
    after: str

    def read(self) -> Arguments:
        self.parameters = parameters(self.function)
        found = [argument(text) for text in self.texts]
        keywords: dict[str, Any] = {}
        for at, one in enumerate(found):
            if isinstance(one, tuple):
                name, value = one
                self._check_name(name, self.texts[at], at)
                if name in keywords or name in self.options:
                    raise Usage(f"{self.function}: {name} is given twice\n{self._line(at)}")
                keywords[name] = self._value(name, value, at)
        for name, value in self.options.items():
            self._check_name(name, _option(name, value))
        places = [at for at, one in enumerate(found) if isinstance(one, Shape)]
        self._check_places(places, {*keywords, *self.options})
        return Arguments(tuple(one for one in found if isinstance(one, Shape)), keywords)

    def _check_name(self, name: str, text: str, at: int | None = None) -> None:
        known = [p.name for p in self.parameters]
        if name in known:
            return
        meant = nearest(name, known, 0.5)
        hint = did_you_mean(name, known, 0.5)
        instead = f"{meant[0]}{text[len(name) :]}" if meant and at is not None else None
        said = f"{self.function} has no argument {name!r} ({text}){'; ' if hint else ''}{hint}"
        raise Usage(f"{said}\n{self._takes()}\n{self._line(at, instead, left_out=name)}")

    def _value(self, name: str, value: Any, at: int) -> Any:
        parameter = next(p for p in self.parameters if p.name == name)
        if isinstance(value, Shape) and not parameter.is_tensor:
            if not parameter.is_number:
                return self.texts[at].partition("=")[2]  # the name of a config may look like a shape
            line = self._line(at, f"{name}={_numbers(value)}")
            raise Usage(f"{self.function}: {self.texts[at]}: {name} is no tensor\n{line}")
        if type(value) is int and value >= 0 and parameter.is_tensor and not parameter.is_number:
            return Shape((value,))  # of one dimension
        return value

    def _check_places(self, places: Sequence[int], names: set[str]) -> None:
        with_place = [p for p in self.parameters if p.has_place]
        given = with_place[: len(places)]
        for parameter, at in zip(given, places, strict=False):
            if parameter.is_tensor and parameter.name not in names:
                continue
            text = self.texts[at]
            said = f"{self.function}: {text} stands where {parameter.name} is taken, which"
            if parameter.name not in names and parameter.is_number:  # which was meant by it, it seems
                shape = argument(text)
                assert isinstance(shape, Shape)
                line = self._line(at, f"{parameter.name}={_numbers(shape)}")
                raise Usage(f"{said} is no tensor and goes by its name\n{line}")
            taken = {*names, *(p.name for p in given)}
            # A tensor behind an argument that is named goes by its own name as well.
            if following := [p.name for p in with_place if p.is_tensor and p.name not in taken]:
                raise Usage(f"{said} is given by its name\n{self._line(at, f'{following[0]}={text}')}")
            raise self._too_many(at)
        if len(places) > len(with_place):
            raise self._too_many(places[len(with_place)])
        missing = [p for p in self.parameters if p.is_required and p not in given and p.name not in names]
        if missing:
            raise self._missing(missing)

    def _too_many(self, at: int) -> Usage:
        return Usage(
            f"{self.function}: {self.texts[at]} is one shape too many\n{self._takes()}\n{self._line(at, rest=False)}"
        )

    def _missing(self, missing: Sequence[Parameter]) -> Usage:
        # A shape has a place as long as all before it are shapes.
        is_in_order = all(p.is_tensor for p in self.parameters if p.has_place and p.is_required)
        shown = []
        for p in missing:
            value = "SHAPE" if p.is_tensor else "VALUE"
            shown.append(value if p.is_tensor and p.has_place and is_in_order else f"{p.name}={value}")
        names = " and ".join(p.name for p in missing)
        return Usage(f"{self.function}: {names} {'is' if len(missing) == 1 else 'are'} missing\n{self._takes()}\n"
                     f"{self._line(more=shown)}")  # fmt: skip

    def _takes(self) -> str:
        return f"it takes {', '.join(p.name for p in self.parameters)}"

    def _line(
        self,
        at: int | None = None,
        instead: str | None = None,
        left_out: str = "",
        more: Sequence[str] = (),
        rest: bool = True,
    ) -> str:
        """The command line with another text at a place, or without it. left_out: an option that it lacks. rest:
        whether shapes behind the place are kept."""
        texts = [text for i, text in enumerate(self.texts) if i != at and (rest or i < (at or 0) or "=" in text)]
        if instead is not None:
            texts.insert(at or 0, instead)
        options = [_option(name, shlex.quote(value)) for name, value in self.options.items() if name != left_out]
        # Shapes first: one that was added goes behind those that are there.
        named_last = sorted([*texts, *more], key=lambda text: "=" in text)
        return " ".join(filter(None, ("write:", self.before, *map(shlex.quote, named_last), *options, self.after)))


def _option(name: str, value: str) -> str:
    return f"--{name.replace('_', '-')} {value}"


def _numbers(shape: Shape) -> str:
    """A shape as the value of an argument that is no tensor."""
    return str(shape.sizes[0]) if len(shape.sizes) == 1 else f"({','.join(map(str, shape.sizes))})"


def parameters(function: str) -> list[Parameter]:
    """The parameters of a function of tk, or of an op of a loaded pack."""
    if function not in tk.inspect.functions():
        schema = getattr(torch.ops.tk, function).default._schema
        # Behind the config stand the modes, which tk.config sets.
        names = [a.name for a in schema.arguments]
        arguments = schema.arguments[: names.index("config") + 1] if "config" in names else schema.arguments
        return [_parameter(a.name, not a.has_default_value(), str(a.type), not a.kwarg_only) for a in arguments]
    found = inspect.signature(getattr(tk, function)).parameters.values()
    return [_parameter(p.name, p.default is p.empty, str(p.annotation), p.kind is not p.KEYWORD_ONLY) for p in found]


def _parameter(name: str, is_required: bool, annotation: str, has_place: bool) -> Parameter:
    is_tensor = re.search(r"Tensor|\bAny\b", annotation) is not None
    is_number = re.search(r"\bint\b|float|Sizes|Dims|Padding", annotation) is not None and not annotation.startswith(
        "str"
    )
    return Parameter(name, is_required, is_tensor, is_number, has_place)
