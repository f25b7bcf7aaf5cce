"""The pool: every job has an outcome, whatever becomes of its process."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time

import pytest

from tk.aot.errors import CompileError
from tk.aot.pool import default_jobs, run


def outcomes(work, n_jobs, n_workers):
    return {o.index: o.error for o in run(work, n_jobs, n_workers)}


def test_every_job_is_done_once_and_results_stay_apart(tmp_path):
    def work(index):
        with open(tmp_path / str(index), "x") as f:
            f.write(str(os.getpid()))

    assert outcomes(work, 20, 3) == dict.fromkeys(range(20))
    pids = [(tmp_path / str(i)).read_text() for i in range(20)]
    assert 1 <= len(set(pids)) <= 3
    assert str(os.getpid()) not in pids


def test_failures_are_told_with_what_was_written_below_python():
    def work(index):
        if index == 1:
            os.write(2, b"LLVM says no\n")
            raise CompileError("cannot compile")
        if index == 2:
            raise ZeroDivisionError("oops")

    got = outcomes(work, 4, 2)
    assert got[0] is None
    assert got[3] is None
    assert got[1] == "cannot compile\nLLVM says no"
    assert got[2].startswith("Traceback")
    assert got[2].endswith("ZeroDivisionError: oops")


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was killed by SIGSEGV"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"was killed by SIGKILL \(out of memory\?\)"),
        (lambda: os._exit(3), "ended with status 3"),
    ],
)
def test_a_dead_process_is_charged_to_its_job_alone(end, message):
    def work(index):
        if index in (1, 4):
            faulthandler.disable()  # pytest's, which would tell of the crash as if it were ours
            os.write(2, b"UNREACHABLE executed")
            end()

    got = outcomes(work, 6, 2)
    assert [i for i in range(6) if got[i] is None] == [0, 2, 3, 5]
    for i in (1, 4):
        assert re.fullmatch(f"the compiler's process {message}\nUNREACHABLE executed", got[i])


def test_temporary_files_of_a_killed_process_are_removed(tmp_path):
    import tempfile

    def work(index):
        _, name = tempfile.mkstemp()
        (tmp_path / "name").write_text(name)
        os._exit(1)

    outcomes(work, 1, 1)
    name = (tmp_path / "name").read_text()
    assert "tk-build-" in name
    assert not os.path.exists(name)


def test_leaving_early_ends_the_children(tmp_path):
    def work(index):
        begun = tmp_path / f"{index}.{os.getpid()}"  # one step, for it may be killed between two
        begun.touch()
        if index:
            time.sleep(60)

    jobs = run(work, 4, 2)
    assert next(jobs).index == 0
    jobs.close()
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.suffix[1:]), 0)


def test_the_number_of_jobs(monkeypatch):
    monkeypatch.setenv("TK_JOBS", "7")
    assert default_jobs() == 7
    monkeypatch.delenv("TK_JOBS")
    assert default_jobs() == len(os.sched_getaffinity(0))
    for text in ("0", "-1", "many"):
        monkeypatch.setenv("TK_JOBS", text)
        with pytest.raises(ValueError, match=f"TK_JOBS is '{text}'"):
            default_jobs()
