"""Functions run on several ranks: a pool of processes for each world size, one process a rank, which waits from test to
test. The ranks are one process group: gloo on the CPU, or NCCL with a GPU for each rank where there are enough GPUs.

Torch is imported once, by a server that starts the processes as forks of itself: a pool is there within a second or
two, so one that is of no more use is replaced. That is each pool of which a rank failed, died or hung, since the others
may still wait for that rank, or be a collective ahead of it.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

TIMEOUT = 60.0  # seconds that a call may take
START = 120.0  # that a pool may take to start, on a machine whose cores are taken
GRACE = 1.0  # that ranks have to come back after one has failed: they may fail as well, and say more

# What the server imports, also what a DTensor's first call does. Not tk: it may call the CUDA driver, and then no fork
# can.
PRELOAD = ["torch", "torch.distributed.tensor", "torch._dynamo", "pytest", __name__]


class RanksError(AssertionError):
    """Not every rank returned: what each of the others did."""


class World:
    """What a function is given beside its rank: the processes that run it.

    size: how many. device: this rank's, "cpu" or its GPU, which is the current one."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._meshes: dict[Any, DeviceMesh] = {}

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """A mesh of all ranks, of one dimension unless a shape is given. The same one each time: its groups are made
        once."""
        key = (shape or (self.size,), names)
        if key not in self._meshes:
            self._meshes[key] = init_device_mesh(self.device.type, key[0], mesh_dim_names=names)
        return self._meshes[key]


class Ranks:
    """Calls functions on the ranks of pools, which it starts when they are first needed."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(
        self,
        world: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = TIMEOUT,
        collectives: float | None = None,
    ) -> list[Any]:
        """What ``fn(rank, world, *args)`` returns on each rank; ``world`` is a :class:`World` there.

        Args:
            world: how many ranks.
            fn: a function of a module's top level, which each rank imports.
            args: each rank has a copy.
            timeout: seconds, after which the ranks that did not return are ended.
            collectives: seconds after which a collective that not all ranks have joined is an error on those that have.
                Such a call has processes of its own, since a group is of no use after that error. Without it, a
                collective may take as long as a call.

        Returns:
            Results by rank, their tensors on the CPU. A DTensor has no meaning here: return its local or full tensor.
            Raises RanksError, with the traceback of each rank that failed, the exit code of each that died, and the
            stack of each that hung.
        """
        if collectives is not None:
            pool = Pool(world, collectives)
            try:
                return pool.call(fn, args, timeout)
            finally:
                pool.close()
        # Back only after a call that every rank returned from.
        pool = self._pools.pop(world) if world in self._pools else Pool(world, max(TIMEOUT, timeout))
        try:
            results = pool.call(fn, args, timeout)
        except BaseException:
            pool.close()
            raise
        self._pools[world] = pool
        return results

    def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].close()


# --- This process ---


class _Rank(NamedTuple):
    process: Any
    pipe: Connection
    stack: Path  # the file for where it hangs


class Pool:
    """The processes of one world size."""

    def __init__(self, world: int, collectives: float) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        folder = Path(self._folder.name)
        self._ranks: list[_Rank] = []
        try:
            for rank in range(world):
                pipe, theirs = context.Pipe()
                stack = folder / f"stack{rank}"
                given = (rank, world, theirs, folder / "group", stack, collectives)
                process = context.Process(target=_serve, args=given, daemon=True, name=f"rank {rank} of {world}")
                process.start()
                theirs.close()  # so that the pipe ends when the process does
                self._ranks.append(_Rank(process, pipe, stack))
            self._collect("the start of the process group", START)
        except BaseException:
            self.close()
            raise

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        call = pickle.dumps((fn, args))
        path = pickle.dumps(list(sys.path))  # tests are found in folders that pytest adds
        for rank in self._ranks:
            try:
                rank.pipe.send_bytes(path)
                rank.pipe.send_bytes(call)
            except OSError:
                pass  # it died since the last call, which _collect reports
        return self._collect(f"{fn.__module__}.{fn.__qualname__}", timeout)

    def _collect(self, what: str, timeout: float) -> list[Any]:
        """The result of each rank; an error where one has none."""
        end = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting: dict[Any, int] = {rank.pipe: i for i, rank in enumerate(self._ranks)}
        while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
            pipe: Any
            for pipe in ready:
                i = waiting.pop(pipe)
                try:
                    is_good, result = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    process = self._ranks[i].process
                    process.join(GRACE)
                    failures[i] = f"died, exit code {process.exitcode}"
                    continue
                if is_good:
                    results[i] = result
                else:
                    failures[i] = f"failed:\n{result}"
            if failures:
                end = min(end, time.monotonic() + GRACE)
        if not waiting and not failures:
            return [results[i] for i in range(len(self._ranks))]
        raise RanksError(self._told(what, timeout, results, failures, sorted(waiting.values())))

    def _told(self, what: str, timeout: float, results: Any, failures: dict[int, str], hung: list[int]) -> str:
        world = len(self._ranks)
        lines = [f"rank {i} of {world} {failure}" for i, failure in sorted(failures.items())]
        if hung:
            when = "after another had failed" if failures else f"within {timeout:g} s"
            lines.append(f"{_named(hung)} of {world} did not come back {when}; {_named(sorted(results))} returned")
            lines += [f"rank {i} was at\n{stack}" for i, stack in self._stacks(hung)]
        return "\n".join([what, *lines])

    def _stacks(self, hung: list[int]) -> list[tuple[int, str]]:
        for i in hung:
            os.kill(self._ranks[i].process.pid, signal.SIGUSR1)
        time.sleep(0.3)  # until they have written
        return [(i, self._ranks[i].stack.read_text()) for i in hung]

    def close(self) -> None:
        """At once: to leave a group in good order takes all its ranks, and one may hang."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.pipe.close()
        self._folder.cleanup()


def _named(ranks: list[int]) -> str:
    if not ranks:
        return "no rank"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


# --- A rank ---


def _serve(rank: int, size: int, pipe: Connection, group: Path, stack: Path, collectives: float) -> None:
    with stack.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)
        try:
            world = _joined(rank, size, group, collectives)
        except BaseException:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
            return
        pipe.send_bytes(pickle.dumps((True, None)))
        while True:
            try:
                sys.path[:] = pickle.loads(pipe.recv_bytes())
                call = pipe.recv_bytes()
            except EOFError:  # the test session has ended
                os._exit(0)
            pipe.send_bytes(_answer(rank, world, call))


def _joined(rank: int, size: int, group: Path, collectives: float) -> World:
    torch.set_num_threads(1)  # ranks share the cores
    has_gpus = torch.cuda.device_count() >= size
    device = torch.device("cuda", rank) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if has_gpus else "gloo",
        init_method=group.as_uri(),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=collectives),
        device_id=device if has_gpus else None,
    )
    return World(rank, size, device)


def _answer(rank: int, world: World, call: bytes) -> bytes:
    try:
        fn, args = pickle.loads(call)
        return pickle.dumps((True, tree_map(_for_the_test, fn(rank, world, *args))))
    except BaseException:  # pytest's failures are no Exceptions
        return pickle.dumps((False, traceback.format_exc()))


def _for_the_test(x: Any) -> Any:
    if isinstance(x, DTensor):
        raise TypeError("a rank returned a DTensor: return x.to_local() or x.full_tensor()")
    return x.detach().cpu() if isinstance(x, torch.Tensor) else x
