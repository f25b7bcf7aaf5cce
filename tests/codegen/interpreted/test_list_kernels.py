"""Kernels over lists of tensors, on a table as csrc/ops/lists.cpp makes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import host
import pytest
import torch
from torch import Tensor

from tk.aot.expr import Problem, TensorValue, evaluate_locals
from tk.codegen.lists import ALIGNED, ANY, GeneratedLists, generate_lists
from tk.codegen.scheduling.lists import CHUNK
from tk.generated import op
from tk.kernels.generated import optimizers

ADAMW = optimizers.adamw


def table(columns: list[list[Tensor]], sizes: list[int]) -> tuple[Tensor, int]:
    firsts, chunks = [], 0
    for n in sizes:
        firsts.append(chunks)
        chunks += -(-n // CHUNK)
    words = [*firsts, *sizes, *(x.data_ptr() for column in columns for x in column)]
    return torch.tensor(words, dtype=torch.int64), chunks


def run(made: GeneratedLists, layout: str, columns: list[list[Tensor]], numbers: list[Any]) -> bool:
    """False where the layout asks for more than the tensors have."""
    sized = next(i for i, s in enumerate(made.signature.tensors.values()) if s.leading)
    words, chunks = table(columns, [x.numel() for x in columns[sized]])
    shape = (len(columns[0]), chunks)
    aligned = [16 if all(x.data_ptr() % 16 == 0 for x in column) else 1 for column in columns]
    values = [TensorValue(shape, (a, 1), host.NUMBERS[c[0].dtype]) for a, c in zip(aligned, columns, strict=True)]
    ints = tuple(int(x) for x in numbers if isinstance(x, int))
    problem = Problem(values, ints, 0, host.H200)
    problem = replace(problem, locals=evaluate_locals(made.op.locals.values(), problem))
    assert all(c.holds.evaluate(problem) for c in made.op.checks)
    plan = made.plan(made.graphs[problem.locals[0]], layout)
    if not all(c.holds.evaluate(problem) for c in plan.constraints):
        return False
    floats = [x for x in numbers if isinstance(x, float)]
    host.launch(plan, problem, [words] * len(columns), floats, [x for column in columns for x in column])
    return True


@pytest.mark.parametrize("layout", [ALIGNED, ANY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_adamw(dtype: torch.dtype, layout: str) -> None:
    """Places of no elements, of one chunk and a bit, of whole chunks; more of them than a block looks at."""
    sizes = [3, 0, CHUNK, CHUNK + 5, 0, 2 * CHUNK, 1, 0]
    columns = [[torch.randn(n).to(dtype).abs() for n in sizes] for _ in range(4)] + [[torch.tensor(2.0) for _ in sizes]]
    expected = [[x.double() if i < 4 else x.clone() for x in column] for i, column in enumerate(columns)]
    numbers = [0.125, 0.75, 0.5, 1e-6, 0.25, -1.0]
    made = generate_lists(ADAMW.fn, ADAMW.signature, "adamw", False)
    assert run(made, layout, columns, numbers)
    ADAMW.fn(*expected, *numbers)
    for column, wanted in zip(columns, expected, strict=True):
        for x, e in zip(column, wanted, strict=True):
            torch.testing.assert_close(x, e.to(x.dtype), rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-5)


def test_odd_addresses_have_the_layout_that_takes_everything() -> None:
    @op(xs="fp32[...]*", n="int")
    def add(xs, n):
        for x in xs:
            x.add_(n)

    made = generate_lists(add.fn, add.signature, "add", False)
    columns = [[torch.zeros(9)[1:], torch.zeros(4)]]
    assert not run(made, ALIGNED, columns, [3])
    assert run(made, ANY, columns, [3])
    assert all(torch.equal(x, torch.full_like(x, 3)) for x in columns[0])


def test_more_places_than_a_block_looks_at() -> None:
    @op(xs="fp32[...]*", ys="fp32[...]*")
    def add(xs, ys):
        for x, y in zip(xs, ys, strict=True):
            x.add_(y)

    made = generate_lists(add.fn, add.signature, "add", False)
    n = 1030
    columns = [[torch.full((1,), float(i)) for i in range(n)], [torch.ones(1) for _ in range(n)]]
    assert run(made, ANY, columns, [])
    assert [x.item() for x in columns[0]] == [i + 1.0 for i in range(n)]


@pytest.mark.parametrize("layout", [ALIGNED, ANY])
def test_the_debug_variant_says_what_is_not_finite(layout: str, capsys: pytest.CaptureFixture) -> None:
    """In whole chunks, in those that are cut, and in what is written once for each place."""

    @op(xs="fp32[...]*", steps="fp32[]*")
    def halve(xs, steps):
        for x, step in zip(xs, steps, strict=True):
            x.div_(2)
            step.add_(1)

    made = generate_lists(halve.fn, halve.signature, "halve", False, debug=True)
    for place, name in ((0, "xs"), (1, "xs"), (None, "steps"), ("none", "")):
        columns = [[torch.ones(CHUNK), torch.ones(5)], [torch.tensor(1.0), torch.tensor(2.0)]]
        if place is None:
            columns[1][1].fill_(float("inf"))
        elif place != "none":
            columns[0][place][3] = float("nan")
        assert run(made, layout, columns, [])
        said = capsys.readouterr().out
        assert name == "" or f"tk.halve: NaN or infinity in {name}, so many times in this program: " in said
        assert said.count("tk.halve") == (1 if name else 0), said


# --- Results, what all places share, and reductions ---


def results(made: GeneratedLists, layout: str, args: dict[str, Any]) -> list[Any] | None:
    """What the op returns, the tensors in `args` being written; None where the layout asks for more than they have."""
    tensors = list(made.signature.tensors)
    numbers = [args[n] for n in made.signature.numbers]
    like = next((args[n] for n in made.lists if made.signature.tensors[n].leading), args[made.lists[0]])
    dtypes = [node.meta["val"].dtype for node in made.first.new]
    shapes = {"each": lambda x: x.shape, "place": lambda x: ()}
    out = [torch.full((), 77, dtype=d) if kind == "all" else [torch.full(shapes[kind](x), 77, dtype=d) for x in like]
           for kind, d in zip(made.results, dtypes, strict=True)]  # fmt: skip
    everything = [*(args[n] for n in tensors), *out]
    columns = [x for x in everything if isinstance(x, list)]
    words, chunks = table(columns, [x.numel() for x in like])
    values, given = [], []
    for x in everything:
        aligned = 16 if isinstance(x, list) and all(t.data_ptr() % 16 == 0 for t in x) else 1
        values.append(TensorValue((len(x), chunks), (aligned, 1), host.NUMBERS[x[0].dtype]) if isinstance(x, list)
                      else TensorValue((), (), host.NUMBERS[x.dtype]))  # fmt: skip
        given.append(words if isinstance(x, list) else x)
    ints = tuple(int(x) for x in numbers if isinstance(x, int))
    problem = Problem(values, ints, 0, host.H200)
    problem = replace(problem, locals=evaluate_locals(made.op.locals.values(), problem))
    plan = made.plan(made.graphs[problem.locals[0]], layout)
    if not all(c.holds.evaluate(problem) for c in plan.constraints):
        return None
    floats = [x for x in numbers if isinstance(x, float)]
    host.launch(plan, problem, given, floats, [x for column in columns for x in column])
    return out


def clip(grads, most):
    total = torch.stack([g.norm() for g in grads]).norm()
    scale = (most / (total + 1e-6)).clamp(max=1)
    for g in grads:
        g.mul_(scale)
    return total


def times(xs, ys, a):
    return [x * a + y for x, y in zip(xs, ys, strict=True)], [(x > y).any() for x, y in zip(xs, ys, strict=True)]


def shared(xs, by):
    for x in xs:
        x.mul_(by)


def largest(xs):
    sums = torch.stack([x.square().sum() for x in xs])
    return [x.mean() for x in xs], sums.amax(), sums.log().sum()


def centred(xs):
    return [(x - x.mean()) * torch.rsqrt(x.var() + 1e-3) for x in xs]


def counted(xs):
    torch._foreach_add_(xs, 1)
    return torch.stack(torch._foreach_norm(xs)).sum()


SIZES = (CHUNK + 5, 3, CHUNK, 2 * CHUNK + 1)
FUNCTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "clip": (clip, {"grads": "T[...]*", "most": "float"}),
    "times": (times, {"xs": "T[...]*", "ys": "T[...]*", "a": "float"}),
    "shared": (shared, {"xs": "T[...]*", "by": "fp32[]"}),
    "largest": (largest, {"xs": "T[...]*"}),
    "centred": (centred, {"xs": "T[...]*"}),
    "counted": (counted, {"xs": "T[...]*"}),
}


@pytest.mark.parametrize("layout", [ALIGNED, ANY])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_results_and_reductions(name: str, dtype: str, layout: str) -> None:
    fn, texts = FUNCTIONS[name]
    made = generate_lists(fn, op(**texts, T=dtype)(fn).signature, name, False)
    args: dict[str, Any] = {}
    for param, text in texts.items():
        of = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        args[param] = 0.5 if text == "float" else torch.tensor(1.5) if text == "fp32[]" else [
            torch.randn(n).to(of) for n in SIZES
        ]  # fmt: skip
    exact = {n: [x.double() for x in v] if isinstance(v, list) else v for n, v in args.items()}
    expected = fn(**exact)
    found = results(made, layout, args)
    assert found is not None
    wanted = [] if expected is None else list(expected) if isinstance(expected, tuple) else [expected]
    for a, e in zip([*found, *args.values()], [*wanted, *exact.values()], strict=True):
        for x, y in zip(a if isinstance(a, list) else [a], e if isinstance(e, list) else [e], strict=True):
            if isinstance(x, Tensor):
                torch.testing.assert_close(x, y.to(x.dtype), rtol=1e-2 if dtype == "bf16" else 1e-4, atol=1e-2)
