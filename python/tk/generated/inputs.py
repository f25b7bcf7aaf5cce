"""Calls of a generated op, made up from its signature: for ``tk bench``, benchmarks and tests.

op = register.find("rms_norm")
example = of_shape(op, (4096, 1024), "bf16")     # x [4096, 1024], weight [1024], eps
torch.ops.tk.rms_norm(*example.arguments("cuda"))
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tk import errors
from tk._names import did_you_mean
from tk.generated import lists, register
from tk.generated.records import GeneratedOp
from tk.generated.signature import DTYPES, Signature, SignatureError, TensorSpec, parse

# What a float stands for is told by its name alone; any other is one that is neither 0 nor 1.
FLOATS: Mapping[str, float] = {"eps": 1e-5, "sign": 1.0, "mirror": 1.0, "bessel": 1.0, "power": 1.0}
ANY_FLOAT = 0.75
INTS: Mapping[str, int] = {"high": 1000, "offset": 4}
COUNTS: Mapping[str, int] = {"k": 50}  # or as many as there are: the smallest size
ANY_INT = 1
POSITIVE = ("exp_avg_sqs",)  # tensors that have no negative elements
COUNTERS = ("steps",)  # tensors that count
SORTED = ("boundaries", "sequence")  # tensors whose rows are
LIST_SHAPES = ((64, 1 << 20),)
UNSAID = 64  # a size that follows from nothing that is given


@dataclass(frozen=True)
class Example:
    """A call without its tensors. dtypes: of the signature's variables. leading: the dimensions of ``...``. sizes: of
    the letters. flags: the values of bools. places: how many tensors each list has."""

    op: GeneratedOp
    signature: Signature
    dtypes: Mapping[str, str]
    leading: tuple[int, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    flags: Mapping[str, bool] = field(default_factory=dict)
    places: int = 1

    def __str__(self) -> str:
        tensors = [f"{name} {self.dtype_name(name)}{list(self.shape(name))}{f' x {self.places}' * spec.is_list}"
                   for name, spec in self.signature.tensors.items()]  # fmt: skip
        return f"{self.op.name}({', '.join([*tensors, *(f'{name}={on}' for name, on in self.flags.items())])})"

    def dtype_name(self, tensor: str) -> str:
        dtype = self.signature.tensors[tensor].dtype
        return self.dtypes.get(dtype, dtype)

    def dtype(self, tensor: str) -> torch.dtype:
        return DTYPES[self.dtype_name(tensor)]

    def shape(self, tensor: str) -> tuple[int, ...]:
        spec = self.signature.tensors[tensor]
        return (*(self.leading if spec.leading else ()), *spec.shape(self.sizes))

    def number(self, name: str) -> float | int | bool:
        kind = self.signature.numbers[name].kind
        if kind == "bool":
            return self.flags[name]
        if kind == "float":
            return FLOATS.get(name, ANY_FLOAT)
        if name in COUNTS:
            return min((COUNTS[name], *self.sizes.values()))
        return INTS.get(name, ANY_INT)

    def values(self, tensor: str, device: torch.device | str) -> Tensor:
        """Contiguous and random: floats normal, integers 0 or 1, or 0 alone where a size is 1: legal as indices."""
        shape, dtype = self.shape(tensor), self.dtype(tensor)
        if dtype.is_floating_point:
            found = torch.randn(shape, device=device).to(dtype)
            found = found.abs() if tensor in POSITIVE else torch.ones_like(found) if tensor in COUNTERS else found
        else:
            found = torch.randint(0, min((2, *self.sizes.values())) or 1, shape, device=device).to(dtype)
        return found.sort().values if tensor in SORTED else found

    def arguments(self, device: torch.device | str) -> list[Any]:
        """Arguments in the order of the schema."""
        return [self._argument(name, spec, device) for name, spec in self.signature.params.items()]

    def _argument(self, name: str, spec: Any, device: torch.device | str) -> Any:
        if not isinstance(spec, TensorSpec):
            return self.number(name)
        if spec.is_list:
            return [self.values(name, device) for _ in range(self.places)]
        return self.values(name, device)


def signature_of(op: GeneratedOp) -> Signature:
    """The signature as it was declared. Raises ValueError where a size is an expression, which says too little to make
    up a tensor."""
    texts = {p.name: op.meta["signature"][p.name] for p in op.params}
    try:
        return parse({**texts, **op.meta.get("variables", {})}, list(texts))
    except SignatureError as error:
        raise ValueError(f"tk.{op.name}: no inputs can be made up for it: {error}") from None


def widest(signature: Signature) -> TensorSpec:
    """The tensor whose shape says most of a call's sizes: of those with ``...``, the first with most letters."""
    return max(signature.tensors.values(), key=lambda spec: (spec.leading, len(spec.sizes)))


def of_shape(
    op: GeneratedOp, shape: Sequence[int], dtype: str, flags: Mapping[str, bool] | None = None, **sizes: int
) -> Example:
    """The call whose widest tensor has this shape. Of lists the first number says how many tensors there are, all of
    the shape behind it.

    Args:
        dtype: of the signature's variables that may have it; another has its first.
        flags: of bools; those not given are false.
        sizes: of letters that the widest tensor lacks; those not given are 64.

    Raises:
        ValueError: the op has no such shape or dtype.
    """
    signature = signature_of(op)
    spec = widest(signature)
    rank = len(spec.sizes)
    if op.takes_lists and not shape:
        raise ValueError(f"tk.{op.name} takes lists: a shape is how many tensors, then their sizes, 64x4096")
    places, shape = (shape[0], shape[1:]) if op.takes_lists else (1, shape)
    if len(shape) < rank or (len(shape) > rank and not spec.leading):
        raise ValueError(f"tk.{op.name}: its largest tensor is {spec}, the shape given is {list(shape)}")
    front, declared = tuple(shape[: len(shape) - rank]), tuple(shape[len(shape) - rank :])
    known = {letter: n for letter, n in zip(spec.sizes, declared, strict=True) if isinstance(letter, str)} | sizes
    known = dict.fromkeys(signature.letters, UNSAID) | _solved(signature, spec, declared, known) | known
    if (found := tuple(spec.shape(known))) != declared:
        raise ValueError(f"tk.{op.name}: its largest tensor is {spec}, which {list(declared)} is not: {list(found)} is")
    dtypes = {variable: dtype if dtype in allowed else allowed[0] for variable, allowed in signature.variables.items()}
    if dtypes and dtype not in dtypes.values():
        takes = "; ".join(f"{variable} is {', '.join(allowed)}" for variable, allowed in signature.variables.items())
        raise ValueError(f"tk.{op.name}: {takes}, not {dtype}")
    values = {name: bool((flags or {}).get(name)) for name in signature.flags}
    return Example(op, signature, dtypes, front, known, values, places)


def _solved(
    signature: Signature, spec: TensorSpec, declared: Sequence[int], known: Mapping[str, int]
) -> dict[str, int]:
    """The letters that stand only inside of an expression of the widest tensor's sizes."""
    found = dict(known)
    for letter, name, d, factor, rest in signature.solved():
        if signature.tensors[name] == spec and factor.evaluate(found):
            found[letter] = (declared[d] - rest.evaluate(found)) // factor.evaluate(found)
    return found


def asked_for(what: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> Iterator[Example]:
    """The calls that a command names: every op at every shape and dtype; a bool is false.

    Args:
        what: names of ops, or "all"; and shapes ("32768x4096"), in any order.
        shapes: where none is given; of lists LIST_SHAPES.

    Raises:
        ValueError: there is no such op, or it has no such shape or dtype; "all" are those that have, and ops of lists
            where no shape is given.
    """
    names = [text for text in what if not text[0].isdigit()]
    given = [read_shape(text) for text in what if text[0].isdigit()]
    for name in register.names() if "all" in names else names:
        op = register.find(name)
        if op is None:
            known = register.names()
            hint = did_you_mean(name, known, 0.4) or f"there are {', '.join(known) or 'none'}"
            if name.startswith("-"):
                hint = "a shape is written as 32768x4096, and an argument of a function by its name, as dim=-1"
            raise ValueError(f"tk has no generated op {name!r}; {hint}")
        if "all" in names and op.takes_lists and given:
            continue  # the first number would be so many tensors
        for shape, dtype in itertools.product(given or (LIST_SHAPES if op.takes_lists else shapes), dtypes):
            try:
                yield of_shape(op, shape, dtype)
            except (ValueError, errors.Error):
                if "all" not in names:
                    raise


def kinds(op: GeneratedOp) -> Iterator[tuple[dict[str, str], dict[str, bool]]]:
    """Every choice of dtypes and flags: what the op has a graph for. A flag that a graph does not name is false."""
    flags = dict.fromkeys((p.name for p in op.params if p.kind == "bool"), False)
    for graph in op.meta["graphs"]:
        yield dict(graph["dtypes"]), flags | graph.get("flags", {})


def bytes_moved(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """Every element of the arguments read once and every element of the outputs written once."""
    return sum(x.numel() * x.element_size() for x in lists.tensors_of((*args, *outputs)))


def overwritten(op: GeneratedOp) -> set[str]:
    """The arguments that are written and of which nothing but a size is read before."""
    nodes = op.meta["graphs"][0]["nodes"]
    name_of = {n["name"]: n["args"][0] for n in nodes if n["op"] == "input"}
    read: set[str] = set()
    for n in nodes:
        args = n["args"][1:] if n["op"] in ("aten.copy_.default", "aten.sym_size.int") else n["args"]
        leaves = tree_leaves((args, n["kwargs"]), is_leaf=lambda x: isinstance(x, dict) and "ref" in x)
        read.update(name_of.get(x["ref"], "") for x in leaves if isinstance(x, dict))
    return {p.name for p in op.params if p.mutated} - read


def read_shape(text: str) -> tuple[int, ...]:
    """The shape that a text like "32768x4096" says. Raises ValueError."""
    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise ValueError(f"{text!r} is no shape: write 32768x4096")
    return tuple(map(int, text.split("x")))


def listed(returned: Any) -> list[Tensor]:
    """What an op returned, as a list."""
    if returned is None:
        return []
    return [returned] if isinstance(returned, Tensor) else list(returned)


__all__ = [
    "Example",
    "asked_for",
    "bytes_moved",
    "kinds",
    "listed",
    "of_shape",
    "overwritten",
    "read_shape",
    "signature_of",
    "widest",
]
