"""Some variant takes every size: those of the layout that asks for nothing. Nothing runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import host
import ops
import pytest
import seeds
import torch
from package_ops import WITHOUT_LISTS
from torch import Tensor

from tk.codegen.family import Generated, generate
from tk.codegen.tile import STRIDED
from tk.generated import op
from tk.generated.declare import Declared
from tk.generated.signature import DTYPES, NumberSpec, Signature

SEED = seeds.seed("TK_EVERY_SIZE_SEED")
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 33, 64, 65)  # about the lengths at which settings change
CALLS = 24
MOST_ELEMENTS = 1 << 17

# Reductions of some of the dimensions beside reductions of others: launches of different tiles share a plan.
SEVERAL_REDUCTIONS: dict[str, Callable[[Tensor], object]] = {
    "centred twice": lambda x: x - x.mean(-2, keepdim=True) - x.mean(-1, keepdim=True) + x.mean((-2, -1), keepdim=True),
    "rows, then all": lambda x: (x.amax(-1), x.amax((-2, -1))),
    "columns, then all": lambda x: (x.sum(-2), x.sum((-2, -1))),
    "everything": lambda x: (x.sum(0), x.sum(1), x.sum(2), x.sum()),
    "pairs of dimensions": lambda x: (x.sum((0, 1)), x.sum((1, 2)), x.sum((0, 2))),
    "rows of centred columns": lambda x: (x - x.mean(-2, keepdim=True)).square().sum(-1),
    "normalised both ways": lambda x: x.softmax(-1) * x.softmax(-2),
    "running sums and sums": lambda x: (x.cumsum(-1), x.cumsum(-2), x.sum((-2, -1))),
}


def of_several(name: str) -> Declared:
    fn = SEVERAL_REDUCTIONS[name]

    def whole(x):
        return fn(x)

    return op(x="fp32[M, N, K]", grad=True)(whole)


DECLARED: dict[str, Declared] = {
    **WITHOUT_LISTS,
    **{name: x for name, x in vars(ops).items() if isinstance(x, Declared)},
    **{name: of_several(name) for name in SEVERAL_REDUCTIONS},
}
DIFFERENTIATED = {name for name, declared in DECLARED.items() if declared.grad}


def arguments(signature: Signature, draw: random.Random) -> dict[str, Any]:
    """Zeros of sizes and dtypes that are drawn."""
    while True:
        values = {letter: draw.choice(SIZES) for letter in signature.letters}
        leading = draw.choice(((), (1,), (3,), (17,), (2, 9)))
        dtypes = {variable: draw.choice(those) for variable, those in signature.variables.items()}
        shapes = {name: (*(leading if spec.leading else ()), *spec.shape(values))
                  for name, spec in signature.tensors.items()}  # fmt: skip
        if max(map(torch.Size.numel, map(torch.Size, shapes.values())), default=0) <= MOST_ELEMENTS:
            break
    found: dict[str, Any] = {}
    for name, spec in signature.params.items():
        if isinstance(spec, NumberSpec):
            found[name] = {"int": 1, "float": 0.5, "bool": draw.random() < 0.5}[spec.kind]
        else:
            found[name] = torch.zeros(shapes[name], dtype=DTYPES[dtypes.get(spec.dtype, spec.dtype)])
    return found


def refused(made: Generated, draw: random.Random) -> Iterator[object]:
    """Calls of which no variant of that layout says that it may run."""
    n_planned = 0
    for _ in range(CALLS):
        args = arguments(made.signature, draw)
        call = host.Call(made, args)
        try:
            graph, _ = call.seen
        except ValueError as error:  # a condition of the function's
            assert "must" in str(error) or "would have a size" in str(error), error
            continue
        n_planned += 1
        settings = [(STRIDED, setting, way) for way in graph.by_way for setting in made.choices(graph, STRIDED, way)]
        if not any(call.prepared(variant) for variant in settings):
            yield {name: tuple(x.shape) if isinstance(x, Tensor) else x for name, x in args.items()}
    assert n_planned


@pytest.mark.parametrize("name", sorted(DECLARED))
def test_forward(name: str) -> None:
    declared = DECLARED[name]
    made = generate(declared.fn, declared.signature, "made")
    print(f"TK_EVERY_SIZE_SEED={SEED}")
    assert not list(refused(made, random.Random(f"{SEED} {name}")))


@pytest.mark.parametrize("name", sorted(DIFFERENTIATED))
def test_backward(name: str) -> None:
    declared = DECLARED[name]
    made = generate(declared.fn, declared.signature, "made", declared.grad).backward
    assert made is not None
    print(f"TK_EVERY_SIZE_SEED={SEED}")
    assert not list(refused(made, random.Random(f"{SEED} {name} backward")))
