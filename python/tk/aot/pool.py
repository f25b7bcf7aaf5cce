"""Compile many sources at once, in processes forked from this one.

Forked, not spawned: a device function is no thing to pickle, and a child begins with the compiler loaded. A child that
dies takes nothing with it but the source it was at, which is reported by name, and another takes its place.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait

from tk.aot.errors import CompileError

_fork = get_context("fork")


@dataclass(frozen=True)
class Outcome:
    """index: of the job. error: None when it went well."""

    index: int
    error: str | None


class _Worker:
    """A child, the pipe to it, and the file that takes what it writes to stderr from below Python."""

    def __init__(self, work: Callable[[int], None], scratch: str):
        self.stderr = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 (closed by stop)
        self.pipe, theirs = _fork.Pipe()
        args = (theirs, self.pipe, self.stderr.fileno(), work, scratch)
        self.process = _fork.Process(target=_serve, args=args, daemon=True)
        self.process.start()
        theirs.close()
        self.job: int | None = None

    def give(self, job: int) -> None:
        self.stderr.seek(0)
        self.stderr.truncate()
        self.pipe.send(job)
        self.job = job

    def take(self) -> Outcome:
        """The outcome of the job in hand, once the pipe is readable. A dead child's pipe reads as its end."""
        assert self.job is not None
        try:
            error = self.pipe.recv()
        except EOFError:
            self.process.join()
            error = f"the compiler's process {_how_it_ended(self.process.exitcode)}"
        if error is not None:
            self.stderr.seek(0)
            written = self.stderr.read().decode(errors="replace").strip()
            error = "\n".join(filter(None, (error.strip(), written)))
        outcome = Outcome(self.job, error)
        self.job = None
        return outcome

    def stop(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join()
        self.stderr.close()


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
    return f"ended with status {code}"


def run(work: Callable[[int], None], n_jobs: int, n_workers: int) -> Iterator[Outcome]:
    """``work(0)`` … ``work(n_jobs - 1)``, each in some child; outcomes as they come. An exception is an outcome.

    A child's temporary files go with the last of them, however it ended."""
    with tempfile.TemporaryDirectory(prefix="tk-build-") as scratch:
        yield from _run(work, n_jobs, n_workers, scratch)


def _run(work: Callable[[int], None], n_jobs: int, n_workers: int, scratch: str) -> Iterator[Outcome]:
    waiting = list(reversed(range(n_jobs)))
    workers: list[_Worker] = []
    try:
        while waiting or any(w.job is not None for w in workers):
            workers = [w for w in workers if w.process.is_alive() or w.job is not None]
            while waiting and len(workers) < n_workers:
                workers.append(_Worker(work, scratch))
                workers[-1].give(waiting.pop())
            ready = wait([w.pipe for w in workers if w.job is not None])
            for worker in [w for w in workers if w.pipe in ready]:
                yield worker.take()
                if waiting and worker.process.is_alive():
                    with contextlib.suppress(BrokenPipeError):
                        worker.give(waiting[-1])
                        waiting.pop()
    finally:
        for worker in workers:
            worker.stop()


def _serve(pipe: Connection, parents_end: Connection, stderr: int, work: Callable[[int], None], scratch: str) -> None:
    parents_end.close()
    os.dup2(stderr, 2)
    tempfile.tempdir = scratch
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(_attempt(work, pipe.recv()))


def _attempt(work: Callable[[int], None], job: int) -> str | None:
    """None, or what went wrong."""
    try:
        work(job)
        return None
    except CompileError as e:
        return str(e)
    except Exception:
        return traceback.format_exc()
    finally:
        sys.stderr.flush()


def default_jobs() -> int:
    """TK_JOBS, else the number of cores this process may use. Raises ValueError when TK_JOBS is no positive number."""
    text = os.environ.get("TK_JOBS")
    if text is None:
        return len(os.sched_getaffinity(0))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"TK_JOBS is {text!r}, it must be a positive number")
    return int(text)
