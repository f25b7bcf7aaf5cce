"""Along which dimensions generated ops may be sharded: what is derived of a function's kernels, held against the
function itself on parts of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import random_judges as judges
import seeds
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from random_functions import calls, function
from random_judgement import results_of, tolerance, widened
from torch import Tensor

from tk.codegen.family import Generated, generate_any
from tk.codegen.sharding import sharded
from tk.generated import op

SEED = seeds.seed("TK_SHARDED_FUNCTIONS_SEED")
COUNT = 40


def found(declare: Callable[..., Any], fn: Callable[..., Any]) -> Any:
    """The rules of the first graph."""
    declared = declare(fn)
    made = generate_any(declared.fn, declared.signature, declared.name, declared.grad)
    assert isinstance(made, Generated)
    return sharded(made.signature, made.graphs[0].trace, made.graphs[0].kernels)


def _write_sum(total: Tensor, x: Tensor) -> None:
    total.copy_(x.sum(0))


def _write(x: Tensor, y: Tensor) -> None:
    x.mul_(y)


ROWS = [["...", None], ["..."]]  # of x [..., N] and weight [N]
CASES: dict[str, tuple[dict[str, str], Callable[..., Any], Any]] = {
    "an element": (dict(x="fp32[..., N]"), lambda x: x.exp(), [[["..."], ["..."]], [[-1], [-1]]]),
    "a row": (dict(x="fp32[..., N]"), lambda x: x.softmax(-1), [[["..."], ["..."]]]),
    "a sum of a row": (dict(x="fp32[..., N]"), lambda x: x.sum(-1), [[["..."], ["..."]], [[-1], ["sum"]]]),
    "a largest of a row": (dict(x="fp32[..., N]"), lambda x: x.amax(-1), [[["..."], ["..."]], [[-1], ["max"]]]),
    "a mean, which takes the size": (dict(x="fp32[..., N]"), lambda x: x.mean(-1), [[["..."], ["..."]]]),
    "a scaled sum": (dict(x="fp32[M, N]"), lambda x: -2 * x.sum(0), [[[-2], ["sum"]], [[-1], [-1]]]),
    "a root of a sum": (dict(x="fp32[M, N]"), lambda x: x.sum(0).sqrt(), [[[-1], [-1]]]),
    "a sum beside what is whole": (dict(x="fp32[M, N]", w="fp32[N]"), lambda x, w: x.sum(0) + w, [[[-1, -1], [-1]]]),
    "two sums": (dict(x="fp32[M]", y="fp32[M]"), lambda x, y: x.sum() - y.sum(), [[[-1, -1], ["sum"]]]),
    "a sum and a maximum": (dict(x="fp32[M]"), lambda x: (x.sum(), x.amax()), [[[-1], ["sum", "max"]]]),
    "a scan": (dict(x="fp32[M, N]"), lambda x: x.cumsum(0), [[[-1], [-1]]]),
    "a weight of a row": (dict(x="fp32[..., N]", w="fp32[N]"), lambda x, w: x * w, [ROWS, [[-1, -1], [-1]]]),
    "a transposed one": (dict(x="fp32[M, N]"), lambda x: x.t(), [[[-2], [-1]], [[-1], [-2]]]),
    "backwards": (dict(x="fp32[M, N]"), lambda x: x.flip(0), [[[-1], [-1]]]),
    "what lies beside": (dict(x="fp32[M, N]"), lambda x: x.roll(1, 0), [[[-1], [-1]]]),
    "a sum in place": (dict(total="fp32[N]", x="fp32[M, N]"), _write_sum, [[[-1, -1], []]]),
    "an element in place": (dict(x="fp32[N]", y="fp32[N]"), _write, [[[-1, -1], []]]),
    "rows of pairs": (
        dict(x="fp32[M, N]"), lambda x: x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), [[[-2], [-2]]],
    ),
    "a size twice": (dict(x="fp32[N, N]"), lambda x: x + x.t(), []),
    "a size in another": (dict(x="fp32[2*N]", y="fp32[N]"), lambda x, y: x.reshape(2, -1).sum(0) * y, []),
    "an index": (dict(x="fp32[K, N]", i="i64[M]"), lambda x, i: x[i], [[[-1, None], [-1]], [[None, -1], [-2]]]),
    "an outer sum": (
        dict(x="fp32[M]", y="fp32[N]"), lambda x, y: x[:, None] + y, [[[-1, None], [-2]], [[None, -1], [-1]]],
    ),
    "positions": (dict(x="fp32[M]"), lambda x: x * torch.arange(x.shape[0], device=x.device), []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_of_a_function(name: str) -> None:
    texts, fn, expected = CASES[name]
    names = ", ".join(texts)
    scope: dict[str, Any] = {"torch": torch, "fn": fn}
    exec(f"def sharded_case({names}):\n    return fn({names})", scope)
    assert sorted(found(op(**texts), scope["sharded_case"]), key=str) == sorted(expected, key=str)


# --- Random functions ---


def split(x: Any, place: Any, leading: int | None) -> list[Any]:
    """On each of two ranks."""
    if place is None or not isinstance(x, Tensor):
        return [x, x]
    dim = leading if place == "..." else place
    assert dim is not None
    first = x.shape[dim] // 2 + 1 if x.shape[dim] > 1 else x.shape[dim]
    return list(x.split([first, x.shape[dim] - first], dim))


def together(parts: Sequence[Tensor], place: Any, leading: int | None) -> Tensor:
    if place is None:
        torch.testing.assert_close(*parts, equal_nan=True)
        return parts[0]
    if isinstance(place, str) and place != "...":
        return {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[place](*parts)
    return torch.cat(list(parts), leading if place == "..." else place)


def judge(random: Random, folder: Path) -> tuple[int, list[str]]:
    """How many rules of a function were tried, and what is wrong."""
    drawn = function(random)
    fn = judges.compile_plain(drawn, folder)
    made = judges.built(drawn, fn)
    (call,) = calls(random, drawn, 1)
    args = call.arguments(drawn.params)
    if made is None:
        return 0, []
    flags = {p.name: x for p, x in zip(drawn.params, args, strict=True) if p.kind == "flag"}
    graph = next(g for g in made.graphs if dict(g.trace.flags) == flags)
    tensors = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
    tried, problems, exact = 0, [], widened(args)
    close = 1e-7 if tolerance(fn, args) < 1e-3 else 1e-2
    for inputs, outputs in sharded(made.signature, graph.trace, graph.kernels) or ():
        for leading in range(len(call.leading)) if "..." in inputs else [None]:
            places = dict(zip(tensors, inputs, strict=True))
            ranks = zip(*(split(x, places.get(i), leading) for i, x in enumerate(exact)), strict=True)
            try:
                expected, found = results_of(fn, exact), [results_of(fn, rank) for rank in ranks]
            except (RuntimeError, IndexError, ValueError):
                continue  # torch refuses these sizes, or those of a part
            tried += 1
            for n, (place, result) in enumerate(zip(outputs, expected, strict=True)):
                mine = together([rank[n] for rank in found], place, leading).double()
                if not torch.allclose(mine, result.double(), rtol=close, atol=close, equal_nan=True):
                    said = f"{inputs} -> {outputs}, leading dimension {leading}, result {n}"
                    problems.append(f"{said}: {mine}, must be {result}\n{drawn.source}\n{call}")
    return tried, problems


def test_of_random_functions(tmp_path: Path) -> None:
    tried = 0

    @hypothesis_seed(SEED)
    @settings(max_examples=COUNT, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.randoms(use_true_random=False))
    def run(random: Random) -> None:
        nonlocal tried
        count, problems = judge(random, tmp_path)
        tried += count
        assert not problems, f"TK_SHARDED_FUNCTIONS_SEED={SEED}\n" + "\n".join(problems)

    run()
    assert tried > COUNT // 4
