"""Random functions as ops, against torch: their recorded graphs, and their kernels under Triton's interpreter.

Each run draws other functions. A failure prints the function as a file for ``tk build``, and what it was called with;
TK_RANDOM_FUNCTIONS_SEED, which is printed too, draws the same ones again, TK_RANDOM_FUNCTIONS says how many, and with
TK_RANDOM_FUNCTIONS_SHRINK=1 hypothesis looks for the shortest one that fails.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import host
import pytest
import random_judgement as judgement
import random_judges as judges
import seeds
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from random_functions import Call, Function, calls, function

from tk.codegen.family import Generated
from tk.codegen.ways import Graph

SHARDS = 12
# A third where others that are many alike are drawn: every run has functions of its own anyway.
COUNT = int(os.environ.get("TK_RANDOM_FUNCTIONS") or ("300" if os.environ.get("TK_DRAWN", "all") == "all" else "100"))
# Of each function: more of them find more than more of each.
CALLS, VARIANTS = 1, 1
SEED = seeds.seed("TK_RANDOM_FUNCTIONS_SEED")
# Shrinking a failure takes minutes: on demand, with the seed that failed.
PHASES = [Phase.generate, *([Phase.shrink] if os.environ.get("TK_RANDOM_FUNCTIONS_SHRINK") == "1" else [])]
REFUSED: list[str] = []


@pytest.fixture(autouse=True)
def sorted_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    host.sort_by_numpy(monkeypatch)


def judge(random: Random, folder: Path) -> None:
    """Raises Wrong for a function that is not as torch has it, or that cannot be built."""
    drawn = function(random)
    call = None
    try:
        fn = judges.compile_plain(drawn, folder)
        op = judges.built(drawn, fn)
        if op is None:
            REFUSED.append(drawn.text)
            return
        for n, call in enumerate(calls(random, drawn, CALLS)):
            problems = list(_problems(op, drawn, fn, call, random, n == 0))
            if problems:
                raise judges.Wrong("\n".join(problems))
    except Exception as error:
        text = str(error) if isinstance(error, judges.Wrong) else traceback.format_exc()
        raise judges.Wrong(f"TK_RANDOM_FUNCTIONS_SEED={SEED}\n{judges.described(drawn, call, text)}") from None


def _problems(op: Generated, drawn: Function, fn: Callable[..., Any], call: Call, random: Random,
              is_first: bool) -> Iterator[str]:  # fmt: skip
    args = call.arguments(drawn.params)
    named = dict(zip((p.name for p in drawn.params), args, strict=True))
    try:
        expected = judgement.expected_results(fn, args)
    except (RuntimeError, IndexError, ValueError):
        return  # torch refuses these sizes
    relative = judgement.tolerance(fn, args)
    yield from judgement.compare("recorded graph", relative, judges.recorded(op, named, expected.like), expected)
    yield from _of_kernels(op, relative, named, expected, random, is_first)
    if op.backward is None:
        return
    generator = torch.Generator().manual_seed(call.seed)
    results = [x.to(like.dtype) for x, like in zip(expected.exact, expected.like, strict=True)]
    grads = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in expected.like if x.is_floating_point()]
    try:
        expected = judgement.expected_gradients(fn, args, grads)
    except RuntimeError:
        return  # torch has no gradient of it, as of a loss of two dtypes
    named = judges.arguments_of_backward(op, named, grads, results)
    yield from _of_kernels(op.backward, relative, named, expected, random, is_first)


def _of_kernels(op: Generated, relative: float, named: Mapping[str, Any], expected: judgement.Expected,
                random: Random, is_first: bool) -> Iterator[str]:  # fmt: skip
    ints = [int(named[n]) for n in op.op.ints]
    try:
        graph = _graph_of(op, named, ints)
        call = host.Call(op, dict(named))
        count = 0
        for variant in judges.some_variants(op, graph, random):
            found = call.run(variant) if count < VARIANTS else None
            if found is not None:
                count += 1
                layout, setting, way = variant
                name = f"{op.name}: {layout.name} {way} {setting.name}"
                yield from judgement.compare(name, relative, found, expected)
        if not count:
            yield f"{op.name}: no variant takes the call"
    except ValueError as error:  # a check of the op's: sizes that it does not serve
        if is_first or "must" not in str(error):
            yield f"{op.name}: refused: {error}"


def _graph_of(op: Generated, named: Mapping[str, Any], ints: Sequence[int]) -> Graph:
    seen, *_ = host.canonical(op, [named[n] for n in op.signature.tensors])
    return op.graphs[host.describe(op, seen, ints).locals[0]]


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_functions(shard: int, tmp_path: Path) -> None:
    @seed(SEED * SHARDS + shard)
    @settings(max_examples=max(1, COUNT // SHARDS), deadline=None, database=None, print_blob=False, phases=PHASES,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.randoms(use_true_random=False))
    def run(random: Random) -> None:
        judge(random, tmp_path)

    run()
