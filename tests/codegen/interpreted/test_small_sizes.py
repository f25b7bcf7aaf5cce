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
    "two to five": lambda x: x[:, 2:5].add_(1),
    "the last three": lambda x: x[:, -3:].mul_(2),
    "before the last": lambda x: x[:, -3:-1].mul_(2),
    "the first": lambda x: x[:, :1].add_(1),
    "some of both": lambda x: x[1:3, -2:].zero_(),
    "every other of some": lambda x: x[:, 1:6:2].add_(1),
    "of the transposed, some": lambda x: x.t()[1:4].add_(1),
    "from another": lambda x: x[:, -2:].copy_(x[:, -2:].flip(-1)),
    "halves": lambda x: [piece.add_(n) for n, piece in enumerate(x.chunk(2, -1))] and None,
}
# Those for which torch has a result at every size.
CLAMPED: dict[str, Callable[[Tensor], object]] = {
    "one column": lambda x: x[:, 1:2] + 1,
    "the first column": lambda x: x[:, :1] * 2,
    "two columns": lambda x: x[:, :2].sum(-1),
    "the last two": lambda x: x[-2:] * 2,
    "five": lambda x: x[:, 2:5] + 1,
    "of a slice": lambda x: x[:, 1:4][:, -2:] + 1,
    "of the middle": lambda x: x[:, 1:-1] * 2,
    "before the last": lambda x: x[:, -3:-1] * 2,
    "across": lambda x: x[:, -3:2] * 2,
    "with steps": lambda x: x[:, 1:8:3] + 1,
    "the mean of the rest": lambda x: x[:, 1:].mean(-1),
    "beside others": lambda x: torch.cat([x[:, 2:], x], 1),
    "all in a row": lambda x: x[:, 2:].reshape(-1) + 1,
    "turned round": lambda x: x[:, -3:].flip(-1),
    "a running sum": lambda x: x[:, -3:].cumsum(-1),
    "neighbours": lambda x: x[:, 1:] - x[:, :-1],
    "of a wider one": lambda x: torch.cat([x, x], 1)[:, 1:4] * 2,
}
CUT: dict[str, Callable[[Tensor], object]] = {
    "a place": lambda x: x[:, 1] + 1,
    "the first": lambda x: x[0] * 2,
    "the last but one": lambda x: x[:, -2] * x[:, -1],
    "three": lambda x: x[:, -3:].amax(-1),
    "broadcast": lambda x: x - x[:, :1],
    "in one": lambda x: x[:, 1:2].squeeze(1),
    "unpacked": lambda x: torch.stack(x[:, 1:4].unbind(1)),
    "seen as a number": lambda x: x[:, :2].reshape(2, -1) if x[:, :2].shape[1] == 2 else x,
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
        if name == "halves" and len(torch.empty(shape).chunk(2, -1)) < 2:
            continue  # eager torch has only one piece here
        x = torch.randn(shape)
        expected = results(WRITING[name], x.clone(), True)
        for variant, found in host.run_all(made, x):
            assert torch.equal(found[0], expected[0]), (shape, variant)


@pytest.mark.parametrize("name", CLAMPED)
def test_what_torch_clamps(name: str) -> None:
    made = built(CLAMPED[name], False)
    for shape in [*SIZES, (4, 6)]:
        x = torch.randn(shape)
        expected = results(CLAMPED[name], x.clone(), False)
        for variant, found in host.run_all(made, x):
            torch.testing.assert_close(found[0], expected[0], equal_nan=True, msg=f"{shape}, {variant}")


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


DIFFERENTIATED: dict[str, Callable[[Tensor], Tensor]] = {
    "the last three": lambda x: x[:, -3:].sin(),
    "two to five": lambda x: x[:, 2:5] * x[:, 2:5],
    "the rest": lambda x: x[:, 1:].sum(-1),
    "neighbours": lambda x: x[:, 1:] * x[:, :-1],
    "beside others": lambda x: torch.cat([x[:, 2:] * x[:, :-2], x], 1),
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_of_what_torch_clamps(name: str) -> None:
    fn = DIFFERENTIATED[name]

    def whole(x):
        return fn(x)

    made = generate(whole, op(x="fp32[M, N]")(whole).signature, "small", True).backward
    assert made is not None
    for shape in [*SIZES, (4, 6)]:
        x = torch.randn(shape, requires_grad=True)
        y = fn(x)
        grad = torch.randn_like(y)
        (expected,) = torch.autograd.grad(y, x, grad)
        named = {"x": x.detach(), "grad_0": grad}
        count = 0
        for variant, found in host.run_all(made, *(named[n] for n in made.signature.params)):
            torch.testing.assert_close(found[0], expected, msg=f"{shape}, {variant}")
            count += 1
        assert count
