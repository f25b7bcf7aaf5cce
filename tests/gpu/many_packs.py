"""Things drawn at random, each built into a pack of its own by processes on every core, and judged on a GPU while
others are still built.

A script that is started as ``SCRIPT SEED COUNT WORKERS WORKER FOLDER ARCH END`` builds every WORKERS-th thing from the
WORKER-th on, until COUNT or the time END (of time.time). What it built of number N it writes to FOLDER/chunk_N.tkpack,
and what it has to say of it to FOLDER/chunk_N.json, whole and last: names, built and failures by name.

Two processes judge for each GPU, so that what ends the CUDA context, or never ends, costs itself alone: another takes
its place.
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
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from .device import environment

PATIENCE = 120.0  # seconds for one: a kernel that waits for another may wait for ever
MOST_LOADED = 200  # packs of a process, which can hold 512 ops, those of gradients included
ENDED = "ended the CUDA context"
REFUSED = "refused: "  # how a judge says that a call is none that tk takes
Line = dict[str, Any]


@dataclass(frozen=True)
class Many:
    """what: their name in messages. script: builds them. source: of one, by its number. judge: what is wrong with one,
    by seed, number, its pack and a folder; in a process of its own, so that it is a module's function. seconds: to
    build, and as many more to judge. arch: to build without a GPU, and judge nothing. most_refused: a share of all."""

    what: str
    count: int
    seed: int
    seconds: float
    script: str
    source: Callable[[int], str]
    judge: Callable[[int, int, Path, Path], str]
    most_refused: float
    arch: str | None = None

    def check(self, folder: Path, report: Path) -> None:
        """Raises AssertionError with the first that are wrong. A line of JSON for each goes to `report`."""
        told, wrong = Counter[str](), []
        report.parent.mkdir(parents=True, exist_ok=True)
        with report.open("w") as file:
            for line in self._judged(folder, time.time() + self.seconds):
                file.write(json.dumps(line) + "\n")
                file.flush()
                told[line["verdict"]] += 1
                if line["verdict"] == "wrong":
                    wrong.append(line)
        first = "\n\n".join(f"{w['problem'][-1500:]}\n{w['source']}" for w in wrong[:10])
        counts = f"{dict(told)} of {self.count} {self.what}, all in {report}; seed {self.seed}"
        assert not wrong, f"{counts}. The first:\n{first}"
        assert told, f"none of the {self.what} was built in {self.seconds:g} s"
        most = max(self.most_refused * told.total(), 3)
        assert told["refused"] <= most, counts

    def _judged(self, folder: Path, end: float) -> Iterator[Line]:
        """What is built while other processes build on; for each a verdict: right, wrong, refused, not judged."""
        judges = [Judge(self, folder, n // 2) for n in range(2 * torch.cuda.device_count())]
        free: queue.SimpleQueue[Judge] = queue.SimpleQueue()
        for judge in judges:
            free.put(judge)

        def judged(found: Line, name: str) -> Line:
            number = found["first"] + found["names"].index(name)
            line: Line = dict(verdict="right", name=name, number=number, problem="", source=self.source(number))
            if name in found["failures"]:
                return line | dict(verdict="wrong", problem=found["failures"][name])
            if name not in found["built"]:
                return line | dict(verdict="refused")
            if self.arch or time.time() > end + self.seconds:
                return line | dict(verdict="not judged")
            judge = free.get()
            try:
                problem = judge.problems(number, found["pack"])
            finally:
                free.put(judge)
            verdict = "refused" if problem.startswith(REFUSED) else "wrong" if problem else "right"
            return line | dict(verdict=verdict, problem=problem)

        waiting: list[Future[Line]] = []
        with ThreadPoolExecutor(max(len(judges), 1)) as threads:
            try:
                for found in self._built(folder, end):
                    waiting += [threads.submit(judged, found, name) for name in found["names"]]
                    while waiting and waiting[0].done():
                        yield waiting.pop(0).result()
                yield from (one.result() for one in waiting)
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
                for judge in judges:
                    judge.stop()

    def _built(self, folder: Path, end: float) -> Iterator[Line]:
        """What the scripts say, as processes on all cores have built it."""
        workers = min(os.cpu_count() or 1, self.count)
        logs = [(folder / f"worker_{n}.log").open("w+") for n in range(workers)]
        processes = [self._worker(n, workers, folder, end, logs[n]) for n in range(workers)]
        seen: set[Path] = set()
        try:
            is_last = False
            while not is_last:
                # One that is begun in time may take some more.
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

    def _worker(self, number: int, workers: int, folder: Path, end: float, log: Any) -> subprocess.Popen[bytes]:
        arch = self.arch or "".join(map(str, torch.cuda.get_device_capability()))
        arguments = [self.seed, self.count, workers, number, folder, arch, end]
        command = [sys.executable, self.script, *map(str, arguments)]
        return subprocess.Popen(command, stdout=log, stderr=log, env={**environment(), "OMP_NUM_THREADS": "1"})


class Judge:
    """A process that judges on a GPU, one after another, and is started anew where one of them has ended it."""

    def __init__(self, many: Many, folder: Path, gpu: int):
        self.many, self.folder, self.gpu = many, folder, gpu
        self.process: Any = None
        self.judged = 0
        self.connection: Connection | None = None

    def problems(self, number: int, pack: Path) -> str:
        """What is wrong with one, of a pack."""
        if self.judged == MOST_LOADED:
            self.stop()
        if self.connection is None:
            self.judged = 0
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            arguments = (theirs, self.many.judge, self.many.seed, self.folder, self.gpu)
            self.process = context.Process(target=_judge_all, args=arguments, daemon=True)
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


def _judge_all(requests: Connection, judge: Callable[[int, int, Path, Path], str], seed: int, folder: Path,
               gpu: int) -> None:  # fmt: skip
    """In a process of its own: answers (number, pack) with what is wrong."""
    torch.set_num_threads(2)
    torch.cuda.set_device(gpu)
    while True:
        try:
            number, pack = requests.recv()
        except EOFError:
            return
        try:
            found = judge(seed, number, pack, folder)
        except torch.AcceleratorError:  # nothing runs after it
            found = f"{ENDED}: {traceback.format_exc()}"
        except Exception:
            found = f"not judged: {traceback.format_exc()}"
        requests.send(found)


def _read(path: Path) -> Line:
    found: Line = json.loads(path.read_text())
    return found | dict(first=int(path.stem.removeprefix("chunk_")), pack=path.with_suffix(".tkpack"))
