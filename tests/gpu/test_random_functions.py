"""Random functions under ``@tk.op``, built here, against torch in fp64 on random sizes and layouts.

TK_RANDOM_FUNCTIONS: how many at most (default 300); TK_RANDOM_FUNCTIONS_SECONDS: how long to build (default 150; those
that are built by then are judged, for as long again at most); TK_RANDOM_FUNCTIONS_SEED: which;
TK_RANDOM_FUNCTIONS_REPORT: a file with a line of JSON for each function, written as they are judged (default
build/random_functions.jsonl). Every core builds, and each GPU judges what is built: many_packs.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import seeds
import torch
from torch import Tensor

import tk
from tk.generated import register

from . import random_packs
from .device import DEVICE
from .many_packs import ENDED, Many
from .op_cases import candidates

# random_packs has put tests/codegen on the path.
from random_functions import Call, Function, calls  # isort: skip
import random_judgement as judgement  # isort: skip

COUNT = int(os.environ.get("TK_RANDOM_FUNCTIONS", "300"))
SEED = seeds.seed("TK_RANDOM_FUNCTIONS_SEED")
SECONDS = float(os.environ.get("TK_RANDOM_FUNCTIONS_SECONDS", "150"))
REPORT = Path(os.environ.get("TK_RANDOM_FUNCTIONS_REPORT", "build/random_functions.jsonl"))
ARCH = os.environ.get("TK_RANDOM_FUNCTIONS_ARCH")  # to build without a GPU, and judge nothing
LARGE = 40_000  # of sizes, multiplied
MOST_REFUSED = 0.1


def test_random_functions(tmp_path: Path) -> None:
    if DEVICE != "cuda" and not ARCH:
        pytest.skip("about kernels")
    pytest.importorskip("triton", reason="building needs Triton: pip install torch-tk[build]")
    print(f"TK_RANDOM_FUNCTIONS_SEED={SEED}")
    Many("functions", COUNT, SEED, SECONDS, random_packs.__file__, _source, judge, MOST_REFUSED, ARCH).check(
        tmp_path, REPORT
    )


def _source(number: int) -> str:
    return random_packs.drawn(SEED, number, 1)[0].source


def judge(seed: int, number: int, pack: Path, folder: Path) -> str:
    """What is wrong with a function of a pack."""
    tk.load_pack(pack)
    return "\n".join(_problems(random_packs.drawn(seed, number, 1)[0], folder))


def _problems(one: Function, folder: Path) -> Iterator[str]:
    random = Random(int(one.name[2:], 16))
    fn = one.compiled(folder)
    for n, call in enumerate(calls(random, one, 4, LARGE)):
        try:
            yield from (f"{problem}\n{call}" for problem in _of_call(one, fn, call, n == 0))
        except torch.AcceleratorError as error:  # nothing runs after it
            yield f"{ENDED}: {error}\n{call}"
            return
        except Exception as error:  # what a legal call raises
            yield f"{type(error).__name__}: {error}\n{call}"


def _of_call(one: Function, fn: Any, call: Call, is_first: bool) -> Iterator[str]:
    args = [x.to(DEVICE) if isinstance(x, Tensor) else x for x in call.arguments(one.params)]
    args = [_with_strides(x, y) for x, y in zip(args, call.arguments(one.params), strict=True)]
    on_cpu = call.arguments(one.params)
    try:
        expected = judgement.expected_results(fn, on_cpu)
    except (RuntimeError, IndexError, ValueError):
        return  # torch refuses these sizes
    relative = judgement.tolerance(fn, on_cpu)
    try:
        yield from _of_configs(one, relative, args, expected)
        if one.has_grad:
            yield from _of_gradients(one, relative, fn, args, on_cpu, expected.like, call.seed)
    except ValueError as error:
        if is_first or "must" not in str(error):
            raise


def _with_strides(moved: Any, like: Any) -> Any:
    """On the device as it is laid out on the CPU, where it begins included."""
    if not isinstance(like, Tensor):
        return moved
    storage = torch.zeros(like.untyped_storage().nbytes() // like.element_size(), dtype=like.dtype, device=DEVICE)
    found = storage.as_strided(like.shape, like.stride(), like.storage_offset())
    if 0 in like.stride():
        return moved[:1].expand(like.shape) if like.shape[0] else moved
    return found.copy_(moved)


def _of_configs(one: Function, relative: float, args: Sequence[Any], expected: judgement.Expected) -> Iterator[str]:
    """By the config that the op chooses, and by each of those that take the call."""
    op = register.find(one.name)
    assert op is not None
    packet = getattr(torch.ops.tk, one.name)
    numbers = sorted({c.config for c in candidates(op, list(args))})
    for config in (-1, *numbers):
        found = packet(*args) if config < 0 else packet(*args, config, 0)
        results = [found] if isinstance(found, Tensor) else list(found)
        yield from judgement.compare(f"{one.name}, config {config}", relative, results, expected)


def _of_gradients(one: Function, relative: float, fn: Any, args: Sequence[Any], on_cpu: Sequence[Any],
                  results: Sequence[Tensor], seed: int) -> Iterator[str]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in results if x.is_floating_point()]
    try:
        expected = judgement.expected_gradients(fn, on_cpu, grads)
    except RuntimeError:
        return  # torch has no gradient of it, as of a loss of two dtypes
    mine = judgement.gradients_of(getattr(torch.ops.tk, one.name), args, [g.to(DEVICE) for g in grads])
    yield from judgement.compare(f"gradient of {one.name}", relative, mine, expected)
