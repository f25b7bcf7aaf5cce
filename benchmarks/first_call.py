"""The first call of a product in a fresh process: what a module load, a library's set-up or a compiler costs.

Each process imports what it needs, brings the GPU's context up, makes its inputs and says that it is ready; when all of
a round are, one after the other makes its call, alone on the machine. Caches of Triton and of torch.compile lie in a
folder of the process's own, so they are empty.

    python -m benchmarks.first_call NAME --ready FILE    # one such process; NAME as in benchmarks/peers.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIZE = 256  # M, N and K


# --- One process ---


def main(argv: Sequence[str] | None = None) -> int:
    """Prints {"ms": of the call}."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--ready", type=Path, required=True, help="a file that appears when the call can begin")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)

    import torch

    from benchmarks import peers
    from benchmarks.products import Product

    way = next(w for w in peers.WAYS if w.name == args.name)
    inputs = peers.Inputs.random(Product(SIZE, SIZE, SIZE), args.device)
    with torch.inference_mode():
        call = way.make(inputs)
        synchronize = torch.cuda.synchronize if args.device == "cuda" else lambda: None
        synchronize()
        args.ready.touch()
        sys.stdin.readline()
        begin = time.perf_counter()
        result = call()
        synchronize()
        ms = 1e3 * (time.perf_counter() - begin)
        peers.check(way, inputs, result)
    print(json.dumps({"ms": ms}), flush=True)
    return 0


# --- All of them ---


class Failed(Exception):
    """A process that gave no time, and why."""


class OutOfTime(Failed):
    """It was still at work when the time for all was over."""


@dataclass
class Found:
    """ms of each round; error: why there are not more."""

    ms: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def median(self) -> float:
        return statistics.median_low(self.ms)


class _Process:
    """One first call, in a process group and with a temporary folder of its own."""

    def __init__(self, name: str, device: str):
        self._folder = tempfile.TemporaryDirectory(prefix="first_call_", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        self._ready, self._errors = folder / "ready", folder / "stderr"
        caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        command = [sys.executable, "-m", "benchmarks.first_call", name, "--ready", str(self._ready), "--device", device]
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | caches, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, text=True, start_new_session=True,
            )  # fmt: skip

    def wait_until_ready(self, deadline: float) -> None:
        """Or until it has ended, which `call` tells."""
        while not self._ready.exists() and self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def call(self, deadline: float) -> float:
        """Milliseconds. Raises Failed."""
        if not self._ready.exists() and self._process.poll() is None:
            raise OutOfTime("it was not ready when the time for first calls was over")
        try:
            out, _ = self._process.communicate("go\n", timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise OutOfTime("its call had not ended when the time for first calls was over") from None
        if self._process.returncode:
            raise Failed(f"exit code {self._process.returncode}: {self._errors.read_text().strip()[-400:]}")
        return json.loads(out.splitlines()[-1])["ms"]

    def end(self) -> None:
        """With all that it started: compilers' workers stay otherwise."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._folder.cleanup()


def measure(names: Sequence[str], *, rounds: int, seconds: float, device: str = "cuda") -> dict[str, Found]:
    """First calls of each, in rounds, so that a machine that changes meets all alike. Each round begins with another,
    since the later calls of a round are a little faster.

    It ends after `seconds`: no round is begun that would take longer, going by the one before. Whoever failed is not
    tried again; whoever ran out of time in a later round keeps what it has."""
    found = {name: Found() for name in names}
    begin = time.monotonic()
    round_begin, longest = begin, 0.0
    for i in range(rounds):
        first = i % len(names)
        left = [name for name in (*names[first:], *names[:first]) if not found[name].error]
        if round_begin + longest > begin + seconds or not left:
            break
        _round({name: found[name] for name in left}, begin + seconds, device)
        now = time.monotonic()
        longest, round_begin = max(longest, now - round_begin), now
    return found


def _round(found: dict[str, Found], deadline: float, device: str) -> None:
    processes: dict[str, _Process] = {}
    try:
        for name in found:
            processes[name] = _Process(name, device)
        for process in processes.values():
            process.wait_until_ready(deadline)
        for name, process in processes.items():
            _call(process, found[name], deadline)
            process.end()
    finally:
        for process in processes.values():
            process.end()


def _call(process: _Process, found: Found, deadline: float) -> None:
    try:
        found.ms.append(process.call(deadline))
    except OutOfTime as error:
        found.error = "" if found.ms else str(error)
    except Failed as error:
        found.error = str(error)


if __name__ == "__main__":
    sys.exit(main())
