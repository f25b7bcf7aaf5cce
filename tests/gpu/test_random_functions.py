"""Random functions under ``@tk.op``, built here, against torch in fp64 on random sizes and layouts.

TK_RANDOM_FUNCTIONS: how many at most (default 300); TK_RANDOM_FUNCTIONS_SECONDS: how long to build (default 150; those
that are built by then are judged, for as long again at most); TK_RANDOM_FUNCTIONS_SEED: which;
TK_RANDOM_FUNCTIONS_REPORT: a file with a line of JSON for each function, written as they are judged (default
build/random_functions.jsonl). Every core builds, in processes that stay until the time is over. Two more for each GPU
judge, so that a function which ends the CUDA context, or never ends, costs itself alone: another takes its place.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
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
from .device import DEVICE, environment
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
PATIENCE = 120.0  # seconds for a function: a kernel that waits for another may wait for ever
MOST_LOADED = 200  # packs of a process, which can hold 512 ops, those of gradients included
ENDED = "ended the CUDA context"


def test_random_functions(tmp_path: Path) -> None:
    if DEVICE != "cuda" and not ARCH:
        pytest.skip("about kernels")
    pytest.importorskip("triton", reason="building needs Triton: pip install torch-tk[build]")
    print(f"TK_RANDOM_FUNCTIONS_SEED={SEED}")
    told, wrong, end = Counter[str](), [], time.time() + SECONDS
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    with REPORT.open("w") as report:
        for line in _judged(tmp_path, end):
            report.write(json.dumps(line) + "\n")
            report.flush()
            told[line["verdict"]] += 1
            if line["verdict"] == "wrong":
                wrong.append(line)
    first = "\n\n".join(f"{w['problem'][-1500:]}\n{w['source']}" for w in wrong[:10])
    assert not wrong, f"{dict(told)} of {COUNT} functions, all in {REPORT}; seed {SEED}. The first:\n{first}"
    assert told, f"no function was built in {SECONDS:g} s"
    assert told["refused"] <= max(MOST_REFUSED * told.total(), 3), f"{dict(told)} of {COUNT} functions"


Line = dict[str, Any]


def _judged(folder: Path, end: float) -> Iterator[Line]:
    """What is built while other processes build on; for each function a verdict: right, wrong, refused, not judged."""
    judges = [Judge(folder, n // 2) for n in range(2 * torch.cuda.device_count())]
    free: queue.SimpleQueue[Judge] = queue.SimpleQueue()
    for judge in judges:
        free.put(judge)

    def judged(found: Line, name: str) -> Line:
        number, one = _function(found, name)
        line: Line = dict(verdict="right", name=name, number=number, problem="", source=one.source)
        if name in found["failures"]:
            return line | dict(verdict="wrong", problem=found["failures"][name])
        if name not in found["built"]:
            return line | dict(verdict="refused")
        if ARCH or time.time() > end + SECONDS:
            return line | dict(verdict="not judged")
        judge = free.get()
        try:
            problem = judge.problems(number, found["pack"])
        finally:
            free.put(judge)
        return line | (dict(verdict="wrong", problem=problem) if problem else {})

    waiting: list[Future[Line]] = []
    with ThreadPoolExecutor(max(len(judges), 1)) as threads:
        try:
            for found in _built(folder, end):
                waiting += [threads.submit(judged, found, name) for name in found["names"]]
                while waiting and waiting[0].done():
                    yield waiting.pop(0).result()
            yield from (one.result() for one in waiting)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for judge in judges:
                judge.stop()


class Judge:
    """A process that runs functions on a GPU, one after another, and is started anew where one of them has ended it."""

    def __init__(self, folder: Path, gpu: int):
        self.folder, self.gpu = folder, gpu
        self.process: Any = None
        self.judged = 0
        self.connection: Connection | None = None

    def problems(self, number: int, pack: Path) -> str:
        """What is wrong with a function of a pack."""
        if self.judged == MOST_LOADED:
            self.stop()
        if self.connection is None:
            self.judged = 0
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=_judge_all, args=(theirs, SEED, self.folder, self.gpu), daemon=True)
            self.process.start()
            theirs.close()
        try:
            self.judged += 1
            self.connection.send((number, pack))
            problem = str(self.connection.recv()) if self.connection.poll(PATIENCE) else f"took {PATIENCE:g} s"
            is_over = ENDED in problem or problem.startswith("took")
        except (EOFError, OSError):
            self.process.join()
            problem, is_over = f"ended its process, with code {self.process.exitcode}", True
        if is_over:
            self.stop()
        return problem

    def stop(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.process.kill()
            self.process.join()
            self.connection = None


def _judge_all(requests: Connection, seed: int, folder: Path, gpu: int) -> None:
    """In a process of its own: answers (number, pack) with what is wrong."""
    torch.set_num_threads(2)
    torch.cuda.set_device(gpu)
    while True:
        try:
            number, pack = requests.recv()
        except EOFError:
            return
        try:
            tk.load_pack(pack)
            found = "\n".join(_problems(random_packs.drawn(seed, number, 1)[0], folder))
        except Exception:
            found = f"not judged: {traceback.format_exc()}"
        requests.send(found)


def _function(found: Line, name: str) -> tuple[int, Function]:
    number = found["first"] + found["names"].index(name)
    return number, random_packs.drawn(SEED, number, 1)[0]


def _built(folder: Path, end: float) -> Iterator[Line]:
    """The chunks of functions, as processes on all cores have built them."""
    workers = min(os.cpu_count() or 1, -(-COUNT // random_packs.CHUNK))
    logs = [(folder / f"worker_{n}.log").open("w+") for n in range(workers)]
    processes = [_worker(n, workers, folder, end, logs[n]) for n in range(workers)]
    seen: set[Path] = set()
    try:
        is_last = False
        while not is_last:
            # A chunk that is begun in time may take some more.
            is_last = all(p.poll() is not None for p in processes) or time.time() > end + 30
            for path in sorted(set(folder.glob("chunk_*.json")) - seen):
                seen.add(path)
                yield _read(path)
            time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    died = [n for n, p in enumerate(processes) if p.returncode not in (0, -9)]
    said = "".join(Path(logs[n].name).read_text()[-3000:] for n in died[:3])
    assert not died, f"{len(died)} of {workers} processes that build ended early:\n{said}"


def _worker(number: int, workers: int, folder: Path, end: float, log: Any) -> subprocess.Popen[bytes]:
    arguments = [SEED, COUNT, workers, number, folder, _arch(), end]
    command = [sys.executable, random_packs.__file__, *map(str, arguments)]
    return subprocess.Popen(command, stdout=log, stderr=log, env={**environment(), "OMP_NUM_THREADS": "1"})


def _arch() -> str:
    return ARCH or "".join(map(str, torch.cuda.get_device_capability()))


def _read(path: Path) -> Line:
    found: Line = json.loads(path.read_text())
    return found | dict(first=int(path.stem.removeprefix("chunk_")), pack=path.with_suffix(".tkpack"))


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
        like, exact = judgement.results_of(fn, on_cpu), judgement.exact_results_of(fn, on_cpu)
    except (RuntimeError, IndexError, ValueError):
        return  # torch refuses these sizes
    relative = judgement.tolerance(fn, on_cpu)
    try:
        yield from _of_configs(one, relative, args, like, exact)
        if one.has_grad:
            yield from _of_gradients(one, relative, fn, args, on_cpu, like, call.seed)
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


def _of_configs(one: Function, relative: float, args: Sequence[Any], like: Sequence[Tensor],
                exact: Sequence[Tensor]) -> Iterator[str]:  # fmt: skip
    """By the config that the op chooses, and by each of those that take the call."""
    op = register.find(one.name)
    assert op is not None
    packet = getattr(torch.ops.tk, one.name)
    numbers = sorted({c.config for c in candidates(op, list(args))})
    for config in (-1, *numbers):
        found = packet(*args) if config < 0 else packet(*args, config, 0)
        results = [found] if isinstance(found, Tensor) else list(found)
        yield from judgement.compare(f"{one.name}, config {config}", relative, results, like, exact)


def _of_gradients(one: Function, relative: float, fn: Any, args: Sequence[Any], on_cpu: Sequence[Any],
                  like: Sequence[Tensor], seed: int) -> Iterator[str]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in like if x.is_floating_point()]
    try:
        like = judgement.gradients_of(fn, on_cpu, grads)
        exact = judgement.exact_gradients_of(fn, on_cpu, grads)
    except RuntimeError:
        return  # torch has no gradient of it, as of a loss of two dtypes
    mine = judgement.gradients_of(getattr(torch.ops.tk, one.name), args, [g.to(DEVICE) for g in grads])
    yield from judgement.compare(f"gradient of {one.name}", relative, mine, like, exact)
