"""Writes at indices that are smaller than their source, with gradients, and classes that are none: by every variant,
against torch of the source narrowed to the index."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import backwards
import host
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import InterpreterError

from tk.codegen.family import Generated, generate
from tk.generated import op

WRITES: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "scatter": lambda x, at, y, d: x.scatter(d, at, y),
    "scatter_add": lambda x, at, y, d: x.scatter_add(d, at, y),
    "by name": lambda x, at, y, d: torch.scatter_add(x, dim=d, index=at, src=y),
    "in place": lambda x, at, y, d: (x * 2).scatter_add_(d, at, y),
    "amax": lambda x, at, y, d: x.scatter_reduce(d, at, y, "amax"),
    "sum without self": lambda x, at, y, d: x.scatter_reduce(d, at, y, "sum", include_self=False),
    "of a product": lambda x, at, y, d: torch.scatter_add(x, d, at, y * y),
}
# Letters of x, of the index and of the source, in any order of declaration: the index lies within both.
SHAPES = (("M, N", "K, N", "L, N", 0), ("M, N", "K, J", "M, L", 1), ("M, N", "K, J", "L, I", -1), ("N", "K", "L", 0))
SIZES = (
    {"M": 4, "N": 5, "K": 2, "J": 3, "L": 3, "I": 4},
    {"M": 2, "N": 3, "K": 2, "J": 3, "L": 3, "I": 3},
    {"M": 1, "N": 1, "K": 0, "J": 1, "L": 1, "I": 1},
)


def narrowed(y: Tensor, at: Tensor) -> Tensor:
    return y[tuple(slice(0, n) for n in at.shape)]


def _shape(letters: str, sizes: dict[str, int]) -> list[int]:
    return [sizes[x.strip()] for x in letters.split(",")]


def distinct(at: list[int], d: int, size: int, generator: torch.Generator) -> Tensor:
    """Places of which none is written twice: which of several stays is nobody's choice."""
    order = torch.rand([*(n for i, n in enumerate(at) if i != d % len(at)), size], generator=generator).argsort(-1)
    return order.movedim(-1, d)[tuple(slice(0, n) for n in at)].contiguous()


@pytest.mark.parametrize("seed", range(8))
def test_gradients(seed: int) -> None:
    draw = random.Random(seed)
    name, (x_, at_, y_, d) = list(WRITES)[seed % len(WRITES)], draw.choice(SHAPES)
    write = WRITES[name]
    order = draw.sample(["x", "at", "y"], 3)
    texts = {"x": f"fp32[{x_}]", "at": f"i64[{at_}]", "y": f"fp32[{y_}]"}

    def fn(x, at, y):
        return write(x, at, y, d)

    declared = op(**texts)(fn)
    reordered = type(declared.signature)({n: declared.signature.params[n] for n in order}, {})
    made = generate(fn, reordered, "narrow", True)
    assert made.backward is not None
    for sizes in SIZES:
        generator = torch.Generator().manual_seed(seed)
        shape = _shape(at_, sizes)
        at = distinct(shape, d, _shape(x_, sizes)[d], generator)
        args: dict[str, Any] = {"at": at}
        for n, letters in (("x", x_), ("y", y_)):
            args[n] = torch.randn(_shape(letters, sizes), generator=generator, requires_grad=True)
        expected = write(args["x"], at, narrowed(args["y"], at), d)
        grad = torch.randn(expected.shape, generator=generator)
        wanted = torch.autograd.grad(expected, [args[n] for n in order if n != "at"], grad)
        given = {n: t.detach() for n, t in args.items()}
        assert_all(made, given, [expected.detach()])
        assert_all(made.backward, given | backwards.arguments([grad], [expected]), list(wanted))


def assert_all(made: Generated, given: dict[str, Tensor], expected: list[Tensor]) -> None:
    count = 0
    for variant, found in host.run_all(made, *(given[n] for n in made.signature.params)):
        count += 1
        for one, value in zip(found, expected, strict=True):
            torch.testing.assert_close(one, value, msg=lambda m, v=variant: f"{v}: {m}")
    assert count


@pytest.mark.parametrize("classes", [1, 5, "n"])
def test_classes(classes: int | str) -> None:
    fn = (lambda x, n: F.one_hot(x, n)) if classes == "n" else (lambda x: F.one_hot(x, classes))
    texts = {"x": "i64[...]", **({"n": "int"} if classes == "n" else {})}
    made = generate(fn, op(**texts)(fn).signature, "classes")
    n = 4 if classes == "n" else classes
    numbers = [n] if classes == "n" else []
    for shape in ([], [0], [3], [2, 3]):
        x = torch.randint(0, n, shape)
        for variant, (found,) in host.run_all(made, x, *numbers):
            assert torch.equal(found, F.one_hot(x, n)), (shape, variant)
    for wrong in (-1, n, -(2**40)):
        with pytest.raises(InterpreterError, match="out of bounds"):
            list(host.run_all(made, torch.tensor([0, wrong, 0]), *numbers))
