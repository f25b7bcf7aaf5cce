"""Views and what is written into them at sizes 0 to 3: as eager torch has it, or refused with a size that must be
more. What torch's internals ask of contiguity is no condition."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import host
import pytest
import torch
from torch import Tensor

from tk.codegen.family import generate
from tk.generated import op

WRITING: dict[str, Callable[[Tensor], object]] = {
    "rest of the columns": lambda x: x[:, 1:].add_(1),
    "rest of the rows": lambda x: x[1:].mul_(2),
    "rest of both": lambda x: x[1:, 1:].add_(1),
    "of the transposed": lambda x: x.t()[1:].add_(1),
    "all but the last": lambda x: x[:, :-1].zero_(),
    "every other": lambda x: x[:, ::2].add_(1),
    "a copy": lambda x: x[1:].copy_(x[:-1].clone()),
    "halves": lambda x: [piece.add_(n) for n, piece in enumerate(x.chunk(2, -1))] and None,
}
CUT: dict[str, Callable[[Tensor], object]] = {
    "a place": lambda x: x[:, 1] + 1,
    "the first": lambda x: x[0] * 2,
    "the last but one": lambda x: x[:, -2] * x[:, -1],
    "one column": lambda x: x[:, 1:2] + 1,
    "two columns": lambda x: x[:, :2].sum(-1),
    "the last two": lambda x: x[-2:] * 2,
    "five": lambda x: x[:, 2:5] + 1,
    "three": lambda x: x[:, -3:].amax(-1),
    "a place written": lambda x: x[:, 1].add_(2),
    "pieces": lambda x: x.chunk(2, -1),
    "differences": lambda x: x.diff(),
}


def built(fn: Callable[[Tensor], object], changes: bool):
    def whole(x):
        found = fn(x)
        return None if changes else found

    return generate(whole, op(x="fp32[M, N]")(whole).signature, "small")


def results(fn: Callable[[Tensor], object], x: Tensor, changes: bool) -> list[Tensor]:
    found = fn(x)
    return [x] if changes else list(found) if isinstance(found, tuple) else [found]


SIZES = list(product(range(4), repeat=2))


@pytest.mark.parametrize("name", WRITING)
def test_what_is_written(name: str) -> None:
    made = built(WRITING[name], True)
    for shape in SIZES:
        if name == "halves" and shape[1] % 2:
            continue  # what is written to pieces of unequal sizes is refused
        x = torch.randn(shape)
        expected = results(WRITING[name], x.clone(), True)
        for variant, found in host.run_all(made, x):
            assert torch.equal(found[0], expected[0]), (shape, variant)


@pytest.mark.parametrize("name", CUT)
def test_what_is_cut_out(name: str) -> None:
    """Right, or refused."""
    changes = name == "a place written"
    made = built(CUT[name], changes)
    n_right = 0
    for shape in [*SIZES, (4, 6)]:
        x = torch.randn(shape)
        try:
            expected = results(CUT[name], x.clone(), changes)
        except (IndexError, RuntimeError):
            expected = []
        try:
            for variant, found in host.run_all(made, x):
                assert len(found) == len(expected), (shape, variant)
                assert all(map(torch.equal, found, expected)), (shape, variant)
                n_right += 1
        except ValueError as error:
            assert "must" in str(error) or "would have a size" in str(error), shape
    assert n_right
