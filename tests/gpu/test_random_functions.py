"""Random functions under ``@tk.op``, built here, against torch in fp64 on random sizes and layouts.

TK_RANDOM_FUNCTIONS: how many (default 300); TK_RANDOM_FUNCTIONS_SEED: which; TK_RANDOM_FUNCTIONS_REPORT: a file for the
list of all that is wrong (default build/random_functions.json). Every core builds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import tk
from tk.generated import register

from . import random_packs
from .device import DEVICE
from .op_cases import candidates

# random_packs has put tests/codegen on the path.
from random_functions import Call, Function, calls  # isort: skip
import random_judgement as judgement  # isort: skip

COUNT = int(os.environ.get("TK_RANDOM_FUNCTIONS", "300"))
SEED = int(os.environ.get("TK_RANDOM_FUNCTIONS_SEED") or int.from_bytes(os.urandom(3), "little"))
REPORT = Path(os.environ.get("TK_RANDOM_FUNCTIONS_REPORT", "build/random_functions.json"))
CHUNK = 12
LARGE = 40_000  # of sizes, multiplied
MOST_REFUSED = 0.1


def test_random_functions(tmp_path: Path) -> None:
    if DEVICE != "cuda":
        pytest.skip("about kernels")
    pytest.importorskip("triton", reason="building needs Triton: pip install torch-tk[build]")
    print(f"TK_RANDOM_FUNCTIONS_SEED={SEED}")
    failures, built = _built(tmp_path)
    functions = {f.name: f for f in random_packs.drawn(SEED, 0, COUNT)}
    for name in built:
        one = functions[name]
        for problem in _problems(one, tmp_path):
            failures.setdefault(name, "")
            failures[name] += problem + "\n"
    report = [dict(name=name, problem=text, source=functions[name].source) for name, text in failures.items()]
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(dict(seed=SEED, count=COUNT, built=len(built), failures=report), indent=1))
    first = "\n\n".join(f"{r['problem'][-1500:]}\n{r['source']}" for r in report[:10])
    assert not report, f"{len(report)} of {COUNT} functions, all in {REPORT}; seed {SEED}. The first:\n{first}"
    assert len(built) >= (1 - MOST_REFUSED) * COUNT, f"{COUNT - len(built)} of {COUNT} refused"


def _built(folder: Path) -> tuple[dict[str, str], list[str]]:
    """(what could not be built, and why; the names of what is loaded)."""
    major, minor = torch.cuda.get_device_capability()
    script, failures, names = Path(random_packs.__file__), {}, []

    def build(first: int) -> subprocess.CompletedProcess[str]:
        arguments = [SEED, first, min(CHUNK, COUNT - first), folder, f"{major}{minor}"]
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        return subprocess.run([sys.executable, str(script), *map(str, arguments)], capture_output=True, text=True,
                              env=environment)  # fmt: skip

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = dict(zip(range(0, COUNT, CHUNK), pool.map(build, range(0, COUNT, CHUNK)), strict=True))
    for first, process in done.items():
        path = folder / f"chunk_{first}.json"
        if process.returncode or not path.exists():
            failures[random_packs.drawn(SEED, first, 1)[0].name] = f"chunk {first}: {process.stderr[-3000:]}"
            continue
        found = json.loads(path.read_text())
        failures |= found["failures"]
        names += found["built"]
        if found["built"]:
            tk.load_pack(path.with_suffix(".tkpack"))
    return failures, names


def _problems(one: Function, folder: Path) -> Iterator[str]:
    random = Random(int(one.name[2:], 16))
    fn = one.compiled(folder)
    for n, call in enumerate(calls(random, one, 4, LARGE)):
        try:
            yield from (f"{problem}\n{call}" for problem in _of_call(one, fn, call, n == 0))
        except Exception as error:  # what a legal call raises
            yield f"{type(error).__name__}: {error}\n{call}"


def _of_call(one: Function, fn: Any, call: Call, is_first: bool) -> Iterator[str]:
    args = [x.to(DEVICE) if isinstance(x, Tensor) else x for x in call.arguments(one.params)]
    args = [_with_strides(x, y) for x, y in zip(args, call.arguments(one.params), strict=True)]
    on_cpu = call.arguments(one.params)
    try:
        like, exact = judgement.results_of(fn, on_cpu), judgement.results_of(fn, judgement.widened(on_cpu))
    except (RuntimeError, IndexError, ValueError):
        return  # torch refuses these sizes
    try:
        yield from _of_configs(one, args, like, exact)
        if one.has_grad:
            yield from _of_gradients(one, fn, args, on_cpu, like, call.seed)
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


def _of_configs(one: Function, args: Sequence[Any], like: Sequence[Tensor], exact: Sequence[Tensor]) -> Iterator[str]:
    """By the config that the op chooses, and by each of those that take the call."""
    op = register.find(one.name)
    assert op is not None
    packet = getattr(torch.ops.tk, one.name)
    numbers = sorted({c.config for c in candidates(op, list(args))})
    for config in (-1, *numbers):
        found = packet(*args) if config < 0 else packet(*args, config, 0)
        results = [found] if isinstance(found, Tensor) else list(found)
        yield from judgement.compare(f"{one.name}, config {config}", one.is_coarse, results, like, exact)


def _of_gradients(one: Function, fn: Any, args: Sequence[Any], on_cpu: Sequence[Any], like: Sequence[Tensor],
                  seed: int) -> Iterator[str]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in like if x.is_floating_point()]
    mine = judgement.gradients_of(getattr(torch.ops.tk, one.name), args, [g.to(DEVICE) for g in grads])
    like = judgement.gradients_of(fn, on_cpu, grads)
    exact = judgement.gradients_of(fn, judgement.widened(on_cpu), judgement.widened(grads))
    yield from judgement.compare(f"gradient of {one.name}", one.is_coarse, mine, like, exact)
